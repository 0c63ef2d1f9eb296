"""Live tensors that lie over one another: computed from their memory, and not seen by luck."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.errors import MismatchError

_roots = itertools.count()


def saved_and_loaded(saved: dict[str, Any], live: dict[str, Any]) -> None:
    with ckptd.Checkpointer(f"memory://overlaps{next(_roots)}") as ck:
        ck.save(1, saved).durable(60)
        ck.load(live)


@pytest.mark.parametrize(("count", "common"), [(1000, 1), (100_000, 4)])
def test_what_was_apart_is_refused_and_nothing_is_changed(count: int, common: int) -> None:
    # Of 1,000 elements the witness saw it, of 100,000 it did not.
    saved = {"a": torch.arange(float(count)), "b": torch.arange(float(count)) + 0.5}
    memory = torch.zeros(2 * count - common)
    live = {"a": memory[:count], "b": memory[count - common :], "c": torch.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        saved_and_loaded(saved | {"c": torch.ones(1)}, live)
    assert caught.value.where == "a, b"
    assert not memory.any()
    assert not live["c"].any()


def test_what_lay_so_when_it_was_saved_loads() -> None:
    def make(start: float) -> dict[str, Any]:
        memory = torch.arange(12.0) + start
        return {"a": memory[:8], "b": memory[4:], "whole": memory, "bits": memory.view(torch.int32)}

    saved, live = make(3.0), make(0.0)
    saved_and_loaded(saved, live)
    for name, tensor in saved.items():
        assert torch.equal(live[name], tensor)


def test_columns_that_have_nothing_in_common_load() -> None:
    memory = torch.zeros(4, 6)
    q, k, v = memory.split(2, 1)
    saved = {n: torch.full((4, 2), float(i)) for i, n in enumerate("qkv", 1)}
    saved_and_loaded(saved, {"q": q, "k": k, "v": v})
    assert memory.tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4


def test_storages_over_the_same_memory() -> None:
    memory = np.zeros(10, np.float32)
    live = {"a": torch.from_numpy(memory[:6]), "b": memory[5:]}
    saved = {"a": torch.ones(6), "b": np.full(5, 2, np.float32)}
    with pytest.raises(MismatchError) as caught:
        saved_and_loaded(saved, live)
    assert caught.value.where == "a, b"
    saved["b"][0] = 1
    saved_and_loaded(saved, live)
    assert memory.tolist() == [1.0] * 6 + [2.0] * 4


@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (1, 0)])
def test_one_that_lies_over_itself_gets_memory_of_its_own(strides: tuple[int, int]) -> None:
    # (1, 1) loaded other values than were saved.
    live = {"a": torch.zeros(6).as_strided((2, 3), strides)}
    held, want = live["a"], torch.arange(6.0).view(2, 3) * 7
    saved_and_loaded({"a": want}, live)
    assert live["a"] is held
    assert torch.equal(held, want)


def test_one_that_looks_so_and_has_places_of_its_own_is_filled_there() -> None:
    memory = torch.zeros(8)
    live = {"a": memory.as_strided((3, 2), (2, 3))}
    want = torch.arange(6.0).view(3, 2) + 1
    saved_and_loaded({"a": want}, live)
    assert torch.equal(live["a"], want)
    assert memory.count_nonzero() == 6
