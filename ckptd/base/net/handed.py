"""Proofs that a launcher hands to its node's processes, which do not get the job's secret.

In it: variables that ranks do not inherit; how long the answer is awaited.

A process asks over the launcher's Unix socket, where the kernel says which user it runs as. It gets
a leaf of role ``rank`` or ``worker``, and the key that ranks have in common, for torch's store and
the memory of their nodes. Neither opens a door through which somebody is given an order. Both stay
in memory: no environment, command line or file has them. A leaf is renewed by asking again.

Where no launcher of ckptd started a process, its environment has the secret, and it issues its own.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from ckptd.base.net.signing import SECRET_VARIABLE, derived_key, given_secret
from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.launched import LAUNCHER_VARIABLE
from ckptd.errors import ProcessError

KEPT_FROM_RANKS = (
    SECRET_VARIABLE,
    "CKPTD_WEBHOOK_SECRET",
)
"""Variables that no launcher passes on to its ranks."""
_ANSWER_S = 30.0


class AskProof(msgspec.Struct, frozen=True, tag=True):
    """A process of the node wants what ranks have in common, and a leaf unless `role` is empty."""

    role: Literal["", "rank", "worker"] = ""


class HandedProof(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskProof`; all is empty where the launcher was given no secret.

    Attributes
    ----------
    key
        Of the ranks, see `ranks_key`.
    authority, leaf
        Certificates in PEM, the leaf with its key.
    until
        When to ask for the next leaf, in seconds since the epoch.
    """

    key: bytes = b""
    authority: bytes = b""
    leaf: bytes = b""
    until: float = 0.0


class FromLauncher(msgspec.Struct, frozen=True):
    """Proves a process by the leaf that its launcher hands it, in place of the secret."""


class FromFiles(msgspec.Struct, frozen=True):
    """Proves a process by files; see `ckptd.base.net.certificates`."""


Proof = bytes | FromLauncher
"""The secret of an authority, or what a process is handed: by this it proves itself."""


def asked_of_launcher(role: Literal["", "rank", "worker"] = "") -> HandedProof:
    """Return what this process's launcher hands it; empty where it has none.

    Raises
    ------
    ProcessError
        The launcher does not answer.
    """
    path = os.environ.get(LAUNCHER_VARIABLE)
    if not path:
        return HandedProof()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_ANSWER_S)  # a launcher that hangs takes no connection
        sock.connect(path)
        sock.settimeout(None)
        channel = SocketChannel(sock, HandedProof)
        try:
            channel.send(AskProof(role))
            item = channel.receive(_ANSWER_S)
        finally:
            channel.close()
        if item is None:
            raise TimeoutError(f"no answer within {_ANSWER_S:.0f} s")
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ProcessError(
            "the launcher does not hand this process what it proves itself by",
            where=path,
            found=str(error),
        ) from error
    finally:
        sock.close()
    answer: HandedProof = item[0]
    return answer


def ranks_key() -> bytes | None:
    """Return the key that the ranks of the job have in common; None where the job has no secret.

    It follows from the secret and does not tell it, and no door where orders are given knows it.

    Raises
    ------
    UsageError
        As of `ckptd.base.net.signing.given_secret`.
    ProcessError
        The launcher does not answer.
    """
    secret = given_secret()
    return asked_of_launcher().key or None if secret is None else key_of_ranks(secret)


def given_proof() -> Proof | None:
    """Return what this process proves itself by; None where the job has no secret.

    Raises
    ------
    UsageError
        As of `ckptd.base.net.signing.given_secret`.
    ProcessError
        The launcher does not answer.
    """
    secret = given_secret()
    if secret is not None:
        return secret
    return FromLauncher() if asked_of_launcher().key else None


def key_of_ranks(secret: bytes) -> bytes:
    """Return what follows for ranks from the job's secret."""
    return derived_key(secret, "ranks")
