"""Who is told where the job store is, and what a controller does not take from a node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from ckptd.elastic.messages import Beat, Envelope, Fenced, Hosting, NodeUp, StoreAt, Timed
from ckptd.errors import RefusedError
from tests.elastic.control.test_controller_peers import At, Made


def stores(node: At) -> list[StoreAt]:
    return [message for message in node.told if isinstance(message, StoreAt)]


def up(name: str, running: int = 1) -> Beat:
    return Beat(number=1, up=NodeUp(node=name, life="1", slots=1, running=running))


STORE = Hosting(generation=1, host="h", port=7)


@pytest.mark.parametrize("first", ["store", "node"])
def test_who_reconnects_before_the_store_was_told_is_told(tmp_path: Path, first: str) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        host = made.join("agent", "a")
        if first == "store":
            made.controller.received(host, STORE)
        other = made.join("agent", "b")
        made.controller.received(other, up("b"))
        if first == "node":
            assert stores(other) == []
            made.controller.received(host, STORE)
        assert stores(other) == [StoreAt(1, "h", 7)]

    asyncio.run(case())


def test_only_the_node_that_was_asked_hosts_the_store(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        other = made.join("agent", "b")
        host = made.join("agent", "a")
        made.controller.received(other, up("b"))
        made.controller.received(other, STORE)
        early = Hosting(generation=99, host="h", port=9)
        made.controller.received(host, early)
        assert stores(other) == []
        made.controller.received(host, STORE)
        assert stores(other) == [StoreAt(1, "h", 7)]

    asyncio.run(case())


@pytest.mark.parametrize(
    "said",
    [
        up("a", 1 << 40),
        Beat(number=1, up=NodeUp(node="a", life="1", slots=1, fenced=(1 << 62) - 1)),
        Envelope(event=Fenced(node="a", generation=1 << 40), number=1),
        Hosting(generation=1 << 40, host="h", port=9),
        Timed(generation=1 << 40, node="a", marks={}),
    ],
)
def test_a_generation_that_cannot_be_is_refused(tmp_path: Path, said: msgspec.Struct) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        peer = made.join("agent", "a")
        with pytest.raises(RefusedError) as caught:
            made.controller.received(peer, said)
        assert "a node reported an impossible generation" in caught.value.message
        assert made.machine.generation == 1
        assert made.waiting == []

    asyncio.run(case())
