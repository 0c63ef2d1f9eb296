"""``ckptd top``: what it lists first, once and as JSON, on a daemon that runs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ckptd import events
from ckptd.cli.screen import odd_rows, screen
from ckptd.errors import size_text
from ckptd.monitor.daemon.place import DaemonAddress, DaemonPlace
from ckptd_simulated.feed import PlantedAt
from tests.cli.running import Cli
from tests.monitor.daemon.daemons import JOB, Running, fed, running
from tests.processes import until
from tests.publish.test_publish import Pair
from tests.terminal import Terminal


def columns(status: list[int], age: list[float | None]) -> dict[str, Any]:
    n = len(status)
    return {
        "rank": list(range(n)),
        "node": [0] * n,
        "pid": [4711 + i if i else None for i in range(n)],
        "nodes": ["a[red]node"],
        "status": status,
        "progress_age_s": age,
        "self_s": [None] * n,
        "score": [None] * n,
        "step": [-1] * n,
        "pending": [None] * n,
    }


def test_the_least_well_come_first() -> None:
    ranks = columns([0, 1, 5, 3, 2, 4, 1], [0.1, 2.0, 0.1, 9.0, 3.0, None, 7.0])
    assert odd_rows(ranks, 10) == [3, 4, 2, 5, 6, 1, 0]
    assert odd_rows(ranks, 2) == [3, 4]


def test_names_are_not_markup_and_lost_is_said() -> None:
    job = {
        "job": "[bold]j",
        "state": "waiting",
        "step": None,
        "ranks_reporting": 1,
        "world": 1,
        "agents": {"up": 0, "silent": 1},
        "goodput": None,
        "phases": {},
    }
    out = StringIO()
    Console(width=120, file=out).print(screen(job, columns([0], [None]), [], 5, "12:00:00"))
    text = out.getvalue()
    assert "[bold]j" in text
    assert "a[red]node" in text
    # What it was is not said as if it were so.
    assert text.startswith("[bold]j  connection lost since 12:00:00; it was: waiting for ranks")


@pytest.mark.parametrize("width", [60, 120])
def test_process_ids_are_told_where_they_are_known(width: int) -> None:
    job = {
        "job": "j",
        "state": "ok",
        "step": None,
        "ranks_reporting": 2,
        "world": 2,
        "agents": {"up": 1, "silent": 0},
        "goodput": None,
        "phases": {},
    }
    out = StringIO()
    ranks = columns([0, 0], [0.2, 0.1]) | {"nodes": ["a-node-of-a-long-name.example.org"]}
    Console(width=width, file=out).print(screen(job, ranks, [], 5))
    lines = out.getvalue().splitlines()
    head = next(n for n, line in enumerate(lines) if "RANK" in line)
    assert lines[head].split()[:3] == ["RANK", "NODE", "PID"]
    cells = [line.split() for line in lines[head + 1 :]]
    assert [(c[0], c[2]) for c in cells] == [("0", "-"), ("1", "4712")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("top") / "history") as it:
        with fed(it, 16, PlantedAt("stop", 5, 0.5)):
            until(lambda: it.service.rounds.last.open, "no incident opens")
            yield it


def address(daemon: Running) -> str:
    return f"{daemon.url}/?token={daemon.token}"


def test_once(cli: Cli, daemon: Running) -> None:
    out = cli.good("top", "--daemon", address(daemon), "--limit", "3").out
    assert "incident" in out.splitlines()[0]
    assert "16 of 16 ranks" in out
    assert "non-communication hang" in out
    row = out.splitlines().index(next(x for x in out.splitlines() if x.startswith("RANK")))
    assert out.splitlines()[row + 1].split()[:2] == ["5", "n1"]
    assert len(out.splitlines()[row + 1 :]) == 3


def test_published_weights_and_who_follows(cli: Cli, tmp_path: Path) -> None:
    recording = events.record(tmp_path / "events")
    with closing(recording), closing(Pair(tmp_path / "at", far=True)) as pair:
        reports = []
        for _ in range(3):
            for tensor in pair.full.values():
                tensor.view(-1)[0] += 1
            pair.publish()
            reports.append(pair.update())
        pair.publish()
    with running(tmp_path / "history", events=(str(tmp_path / "events"),)) as it:
        out = cli.good("top", "--daemon", address(it)).out
        found = cli.json("top", "--daemon", address(it))["versions"]
    assert "weights of step 4  1 worker, up to 1 version behind" in out
    assert (found["number"], found["workers"], found["behind"]) == (4, 1, 1)
    received = sum(r.bytes_received for r in reports)
    whole = sum(r.bytes_needed + r.bytes_unchanged for r in reports)
    assert (found["received"], found["whole"], found["mapped"]) == (received, whole, 0)
    assert f"{size_text(received)} of {size_text(whole)} sent" in out


def test_json(cli: Cli, daemon: Running) -> None:
    found = cli.json("top", "--daemon", address(daemon))
    assert found["url"] == daemon.url
    assert found["job"]["world"] == 16
    assert found["ranks"]["rank"] == list(range(16))
    assert [s["name"] for s in found["incidents"][0]["verdict"]["suspects"]] == ["5"]


def test_a_daemon_that_comes_back_at_another_port_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CKPTD_RUN_DIR", str(folder))
    command = [sys.executable, "-m", "ckptd", "top", "--job", JOB, "--every", "0.2"]
    with ExitStack() as first:
        gone = first.enter_context(placed(tmp_path / "history"))
        with Terminal(command, 100) as terminal:
            terminal.until("waiting for ranks")
            first.close()
            shown = terminal.until("connection lost since")
            assert "it was: waiting for ranks" in shown
            with placed(tmp_path / "history", not_at=gone.port):
                terminal.until("  waiting for ranks  ")


def test_the_link_to_the_page(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CKPTD_RUN_DIR", str(folder))
    assert cli("open", "--json").error["message"] == "no daemon runs here"
    with placed(tmp_path / "history") as daemon:
        result = cli("open", "--job", JOB)
        assert result.code == 0
        assert result.out == f"{address(daemon)}\n"
        assert f"ssh -L {daemon.port}:127.0.0.1:{daemon.port} " in result.err
        # It opens: the page's login takes the token.
        assert daemon.ask("GET", f"/?token={daemon.token}").status == 303
        found = cli.json("open")
        assert (found["job"], found["link"]) == (JOB, address(daemon))
        assert cli("open", "--job", "other", "--json").error["kind"] == "not-found"


@contextmanager
def placed(history: Path, not_at: int = 0) -> Iterator[Running]:
    """Run a daemon that verbs on this machine find; not at the port of an earlier one."""
    with ExitStack() as stack:
        if not_at:
            blocked = stack.enter_context(socket.socket())
            blocked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            blocked.bind(("127.0.0.1", not_at))
        daemon = stack.enter_context(running(history))
        place = DaemonPlace(JOB)
        stack.enter_context(place.held())
        place.write(
            DaemonAddress(
                job=JOB, url=daemon.url, token=daemon.token, pid=os.getpid(), history=str(history)
            )
        )
        yield daemon


def test_it_is_refused(cli: Cli, daemon: Running) -> None:
    assert cli("top", "--daemon", daemon.url, "--json").error["kind"] == "no-token"
    for wrong in (("--every", "0"), ("--limit", "-1")):
        assert cli("top", "--daemon", address(daemon), *wrong, "--json").code == 2
