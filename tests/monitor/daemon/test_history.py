from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.errors import StoreError, UsageError
from ckptd.monitor.daemon.history import (
    SERIES,
    History,
    jobs_beside,
    read_incidents,
    read_series,
)

NOW = 1.8e9


def filled(path: Path, count: int = 5) -> None:
    history = History(path)
    for k in range(count):
        history.put_incident(f"j-{k}", NOW + k, "open" if k % 2 else "closed", f"{k}".encode())
    history.put_generation(0, 8, NOW, None, "")
    history.close()


def test_incidents_come_back_newest_first(tmp_path: Path) -> None:
    filled(tmp_path / "h")
    history = History(tmp_path / "h")
    assert history.incidents() == [b"4", b"3", b"2", b"1", b"0"]
    assert history.incidents("open") == [b"3", b"1"]
    assert history.incidents(before=NOW + 2, limit=1) == [b"1"]
    assert history.incident("j-2") == b"2"
    assert history.incident("none") is None
    history.put_incident("j-2", NOW + 2, "closed", b"new")
    assert read_incidents(tmp_path / "h", limit=3) == [b"4", b"3", b"new"]  # while it is in use
    assert history.generations() == [(0, 8.0, NOW, None, "")]
    assert not history.errors
    history.close()


def test_file_is_for_its_user_alone(tmp_path: Path) -> None:
    filled(tmp_path / "h")
    assert (tmp_path / "h").stat().st_mode & 0o777 == 0o600


def test_killed_while_it_writes(tmp_path: Path) -> None:
    code = (
        "import itertools, sys\nfrom pathlib import Path\n"
        "from ckptd.monitor.daemon.history import History\n"
        "h = History(Path(sys.argv[1]))\n"
        "for k in itertools.count():\n"
        "    h.put_incident(f'j-{k}', k, 'open', b'x' * 1000)\n"
        "    print(k, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "h")], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(30)]
        writer.kill()
    history = History(tmp_path / "h")
    assert history.set_aside is None
    assert len(history.incidents(limit=10**6)) >= len(said)
    history.close()


@pytest.mark.parametrize("how", ["head", "middle", "text", "other"])
def test_damaged_file_is_set_aside(tmp_path: Path, how: str) -> None:
    path = tmp_path / "h"
    if how == "text":
        path.write_text("not a database, and long enough to be looked at" * 100)
    elif how == "other":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
        db.close()
    else:
        filled(path, 60)
        raw = bytearray(path.read_bytes())
        place = 0 if how == "head" else 4096
        raw[place : len(raw) if how == "middle" else place + 200] = os.urandom(
            (len(raw) - place) if how == "middle" else 200
        )
        path.write_bytes(raw)
    history = History(path)
    assert history.set_aside is not None
    assert history.set_aside.exists()
    history.put_incident("j-1", NOW, "open", b"new")
    assert history.incidents() == [b"new"]
    history.close()


def test_place_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises((StoreError, OSError)):
        History(tmp_path / "none" / "h")


def test_full_disk_is_counted_and_nothing_is_lost_of_what_was(tmp_path: Path) -> None:
    history = History(tmp_path / "h", most_bytes=256 << 10)
    for k in range(100):
        history.put_incident(f"j-{k}", NOW + k, "open", bytes(10_000))
    kept = len(history.incidents(limit=1000))
    assert 0 < kept < 100
    assert history.errors == 100 - kept
    assert (tmp_path / "h").stat().st_size <= 300 << 10
    history.close()


def test_incident_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "h")
    history.put_incident("j-1", NOW, "open", bytes(2 << 20))
    assert (history.incidents(), history.errors) == ([], 1)
    history.close()


def test_series_thins_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path / "h")
    monkeypatch.setattr("ckptd.monitor.daemon.history.time.time", lambda: NOW + 3 * 3600)
    for k in range(0, 3 * 3600, 5):
        history.put_round(NOW + k, {"step_min": k, "step_max": math.nan})
    fine = history.series(["step"], NOW + 3 * 3600 - 600, points=10_000)
    assert len(fine["at"]) == 120
    assert fine["step_max"] == [None] * 120
    assert fine["step_min"][-1] == 3 * 3600 - 5
    coarse = history.series(["step"], NOW, points=10_000)
    assert len(coarse["at"]) == 180
    few = history.series(["step"], NOW, points=10)
    assert len(few["at"]) <= 10
    assert few["at"][-1] == coarse["at"][-1]
    # The finest level is kept for two hours.
    rows = history._db.execute("SELECT count(*) FROM series WHERE level = 0").fetchone()[0]
    assert rows <= 2 * 3600 / 5 + 20
    history.close()


def test_a_coarser_point_is_the_mean_of_what_steps_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "h")
    monkeypatch.setattr("ckptd.monitor.daemon.history.time.time", lambda: NOW + 3 * 3600)
    for k in range(241):
        # A step of every second point ends; one that took ten times as long is not passed over.
        took = math.nan if k % 2 else (10.0 if k == 100 else 1.0)
        history.put_round(NOW + k, {"step_s_median": took, "step_max": k})
    # All that there ever was is still there in seconds.
    assert len(history.series(["step"], 0.0, points=10_000)["at"]) == 241
    history._db.execute("DELETE FROM series WHERE level = 0 AND at < ?", (NOW + 1,))
    minutes = history.series(["time", "step"], NOW, points=10_000)
    assert minutes["at"] == [NOW, NOW + 60, NOW + 120, NOW + 180, NOW + 240]
    assert minutes["step_s_median"] == pytest.approx([1.0, 1.0, 1.3, 1.0, 1.0])
    assert minutes["step_max"] == [0, 60, 120, 180, 240]
    history._db.execute("DELETE FROM series WHERE level = 0 AND at < ?", (NOW + 100,))
    part = history.series(["step"], NOW + 50, NOW + 130)
    assert part["at"] == [NOW + 60, NOW + 120]
    joined = history.series(["time", "step"], NOW, points=2)
    assert len(joined["at"]) <= 2
    assert joined["step_max"][-1] == 240
    assert all(1.0 <= (v or 0.0) < 1.3 for v in joined["step_s_median"])
    history.close()


def test_a_history_of_the_version_before_goes_on(tmp_path: Path) -> None:
    filled(tmp_path / "h")
    with sqlite3.connect(tmp_path / "h") as db:
        for name in SERIES["time"]:
            db.execute(f"ALTER TABLE series DROP COLUMN {name}")
        db.execute("DROP TABLE about")
        db.execute("INSERT INTO series (level, at, step_max) VALUES (0, ?, 7)", (NOW,))
        db.execute("PRAGMA user_version=1")
    db.close()
    assert len(read_incidents(tmp_path / "h")) == 5
    history = History(tmp_path / "h")
    assert history.set_aside is None
    history.put_about("mine")
    history.put_round(NOW + 1, {"step_max": 8, "step_s_median": 0.25})
    assert history.incident("j-2") == b"2"
    rows = history._db.execute("SELECT step_max, step_s_median FROM series WHERE level = 0")
    assert rows.fetchall() == [(7, None), (8, 0.25)]
    assert not history.errors
    history.close()


def test_histories_of_other_jobs_beside(tmp_path: Path) -> None:
    for name in ("one", "other"):
        history = History(tmp_path / f"history-{name}.sqlite")
        history.put_about(name)
        history.put_round(NOW, {"step_max": 3})
        history.close()
    (tmp_path / "history-broken.sqlite").write_text("x" * 5000)
    found = jobs_beside(tmp_path / "history-one.sqlite")
    assert set(found) == {"one", "other"}
    read = read_series(found["other"], ["step"], 0.0, math.inf, 100)
    assert read["step_max"] == [3]
    assert read_series(tmp_path / "none.sqlite", ["step"], 0.0, math.inf, 100)["at"] == []


@pytest.mark.parametrize("what", SERIES)
def test_series_of_nothing(tmp_path: Path, what: str) -> None:
    history = History(tmp_path / "h")
    assert history.series([what], 0.0) == {name: [] for name in ("at", *SERIES[what])}
    history.close()


def test_old_incidents_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.history._MOST_INCIDENTS", 3)
    filled(tmp_path / "h")
    history = History(tmp_path / "h")
    history.put_round(NOW, {})
    assert history.incidents() == [b"4", b"3", b"2"]
    history.close()


def test_reading_what_is_no_history(tmp_path: Path) -> None:
    (tmp_path / "h").write_text("x" * 5000)
    with pytest.raises(UsageError) as caught:
        read_incidents(tmp_path / "h")
    assert "not a history file, or a damaged one" in caught.value.message
    with pytest.raises(UsageError):
        read_incidents(tmp_path / "none")
