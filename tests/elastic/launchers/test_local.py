"""Launchers as processes of this machine pass the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ckptd.elastic.launchers.base import Command, Hint, Launcher, MachineState
from ckptd.errors import DeadlineError, NotFoundError, StoreError
from ckptd.testing.launchers import LauncherContract
from tests.elastic.launchers.local_launcher import LocalLauncher


class TestLocal(LauncherContract):
    @pytest.fixture
    def make(self) -> Iterator[Callable[[Command], Launcher]]:
        with ExitStack() as stack:
            yield lambda command: stack.enter_context(
                LocalLauncher(["n0", "n1"], command, spares=["n2"])
            )


def test_without_spares_nothing_is_replaced() -> None:
    with LocalLauncher(["n0"], lambda node: ["true"]) as launcher:
        with pytest.raises(NotFoundError) as caught:
            launcher.replace("n0", 5.0)
        assert caught.value.kind == "no-spare"
        assert [m.name for m in launcher.machines(5.0)] == ["n0"]


def test_a_drain_is_told_once() -> None:
    with LocalLauncher(["n0", "n1"], lambda node: ["true"]) as launcher:
        launcher.drain("n1", 60.0, "spot")
        assert launcher.hints(5.0) == (Hint(node="n1", seconds=60.0, reason="spot"),)
        assert launcher.hints(5.0) == ()
        assert [m.state for m in launcher.machines(5.0)] == [MachineState.UP, MachineState.DRAINING]


def test_a_command_that_is_not_there_is_told() -> None:
    with LocalLauncher(["n0"], lambda node: ["/no/such/program"]) as launcher:
        with pytest.raises(StoreError) as caught:
            launcher.start(["n0"], 5.0)
        assert "a launcher could not be started" in caught.value.message


def test_a_start_without_time_is_late() -> None:
    with LocalLauncher(["n0"], lambda node: ["true"]) as launcher:
        with pytest.raises(DeadlineError) as caught:
            launcher.start(["n0"], 0.0)
        assert "launchers were not started or stopped in time" in caught.value.message
