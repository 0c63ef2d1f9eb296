"""Live tensors whose memory cannot be filled: they get other memory, and stay the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.checkpoint.torch.bridge import give, take

VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(1, 3).expand(3, 3),
    "over itself": lambda: torch.zeros(8).as_strided((3, 3), (2, 1)),
    "negated": lambda: torch.zeros(3, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_parameter_stays_the_one_of_its_optimizer_and_of_all_modules(view: str) -> None:
    # The first module had another parameter, the optimizer and the second module the old one.
    def make(weight: nn.Parameter) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["a"].weight = model["b"].weight = weight
        return {"m": model, "o": optim.SGD(model.parameters(), lr=0.1)}

    saved = make(nn.Parameter(torch.arange(9.0).view(3, 3)))
    live = make(nn.Parameter(VIEWS[view]()))
    weight = live["m"]["a"].weight
    give(take(saved), live)
    a, b = live["m"]["a"], live["m"]["b"]
    assert a.weight is b.weight is weight
    assert torch.equal(weight, saved["m"]["a"].weight)
    (a(torch.ones(1, 3)) + b(torch.ones(1, 3))).sum().backward()
    live["o"].step()
    assert not torch.equal(weight, saved["m"]["a"].weight)


def test_a_conjugated_view() -> None:
    live = {"z": torch.zeros(3, dtype=torch.complex64).conj(), "l": [torch.zeros(1).expand(2)]}
    held, inner = live["z"], live["l"][0]
    saved = {"z": torch.tensor([1j, 2, 3 + 1j]), "l": [torch.arange(2.0)]}
    give(take(saved), live)
    assert live["z"] is held
    assert live["l"][0] is inner
    assert torch.equal(held, saved["z"])
    assert torch.equal(inner, saved["l"][0])


def test_buffers_of_two_modules() -> None:
    def make(buffer: torch.Tensor) -> nn.Module:
        model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
        for inner in model.values():
            inner.register_buffer("x", buffer)
        return model

    live = make(torch.zeros(1).expand(4))
    give(take({"m": make(torch.arange(4.0))}), {"m": live})
    assert live["a"].x is live["b"].x
    assert live["a"].x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_array_over_itself_in_two_places() -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(8), (3, 3), (16, 8))
    live = {"a": array, "b": array}
    want = np.arange(9.0).reshape(3, 3)
    give(take({"a": want, "b": want}), live)
    assert np.array_equal(live["a"], want)
    assert np.array_equal(live["b"], want)


def test_two_views_of_memory_that_cannot_be_filled() -> None:
    # The second view kept the old memory.
    row = torch.zeros(1, 3)

    def make(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["a"].weight, model["b"].weight = nn.Parameter(a), nn.Parameter(b)
        return {"m": model, "l": [a, b]}

    want = torch.arange(9.0).view(3, 3)
    live = make(row.expand(3, 3), row.expand(3, 3))
    held = [live["m"]["a"].weight, live["m"]["b"].weight, *live["l"]]
    give(take(make(want, want)), live)
    assert all(torch.equal(tensor, want) for tensor in held)
    assert held[0].data_ptr() == held[1].data_ptr() == held[2].data_ptr() == held[3].data_ptr()
    assert live["m"]["b"].weight is held[1]
