"""Real ranks hand their tensors to each other: other layouts, fewer ranks, a rank that dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.base.torch.ranks import board_of
from ckptd.errors import CkptdError
from ckptd.reshard.live.move import MoveReport
from ckptd.reshard.live.transport import PendingMessage
from ckptd.reshard.torch.relayout import relayout
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.processes import PATIENCE_S
from tests.reshard.live.shm import ShmTransport
from tests.reshard.torch.layout.jobs import (
    PROGRAM,
    Tree,
    chunks,
    contents,
    differing,
    fsdp_job,
    megatron_job,
    trained,
    whole,
    whole_job,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "job.lay"
    path.write_text(PROGRAM)
    return str(path)


def chunked_job(seed: int, steps: int, world: int) -> tuple[Tree, torch.optim.AdamW]:
    rank = dist.get_rank()
    module = Tree(chunks(whole(seed), rank, world))
    return module, trained(
        module, [chunks(whole(seed + 10 + i), rank, world) for i in range(steps)]
    )


def there_and_back(program: str) -> tuple[list[str], list[str], int]:
    """Four ranks as Megatron cuts, to three as FSDP cuts, to four again."""
    rank = dist.get_rank()
    module, optim = megatron_job(1, 2)
    state = {"model": module, "optim": optim}
    new = chunked_job(7, 0, 3)
    fewer = {"model": new[0], "optim": new[1]} if rank < 3 else None
    report = relayout(state, f"{program}:mg", fewer, f"{program}:fs", budget_bytes=1 << 18)
    first: list[str] = []
    if fewer is not None:
        first = differing(contents(*new), contents(*chunked_job(1, 2, 3)))
    new_module, new_optim = megatron_job(9, 1)
    back = {"model": new_module, "optim": new_optim}
    relayout(fewer, f"{program}:fs", back, f"{program}:mg", budget_bytes=1 << 18)
    return (
        first,
        differing(contents(new_module, new_optim), contents(module, optim)),
        report.samples,
    )


def test_fewer_ranks_and_back_again(program: str) -> None:
    done = run_ranks(4, there_and_back, program, deadline_s=PATIENCE_S)
    assert [d[:2] for d in done] == [([], [])] * 4
    assert all(samples for _, _, samples in done[:3])


def to_fsdp(program: str) -> list[str]:
    module, optim = megatron_job(1, 2)
    new, new_optim = fsdp_job(5)
    transport = ShmTransport(board_of(None, 60.0), "own")
    try:
        relayout(
            {"model": module, "optim": optim},
            f"{program}:mg",
            {"model": new, "optim": new_optim},
            f"{program}:fs4",
            transport,
            1 << 18,
        )
    finally:
        transport.close()
    return differing(contents(new, new_optim), contents(*whole_job(1, 2)))


def test_plain_tensors_become_dtensors_through_shared_memory(program: str) -> None:
    assert run_ranks(4, to_fsdp, program, deadline_s=PATIENCE_S) == [[]] * 4


LARGE = """
mesh A = t:2
mesh B = t:2
space s { w{i}[n m] }
layout rows of s on A { w.{i} = w{i}[n@t m] }
layout columns of s on B { w.{i} = w{i}[n m@t] }
"""
ROWS, COLUMNS, COUNT = 1024, 2048, 12
BUDGET = 8 << 20


def large(program: str) -> tuple[bool, int, MoveReport]:
    """Move 48 MB a rank, and measure how much memory the process takes meanwhile."""
    rank = dist.get_rank()
    pieces = [torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)] * COUNT
    old = {f"w.{i}": (p + i).chunk(2)[rank].contiguous() for i, p in enumerate(pieces)}
    new = {n: torch.zeros(ROWS, COLUMNS // 2) for n in old}
    small = {f"w.{i}": torch.zeros(2, 4) for i in range(COUNT)}
    other = {n: torch.zeros(4, 2) for n in small}
    # What is made once for a process (threads, connections, code) is no part of the measure.
    relayout({"m": small}, f"{program}:rows", {"m": other}, f"{program}:columns")
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = memory("VmRSS")
    report = relayout(
        {"m": old}, f"{program}:rows", {"m": new}, f"{program}:columns", budget_bytes=BUDGET
    )
    extra = memory("VmHWM") - before
    good = all(torch.equal(new[f"w.{i}"], (p + i).chunk(2, 1)[rank]) for i, p in enumerate(pieces))
    return good, extra, report


def memory(what: str) -> int:
    with open("/proc/self/status") as f:
        line = next(x for x in f if x.startswith(what))
    return int(line.split()[1]) << 10


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "job.lay"
    path.write_text(LARGE)
    for good, extra, report in run_ranks(2, large, str(path), deadline_s=PATIENCE_S):
        assert good
        assert report.bytes_sent == report.bytes_received == COUNT * ROWS * COLUMNS
        assert report.messages > 2 * COUNT
        assert extra <= BUDGET, (extra, report)


class Deadly:
    """A transport that kills its process after some sends."""

    def __init__(self, inner: Any, after: int) -> None:
        self._inner = inner
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, peer: int, data: Any) -> PendingMessage:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        pending: PendingMessage = self._inner.send(peer, data)
        return pending


def dying(program: str, kind: str, pids: Path) -> tuple[str, str | None, bool]:
    (pids / str(os.getpid())).touch()
    module, optim = megatron_job(1, 1)
    new, new_optim = megatron_job(2, 1, pipeline=1)
    inner: Any = TorchTransport()
    if kind == "shm":
        inner = ShmTransport(board_of(None, 60.0), "own")
    transport = Deadly(inner, 5) if dist.get_rank() == 2 else inner
    try:
        relayout(
            {"model": module, "optim": optim},
            f"{program}:mg",
            {"model": new, "optim": new_optim},
            f"{program}:mgd",
            transport,
            6 * 2 * 4096,
            timeout_s=60.0,
        )
    except CkptdError as error:
        return error.kind, error.where, error.state_corrupted
    return "", None, False


def left_behind(pids: Path) -> set[str]:
    """Return shared memory that processes have made."""
    found = {n: re.fullmatch(r"ckptd-(\d+)-[0-9a-f]+", n) for n in os.listdir("/dev/shm")}
    return {n for n, m in found.items() if m and (pids / m[1]).exists()}


@pytest.mark.parametrize("kind", ["torch", "shm"])
def test_a_rank_that_dies_is_named_by_all_others(program: str, kind: str, tmp_path: Path) -> None:
    outcomes = rank_outcomes(
        4, dying, program, kind, tmp_path, deadline_s=PATIENCE_S, grace_s=PATIENCE_S
    )
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        found = outcomes[rank].value
        assert found is not None, outcomes[rank]
        assert found == ("rank-died", "rank 2", True)
    assert len([p for p in tmp_path.iterdir() if p.name.isdecimal()]) == 4
    assert not left_behind(tmp_path)
