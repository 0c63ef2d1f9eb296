"""What a controller shows of itself beside its seat."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ckptd.elastic.control.running import leave_signs

NODES = 4
BEAT_S = 0.2


class Machine:
    """Hears all nodes each beat, by a task of the loop, as a controller does."""

    def __init__(self) -> None:
        self.heard_at = time.monotonic()

    def hears(self, now: float, within_s: float, *, linked: bool = False) -> tuple[int, int]:
        return (NODES if now - self.heard_at < within_s else 0), NODES


class Outlook:
    def __init__(self) -> None:
        self.left: list[tuple[int, int]] = []

    def leave(self, hears: int, knows: int) -> None:
        self.left.append((hears, knows))


def test_a_controller_that_did_not_run_for_a_while_calls_no_node_silent() -> None:
    """Its sign comes before it reads what they said meanwhile."""
    machine, outlook = Machine(), Outlook()

    async def beats() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.sleep(0)  # as of a message: it is read a turn after it has come
            await asyncio.sleep(0)
            machine.heard_at = time.monotonic()

    async def starved() -> None:
        for _ in range(2):
            await asyncio.sleep(0.3)
            time.sleep(2.5)  # nothing of the process runs

    asyncio.run(_for_a_while(leave_signs(_any(outlook), _any(machine)), beats(), starved()))
    assert len(outlook.left) >= 3
    assert set(outlook.left) == {(NODES, NODES)}


def test_nodes_that_are_silent_are_told_so() -> None:
    machine, outlook = Machine(), Outlook()
    machine.heard_at -= 10
    asyncio.run(_for_a_while(leave_signs(_any(outlook), _any(machine)), asyncio.sleep(0.1)))
    assert set(outlook.left) == {(0, NODES)}


async def _for_a_while(signs: Any, *others: Any) -> None:
    """Let all run until the last of the others ends."""
    tasks = [asyncio.ensure_future(each) for each in (signs, *others)]
    await tasks[-1]
    await asyncio.sleep(0.8)
    for task in tasks:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


def _any(thing: object) -> Any:
    return thing
