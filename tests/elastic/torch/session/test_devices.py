"""Recovery in process on simulated devices, in real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import COMMAND
from tests.elastic.torch.session.minilauncher import MiniJob
from tests.processes import PATIENCE_S, agents_in, free_port, until
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [*ON_SIMULATED_DEVICES, pytest.mark.dist]
PROGRAMS = Path(__file__).parent / "device_programs.py"
ON_DEVICES = (sys.executable, "-m", "tests.simdevice", str(PROGRAMS))
CAMPAIGN = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniJob]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS.parents[4]), *sys.path]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    made = MiniJob(tmp_path, PROGRAMS, [], CKPTD_INTERRUPT_S=str(PATIENCE_S))
    made.command = [*ON_DEVICES, "saves", str(tmp_path)]
    yield made
    made.close()


@pytest.mark.parametrize("generations", [10, pytest.param(100, marks=CAMPAIGN)])
def test_generations_with_a_save_under_way_at_each_end(job: MiniJob, generations: int) -> None:
    """Nothing stays locked, memory is flat, and no value from behind a lost collective is saved."""
    rows: list[dict[str, Any]] = []
    shared: list[int] = []
    for generation in range(1, generations + 1):
        job.begin("a")
        found: list[dict[str, Any]] = until(partial(_rows, job, generation), lambda: _text(job))
        rows = found
        job.interrupt()
        shared.append(_shared_memory(job))
    (job.folder / "end").touch()
    job.begin("a")
    text = job.done()[0]
    assert [row["step"] for row in rows] == list(range(generations))
    assert [row["values"] for row in rows] == [[float(n)] for n in range(generations)]
    assert rows[-1]["problems"] == []
    assert "cannot be page-locked" not in text
    early, late = rows[generations * 2 // 5], rows[-1]
    assert all(row["locked"] == [] and sum(row["locked_now"]) >= 16 << 20 for row in rows)
    for what in ("device", "arenas"):
        assert early[what] == late[what], (what, early, late)
    assert late["fds"] <= early["fds"] + 2, (early, late)
    assert late["threads"] <= early["threads"] + 2, (early, late)
    # One slot that is kept, or the state once, would be 16 MiB in each generation.
    assert late["anonymous"] <= early["anonymous"] + (64 << 20), (early, late)
    assert max(shared) <= max(shared[:5]) + (16 << 20), shared
    print(json.dumps({"early": early, "late": late, "shared": shared}))


def _shared_memory(job: MiniJob) -> int:
    """Return the bytes of memory that the rank and the agent of its node share."""
    process = job.nodes["a"].process
    assert process is not None
    files: dict[int, int] = {}
    for pid in [process.pid, *agents_in(Path(os.environ["CKPTD_RUN_DIR"]))]:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    stat = path.stat()
                    files[stat.st_ino] = stat.st_blocks * 512
    return sum(files.values())


def _text(job: MiniJob) -> str:
    return job.nodes["a"].output.read_text()


def _rows(job: MiniJob, wanted: int) -> list[dict[str, Any]]:
    path = job.folder / "a.jsonl"
    if not path.exists():
        return []
    rows = [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]
    return rows if len(rows) == wanted else []


@pytest.mark.long
def test_a_process_with_a_sticky_error_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With launcher and controller: another process takes its rank, the other rank's stays."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS.parents[4]), *sys.path]))
    flags = ("--no-watch", "--node", "n", "--nproc-per-node", "2", "--no-python")
    done = subprocess.run(
        [*COMMAND, "run", *flags, "--interrupt", "20", *ON_DEVICES, "fails", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    ranks = re.findall(r"rank (\d) (\d) (\d+) step (\d)", text)
    first = {rank: pid for rank, generation, pid, _ in ranks if generation == "1"}
    later = {rank: pid for rank, generation, pid, _ in ranks if generation != "1"}
    assert first["0"] == later["0"], text
    assert first["1"] != later["1"], text
    assert len({generation for _, generation, _, _ in ranks}) == 2, "one recovery is enough"
    assert [step for rank, _, _, step in ranks if rank == "1"] == list("12345")
    wanted = rf"rank 1 \(process {first['1']}\) is replaced by a new"
    assert re.search(wanted + " process: the device fails: CUDA error: device-side assert", text)


@pytest.mark.long
def test_a_device_that_fails_each_process_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With launchers of two nodes and a controller: the job goes on without that slot alone."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS.parents[4]), *sys.path]))
    flags = ("--no-watch", "--nnodes", "1:2", "--nproc-per-node", "2", "--no-python")
    where = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--interrupt", "20")
    program = [*ON_DEVICES, "sick", str(tmp_path)]
    nodes = [
        subprocess.Popen(
            [*COMMAND, "run", *flags, *where, "--node", node, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in ("a", "b")
    ]
    text = "".join(node.communicate(timeout=2 * PATIENCE_S)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], text
    steps = re.findall(r"of (\d): (\w) device (\d) step (\d)", text)
    assert {(node, device) for world, node, device, _ in steps if world == "4"} >= {("a", "0")}
    last = sorted((world, node, device) for world, node, device, step in steps if step == "6")
    assert last == [("3", "a", "1"), ("3", "b", "0"), ("3", "b", "1")], text
    assert "slot 0 is disabled, its device failed in every process" in text
