from __future__ import annotations

import socket
import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptd.errors import StoreError
from ckptd.monitor.recording import JobRecording, replay
from ckptd.monitor.report import pack, unpack_report
from ckptd_simulated.feed import PlantedAt
from tests.monitor.daemon.daemons import Running, fed, quick_settings, running, sheets
from tests.processes import until


def incidents(daemon: Running) -> list[str]:
    return [i["id"] for i in daemon.client.get("/incidents")["incidents"]]


def test_ids_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "history"
    settings = replace(quick_settings(), close_s=0.3)
    with running(path, settings=settings) as daemon, fed(daemon, 8, PlantedAt("crash", 3, 1.0)):
        until(lambda: incidents(daemon))
    with running(path, settings=settings) as daemon:
        before = incidents(daemon)
        assert before[-1] == "job-1"
        with fed(daemon, 8, PlantedAt("hang", 5, 1.0)):
            after = until(lambda: incidents(daemon)[: -len(before)])
            assert after[-1] == f"job-{len(before) + 1}"


def test_damaged_history_is_said_and_the_daemon_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"x" * 10_000)
    with running(path) as daemon:
        assert daemon.ask("GET", "/healthz").status == 200
    assert "history was damaged" in capsys.readouterr().err
    assert list(tmp_path.glob("history.damaged-*"))


def test_history_that_is_taken_away_costs_no_round(tmp_path: Path) -> None:
    path = tmp_path / "history"
    with running(path) as daemon, fed(daemon, 8):
        with sqlite3.connect(path, timeout=60) as other:
            other.execute("DROP TABLE series")
        other.close()
        until(lambda: daemon.service.history.errors)
        before = daemon.service.rounds.last.rounds
        until(lambda: daemon.service.rounds.last.rounds > before + 3)
        assert not daemon.service.rounds.defects


def test_everything_is_recorded_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with running(tmp_path / "history", recording=file) as daemon:
        with fed(daemon, 8, PlantedAt("crash", 3, 1.0)):
            until(lambda: incidents(daemon))
    assert file.stat().st_mode & 0o777 == 0o600
    assert JobRecording(file).job == "job"
    assert [i.kind for i in replay(file, quick_settings()).incidents] == ["crash"]
    with pytest.raises(StoreError), running(tmp_path / "history", recording=file):
        pass


def test_generations_follow_each_other(tmp_path: Path) -> None:
    def of(generation: int) -> bytes:
        sheet = unpack_report(sheets()[0])
        ranks = np.array(sheet.table("ranks"))
        ranks["generation"] = generation
        return pack(msgspec.structs.replace(sheet, number=generation, ranks=ranks.tobytes()))

    path = tmp_path / "history"
    with running(path) as daemon:
        generations = daemon.service.generations
        assert daemon.post("sheet", of(1)).status == 200
        until(lambda: generations.newest == 1)
        assert daemon.post("sheet", of(2)).status == 200
        until(lambda: generations.newest == 2)
    with running(path) as daemon:
        told = daemon.client.get("/elastic")["generations"]
    assert [g["generation"] for g in told] == [1, 2]
    assert told[0]["ended"] is not None
    assert told[1]["ended"] is None


def test_connection_that_is_only_open_costs_nothing(daemon: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", daemon.port), timeout=60) for _ in range(200)]
    try:
        assert daemon.ask("GET", "/healthz").status == 200
    finally:
        for sock in idle:
            sock.close()
