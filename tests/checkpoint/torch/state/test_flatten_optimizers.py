from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.restore import apply_objects, check_objects, prepare
from ckptd.errors import MismatchError, UsageError
from tests.checkpoint.torch.bridge import Taken, assert_same, give, take

Make = Callable[[Any], optim.Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p),
    "capturable": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda p: optim.AdamW(p, fused=True),
    "nadam": lambda p: optim.NAdam(p),
    "asgd": lambda p: optim.ASGD(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "lbfgs": lambda p: optim.LBFGS(p, max_iter=3, history_size=2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.groups = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.groups(self.first(x).tanh()) * self.scale
        return out


def net(seed: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)

        def closure(x: torch.Tensor = x) -> float:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            return float(loss.item())

        losses.append(optimizer.step(closure))
    return losses


def refused(state: Any, words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert words in f"{caught.value.kind}: {caught.value.message}"
    return caught.value


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_bit_for_bit_in_a_fresh_optimizer(name: str) -> None:
    one = net(1)
    first = MAKERS[name](one.parameters())
    train(one, first, range(3))
    taken = take({"model": one, "optim": first})
    wanted = train(one, first, range(3, 6))

    two = net(2)
    second = MAKERS[name](two.parameters())
    give(taken, {"model": two, "optim": second})
    assert_same(take({"model": two, "optim": second}), taken)
    assert train(two, second, range(3, 6)) == wanted


@pytest.mark.parametrize("name", MAKERS)
def test_a_stepped_optimizer_goes_back(name: str) -> None:
    model = net(1)
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, range(2))
    taken = take({"model": model, "optim": optimizer})
    wanted = train(model, optimizer, range(2, 6))
    give(taken, {"model": model, "optim": optimizer})
    assert train(model, optimizer, range(2, 6)) == wanted


@pytest.mark.parametrize("name", MAKERS)
def test_a_stepped_optimizer_goes_back_to_its_beginning(name: str) -> None:
    model = net(1)
    optimizer = MAKERS[name](model.parameters())
    taken = take({"model": model, "optim": optimizer})
    wanted = train(model, optimizer, range(3))
    give(taken, {"model": model, "optim": optimizer})
    # Adagrad alone has state before its first step.
    assert name == "adagrad" or not any(optimizer.state.values())
    assert train(model, optimizer, range(3)) == wanted


def form(optimizer: optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    state = optimizer.state.get(parameter) or {}
    return {
        k: (v.dtype, v.shape, v.device, v.stride()) if isinstance(v, torch.Tensor) else type(v)
        for k, v in state.items()
    }


@pytest.mark.parametrize("name", MAKERS)
def test_state_is_made_as_the_first_step_makes_it(name: str) -> None:
    one, two = net(1), net(1)
    first, second = MAKERS[name](one.parameters()), MAKERS[name](two.parameters())
    train(one, first, range(1))
    give(take({"model": one, "optim": first}), {"model": two, "optim": second})
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert form(first, p) == form(second, q)


def test_names() -> None:
    model = net(1)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    leaves = flatten({"optim": optimizer, "model": torch.compile(model, backend="eager")})
    assert [n for n in leaves.tensors if n.startswith("optim.")] == [
        f"optim.{fqn}.{state}"
        for fqn, _ in model.named_parameters()
        for state in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert leaves.objects["optim.groups"].raw[0]["params"] == sorted(
        n for n, _ in model.named_parameters()
    )


def test_no_integer_ids_and_no_empty_state() -> None:
    model = net(1)
    optimizer = optim.SGD(model.named_parameters(), lr=0.1)
    optimizer.state[model.scale]
    leaves = flatten({"model": model, "optim": optimizer})
    (group,) = leaves.objects["optim.groups"].raw
    assert "param_names" not in group
    assert all(isinstance(p, str) for p in group["params"])
    assert not any(n.startswith("optim") for n in leaves.tensors)


def test_flattening_changes_no_optimizer() -> None:
    model = net(1)
    optimizer = optim.AdamW(model.parameters())
    flatten({"model": model, "optim": optimizer})
    assert not optimizer.state
    prepare({"model": model, "optim": optimizer}, stepped().names)
    assert not optimizer.state


def stepped() -> Taken:
    model = net(1)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    return take({"model": model, "optim": optimizer})


# --- whose parameters ----------------------------------------------------------------------------


def test_several_modules_in_one_optimizer() -> None:
    nets = {"gen": net(1), "critic": net(2)}
    both = optim.AdamW([p for m in nets.values() for p in m.parameters()])
    one = optim.AdamW(nets["critic"].parameters())
    names = flatten({"nets": nets, "both": both, "one": one}).objects
    assert names["one.groups"].raw[0]["params"][0] == "first.bias"
    assert names["both.groups"].raw[0]["params"][0] == "nets.critic.first.bias"
    assert len(names["both.groups"].raw[0]["params"]) == 10


def test_the_first_module_that_owns_all_parameters_names_them() -> None:
    model = net(1)
    optimizer = optim.AdamW(model.first.parameters())
    leaves = flatten({"optim": optimizer, "model": model, "part": model.first})
    assert leaves.objects["optim.groups"].raw[0]["params"] == ["first.bias", "first.weight"]


def test_nested_optimizers() -> None:
    nets = [net(1), net(2)]
    optimizers = [optim.AdamW(n.parameters()) for n in nets]
    for model, optimizer in zip(nets, optimizers, strict=True):
        train(model, optimizer, range(2))
    taken = take({"nets": nets, "opts": {"all": optimizers}})
    assert "opts.all.1.first.weight.exp_avg" in taken.tensors
    others = [net(3), net(4)]
    state = {"nets": others, "opts": {"all": [optim.AdamW(n.parameters()) for n in others]}}
    give(taken, state)
    assert_same(take(state), taken)


def test_tensors_of_the_state_own_themselves() -> None:
    def make(value: float) -> dict[str, Any]:
        alpha, loose = torch.tensor(value, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = optim.Adam([alpha, loose])
        return {"alpha": alpha, "list": [loose, 1], "optim": optimizer}

    one = make(1.0)
    (one["alpha"] * 2 + one["list"][0].sum()).backward()
    one["optim"].step()
    taken = take(one)
    assert "optim.alpha.exp_avg" in taken.tensors
    assert "optim.list.0.exp_avg" in taken.tensors
    two = make(5.0)
    tensors = two["alpha"], two["list"][0]
    give(taken, two)
    assert_same(take(two), taken)
    assert two["alpha"] is tensors[0]
    assert two["list"][0] is tensors[1]
    assert two["optim"].state[tensors[0]]["exp_avg"].shape == ()


def test_a_parameter_that_nobody_owns() -> None:
    error = refused(
        {"optim": optim.AdamW(net(1).parameters()), "model": net(1)},
        "holds parameters that no module of the state owns",
    )
    assert error.where == "optim"
    assert "5 of 5" in str(error.found)
    assert "module" in str(error.hint)


def test_tied_parameters_have_one_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    train_once(model, optimizer)
    leaves = flatten({"m": model, "o": optimizer})
    assert list(leaves.tensors) == ["m.0.weight", "o.0.weight.momentum_buffer"]


def train_once(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


# --- refused -------------------------------------------------------------------------------------


def test_integer_ids_are_refused_wherever_they_stand() -> None:
    model = net(1)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    ids = optimizer.state_dict()
    for state in ({"o": ids}, {"a": {"o": ids}}, {"a": [ids]}, {"a": Holder(ids)}):
        assert "optimizer itself" in str(refused(state, "which is not stable").hint)


def test_an_optimizer_state_dict_by_names_is_plain_data() -> None:
    value = {"state": {"w": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": ["w"]}]}
    assert list(flatten({"o": value}).tensors) == ["o.state.w.exp_avg"]


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state["inner"]


def test_a_container_of_optimizers() -> None:
    class Container(optim.SGD):
        optimizers: list[optim.Optimizer]

    model = net(1)
    container = Container(model.parameters())
    container.optimizers = [optim.SGD([p]) for p in model.parameters()]
    refused(
        {"model": model, "optim": container}, "an optimizer holds others whose state would be lost"
    )


def test_state_that_belongs_to_no_parameter() -> None:
    model = net(1)
    optimizer = optim.SGD(model.parameters())
    optimizer.state["total"] = 3  # type: ignore[index]
    assert "'total'" in str(
        refused({"m": model, "o": optimizer}, "state that belongs to none of its parameters").found
    )


def test_hyperparameters_that_cannot_be_saved() -> None:
    model = net(1)
    optimizer = optim.SGD(model.parameters())
    optimizer.param_groups[0]["hook"] = print
    assert str(refused({"m": model, "o": optimizer}, "unsavable").where).startswith("o.groups")


# --- groups --------------------------------------------------------------------------------------


def grouped(model: Net, order: tuple[str, ...] = ("first", "rest")) -> optim.Optimizer:
    first = {id(p) for p in model.first.parameters()}
    parts = {
        "first": {"params": [p for p in model.parameters() if id(p) in first], "lr": 0.5},
        "rest": {"params": [p for p in model.parameters() if id(p) not in first], "lr": 0.25},
    }
    return optim.AdamW([parts[name] for name in order], betas=(0.5, 0.75))


def test_groups_are_matched_by_their_parameters_and_not_by_order() -> None:
    one, two = net(1), net(2)
    first, second = grouped(one), grouped(two, ("rest", "first"))
    train(one, first, range(2))
    for group in second.param_groups:
        group.update(lr=9.0, betas=(0, 0))
    give(take({"m": one, "o": first}), {"m": two, "o": second})
    assert [(g["lr"], g["betas"]) for g in second.param_groups] == [
        (0.25, (0.5, 0.75)),
        (0.5, (0.5, 0.75)),
    ]
    assert train(one, first, range(2, 4)) == train(two, second, range(2, 4))


def scheduled(optimizer: optim.Optimizer) -> None:
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


def named(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["param_names"] = [f"named.{n}" for n in range(len(group["params"]))]


def hooked(optimizer: optim.Optimizer) -> None:
    optimizer.register_load_state_dict_post_hook(lambda o: None)


OPTIONS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "nothing": lambda o: None,
    "one more": lambda o: o.param_groups[0].update(warm=5),
    "tensors": lambda o: o.param_groups[-1].update(warm=[torch.ones(2), None]),
    "scheduled": scheduled,
    "named": named,
    "no name": lambda o: [g.pop("param_names", None) for g in o.param_groups],
    "set": lambda o: [g.update(maximize=True, foreach=False) for g in o.param_groups],
    "lacks what is filled in": lambda o: [
        o.param_groups[0].pop(k, None) for k in ("foreach", "maximize", "differentiable", "fused")
    ],
    "decoupled": lambda o: [g.update(decoupled_weight_decay=True) for g in o.param_groups],
    "numbers for steps": lambda o: [e.update(step=float(e["step"])) for e in o.state.values()],
    "hooked": hooked,
}


@pytest.mark.parametrize("saved", OPTIONS)
def test_groups_are_after_a_load_what_torch_leaves(saved: str) -> None:
    def make(change: str, seed: int) -> tuple[Net, optim.Optimizer]:
        model = net(seed)
        optimizer = grouped(model)
        train(model, optimizer, range(seed))
        OPTIONS[change](optimizer)
        return model, optimizer

    model, optimizer = make(saved, 2)
    taken = take({"m": model, "o": optimizer})

    def seen(found: optim.Optimizer) -> Any:
        groups = [{k: repr(v) for k, v in g.items() if k != "params"} for g in found.param_groups]
        return groups, [{k: repr(v) for k, v in e.items()} for e in found.state.values()]

    for live in OPTIONS:
        (_, plain), (other, ours) = make(live, 1), make(live, 1)
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        give(taken, {"m": other, "o": ours})
        assert seen(ours) == seen(plain), live


@pytest.mark.parametrize("hook", [False, True])
def test_what_groups_lack_that_say_not_all_stays(hook: bool) -> None:
    """Those of another program have no record of whose they are, and may have a rate alone."""
    one, two = net(1), net(2)
    first, second = optim.AdamW(one.parameters()), optim.AdamW(two.parameters(), maximize=True)
    scheduled(second)
    if hook:
        hooked(second)
    taken = take({"m": one, "o": first})
    (group,) = json.loads(taken.objects["o.groups"])
    taken.objects["o.groups"] = json.dumps([{"params": group["params"], "lr": 0.25}])
    give(taken, {"m": two, "o": second})
    found = second.param_groups[0]
    assert (found["lr"], found["maximize"], found["initial_lr"]) == (0.25, True, 1e-3)
    assert found["decoupled_weight_decay"]


def test_a_hyperparameter_that_the_saving_class_had_not_stays() -> None:
    """With torch's load it would be missing at the next step."""
    one, two = net(1), net(2)
    first, second = grouped(one), grouped(two)
    for group in first.param_groups:
        del group["eps"]
    give(take({"m": one, "o": first}), {"m": two, "o": second})
    assert [g["eps"] for g in second.param_groups] == [1e-8, 1e-8]
    train(two, second, range(1))


def test_groups_that_differ_are_listed_and_nothing_changes() -> None:
    one, two = net(1), net(2)
    first, second = grouped(one), optim.AdamW(two.parameters(), lr=0.125)
    train(one, first, range(2))
    taken = take({"m": one, "o": first})
    before = take({"m": two, "o": second})
    leaves = prepare({"m": two, "o": second}, taken.names)
    values = {n: taken.value(n) for n in taken.objects}
    for attempt in (check_objects, apply_objects):
        with pytest.raises(MismatchError) as caught:
            attempt(leaves, values, {})
        assert (caught.value.message, caught.value.where) == (
            "the optimizer's groups and the checkpoint's hold different parameters",
            "o.groups",
        )
    assert "1 groups only in the live optimizer: {first.bias, " in str(caught.value.wanted)
    assert "2 groups only in the checkpoint: {first.bias, first.weight}" in str(caught.value.found)
    assert_same(take({"m": two, "o": second}), before)
    assert not second.state


def test_groups_without_parameters() -> None:
    def make(lrs: list[float]) -> dict[str, Any]:
        model = net(1)
        groups: list[dict[str, Any]] = [
            {"params": list(model.parameters())},
            *({"params": [], "lr": lr} for lr in lrs),
        ]
        return {"m": model, "o": optim.SGD(groups)}

    state = make([0.0, 0.0])
    give(take(make([0.5, 0.25])), state)
    assert [g["lr"] for g in state["o"].param_groups][1:] == [0.5, 0.25]


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    def make(lr: Any) -> dict[str, Any]:
        model = net(1)
        return {"m": model, "o": optim.AdamW(model.parameters(), lr=lr, foreach=False)}

    state = make(torch.tensor(0.0))
    live = state["o"].param_groups[0]["lr"]
    give(take(make(torch.tensor(0.5))), state)
    assert live is state["o"].param_groups[0]["lr"]
    assert live.item() == 0.5
    give(take(make(0.25)), state)
    assert live.item() == 0.25
    plain = make(0.0)
    give(take(make(torch.tensor(0.5))), plain)
    assert plain["o"].param_groups[0]["lr"] == 0.5
    assert isinstance(plain["o"].param_groups[0]["lr"], float)


def test_damaged_groups() -> None:
    model = net(1)
    leaves = prepare({"m": model, "o": optim.SGD(model.parameters())}, stepped().names)
    for damaged in (3, [1], [{"lr": 1}], [{"params": [1, "a"]}]):
        with pytest.raises(MismatchError):
            check_objects(leaves, {"o.groups": damaged}, {})


# --- partial loads -------------------------------------------------------------------------------


def test_moments_that_were_not_loaded_do_not_enter_the_optimizer() -> None:
    taken = stepped()
    model = net(2)
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    weights = [n for n in taken.tensors if n.startswith("model.")]
    apply_objects(prepare(state, taken.names), {}, tensors=weights)
    assert not optimizer.state
    apply_objects(prepare(state, taken.names), {})
    assert not optimizer.state
    apply_objects(prepare(state, taken.names), {}, tensors=["optim.scale.step"])
    assert {p: list(s) for p, s in optimizer.state.items()} == {model.scale: ["step"]}


def test_state_is_kept_when_the_optimizer_is_not_part_of_the_load() -> None:
    model = net(1)
    optimizer = optim.AdamW(model.parameters())
    taken = take({"model": model, "optim": optimizer})
    train(model, optimizer, range(1))
    leaves = prepare({"model": model, "optim": optimizer}, taken.names)
    apply_objects(leaves, {}, tensors=["model.scale"])
    assert len(optimizer.state) == 5


# --- schedulers, scalers, averages ---------------------------------------------------------------


def schedulers(optimizer: optim.Optimizer) -> dict[str, Any]:
    make = lr_scheduler
    warm = make.LinearLR(optimizer, 0.1, total_iters=3)
    return {
        "chain": make.SequentialLR(optimizer, [warm, make.CosineAnnealingLR(optimizer, 10)], [3]),
        "steps": make.MultiStepLR(optimizer, [2, 2, 4], gamma=0.5),
        "lambda": make.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
        "cycle": make.OneCycleLR(optimizer, 0.1, total_steps=20),
        "cyclic": make.CyclicLR(optimizer, 0.1, 0.2, mode="exp_range", gamma=0.9),
        "restarts": make.CosineAnnealingWarmRestarts(optimizer, 3),
        "chained": make.ChainedScheduler([make.ExponentialLR(optimizer, 0.9)], optimizer),
        "plateau": make.ReduceLROnPlateau(optimizer, patience=0),
    }


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", list(schedulers(optim.SGD(Net().parameters(), momentum=0.5))))
def test_schedulers_go_on(name: str) -> None:
    def make() -> dict[str, Any]:
        model = net(1)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return {"m": model, "o": optimizer, "s": schedulers(optimizer)[name]}

    def go_on(state: dict[str, Any], steps: int) -> list[float]:
        out = []
        for i in range(steps):
            state["o"].step()
            state["s"].step(*([i] if name == "plateau" else []))
            out.append(state["o"].param_groups[0]["lr"])
        return out

    one, two = make(), make()
    go_on(one, 4)
    taken = take(one)
    give(taken, two)
    assert_same(take(two), taken)
    assert go_on(one, 6) == go_on(two, 6)
    if name == "steps":
        assert type(two["s"].milestones) is type(one["s"].milestones)


def test_grad_scalers() -> None:
    def make(scale: float) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)

    one = make(4.0)
    one.scale(torch.ones(1))
    one.update(8.0)
    two = make(2.0)
    taken = take({"scaler": one})
    give(taken, {"scaler": two})
    assert two.get_scale() == 8.0
    assert_same(take({"scaler": two}), taken)


def test_an_object_that_refuses_its_state_is_named() -> None:
    taken = take({"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    with pytest.raises(UsageError) as caught:
        give(taken, {"scaler": torch.amp.GradScaler("cpu")})
    assert (caught.value.message, caught.value.where) == (
        "an object did not take its saved state",
        "scaler",
    )


class Average:
    """A hand-made EMA: its tensors appear with the first update."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.decay = 0.5
        self.loads = 0

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            old = self.shadow.get(name, torch.zeros_like(parameter))
            self.shadow[name] = torch.lerp(parameter.detach(), old, self.decay)
        self.seen.append(torch.tensor([1.0]))

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "seen": self.seen, "decay": self.decay, "none": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.shadow, self.seen = state["shadow"], state["seen"]
        self.decay = state["decay"]


def test_objects_take_the_saved_structure_in_one_call() -> None:
    model, one, two = net(1), Average(), Average()
    for _ in range(3):
        one.update(model)
    taken = take({"ema": one})
    assert "ema.shadow.first.weight" in taken.tensors
    give(taken, {"ema": two})
    assert_same(take({"ema": two}), taken)
    assert two.loads == 1
    one.shadow.clear()
    one.seen.clear()
    give(take({"ema": one}), {"ema": two})
    assert (two.shadow, two.seen) == ({}, [])


def test_objects_that_share_memory_with_the_model() -> None:
    def make(seed: int) -> dict[str, Any]:
        model = net(seed)
        return {"m": model, "h": Holder({"w": model.scale, "n": math.pi})}

    taken = take(make(1))
    assert taken.names.aliases == {"h.inner.w": "m.scale"}
    two = make(2)
    give(taken, two)
    assert two["h"].content["w"] is two["m"].scale
    apart: dict[str, Any] = {"m": net(2), "h": Holder({"w": torch.zeros(()), "n": 0})}
    give(taken, apart)
    assert apart["h"].content["w"] == apart["m"].scale


def test_a_reference_without_its_tensor_is_an_error() -> None:
    taken = take({"h": Holder([torch.ones(1)])})
    state = {"h": Holder([torch.zeros(1)])}
    leaves = prepare(state, taken.names)
    damaged = codec.decode({"inner": [{"$": "type", "name": "ckptd.TensorRef", "v": "h.x"}]})
    with pytest.raises(MismatchError) as caught:
        apply_objects(leaves, {"h": damaged})
    assert caught.value.wanted == "h.x"


def test_values_without_a_place_are_an_error() -> None:
    leaves = prepare({"n": 1}, take({"n": 1}).names)
    with pytest.raises(MismatchError) as caught:
        apply_objects(leaves, {"n": 2, "gone": 1}, {"rng": 3})
    assert caught.value.found == "gone, rng"
