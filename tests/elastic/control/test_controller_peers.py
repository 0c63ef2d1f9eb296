"""What a controller makes of peers that come, go and wait; without a network."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.elastic.control.appending import Appender
from ckptd.elastic.control.controller import Controller
from ckptd.elastic.control.history import RecoveryHistory
from ckptd.elastic.control.statemachine import ControllerSettings, State, StateMachine
from ckptd.elastic.control.status import Setting, status_of
from ckptd.elastic.controller_server import ListeningSocket, PeerConnection
from ckptd.elastic.dial import MOST_FRAME_BYTES
from ckptd.elastic.log import MembershipLog
from ckptd.elastic.messages import (
    Beat,
    Broken,
    Ended,
    Envelope,
    LeaseRenewal,
    Left,
    Loaded,
    NodeLost,
    NodeUp,
    OperatorCommand,
    Order,
    OrderKind,
    Progress,
    Shutdown,
    Status,
    Subscribe,
    Taken,
    Tick,
)
from ckptd.store import open_store
from tests.elastic.driven import JOB


class At(PeerConnection):
    """A peer whose connection goes nowhere."""

    def __init__(self, door: ListeningSocket, role: str, name: str) -> None:
        super().__init__(door)
        self.role, self.name, self.was_cut = role, name, False
        self.told: list[Any] = []

    def send(self, message: msgspec.Struct) -> None:
        self.told.append(message)

    def cut(self) -> None:
        self.was_cut = True


class Made:
    """A controller that is not run, and its door."""

    def __init__(self, folder: Path | str) -> None:
        self.machine = StateMachine(JOB, ControllerSettings(), (), 0.0)
        self.history = RecoveryHistory()
        log = MembershipLog(open_store(str(folder)))
        self.controller = Controller(
            self.machine,
            Appender(log, 0, print, lambda: None),
            self.history,
            self.status,
            self.reseat,
        )
        self.door = ListeningSocket("j", b"s" * 32, "1", self.controller, lambda _, __: None)
        self.url = "log"

    def status(self) -> Status:
        return status_of(Setting("j", self.url, "127.0.0.1:1", "1"), self.machine, self.history)

    async def reseat(self) -> None:
        return

    def join(self, role: str, name: str) -> At:
        peer = At(self.door, role, name)
        self.controller.joined(peer)
        return peer

    async def first(self) -> tuple[At, NodeUp]:
        """Let the first launcher of node a be heard; return its connection and what it is."""
        peer, up = self.join("agent", "a"), NodeUp(node="a", life="1", slots=1)
        self.controller.received(peer, Beat(number=1, up=up))
        await self.controller._handle(up)
        return peer, up

    def trains(self, *names: str) -> None:
        """Have these nodes train in generation 1."""
        for name in names:
            self.machine.handle(NodeUp(node=name, life="1", slots=1), 0.0)
        self.machine.handle(Tick(), 1.0)
        for name in names:
            self.machine.handle(Loaded(node=name, generation=1), 1.0)
        self.machine.handle(Progress(generation=1, step=1), 1.0)
        assert self.machine.state is State.RUNNING

    @property
    def waiting(self) -> list[Any]:
        return [event for event, _ in self.controller._events]


def test_beats_do_not_pile_up_while_nothing_is_decided(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        node = made.join("agent", "a")
        up = NodeUp(node="a", life="1", slots=1)
        other = msgspec.structs.replace(up, slots=2)
        for number in range(100):
            made.controller.received(node, Beat(number=number, up=up))
        for number in range(100, 200):
            made.controller.received(node, Beat(number=number, up=other))
        assert made.waiting == [up, other]

    asyncio.run(case())


def test_a_node_that_was_back_in_between_gets_the_whole_grace_again(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        first = made.join("agent", "a")
        made.controller.gone(first)
        timers = made.controller._broken
        timer = timers["a"]
        second = made.join("agent", "a")
        assert timer.cancelled()
        assert not timers
        made.controller.gone(second)
        assert not timers["a"].cancelled()
        timers["a"].cancel()

    asyncio.run(case())


@pytest.mark.parametrize("failed", ["broken", "ended"])
@pytest.mark.parametrize("first", ["link", "failure"])
def test_a_broken_link_and_a_failure_elsewhere_are_a_lost_node_at_once(
    tmp_path: Path, failed: str, first: str
) -> None:
    event = {
        "broken": Broken(node="b", generation=1, reason="a peer has closed"),
        "ended": Ended(node="b", generation=1, code=1),
    }[failed]

    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        peer = made.join("agent", "a")
        if first == "link":
            made.controller.gone(peer)
            assert made.waiting == []
            await made.controller._handle(event)
        else:
            await made.controller._handle(event)
            made.controller.gone(peer)
        assert made.waiting == [NodeLost(node="a")]
        assert not made.controller._broken

    asyncio.run(case())


def test_who_connects_anew_while_its_own_worker_fails_is_not_lost(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        made.controller.gone(made.join("agent", "b"))
        await made.controller._handle(Broken(node="b", generation=1, reason="a peer has closed"))
        assert made.waiting == []
        made.controller._lost("b")
        made.join("agent", "b")  # before that was looked at
        await made.controller._handle(made.waiting[0])
        assert made.machine.nodes["b"].up

    asyncio.run(case())


def test_a_node_that_left_and_came_again_at_once_is_heard(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        controller, left = made.controller, Left(node="a")
        controller.received(made.join("agent", "a"), Envelope(event=left, number=1))
        again = made.join("agent", "a")
        await controller._handle(left)
        up = NodeUp(node="a", life="2", slots=1)
        controller.received(again, Beat(number=1, up=up))
        assert made.waiting == [left, up]

    asyncio.run(case())


def test_a_beat_behind_a_goodbye_brings_no_node_back(tmp_path: Path) -> None:
    """The others would wait until it is silent: 5 s for each node that is pre-empted."""

    async def case() -> None:
        made = Made(tmp_path)
        peer, up = await made.first()
        made.trains("b")
        left = Left(node="a")
        before = made.waiting
        made.controller.received(peer, Envelope(event=left, number=1))
        last = msgspec.structs.replace(up, running=0, fenced=1)
        made.controller.received(peer, Beat(number=2, up=last))
        assert made.waiting == [*before, left]
        await made.controller._handle(left)
        made.controller.received(peer, Beat(number=3, up=last))
        assert not made.machine.nodes["a"].up

    asyncio.run(case())


def test_a_status_that_is_too_large_costs_only_who_watches(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        operator = made.join("operator", "o")
        made.controller.received(operator, Subscribe(number=1))
        made.url = "x" * MOST_FRAME_BYTES
        made.controller._send_status()
        assert operator.was_cut
        assert "too large" in made.history.told[-1]

    asyncio.run(case())


def test_another_launcher_of_a_name_that_is_in_use_is_refused(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        first, up = await made.first()
        second = made.join("agent", "a")
        made.controller.received(second, Beat(number=1, up=msgspec.structs.replace(up, life="2")))
        assert isinstance(second.told[-1], Taken)
        assert "is node a of this job" in second.told[-1].text
        made.controller.gone(second)
        back = made.join("agent", "a")
        was = msgspec.structs.replace(up, life="0", fenced=1)
        made.controller.received(back, Beat(number=1, up=was))
        assert back.told == [Shutdown(kind="name-taken", text=second.told[-1].text, code=1)]
        made.controller.gone(back)
        made.controller.received(first, Beat(number=2, up=up))
        assert isinstance(first.told[-1], LeaseRenewal)
        assert not first.was_cut
        assert made.machine.nodes["a"].life == "1"
        assert not made.controller._broken

    asyncio.run(case())


@pytest.mark.parametrize("how", ["same", "silent", "dismissed"])
def test_a_launcher_follows_on_one_that_is_not_heard_any_more(tmp_path: Path, how: str) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        first, up = await made.first()
        if how == "silent":
            made.machine.nodes["a"].up = False
        elif how == "dismissed":
            made.machine.nodes["a"].dismissed = "1"
        second = made.join("agent", "a")
        other = msgspec.structs.replace(up, life="1" if how == "same" else "2")
        made.controller.received(second, Beat(number=1, up=other))
        assert first.was_cut
        assert isinstance(second.told[-1], LeaseRenewal)
        made.controller.gone(first)
        assert not made.controller._broken

    asyncio.run(case())


def test_who_goes_before_it_has_said_who_it_is_changes_nothing(tmp_path: Path) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        first, up = await made.first()
        second = made.join("agent", "a")
        third = made.join("agent", "a")
        assert second.was_cut
        made.controller.gone(second)
        made.controller.gone(third)
        made.controller.received(first, Beat(number=2, up=up))
        assert isinstance(first.told[-1], LeaseRenewal)
        assert not made.controller._broken

    asyncio.run(case())


def test_a_node_that_was_ordered_out_before_may_be_taken_back_before_it_comes(
    tmp_path: Path,
) -> None:
    async def case() -> None:
        made = Made(tmp_path)
        made.trains("a", "b", "c")
        for name in "bc":
            made.machine.handle(NodeLost(node=name), 2.0)
        assert made.machine.record is not None
        made.machine.record = msgspec.structs.replace(
            made.machine.record,
            members=made.machine.record.members[:1],
            out=("b",),
            resting=(("c", 9e9),),
        )
        for name in "bc":
            made.machine.nodes.forget(name)
        operator = made.join("operator", "o")
        add = Order(kind=OrderKind.ADD, nodes=("b", "c"))
        made.controller.received(operator, OperatorCommand(number=1, event=add))
        assert made.waiting == [add]
        unknown = Order(kind=OrderKind.ADD, nodes=("d",))
        made.controller.received(operator, OperatorCommand(number=2, event=unknown))
        assert "unknown node: d" in operator.told[-1].text

    asyncio.run(case())
