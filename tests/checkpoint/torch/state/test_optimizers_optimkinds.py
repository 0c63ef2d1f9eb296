"""Whose state a checkpoint holds is part of what must fit, beside names and shapes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import ckptd
from ckptd.checkpoint.torch.state import optimizers
from ckptd.checkpoint.torch.state.optimizers import _STATE, misfit, record
from ckptd.errors import MismatchError
from tests.checkpoint.torch.state.test_flatten_optimizers import MAKERS

pytestmark = pytest.mark.usefixtures("writing_thread")

Make = Callable[[Any], optim.Optimizer]


class Mine(optim.AdamW):
    """A subclass that keeps nothing more."""


class Lion(optim.Optimizer):
    """Not torch's: with a state and hyperparameters of its own."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        optim.Optimizer.__init__(self, params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.sub_(group["lr"] * mean.sign())


class Renamed(Lion):
    pass


Sibling = type("Sibling", (optim.Optimizer,), {"__init__": Lion.__init__, "step": Lion.step})


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(make: Make) -> dict[str, Any]:
    model = net()
    optimizer = make(model.parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def saved(make: Make) -> str:
    root = f"memory://{uuid.uuid4().hex}"
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, stepped(make))
    return root


def fresh(make: Make) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return {"model": model, "optim": make(model.parameters())}


SGD: Make = lambda p: optim.SGD(p, lr=0.5, momentum=0.9)  # noqa: E731
WRONG: list[tuple[Make, Make]] = [
    (optim.AdamW, SGD),
    (SGD, optim.AdamW),
    (optim.Adam, optim.AdamW),
    (optim.AdamW, optim.Adam),
    (optim.Adam, Mine),
    (optim.RMSprop, optim.Adagrad),
    (optim.AdamW, Lion),
    (Lion, SGD),
    (optim.RAdam, optim.NAdam),
    (lambda p: optim.SGD(p, lr=0.1), optim.AdamW),
    (optim.AdamW, lambda p: optim.SGD(p, lr=0.5)),
]


def called(make: Make) -> str:
    kind = type(make(net().parameters()))
    return kind.__name__


@pytest.mark.parametrize(("then", "now"), WRONG, ids=[f"{called(a)}-{called(b)}" for a, b in WRONG])
def test_another_optimizer_takes_nothing(then: Make, now: Make) -> None:
    root, state = saved(then), fresh(now)
    before = [{k: v for k, v in g.items() if k != "params"} for g in state["optim"].param_groups]
    weight = state["model"][0].weight.detach().clone()
    kept = [sorted(s) for s in state["optim"].state.values()]
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(MismatchError) as caught:
            ck.load(state)
        text = str(caught.value)
        assert called(then) in text
        assert called(now) in text
        assert "strict=False" in text
        assert "weights_only" in text
        assert "missing" not in text.split("\n", 1)[1].split("hint")[0]
        assert torch.equal(state["model"][0].weight, weight)
        assert ck.load(state, strict=False) == 1
        report = ck.last_load
    assert report is not None
    assert "optim.groups" in report.missing
    assert any(n.startswith("optim.") for n in report.unexpected)
    after = [{k: v for k, v in g.items() if k != "params"} for g in state["optim"].param_groups]
    assert before == after
    assert kept == [sorted(s) for s in state["optim"].state.values()]
    assert torch.equal(state["model"][0].weight, stepped(then)["model"][0].weight)


RIGHT: list[tuple[Make, Make]] = [
    (optim.AdamW, Mine),
    (Mine, optim.AdamW),
    (lambda p: optim.AdamW(p, fused=True), lambda p: optim.AdamW(p, foreach=True)),
    (lambda p: optim.AdamW(p, amsgrad=True), optim.AdamW),
    (lambda p: optim.SGD(p, lr=0.1), SGD),
    (SGD, lambda p: optim.SGD(p, lr=0.1)),
    (Lion, Renamed),
    (Lion, Sibling),
    (Mine, type("Other", (optim.AdamW,), {})),
    (Mine, type("Mine", (optim.AdamW,), {"__module__": "somewhere.else_"})),
]


@pytest.mark.parametrize(
    ("then", "now"), RIGHT, ids=[f"{called(a)}-{called(b)}-{i}" for i, (a, b) in enumerate(RIGHT)]
)
def test_the_same_optimizer_under_another_name_or_kernel(then: Make, now: Make) -> None:
    root, state = saved(then), fresh(now)
    with ckptd.Checkpointer(root) as ck:
        ck.load(state)
    wanted = stepped(then)["optim"]
    pairs = zip(wanted.param_groups[0]["params"], state["optim"].param_groups[0]["params"])  # noqa: B905
    for a, b in pairs:
        one, other = wanted.state.get(a, {}), state["optim"].state.get(b, {})
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)


def test_weights_alone_need_no_optimizer_that_fits() -> None:
    root, state = saved(optim.AdamW), fresh(SGD)
    with ckptd.Checkpointer(root) as ck:
        ck.load(state, weights_only=True)
        ck.load(state, only="model.*")
    assert not state["optim"].state


@pytest.fixture
def _no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save as the first version did."""
    groups = optimizers._groups

    def bare(*args: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "ckptd.class"} for g in groups(*args)]

    monkeypatch.setattr(optimizers, "_groups", bare)


@pytest.mark.usefixtures("_no_record")
@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        (optim.AdamW, optim.AdamW, True),
        (optim.AdamW, Mine, True),
        (SGD, SGD, True),
        (Lion, Lion, True),
        (optim.AdamW, SGD, False),
        (SGD, optim.AdamW, False),
        (optim.Adam, optim.AdamW, False),
        (optim.RMSprop, optim.Rprop, False),
    ],
)
def test_checkpoints_without_a_record(then: Make, now: Make, fits: bool) -> None:
    root, state = saved(then), fresh(now)
    with ckptd.Checkpointer(root) as ck:
        if fits:
            ck.load(state)
            assert state["optim"].state
        else:
            with pytest.raises(MismatchError, match="the live optimizer is"):
                ck.load(state)


@pytest.mark.parametrize("name", MAKERS)
def test_what_torchs_optimizers_keep_is_known(name: str) -> None:
    state = stepped_with_closure(MAKERS[name])
    kind = type(state["optim"]).__name__
    kept = {k for s in state["optim"].state.values() for k in s} - {"step"}
    if kind != "LBFGS":
        assert kept <= _STATE[kind]
    names = [str(i) for i in range(4)]
    assert misfit(state["optim"], [{"params": names}], names, kept) is None


def stepped_with_closure(make: Make) -> dict[str, Any]:
    model = net()
    # Momenta and factors of matrices alone: what takes no vectors is given none.
    optimizer = make([p for p in model.parameters() if p.ndim == 2])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"optim": optimizer}


@pytest.mark.parametrize(
    "said", [None, 3, [], {"classes": 3}, {"classes": []}, {"classes": [1], "defaults": []}]
)
def test_a_record_that_is_none_is_ignored(said: object) -> None:
    optimizer = optim.AdamW(net().parameters())
    groups = [{"params": ["a"], "ckptd.class": said}, 5]
    assert misfit(optimizer, groups, {"a"}, {"exp_avg"}) is None


def test_a_stage_looks_at_its_own_groups() -> None:
    adam, sgd = optim.AdamW(net().parameters()), SGD(net().parameters())
    groups = [
        {"params": ["a"], "ckptd.class": record(adam)},
        {"params": ["b"], "ckptd.class": record(sgd)},
    ]
    assert misfit(adam, groups, {"a"}, ()) is None
    assert misfit(sgd, groups, {"b"}, ()) is None
    assert misfit(sgd, groups, {"a"}, ()) is not None
