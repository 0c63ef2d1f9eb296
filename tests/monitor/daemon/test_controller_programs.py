"""Real programs under ``ckptd run`` that are no trainers, or that take their time."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import CkptdError
from ckptd.monitor.daemon.client import DaemonClient
from tests import processes
from tests.monitor.daemon.test_controller_run import Job, job
from tests.processes import stop

# As long as PyTorch may take to be imported on a machine with too much to do.
until = partial(processes.until, within_s=280.0)

BARE = """
import os, signal, sys, time
where = {where!r}
me, once = int(os.environ["RANK"]), sys.argv[1] + ".once"
def stop_at(place):
    if where == place and me == 1 and not os.path.exists(once):
        open(once, "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
stop_at("import")
import torch, torch.distributed as dist
stop_at("join")
dist.init_process_group("gloo")
stop_at("first call")
os.write(1, f"begun {{me}} {{os.getpid()}} {{os.environ['CKPTD_GENERATION']}}\\n".encode())
x, going = torch.ones(1000), torch.ones(1)
while going:
    dist.all_reduce(x)
    x /= 3
    time.sleep(0.02)
    going.fill_(float(me > 0 or not os.path.exists(sys.argv[1])))
    dist.broadcast(going, 0)
dist.destroy_process_group()
"""
"""A loop of calls: no optimizer, no step, nothing of ckptd."""

EVALUATES = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
me = dist.get_rank()
os.write(1, f"begun {me} {os.getpid()} {os.environ['CKPTD_GENERATION']}\\n".encode())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(60):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    if me == 0:
        end = time.monotonic() + 25
        while time.monotonic() < end:
            model.module(torch.randn(512, 8))
        os.write(1, b"evaluated\\n")
    dist.barrier()
del model  # before its group: see docs/guide/in-process.md
dist.destroy_process_group()
"""


def _incidents(one: Job) -> list[dict[str, Any]]:
    client = one.client()
    if client is None:
        return []
    try:
        found: list[dict[str, Any]] = client.get("/incidents")["incidents"]
    except CkptdError:
        return []
    return found


def _three_begun(one: Job, after: int) -> bool:
    return one.newest() > after and len(one.pids(one.newest())) == 3


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["import", "join", "first call", "loop"])
def test_a_rank_that_is_stopped_is_named_in_a_program_without_steps(
    tmp_path: Path, where: str
) -> None:
    with job(tmp_path, BARE.format(where=where)) as one:
        first = 0
        if where == "loop":
            until(lambda: _three_begun(one, 0), "it does not begin")
            first = one.newest()
            stop(one.pids(first)[1])
        until(lambda: _incidents(one), "nothing is told")
        until(lambda: _three_begun(one, first), "no restart")
        one.end.touch()
        assert one.process.wait(400) == 0, "\n".join(one.lines)
    (line,) = [line for line in one.lines if re.search(r"incident \S+: non-communication", line)]
    assert "rank 1 (stopped by a signal or a debugger)" in line


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_rank_that_evaluates_is_told_and_let_go_on(tmp_path: Path) -> None:
    """The floor is far below what rank 0 takes; it is told, and nothing is done."""
    with job(tmp_path, EVALUATES, "--floor", "train=3", "--floor", "init=3") as one:
        client = until(one.client, "nothing is watched")
        assert isinstance(client, DaemonClient)
        incident = until(lambda: _incidents(one), "nothing is told")[-1]
        assert [s["name"] for s in incident["verdict"]["suspects"]] == ["0"]
        assert incident["verdict"]["numbers"]["runs"] == 1
        assert not incident["enforced"]
        assert one.process.wait(600) == 0, "\n".join(one.lines)
    assert one.lines.count("evaluated") == 2
    assert {line.split()[3] for line in one.lines if line.startswith("begun")} == {"1"}
