"""Comparing two checkpoints: keys, dtypes, layouts, objects, values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.diff import DiffReport, TensorDiff, compare, diff
from ckptd.errors import CorruptError
from ckptd.store.base import Store
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.types import DTYPES
from tests.checkpoint.load.builder import Array, Saved, build

_numbers = itertools.count()


def reader(
    tensors: dict[str, Saved], *, objects: tuple[ObjectEntry, ...] = (), store: Store | None = None
) -> CkptdReader:
    store = store or MemoryStore(f"diff{next(_numbers)}")
    built = build(store, tensors, objects=objects, witness=False)
    return CkptdReader(Catalogue(store), built.name)


def one(report: DiffReport) -> TensorDiff:
    assert len(report.tensors) == 1
    return report.tensors[0]


def values() -> Array:
    return np.random.default_rng(1).standard_normal((40, 30)).astype(np.float32)


def test_the_same_values_in_another_layout() -> None:
    left = reader({"w": Saved.rows(values(), 4)})
    flat = Grid((Axis(((40, 1),)), Axis(((30, 1),))), (Axis(((700, 1), (500, 1))),))
    right = reader({"w": Saved(values(), flat, [1, 0])})
    report = diff(left, right)
    assert report.same
    found = one(report)
    assert found.bit_exact
    assert not found.same_layout
    assert found.left is not None
    assert found.right is not None
    assert found.left.layout == "rows / 4"
    assert found.right.layout.startswith("flat ranges / 2")
    assert found.elements == 1200


@pytest.mark.parametrize("budget", [64, 400, 5000, 1 << 20])
def test_differences_are_measured_whatever_the_budget(budget: int) -> None:
    a, b = values(), values()
    b[3, 4] += 0.5
    b[39, 29] = -b[39, 29]
    report = diff(
        reader({"w": Saved.rows(a, 3), "v": Saved.whole(a[:4])}),
        reader({"w": Saved.whole(b), "v": Saved.whole(a[:4])}),
        budget_bytes=budget,
    )
    assert not report.same
    found, equal = report.tensors
    assert (found.differing, found.differing_bits, found.elements) == (2, 2, 1200)
    gap = np.abs(a.astype(np.float64) - b)
    assert found.max_abs == gap.max()
    scale = np.maximum(np.abs(a), np.abs(b)).astype(np.float64)
    assert found.max_rel == (gap[gap > 0] / scale[gap > 0]).max() == 2.0
    assert not found.bit_exact
    assert equal.same


def test_keys_shapes_and_dtypes() -> None:
    left = reader(
        {
            "both": Saved.whole(values()),
            "left": Saved.whole(values()),
            "shape": Saved.whole(values()),
            "dtype": Saved.whole(values()),
        }
    )
    right = reader(
        {
            "right": Saved.whole(values()),
            "dtype": Saved.whole(values().astype(np.float64)),
            "shape": Saved.whole(values().T),
            "both": Saved.whole(values()),
        }
    )
    report = diff(left, right)
    assert [t.name for t in report.tensors] == ["both", "left", "shape", "dtype", "right"]
    both, only_left, shape, dtype, only_right = report.tensors
    assert both.same
    assert only_left.right is None
    assert only_right.left is None
    assert not shape.compared
    assert dtype.compared
    assert (dtype.differing, dtype.bit_exact, dtype.same) == (0, False, False)
    assert not report.same


def test_without_values() -> None:
    report = diff(
        reader({"w": Saved.whole(values())}), reader({"w": Saved.whole(values() + 1)}), values=False
    )
    assert report.same
    assert not one(report).compared
    assert not report.values


def test_only_some_names() -> None:
    left = reader({"a": Saved.whole(values()), "b": Saved.whole(values())})
    right = reader({"a": Saved.whole(values()), "b": Saved.whole(values() * 2)})
    assert diff(left, right, only=lambda n: n == "a").same
    assert not diff(left, right).same


def test_tied_names_meet() -> None:
    left = reader({"emb": Saved.whole(values())})
    right = reader({"head": Saved.whole(values())})
    tied = msgspec.structs.replace(
        right.manifest,
        tensors=(msgspec.structs.replace(right.manifest.tensors[0], aliases=("emb",)),),
    )
    right.manifest = tied
    right._numbers["emb"] = 0
    assert diff(left, right).same
    assert diff(right, left).same


def test_absent_pieces() -> None:
    grid = Grid((Axis(((20, 2),)), Axis(((30, 1),))))
    half = values()
    left = reader({"w": Saved(half, grid, [0, ABSENT])})
    assert diff(left, reader({"w": Saved(half, grid, [0, ABSENT])})).same
    report = diff(left, reader({"w": Saved.whole(half)}))
    found = one(report)
    assert not report.same
    assert found.left is not None
    assert found.left.absent == 600


def objects(**raw: Any) -> tuple[ObjectEntry, ...]:
    return tuple(ObjectEntry(name, value=value) for name, value in raw.items())


def test_objects() -> None:
    left = reader({}, objects=objects(step=3, lr=0.1, gone=[1], same={"a": [1, 2], "b": 0}))
    right = reader({}, objects=objects(step=3.0, lr=0.2, same={"b": 0, "a": [1, 2]}, new="x"))
    report = diff(left, right)
    assert not report.same
    assert [(o.name, o.left, o.right) for o in report.objects] == [
        ("step", "3", "3"),
        ("lr", "0.1", "0.2"),
        ("gone", "[1]", None),
        ("new", None, "'x'"),
    ]


def per_rank(texts: list[bytes]) -> CkptdReader:
    raw = np.frombuffer(b"".join(texts), np.uint8)
    grid = Grid((Axis.from_sizes(map(len, texts)),))
    entry = ObjectEntry("rng", tensor="@rng", per_rank="reseed")
    return reader({"@rng": Saved(raw, grid, list(range(len(texts))))}, objects=(entry,))


def test_per_rank_objects() -> None:
    left = per_rank([b'{"s":1}', b"22"])
    assert left.objects() == {"rng": {0: {"s": 1}, 1: 22}}
    assert left.names == []
    assert diff(left, per_rank([b'{"s":1}', b"22"])).same
    report = diff(left, per_rank([b'{"s":1}', b"23"]))
    assert report.objects[0].left == "2 ranks, the first: {s: 1}"
    assert not diff(left, per_rank([b'{"s":1}'])).same


def test_an_object_that_is_no_json() -> None:
    bad = per_rank([b"{", b"1"])
    with pytest.raises(CorruptError) as caught:
        bad.objects()
    assert "an encoded object is not JSON" in caught.value.message


def test_corruption_is_an_error_and_not_a_difference(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    left = reader({"w": Saved.whole(values())}, store=store)
    path = tmp_path / left.manifest.files[0].path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(CorruptError):
        diff(left, reader({"w": Saved.whole(values())}))


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    tensors = {f"t{i}": Saved.whole(values()) for i in range(5)}
    diff(
        reader(tensors),
        reader(tensors),
        budget_bytes=20_000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4800 * n, 24000) for n in (2, 4, 5)]


# --- values --------------------------------------------------------------------------------------

Case = tuple[str, list[Any], list[Any], dict[str, Any]]
F32_MAX = float(np.finfo(np.float32).max)
CASES: list[Case] = [
    ("float32", [1, math.nan], [1, math.nan], {"differing": 0, "differing_bits": 0}),
    ("float32", [0.0], [-0.0], {"differing": 0, "differing_bits": 1, "max_abs": 0.0}),
    ("float32", [1, math.nan], [math.nan, 2], {"differing": 2, "nan_only_left": 1, "max_abs": 0.0}),
    ("float32", [math.inf], [1], {"differing": 1, "max_abs": math.inf, "max_rel": math.inf}),
    ("float32", [math.inf], [math.inf], {"differing": 0}),
    ("float32", [math.inf], [-math.inf], {"differing": 1, "max_abs": math.inf}),
    ("float64", [1e308], [-1e308], {"max_abs": math.inf, "max_rel": 2.0}),
    ("float32", [F32_MAX], [-F32_MAX], {"max_abs": 2 * F32_MAX, "max_rel": 2.0}),
    ("bfloat16", [1.0, 2.0], [1.0, 3.0], {"differing": 1, "max_abs": 1.0, "max_rel": 1 / 3}),
    ("float8_e4m3fn", [1.0, 2.0], [1.0, 3.0], {"differing": 1, "max_abs": 1.0}),
    ("float8_e8m0fnu", [1.0, 2.0], [1.0, 4.0], {"differing": 1, "max_abs": 2.0, "max_rel": 0.5}),
    ("int64", [2**62, 5], [2**62 + 1, 5], {"differing": 1, "max_abs": 1.0}),
    ("int64", [-(2**63)], [2**63 - 1], {"differing": 1, "max_abs": float(2**64 - 1)}),
    ("uint64", [2**64 - 1], [0], {"differing": 1, "max_abs": float(2**64 - 1), "max_rel": 1.0}),
    ("uint8", [0, 255], [255, 0], {"differing": 2, "max_abs": 255.0}),
    ("bool", [True, False], [True, True], {"differing": 1, "max_abs": 1.0}),
    ("complex64", [3 + 4j], [0], {"differing": 1, "max_abs": 5.0, "max_rel": 1.0}),
    ("complex128", [1 + 1j, 2], [1 + 1j, 2], {"differing": 0, "differing_bits": 0}),
    ("float4_e2m1fn_x2", [0x21], [0x31], {"differing": 1, "max_abs": 0.0}),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_values_of_one_dtype(case: Case) -> None:
    name, a, b, expected = case
    dtype = DTYPES[name]
    found = TensorDiff(name="")
    compare(np.array(a, dtype.numpy), np.array(b, dtype.numpy), dtype, dtype, found)
    assert {k: getattr(found, k) for k in expected} == pytest.approx(expected, abs=0, nan_ok=True)


def test_complex32_is_two_halves() -> None:
    def pack(re: float, im: float) -> Array:
        return np.array([re, im], np.float16).view(np.uint32)

    found = TensorDiff(name="")
    dtype = DTYPES["complex32"]
    compare(pack(3, 4), pack(0, 0), dtype, dtype, found)
    assert (found.differing, found.max_abs) == (1, 5.0)


MIXED: list[tuple[str, str, Callable[[Array], Array], int]] = [
    ("float32", "bfloat16", lambda a: a.astype(ml_dtypes.bfloat16), 0),
    ("float64", "float32", lambda a: a.astype(np.float32), 0),
    ("int64", "int32", lambda a: a.astype(np.int32), 0),
    ("float32", "int64", lambda a: a.astype(np.int64) + 1, 4),
]


@pytest.mark.parametrize(("left", "right", "convert", "differing"), MIXED)
def test_values_of_two_dtypes(
    left: str, right: str, convert: Callable[[Array], Array], differing: int
) -> None:
    a = np.arange(4).astype(DTYPES[left].numpy)
    found = TensorDiff(name="")
    compare(a, convert(a), DTYPES[left], DTYPES[right], found)
    assert found.differing == differing


def test_int64_against_uint64_is_exact() -> None:
    found = TensorDiff(name="")
    a, b = np.array([-1, 2**63 - 1]), np.array([2**64 - 1, 2**63 - 1], np.uint64)
    compare(a, b, DTYPES["int64"], DTYPES["uint64"], found)
    assert found.differing == 1
