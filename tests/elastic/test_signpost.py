"""Controllers of this machine are found while they run, and no longer."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from ckptd.elastic.signpost import Signpost, put_up, signposts


def post(job: str, pid: int) -> Signpost:
    return Signpost(job=job, address="127.0.0.1:1", log="/nowhere", pid=pid)


def test_a_post_stands_while_the_block_runs(tmp_path: Path) -> None:
    with put_up(post("mine", os.getpid()), tmp_path):
        assert [p.job for p in signposts(tmp_path)] == ["mine"]
        (path,) = tmp_path.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.iterdir())


def test_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    with put_up(post("dead", process.pid), tmp_path), put_up(post("mine", os.getpid()), tmp_path):
        assert [p.job for p in signposts(tmp_path)] == ["mine"]
        assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_post_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "controller-x.json").write_text('{"job": 1}')
    (tmp_path / "controller-y.json").write_bytes(b"\xff")
    assert signposts(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
