"""What runs beside a node's workers: who starts a controller, and what is started again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.cli.run_parts import Steward, Watch
from ckptd.elastic.launchers.node import NO_ORDER
from ckptd.elastic.leader import Leader
from ckptd.elastic.places import open_places
from ckptd.errors import StoreError

DEADLINE_S = 60.0


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_launcher_stands_in_by_its_rank_and_asks_nobody_while_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = str(tmp_path / "log")
    places = open_places("j", log)
    places.leader.take(0, "127.0.0.1:9", "another")
    asked: list[int] = []
    newest = places.leader.newest

    def ask() -> Leader | None:
        asked.append(1)
        return newest()

    monkeypatch.setattr(places.leader, "newest", ask)
    arguments = ["--job", "j", "--log", log]
    steward = Steward(places, "", "127.0.0.2", arguments, os.environ, tmp_path, lambda _: None)
    try:
        steward.turn(0.5, NO_ORDER)
        assert asked
        asked.clear()
        steward.turn(0.1, 1)  # one was heard of
        steward.turn(0.2, 1)
        assert (asked, steward.started) == ([], False)
        steward.turn(2.9, 1)  # not the pause of a node without a rank
        assert steward.started
        assert steward.host == "127.0.0.2"
        until(lambda: steward.turn(3.0, 1))  # the launcher connects to it at once
        assert steward.seated
        assert not steward.turn(3.1, 1)
    finally:
        steward.end(0.0)


def test_a_launcher_that_is_never_heard_asks_for_the_seat_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.cli.run_parts._AGAIN_S", 600.0)
    places = open_places("j", str(tmp_path / "log"))
    with socket.create_server(("127.0.0.1", 0)) as refuses:
        places.leader.take(0, f"127.0.0.1:{refuses.getsockname()[1]}", "another")
        steward = Steward(places, "", "127.0.0.1", [], os.environ, tmp_path, lambda _: None)
        steward.turn(60.0, NO_ORDER)
        monkeypatch.setattr(places.leader, "newest", lambda: pytest.fail("asked at every turn"))
        steward.turn(60.1, NO_ORDER)
    assert not steward.started


def test_a_store_that_is_away_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> Leader:
        raise StoreError("the store is away", kind="io")

    places = open_places("j", str(tmp_path / "log"))
    monkeypatch.setattr(places.leader, "newest", away)
    said: list[str] = []
    steward = Steward(places, "", "127.0.0.1", [], os.environ, tmp_path, said.append)
    with pytest.raises(StoreError):  # nothing has begun
        steward.turn(9.0, NO_ORDER)
    steward.turn(9.1, 0)
    assert "the store is away" in said[0]
    steward.turn(9.2, 0)
    assert len(said) == 1


class Watched:
    """A `Watch` beside a controller that this launcher is said to have."""

    def __init__(self, folder: Path, daemon: str | None, *arguments: str) -> None:
        self.said: list[str] = []
        env = {**os.environ, "CKPTD_RUN_DIR": str(folder / "run")}
        rings = ["--rings", str(folder / "rings")] if daemon else None
        self.watch = Watch("j", daemon, arguments, rings, env, folder, self.said.append)
        self._steward: Any = SimpleNamespace(since=time.monotonic(), seated=True, host="127.0.0.1")

    def turn(self) -> int:
        """Have it look; return how much it has said."""
        self.watch.turn(self._steward)
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
