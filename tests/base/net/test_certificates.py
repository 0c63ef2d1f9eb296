"""Certificates from files, as cert-manager and SPIFFE's helpers write them, at a real door."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.net import tls
from ckptd.base.net.certificates import REREAD_S, VARIABLES, certified
from ckptd.base.net.connection import (
    _ANSWER,
    VERSION,
    Connection,
    Hello,
    Refusal,
    greet_server,
)
from ckptd.base.net.door import Door
from ckptd.base.net.handed import AskProof
from ckptd.base.net.roles import Certified, Role
from ckptd.base.net.tls import Identity, hand
from ckptd.errors import CkptdError, StoreError, UsageError
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer, new_secret
from tests.authority import Authority, files
from tests.processes import PATIENCE_S

__all__ = ["files"]

SECRET = b"a secret of no digits, but long"
AGENT = "spiffe://example.org/ns/train/ckptd/agent/n1"


@contextmanager
def probed() -> Iterator[tuple[str, int]]:
    """A door at which agents answer agents."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    limits: dict[str, Any] = {"clients": 9, "greeting_s": PATIENCE_S, "send_s": PATIENCE_S}
    try:
        door = Door(listener, lambda: SECRET, "probe", lambda _: None, name="tests", **limits)
    except CkptdError:
        listener.close()
        raise
    try:
        yield address
    finally:
        assert door.close(PATIENCE_S) is None


def greet(address: tuple[str, int], role: Role = "agent") -> Certified | None:
    wire = Connection(socket.create_connection(address, PATIENCE_S), "server", PATIENCE_S)
    try:
        greet_server(wire, SECRET, "probe", role=role, wait_s=PATIENCE_S)
        return wire.proved
    finally:
        wire.release()


def answered(address: tuple[str, int]) -> object:
    """Return what a server says to a client that has read its files again, and it has not."""
    wire = Connection(socket.create_connection(address, PATIENCE_S), "server", PATIENCE_S)
    try:
        wire.shake(Identity(tls.FromFiles(), "agent", ""), PATIENCE_S)
        wire.send(Hello(VERSION, "probe", {}))
        return wire.receive(_ANSWER, PATIENCE_S)[0]
    finally:
        wire.release()


def test_files_prove_both_ends_and_say_their_roles(files: Path) -> None:
    authority = Authority()
    authority.put(files / "agent", AGENT)
    authority.put(files / "operator", "spiffe://example.org/ckptd/operator/me")
    with probed() as address:
        assert greet(address) == Certified("agent", "n1")
        with pytest.raises(StoreError, match="refuses") as caught:
            greet(address, "operator")
        assert "a certificate of role operator opens nothing here" in str(caught.value)
        wire = Connection(socket.create_connection(address, PATIENCE_S), "server", PATIENCE_S)
        with pytest.raises(StoreError, match="different secrets") as caught:
            wire.shake(tls.identity(SECRET, "agent"), PATIENCE_S)  # the secret alone opens nothing
        assert caught.value.kind == "permission"
        wire.release()


@pytest.mark.parametrize(
    "uris",
    [
        (AGENT, "spiffe://example.org/ckptd/controller/n1"),
        ("spiffe://example.org/ns/train/sa/agent",),
        ("spiffe://example.org/ckptd/agent/n1/more",),
        ("spiffe://example.org?/ckptd/agent/n1",),
        (),
    ],
)
def test_a_certificate_of_no_role_or_of_two_opens_nothing(
    files: Path, uris: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    authority.put(files / "agent", AGENT)
    with probed() as address:
        assert greet(address) is not None
        authority.put(files / "agent", *(uris or ("dns://x",)))
        with pytest.raises(UsageError, match="names another role or node"):
            answered(address)
        monkeypatch.setattr(tls, "check_own", lambda *_: None)
        said = answered(address)
        assert isinstance(said, Refusal)
        assert (said.kind, said.text) == (
            "permission",
            "a certificate of role None opens nothing here",
        )


def test_a_node_that_its_certificate_does_not_name_is_told(files: Path) -> None:
    Authority().put(files / "agent", AGENT)
    for node, good in (("n1", True), ("", True), ("n2", False)):
        own = tls.identity_at("controller", SECRET, "agent", node, "job")
        if good:
            assert own.context(server=False) is not None
            continue
        with pytest.raises(UsageError, match="names another role or node") as caught:
            own.context(server=False)
        assert caught.value.wanted == "one URI that ends in /ckptd/agent/n2"
        assert caught.value.found == AGENT


def test_the_role_is_in_one_uri() -> None:
    for uri in (AGENT, "ckptd://agent/n1", "spiffe://a/ckptd/agent/n1"):
        assert certified({"subjectAltName": (("DNS", "x"), ("URI", uri))}) == Certified(
            "agent", "n1"
        )
    assert certified({"subjectAltName": (("DNS", AGENT),)}) == Certified("", "")
    assert certified({}) == Certified("", "")


def test_files_of_another_authority_are_refused(files: Path) -> None:
    Authority().put(files / "agent", AGENT)
    with probed() as address:
        assert greet(address) is not None
        Authority().put(files / "agent", AGENT)
        with pytest.raises(StoreError, match="of different authorities") as caught:
            answered(address)
        assert caught.value.kind == "permission"


def test_renewed_files_are_read_again_and_half_written_ones_wait(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, now, later = Authority(), time.time(), [0.0]
    monkeypatch.setattr("ckptd.base.net.tls.time.time", lambda: now + later[0])
    authority.put(files / "agent", AGENT)
    own = Identity(tls.FromFiles(), "agent", "")
    first = own.context(server=True)
    authority.put(files / "agent", AGENT)
    assert own.context(server=True) is first
    later[0] += REREAD_S + 1
    second = own.context(server=True)
    assert second is not first
    authority.put(files / "other", AGENT)
    shutil.copy(files / "other" / "tls.key", files / "agent" / "tls.key")  # of the next one
    later[0] += REREAD_S + 1
    assert own.context(server=True) is second
    with pytest.raises(UsageError, match="cannot be used"):
        Identity(tls.FromFiles(), "agent", "").context(server=True)
    shutil.copy(files / "other" / "tls.crt", files / "agent" / "tls.crt")
    assert own.context(server=True) is not second


def test_what_is_missing_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="role agent cannot be read") as caught, probed():
        pass
    assert str(files / "agent" / "tls.crt") in str(caught.value)
    Authority().put(files / "agent", AGENT)
    with probed() as address:
        with pytest.raises(UsageError, match="role operator cannot be read"):
            greet(address, "operator")
        monkeypatch.delenv(VARIABLES[1])
        with pytest.raises(UsageError, match="all three"):
            greet(address)


def test_a_launcher_hands_its_ranks_the_files_of_their_role(files: Path) -> None:
    authority = Authority()
    authority.put(files / "rank", "spiffe://example.org/ckptd/rank/n1")
    handed = hand(SECRET.decode(), "n1", AskProof("rank"))
    assert handed.authority == authority.pem
    assert (files / "rank" / "tls.key").read_bytes() in handed.leaf
    assert handed.until <= time.time() + REREAD_S
    with pytest.raises(CkptdError, match="role worker"):
        hand(SECRET.decode(), "n1", AskProof("worker"))


def test_the_store_of_a_node_has_its_own_key(files: Path) -> None:
    with StoreServer(MemoryStore("certificates"), secret=new_secret()) as server:
        with server.describe().open() as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"
    assert not os.listdir(files)
