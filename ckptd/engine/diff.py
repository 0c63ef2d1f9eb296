"""The difference between two checkpoints, of one root or two, in one layout or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ckptd.engine.comparing import Difference, compare
from ckptd.engine.inspect import Layouts, value_text
from ckptd.engine.values import PerRankValues, Reader

__all__ = ["DiffReport", "ObjectDiff", "Side", "TensorDiff", "diff"]

BUDGET_BYTES = 256 << 20


class Side(msgspec.Struct, frozen=True):
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


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor.

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
    elements, differing, differing_bits, nan_only_left, nan_only_right, max_abs, max_rel
        See `ckptd.engine.comparing.Difference`.
    """

    name: str
    left: Side | None = None
    right: Side | None = None
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
    left: Reader,
    right: Reader,
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
    wanted = only or (lambda _: True)
    pairs = list(_pairs(left, right, wanted))
    found: dict[str, Difference] = {}
    if values:
        comparable = [(a, b) for a, b in pairs if a and b and _shape(left, a) == _shape(right, b)]
        found = _compare_all(left, right, comparable, budget_bytes // 2, progress)
    sides = Layouts(left.manifest, left.filemap), Layouts(right.manifest, right.filemap)
    return DiffReport(
        left=str(left.commit.name),
        right=str(right.commit.name),
        tensors=tuple(_tensor(left, right, a, b, sides, found.get(a)) for a, b in pairs),
        objects=tuple(_objects(left, right, wanted)),
        values=values,
    )


def _pairs(left: Reader, right: Reader, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield names of one tensor on both sides, "" where it is not; aliases of tied ones count."""
    met: set[str] = set()
    for name in left.names:
        if wanted(name):
            other = right.find(name, *left.aliases(name))
            met.add(other)
            yield name, other
    for name in right.names:
        if wanted(name) and name not in met and not left.find(name):
            yield "", name


def _shape(reader: Reader, name: str) -> tuple[int, ...]:
    return reader.manifest.tensors[reader.number(name)].shape


def _compare_all(
    left: Reader,
    right: Reader,
    pairs: Sequence[tuple[str, str]],
    budget_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Difference]:
    total = sum(left.byte_count(a) for a, _ in pairs)
    done = 0
    found: dict[str, Difference] = {a: Difference() for a, _ in pairs}
    for batch in _batches(left, right, pairs, budget_bytes):
        if len(batch) == 1 and _larger(left, right, *batch[0]) > budget_bytes:
            _compare_slabs(left, right, *batch[0], budget_bytes, found[batch[0][0]])
        else:
            mine = left.tensors([a for a, _ in batch], allow_absent=True)
            other = right.tensors([b for _, b in batch], allow_absent=True)
            for a, b in batch:
                compare(mine[a], other[b], left.dtype(a), right.dtype(b), found[a])
        done += sum(left.byte_count(a) for a, _ in batch)
        if progress is not None:
            progress(done, total)
    return found


def _larger(left: Reader, right: Reader, a: str, b: str) -> int:
    return max(left.byte_count(a), right.byte_count(b))


def _batches(
    left: Reader, right: Reader, pairs: Sequence[tuple[str, str]], budget_bytes: int
) -> Iterator[list[tuple[str, str]]]:
    """Group small tensors, so that thousands of them do not cost a read each."""
    batch: list[tuple[str, str]] = []
    held = 0
    for a, b in pairs:
        size = _larger(left, right, a, b)
        if batch and held + size > budget_bytes:
            yield batch
            batch, held = [], 0
        batch.append((a, b))
        held += size
    if batch:
        yield batch


def _compare_slabs(
    left: Reader, right: Reader, a: str, b: str, budget_bytes: int, into: Difference
) -> None:
    wide = max(left.dtype(a).itemsize, right.dtype(b).itemsize)
    elements = max(1, budget_bytes // wide)
    mine = left.slabs(a, elements * left.dtype(a).itemsize, allow_absent=True)
    other = right.slabs(b, elements * right.dtype(b).itemsize, allow_absent=True)
    for (_, x), (_, y) in zip(mine, other, strict=True):
        compare(x, y, left.dtype(a), right.dtype(b), into)


def _tensor(
    left: Reader,
    right: Reader,
    a: str,
    b: str,
    layouts: tuple[Layouts, Layouts],
    found: Difference | None,
) -> TensorDiff:
    mine = _side(left, a, layouts[0]) if a else None
    other = _side(right, b, layouts[1]) if b else None
    if mine is None or other is None:
        return TensorDiff(name=a or b, left=mine, right=other)
    same_layout = left.filemap.grid_of(left.number(a)) == right.filemap.grid_of(right.number(b))
    if found is None:
        return TensorDiff(name=a, left=mine, right=other, same_layout=same_layout)
    return TensorDiff(
        name=a,
        left=mine,
        right=other,
        same_layout=same_layout,
        compared=True,
        bit_exact=mine.dtype == other.dtype and not found.differing_bits,
        elements=found.elements,
        differing=found.differing,
        differing_bits=found.differing_bits,
        nan_only_left=found.nan_only_left,
        nan_only_right=found.nan_only_right,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
    )


def _side(reader: Reader, name: str, layouts: Layouts) -> Side:
    number = reader.number(name)
    entry = reader.manifest.tensors[number]
    return Side(entry.dtype, entry.shape, layouts.of(number).words, reader.absent_elements(name))


def _objects(left: Reader, right: Reader, wanted: Callable[[str], bool]) -> Iterator[ObjectDiff]:
    mine, other = left.raw_objects(), right.raw_objects()
    for name in [*mine, *(n for n in other if n not in mine)]:
        if not wanted(name):
            continue
        if name in mine and name in other and _same(mine[name], other[name]):
            continue
        yield ObjectDiff(
            name,
            _words(mine[name]) if name in mine else None,
            _words(other[name]) if name in other else None,
        )


def _same(a: Any, b: Any) -> bool:
    """Compare encoded values as text: 1, 1.0 and true are equal in Python and not here."""
    if isinstance(a, PerRankValues) != isinstance(b, PerRankValues):
        return False
    return _canonical(a) == _canonical(b)


def _canonical(raw: Any) -> bytes:
    if isinstance(raw, PerRankValues):
        raw = {str(rank): value for rank, value in raw.items()}  # JSON orders no other keys
    return msgspec.json.encode(raw, order="deterministic")


def _words(raw: Any) -> str:
    if not isinstance(raw, PerRankValues):
        return value_text(raw)
    texts = {rank: value_text(value) for rank, value in raw.items()}
    first = next(iter(texts.values()), "nothing")
    return f"{len(raw)} ranks, the first: {first}"
