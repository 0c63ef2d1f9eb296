"""How two ends come to trust each other before the first request.

Over TCP both prove, by an HMAC-SHA256 over two random numbers, that they know one secret; the
client does so first, so that a stranger who connects learns nothing. The keys that protect the
frames after that come from the secret and both numbers, one a direction: what was recorded in one
connection is worth nothing in another, nor in the other direction. Over a Unix socket the kernel
says who the other end is: it must be our own user.
"""

from __future__ import annotations

import hmac
import secrets
import time

from ckptd.errors import StoreError, TransientStoreError, UsageError
from ckptd.store.base import Capabilities
from ckptd.store.net.messages import VERSION, Challenge, Promise, Proof, Refused, Welcome
from ckptd.store.net.wire import Wire, decoder

__all__ = ["check_secret", "greet_client", "greet_server", "new_secret"]

_NONCE_BYTES = 32
_LEAST_SECRET_BYTES = 16
_MOST_STRANGE_BYTES = 1024
"""Largest message from a peer that has not proved itself."""
_CHALLENGE = decoder(Challenge)
_PROOF = decoder(Proof)
_WELCOME = decoder(Welcome | Refused)
_PROMISE = decoder(Promise)


def new_secret() -> str:
    """Return a fresh secret, as hexadecimal digits."""
    return secrets.token_hex(32)


def check_secret(text: str | None, where: str) -> bytes:
    """Return the secret that `text` spells in hexadecimal; `UsageError` when it is none."""
    try:
        secret = bytes.fromhex(text or "")
    except ValueError:
        secret = b""
    if len(secret) < _LEAST_SECRET_BYTES:
        raise UsageError(
            "a server on the network needs a secret",
            kind="bad-option",
            where=where,
            wanted=f"secret: at least {2 * _LEAST_SECRET_BYTES} hexadecimal digits, random",
        )
    return secret


def _mac(secret: bytes, label: str, server: bytes, client: bytes) -> bytes:
    if not secret:
        return b""  # a Unix socket: nothing to prove, no keys
    return hmac.digest(secret, b"|".join([b"ckptd", label.encode(), server, client]), "sha256")


def greet_client(
    wire: Wire, secret: bytes, promised: Capabilities, *, room: bool, wait_s: float
) -> bool:
    """Let a client prove itself; return whether it is let in. `secret` is empty on Unix sockets."""
    server = secrets.token_bytes(_NONCE_BYTES)
    wire.send(Challenge(VERSION, server))
    proof, _ = wire.receive(_PROOF, wait_s, most_body=_MOST_STRANGE_BYTES)
    client = proof.nonce
    fits = len(client) == _NONCE_BYTES
    if not fits or not hmac.compare_digest(proof.mac, _mac(secret, "client", server, client)):
        wire.send(Refused("secret"))
        return False
    if not room:
        wire.send(Refused("busy"))
        return False
    wire.send(Welcome(_mac(secret, "server", server, client)))
    wire.use_keys(
        send=_mac(secret, "to client", server, client),
        receive=_mac(secret, "to server", server, client),
    )
    wire.send(Promise(promised))
    return True


def greet_server(wire: Wire, secret: bytes, wait_s: float) -> Capabilities:
    """Prove ourselves to a server and let it prove itself; return what its store promises.

    Raises
    ------
    StoreError
        Kind ``permission``: the secrets differ. Kind ``link-version``: it speaks another protocol.
    TransientStoreError
        Kind ``link-busy``: it has no room. Kinds of `Wire`.
    """
    end = time.monotonic() + wait_s
    challenge, _ = wire.receive(_CHALLENGE, wait_s, most_body=_MOST_STRANGE_BYTES)
    if challenge.version != VERSION:
        raise StoreError(
            "the server speaks another version of the protocol",
            kind="link-version",
            where=wire.peer,
            wanted=VERSION,
            found=challenge.version,
        )
    if len(challenge.nonce) != _NONCE_BYTES:
        raise wire.fail("not a store server's greeting", kind="link-protocol")
    server, client = challenge.nonce, secrets.token_bytes(_NONCE_BYTES)
    wire.send(Proof(client, _mac(secret, "client", server, client)))
    answer, _ = wire.receive(_WELCOME, end - time.monotonic(), most_body=_MOST_STRANGE_BYTES)
    if isinstance(answer, Refused) and answer.reason == "busy":
        raise TransientStoreError("the server has no room", kind="link-busy", where=wire.peer)
    expected = _mac(secret, "server", server, client)
    if isinstance(answer, Refused) or not hmac.compare_digest(answer.mac, expected):
        raise StoreError(
            "the server and this client have different secrets", kind="permission", where=wire.peer
        )
    wire.use_keys(
        send=_mac(secret, "to server", server, client),
        receive=_mac(secret, "to client", server, client),
    )
    promise, _ = wire.receive(_PROMISE, end - time.monotonic(), most_body=_MOST_STRANGE_BYTES)
    capabilities: Capabilities = promise.capabilities
    return capabilities
