"""A process that goes on as another rank of another generation has another ring."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptd.monitor
from ckptd.events.bus import regroup
from ckptd.monitor.agent.rings import Rings
from ckptd.monitor.ring import RecorderState, read
from ckptd.monitor.torch.recorder.recorder import recorder
from ckptd.testing.ranks import run_ranks
from tests.monitor.torch.recorder.jobs import attach

pytestmark = pytest.mark.timeout(600)


def two_lives(folder: str) -> None:
    regroup(2, 0, 1)
    assert recorder() is None  # nothing was recorded
    os.environ["CKPTD_GENERATION"] = "3"
    first = attach(folder, "python")
    watched = Rings(Path(folder))
    watched.refresh(time.monotonic())
    assert watched.ranks[0].header.generation == 3
    ckptd.monitor.step(4)
    dist.all_reduce(torch.ones(1))
    regroup(5, 2, 4)
    second = recorder()
    assert second is not None
    assert second.on
    assert ckptd.monitor.attach() is second
    assert not first.ring.path.exists()
    ckptd.monitor.step(9)
    dist.all_reduce(torch.ones(1))
    view = read(second.ring.path)
    assert (view.rank, view.world, view.step) == (2, 4, 9)
    assert view.calls["seq"].tolist() == [1]
    # Whoever watches sees one process, which is the new rank.
    watched.refresh(time.monotonic() + 10)
    assert [(r, one.header.generation) for r, one in watched.ranks.items()] == [(2, 5)]
    assert watched.ranks[2].recorder is RecorderState.CALLS
    watched.close()
    regroup(6, 2, 4)  # the same rank again takes the same file
    third = recorder()
    assert third is not None
    assert third.ring.path == second.ring.path
    assert third.ring.identity.generation == 6
    assert len(list(Path(folder).glob("*.ring"))) == 1
    # No room for another ring: the program goes on, and nothing is recorded.
    third.ring.path.unlink()
    os.rmdir(folder)
    regroup(7, 0, 1)
    assert recorder() is None
    dist.all_reduce(torch.ones(1))


@pytest.mark.dist
def test_a_process_with_two_lives(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir()
    run_ranks(1, two_lives, str(tmp_path / "rings"))
