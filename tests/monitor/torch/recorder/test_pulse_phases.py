"""Phases are marked where PyTorch and ckptd are about something else than training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.utils import _DistWrapper

import ckptd
import ckptd.monitor
from ckptd.monitor.job import Phase
from ckptd.monitor.ring import read
from ckptd.testing.ranks import run_ranks
from tests.processes import until

pytestmark = pytest.mark.usefixtures("writing_thread")


def phases(recorder: Any) -> set[int]:
    return set(read(recorder.ring.path).calls["phase"].tolist())


def saved(folder: str) -> tuple[set[int], Phase]:
    """Save and load by `dcp`; return the phases of its calls, and that of one after them."""
    before = _DistWrapper.all_reduce
    recorder = ckptd.monitor.attach(folder)
    ckptd.monitor.step(0)
    until(lambda: _DistWrapper.all_reduce is not before)
    state = {"t": torch.ones(4)}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    during = phases(recorder)
    dist.all_reduce(state["t"])
    last = Phase(int(read(recorder.ring.path).calls["phase"][-1]))
    ckptd.monitor.detach()
    assert _DistWrapper.all_reduce is before
    return during, last


@pytest.mark.dist
def test_saves_and_loads_of_dcp_are_marked(tmp_path: Path) -> None:
    for during, last in run_ranks(2, saved, str(tmp_path)):
        assert Phase.CKPT in during
        assert last is Phase.TRAIN


class Watching(dict[str, Any]):
    """A state that looks at the phase when it is walked through."""

    seen: list[Phase]

    def __iter__(self) -> Any:
        recorder = ckptd.monitor.attach()
        self.seen.append(recorder.ring.phase)
        return super().__iter__()

    def items(self) -> Any:
        self.seen.append(ckptd.monitor.attach().ring.phase)
        return super().items()


def ours(folder: str) -> tuple[list[Phase], list[Phase], Phase]:
    recorder = ckptd.monitor.attach(folder)
    ckptd.monitor.step(0)
    state = Watching(t=torch.ones(4))
    with ckptd.Checkpointer(f"{folder}/root") as ck:
        state.seen = saving = []
        ck.save(1, state)
        state.seen = loading = []
        ck.load(state)
    return saving, loading, recorder.ring.phase


@pytest.mark.dist
def test_saves_and_loads_of_ckptd_are_marked(tmp_path: Path) -> None:
    for saving, loading, after in run_ranks(2, ours, str(tmp_path)):
        assert set(saving) == {Phase.CKPT}
        assert set(loading) == {Phase.CKPT}
        assert after is Phase.TRAIN
