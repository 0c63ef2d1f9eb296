"""What the recorder promises about CUDA tensors, as functions that need a device and no pytest.

`tests/monitor/torch/recorder/test_ends_device.py` and the check `promises` of
``bench/gpu_session.py`` run
them: one rank, NCCL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import ckptd.monitor
from ckptd.monitor.ring import read

__all__ = ["CHECKS"]

LONG = 1_000_000_000
"""Cycles of a kernel: at least a third of a second on any device."""


@contextmanager
def one_rank(folder: str) -> Iterator[Any]:
    """Be the only rank of a NCCL group, recorded by Python."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    os.environ["CKPTD_RECORDER"] = "python"
    try:
        recorder = ckptd.monitor.attach(folder)
        yield recorder
        assert recorder.on
    finally:
        ckptd.monitor.detach()
        dist.destroy_process_group()


def ended(recorder: Any, number: int) -> Any:
    """Return the calls, once `number` of them have ended."""
    end = time.monotonic() + 60
    while True:
        calls = read(recorder.ring.path).calls
        if len(calls[calls["end"] > 0]) >= number:
            return calls
        assert time.monotonic() < end
        time.sleep(0.02)


def calls_end_when_the_device_is_done(folder: str) -> None:
    with one_rank(folder) as recorder:
        tensor = torch.ones(8, device="cuda")
        dist.all_reduce(tensor)
        ended(recorder, 1)
        torch.cuda._sleep(LONG)
        dist.all_reduce(tensor)
        returned = time.monotonic()
        torch.cuda.synchronize()
        done = time.monotonic()
        last = ended(recorder, 2)[-1]
        # Behind the kernel, and not as late as a look at it each tenth of a second would be.
        assert returned < last["end"] < done + 0.05


def calls_nobody_waits_for_end(folder: str) -> None:
    with one_rank(folder) as recorder:
        tensor = torch.ones(8, device="cuda")
        work = dist.all_reduce(tensor, async_op=True)
        assert ended(recorder, 1)[-1]["end"] > 0
        work.wait()


def a_capture_is_not_broken(folder: str) -> None:
    with one_rank(folder) as recorder:
        tensor = torch.ones(8, device="cuda")
        dist.all_reduce(tensor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor *= 2
            dist.all_reduce(tensor)
            time.sleep(0.5)  # the pulse looks at events meanwhile
        assert len(ended(recorder, 2)) == 2
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert tensor.tolist() == [8.0] * 8
        assert len(read(recorder.ring.path).calls) == 2


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        calls_end_when_the_device_is_done,
        calls_nobody_waits_for_end,
        a_capture_is_not_broken,
    )
}
