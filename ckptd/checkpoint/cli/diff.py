"""``ckptd diff``: what differs between two checkpoints, how much of it is shown; exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from ckptd.checkpoint.cli.address import CheckpointAddress, Where, held, opened
from ckptd.checkpoint.cli.inspect import matches, no_tensor
from ckptd.checkpoint.format.manifest import UNORDERED
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.load.source import CheckpointReader, SectionReader
from ckptd.checkpoint.tools.diff import (
    DiffReport,
    ObjectDiff,
    TensorDiff,
    TensorSide,
    ValueChange,
    changes,
)
from ckptd.checkpoint.tools.diff import diff as diff_readers
from ckptd.cli.options import Section
from ckptd.cli.output import (
    Document,
    Json,
    Reply,
    counted,
    flag,
    note,
    option,
    print_rows,
    print_table,
    progress_bar,
    shorten,
)

_MOST_SHOWN = 200
_MOST_CHANGES = 100
_MOST_LINES = 8
_PATH_WIDTH = 60
_VALUE_WIDTH = 40
DIFFERENT = 1


class Named(msgspec.Struct, frozen=True):
    """A checkpoint: URL of its root, step and generation."""

    root: str
    step: int
    generation: int


class DiffRow(TensorDiff, kw_only=True):
    """One tensor and whether it is equal on both sides, layouts aside."""

    equal: bool


class DiffedObject(ObjectDiff, frozen=True):
    """One object that differs, and the first places where it does."""

    changes: tuple[ValueChange, ...] = ()


class DiffDocument(Document, frozen=True, kw_only=True, tag="diff"):
    """The document that ``ckptd diff --json`` prints.

    Attributes
    ----------
    left, right
        The checkpoints.
    equal
        Nothing differs; layouts do not count.
    values
        Values were compared.
    tensors
        Every tensor of either side: name, left and right (dtype, shape, layout in words, absent
        elements; null where it is missing), same_layout, compared, bit_exact, elements, differing,
        differing_bits, nan_only_left, nan_only_right, max_abs, max_rel (null when infinite), equal.
    order
        ``not verified`` where a side was read out of buffers that do not say which tensor lies
        where; ``confirmed`` where such a one is equal to one that was not, so that the order is
        right. Empty otherwise.
    objects
        The objects that differ: name, left and right in words (null where it is missing), and
        changes: path, left, right of the first places where they do.
    """

    left: Named
    right: Named
    equal: bool
    values: bool
    tensors: tuple[DiffRow, ...]
    objects: tuple[DiffedObject, ...]
    order: str = ""


def diff(
    left: Where,
    right: Where,
    /,
    *,
    tensor: Annotated[
        str, option("Only names that match this shell pattern, or begin with it.")
    ] = "",
    section: Section = None,
    no_values: Annotated[bool, flag("Compare manifests only; read no data.")] = False,
    all: Annotated[bool, flag("Show equal tensors too.")] = False,
    json: Json = False,
) -> Reply:
    """Compare two checkpoints: keys, shapes, layouts, objects, values.

    The exit code is 0 when they are equal, 1 when they differ. Layouts are shown and do not count:
    the same values cut another way are equal. A side whose names begin with no section, as those of
    Hugging Face, is compared whole with the section of the other.
    """
    a, b = CheckpointAddress.of(left), CheckpointAddress.of(right)
    with opened(a.root) as mine, opened(b.root) as other:
        with held(mine, a.find(mine), "diff") as x, held(other, b.find(other), "diff") as y:
            wholes = CkptdReader(mine, x), CkptdReader(other, y)
            readers = _below(wholes[0], section), _below(wholes[1], section)
            only = _only(readers, tensor)
            for reader in readers:
                reader.refuse_unread(only)
            with progress_bar("comparing") as bar:
                report = diff_readers(*readers, values=not no_values, only=only, progress=bar)
            objects = _objects(readers, report)
        document = DiffDocument(
            left=Named(mine.store.url, x.step, x.generation),
            right=Named(other.store.url, y.step, y.generation),
            equal=report.same,
            values=report.values,
            tensors=tuple(
                DiffRow(**msgspec.structs.asdict(t), equal=t.same) for t in report.tensors
            ),
            objects=objects,
            order=_order(wholes, report, whole=not (tensor or section)),
        )
    return Reply(
        document, lambda d: _show(d, report, everything=all), 0 if report.same else DIFFERENT
    )


def _order(readers: tuple[CkptdReader, CkptdReader], report: DiffReport, *, whole: bool) -> str:
    """Say whether the order of a side's tensors in buffers was right, or is still unknown."""
    unknown = [UNORDERED in r.manifest.metadata for r in readers]
    equal = report.values and whole and all(t.same for t in report.tensors)
    if not any(unknown):
        return ""
    return "not verified" if all(unknown) or not equal else "confirmed"


def _below(reader: CheckpointReader, section: str | None) -> CheckpointReader:
    """Return a side's section; names that belong to no section are compared as they are."""
    return SectionReader(reader, section) if section and reader.has_sections else reader


def _only(
    readers: tuple[CheckpointReader, CheckpointReader], pattern: str
) -> Callable[[str], bool] | None:
    if not pattern:
        return None
    known = [n for r in readers for n in (*r.names, *r.unread, *(o.name for o in r.entries))]
    if not any(matches(name, pattern) for name in known):
        raise no_tensor(pattern, readers[0].names, readers[0].url)
    return lambda name: matches(name, pattern)


def _objects(
    readers: tuple[CheckpointReader, CheckpointReader], report: DiffReport
) -> tuple[DiffedObject, ...]:
    if not report.objects:
        return ()
    mine, other = (r.raw_objects() for r in readers)

    def inside(name: str) -> tuple[ValueChange, ...]:
        there = name in mine and name in other
        return changes(mine[name], other[name], _MOST_CHANGES) if there else ()

    return tuple(DiffedObject(o.name, o.left, o.right, inside(o.name)) for o in report.objects)


# -- for people ------------------------------------------------------------------------------------


def _show(document: DiffDocument, report: DiffReport, *, everything: bool) -> None:
    rows = [t for t in report.tensors if everything or not t.same]
    if rows:
        print_rows(rows[:_MOST_SHOWN], _TENSOR)
        if len(rows) > _MOST_SHOWN:
            print(f"... and {len(rows) - _MOST_SHOWN} more: --json, or --tensor PATTERN")
        print()
    if document.objects:
        rows_of_objects = [row for o in document.objects for row in _object_cells(o)]
        print_table(("OBJECT", "LEFT", "RIGHT"), rows_of_objects)
        print()
    print(_summary(report))
    if document.order == "confirmed":
        note("the order of tensors in buffers, which was not verified, is right: reshard --trust")
    elif document.order:
        note(f"order {document.order}: read from buffers that do not record where each tensor lies")


def _layouts(t: TensorDiff) -> str:
    a = t.left.layout if t.left else "-"
    b = t.right.layout if t.right else "-"
    return a if t.same_layout else f"{a} | {b}"


def _differing(t: TensorDiff) -> str:
    if not t.compared:
        return ""
    if t.differing:
        return f"{t.differing} of {t.elements}"
    return "bit-exact" if t.bit_exact else "equal values, other bits"


_TENSOR: dict[str, Callable[[TensorDiff], object]] = {
    "TENSOR": lambda t: t.name,
    "LEFT": lambda t: _side(t.left),
    "RIGHT": lambda t: _side(t.right),
    "LAYOUTS": _layouts,
    ">DIFFERING": _differing,
    ">MAX ABS": lambda t: f"{t.max_abs:.3g}" if t.differing else None,
    ">MAX REL": lambda t: f"{t.max_rel:.3g}" if t.differing else None,
}


def _object_cells(o: DiffedObject) -> list[tuple[str, str, str]]:
    """Return a line for each change; a whole value could be pages long."""
    found = o.changes or (ValueChange("", o.left, o.right),)
    return [
        (
            shorten(o.name + (c.path if c.path[:1] in ".[" else f" {c.path}"), _PATH_WIDTH),
            "-" if c.left is None else shorten(c.left, _VALUE_WIDTH),
            "-" if c.right is None else shorten(c.right, _VALUE_WIDTH),
        )
        for c in found[:_MOST_LINES]
    ]


def _side(side: TensorSide | None) -> str:
    if side is None:
        return "-"
    absent = f", {side.absent} absent" if side.absent else ""
    return f"{side.dtype} {list(side.shape)}{absent}"


def _summary(report: DiffReport) -> str:
    only_left = sum(t.right is None for t in report.tensors)
    only_right = sum(t.left is None for t in report.tensors)
    both = [t for t in report.tensors if t.left and t.right]
    cut = sum(not t.same_layout for t in both)
    unequal = sum(not t.same for t in both)
    said = [f"{counted(len(both), 'tensor')} on both sides"]
    if report.values:
        said.append(f"{sum(t.bit_exact for t in both)} bit-exact")
    said += [f"{unequal} differ", f"{cut} cut another way"]
    said += [f"{only_left} only left"] * bool(only_left)
    said += [f"{only_right} only right"] * bool(only_right)
    said += [f"different: {counted(len(report.objects), 'object')}"] * bool(report.objects)
    verdict = "equal" if report.same else "DIFFERENT"
    what = "" if report.values else " (values were not compared)"
    return f"{verdict}{what}: {', '.join(said)}"
