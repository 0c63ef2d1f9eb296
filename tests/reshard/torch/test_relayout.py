"""A live move within one process: what it moves, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import CkptdError, MismatchError, UsageError
from tests.reshard.torch.layout.jobs import Tree, contents, differing, whole, whole_job
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused


def test_tensors_states_and_numbers_move(tmp_path: Any) -> None:
    module, optim = whole_job(1, 2)
    new = Tree(fused(whole(2)))
    new_optim = torch.optim.AdamW(new.parameters(), lr=0.5)
    state = {"model": new, "optim": new_optim, "n": 3}
    report = ckptd.relayout({"model": module, "optim": optim}, WHOLE, state, FUSED)
    assert report.bytes_kept
    assert report.samples
    assert not report.bytes_sent
    found, own = contents(new, new_optim), contents(module, optim)
    assert all(t == 2 for n, t in found.items() if n.endswith("/step"))
    for suffix in ("", "/exp_avg", "/exp_avg_sq"):
        part = {n.removesuffix(suffix): t for n, t in own.items() if n.endswith("weight" + suffix)}
        moved = {
            n.removesuffix(suffix): t for n, t in found.items() if n.endswith("weight" + suffix)
        }
        assert differing(moved, fused(part)) == []
    # What is no tensor stays: the learning rate is the new optimizer's.
    assert new_optim.param_groups[0]["lr"] == 0.5
    assert state["n"] == 3


def test_parameters_only() -> None:
    module, optim = whole_job(1, 1)
    new = Tree(fused(whole(2)))
    new_optim = torch.optim.AdamW(new.parameters())
    state = {"model": new, "optim": new_optim}
    ckptd.relayout({"model": module, "optim": optim}, WHOLE, state, FUSED, states=False)
    assert differing(dict(new.state_dict()), fused(dict(module.state_dict()))) == []
    assert not new_optim.state


def refused(source: Any, target: Any, **options: Any) -> CkptdError:
    with pytest.raises(CkptdError) as caught:
        ckptd.relayout(source, WHOLE, target, FUSED, **options)
    return caught.value


def test_what_cannot_be_moved_is_refused_before_anything_is_written() -> None:
    module = Tree(whole(1))
    new = Tree(fused(whole(2)))
    before = {n: t.clone() for n, t in new.state_dict().items()}
    source, target = {"model": module}, {"model": new}
    shared = fused(whole(3)) | {"embed.weight": module.state_dict()["embed.weight"]}
    assert "a tensor is both moved and filled" in refused(source, {"model": shared}).message
    assert (
        "the budget is too small to move anything"
        in refused(source, target, budget_bytes=1000).message
    )
    assert refused(None, target).kind == "lay-use"
    assert refused(source, target, target_ranks=[1]).kind == "lay-use"
    half = fused(whole(3))
    half["norm.weight"] = half["norm.weight"].half()
    error = refused(source, {"model": half})
    assert isinstance(error, MismatchError | UsageError)
    turned = fused(whole(3))
    turned["embed.weight"] = turned["embed.weight"].t().contiguous().t()
    assert (
        "a tensor that is not contiguous cannot be moved"
        in refused(source, {"model": turned}).message
    )
    assert differing(dict(new.state_dict()), before) == []
