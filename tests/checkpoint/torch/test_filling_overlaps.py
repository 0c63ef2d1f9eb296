"""Live tensors that lie over one another: computed from their memory, and not seen by luck."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.base.torch.overlaps import are_apart
from ckptd.checkpoint.torch.filling import Filling
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.errors import MismatchError
from tests.processes import PATIENCE_S
from tests.reshard.torch.layout.jobs import PROGRAM, whole_job

_roots = itertools.count()


def saved_and_loaded(saved: dict[str, Any], live: dict[str, Any]) -> None:
    with ckptd.Checkpointer(f"memory://overlaps{next(_roots)}") as ck:
        ck.save(1, saved).durable(PATIENCE_S)
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


# --- what a layout fills --------------------------------------------------------------------------

SPACE = "mesh M = dp:1\nspace s { A[a b] B[a b] N[c] }\n"
APART = "layout apart of s on ON {\n  a = A[a b]\n  b = B[a b]\n  n = N[c]\n}\n"


def over(strides: tuple[int, int], second: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return memory, and two tensors of 4 x 6 in it, and a third beside them."""
    memory = torch.zeros(64)
    a, b = (memory.as_strided((4, 6), strides, at) for at in (0, second))
    return memory, {"a": a, "b": b, "n": torch.zeros(3)}


def laid(saved: dict[str, Any], live: dict[str, Any], layout: str) -> None:
    root = f"memory://laid{next(_roots)}"
    with ckptd.Checkpointer(root, layout=layout) as ck:
        ck.save(1, saved).durable(PATIENCE_S)
        ck.load(live)


@pytest.mark.parametrize("on", ["M", "none"])
@pytest.mark.parametrize(
    ("strides", "second"),
    [((6, 1), 23), ((12, 1), 5), ((6, 1), 18)],
    ids=["an element", "columns", "a row"],
)
def test_what_a_layout_fills_is_compared(on: str, strides: tuple[int, int], second: int) -> None:
    layout = SPACE + APART.replace("ON", on)
    saved = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0).view(4, 6) + 0.5}
    saved["n"] = torch.ones(3)
    memory, live = over(strides, second)
    with pytest.raises(MismatchError) as caught:
        laid(saved, live, layout)
    assert caught.value.where == "a, b"
    assert not memory.any()
    assert not live["n"].any()
    # What has equal values there loads.
    twin, both = over(strides, second)
    twin.copy_(torch.arange(64.0))
    laid({n: t.clone() for n, t in both.items()}, live, layout)
    assert torch.equal(live["a"], both["a"])
    assert torch.equal(live["b"], both["b"])


def test_columns_that_a_layout_fills_have_nothing_in_common() -> None:
    layout = SPACE + APART.replace("ON", "M")
    memory, live = over((12, 1), 6)
    saved = {"a": torch.ones(4, 6), "b": torch.full((4, 6), 2.0), "n": torch.ones(3)}
    laid(saved, live, layout)
    assert memory[:48].view(4, 12).tolist() == [[1.0] * 6 + [2.0] * 6] * 4


def test_one_that_a_layout_fills_and_one_that_it_does_not_know() -> None:
    layout = SPACE + APART.replace("ON", "M")
    memory = torch.zeros(64)
    live = {"a": memory[:24].view(4, 6), "b": torch.zeros(4, 6), "n": torch.zeros(3)}
    live["other"] = memory[20:30]
    saved = {n: torch.rand(t.shape) for n, t in live.items()}
    with pytest.raises(MismatchError) as caught:
        laid(saved, live, layout)
    assert caught.value.where == "a, other"
    assert not memory.any()


def test_what_was_stored_in_another_layout() -> None:
    text = "mesh M = dp:1\nspace s { L{l}.g[f h] L{l}.u[f h] }\n"
    fused = text + "layout one of s on M { l{l}.gu = L{l}[(g:f|u:f) h] }\n"
    apart = text + "layout two of s on M { l{l}.g = L{l}.g[f h]\nl{l}.u = L{l}.u[f h] }\n"
    root = "memory://fused-over"
    with ckptd.Checkpointer(root, layout=fused) as ck:
        ck.save(1, {"model": {"l0.gu": torch.arange(24.0).view(4, 6)}}).durable(PATIENCE_S)
    memory = torch.zeros(24)
    held = {"l0.g": memory[:12].view(2, 6), "l0.u": memory[6:18].view(2, 6)}
    with ckptd.Checkpointer(root, layout=apart) as ck:
        with pytest.raises(MismatchError) as caught:
            ck.load({"model": held})
        assert caught.value.where == "model.l0.g, model.l0.u"
        assert not memory.any()
        held["l0.u"] = memory[12:].view(2, 6)
        ck.load({"model": held})
    assert memory.tolist() == list(range(24))


def test_a_number_of_an_optimizer_that_lies_over_its_state() -> None:
    layout = f"# layout hf\n{PROGRAM}"
    module, optimizer = whole_job(1, 2)
    with ckptd.Checkpointer("memory://number-over", layout=layout) as ck:
        ck.save(1, {"model": module, "optim": optimizer}).durable(PATIENCE_S)
        into, other = whole_job(2, 1)
        held = other.state[into.get_parameter("norm.weight")]
        held["step"] = held["exp_avg"][0]
        before = held["exp_avg"].clone()
        with pytest.raises(MismatchError) as caught:
            ck.load({"model": into, "optim": other})
        assert "step" in str(caught.value.where)
        assert torch.equal(held["exp_avg"], before)


def test_memory_that_a_tensor_gives_up_stays_while_it_is_filled() -> None:
    tensor = torch.zeros(3)
    filling = Filling(Describer((0,)))
    filling.add([("w", tensor, 0)])
    storage = tensor.untyped_storage()._weak_ref()
    tensor.data = torch.ones(3)
    assert not torch.UntypedStorage._expired(storage)
    del filling
    assert torch.UntypedStorage._expired(storage)


def test_ranges_that_meet_are_not_apart() -> None:
    for other, apart in ((8, True), (7, False), (0, False), (-3, True), (-2, False)):
        for order in (1, -1):
            places = np.array([(100, 8), (100 + other, 3)])[::order]
            assert are_apart(places) == apart
    assert are_apart(np.empty((0, 2), dtype=np.int64))
