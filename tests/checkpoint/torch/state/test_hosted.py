"""`HostedOptimizer`, over a wrapper with the attributes of torchao's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.checkpoint.torch.state.hosted import HostedOptimizer

pytestmark = pytest.mark.usefixtures("writing_thread")


class _Wrapper(torch.optim.Optimizer):
    """Steps a copy of each parameter, as torchao's ``CPUOffloadOptimizer`` does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_d2h_map = {p: p.detach().clone() for p in parameters}
        self.optim_dict = {
            p: torch.optim.Adam([master], lr=0.1) for p, master in self.param_d2h_map.items()
        }
        self.d_opt = None

    @property
    def param_groups(self) -> Any:
        return [group for o in self.optim_dict.values() for group in o.param_groups]

    def step(self) -> None:  # type: ignore[override]
        for parameter, optimizer in self.optim_dict.items():
            self.param_d2h_map[parameter].grad = torch.ones_like(parameter)
            optimizer.step()
            parameter.data.copy_(self.param_d2h_map[parameter])


def test_a_save_has_the_state_that_a_load_of_the_optimizer_itself_brought(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    wrapper = _Wrapper(list(model.parameters()))
    state = {"model": model, "optim": wrapper}
    (inner,) = wrapper.optim_dict.values()
    wrapper.step()
    before = inner.state_dict()
    before = {**before, "state": {i: dict(s) for i, s in before["state"].items()}}
    first = before["state"][0]["exp_avg"].clone()
    before["state"][0]["exp_avg"] = first.clone()
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state).durable()
        wrapper.step()
        inner.load_state_dict(before)  # torch's: it puts another dictionary into its place
        ck.save(2, state).durable()
        wrapper.step()
        assert not torch.equal(inner.state_dict()["state"][0]["exp_avg"], first)
        assert ck.load(state) == 2
    assert torch.equal(inner.state_dict()["state"][0]["exp_avg"], first)


def test_a_group_that_was_added_after_a_save_is_in_the_next(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)])
    first, second = (layer.weight for layer in model)
    wrapper = _Wrapper([first])
    state = {"model": model, "optim": wrapper}
    wrapper.step()
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state).durable()
        wrapper.param_d2h_map[second] = master = second.detach().clone()
        wrapper.optim_dict[second] = added = torch.optim.Adam([master], lr=0.1)
        wrapper.step()
        moments = added.state[master]["exp_avg"].clone()
        ck.save(2, state).durable()
        wrapper.step()
        assert not torch.equal(added.state[master]["exp_avg"], moments)
        assert ck.load(state) == 2
    assert torch.equal(added.state[master]["exp_avg"], moments)


def test_a_load_brings_each_parameter_to_its_master_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the parameter and the groups ask for it; it is a copy from the device each time."""
    model = nn.Linear(3, 2)
    wrapper = _Wrapper(list(model.parameters()))
    state = {"model": model, "optim": wrapper}
    wrapper.step()
    saved = {p: p.detach().clone() for p in model.parameters()}
    taken: list[int] = []
    true = HostedOptimizer.take
    monkeypatch.setattr(
        HostedOptimizer, "take", lambda self, master: taken.append(id(master)) or true(self, master)
    )
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state).durable()
        for names in (None, lambda name: name.startswith("model")):
            wrapper.step()
            taken.clear()
            ck.load(state, only=names)
            assert sorted(taken) == sorted(map(id, wrapper.param_d2h_map.values()))
            assert all(torch.equal(wrapper.param_d2h_map[p], saved[p]) for p in saved)
