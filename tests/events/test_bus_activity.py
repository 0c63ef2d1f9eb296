"""What a rank is about reaches the listener of that moment, and costs nothing without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.events import bus


class Heard:
    def __init__(self) -> None:
        self.words: list[object] = []

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        self.words.append(phase)
        yield
        self.words.append("end")

    def at_step(self, number: int) -> None:
        self.words.append(number)

    def regroup(self, generation: int, rank: int, world: int) -> None:
        self.words.append((generation, rank, world))


@bus.phase("ckpt")
def save(step: int) -> int:
    bus.at_step(step)
    return step


@pytest.fixture
def heard() -> Iterator[Heard]:
    bus.listen(listener := Heard())
    yield listener
    bus.listen(None)


def test_a_function_decorated_before_is_heard_by_the_listener_of_its_call(heard: Heard) -> None:
    assert save(1) == 1
    bus.regroup(2, 0, 3)
    assert heard.words == ["ckpt", 1, "end", (2, 0, 3)]
    bus.listen(None)
    assert save(2) == 2
    bus.regroup(3, 0, 1)
    bus.listen(later := Heard())
    assert save(3) == 3
    assert len(heard.words) == 4
    assert later.words == ["ckpt", 3, "end"]
