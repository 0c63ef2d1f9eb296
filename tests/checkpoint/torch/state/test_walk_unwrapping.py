"""Wrapped optimizers: what has the state is saved, or an error says how."""

from __future__ import annotations

import functools
import importlib
import io
import re
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import ckptd
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


class Duck:
    """No torch optimizer: an attribute of any name, and calls that go through."""

    def __init__(self, inner: Any, name: str = "_wrapped") -> None:
        self.__dict__[name] = inner
        self.__dict__["_name"] = name

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.__dict__[self._name].param_groups
        return groups

    def step(self, closure: Any = None) -> None:
        self.__dict__[self._name].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.__dict__[self._name].zero_grad(set_to_none)


class Bare(optim.Optimizer):
    """As accelerate's: an optimizer by its class that never called torch's ``__init__``."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Full(optim.Optimizer):
    """Called torch's ``__init__``: groups like the inner one's, and an empty state."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)


class Slotted:
    __slots__ = ("__weakref__", "hidden")

    def __init__(self, inner: Any) -> None:
        self.hidden = inner

    param_groups = property(lambda self: self.hidden.param_groups)

    def step(self) -> None:
        self.hidden.step()

    def zero_grad(self) -> None:
        self.hidden.zero_grad()


def mirrored(inner: optim.Optimizer) -> Any:
    """As Lightning made them: a class of both, and a copy of the inner one's attributes."""

    def init(self: Any) -> None:
        self.__dict__ = {k: v for k, v in inner.__dict__.items() if k != "step"}
        self._optimizer = inner

    body = {"__init__": init, "step": lambda self: inner.step()}
    return type("LightningAdamW", (type(inner),), body)()


def scheduled(inner: optim.Optimizer) -> Any:
    """Wrapped, and with a scheduler that patches the inner one's step."""
    optim.lr_scheduler.StepLR(inner, 1)
    return Duck(inner)


ONE: dict[str, Callable[[optim.Optimizer], Any]] = {
    "duck": Duck,
    "duck.opt": lambda o: Duck(o, "opt"),
    "bare": Bare,
    "full": Full,
    "slots": Slotted,
    "mirrored": mirrored,
    "scheduled": scheduled,
    "three deep": lambda o: Duck(Bare(Bare(o)), "b"),
    "list": lambda o: with_inner(o, [o]),
    "dict": lambda o: with_inner(o, {"a": {"b": o}}),
    "engine": lambda o: with_inner(o, SimpleNamespace(core=o)),
    "method": lambda o: with_inner(o, o.step),
    "partial": lambda o: with_inner(o, functools.partial(o.step)),
    "twice": lambda o: with_inner(o, (Bare(o), o)),
}


class Around(optim.Optimizer):
    def __init__(self, groups: Any, held: Any, step: Callable[[], Any]) -> None:
        super().__init__(groups, {})
        self.whatever = held
        self.call = lambda: step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.call()


def with_inner(inner: optim.Optimizer, held: Any) -> Any:
    return Around(inner.param_groups, held, lambda: inner.step())


@pytest.mark.parametrize("kind", ONE)
def test_the_state_of_a_wrapped_optimizer_is_saved(kind: str) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    model = net()
    inner = optim.AdamW(model.parameters(), lr=0.01)
    wrapper = ONE[kind](inner)
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2):
            train(model, wrapper)
            ck.save(step, {"model": model, "optim": wrapper})
    again = net()
    other = optim.AdamW(again.parameters(), lr=0.5)
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": again, "optim": ONE[kind](other)})
        # With and without the wrapper it is one checkpoint.
        ck.load({"model": again, "optim": other})
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    for a, b in pairs:
        assert torch.equal(inner.state[a]["exp_avg"], other.state[b]["exp_avg"])
    assert inner.param_groups[0]["lr"] == other.param_groups[0]["lr"]


class Sam(optim.Optimizer):
    """Keeps state of its own beside the inner optimizer's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base_optimizer = optim.AdamW(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
        self.base_optimizer.step()


class Several(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.opts = {"a": optim.AdamW(params[:2]), "b": [optim.SGD(params[2:], momentum=0.9)]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.opts["a"].step()  # type: ignore[attr-defined]


class Aside(optim.SGD):
    """One for matrices, and inside it one for the rest."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__([p for p in params if p.ndim == 2], lr=0.1, momentum=0.9)
        self.rest = optim.AdamW([p for p in params if p.ndim == 1])


def torchs(name: str) -> Any:
    """Return one of torch's wrappers; importing them warns of what they import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module("torch.distributed.optim"), name)


def local_sgd(inner: Any) -> Any:
    averager = SimpleNamespace(step=round(5 / inner.param_groups[0]["lr"]))
    averager.average_parameters = lambda params: None
    return torchs("PostLocalSGDOptimizer")(inner, averager)


class Plain:
    """Around an optimizer, and no more."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.n, self.base = inner, 0, None

    param_groups = property(lambda self: self.inner.param_groups)
    zero_grad = property(lambda self: self.inner.zero_grad)

    def step(self) -> None:
        self.inner.step()
        self.n += 1


class OnlySays(Plain):
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class OnlyTakes(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Derives(OnlySays, OnlyTakes):
    """Says what the optimizer says; its load derives something."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base = [group["lr"] for group in self.param_groups]


class InGroups(Derives):
    """Says a value of its own among torch's."""

    def state_dict(self) -> dict[str, Any]:
        said = self.inner.state_dict()
        said["param_groups"][0]["n"] = self.n
        return said

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.n = self.param_groups[0].pop("n")


class InState(Derives):
    """Says other state than the optimizer holds."""

    def state_dict(self) -> dict[str, Any]:
        said = self.inner.state_dict()
        said["state"] = {n: {**e, "exp_avg": e["exp_avg"] + 1} for n, e in said["state"].items()}
        return said


class Counts(Derives):
    """Says more from the second step on."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **({"n": self.n} if self.n > 1 else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state.pop("n", 0)
        super().load_state_dict(state)


class Inherits(optim.Optimizer):
    """An optimizer by its class, with the groups and the state of the inner one."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.n, self.base = inner, 0, None
        self.param_groups, self.state = inner.param_groups, inner.state

    step = Plain.step  # type: ignore[assignment]
    state_dict = Counts.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n = state_dict.get("n", 0)
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "n"})


def own_inside(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return how a wrapper is made of an optimizer that says more itself."""

    def wrap(inner: Any) -> Any:
        inner.register_state_dict_post_hook(lambda o, said: said.update(mine=[1]))
        inner.register_load_state_dict_pre_hook(lambda o, said: setattr(o, "mine", said["mine"]))
        return make(inner)

    return wrap


SPEAK: dict[str, Callable[[Any], Any]] = {
    "derives": Derives,
    "in groups": InGroups,
    "in state": InState,
    "counts": Counts,
    "inherits": Inherits,
    "a word of one instance": lambda o: spoken(o),
    "around another": lambda o: Derives(Bare(o)),
    "inside another": lambda o: Duck(Counts(o)),
    "of what says more": own_inside(Derives),
    "averager": lambda o: local_sgd(o),
}


def spoken(inner: Any) -> Any:
    made = Plain(inner)
    made.state_dict = lambda: {**inner.state_dict(), "n": made.n}  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        made.n = state.pop("n")
        inner.load_state_dict(state)

    made.load_state_dict = load  # type: ignore[attr-defined]
    return made


def attributes(wrapper: Any) -> Any:
    """Return what can be seen of a wrapper and of what it is around."""
    found = []
    while wrapper is not None and not isinstance(wrapper, optim.AdamW):
        own = vars(wrapper)
        found.append({k: own[k] for k in ("n", "base") if k in own})
        found.append(getattr(own.get("averager"), "step", None))
        inner = [own[k] for k in ("inner", "optimizer", "_wrapped", "optim") if k in own]
        wrapper = inner[0]
    states = [{k: t.tolist() for k, t in e.items()} for e in wrapper.state.values()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in wrapper.param_groups]
    return found, states, groups, getattr(wrapper, "mine", None)


@pytest.mark.filterwarnings("ignore:Loaded state dict does not contain a step counter")
@pytest.mark.parametrize("kind", SPEAK)
def test_a_wrapper_that_says_and_takes_its_state_comes_back_as_by_torch(kind: str) -> None:
    def made(rate: float) -> tuple[nn.Module, Any]:
        model = net()
        return model, SPEAK[kind](optim.AdamW(model.parameters(), lr=rate))

    model, wrapper = made(0.01)
    speaker = getattr(wrapper, "_wrapped", wrapper)
    with ckptd.Checkpointer(f"memory://{uuid.uuid4().hex}") as ck:
        for step in (1, 2, 3):
            train(model, wrapper)
            ck.save(step, {"model": model, "optim": wrapper}).durable(PATIENCE_S)
            file = io.BytesIO()
            torch.save(speaker.state_dict(), file)
            file.seek(0)
            plain, ours = made(0.5)[1], made(0.5)
            getattr(plain, "_wrapped", plain).load_state_dict(torch.load(file))
            ck.load({"model": ours[0], "optim": ours[1]})
            assert attributes(ours[1]) == attributes(plain)


LOST: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state of both": (Sam, "optimizer.base_optimizer|wrapper.base_optimizer"),
    "several": (Several, r"optimizer.opts\['a'\], optimizer.opts\['b'\]\[0\]"),
    "aside": (Aside, "optimizer.rest"),
    "duck of several": (
        lambda p: Duck(Several(p)),
        r"optimizer.opts\['a'\], optimizer.opts\['b'\]\[0\]",
    ),
    "only says": (lambda p: OnlySays(optim.AdamW(p)), "wrapper.inner"),
    "only takes": (lambda p: OnlyTakes(optim.AdamW(p)), "wrapper.inner"),
}


@pytest.mark.parametrize("kind", LOST)
def test_state_that_would_be_lost_is_an_error(kind: str) -> None:
    model = net()
    make, hint = LOST[kind]
    wrapper = make(model.parameters())
    train(model, wrapper)
    with pytest.raises(UsageError) as caught:
        flatten({"model": model, "optim": wrapper})
    assert caught.value.message in (
        "a wrapper of an optimizer has its own state or state_dict()",
        "an optimizer holds others whose state would be lost",
    )
    assert caught.value.where == "optim"
    assert re.search(hint, caught.value.hint or "")


def test_the_way_out_works() -> None:
    model = net()
    several, aside = Several(model.parameters()), Aside(model.parameters())
    sam = Sam(model.parameters())
    for wrapper in (several, aside, sam):
        train(model, wrapper)
    state = {
        "model": model,
        "several": [several.opts["a"], several.opts["b"][0]],  # type: ignore[index]
        "sam": sam.base_optimizer,
        "aside": [aside, aside.rest],
    }
    leaves = flatten(state)
    assert sum(n.endswith("exp_avg") for n in leaves.tensors) == 2 + 4
    assert len(leaves.optimizers) == 5


def test_optimizers_that_know_one_another_are_no_wrappers() -> None:
    one, other = net(), net()
    a, b = optim.AdamW(one.parameters()), optim.AdamW(other.parameters())
    a.partner, b.partner = b, a  # type: ignore[attr-defined]
    assert len(flatten({"one": one, "other": other, "a": a, "b": b}).optimizers) == 2


def test_an_optimizer_without_hooks_is_copied_at_once() -> None:
    class NoInit(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params), "lr": 0.1}]
            self.state = defaultdict(dict)
            self.defaults = {}

        def zero_grad(self, set_to_none: bool = True) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None  # torch's would give it hooks

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["n"] = self.state[p].get("n", torch.zeros(1)) + 1
                p.data.sub_(p.grad)

    model = net()
    optimizer = NoInit(model.parameters())
    root = f"memory://{uuid.uuid4().hex}"
    with ckptd.Checkpointer(root) as ck:
        train(model, optimizer)
        ck.save(1, {"model": model, "optim": optimizer})
        saved = model[0].weight.detach().clone()
        train(model, optimizer)
        ck.wait()
        ck.load({"model": model, "optim": optimizer})
    assert torch.equal(model[0].weight, saved)
    assert optimizer.state[model[0].weight]["n"] == 1


@pytest.mark.plugins
def test_accelerates_optimizer() -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    root = f"memory://{uuid.uuid4().hex}"

    def make() -> tuple[Any, Any, Any]:
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
        ready: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, scheduler)
        return ready

    model, optimizer, scheduler = make()
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2):
            train(model, optimizer)
            scheduler.step()
            ck.save(step, {"model": model, "optim": optimizer, "scheduler": scheduler})
    again = make()
    with ckptd.Checkpointer(root) as ck:
        ck.load(dict(zip(("model", "optim", "scheduler"), again, strict=True)))
    for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], again[1].state[b]["exp_avg"])
    assert again[2].get_last_lr() == scheduler.get_last_lr()


def save_zero(root: str) -> tuple[str, str]:
    model = net()
    zero = torchs("ZeroRedundancyOptimizer")(model.parameters(), optim.AdamW, lr=0.1)
    train(model, zero)
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        try:
            ck.save(1, {"model": model, "optim": zero})
            said = ""
        except UsageError as error:
            said = f"{error.message} {error.hint}"
        handle = ck.save(2, {"model": model, "optim": zero.optim})
        assert handle is not None
        handle.durable(PATIENCE_S)
        mine = {id(p) for g in zero.optim.param_groups for p in g["params"]}
        names = {f"optim.{n}.exp_avg" for n, p in model.named_parameters() if id(p) in mine}
        zero.optim.state.clear()
        ck.load({"model": model, "optim": zero.optim}, 2, strict=False)
        loaded = sum(bool(s) for s in zero.optim.state.values())
    return said, f"{loaded == len(names)}"


@pytest.mark.dist
def test_zero_redundancy(tmp_path: Path) -> None:
    for said, loaded in run_ranks(2, save_zero, str(tmp_path / "r"), deadline_s=150.0):
        assert said.startswith("an optimizer holds others whose state would be lost")
        assert "optimizer.optim" in said
        assert loaded == "True"


def reload_sharded(root: str) -> list[Any]:
    """Save a sharded model and a wrapped optimizer, load both into fresh ones, step again."""
    found = []
    for number, kind in enumerate((Derives, InGroups, Counts, own_inside(Derives))):

        def made(rate: float, kind: Any = kind) -> tuple[nn.Module, Any]:
            model = fully_shard(net())
            return model, kind(optim.AdamW(model.parameters(), lr=rate))

        pairs = made(0.01), made(0.5)
        for _ in range(2):
            train(*pairs[0])
        with ckptd.Checkpointer(f"{root}{number}", timeout_s=60.0) as ck:
            ck.save(1, dict(zip(("model", "optim"), pairs[0], strict=True))).durable(PATIENCE_S)
            ck.load(dict(zip(("model", "optim"), pairs[1], strict=True)))
        same = pairs[0][1].n == pairs[1][1].n or kind not in (InGroups, Counts)
        for pair in pairs:
            train(*pair)
        weights = [[p.full_tensor() for p in model.parameters()] for model, _ in pairs]
        same = same and all(map(torch.equal, *weights))
        found.append((same, pairs[1][1].base))
    return found


@pytest.mark.dist
def test_wrappers_over_sharded_parameters(tmp_path: Path) -> None:
    for found in run_ranks(2, reload_sharded, str(tmp_path / "r"), deadline_s=150.0):
        assert found == [(True, [0.01])] * 4
