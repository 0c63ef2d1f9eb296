"""Each role at each door with each message: what the table allows passes, and nothing else."""

from __future__ import annotations

import socket
import typing
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import msgspec
import pytest

from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.door import Door
from ckptd.base.net.roles import DOORS, Role
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.messages import FromNode, FromOperator
from ckptd.errors import StoreError
from ckptd.monitor.agent import preflight, probes
from ckptd.publish import messages as publish
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer, messages, new_secret
from tests.processes import PATIENCE_S

SECRET = b"s" * 32
ROLES = get_args(Role)
STORE: dict[str, msgspec.Struct] = {
    type(message).__name__: message
    for message in (
        messages.Get("a"),
        messages.Read("a", 0, 1),
        messages.Open("a"),
        messages.Stat("a"),
        messages.List(""),
        messages.Children(""),
        messages.Put("b", 0, False),
        messages.BeginWriter("c", 0),
        messages.Delete(("a",)),
        messages.Sync(""),
        messages.Sweep("", 1e9, False),
        messages.AbortWriter(),
    )
}


def names(*unions: Any) -> set[str]:
    return {kind.__name__ for union in unions for kind in typing.get_args(union)}


def known(door: str) -> set[str]:
    return set().union(*DOORS[door].may.values())


def test_the_table_knows_every_message_and_every_role() -> None:
    assert known("store") == names(messages.Request) == set(STORE)
    assert known("controller") == names(FromNode, FromOperator)
    assert known(publish.PURPOSE) == {kind.__name__ for kind in _kinds(publish.QUESTION)}
    assert known(publish.PASSING) == {kind.__name__ for kind in _kinds(publish.PASSED_QUESTION)}
    assert known("probe") == {kind.__name__ for kind in _kinds(probes._ASKED)}
    heard = {kind.__name__ for kind in _kinds(preflight._HELLO)} | {"Tested", "ClockReading"}
    assert known("preflight") == heard | {"Probed"}
    for asks in DOORS.values():
        assert asks.serves in ROLES
        assert set(asks.may) <= set(ROLES)


def _kinds(decoder: Any) -> list[type]:
    found = decoder.type
    return [*typing.get_args(found)] or [found]


@contextmanager
def connected(
    address: tuple[str, int], door: str, role: Role, secret: bytes
) -> Iterator[Connection]:
    wire = Connection(socket.create_connection(address, PATIENCE_S), "server", PATIENCE_S)
    try:
        greet_server(wire, secret, door, role=role, wait_s=PATIENCE_S)
        yield wire
    finally:
        wire.release()


@pytest.mark.parametrize("door", DOORS)
def test_each_door_lets_in_the_roles_of_its_row(door: str) -> None:
    any_message = msgpack_decoder(Any)
    seen: list[tuple[str, bool]] = []

    def serve(wire: Connection) -> None:
        wire.receive(any_message, PATIENCE_S)
        assert wire.proved is not None
        for name in sorted(set().union(*map(known, DOORS))):
            message = msgspec.defstruct(name, [])()
            try:
                wire.permit(message, door)
                seen.append((name, True))
            except StoreError as error:
                seen.append((name, error.kind != "permission"))
        wire.send(b"\xa1x")

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    limits: dict[str, Any] = {"clients": 9, "greeting_s": PATIENCE_S, "send_s": PATIENCE_S}
    opened = Door(listener, lambda: SECRET, door, serve, name="tests", **limits)
    try:
        for role in ROLES:
            may = DOORS[door].may.get(role)
            seen.clear()
            if may is None:
                with pytest.raises(StoreError) as caught, connected(address, door, role, SECRET):
                    pass
                assert caught.value.kind == "permission"
                continue
            with connected(address, door, role, SECRET) as wire:
                wire.send(b"\xa1x")
                wire.receive(any_message, PATIENCE_S)
            assert {name for name, let in seen if let} == may
    finally:
        assert opened.close(PATIENCE_S) is None


@pytest.mark.parametrize("role", [role for role in ROLES if role != "controller"])
def test_each_message_of_each_role_at_a_store(role: Role) -> None:
    memory = MemoryStore(uuid.uuid4().hex)
    answer = msgpack_decoder(messages.Answer)
    with StoreServer(memory, secret=new_secret()) as server:
        secret = bytes.fromhex(server.describe().options["secret"])
        host, _, port = server.url.removeprefix("ckptd://").rpartition(":")
        for name, message in STORE.items():
            memory.put("a", b"1")
            with connected((host, int(port)), "store", role, secret) as wire:
                wire.send(message)
                found, _ = wire.receive(answer, PATIENCE_S, most_bulk=100)
            said = found.error if isinstance(found, messages.Failed) else {}
            refused = said.get("message") == "a certificate does not allow this"
            assert refused == (name not in DOORS["store"].may[role]), (role, name)
            assert memory.exists("a") or (name == "Delete" and not refused)
            assert not memory.exists("b") or not refused
            memory.delete(("b",))
