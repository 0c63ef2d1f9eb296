"""Filling live tensors where they lie, on the host (devices: `device/test_restore.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckptd
from ckptd.checkpoint.format.witness import gather
from ckptd.checkpoint.torch.filling import Filling
from ckptd.checkpoint.torch.state.describe import Describer

pytestmark = pytest.mark.usefixtures("writing_thread")


def test_a_strided_tensor_is_filled_where_it_lies(tmp_path: Path) -> None:
    saved = {"column": torch.rand(40), "turned": torch.rand(30, 50), "cube": torch.rand(2, 3, 4, 5)}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, saved)
    table = torch.full((40, 7), 9.0)
    live = {
        "column": table[:, 2],
        "turned": torch.zeros(50, 30).t(),
        "cube": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    filling = Filling(Describer([0]))
    for number, (name, tensor) in enumerate(live.items()):
        filling.add([(name, tensor, number)])
        target = filling.wants[-1].target
        assert isinstance(target, np.ndarray)
        start = target.__array_interface__["data"][0]
        assert start == tensor.data_ptr()
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load(live)
    assert all(torch.equal(live[n], saved[n]) for n in saved)
    others = torch.cat([table[:, :2], table[:, 3:]], 1)
    assert bool((others == 9.0).all())


def test_what_a_checkpoint_leaves_out_stays_as_it_is() -> None:
    """Also where a tensor has a buffer beside it, whose bytes would be anything."""
    base = torch.arange(20.0)
    overlapping = base.as_strided((6, 4), (3, 1))
    rows = torch.rand(5, 7).t()
    before = overlapping.clone(), rows.clone()
    filling = Filling(Describer([0]))
    filling.add([("overlapping", overlapping, 0)])
    assert filling.rows(rows) is not None
    with filling:
        filling.finish()
    assert torch.equal(overlapping, before[0])
    assert torch.equal(rows, before[1])


def test_a_turned_matrix_is_saved_whose_type_torch_cannot_turn(tmp_path: Path) -> None:
    def packed(values: torch.Tensor) -> torch.Tensor:
        return values.view(torch.float4_e2m1fn_x2)

    values = torch.arange(8000).to(torch.uint8).view(80, 100)
    live = {"turned": packed(values.clone()).t(), "plain": packed(torch.zeros(100, 80).byte())}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"turned": live["turned"], "plain": live["turned"]})
        ck.wait()
        live["turned"].view(torch.uint8).zero_()
        ck.load(live)
    assert all(torch.equal(t.view(torch.uint8), values.t()) for t in live.values())


@pytest.mark.parametrize("at", [0, 1], ids=["aligned", "not"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (4, 1, 8)])
def test_values_are_taken_as_from_each_target_alone(sizes: tuple[int, ...], at: int) -> None:
    """What is looked up for all targets at once is what each has, wherever they lie."""
    draw = np.random.default_rng(0)
    targets = [draw.integers(256, size=64 * s + at, dtype=np.uint8)[at:] for s in sizes]
    which = np.repeat(np.arange(len(sizes)), 32)
    elements = draw.integers(64, size=len(which))
    elements[:2] = 0, 63
    values = Filling(Describer([0])).values(targets, np.array(sizes))
    wanted = [
        gather(targets[w], sizes[w], np.array([e])) for w, e in zip(which, elements, strict=True)
    ]
    assert (values(which, elements) == np.concatenate(wanted)).all()
    for outside in (-1, 64):
        elements[-1] = outside
        with pytest.raises(ckptd.UsageError, match="does not lie in its buffer"):
            values(which, elements)
