"""Who is told where the job store is, and what a controller does not take from a node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from ckptd.elastic.messages import Fenced, NodeUp
from ckptd.elastic.wire import Beat, Hosting, Said, StoreAt, Timed
from ckptd.errors import RefusedError
from tests.elastic.test_controller_peers import Made


class Told(list[msgspec.Struct]):
    """What was sent to each node, by name and in order."""

    def of(self, kind: type[msgspec.Struct]) -> list[msgspec.Struct]:
        return [message for message in self if isinstance(message, kind)]


def listen(made: Made, name: str) -> tuple[object, Told]:
    told = Told()
    peer = made.join("node", name)
    peer.send = told.append  # type: ignore[assignment,method-assign]
    return peer, told


def up(name: str, running: int = 1) -> Beat:
    return Beat(number=1, up=NodeUp(node=name, life="1", slots=1, running=running))


STORE = Hosting(generation=1, host="h", port=7)


@pytest.mark.parametrize("first", ["store", "node"])
def test_who_reconnects_before_the_store_was_told_is_told(tmp_path: Path, first: str) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        host, _ = listen(made, "a")
        if first == "store":
            made.controller.heard(host, STORE)  # type: ignore[arg-type]
        other, told = listen(made, "b")
        made.controller.heard(other, up("b"))  # type: ignore[arg-type]
        if first == "node":
            assert told.of(StoreAt) == []
            made.controller.heard(host, STORE)  # type: ignore[arg-type]
        assert told.of(StoreAt) == [StoreAt(1, "h", 7)]

    asyncio.run(case())


def test_only_the_node_that_was_asked_hosts_the_store(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        other, told = listen(made, "b")
        host, _ = listen(made, "a")
        made.controller.heard(other, up("b"))  # type: ignore[arg-type]
        made.controller.heard(other, STORE)  # type: ignore[arg-type]
        early = Hosting(generation=99, host="h", port=9)
        made.controller.heard(host, early)  # type: ignore[arg-type]
        assert told.of(StoreAt) == []
        made.controller.heard(host, STORE)  # type: ignore[arg-type]
        assert told.of(StoreAt) == [StoreAt(1, "h", 7)]

    asyncio.run(case())


@pytest.mark.parametrize(
    "said",
    [
        up("a", 1 << 40),
        Beat(number=1, up=NodeUp(node="a", life="1", slots=1, fenced=(1 << 62) - 1)),
        Said(event=Fenced(node="a", generation=1 << 40), number=1),
        Hosting(generation=1 << 40, host="h", port=9),
        Timed(generation=1 << 40, node="a", marks={}),
    ],
)
def test_a_generation_that_cannot_be_is_refused(tmp_path: Path, said: msgspec.Struct) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        peer, _ = listen(made, "a")
        with pytest.raises(RefusedError) as caught:
            made.controller.heard(peer, said)  # type: ignore[arg-type]
        assert caught.value.kind == "no-generation"
        assert made.machine.generation == 1
        assert made.waiting == []

    asyncio.run(case())
