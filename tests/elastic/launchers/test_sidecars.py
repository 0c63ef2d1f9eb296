"""Who starts a job's controller, and when; the names of nodes."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.elastic.dial import await_greeting
from ckptd.elastic.launchers.nodename import claim_name
from ckptd.elastic.launchers.nodestate import NO_ORDER
from ckptd.elastic.launchers.sidecars import ControllerSupervisor
from ckptd.elastic.leader import Leader, LeaderView
from ckptd.elastic.link import NodeLink
from ckptd.elastic.messages import NodeUp
from ckptd.elastic.places import JobPlaces, open_places
from ckptd.errors import StoreError
from tests.elastic.controlled import SECRET, controlled
from tests.elastic.test_dial import ALL, stranger
from tests.processes import free_port, until


def supervised(
    places: JobPlaces,
    folder: Path,
    *arguments: str,
    address: str = "127.0.0.1",
    say: Callable[[str], None] = lambda _: None,
    **more: Any,
) -> ControllerSupervisor:
    endpoint = more.pop("endpoint", "")
    more.setdefault("greet", await_greeting)
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
        places,
        "",
        "127.0.0.2",
        arguments,
        os.environ,
        tmp_path,
        lambda _: None,
        greet=await_greeting,
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
    with controlled(tmp_path, job="k", log=str(tmp_path / "k")) as refuses:
        places.leader.take(0, refuses.address, "another")
        supervisor = supervised(places, tmp_path)
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
    supervisor = supervised(places, tmp_path, say=said.append)
    with pytest.raises(StoreError):  # nothing has begun
        supervisor.turn(9.0, NO_ORDER)
    supervisor.turn(9.1, 0)
    assert "the store is away" in said[0]
    supervisor.turn(9.2, 0)
    assert len(said) == 1


class Started:
    """Starts processes, and keeps them."""

    def __init__(self) -> None:
        self.commands, self.processes = list[list[str]](), list[subprocess.Popen[bytes]]()

    def __call__(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        self.processes.append(subprocess.Popen(command, **options))
        return self.processes[-1]


def silent(supervisor: ControllerSupervisor, done: Callable[[], Any]) -> None:
    """Have a launcher hear nothing of its controller until something is so."""
    until(lambda: supervisor.turn(9.0, 0) or done())


def test_a_controller_that_answers_no_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped kept its job waiting: nobody else can start one on its machine."""
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._HUNG_S", 0.3)
    log, said, started = str(tmp_path / "log"), list[str](), Started()
    arguments = ["--job", "j", "--log", log]
    kept = tmp_path / "kept.log"
    places = open_places("j", log)
    more: dict[str, Any] = {"say": said.append, "start": started, "kept_log": kept}
    supervisor = supervised(places, tmp_path, *arguments, **more)
    try:
        until(lambda: supervisor.turn(0.0, 0) or supervisor.turn(9.0, 0))
        first = supervisor.addresses()
        (hung,) = started.processes
        hung.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            assert not supervisor.turn(math.inf, 0)  # nobody knows whether it answers
            assert not supervisor.turn(0.2, 0)
            time.sleep(0.02)
        time.sleep(1.2)  # this launcher was stopped: that is no fault of its controller
        supervisor.turn(5.0, 0)
        assert said == []
        waits, wait = list[float | None](), hung.wait

        def waited(timeout: float | None = None) -> int:
            waits.append(timeout)
            return wait(timeout)

        monkeypatch.setattr(hung, "wait", waited)
        silent(supervisor, lambda: said)
        monkeypatch.setattr("ckptd.elastic.launchers.sidecars._HUNG_S", 60.0)
        assert "has not answered" in said[0]
        until(lambda: supervisor.turn(9.0, 0))
        assert hung.poll() == -signal.SIGKILL
        assert None not in waits  # a process may hang in the kernel
        assert supervisor.addresses() not in ("", first)
        started.processes[1].kill()
        until(lambda: supervisor.turn(9.0, 0) or len(started.processes) > 2)
        assert kept.exists()  # it outlives the folder
    finally:
        supervisor.end(0.0)


def test_a_controller_that_answers_is_not_killed_when_nothing_was_heard_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow log store kept the launcher's link from calling the controller, which was killed."""
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._HUNG_S", 0.5)
    log, said, started = str(tmp_path / "log"), list[str](), Started()
    # Nodes are given an address that this machine itself does not reach.
    more: dict[str, Any] = {"endpoint": f"127.0.0.1:{free_port()}", "here": True}
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars.is_here", lambda _: False)
    arguments = ["--job", "j", "--log", log]
    supervisor = supervised(
        open_places("j", log), tmp_path, *arguments, say=said.append, start=started, **more
    )
    monkeypatch.setenv("CKPTD_SECRET", "some random text")
    try:
        until(lambda: supervisor.turn(0.0, 0) or supervisor.turn(9.0, 0))
        port = more["endpoint"].partition(":")[2]
        monkeypatch.setattr(supervisor, "_announced", f"192.0.2.1:{port}")
        silent(supervisor, lambda: said)
        assert "is not ended: its process runs, and answers" in said[0]
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # asked again, and said once
            supervisor.turn(9.0, 0)
            time.sleep(0.02)
        assert (len(said), started.processes[0].poll()) == (1, None)
        monkeypatch.setattr(supervisor, "_announced", f"192.0.2.1:{free_port()}")
        silent(supervisor, lambda: len(said) > 1)
        assert "cannot be asked" in said[1]
        assert started.processes[0].poll() is None
    finally:
        supervisor.end(0.0)


def test_a_controller_is_stood_in_for_when_it_is_stopped_with_its_launcher(
    tmp_path: Path,
) -> None:
    """The kernel accepts connections to a process that is stopped: that is no answer."""
    log, started = str(tmp_path / "log"), Started()
    endpoint = f"127.0.0.1:{free_port()}"
    with controlled(tmp_path, "--port", endpoint.partition(":")[2], log=log) as old:
        supervisor = supervised(
            open_places("j", log),
            tmp_path,
            *("--job", "j", "--log", log),
            endpoint=endpoint,
            start=started,
        )
        try:
            supervisor.turn(0.5, 0)
            supervisor.turn(0.1, 0)  # it was heard of
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                supervisor.turn(9.0, 0)  # by others it is
                time.sleep(0.05)
            assert not started.processes
            assert old.process is not None
            old.process.send_signal(signal.SIGSTOP)
            until(lambda: supervisor.turn(9.0, 0))
            # The endpoint's port is still held.
            assert supervisor.addresses() not in ("", endpoint)
            assert old.seat() == supervisor.addresses()
        finally:
            supervisor.end(0.0)


def test_a_launcher_whose_controller_gave_way_takes_the_place_back_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was cut off had once had the controller: it took the place, and three heard it."""
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._AGAIN_S", 0.0)
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._MOST_AGAIN_S", 0.0)
    log, started, said = str(tmp_path / "log"), Started(), list[str]()
    places = open_places("j", log)
    other = LeaderView(places.leader)
    arguments = ("--job", "j", "--log", log)
    supervisor = supervised(places, tmp_path, *arguments, say=said.append, start=started, node="n3")

    def cut_off() -> bool:
        other.leave(hears=3, knows=4)
        supervisor.turn(9.0, 3)
        return len(started.processes) > 1 or "left a sign of life" in said[-1]

    try:
        until(lambda: supervisor.turn(math.inf, NO_ORDER))
        places.leader.take(1, "127.0.0.1:9", "another")
        silent(supervisor, lambda: not supervisor.seated)
        assert "another controller registered first" in said[-1]
        supervisor.turn(0.1, 3)  # the other one answers
        until(cut_off)
        assert len(started.processes) == 1
    finally:
        supervisor.end(0.0)


def test_a_launcher_whose_controller_gave_way_lets_other_nodes_be_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be cut off from most of them, which count it among those that hear none."""
    monkeypatch.setattr("ckptd.elastic.launchers.sidecars._MOST_AGAIN_S", 3600.0)
    log, started = str(tmp_path / "log"), Started()
    places = open_places("j", log)
    supervisor = supervised(places, tmp_path, "--job", "j", "--log", log, start=started, node="n3")

    def beats() -> int:
        supervisor.turn(9.0, 3)
        return sum(sign.beat for sign in places.leader.signs().values())

    try:
        until(lambda: supervisor.turn(math.inf, NO_ORDER))
        supervisor.turn(0.1, 3)
        places.leader.take(1, "127.0.0.1:9", "another")
        silent(supervisor, lambda: not supervisor.seated)
        until(lambda: beats() > 6)
        assert len(started.processes) == 1
    finally:
        supervisor.end(0.0)


@pytest.mark.parametrize("says", ALL)
def test_a_controller_is_stood_in_for_when_a_stranger_answers_in_its_place(
    tmp_path: Path, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node started another one: a certificate of anybody's was enough to count as alive."""
    monkeypatch.setenv("CKPTD_SECRET", SECRET)
    log, started = str(tmp_path / "log"), Started()
    places = open_places("j", log)
    up = NodeUp(node="n0", life="l", slots=1)
    with controlled(tmp_path, "--nodes", "2", log=log) as old, stranger(says) as address:
        where = [old.address]
        link = NodeLink(lambda: where[0], "j", SECRET.encode(), lambda: up, lambda _: None)
        arguments = ("--job", "j", "--log", log, "--nodes", "2")
        supervisor = supervised(places, tmp_path, *arguments, start=started, greet=link.greet)
        try:
            link.start()
            until(lambda: link.answered)
            supervisor.turn(1.0, 0)
            supervisor.turn(link.absent_s, 0)
            places.leader.take(1, address, "a life that is over")
            where[0] = address
            old.kill()
            until(lambda: supervisor.turn(link.absent_s, 0))
            where[0] = supervisor.addresses()
            assert (where[0] != address, len(started.processes)) == (True, 1)
            until(lambda: link.connected and link.absent_s < 1.0)
        finally:
            link.close(0.0)
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
        more: dict[str, Any] = {"endpoint": "127.0.0.1:9", "here": here, "start": start}
        supervisor = supervised(places, tmp_path, **more)
        supervisor.turn(0.1, NO_ORDER)
        assert supervisor.started is here
        if here:
            words = dict(itertools.pairwise(commands[0]))
            assert (words["--bind"], words["--host"], words["--port"]) == (bind, "127.0.0.1", "9")
        supervisor.end(0.0)


@pytest.mark.parametrize(
    ("endpoint", "address", "here", "words"),
    [
        # Debian has such a name stand for 127.0.1.1 on the machine itself.
        ("mine:9", "", True, ["0.0.0.0", "9", "mine"]),
        ("localhost:9", "", True, ["localhost", "9", "localhost"]),
        ("away:9", "", False, ["0.0.0.0", "0", None]),
        ("away:9", "192.0.2.7", False, ["0.0.0.0", "0", "192.0.2.7"]),
        ("six:9", "", True, ["::", "9", "six"]),
    ],
)
def test_a_controller_that_others_reach_listens_at_all_addresses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    address: str,
    here: bool,
    words: list[str | None],
) -> None:
    resolve = socket.getaddrinfo

    def debian(host: str, *args: Any, **more: Any) -> Any:
        known = {"mine": "127.0.1.1", "away": "192.0.2.1", "six": "::1"}
        return resolve(known.get(host, host), *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    commands = list[list[str]]()

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        commands.append(command)
        return subprocess.Popen(["sleep", "60"], **options)

    supervisor = supervised(
        open_places("j", str(tmp_path / "log")),
        tmp_path,
        address=address,
        endpoint=endpoint,
        here=here,
        start=start,
        anywhere=True,
    )
    try:
        supervisor.turn(0.0, 0)
        supervisor.turn(9.0, 0)
        (command,) = commands
        options = dict(itertools.pairwise(command))
        assert [options.get(name) for name in ("--bind", "--port", "--host")] == words
    finally:
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
