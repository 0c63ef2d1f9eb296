"""A rank of the job that the demo watches: an ordinary loop that knows nothing of any monitor.

A file in its folder makes a rank slow, or lets it leave out a collective: what the demo plants.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ckptd.crashes import report_crashes
from ckptd_demo.model import build
from ckptd_demo.spec import GptShape

__all__ = ["PID", "SKIP", "SLOW", "STEP", "main"]

PID, STEP = "pid-{}", "step"
SLOW, SKIP = "slow-{}", "skip-{}"
SLOWER_S = 0.1
_SHAPE = GptShape(layers=1, heads=2, width=32, seq=32)
_BATCH = 2
_LIMIT = timedelta(minutes=10)


def main() -> None:
    """Train until somebody ends it."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=_LIMIT)
    rank = distributed.get_rank()
    (folder / PID.format(rank)).write_text(str(os.getpid()))
    slow, skip = folder / SLOW.format(rank), folder / SKIP.format(rank)
    model = DistributedDataParallel(build(_SHAPE, 1))
    optimizer = AdamW(model.parameters(), 1e-3)
    step = 0
    while True:
        step += 1
        tokens = torch.randint(256, (_BATCH, _SHAPE.seq + 1))
        if slow.exists():
            time.sleep(SLOWER_S)
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not skip.exists():
            distributed.all_reduce(loss.detach())
        if rank == 0:
            _tell(folder / STEP, step)


def _tell(path: Path, step: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(str(step))
    part.rename(path)


if __name__ == "__main__":
    report_crashes()
    main()
