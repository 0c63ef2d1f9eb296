"""Difference of two checkpoints: tensors, values, objects; exact comparison, memory.

In it: NaNs, tolerance-free figures (largest difference), depth of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.pool import batches
from ckptd.checkpoint.format.words import value_text
from ckptd.checkpoint.load.source import Array, CheckpointReader, PerRankValues
from ckptd.types import DType

STEP = 1 << 18
"""Elements compared at a time: temporaries are a few MiB."""

_OPAQUE = frozenset({"float4_e2m1fn_x2"})


class TensorSide(msgspec.Struct, frozen=True):
    """A tensor as one of the two checkpoints has it.

    Attributes
    ----------
    dtype, shape
        As in the manifest.
    layout
        How it is cut, in words.
    absent
        Elements that no file holds.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    absent: int


class TensorDiff(msgspec.Struct, kw_only=True):
    """One tensor; how its values differ is added up over parts.

    Attributes
    ----------
    name
        Its name on the left, or on the right when it is only there.
    left, right
        None on the side that has no such tensor.
    same_layout
        Both are cut alike. A different layout alone is no difference of values.
    compared
        Values were compared: both exist, shapes agree, values were asked for.
    bit_exact
        All bits agree; False when not compared.
    elements
        Elements compared.
    differing
        Elements with different values; two NaNs are one value, and so are the two zeros.
    differing_bits
        Elements with different bits; counted only between equal dtypes.
    nan_only_left, nan_only_right
        Elements that are NaN on one side only. They count as differing, not in the maxima.
    max_abs
        Largest ``|left - right|``; infinite where one side is.
    max_rel
        Largest ``|left - right| / max(|left|, |right|)``: at most 2.
    """

    name: str
    left: TensorSide | None = None
    right: TensorSide | None = None
    same_layout: bool = False
    compared: bool = False
    bit_exact: bool = False
    elements: int = 0
    differing: int = 0
    differing_bits: int = 0
    nan_only_left: int = 0
    nan_only_right: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def same(self) -> bool:
        """Whether both sides have the tensor, alike but for its layout, bits included."""
        a, b = self.left, self.right
        if a is None or b is None:
            return False
        alike = (a.dtype, a.shape, a.absent) == (b.dtype, b.shape, b.absent)
        return alike and (self.bit_exact or not self.compared)


def compare(a: Array, b: Array, left: DType, right: DType, into: TensorDiff) -> None:
    """Compare two arrays of one shape and add the outcome to `into`.

    Parameters
    ----------
    a, b
        Values; contiguous.
    left, right
        Their logical dtypes.
    """
    x, y = a.reshape(-1), b.reshape(-1)
    for at in range(0, len(x), STEP):
        _compare(x[at : at + STEP], y[at : at + STEP], left, right, into)


def _compare(a: Array, b: Array, left: DType, right: DType, into: TensorDiff) -> None:
    into.elements += len(a)
    if left == right:
        unequal = _bits_differ(a, b, left.itemsize)
        wrong = int(np.count_nonzero(unequal))
        if not wrong:
            return
        into.differing_bits += wrong
        # The rest need not be looked at: equal bits are equal values.
        a, b = a[unequal], b[unequal]
    if left.name in _OPAQUE or right.name in _OPAQUE:
        into.differing += len(a)
        return
    if _is_integer(left) and _is_integer(right):
        _integers(a, b, into)
        return
    _floats(_wide(a, left), _wide(b, right), into)


def _bits_differ(a: Array, b: Array, itemsize: int) -> NDArray[np.bool_]:
    if itemsize == 16:
        x, y = a.view(np.uint64).reshape(-1, 2), b.view(np.uint64).reshape(-1, 2)
        pairs: NDArray[np.bool_] = (x != y).any(axis=1)
        return pairs
    word = np.dtype(f"u{itemsize}")
    words: NDArray[np.bool_] = a.view(word) != b.view(word)
    return words


def _is_integer(dtype: DType) -> bool:
    return dtype.numpy.kind in "iu" and dtype.name == dtype.numpy_name


def _wide(a: Array, dtype: DType) -> Array:
    """Return values as float64 or complex128, exactly."""
    if dtype.name == "complex32":
        return a.view(np.float16).astype(np.float64).view(np.complex128)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _integers(a: Array, b: Array, into: TensorDiff) -> None:
    """Integers exactly: float64 would take large neighbours for equal."""
    unequal = a != b
    a, b = a[unequal], b[unequal]
    into.differing += len(a)
    if len(a):
        high, low = np.maximum(a, b), np.minimum(a, b)
        if high.dtype.kind == "f":  # numpy's common type of int64 and uint64
            gap = high - low
        else:
            gap = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
        _maxima(gap, np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))), into)


def _floats(x: Array, y: Array, into: TensorDiff) -> None:
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    into.nan_only_left += int(np.count_nonzero(nan_x & ~nan_y))
    into.nan_only_right += int(np.count_nonzero(nan_y & ~nan_x))
    unequal = (x != y) & ~(nan_x & nan_y)
    into.differing += int(np.count_nonzero(unequal))
    unequal &= ~(nan_x | nan_y)
    x, y = x[unequal], y[unequal]
    if len(x):
        with np.errstate(all="ignore"):
            _maxima(np.abs(x - y), np.maximum(np.abs(x), np.abs(y)), into)


def _maxima(gap: Array, scale: Array, into: TensorDiff) -> None:
    into.max_abs = max(into.max_abs, float(gap.max()))
    with np.errstate(all="ignore"):
        ratio = np.where(np.isinf(gap), np.inf, gap / scale)
    # Twice the largest finite number is infinite as a difference and 2 as a ratio.
    ratio = np.where(np.isinf(gap) & np.isfinite(scale), 2.0, ratio)
    into.max_rel = max(into.max_rel, float(ratio.max()))


_MOST_DEPTH = 32


class ValueChange(msgspec.Struct, frozen=True):
    """One place where two values differ.

    Attributes
    ----------
    path
        From the object down: ``.last_epoch``, ``[0].lr``, ``rank 2.seed``; empty for the whole.
    left, right
        Both sides in words; None where there is none.
    """

    path: str
    left: str | None
    right: str | None


def changes(a: Any, b: Any, most: int) -> tuple[ValueChange, ...]:
    """Return the first `most` places where two values differ."""
    return tuple(islice(_walk(a, b, "", 0), most))


def _walk(a: Any, b: Any, path: str, depth: int) -> Iterator[ValueChange]:
    if _same_encoded(a, b):
        return
    if depth < _MOST_DEPTH and isinstance(a, dict) and isinstance(b, dict):
        if _is_nest(a) and _is_nest(b) and a["$"] == b["$"]:
            yield from _walk(a["v"], b["v"], path, depth + 1)
            return
        if "$" not in a and "$" not in b:
            yield from _walk_dicts(a, b, path, depth)
            return
    if depth < _MOST_DEPTH and isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _walk(x, y, f"{path}[{i}]", depth + 1)
        return
    yield ValueChange(path, _words_of_encoded(a), _words_of_encoded(b))


def _is_nest(raw: dict[Any, Any]) -> bool:
    return raw.keys() == {"$", "v"} and raw["$"] in ("tuple", "set", "frozenset", "dict")


def _walk_dicts(
    a: dict[Any, Any], b: dict[Any, Any], path: str, depth: int
) -> Iterator[ValueChange]:
    ranked = isinstance(a, PerRankValues)
    for key in [*a, *(k for k in b if k not in a)]:
        below = f"rank {key}" if ranked else f"{path}.{key}"
        if key not in a:
            yield ValueChange(below, None, _words_of_encoded(b[key]))
        elif key not in b:
            yield ValueChange(below, _words_of_encoded(a[key]), None)
        else:
            yield from _walk(a[key], b[key], below, depth + 1)


def _same_encoded(a: Any, b: Any) -> bool:
    """Compare as text: 1, 1.0 and true are equal in Python and not here."""
    if isinstance(a, PerRankValues) != isinstance(b, PerRankValues):
        return False
    return _canonical_encoded(a) == _canonical_encoded(b)


def _canonical_encoded(raw: Any) -> bytes:
    if isinstance(raw, PerRankValues):
        raw = {str(rank): value for rank, value in raw.items()}  # JSON orders no other keys
    return msgspec.json.encode(raw, order="deterministic")


def _words_of_encoded(value: Any) -> str:
    return f"{len(value)} ranks" if isinstance(value, PerRankValues) else value_text(value)


BUDGET_BYTES = 256 << 20


class ObjectDiff(msgspec.Struct, frozen=True):
    """An object that differs, each side in words; None on the side that has none."""

    name: str
    left: str | None
    right: str | None


class DiffReport(msgspec.Struct, frozen=True):
    """The outcome.

    Attributes
    ----------
    left, right
        The checkpoints, in words.
    tensors
        Every tensor of either, left's order first.
    objects
        The objects that differ.
    values
        Whether values were compared.
    """

    left: str
    right: str
    tensors: tuple[TensorDiff, ...]
    objects: tuple[ObjectDiff, ...]
    values: bool

    @property
    def same(self) -> bool:
        """Whether nothing differs but layouts."""
        return not self.objects and all(t.same for t in self.tensors)


def diff(
    left: CheckpointReader,
    right: CheckpointReader,
    *,
    values: bool = True,
    only: Callable[[str], bool] | None = None,
    budget_bytes: int = BUDGET_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints; what is read is verified.

    Parameters
    ----------
    values
        Compare values too; otherwise only what the manifests say.
    only
        Which tensors and objects, by name; all when left out.
    budget_bytes
        Most bytes of values held at a time, both sides together.
    progress
        Called with ``(bytes done, bytes total)`` of left's values.

    Raises
    ------
    CorruptError
        Data of one of them is bad.
    """
    both = _Both(left, right, only or (lambda _: True), budget_bytes // 2)
    pairs = list(both.pairs())
    rows = {a or b: both.tensor(a, b) for a, b in pairs}
    if values:
        alike = [(a, b) for a, b in pairs if a and b and left.info(a).shape == right.info(b).shape]
        both.compare(alike, rows, progress)
    return DiffReport(
        left=left.title,
        right=right.title,
        tensors=tuple(rows.values()),
        objects=tuple(both.objects()),
        values=values,
    )


@dataclass(frozen=True, slots=True)
class _Both:
    """Two checkpoints, what of them is compared, and how many bytes of each are held at a time."""

    left: CheckpointReader
    right: CheckpointReader
    wanted: Callable[[str], bool]
    budget_bytes: int

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield names of a tensor on both sides, "" where it is not; aliases of tied ones count."""
        left, right = self.left, self.right
        met: set[str] = set()
        for name in filter(self.wanted, left.names):
            other = right.find(name, *left.info(name).aliases)
            met.add(other)
            yield name, other
        for name in filter(self.wanted, right.names):
            if name not in met and not left.find(name):
                yield "", name

    def compare(
        self,
        pairs: Sequence[tuple[str, str]],
        rows: Mapping[str, TensorDiff],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Compare the values of tensors of one shape, and note it in the rows of their names."""
        left, right = self.left, self.right
        total = sum(left.info(a).nbytes for a, _ in pairs)
        done = 0

        def larger(pair: tuple[str, str]) -> int:
            return max(left.info(pair[0]).nbytes, right.info(pair[1]).nbytes)

        for batch in batches(pairs, larger, self.budget_bytes):
            if larger(batch[0]) > self.budget_bytes:
                self._compare_slabs(*batch[0], rows[batch[0][0]])
            else:
                mine = left.tensors([a for a, _ in batch], allow_absent=True)
                other = right.tensors([b for _, b in batch], allow_absent=True)
                for a, b in batch:
                    compare(mine[a], other[b], left.info(a).dtype, right.info(b).dtype, rows[a])
            for a, b in batch:
                exact = left.info(a).dtype == right.info(b).dtype and not rows[a].differing_bits
                rows[a].compared, rows[a].bit_exact = True, exact
            done += sum(left.info(a).nbytes for a, _ in batch)
            if progress is not None:
                progress(done, total)

    def _compare_slabs(self, a: str, b: str, into: TensorDiff) -> None:
        mine, other = self.left.info(a).dtype, self.right.info(b).dtype
        elements = max(1, self.budget_bytes // max(mine.itemsize, other.itemsize))
        parts = self.left.slabs(a, elements * mine.itemsize, allow_absent=True)
        others = self.right.slabs(b, elements * other.itemsize, allow_absent=True)
        for (_, x), (_, y) in zip(parts, others, strict=True):
            compare(x, y, mine, other, into)

    def tensor(self, a: str, b: str) -> TensorDiff:
        """Return what is known of a pair without its values."""
        return TensorDiff(
            name=a or b,
            left=_side(self.left, a) if a else None,
            right=_side(self.right, b) if b else None,
            same_layout=bool(a and b) and self.left.grid(a) == self.right.grid(b),
        )

    def objects(self) -> Iterator[ObjectDiff]:
        """Yield the objects that differ."""
        mine, other = self.left.raw_objects(), self.right.raw_objects()
        for name in filter(self.wanted, [*mine, *(n for n in other if n not in mine)]):
            if name in mine and name in other and _same_encoded(mine[name], other[name]):
                continue
            yield ObjectDiff(
                name,
                _words(mine[name]) if name in mine else None,
                _words(other[name]) if name in other else None,
            )


def _side(reader: CheckpointReader, name: str) -> TensorSide:
    info = reader.info(name)
    return TensorSide(
        info.dtype.name, info.shape, reader.layout(name).words, reader.absent_elements(name)
    )


def _words(raw: Any) -> str:
    if not isinstance(raw, PerRankValues):
        return value_text(raw)
    texts = {rank: value_text(value) for rank, value in raw.items()}
    first = next(iter(texts.values()), "nothing")
    return f"{len(raw)} ranks, the first: {first}"
