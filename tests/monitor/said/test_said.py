"""What jobs say of their failures is read rightly: class, rank and what to do next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.monitor.rules.said import classes, said, said_of, together
from tests.monitor.said.public import CASES, Case
from tests.monitor.said.real import PROGRAMS, RANKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_public_failure_has_its_class_and_rank(case: Case) -> None:
    found = said(case.texts, case.pids)
    if not case.kind:
        assert found is None
        return
    assert found is not None
    assert (found.kind.name, found.ranks) == (case.kind, case.ranks), found.view()


def test_there_are_failures_enough() -> None:
    assert len(CASES) + len(PROGRAMS) >= 40
    known = {kind.name for kind in classes()} | {"program"}
    wanted = {case.kind for case in CASES} | {kind for _, kind, _ in PROGRAMS.values()}
    assert wanted - known == {""}


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_real_failure_has_its_class_and_rank(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    names = list(PROGRAMS)
    command = [sys.executable, "-m", "tests.monitor.said.real", str(tmp_path), *names]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=Path(__file__).parents[3], env=env, check=True, timeout=280)
    for name in names:
        texts = {f"rank {n}": (tmp_path / name / f"rank {n}").read_text() for n in range(RANKS)}
        found = said(texts)
        assert found is not None, name
        assert (found.kind.name, found.ranks) == PROGRAMS[name][1:], (name, found.view())


def test_the_first_abnormal_line_is_marked_in_the_order_of_time() -> None:
    texts = {
        "rank 0": "[E1129 10:20:31.5 a.cpp:1] [Rank 0] Watchdog caught collective timeout\n",
        "kernel": "Nov 29 10:20:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=9, fallen off\n",
        "rank 1": "2026-11-29 10:19:59,100 INFO step 7\n2026-11-29 10:20:05,0 OSError: Errno 5\n",
    }
    found = said(texts, {9: 1})
    assert found is not None
    shown = found.view().splitlines()
    assert [line[2:10] for line in shown] == ["10:19:59", "10:20:00", "10:20:05", "10:20:31"]
    assert [line[0] for line in shown] == [" ", ">", " ", " "]
    assert found.ranks == (1,)


def test_the_kernels_lines_of_a_rank_are_told_from_its_own() -> None:
    killed = "kernel: 2026-11-29 10:20:00 Out of memory: Killed process 77 (python)"
    logs = {0: "RuntimeError: Connection closed by peer", 1: f"step 7\n{killed}"}
    text = said_of(logs)
    assert text.startswith("host memory, rank 1; next: use less memory")
    assert "> 10:20:00 kernel: " in text
    assert said_of({0: "step 7", 1: "step 7"}) == ""


def test_what_ranks_print_to_one_file_is_said_by_none_of_them() -> None:
    both = together({1, 0})
    lines = "RuntimeError: CUDA error: an illegal memory access was encountered"
    log = f"{both}{lines}\n[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 1"
    text = said_of({0: log, 1: f"{log}\nckptd: incident of rank 0: out of memory"})
    assert text.startswith("device program; next: ")
    assert text.count("CUDA error") == 1
    assert "> " + " " * 8 + " ranks 0, 1: RuntimeError" in text
    assert " rank 0: KeyError: 1" in text
    # Nobody knows which of them waits.
    late = f"{both}RuntimeError: Timed out waiting 1000ms for recv operation to complete"
    assert said_of({0: late, 1: late}).startswith("call timed out; next: ")
    assert ", rank 2; next" in said_of(
        {0: late.replace(both, ""), 1: late.replace(both, ""), 2: ""}
    )


@pytest.mark.parametrize(
    ("ranks", "who"), [((8, 9, 10), ""), ((0, 1, 2), ", rank 2"), ((9,), ", rank 9")]
)
def test_a_number_within_a_node_is_no_rank(ranks: tuple[int, ...], who: str) -> None:
    line = "E1129 10:20:01.0 1 api.py:9] failed (exitcode: -9) local_rank: 2 (pid: 1)\n"
    both = together(ranks)
    assert said_of(dict.fromkeys(ranks, both + line)).startswith(f"killed{who}; next:")
    for prefix in ("[default2]:", "[2]: "):
        text = both + prefix + "Killed\n"
        assert said_of(dict.fromkeys(ranks, text)).startswith(f"killed{who}; next:")


def test_a_traceback_without_its_head() -> None:
    text = said_of({1: '  File "t.py", line 9, in run\n    loss: nan = f()\nKeyError: 3\n'})
    assert text.startswith("program, rank 1; next:")


def test_calls_of_a_flight_recorder_are_joined_in() -> None:
    began = "flight recorder: 2026-11-29 10:20:31.000001 call 7 of group 0, gloo:all_reduce: "
    late = "2026-11-29 10:30:31,0 step 7\n"
    logs = dict.fromkeys((0, 1, 3), late + began + "entered, not ended")
    logs[2] = late + began.replace("call 7", "call 6") + "ended"
    text = said_of(logs)
    assert text.startswith("call timed out, rank 2; next:")
    assert "> 10:20:31 flight recorder of rank 0: 2026-11-29" in text


_HOSTILE = (
    "mlx5_0link",
    "amdgpu ",
    "EDAC ",
    "NVRM: Xid (",
    "[0]: ",
    "loss: ",
    "rank : ",
    "JOB 1 ",
    "Killed\n",
    "kernel: Killed process 7\n",
    "flight recorder: x\n",
    "[rank" + "9" * 5000 + "]: x\n",
    "SIGKILL pid=" + "9" * 5000 + "\n",
    "SIGKILL Rank " + "9" * 5000 + " failed to\n",
    "rank" + " " * 3000,
)


@pytest.mark.parametrize("part", _HOSTILE, ids=lambda part: part[:12].strip())
def test_hostile_lines_take_no_time(part: str) -> None:
    """What would take hours ends: a test that stood still here would meet its time-out."""
    said_of({n: part * (1 + (1 << 17) // len(part)) for n in range(2)})
