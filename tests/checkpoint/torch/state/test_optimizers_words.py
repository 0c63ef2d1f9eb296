"""What an optimizer's own state_dict says is what a checkpoint has: torch's load is the measure."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import ckptd
from ckptd.checkpoint.torch.state.flatten import Flattener, flatten
from ckptd.errors import UsageError
from tests.checkpoint.torch.bridge import give, take
from tests.processes import PATIENCE_S

_roots = itertools.count()
Make = Callable[[Any], Any]


class Override(optim.SGD):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, **more)
        self.k: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "k"})
        self.k = state_dict["k"]


class Loads(optim.SGD):
    """Says nothing of its own, and counts its loads."""

    loads = 0

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.loads += 1


class Sets(optim.SGD):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set = True


def post_hook(params: Any) -> Any:
    made = optim.SGD(params, lr=0.1, momentum=0.9)
    made.k = 0  # type: ignore[attr-defined]
    made.register_state_dict_post_hook(lambda o, said: said.__setitem__("k", o.k))  # type: ignore[attr-defined]
    made.register_load_state_dict_pre_hook(lambda o, said: setattr(o, "k", said.pop("k")))
    return made


def pre_hook(params: Any) -> Any:
    """Writes what it has into a group before it says it, and takes it out after a load."""
    made = optim.SGD(params, lr=0.1, momentum=0.9)
    made.k = 0  # type: ignore[attr-defined]
    made.register_state_dict_pre_hook(lambda o: o.param_groups[0].__setitem__("k", o.k))  # type: ignore[attr-defined]
    made.register_load_state_dict_post_hook(lambda o: setattr(o, "k", o.param_groups[0]["k"]))
    return made


def renamed(params: Any) -> Any:
    """Says its state under another name and as another type, and takes that."""
    made = optim.SGD(params, lr=0.1, momentum=0.9)
    made.k = 0  # type: ignore[attr-defined]

    def say(o: Any, said: Any) -> Any:
        state = {n: {"m": e["momentum_buffer"].double()} for n, e in said["state"].items()}
        return {**said, "state": {**state, "k": {"v": o.k}}}

    def take_it(o: Any, said: Any) -> Any:
        state = dict(said["state"])
        o.k = state.pop("k")["v"]
        state = {n: {"momentum_buffer": e["m"].float()} for n, e in state.items()}
        return {**said, "state": state}

    made.register_state_dict_post_hook(say)
    made.register_load_state_dict_pre_hook(take_it)
    return made


MAKERS: dict[str, Make] = {
    "override": Override,
    "post hook": post_hook,
    "pre hook": pre_hook,
    "renamed": renamed,
}


def trained(make: Make, k: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    optimizer.k = k
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().sum().backward()
    optimizer.step()


def by_torch(optimizer: Any, into: Any) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    into.load_state_dict(torch.load(file, weights_only=False))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("k", [5, torch.arange(4.0)], ids=["number", "tensor"])
def test_what_only_the_optimizer_says_comes_back(name: str, k: Any) -> None:
    # Each of them found the initial value before the optimizer was asked.
    model, saved = trained(MAKERS[name], k)
    plain_model, plain = trained(MAKERS[name], 0)
    plain_model.load_state_dict(model.state_dict())
    by_torch(saved, plain)
    ours_model = nn.Linear(3, 2)
    ours = MAKERS[name](ours_model.parameters())
    give(take({"m": model, "o": saved}), {"m": ours_model, "o": ours})
    assert torch.equal(torch.as_tensor(ours.k), torch.as_tensor(plain.k))
    for a, b in ((plain_model, plain), (ours_model, ours)):
        step(a, b)
    assert torch.equal(ours_model.weight, plain_model.weight)
    held = ours.state[ours_model.weight]["momentum_buffer"]
    assert held.dtype == torch.float32
    assert torch.equal(held, plain.state[plain_model.weight]["momentum_buffer"])


def test_through_a_checkpointer_into_a_stepped_optimizer() -> None:
    model, saved = trained(Override, 5)
    other, live = trained(Override, 7)
    held = live.state[other.weight]["momentum_buffer"]
    before = held.clone()
    with ckptd.Checkpointer(f"memory://words{next(_roots)}") as ck:
        ck.save(1, {"m": model, "o": saved}).durable(PATIENCE_S)
        saved.k = 6  # nothing else changes: it is asked at each save
        ck.save(2, {"m": model, "o": saved}).durable(PATIENCE_S)
        ck.load({"m": other, "o": live})
        assert live.k == 6
        assert torch.equal(held, before), "written to before the optimizer's own load"
        ck.load({"m": other, "o": live}, step=1)
        assert live.k == 5
        live.k = 9
        ck.load({"m": other, "o": live}, weights_only=True)
        assert live.k == 9


def test_the_optimizers_own_load_is_run() -> None:
    for make in (Loads, Sets):
        model, saved = trained(lambda p, make=make: make(p, lr=0.1, momentum=0.9), None)
        live_model = nn.Linear(3, 2)
        live = make(live_model.parameters(), lr=0.2, momentum=0.9)
        give(take({"m": model, "o": saved}), {"m": live_model, "o": live})
        assert live.loads == 1 if make is Loads else live.set
        assert live.param_groups[0]["lr"] == 0.1
        held = live.state[live_model.weight]["momentum_buffer"]
        assert torch.equal(held, saved.state[model.weight]["momentum_buffer"])


def said_as(change: Callable[[str, torch.Tensor], Any]) -> Callable[[Any, Any], None]:
    """Return a hook that says the state of parameters in another form."""

    def say(own: Any, said: Any) -> None:
        said["state"] = {
            n: {k: change(k, v) for k, v in entry.items()} for n, entry in said["state"].items()
        }

    return say


FORMS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "half": lambda key, value: value if key == "step" else value.half(),
    "double": lambda key, value: value.double(),
    "whole numbers": lambda key, value: value.to(torch.int32),
    "numbers": lambda key, value: float(value) if key == "step" else value,
    "inside": lambda key, value: value if key == "step" else [{"at": value.half()}, (value,)],
    "as it is": lambda key, value: value,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "bare"])
def test_what_is_said_has_the_type_that_torchs_load_gives_it(
    form: str, dtype: torch.dtype, hooked: bool
) -> None:
    """Whether the optimizer that is loaded has the hook or not: the checkpoint says that it had."""

    def made(hooks: bool) -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 2).to(dtype)
        optimizer = optim.AdamW(model.parameters())
        if hooks:
            optimizer.register_state_dict_post_hook(said_as(FORMS[form]))
        return model, optimizer

    model, saved = made(True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    saved.state[model.weight]["exp_avg"] = torch.full((2, 3), 1 / 3)  # not of the parameter's type

    def seen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.device, value.tolist()
        if isinstance(value, list | tuple):
            return type(value), [seen(v) for v in value]
        return {k: seen(v) for k, v in value.items()} if isinstance(value, dict) else value

    for option in (None, "capturable", "fused"):
        if option is not None:
            saved.param_groups[0][option] = True
        (_, plain), (other, ours) = made(False), made(hooked)
        by_torch(saved, plain)
        give(take({"m": model, "o": saved}), {"m": other, "o": ours})
        assert [seen(e) for e in ours.state.values()] == [seen(e) for e in plain.state.values()]


def test_state_that_is_held_keeps_the_type_that_it_was_saved_with() -> None:
    model, other = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).bfloat16()
    saved, live = (optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    buffer = torch.full((2, 3), 1 / 3)
    saved.state[model.weight]["momentum_buffer"] = buffer
    give(take({"m": model, "o": saved}), {"m": other, "o": live})
    assert torch.equal(live.state[other.weight]["momentum_buffer"], buffer)


def test_a_part_of_what_it_says_is_given_with_what_it_has() -> None:
    model, saved = trained(Override, 5)
    other, live = trained(Override, 7)
    live.param_groups[0]["lr"] = 0.3
    with torch.no_grad():
        saved.state[model.weight]["momentum_buffer"].fill_(3)
    with ckptd.Checkpointer(f"memory://words{next(_roots)}") as ck:
        ck.save(1, {"m": model, "o": saved}).durable(PATIENCE_S)
        ck.load({"m": other, "o": live}, only="o.weight.*")
    assert (live.k, live.param_groups[0]["lr"]) == (7, 0.3)
    assert live.state[other.weight]["momentum_buffer"].eq(3).all()
    assert not live.state[other.bias]["momentum_buffer"].eq(3).any()


class Apart(optim.SGD):
    """Keeps its state where optimizers have none, and says and takes it as theirs."""

    kept: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {0: {"kept": self.kept}}}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})
        self.kept = state_dict["state"][0]["kept"]


def test_state_that_only_the_optimizer_says_comes_back() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    saved, live = (Apart(m.parameters(), lr=0.1) for m in (model, other))
    saved.kept = torch.arange(3.0)
    give(take({"m": model, "o": saved}), {"m": other, "o": live})
    assert live.kept is not None
    assert torch.equal(live.kept, saved.kept)
    assert not live.state


@pytest.mark.parametrize("only", [None, "o.weight.*"])
def test_a_part_of_what_is_said_has_the_type_of_the_parameter(only: Any) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    saved, live = (optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    step(model, saved)
    saved.register_state_dict_post_hook(said_as(lambda key, value: value.half()))
    with ckptd.Checkpointer(f"memory://words{next(_roots)}") as ck:
        ck.save(1, {"m": model, "o": saved}).durable(PATIENCE_S)
        ck.load({"m": other, "o": live}, only=only)
    assert live.state[other.weight]["momentum_buffer"].dtype == torch.float32


class Nested(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict()}


class Raises(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class Named(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        said["param_groups"][0]["params"] = ["weight", "bias"]
        return said


class Tensors(optim.SGD):
    """Says one tensor as the state of a parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {0: torch.ones(3)}}


@pytest.mark.parametrize("kind", [Nested, Raises, Named, Tensors])
def test_what_does_not_say_whose_it_is_is_refused(kind: Any) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError) as caught:
        flatten({"m": model, "o": kind(model.parameters(), lr=0.1)})
    assert "own state_dict()" in caught.value.message
    assert caught.value.where == "o"


def test_a_tensor_as_the_state_of_a_parameter_is_refused() -> None:
    # It was RuntimeError: the truth of a tensor.
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = torch.ones(3)  # type: ignore[assignment]
    with pytest.raises(UsageError) as caught:
        flatten({"m": model, "o": optimizer})
    assert "an optimizer's state of a parameter is not a dict" in caught.value.message


def test_hooks_that_come_later_are_asked() -> None:
    model, optimizer = trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), None)
    flattener, state = Flattener(), {"m": model, "o": optimizer}
    assert "o.state_dict" not in flattener.flatten(state).objects
    handle = optimizer.register_state_dict_post_hook(lambda o, said: said.__setitem__("k", 1))
    assert flattener.flatten(state).objects["o.state_dict"].raw == {"k": 1}
    handle.remove()
    assert "o.state_dict" not in flattener.flatten(state).objects


class Around:
    """A wrapper that is no more than around an optimizer, but for its hooks."""

    def __init__(self, optimizer: optim.Optimizer, **hooks: Any) -> None:
        self.optimizer = optimizer
        self.__dict__ |= hooks

    param_groups = property(lambda self: self.optimizer.param_groups)
    step = property(lambda self: self.optimizer.step)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("hooks", ["load_state_dict_pre", "load_state_dict_post"])
def test_a_wrapper_with_hooks_of_its_own_is_refused(hooks: str) -> None:
    model, optimizer = trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), None)
    flatten({"m": model, "o": Around(optimizer)})
    with pytest.raises(UsageError) as caught:
        flatten({"m": model, "o": Around(optimizer, **{f"_optimizer_{hooks}_hooks": {1: print}})})
    assert "a wrapper of an optimizer has its own state or state_dict()" in caught.value.message


def test_names_of_state_that_are_no_identifiers() -> None:
    model, optimizer = trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), None)
    entry = optimizer.state[model.weight]
    entry["a.b"], entry[3], entry["3"] = torch.ones(2), torch.ones(3), 4
    other = nn.Linear(3, 2)
    live = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    give(take({"m": model, "o": optimizer}), {"m": other, "o": live})
    assert set(live.state[other.weight]) == {"momentum_buffer", "a.b", 3, "3"}


# --- hyperparameters that are tensors -------------------------------------------------------------


def adamw(model: nn.Linear, lrs: Any = None) -> optim.Optimizer:
    own = [{} if lrs is None else {"lr": lr} for lr in lrs or (None, None)]
    groups = [{"params": [p], **o} for p, o in zip(model.parameters(), own, strict=True)]
    return optim.AdamW(groups, lr=torch.tensor(0.5))


def rates(optimizer: optim.Optimizer) -> list[float]:
    return [round(float(group["lr"]), 3) for group in optimizer.param_groups]


def test_groups_that_share_a_default_tensor_get_their_own_values() -> None:
    # Both had the last group's.
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    saved, live = adamw(a, [torch.tensor(0.1), torch.tensor(0.2)]), adamw(b)
    default = live.defaults["lr"]
    give(take({"m": a, "o": saved}), {"m": b, "o": live})
    assert rates(live) == [0.1, 0.2]
    assert float(default) == 0.5


def test_equal_values_that_were_apart_are_apart_and_shared_ones_shared() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    live = adamw(b)
    give(take({"m": a, "o": adamw(a, [torch.tensor(0.1), torch.tensor(0.1)])}), {"m": b, "o": live})
    live.param_groups[0]["lr"].fill_(0.7)
    assert rates(live) == [0.7, 0.1]
    give(take({"m": a, "o": adamw(a)}), {"m": b, "o": live})
    live.param_groups[0]["lr"].fill_(0.7)
    assert rates(live) == [0.7, 0.7]


def test_a_tensor_of_one_place_or_of_the_same_places_is_kept() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    live = adamw(b, [torch.tensor(0.3), torch.tensor(0.4)])
    held = [group["lr"] for group in live.param_groups]
    saved = adamw(a, [torch.tensor(0.1), torch.tensor(0.2)])
    give(take({"m": a, "o": saved}), {"m": b, "o": live})
    assert rates(live) == [0.1, 0.2]
    assert all(h is g["lr"] for h, g in zip(held, live.param_groups, strict=True))
    live = adamw(b)
    one = live.param_groups[0]["lr"]
    saved = adamw(a)
    saved.param_groups[0]["lr"].fill_(0.2)
    give(take({"m": a, "o": saved}), {"m": b, "o": live})
    assert rates(live) == [0.2, 0.2]
    assert one is live.param_groups[0]["lr"] is live.param_groups[1]["lr"]


def test_two_optimizers_and_a_value_that_share_a_tensor() -> None:
    def make(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> dict[str, Any]:
        x, y = nn.Linear(2, 2), nn.Linear(2, 2)
        return {
            "x": x,
            "y": y,
            "ox": optim.SGD(x.parameters(), lr=one),
            "oy": optim.SGD(y.parameters(), lr=two),
            "lr": three,
        }

    saved = make(torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.3))
    lr = torch.tensor(0.5)
    live = make(lr, lr, lr)
    give(take(saved), live)
    assert (rates(live["ox"]), rates(live["oy"])) == ([0.1], [0.2])
    assert torch.equal(live["lr"], torch.tensor(0.3))


def test_tensors_among_betas_and_of_another_type() -> None:
    def make(model: nn.Module, b1: float, lr: torch.Tensor) -> optim.Optimizer:
        betas: Any = (torch.tensor(b1), torch.tensor(0.99))
        return optim.AdamW(model.parameters(), lr=lr, betas=betas, foreach=False)

    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    live = make(b, 0.5, torch.tensor(0.5))
    give(
        take({"m": a, "o": make(a, 0.7, torch.tensor(0.1, dtype=torch.float64))}),
        {"m": b, "o": live},
    )
    group = live.param_groups[0]
    assert torch.equal(group["lr"], torch.tensor(0.1, dtype=torch.float64))
    assert [round(float(t), 3) for t in group["betas"]] == [0.7, 0.99]


# --- how state lies in memory ---------------------------------------------------------------------


def test_state_that_lies_in_another_order_lies_so_again() -> None:
    # A product of the next step had other last bits.
    model, saved = trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), None)
    saved.state[model.weight] |= {
        "columns": torch.arange(15.0).reshape(5, 3).t(),
        "cube": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "part": torch.arange(12.0).reshape(3, 4)[:, :2],
        "row.s": torch.arange(6.0).reshape(2, 3),
    }
    for words in (False, True):
        if words:
            saved.register_state_dict_post_hook(lambda o, said: None)
        other = nn.Linear(3, 2)
        live = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        with ckptd.Checkpointer(f"memory://words{next(_roots)}") as ck:
            ck.save(1, {"m": model, "o": saved}).durable(PATIENCE_S)
            ck.load({"m": other, "o": live})
        for key, value in saved.state[model.weight].items():
            found = live.state[other.weight][key]
            assert torch.equal(found, value), key
            assert key == "part" or found.stride() == value.stride(), key


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_state_that_several_parameters_have_in_common_is_one_again(
    words: bool, stepped: bool
) -> None:
    class Counts(optim.SGD):
        def count(self) -> None:
            params = self.param_groups[0]["params"]
            count = torch.zeros(())
            for p in params:
                self.state[p].setdefault("n", count)
            for p in params:
                self.state[p]["n"] += 1

    def make(step: bool) -> tuple[Any, Any]:
        model = nn.Linear(3, 2)
        made = Counts(model.parameters())
        if words:
            made.register_state_dict_post_hook(lambda o, said: None)
        if step:
            made.count()
        return model, made

    (model, saved), (other, live) = make(True), make(stepped)
    if stepped:
        live.state[other.bias]["n"] = torch.zeros(())  # apart
    with ckptd.Checkpointer(f"memory://words{next(_roots)}") as ck:
        ck.save(1, {"m": model, "o": saved}).durable(PATIENCE_S)
        ck.load({"m": other, "o": live})
    live.count()
    saved.count()
    assert [float(s["n"]) for s in live.state.values()] == [4.0, 4.0]
    assert [float(s["n"]) for s in saved.state.values()] == [4.0, 4.0]


def test_state_of_no_parameter_comes_into_a_stepped_optimizer() -> None:
    def make(n: int) -> tuple[Any, Any]:
        model = nn.Linear(3, 2)
        made: Any = optim.SGD(model.parameters(), lr=0.1)
        made.register_state_dict_post_hook(lambda o, said: None)
        made.state["all"] = {"n": n, "t": torch.full((2,), float(n))}
        return model, made

    (model, saved), (other, live) = make(7), make(5)
    give(take({"m": model, "o": saved}), {"m": other, "o": live})
    assert live.state["all"]["n"] == 7
    assert torch.equal(live.state["all"]["t"], torch.full((2,), 7.0))


def test_an_optimizer_is_asked_once_whatever_state_it_holds() -> None:
    # Its state_dict() may be a collective, and some ranks may hold no state.
    calls = []

    class Asked(optim.SGD):
        def state_dict(self) -> Any:
            calls.append(len(self.state))
            return super().state_dict()

    model = nn.Linear(3, 2)
    flatten({"m": model, "o": Asked(model.parameters(), lr=0.1)})
    assert calls == [0]


def test_an_optimizer_without_groups_is_refused() -> None:
    class Bare(optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner
            self.masters = [p.detach().clone() for p in inner.param_groups[0]["params"]]
            inner.param_groups[0]["params"] = self.masters

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

    model, optimizer = trained(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), None)
    with pytest.raises(UsageError) as caught:
        flatten({"m": model, "o": Bare(optimizer)})
    assert "an optimizer holds others whose state would be lost" in caught.value.message


@pytest.mark.parametrize("saved", [1.7, None, "text", {"a": 1}, 1 << 40, 3, True])
def test_an_option_that_the_live_tensor_cannot_hold_comes_as_it_was_saved(saved: Any) -> None:
    def made(option: Any) -> dict[str, Any]:
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters())
        optimizer.param_groups[0]["option"] = option
        return {"m": layer, "o": optimizer}

    live = made(torch.tensor(5, dtype=torch.int32))
    with ckptd.Checkpointer(f"memory://option-{saved}") as ck:
        ck.save(1, made(saved)).durable()
        ck.load(live)
    found = live["o"].param_groups[0]["option"]
    assert (found.item() if isinstance(found, torch.Tensor) else found) == saved
