"""Kills for want of memory are told apart from others, with a real kernel where it lets us."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.base.runtime.host import kill_counts, memory_groups
from ckptd.elastic.launchers.memory import MemoryWatch
from tests.processes import PATIENCE_S

EAT = """\
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
print("in", flush=True)
sys.stdin.readline()
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20)))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of ours with 64 MB, below the one that this process is in."""
    base = next(memory_groups(), None)
    if base is None:
        pytest.skip("no memory control group is to be seen")
    folder = base / f"ckptd-test-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        limit = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / limit).write_text(str(64 << 20))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    yield folder
    for _ in range(100):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)


def test_who_eats_its_memory_is_named(group: Path, tmp_path: Path) -> None:
    watch = MemoryWatch()
    top = tmp_path / "own"
    top.write_text("0::/")
    watch._counts[:0] = kill_counts(group, top)
    watch._kills = watch._count()
    with subprocess.Popen(
        [sys.executable, "-c", EAT, str(group / "cgroup.procs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        watch.look(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    text = watch.killed(process.pid)
    assert text.startswith("killed by the kernel, out of memory (OOM)"), text
    assert "64 MiB" in text, text  # the group's limit
    assert "of the machine's" not in text, "what is free there explains nothing"
    # What was counted is told once: another process was killed by somebody.
    assert watch.killed(1 << 30).startswith("SIGKILL from another process")


def test_who_is_killed_by_somebody_is_told_with_the_memory() -> None:
    watch = MemoryWatch()
    with subprocess.Popen(["sleep", "600"]) as process:
        watch.look(process.pid)
        process.kill()
        process.wait(PATIENCE_S)
    text = watch.killed(process.pid)
    assert "it held" in text
    assert "of the machine's" in text


def test_of_a_kill_on_the_machine_the_facts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryWatch()
    monkeypatch.setattr("ckptd.elastic.launchers.memory._logged", lambda _: "")
    more = [*watch._kills[:-1], watch._kills[-1] + 1]
    monkeypatch.setattr(watch, "_count", lambda: more)
    text = watch.killed(1 << 30)
    assert text.startswith("most likely out of memory (OOM)")
    assert "of the machine's" in text
    assert "{" not in text
