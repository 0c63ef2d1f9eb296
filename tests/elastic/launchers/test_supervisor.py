"""A supervisor keeps launchers where a real controller wants them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.elastic.supervisor import Outcome, Supervisor, SupervisorSettings
from ckptd.errors import StoreError
from tests.elastic.controlled import ControllerProcess, controlled, status_when
from tests.elastic.launchers.local_launcher import LocalLauncher
from tests.processes import PATIENCE_S, until

_ROOT = Path(__file__).parents[3]
_QUICK = SupervisorSettings(poll_s=0.1, call_s=PATIENCE_S, again_s=0.1, stop_s=PATIENCE_S)
NAMES = ["n0", "n1", "n2"]


class Kept:
    """A job of three nodes, its supervisor in a thread of its own."""

    def __init__(self, folder: Path, controller: ControllerProcess) -> None:
        self.folder, self.controller = folder, controller
        program = str(Path(__file__).with_name("supervised_node.py"))
        self.launcher = LocalLauncher(
            NAMES,
            lambda n: [sys.executable, program, n, controller.job, controller.log, str(folder)],
            spares=["n3"],
            environ={**controller.environ, "PYTHONPATH": str(_ROOT)},
            logs=folder,
        )
        self.said: list[str] = []
        self.outcome: Outcome | None = None
        self.link = controller.operator()
        self.supervisor = Supervisor(self.launcher, self.link, self.said.append, settings=_QUICK)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.outcome = self.supervisor.run()

    def pids(self, node: str) -> list[int]:
        """Return the processes of a node's launchers so far."""
        path = self.folder / f"{node}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def ended(self) -> Outcome:
        """Wait for the end."""
        self.thread.join(PATIENCE_S)
        assert self.outcome is not None, self.said
        return self.outcome


@contextmanager
def kept(folder: Path, *options: str) -> Iterator[Kept]:
    sets = [word for text in ("grow_s=0", "flaps=99", *options) for word in ("--set", text)]
    with controlled(folder, "--nodes", "1:3", *sets) as controller:
        one = Kept(folder, controller)
        try:
            one.thread.start()
            yield one
        finally:
            one.supervisor.stop("the test is over", requeue=False)
            one.thread.join(PATIENCE_S)
            one.launcher.close()
            one.link.close()


def running(one: Kept, nodes: list[str], after: int = 0) -> int:
    """Wait until a later generation trains on exactly these nodes; return it."""
    with_operator = one.controller.operator()
    status = status_when(
        with_operator,
        lambda s: (
            s.state == "running"
            and s.generation > after
            and [n.name for n in s.nodes if n.up and n.running == s.generation] == nodes
        ),
        f"{nodes} after {after}: {one.said}",
    )
    with_operator.close()
    return status.generation


def test_launchers_that_end_are_started_anew_and_a_stop_is_told(tmp_path: Path) -> None:
    with kept(tmp_path, "levels=3") as one:
        first = running(one, NAMES)
        before = {name: one.pids(name) for name in NAMES}
        (tmp_path / "n1.end").touch()
        running(one, NAMES, after=first)
        # The controller asks for another launcher too: that may come when one has been started.
        assert len(one.pids("n1")) in {2, 3}, one.said
        assert [one.pids(name) for name in ("n0", "n2")] == [before["n0"], before["n2"]]
        one.supervisor.stop("the time is over", requeue=True)
        outcome = one.ended()
        assert (outcome.kind, outcome.requeue) == ("stopped", True)
        assert "the time is over" in outcome.text


def test_a_node_that_is_drained_is_left(tmp_path: Path) -> None:
    with kept(tmp_path) as one:
        first = running(one, NAMES)
        one.launcher.drain("n2", 60.0, "spot")
        running(one, ["n0", "n1"], after=first)
        assert any("n2 will be taken away: spot" in text for text in one.said)
        one.supervisor.stop("enough", requeue=False)
        assert not one.ended().requeue


def test_without_progress_launchers_are_started_anew_then_the_job_is_submitted_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "failing").touch()
    with kept(tmp_path, "levels=3") as one:
        outcome = one.ended()
        assert (outcome.kind, outcome.requeue) == ("requeue", True)
        assert any("restarting launchers on n0, n1, n2" in text for text in one.said), one.said
        assert all(len(one.pids(name)) >= 2 for name in NAMES)


class Refusing(LocalLauncher):
    """A scheduler that refuses the first start."""

    refused = 0

    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        self.refused += 1
        if self.refused == 1:
            raise StoreError("busy")
        super().start(nodes, timeout_s)


def test_a_launcher_that_was_stopped_and_could_not_be_started_is_started_later() -> None:
    said: list[str] = []
    link: Any = SimpleNamespace(status=lambda: SimpleNamespace(ended=""))
    status: Any = SimpleNamespace(relaunch=("n0",), reason="no progress")
    with Refusing(["n0"], lambda _: ["sleep", "600"]) as launcher:
        supervisor = Supervisor(launcher, link, said.append, settings=_QUICK)
        with pytest.raises(StoreError):
            supervisor._relaunch(status)
        supervisor._revive()
        assert launcher.pid("n0") is not None
        assert said[-1] == "the launcher on n0 is started now"
        supervisor._revive()
        assert len(said) == 2


class Busy(LocalLauncher):
    """A scheduler that is busy when another node is asked for the first time."""

    asked = 0

    def replace(self, node: str, timeout_s: float) -> str:
        self.asked += 1
        if self.asked == 1:
            raise StoreError("busy")
        return super().replace(node, timeout_s)


def test_another_node_that_could_not_be_had_is_asked_for_again() -> None:
    said: list[str] = []
    link: Any = SimpleNamespace(order=lambda _: None)
    status: Any = SimpleNamespace(relaunch=("n0", "n1"), reason="gone")
    with Busy(["n0", "n1"], lambda _: ["sleep", "600"], spares=["n2"]) as launcher:
        launcher.drain("n0", 0.0, "gone")
        launcher.drain("n1", 0.0, "gone")
        supervisor = Supervisor(launcher, link, said.append, settings=_QUICK)
        with pytest.raises(StoreError):
            supervisor._relaunch(status)
        supervisor._poll()
        assert launcher.pid("n2") is not None
        assert [text for text in said if "place" in text] == [
            "n2 takes the place of n0",
            "n1 is gone, and no replacement node is available",
        ]
        supervisor._poll()
        assert launcher.asked == 3


@pytest.mark.long
def test_a_controller_that_is_killed_is_waited_for(tmp_path: Path) -> None:
    with kept(tmp_path) as one:
        first = running(one, NAMES)
        one.controller.kill()
        until(lambda: not one.thread.is_alive() or one.controller.seat(), "it goes on")
        one.controller.start()
        (tmp_path / "n0.end").touch()
        running(one, NAMES, after=first)
        assert one.thread.is_alive()
