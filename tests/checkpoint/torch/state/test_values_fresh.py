"""A load writes to no memory that an object said before its own load is asked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import ckptd
from ckptd.errors import UsageError
from tests.checkpoint.torch.bridge import give, take
from tests.processes import PATIENCE_S

_roots = itertools.count()


class Meter:
    """Binds another tensor at each update, and begins with one of all."""

    ZERO = torch.zeros(3)

    def __init__(self) -> None:
        self.t = Meter.ZERO

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}

    def load_state_dict(self, said: dict[str, Any]) -> None:
        self.t = said["t"]


class Guarded:
    def __init__(self, words: list[int]) -> None:
        self.words, self.w = torch.tensor(words), torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words, "w": self.w}

    def load_state_dict(self, said: dict[str, Any]) -> None:
        if not torch.equal(self.words, said["words"]):
            raise ValueError("of other words")
        self.w = said["w"]


class Ema:
    """Begins with the model's own memory."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach() for n, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.shadow = {n: self.shadow[n] / 2 + p.detach() for n, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, said: dict[str, Any]) -> None:
        self.shadow = dict(said)


def test_a_constant_of_a_class_stays_what_it_is() -> None:
    # It became 42 for all.
    saved, live = Meter(), Meter()
    saved.t = saved.t + 42
    give(take({"meter": saved}), {"meter": live})
    assert live.t.tolist() == [42.0] * 3
    assert Meter.ZERO.tolist() == [0.0] * 3


def test_a_guard_compares_what_it_has_with_what_was_saved() -> None:
    # It compared what was saved with itself.
    live = Guarded([9, 8, 7])
    with pytest.raises(UsageError) as caught:
        give(take({"g": Guarded([1, 2, 3])}), {"g": live})
    assert "an object did not take its saved state" in caught.value.message
    assert live.words.tolist() == [9, 8, 7]


def test_an_average_that_begins_with_the_models_memory() -> None:
    # The whole was refused as one tensor with two values; a part changed the model.
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"ema": Ema(model), "m": model}

    saved = make()
    saved["ema"].update(saved["m"])
    whole, part, tensors = make(), make(), make()
    weight = part["m"].weight.detach().clone()
    with ckptd.Checkpointer(f"memory://fresh{next(_roots)}") as ck:
        ck.save(1, saved).durable(PATIENCE_S)
        ck.load(whole)
        ck.load(part, only=["ema", "ema.*"])
        ck.load(tensors, only="ema.weight")
    for state in (whole, part, tensors):
        assert torch.equal(state["ema"].shadow["weight"], saved["ema"].shadow["weight"])
    assert torch.equal(whole["m"].weight, saved["m"].weight)
    assert torch.equal(whole["ema"].shadow["bias"], saved["ema"].shadow["bias"])
    assert torch.equal(part["m"].weight, weight)
    # What was not loaded is what the object had.
    assert torch.equal(tensors["ema"].shadow["bias"], tensors["m"].bias)
    assert not torch.equal(tensors["ema"].shadow["bias"], saved["ema"].shadow["bias"])


def test_names_of_one_tensor_are_that_again_and_no_others() -> None:
    one = torch.ones(2)
    saved, live = Meter(), Meter()
    saved.t = {"a": one, "b": one, "c": torch.ones(2)}  # type: ignore[assignment]
    live.t = {"a": torch.zeros(2), "b": torch.zeros(2), "c": Meter.ZERO}  # type: ignore[assignment]
    give(take({"meter": saved}), {"meter": live})
    got: Any = live.t
    assert got["a"] is got["b"]
    assert got["a"] is not got["c"]
    assert got["c"].tolist() == [1.0, 1.0]


def test_what_is_a_parameter_is_given_as_one() -> None:
    saved, live = Meter(), Meter()
    saved.t, live.t = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    before = live.t
    give(take({"meter": saved}), {"meter": live})
    assert isinstance(live.t, nn.Parameter)
    assert live.t is not before
    assert live.t.tolist() == [1.0, 1.0]
    assert before.tolist() == [0.0, 0.0]


def test_schedules_over_a_rate_that_is_a_tensor() -> None:
    # It was refused as one tensor with two values.
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        parts = [
            lr_scheduler.LinearLR(optimizer),
            lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ]
        return {"m": model, "o": optimizer, "s": lr_scheduler.SequentialLR(optimizer, parts, [3])}

    saved, plain, live = make(), make(), make()
    for _ in range(4):
        saved["o"].step()
        saved["s"].step()
    for key in ("m", "o", "s"):
        plain[key].load_state_dict(saved[key].state_dict())
    with ckptd.Checkpointer(f"memory://fresh{next(_roots)}") as ck:
        ck.save(1, saved).durable(PATIENCE_S)
        ck.load(live)
    for _ in range(4):
        for state in (plain, live):
            state["o"].step()
            state["s"].step()
        rates = [float(state["o"].param_groups[0]["lr"]) for state in (plain, live)]
        assert rates[0] == rates[1]
