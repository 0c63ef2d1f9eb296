"""Processes that are started again beside a node's workers: the daemon, the watcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.monitor.cli.watch_parts import DaemonSupervisor
from tests.processes import until


class Watched:
    """A `DaemonSupervisor` beside a controller that this launcher is said to have."""

    def __init__(self, folder: Path, daemon: str | None, *arguments: str) -> None:
        self.said: list[str] = []
        env = {**os.environ, "CKPTD_RUN_DIR": str(folder / "run")}
        rings = ["--rings", str(folder / "rings")] if daemon else None
        self.watch = DaemonSupervisor("j", daemon, arguments, rings, env, folder, self.said.append)
        self._controller: Any = SimpleNamespace(
            since=time.monotonic(), seated=True, answered=True, host="127.0.0.1"
        )

    def turn(self) -> int:
        """Have it look; return how much it has said."""
        self.watch.turn(self._controller)
        return len(self.said)

    def pid(self, part: str) -> int:
        self.turn()
        found = getattr(self.watch, f"_{part}")
        return found.process.pid if found is not None else 0


def test_a_daemon_that_cannot_be_started_is_not_tried_without_end(tmp_path: Path) -> None:
    one = Watched(tmp_path, None, "--no-such-option")
    until(one.turn)
    assert "ckptd serve --job j --no-such-option" in one.said[0]
    assert (one.pid("daemon"), len(one.said)) == (0, 1)
    one.watch.end(0.0)


def test_a_watcher_that_is_killed_is_started_again(tmp_path: Path) -> None:
    one = Watched(tmp_path, "http://127.0.0.1:9")
    first = until(lambda: one.pid("agent"))
    os.kill(first, signal.SIGKILL)
    until(lambda: one.pid("agent") not in (0, first))
    assert "has ended with -9" in one.said[0]
    assert "another one is started" in one.said[0]
    one.watch.end(0.0)


@pytest.mark.long
def test_a_daemon_that_is_killed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    one = Watched(tmp_path, None, "--history", str(tmp_path / "history.sqlite"))
    try:
        until(one.turn)
        first = one.pid("daemon")
        os.kill(first, signal.SIGKILL)
        until(lambda: one.pid("daemon") not in (0, first))
        until(lambda: one.turn() == 3)
        words = ["is watched: http", "another one is started", "is watched: http"]
        assert all(word in text for word, text in zip(words, one.said, strict=True))
    finally:
        one.watch.end(0.0)


def test_a_job_whose_outside_controller_has_no_daemon_is_said_to_be_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.cli.watch_parts._UNWATCHED_S", 0.05)
    one = Watched(tmp_path, None)
    one._controller = SimpleNamespace(since=0.0, seated=False, answered=False, host="")
    one.turn()
    time.sleep(0.1)
    assert one.turn() == 0, "no controller was heard of yet"
    one._controller.answered = True
    until(one.turn)
    assert "no daemon watches this job" in one.said[0]
    assert "ckptd serve --job j --controller" in one.said[0]
    time.sleep(0.1)
    assert one.turn() == 1
    one.watch.end(0.0)
