"""`scripts/s3-server`: what it says when there can be no server, how it ends with its owner."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "s3-server"


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(shutil.which("bash")), str(_SCRIPT), *arguments],
        env={**os.environ, **({"PATH": path} if path else {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_usage() -> None:
    done = run()
    assert done.returncode == 2
    assert "s3-server start FOLDER" in done.stdout


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for verb in ("start", "stop"):
        done = run(verb, str(tmp_path))
        assert done.returncode == 2
        assert str(tmp_path) in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"
    assert run("stop", str(tmp_path / "nothing")).returncode == 0


def test_a_reason_when_there_can_be_no_server(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("mkdir", "ls", "id"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = run("start", str(tmp_path / "server"), path=str(tools))
    assert done.returncode == 3
    assert "s3-server: not installed" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1020)
def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        done = run("start", str(tmp_path / "server"), str(owner.pid))
        if done.returncode == 3:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        pids = [int(f.read_text()) for f in (tmp_path / "server" / "pids").iterdir()]
        assert len(pids) == 3
        assert all(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    finally:
        owner.kill()
        owner.communicate()
    end = time.monotonic() + 60
    while (tmp_path / "server").exists():
        assert time.monotonic() < end, "the server outlives its owner"
        time.sleep(0.2)
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or str(tmp_path).encode() not in command.read_bytes()
