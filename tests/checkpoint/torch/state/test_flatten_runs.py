"""Tensors of a dict that are added at once are the leaves that each by itself would be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.flatten import Flattener, flatten
from ckptd.checkpoint.torch.state.leaves import Leaves, RecalledLeaves, Sink, StatePlace
from ckptd.checkpoint.torch.state.restore import look
from tests.checkpoint.torch.state.test_flatten_recall import outcome, seen
from tests.checkpoint.torch.state.test_wrapped import Codes

State = dict[str, Any]


def odd() -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that both may change
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        return nested, torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)


a, b, c = torch.ones(3), torch.arange(6.0).reshape(2, 3), torch.zeros(2, dtype=torch.bfloat16)
line = torch.arange(8.0)
deep = torch.ones([1] * 65)
PLAIN: dict[str, State] = {
    "keys": {"a.b": a, "0": b, "%": c, "x y": line, "": torch.ones(1), "\n": torch.ones(2)},
    "numbers": {"m": {0: a, "0": b, -1: c, "-1": line}},
    "a state dict": {"m": {"_orig_mod.a.b": a, "module.c": b}, "n": {"a.b": c}},
    "parameters": {"m": {"w": nn.Parameter(a.clone()), "v": b}},
    "an empty one": {"m": {"w": torch.empty(0, 3), "v": b}},
    "two dicts": {"m": {"w": a}, "n": {"w": b}, "k": c},
    "between values": {"m": {"w": a, "n": 1, "v": b, "l": [c], "u": line}},
    "beside a module": {"m": nn.Linear(2, 2), "e": {"w": a, "v": b}, "k": c},
}
OTHERS: dict[str, State] = {
    "one name": {"m": {"_orig_mod.a": a, "a": b}},
    "a name too long": {"m": {"x" * 5000: a}},
    "the same tensor twice": {"m": {"w": a, "v": a}},
    "the same view twice": {"m": {"w": b, "v": b.view(2, 3)}},
    "tied over two dicts": {"m": {"w": a, "v": b}, "n": {"x": c, "y": a.detach()}},
    "tied to an earlier one": {"l": [a, 1], "d": a, "m": {"w": a.detach(), "v": b}},
    "views of one storage": {"m": {"w": line[:4], "v": line[4:], "u": line}},
    "turned": {"m": {"w": b.t(), "v": a}},
    "every second": {"m": {"w": line[::2], "v": a}},
    "all one place": {"m": {"w": torch.ones(1).expand(4), "v": a}},
    "conjugate": {"m": {"w": torch.ones(2, dtype=torch.complex64).conj(), "v": a}},
    "negative": {"m": {"w": torch._neg_view(torch.ones(2)), "v": a}},
    "without memory": {"m": {"w": torch.ones(2, device="meta"), "v": a}},
    "of another library": {"m": {"w": torch.ones(2).to_mkldnn(), "v": a}},
    "sparse": {"m": {"w": torch.eye(2).to_sparse(), "v": a}},
    "nested": {"m": {"w": odd()[0], "v": a}},
    "quantized": {"m": {"w": odd()[1], "v": a}},
    "many dimensions": {"m": {"w": deep, "v": a}},
    "a wrapper": {"m": {"w": a, "q": Codes(torch.ones(2), torch.ones(2)), "v": b}},
    "no shape yet": {"m": {"w": nn.UninitializedParameter(), "v": a}},
    "a module has it": {"e": {"w": a, "v": b}, "m": nn.ParameterList([nn.Parameter(a)])},
    "a module had it": {"m": nn.ParameterList([p := nn.Parameter(a)]), "e": {"w": p, "v": b}},
    "an array has it": {"m": {"w": torch.from_numpy(array := np.ones(3)), "v": a}, "x": array},
}


def full(leaves: Leaves) -> Any:
    """Return all that is seen of leaves."""
    more = [
        (x.name, x.section, x.fresh or id(x.origin), x.own, x.wrapped, x.assign is None)
        for x in leaves.tensors.values()
    ]
    return seen(leaves), more, leaves.besides


def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sink, "add_run", lambda *_: False)


@pytest.mark.parametrize("of", [flatten, look])
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_a_run_is_what_each_by_itself_would_be(
    name: str, of: Callable[[State], Leaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = (PLAIN | OTHERS)[name]

    def found(state: State) -> Any:
        try:
            return full(of(state)), Describer((0,)).structure(of(state), ())
        except Exception:  # noqa: BLE001 - the same one has to come from both
            return outcome(of, state)

    run = found(state)
    by_itself(monkeypatch)
    assert run == found(state)


@pytest.mark.parametrize("name", [*PLAIN])
def test_plain_tensors_are_not_looked_at_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made when they are asked for, and the form of a state is known without that."""
    state = PLAIN[name]
    one = Sink.add_tensor
    asked: list[str] = []

    def add(sink: Sink, place: StatePlace, *rest: Any) -> Any:
        asked.append(place.name)
        return one(sink, place, *rest)

    monkeypatch.setattr(Sink, "add_tensor", add)
    leaves = flatten(state)
    assert isinstance(leaves.tensors, RecalledLeaves)
    Describer((0,)).structure(leaves, ())
    assert {leaf.name for leaf in leaves.made()} == {*asked} < {*leaves.tensors}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_what_was_a_run_is_recalled_as_each_by_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = (PLAIN | OTHERS)[name]

    def twice(state: State) -> Leaves:
        flattener = Flattener()
        flattener.flatten(state)
        return flattener.flatten(state)

    run = outcome(twice, state)
    by_itself(monkeypatch)
    assert run == outcome(flatten, state)


TOGETHER = 512  # are compared at a time


def viewed(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = view(tensor.data)

    return change


def to_parameter(tensor: torch.Tensor) -> None:
    tensor.__class__ = nn.Parameter


FOOLS: dict[str, Callable[[torch.Tensor], None]] = {
    "memory": viewed(torch.clone),
    "dtype": viewed(lambda t: t.view(torch.int32)),
    "shape": viewed(lambda t: t.view(4)),
    "strides": viewed(torch.t),
    "a part": viewed(lambda t: t[1:]),
    "sign": viewed(torch._neg_view),
    "class": to_parameter,
    "size of the memory": lambda t: t.untyped_storage().resize_(1 << 16),
}


@pytest.mark.parametrize("change", [*FOOLS])
def test_each_of_many_tensors_is_looked_at(change: str) -> None:
    for at in (0, TOGETHER - 1, TOGETHER, TOGETHER + 9):
        many = {f"t{i}": torch.full((2, 2), float(i)) for i in range(TOGETHER + 10)}
        flattener = Flattener()
        known = flattener.flatten(many).known
        assert flattener.flatten(many).known is known is not None
        FOOLS[change](many[f"t{at}"])
        found = flattener.flatten(many)
        assert found.known is not known, at
        assert full(found) == full(flatten(many))


def test_many_tensors_that_change_places_are_looked_at() -> None:
    many = {f"t{i}": torch.full((2, 2), float(i)) for i in range(2 * TOGETHER)}
    flattener = Flattener()
    known = flattener.flatten(many).known
    for one, other in ((0, 1), (0, TOGETHER), (TOGETHER - 1, TOGETHER)):
        first, second = many[f"t{one}"], many[f"t{other}"]
        first.data, second.data = second.data, first.data
        found = flattener.flatten(many)
        assert found.known is not known
        assert found.tensors[f"t{one}"].tensor[0, 0] == first[0, 0]
        known = found.known


def test_names_that_are_taken_are_told_one_by_one() -> None:
    sink = Sink()
    run = StatePlace("m", "state['m']", "m"), ["w"], [("w", a)]
    assert sink.add_run(*run)
    assert not sink.add_run(run[0], ["w"], [("w", b)])
    assert [*sink.leaves.tensors] == ["m.w"]


def test_leaves_keep_memory_that_their_tensors_give_up() -> None:
    tensor = torch.ones(3)
    leaves = flatten({"w": tensor, "v": a})
    storage = tensor.untyped_storage()._weak_ref()
    tensor.data = torch.zeros(3)
    assert not torch.UntypedStorage._expired(storage)  # what a save still copies
    del leaves
    assert torch.UntypedStorage._expired(storage)


def test_recalled_leaves_are_described_with_their_other_names_and_own_values() -> None:
    state = {"m": nn.BatchNorm1d(2), "e": {"w": a, "v": a}, "f": {"w": b, "v": c}}
    flattener = Flattener()
    first, second = (Describer((0,)).structure(flattener.flatten(state), ()) for _ in range(2))
    assert first == second
    assert first.own
    assert any(entry.aliases for entry in first.tensors)


def test_tensors_of_one_shape_keep_one() -> None:
    """A structure and its plan are kept between saves: of 100,000 shapes each took 48 bytes."""
    state = {"m": {str(i): torch.ones(2, 300) for i in range(5)}, "n": torch.ones(3)}
    tensors = Describer((0,)).structure(flatten(state), ()).tensors
    assert len({id(entry.shape) for entry in tensors}) == len({t.shape for t in tensors}) == 2
