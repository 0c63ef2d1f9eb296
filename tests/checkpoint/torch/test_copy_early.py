"""What is copied at once lies where it did, or the save fails; all are asked at once, if they can.

Each case moves one tensor after the state was looked at and before it is copied, as another thread
may do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.base.torch.tensors import as_bytes, bytes_at
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.structure import RankGroup, build_plan
from ckptd.checkpoint.torch.copy import CopyForm, CopySources, copy_steps
from ckptd.checkpoint.torch.layouts import NoLayout
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.flatten import Flattener
from ckptd.checkpoint.torch.state.leaves import RecalledLeaves, TensorLeaf
from ckptd.errors import SaveError

State = dict[str, Any]


def state() -> State:
    # The file has larger types first, the state not.
    return {
        "b": torch.arange(3, dtype=torch.uint8),
        "a": torch.arange(8.0),
        "e": torch.empty(0),
        "m": {"v": torch.full((4,), 5.0), "w": torch.arange(6).reshape(2, 3)},
    }


class Saves:
    """Copies one state again and again, as a saver does."""

    def __init__(self, of: State) -> None:
        self.state, self.flattener = of, Flattener()
        leaves = self.flattener.flatten(of)
        describer, laid = Describer((0,)), NoLayout().saving(leaves)
        structure = laid.structure(describer.structure(leaves, ()))
        self.plan = build_plan([RankGroup(structure, (0,))], 1)
        steps = copy_steps(self.plan, 0, laid, describer)
        self.form = CopyForm(steps, laid.sources, lambda leaf: False)
        self.slot = Slot(0, self.plan.filemap.data_bytes(0))
        CopySources(self.form, laid.sources).copy_early(self.slot)
        self.slot._warm()

    def leaves(self) -> RecalledLeaves:
        found = self.flattener.flatten(self.state).tensors
        assert isinstance(found, RecalledLeaves)
        return found

    def copy(self, leaves: Mapping[str, TensorLeaf]) -> dict[str, list[int]]:
        """Copy; return the bytes of each tensor in the slot."""
        self.slot.data[:] = bytes(len(self.slot.data))
        CopySources(self.form, leaves).copy_early(self.slot)
        return {s.name: [*self.slot.data[s.start : s.end]] for s in self.form.steps}


@pytest.fixture
def saves() -> Iterator[Saves]:
    found = Saves(state())
    yield found
    found.slot.close()


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were looked at by their names, a number a look."""
    plain, looked = CopySources._check_there, list[int]()

    def check(sources: CopySources, numbers: Any) -> None:
        looked.append(len(numbers))
        plain(sources, numbers)

    monkeypatch.setattr(CopySources, "_check_there", check)
    return looked


def raw(tensor: torch.Tensor) -> list[int]:
    return as_bytes(tensor).tolist()  # `numpy` would forbid that it is resized


def values(of: State) -> dict[str, list[int]]:
    tensors = {"b": of["b"], "a": of["a"], "m.v": of["m"]["v"], "m.w": of["m"]["w"]}
    return {name: raw(tensor) for name, tensor in tensors.items()}


def test_all_are_asked_at_once(saves: Saves, one_by_one: list[int]) -> None:
    for _ in range(2):
        saves.state["m"]["w"] += 1
        assert saves.copy(saves.leaves()) == values(saves.state)
    assert one_by_one == []


def test_the_first_save_asks_one_by_one(one_by_one: list[int]) -> None:
    Saves(state()).slot.close()
    assert one_by_one == [4]


class Mean:
    """Makes its tensor when it is asked for its state, each time in other memory."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def state_dict(self) -> State:
        self.made.append(torch.full((8,), float(len(self.made))))
        return {"mean": self.made[-1]}

    def load_state_dict(self, state: State) -> None:
        self.made = [state["mean"]]


def test_what_is_made_for_each_save_is_copied_from_where_it_lies() -> None:
    saves = Saves({"a": torch.arange(8.0), "m": Mean()})
    for number in (1, 2):
        copied = saves.copy(saves.flattener.flatten(saves.state).tensors)
        assert copied["m.mean"] == raw(torch.full((8,), float(number)))
    saves.slot.close()


def moved(tensor: torch.Tensor) -> None:
    tensor.data = tensor.detach().clone()


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def grown(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(1 << 22)


@pytest.mark.parametrize("by", [moved, freed, grown])
@pytest.mark.parametrize("name", ["b", "a", "m.v", "m.w"])
def test_what_moved_before_it_is_copied_is_told(
    name: str, by: Callable[[torch.Tensor], None], saves: Saves, one_by_one: list[int]
) -> None:
    saves.copy(saves.leaves())
    leaves = saves.leaves()
    by(leaves.locals([name])[0])
    with pytest.raises(SaveError) as caught:
        saves.copy(leaves)
    assert (caught.value.kind, caught.value.where) == ("mutated", name)
    assert one_by_one == [4]


@pytest.mark.parametrize("name", ["b", "a", "m.v", "m.w"])
def test_a_leaf_that_was_asked_for_is_looked_at_and_not_the_live_tensor(
    name: str, saves: Saves, one_by_one: list[int]
) -> None:
    """It keeps its memory when the live one gets another; the live one may get what it gave up."""
    wanted = values(saves.state)
    leaves = saves.leaves()
    live, leaf = leaves.locals([name])[0], leaves[name]
    moved(live)
    live.zero_()
    assert saves.copy(leaves) == wanted  # `leaf` has the memory that was there
    assert one_by_one == []
    live.data = leaf.local.detach()
    leaves = saves.leaves()
    leaf = leaves[name]
    there = torch.from_numpy(bytes_at(live.data_ptr(), live.nbytes))  # in a storage of its own
    live.data = there.view(live.dtype).view(live.shape)
    leaf.local.untyped_storage().resize_(0)
    with pytest.raises(SaveError) as caught:
        saves.copy(leaves)
    assert (caught.value.kind, caught.value.where) == ("mutated", name)


def test_a_leaf_that_was_replaced_is_looked_at_by_its_name(
    saves: Saves, one_by_one: list[int]
) -> None:
    saves.copy(saves.leaves())
    leaves = saves.leaves()
    other = torch.zeros(8)
    leaves["a"] = TensorLeaf("a", other, other, "a", "tensor", "state['a']", other)
    with pytest.raises(SaveError) as caught:
        saves.copy(leaves)
    assert (caught.value.where, one_by_one) == ("a", [4])
    leaves = saves.leaves()
    leaf = leaves["a"]
    del leaves["a"]
    leaves["a"] = leaf
    saves.copy(leaves)
    assert one_by_one == [4, 4]


def test_leaves_in_another_order_are_looked_at_by_their_own(
    saves: Saves, one_by_one: list[int]
) -> None:
    """Two states have the same tensors under other numbers; each is looked up by its own."""
    turned = dict(reversed(saves.state.items()))
    flattener = Flattener()
    for _ in range(2):
        leaves = flattener.flatten(turned).tensors
    assert saves.copy(saves.leaves()) == saves.copy(leaves) == values(saves.state)
    assert one_by_one == []
    moved(saves.state["b"])
    with pytest.raises(SaveError) as caught:
        saves.copy(leaves)
    assert caught.value.where == "b"


def test_a_form_that_was_made_elsewhere_does_not_pass(saves: Saves, one_by_one: list[int]) -> None:
    """That leaves lie where they did when the state was looked at says nothing of the form."""
    leaves = saves.leaves()
    at = np.array(saves.form.addresses)
    saves.form.addresses[0] += 64
    with pytest.raises(SaveError) as caught:
        saves.copy(leaves)
    assert caught.value.where == saves.form.steps[0].name
    assert one_by_one == [4]
    assert at[0] != saves.form.addresses[0]
