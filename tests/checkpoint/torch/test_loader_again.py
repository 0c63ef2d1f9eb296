"""A load that uses the plan of an earlier one brings back what one without a memory does."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ckptd
from ckptd.checkpoint.torch import loader
from ckptd.checkpoint.torch.state import restore
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import CkptdError, MismatchError
from ckptd.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("writing_thread")

State = dict[str, Any]


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].bias = model[0].bias
    return model


def make() -> State:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    plain = {"w": torch.randn(4, 4), "v": torch.randn(4), "n": torch.arange(6), "e": torch.empty(0)}
    return {"model": model, "optim": optimizer, "plain": plain, "x": torch.ones(3), "steps": 7}


def values(state: State) -> dict[str, Any]:
    """Return everything of a state by name, copied."""
    leaves = flatten(state)
    found: dict[str, Any] = {n: leaf.tensor.tolist() for n, leaf in leaves.tensors.items()}
    found |= {f"{n} is {leaf.dtype}": leaf.shape for n, leaf in leaves.tensors.items()}
    return (
        found | {n: copy.deepcopy(leaf.raw) for n, leaf in leaves.objects.items()} | leaves.aliases
    )


def spoil(state: State) -> None:
    """Give all tensors and numbers other values."""
    with torch.no_grad():
        for leaf in flatten(state).tensors.values():
            leaf.tensor.zero_()
    if isinstance(state["steps"], int):
        state["steps"] = -1
    state["optim"].param_groups[0]["betas"] = (0.0, 0.0)


def outcome(ck: ckptd.Checkpointer, state: State, **options: Any) -> Any:
    spoil(state)
    before = values(state)
    try:
        ck.load(state, **options)
    except CkptdError as error:
        untouched = error.state_corrupted or values(state) == before
        return type(error), error.kind, error.message, error.where, untouched
    return values(state)


def weight(state: State) -> Any:
    return state["model"][0].weight


def tie(s: State) -> None:
    s["model"][2].weight = weight(s)
    s["optim"] = torch.optim.AdamW(s["model"].parameters())


def another_module(s: State) -> None:
    s["model"][1] = nn.LayerNorm(4)
    s["optim"] = torch.optim.AdamW(s["model"].parameters())


def no_norm(s: State) -> None:
    s["model"][1] = nn.BatchNorm1d(4, affine=False)
    s["optim"] = torch.optim.AdamW(s["model"].parameters())


def untie(s: State) -> None:
    s["model"][2].bias = nn.Parameter(torch.zeros(4))


def other_memory(s: State) -> None:
    weight(s).data = torch.randn(4, 4)


def hooked(s: State) -> None:
    s["model"][0].register_load_state_dict_pre_hook(lambda *a: a[1].update(a[1]))


def doubling(s: State) -> None:
    def twice(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = 2 * state[prefix + "weight"]

    s["model"][0].register_load_state_dict_pre_hook(twice)


def resized(s: State) -> None:
    storage = s["plain"]["w"].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)


def no_moment(s: State) -> None:
    del s["optim"].state[weight(s)]["exp_avg"]


def swapped_moments(s: State) -> None:
    held = s["optim"].state[weight(s)]
    held["exp_avg"], held["exp_avg_sq"] = held["exp_avg_sq"], held["exp_avg"]


def rate_in_a_leaf(s: State) -> None:
    """The learning rate lies in the memory of another value: nothing may be written there twice."""
    s["plain"]["rate"] = torch.tensor(0.5)
    s["optim"].param_groups[0]["lr"] = s["plain"]["rate"]


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: None,
    "another tensor": lambda s: s["plain"].update(w=torch.randn(4, 4)),
    "another shape": lambda s: s["plain"].update(w=torch.randn(2, 8)),
    "another type": lambda s: s["plain"].update(w=torch.randn(4, 4).double()),
    "data of another type": lambda s: setattr(s["plain"]["w"], "data", torch.ones(4, 4).double()),
    "other strides": lambda s: s["plain"].update(w=torch.randn(4, 4).t()),
    "strides by data": lambda s: setattr(s["plain"]["w"], "data", s["plain"]["w"].data.t()),
    "every other row": lambda s: s["plain"].update(w=torch.randn(8, 4)[::2]),
    "expanded": lambda s: s["plain"].update(v=torch.ones(1).expand(4)),
    "negated": lambda s: s["plain"].update(w=torch._neg_view(torch.ones(4, 4))),
    "two names change places": lambda s: s.update(x=s["plain"]["v"][:3].clone()),
    "a row of another": lambda s: s["plain"].update(v=s["plain"]["w"][1]),
    "one memory": lambda s: s["plain"].update(v=s["plain"]["w"].view(-1)[:4]),
    "an alias": lambda s: s["plain"].update(v=s["model"][0].bias),
    "tied": tie,
    "untied": untie,
    "other memory": other_memory,
    "resized": resized,
    "a name more": lambda s: s["plain"].update(more=torch.ones(2)),
    "a name less": lambda s: s["plain"].pop("v"),
    "another name": lambda s: s["plain"].update(u=s["plain"].pop("v")),
    "a tensor in place of a value": lambda s: s.update(steps=torch.tensor(3)),
    "an array": lambda s: s["plain"].update(w=np.zeros((4, 4), np.float32)),
    "no state": lambda s: s["optim"].state.clear(),
    "no moment": no_moment,
    "moments change places": swapped_moments,
    "rate as a tensor": lambda s: s["optim"].param_groups[0].update(lr=torch.tensor(0.5)),
    "rate in a leaf": rate_in_a_leaf,
    "another optimizer": lambda s: s.update(optim=torch.optim.SGD(s["model"].parameters())),
    "another module": another_module,
    "a hook": hooked,
    "a hook that doubles": doubling,
    "no scale of the norm": no_norm,
    "half": lambda s: s["model"].half(),
    "order": lambda s: s.update(plain=dict(reversed(s["plain"].items()))),
}

SAVED: dict[str, Callable[[State], object]] = {
    "as it was": lambda s: None,
    "other values": lambda s: (weight(s).data.add_(3), s.update(steps=9)),
    "another rate": lambda s: s["optim"].param_groups[0].update(lr=0.25),
    "another type": CHANGES["another type"],
    "another shape": CHANGES["another shape"],
    "a name more": CHANGES["a name more"],
    "a name less": CHANGES["a name less"],
    "tied": tie,
    "untied": untie,
    "another optimizer": lambda s: s.update(optim=torch.optim.Adam(s["model"].parameters())),
    "no state": CHANGES["no state"],
    "a list": lambda s: s.update(steps=[1, 2]),
    "another order": CHANGES["order"],
}


def compare(root: str, ck: ckptd.Checkpointer, state: State, **options: Any) -> None:
    """Load with a memory and without one."""
    with ckptd.Checkpointer(root) as fresh:
        wanted = outcome(fresh, state, **options)
    for _ in range(3):
        assert outcome(ck, state, **options) == wanted


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_load_is_into_the_state_as_it_is(tmp_path: Path, change: str) -> None:
    root, state = str(tmp_path), make()
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable()
    with ckptd.Checkpointer(root) as ck:
        compare(root, ck, state)
        CHANGES[change](state)
        compare(root, ck, state)
        compare(root, ck, state, strict=False)


@pytest.mark.parametrize("saved", sorted(SAVED))
def test_each_load_is_of_the_checkpoint_as_it_is(tmp_path: Path, saved: str) -> None:
    root, state = tmp_path / "root", make()
    with ckptd.Checkpointer(str(root)) as ck:
        for step in range(1, 6):
            other = make()
            if step % 2 == 0:
                SAVED[saved](other)
            weight(other).data.add_(step)
            ck.save(step, other).durable()
            kept = shutil.copytree(root, tmp_path / f"copy{step}")
            with ckptd.Checkpointer(str(kept)) as fresh:
                wanted = outcome(fresh, state)
            for _ in range(2):
                assert outcome(ck, state) == wanted, step


def test_a_rate_that_lies_in_a_leaf_is_not_written_there(tmp_path: Path) -> None:
    state, other = make(), make()
    rate_in_a_leaf(state)
    other["plain"]["rate"] = torch.tensor(0.75)
    other["optim"].param_groups[0]["lr"] = 0.25
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, other).durable()
        for _ in range(4):
            state["optim"].param_groups[0]["lr"] = state["plain"]["rate"]
            spoil(state)
            ck.load(state)
            assert state["plain"]["rate"].item() == 0.75
            assert float(state["optim"].param_groups[0]["lr"]) == 0.25


def test_arrays_that_lie_over_one_another_by_now_are_found(tmp_path: Path) -> None:
    base = np.arange(9.0)
    state: State = {"a": base[:6].copy(), "b": base[3:].copy()}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, state).durable()
        for _ in range(3):
            ck.load(state)
        for values in (base, np.arange(9.0)):
            state["a"], state["b"] = values[:6], values[3:]
            ck.load(state)
        state["a"], state["b"] = base[:6], base[1:7]
        with pytest.raises(MismatchError, match="share memory"):
            ck.load(state)


def test_options_are_not_those_of_the_load_before(tmp_path: Path) -> None:
    root, state = str(tmp_path), make()
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable()
    with ckptd.Checkpointer(root) as ck:
        for options in (
            {},
            {"only": "plain.*"},
            {},
            {"weights_only": True},
            {"rename": {"plain.w": "model.0.weight"}},
            {"only": lambda name: name != "x"},
            {"device": "cpu"},
        ):
            compare(root, ck, state, **options)


def test_the_plan_of_a_load_is_not_that_of_one_with_other_names(tmp_path: Path) -> None:
    root, state = str(tmp_path), {"a": torch.zeros(4), "b": torch.ones(4)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable()
        renames: list[Any] = [None, None, {"a": "b", "b": "a"}, None, {"a": "b", "b": "a"}.get]
        for rename in renames:
            ck.load(state, rename=rename)
            first = float(rename is not None)
            assert [state[n].tolist() for n in "ab"] == [[first] * 4, [1 - first] * 4]


def test_memory_that_was_made_for_a_load_is_known_next_time(tmp_path: Path) -> None:
    wanted = values(make())
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, make()).durable()
        for _ in range(3):
            state = make()
            with torch.device("meta"):
                state["model"] = make_model()
            state["optim"] = torch.optim.AdamW(state["model"].parameters())
            for _ in range(3):
                ck.load(state)
                assert values(state) == wanted
                spoil(state)


def test_a_later_load_makes_few_calls_and_plans_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    count = 3000
    model = nn.ParameterList([nn.Parameter(torch.full((4,), float(i))) for i in range(count)])
    live: State = {"model": model, "tensors": {f"t.{i}": torch.full((2,), i) for i in range(count)}}
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    with ckptd.Checkpointer(str(tmp_path)) as ck:
        for step in (1, 2):
            ck.save(step, live).durable()
            ck.load(live)
        monkeypatch.setattr(loader, "read_plan", None)
        monkeypatch.setattr(restore, "collect", None)
        spoilt = flatten(live)
        for leaf in spoilt.tensors.values():
            leaf.tensor.zero_()
        sys.setprofile(note)
        try:
            ck.load(live)
        finally:
            sys.setprofile(None)
    assert all(model[i].tolist() == [float(i)] * 4 for i in range(count))
    assert all(live["tensors"][f"t.{i}"].tolist() == [i, i] for i in range(count))
    assert calls / (2 * count) <= 1


def _load_other_cuts(root: str) -> list[Any]:
    rank, whole = dist.get_rank(), torch.arange(24.0).view(6, 4)
    mesh, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(n,)) for n in ("dp", "tp"))
    cuts = [(mesh, Shard(0)), (mesh, Shard(1)), (other, Shard(1)), (mesh, Replicate())]
    found: list[Any] = []
    with ckptd.Checkpointer(root) as ck:
        state: State = {
            n: distribute_tensor(whole + i, mesh, [Shard(0)]) for i, n in enumerate("ab")
        }
        state[f"own{rank}"] = torch.full((3,), float(rank))
        ck.save(1, state).durable()
        for on, placement in cuts:
            for name in "ab":
                state[name] = distribute_tensor(torch.zeros(6, 4), on, [placement])
            for _ in range(3):
                for name in "ab":
                    state[name].to_local().zero_()
                state[f"own{rank}"].zero_()
                ck.load(state)
                right = [torch.equal(state[n].full_tensor(), whole + i) for i, n in enumerate("ab")]
                found.append(all(right) and state[f"own{rank}"].tolist() == [float(rank)] * 3)
        if rank == 1:
            del state["own1"]  # then no rank has a place for it
        try:
            ck.load(state)
        except MismatchError as error:
            found.append("own1" in error.message)
    dist.barrier()
    return found


@pytest.mark.dist
def test_ranks_whose_tensors_are_cut_in_another_way(tmp_path: Path) -> None:
    for found in run_ranks(2, _load_other_cuts, str(tmp_path)):
        assert found == [True] * 13
