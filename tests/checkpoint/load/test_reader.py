"""Whole tensors, slabs and objects by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import MismatchError, NotFoundError, UsageError
from ckptd.store.memory import MemoryStore
from ckptd.types import Box
from tests.checkpoint.load.builder import Saved, build, take

_numbers = itertools.count()


def saved() -> dict[str, Saved]:
    rng = np.random.default_rng(2)
    return {
        "w": Saved.rows(rng.standard_normal((12, 5, 7)), 5),
        "scalar": Saved.whole(np.array(4, np.int16)),
        "empty": Saved.whole(np.zeros((3, 0), np.float32)),
    }


def make(tensors: dict[str, Saved], objects: tuple[ObjectEntry, ...] = ()) -> CkptdReader:
    store = MemoryStore(f"values{next(_numbers)}")
    return CkptdReader(Catalogue(store), build(store, tensors, objects=objects).name)


def test_whole_tensors() -> None:
    reader = make(saved())
    assert reader.names == ["w", "scalar", "empty"]
    for name, tensor in saved().items():
        found = reader.tensor(name)
        assert (found.dtype, found.shape) == (tensor.values.dtype, tensor.values.shape)
        assert (found == tensor.values).all()
    several = reader.tensors(["scalar", "w"])
    assert list(several) == ["scalar", "w"]


@pytest.mark.parametrize("max_bytes", [1, 8, 100, 56 * 5, 1000, 1 << 20])
def test_slabs(max_bytes: int) -> None:
    reader = make(saved())
    for name, tensor in saved().items():
        total = 0
        for box, values in reader.slabs(name, max_bytes):
            assert values.nbytes <= max(max_bytes, values.itemsize)
            assert (values == take(tensor.values, box)).all()
            total += box.numel
        assert total == tensor.values.size


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 50))
def test_boxes_cover_every_element_once_in_order(shape: list[int], most: int) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    boxes = list(Box.whole(tuple(shape)).cut(1, most))
    assert all(b.numel <= most for b in boxes)
    parts = [take(numbers, b).ravel() for b in boxes]
    flat = np.concatenate(parts) if parts else np.empty(0, np.int64)
    assert flat.tolist() == list(range(numbers.size))


def test_unknown_names() -> None:
    reader = make(saved())
    with pytest.raises(NotFoundError) as caught:
        reader.tensor("nope")
    assert "the checkpoint has no such tensor" in caught.value.message
    with pytest.raises(NotFoundError):
        CkptdReader(Catalogue(reader.store), CommitName(7, 1))


def test_absent_pieces() -> None:
    grid = Grid((Axis(((2, 2),)),))
    reader = make({"w": Saved(np.arange(4), grid, [ABSENT, 0])})
    with pytest.raises(MismatchError) as caught:
        reader.tensor("w")
    assert "the checkpoint lacks parts of tensors that the state needs" in caught.value.message
    assert reader.tensor("w", allow_absent=True).tolist() == [0, 0, 2, 3]
    assert reader.absent_elements("w") == 2


def test_objects_are_decoded() -> None:
    value = {"lr": 0.5, "betas": (0.9, 0.99), "data": b"\x00\x01"}
    text = np.frombuffer(b'{"$":"tuple","v":[1,2]}', np.uint8)
    reader = make(
        {"@big": Saved.whole(text)},
        (ObjectEntry("opt", value=codec.encode(value)), ObjectEntry("big", tensor="@big")),
    )
    assert reader.objects() == {"opt": value, "big": (1, 2)}
    assert reader.raw_objects()["big"] == {"$": "tuple", "v": [1, 2]}


def test_types_that_nobody_registered() -> None:
    raw = {"$": "type", "name": "somebody.Else", "v": 1}
    reader = make({}, (ObjectEntry("x", value=raw),))
    with pytest.raises(UsageError) as caught:
        reader.objects()
    assert "the checkpoint holds a value of a type" in caught.value.message
    assert reader.raw_objects() == {"x": raw}
