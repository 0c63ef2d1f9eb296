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
from ckptd.checkpoint.format.manifest import GridEntry, Manifest, ObjectEntry, TensorEntry
from ckptd.checkpoint.format.witness import (
    Difference,
    Witness,
    WitnessPlan,
    blind,
    compare,
    gather,
    splitmix64,
)
from ckptd.errors import CorruptError, UsageError
from ckptd.types import Box
from tests.base.grids.strategies import Cut, boxes, cuts, shapes, strided

MASK = 2**64 - 1


def reference_splitmix64(x: int) -> int:
    """The published C code, in plain integers."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_positions(name: str, numel: int, quota: int) -> list[int]:
    """Spec 8.2, one at a time."""
    if numel <= quota:
        return list(range(numel))
    seed = xxhash.xxh3_64_intdigest(name.encode())
    return sorted(reference_splitmix64((seed + i) & MASK) % numel for i in range(quota))


@given(st.lists(st.integers(0, MASK), min_size=1))
def test_splitmix64(xs: list[int]) -> None:
    found = splitmix64(np.array(xs, dtype=np.uint64))
    assert found.tolist() == [reference_splitmix64(x) for x in xs]


def test_splitmix64_as_published() -> None:
    # First outputs of the reference generator for seed 1234567.
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * gamma) & MASK for i in range(3)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


entries = st.lists(
    st.tuples(
        st.text(max_size=5), shapes(max_dims=3), st.sampled_from([1, 2, 4, 8, 16]), st.booleans()
    ),
    max_size=6,
)


@given(entries)
def test_positions_are_those_of_the_spec(raw: list[Any]) -> None:
    plan = WitnessPlan(raw)
    assert plan.total == sum(plan.counts)
    for i, (name, shape, _, include) in enumerate(raw):
        wanted = reference_positions(name, math.prod(shape), 1024) if include else []
        assert plan.positions(i).tolist() == wanted
        assert plan.starts[i + 1] - plan.starts[i] == plan.counts[i] == len(wanted)


def test_large_tensors_are_sampled() -> None:
    shape = (10**6, 10**6)
    plan = WitnessPlan(
        [("small", (1025,), 4, True), ("large", shape, 4, True), ("out", shape, 4, False)]
    )
    assert plan.counts.tolist() == [1024, 1024, 0]
    assert plan.positions(1).tolist() == reference_positions("large", 10**12, 1024)
    assert plan.positions(0).tolist() == reference_positions("small", 1025, 1024)


def test_many_tensors_share_a_million_values() -> None:
    plan = WitnessPlan([(f"t{i}", (5000,), 2, True) for i in range(4536)])
    assert set(plan.counts.tolist()) == {220}
    assert plan.positions(4535).tolist() == reference_positions("t4535", 5000, 220)
    plan = WitnessPlan([(f"t{i}", (7,), 2, True) for i in range(1_000_001)])
    assert set(plan.counts.tolist()) == {1}


def held(regions: list[Region], tensor: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """A buffer that holds `regions` of a tensor."""
    buffer = np.full(size, 251, dtype=tensor.dtype)
    for region in regions:
        for index in np.ndindex(region.box.shape):
            place = region.start + sum(i * s for i, s in zip(index, region.strides, strict=True))
            at = tuple(o + i for o, i in zip(region.box.offset, index, strict=True))
            buffer[place] = tensor[at]
    return buffer


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def check_selection(plan: WitnessPlan, shape: tuple[int, ...], regions: list[Region]) -> set[int]:
    """Each slot that is selected must find its own position in the buffer."""
    size = max((r.span[1] for r in regions), default=0)
    buffer = held(regions, numbered(shape), size)
    slots, elements = plan.select(0, regions)
    assert buffer[elements].tolist() == plan.positions(0)[slots].tolist()
    return set(slots.tolist())


@given(st.data())
def test_selection_in_any_strided_box(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    region = data.draw(boxes(shape).flatmap(strided))
    plan = WitnessPlan([("t", shape, 8, True)])
    found = check_selection(plan, shape, [region])
    inside = set()
    for index in np.ndindex(region.box.shape):
        at = tuple(o + i for o, i in zip(region.box.offset, index, strict=True))
        inside.add(int(numbered(shape)[at]))
    assert found == {i for i, p in enumerate(plan.positions(0).tolist()) if p in inside}


@given(st.data())
def test_the_pieces_of_a_cut_select_each_slot_once(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    cut: Cut = data.draw(cuts(shape))
    plan = WitnessPlan([("t", shape, 8, True)])
    seen: list[int] = []
    for i in range(cut.grid.npieces):
        seen += sorted(check_selection(plan, shape, piece_regions(cut.grid.piece(i))))
    assert sorted(seen) == list(range(plan.total))


def test_selection_among_sampled_positions() -> None:
    shape = (300, 7, 40)
    plan = WitnessPlan([("zero", (3,), 1, True), ("t", shape, 8, True)])
    tensor = numbered(shape)
    for box in (
        Box((0, 0, 0), shape),
        Box((17, 0, 0), (100, 7, 40)),
        Box((0, 2, 0), (300, 3, 40)),
        Box((5, 1, 11), (200, 5, 22)),
        Box((5, 1, 11), (1, 1, 5)),
    ):
        local = tensor[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
        slots, elements = plan.select(1, [box_region(box)])
        values = local.ravel()[elements]
        assert values.tolist() == plan.positions(1)[slots - 3].tolist()
        inside = np.isin(plan.positions(1), local)
        assert slots.tolist() == (3 + np.flatnonzero(inside)).tolist()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_values_are_raw_bytes_padded_to_eight(itemsize: int) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 10 * itemsize + itemsize - 1, dtype=np.uint8)
    elements = np.array([3, 0, 9, 3])
    found = gather(raw, itemsize, elements)
    for value, e in zip(found, elements, strict=True):
        element = raw[e * itemsize : (e + 1) * itemsize]
        if itemsize == 16:
            element = element[:8] ^ element[8:]
        assert value.tolist() == [*element.tolist(), *[0] * (8 - len(element))]
    # A buffer that does not begin at a multiple of the item size is as good.
    odd = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    assert (gather(odd, itemsize, elements) == found).all()
    assert gather(raw, itemsize, elements[:0]).shape == (0, 8)


@pytest.mark.parametrize("elements", [[-1], [5], [0, 2**40]])
def test_elements_outside_the_buffer(elements: list[int]) -> None:
    with pytest.raises(UsageError) as caught:
        gather(np.zeros(20, np.uint8), 4, np.array(elements))
    assert "a region does not lie in its buffer" in caught.value.message


def test_sizes_that_no_element_has() -> None:
    with pytest.raises(UsageError) as caught:
        gather(np.zeros(21, np.uint8), 3, np.array([0]))
    assert "invalid item size" in caught.value.message


# --- the file -----------------------------------------------------------------------------------

PLAN = WitnessPlan([("a", (3, 2), 4, True), ("left-out", (9,), 1, False), ("b", (2,), 8, True)])


def filled(seed: int = 0) -> Witness:
    witness = Witness.empty(PLAN)
    values = np.random.default_rng(seed).integers(0, 256, (PLAN.total, 8), dtype=np.uint8)
    slots = np.arange(1, PLAN.total)
    witness.put(slots, values[slots])
    return witness


def test_file_round_trip_and_strangers() -> None:
    witness = filled()
    raw = witness.encode()
    back = Witness.decode(raw, "witness", PLAN)
    assert (back.values == witness.values).all()
    assert back.present.tolist() == [0] + [1] * 7
    parts = load(raw)
    assert parts["values"].shape == (8, 8)
    assert (parts["present"] == witness.present).all()


def test_a_file_whose_values_lie_at_odd_addresses() -> None:
    """A load looks at a witness where it was read."""
    witness = filled()
    raw = witness.encode()
    length = int.from_bytes(raw[:8], "little")
    raw = (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    back = Witness.decode(raw, "witness", PLAN)
    words = [w.values.view(np.uint64).reshape(-1).take(np.arange(8)) for w in (witness, back)]
    assert words[0].tolist() == words[1].tolist()
    assert compare(PLAN, back, witness) == []


def test_broken_files() -> None:
    raw = bytearray(filled().encode())
    header = len(raw) - 9 * PLAN.total
    first_present = header + 8 * PLAN.total
    bad_mark, ghost = bytearray(raw), bytearray(raw)
    bad_mark[first_present + 1] = 2
    ghost[header] = 1  # a value where nothing is present
    other = WitnessPlan([("a", (3, 2), 4, True), ("b", (3,), 8, True)])
    full = raw.replace(b"sample-1", b"sample-2")
    for data, plan, words in (
        (bad_mark, PLAN, "presence marks are not 0 and 1"),
        (ghost, PLAN, "an absent value is not zero"),
        (raw, other, "not the witness of this manifest"),
        (full, PLAN, "not the witness of this manifest"),
        (raw[:-1], PLAN, "data section has the wrong length"),
        (raw[:7], PLAN, "impossible header length"),
        (b"", PLAN, "impossible header length"),
    ):
        with pytest.raises(CorruptError) as caught:
            Witness.decode(bytes(data), "data/x/witness", plan)
        assert words in caught.value.message
        assert caught.value.where == "data/x/witness"


def test_nothing_to_witness() -> None:
    plan = WitnessPlan([])
    assert plan.total == 0
    witness = Witness.decode(Witness.empty(plan).encode(), "w", plan)
    assert compare(plan, witness, witness) == []
    assert blind(plan, witness) == []


# --- what it sees -------------------------------------------------------------------------------


def test_swapped_blocks_are_named() -> None:
    shape = (96, 8)
    plan = WitnessPlan([("qkv", shape, 4, True), ("other", (5,), 4, True)])
    rng = np.random.default_rng(0)
    qkv, other = rng.random(shape, np.float32), rng.random(5, np.float32)
    q, k, v = np.split(qkv, 3)

    def witness(first: Any, second: Any) -> Witness:
        out = Witness.empty(plan)
        for i, tensor in enumerate((first, second)):
            slots, elements = plan.select(i, [box_region(Box((0,) * tensor.ndim, tensor.shape))])
            raw = np.frombuffer(tensor.tobytes(), np.uint8)
            out.put(slots, gather(raw, 4, elements))
        return out

    right = witness(qkv, other)
    assert compare(plan, right, witness(qkv, other)) == []
    found = compare(plan, right, witness(np.concatenate([q, v, k]), other))
    assert found == [Difference("qkv", 512, 768)]
    assert blind(plan, right) == []


def test_only_what_both_hold_is_compared() -> None:
    a, b = filled(0), filled(1)
    b.present[:] = 0
    b.present[2] = 1
    assert compare(PLAN, a, b) == [Difference("a", 1, 1)]
    b.present[2] = 0
    assert compare(PLAN, a, b) == []


def test_blind_tensors_are_named() -> None:
    plan = WitnessPlan(
        [
            ("constant", (2, 3), 4, True),
            ("varied", (3,), 4, True),
            ("one", (1,), 4, True),
            ("scalar", (), 4, True),
            ("empty", (0,), 4, True),
            ("absent", (4,), 4, True),
            ("same as its neighbour", (2,), 4, True),
            ("left-out", (9,), 1, False),
        ]
    )
    witness = Witness.empty(plan)
    values = np.ones((plan.total, 8), np.uint8)
    values[7] = 9
    absent = range(int(plan.starts[5]), int(plan.starts[6]))
    slots = np.array([i for i in range(plan.total) if i not in absent])
    witness.put(slots, values[slots])
    assert blind(plan, witness) == ["constant", "same as its neighbour"]


def test_tensors_of_objects_are_left_out() -> None:
    manifest = Manifest(
        step=1,
        generation=1,
        attempt="a",
        world_size=1,
        files=(),
        grids=(GridEntry((((9, 1),),)),),
        owners=(),
        tensors=tuple(TensorEntry(n, "uint8", (9,), 0, 0) for n in ("w", "rng", "large")),
        objects=(
            ObjectEntry("rng", tensor="rng", per_rank="reseed"),
            ObjectEntry("large", tensor="large"),
        ),
    )
    assert WitnessPlan.of(manifest).counts.tolist() == [9, 0, 0]
