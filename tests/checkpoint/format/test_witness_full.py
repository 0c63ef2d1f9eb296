from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from ckptd.base.grids.block import Region, box_region, piece_regions
from ckptd.checkpoint.format import witness_full
from ckptd.checkpoint.format.witness import Difference, WitnessPlan
from ckptd.checkpoint.format.witness_full import FullWitness, compare_full, partial_sum
from ckptd.errors import CorruptError, UsageError
from ckptd.types import Box
from tests.base.grids.strategies import Cut, boxes, cuts, shapes, strided
from tests.checkpoint.format.test_witness import MASK, held, reference_splitmix64

ITEMSIZES = [1, 2, 4, 8, 16]


def reference_sum(name: str, raw: bytes, itemsize: int) -> int:
    """Spec 8.4, one word at a time."""
    seed = xxhash.xxh3_64_intdigest(name.encode())
    width = min(itemsize, 8)
    total = 0
    for i in range(len(raw) // width):
        word = int.from_bytes(raw[i * width : (i + 1) * width], "little")
        total += reference_splitmix64(word ^ reference_splitmix64((seed + i) & MASK))
    return total & MASK


def random_tensor(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray[Any, Any]:
    """Elements as opaque bytes, many of them alike."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 3, math.prod(shape) * itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=f"V{itemsize}").reshape(shape)


def whole(shape: tuple[int, ...]) -> list[Region]:
    return [box_region(Box((0,) * len(shape), shape))]


def as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(array.tobytes(), dtype=np.uint8)


@given(shapes(), st.sampled_from(ITEMSIZES), st.text(max_size=5), st.integers(0, 99))
def test_the_sum_is_the_one_of_the_spec(
    shape: tuple[int, ...], itemsize: int, name: str, seed: int
) -> None:
    tensor = random_tensor(shape, itemsize, seed)
    found = partial_sum(name, shape, itemsize, whole(shape), as_bytes(tensor))
    assert found == (reference_sum(name, tensor.tobytes(), itemsize), math.prod(shape))


@given(st.data())
def test_any_partition_gives_the_same_sum(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    itemsize = data.draw(st.sampled_from(ITEMSIZES))
    cut: Cut = data.draw(cuts(shape))
    tensor = random_tensor(shape, itemsize, data.draw(st.integers(0, 99)))
    wanted = partial_sum("t", shape, itemsize, whole(shape), as_bytes(tensor))
    total = count = 0
    for i in range(cut.grid.npieces):
        regions = piece_regions(cut.grid.piece(i))
        size = max((r.span[1] for r in regions), default=0)
        buffer = held_bytes(regions, tensor, size)
        part, n = partial_sum("t", shape, itemsize, regions, buffer)
        total, count = (total + part) & MASK, count + n
    assert (total, count) == wanted


def held_bytes(
    regions: list[Region], tensor: np.ndarray[Any, Any], size: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    places = held(regions, np.arange(tensor.size, dtype=np.int64).reshape(tensor.shape), size)
    flat = tensor.ravel()
    return as_bytes(flat[places % max(1, tensor.size)] if tensor.size else flat)


@given(st.data())
def test_any_strides_of_a_buffer_give_the_same_sum(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda s: 0 not in s))
    region = data.draw(boxes(shape).flatmap(strided))
    itemsize = data.draw(st.sampled_from(ITEMSIZES))
    tensor = random_tensor(shape, itemsize, 5)
    packed = box_region(region.box)
    a = partial_sum("t", shape, itemsize, [region], held_bytes([region], tensor, region.span[1]))
    b = partial_sum("t", shape, itemsize, [packed], held_bytes([packed], tensor, packed.span[1]))
    assert a == b


@given(st.data())
def test_two_elements_that_change_places_change_the_sum(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda s: math.prod(s) > 1))
    itemsize = data.draw(st.sampled_from(ITEMSIZES))
    # Few distinct values, sign bits and zeros among them: what weights look like.
    top = bytes([0] * (itemsize - 1) + [0x80])
    one = bytes([1] + [0] * (itemsize - 1))
    pool = [bytes(itemsize), top, one, data.draw(st.binary(min_size=itemsize, max_size=itemsize))]
    picks = data.draw(
        st.lists(st.integers(0, 3), min_size=math.prod(shape), max_size=math.prod(shape))
    )
    flat = [pool[p] for p in picks]
    i, j = data.draw(st.tuples(*[st.integers(0, len(flat) - 1)] * 2))
    swapped = list(flat)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    sums = [
        partial_sum(
            "t", shape, itemsize, whole(shape), as_bytes(np.frombuffer(b"".join(f), np.uint8))
        )
        for f in (flat, swapped)
    ]
    assert (sums[0] == sums[1]) == (flat[i] == flat[j])


def test_doubles_that_differ_in_sign_only() -> None:
    a = np.array([1.0, -1.0] * 8)
    b = -a
    sums = {partial_sum("t", (16,), 8, whole((16,)), as_bytes(x))[0] for x in (a, b, a[::-1])}
    assert len(sums) == 2  # a reversed is b


def test_the_halves_of_a_complex_number_are_two_words() -> None:
    a = np.array([1 + 2j])
    b = np.array([2 + 1j])
    sums = {partial_sum("t", (1,), 16, whole((1,)), as_bytes(x))[0] for x in (a, b)}
    assert len(sums) == 2


def test_slabs_cover_a_box_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5, 7, 11)
    tensor = random_tensor(shape, 4, 3)
    wanted = reference_sum("t", tensor.tobytes(), 4)
    for slab in (1, 3, 10, 11, 12, 76, 77, 78, 384, 385, 1000):
        monkeypatch.setattr(witness_full, "SLAB", slab)
        found = partial_sum("t", shape, 4, whole(shape), as_bytes(tensor))
        assert found == (wanted, 385)


@pytest.mark.parametrize("start", [1, 2**40])
def test_a_region_outside_the_buffer(start: int) -> None:
    region = box_region(Box((0,), (4,)), start=start)
    with pytest.raises(UsageError) as caught:
        partial_sum("t", (4,), 4, [region], np.zeros(16, np.uint8))
    assert "a region does not lie in its buffer" in caught.value.message


PLAN = WitnessPlan([("a", (4,), 4, True), ("b", (2, 2), 8, True), ("out", (9,), 1, False)])


def test_file_round_trip_and_comparison() -> None:
    wanted, found = FullWitness.empty(PLAN), FullWitness.empty(PLAN)
    raw = np.arange(32, dtype=np.uint8)
    for witness in (wanted, found):
        witness.add(0, *partial_sum("a", (4,), 4, whole((4,)), raw[:16]))
        for row in range(2):
            box = box_region(Box((row, 0), (1, 2)))
            witness.add(1, *partial_sum("b", (2, 2), 8, [box], raw[16 * row : 16 * row + 16]))
    back = FullWitness.decode(wanted.encode(), "witness", PLAN)
    assert back.counts.tolist() == [4, 4, 0]
    assert compare_full(PLAN, back, found) == []
    assert set(load(wanted.encode())) == {"sums", "counts"}
    found.add(1, 1, 0)
    assert compare_full(PLAN, back, found) == [Difference("b", 1, 4)]


def test_sums_wrap() -> None:
    witness = FullWitness.empty(PLAN)
    witness.add(0, MASK, 1)
    witness.add(0, 2, 1)
    assert witness.sums.tolist() == [1, 0, 0]


def test_broken_files() -> None:
    raw = FullWitness.empty(PLAN).encode()
    many = FullWitness.empty(PLAN)
    many.add(0, 0, 5)
    other = WitnessPlan([("a", (4,), 4, True)])
    for data, plan, words in (
        (raw, other, "not the witness of this manifest"),
        (many.encode(), PLAN, "more elements than its tensor has"),
        (raw.replace(b"full-1", b"full-2"), PLAN, "not the witness of this manifest"),
        (raw[:-8], PLAN, "data section has the wrong length"),
    ):
        with pytest.raises(CorruptError) as caught:
            FullWitness.decode(data, "witness", plan)
        assert words in caught.value.message
