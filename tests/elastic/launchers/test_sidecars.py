"""Who starts a job's controller, and when; the names of nodes."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.elastic.launchers.node import NO_ORDER
from ckptd.elastic.launchers.nodename import claim_name
from ckptd.elastic.launchers.sidecars import ControllerSupervisor
from ckptd.elastic.leader import Leader
from ckptd.elastic.places import JobPlaces, open_places
from ckptd.errors import StoreError

DEADLINE_S = 60.0


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def supervised(
    places: JobPlaces,
    folder: Path,
    *arguments: str,
    address: str = "127.0.0.1",
    say: Callable[[str], None] = lambda _: None,
    **more: Any,
) -> ControllerSupervisor:
    endpoint = more.pop("endpoint", "")
    return ControllerSupervisor(
        places, endpoint, address, arguments, os.environ, folder, say, **more
    )


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
    supervisor = ControllerSupervisor(
        places, "", "127.0.0.2", arguments, os.environ, tmp_path, lambda _: None
    )
    try:
        supervisor.turn(0.5, NO_ORDER)
        assert asked
        asked.clear()
        supervisor.turn(0.1, 1)  # one was heard of
        supervisor.turn(0.2, 1)
        assert (asked, supervisor.started) == ([], False)
        supervisor.turn(2.9, 1)  # not the pause of a node without a rank
        assert supervisor.started
        assert supervisor.host == "127.0.0.2"
        until(lambda: supervisor.turn(3.0, 1))  # the launcher connects to it at once
        assert supervisor.seated
        assert not supervisor.turn(3.1, 1)
    finally:
        supervisor.end(0.0)


def test_a_launcher_that_is_never_heard_asks_for_the_seat_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._AGAIN_S", 600.0)
    places = open_places("j", str(tmp_path / "log"))
    with socket.create_server(("127.0.0.1", 0)) as refuses:
        places.leader.take(0, f"127.0.0.1:{refuses.getsockname()[1]}", "another")
        supervisor = ControllerSupervisor(
            places, "", "127.0.0.1", [], os.environ, tmp_path, lambda _: None
        )
        supervisor.turn(60.0, NO_ORDER)
        monkeypatch.setattr(places.leader, "newest", lambda: pytest.fail("asked at every turn"))
        supervisor.turn(60.1, NO_ORDER)
    assert not supervisor.started


def test_a_store_that_is_away_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> Leader:
        raise StoreError("the store is away", kind="io")

    places = open_places("j", str(tmp_path / "log"))
    monkeypatch.setattr(places.leader, "newest", away)
    said: list[str] = []
    supervisor = ControllerSupervisor(
        places, "", "127.0.0.1", [], os.environ, tmp_path, said.append
    )
    with pytest.raises(StoreError):  # nothing has begun
        supervisor.turn(9.0, NO_ORDER)
    supervisor.turn(9.1, 0)
    assert "the store is away" in said[0]
    supervisor.turn(9.2, 0)
    assert len(said) == 1


def test_a_controller_that_answers_no_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped kept its job waiting: nobody else can start one on its machine."""
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._HUNG_S", 0.3)
    log, said = str(tmp_path / "log"), list[str]()
    arguments = ["--job", "j", "--log", log]
    supervisor = supervised(open_places("j", log), tmp_path, *arguments, say=said.append)
    try:
        until(lambda: supervisor.turn(0.0, 0) or supervisor.turn(9.0, 0))
        first = supervisor.addresses()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            assert not supervisor.turn(math.inf, 0)  # nobody knows whether it answers
            assert not supervisor.turn(0.2, 0)
            time.sleep(0.02)
        time.sleep(1.2)  # this launcher was stopped: that is no fault of its controller
        supervisor.turn(5.0, 0)
        assert said == []
        until(lambda: supervisor.turn(5.0, 0))
        assert "answers no more" in said[0]
        assert supervisor.addresses() not in ("", first)
    finally:
        supervisor.end(0.0)


def test_an_old_record_of_this_machine_alone_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    for url, waits in ((None, False), (str(tmp_path / "log"), True)):
        places = open_places("j", url)
        places.leader.take(0, "127.0.0.1:9", "another")
        supervisor = supervised(places, tmp_path, "--no-such-option")
        supervisor.turn(0.1, NO_ORDER)
        assert supervisor.started is not waits
        supervisor.end(0.0)


def test_an_endpoint_may_be_said_to_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars.is_here", lambda _: False)
    commands = list[list[str]]()

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        commands.append(command)
        return subprocess.Popen(["sleep", "60"], **options)

    for here, bind in ((True, "0.0.0.0"), (False, "")):
        places = open_places("j", str(tmp_path / str(here)))
        more = {"endpoint": "127.0.0.1:9", "here": here, "start": start}
        supervisor = supervised(places, tmp_path, **more)
        supervisor.turn(0.1, NO_ORDER)
        assert supervisor.started is here
        if here:
            words = commands[0][commands[0].index("--bind") :]
            assert words[:6] == ["--bind", bind, "--host", "127.0.0.1", "--port", "9"]
        supervisor.end(0.0)


def test_launchers_of_one_machine_have_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path))
    first, second = claim_name("j", "host"), claim_name("j", "host")
    assert [first[0], second[0]] == ["host", "host-2"]
    assert claim_name("k", "host")[0] == "host"
    os.close(first[1])
    assert claim_name("j", "host")[0] == "host"
    os.close(second[1])
