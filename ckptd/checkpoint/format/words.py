"""A checkpoint's contents in words: layouts, ranks, objects, unread tensors and hints.

In it: how many sizes, ranks and items are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import OPTIMIZER_CLASS, Manifest, ObjectEntry
from ckptd.errors import RefusedError, first_few, size_text

TITLE = re.compile(r"# layout (\S+)\n")
"""Begins the program that a manifest keeps, with the name of the layout in it."""

_MOST_SIZES = 6
_MOST_GROUPS = 4
_MOST_ITEMS = 8
_TEXT_CHARS = 24


class TensorLayout(msgspec.Struct, frozen=True):
    """How one tensor is cut and which ranks wrote the chunks.

    Attributes
    ----------
    words
        For people: ``rows / 4``, ``grid 2 x 2``, ``flat ranges / 6``, ``whole``, ``absent``.
    cells
        Number of cells along each dimension.
    flat
        Whether cells are cut further by flat ranges.
    chunks
        Number of chunks, absent ones included.
    absent
        Number of chunks that no file holds, on purpose.
    ranks
        The ranks that wrote them: ``0-3``, ``0-28 step 4``.
    """

    words: str
    cells: tuple[int, ...]
    flat: bool
    chunks: int
    absent: int
    ranks: str


class Layouts:
    """Layouts of a manifest's tensors; tensors that are laid out alike cost one computation."""

    def __init__(self, manifest: Manifest, filemap: FileMap) -> None:
        self._filemap = filemap
        self._ranks = np.array([f.rank for f in manifest.files], dtype=np.int64)
        self._known: dict[tuple[int, int, int], TensorLayout] = {}

    def of(self, tensor: int) -> TensorLayout:
        """Return the layout of tensor number `tensor`."""
        entry = self._filemap.tensors[tensor]
        key = (entry.grid, entry.owners, entry.base)
        if key not in self._known:
            self._known[key] = self._describe(*key)
        return self._known[key]

    def _describe(self, grid_number: int, owners_number: int, base: int) -> TensorLayout:
        grid = self._filemap.grids[grid_number]
        files = self._filemap.owners[owners_number].array(base)
        held = files[files != ABSENT]
        absent = len(files) - len(held)
        words = "absent" if absent == len(files) else _cut(grid)
        if 0 < absent < len(files):
            words += f", {absent} of {len(files)} absent"
        return TensorLayout(
            words=words,
            cells=grid.cell_shape,
            flat=bool(grid.flat),
            chunks=grid.npieces,
            absent=absent,
            ranks=ranks_text(np.unique(self._ranks[held]).tolist()),
        )


def _cut(grid: Grid) -> str:
    cut = [d for d, axis in enumerate(grid.axes) if axis.ncells > 1]
    if len(cut) == 1:
        words = _dimension(cut[0], len(grid.axes)) + _parts(grid.axes[cut[0]])
    elif cut:
        words = "grid " + " x ".join(map(str, grid.cell_shape))
    else:
        words = ""
    if grid.npieces > grid.ncells:
        flat = f"flat ranges{_parts(grid.flat[0])}" if not cut else f"flat ranges / {grid.npieces}"
        words = f"{words}, then {flat}" if words else flat
    return words or "whole"


def _dimension(number: int, ndim: int) -> str:
    if number == 0:
        return "rows"
    return "columns" if (number, ndim) == (1, 2) else f"dim {number}"


def _parts(axis: Axis) -> str:
    """Say into how many cells, and their sizes where they differ."""
    text = f" / {axis.ncells}"
    if len(axis.runs) == 1:
        return text
    if axis.ncells > _MOST_SIZES:
        return text + ", uneven"
    return text + f" ({'+'.join(map(str, axis.sizes()))})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return rising numbers in few words: ``0-3, 8``; many groups are counted."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]} step {step}"
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and groups[-1][1] + 1 == rank:
            groups[-1][1] = rank
        else:
            groups.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in groups[:_MOST_GROUPS]]
    more = f" and more ({len(ranks)} in all)" if len(groups) > _MOST_GROUPS else ""
    return ", ".join(texts) + more


# -- objects ---------------------------------------------------------------------------------------


def object_text(entry: ObjectEntry, nbytes: int, ranks: str) -> str:
    """Say in few words what an object is, without reading a file.

    Parameters
    ----------
    entry
        The object.
    nbytes, ranks
        Length and writers of the tensor that holds it, where one does.
    """
    if entry.per_rank:
        whose = f"rank {ranks}" if ranks.isdecimal() else f"ranks {ranks}"
        return f"per rank, {size_text(nbytes)} of {whose}; when the world changes: {entry.per_rank}"
    if entry.tensor:
        return f"{size_text(nbytes)} in a file"
    if entry.kind == "groups" and isinstance(entry.value, list):
        return "; ".join(map(_group_text, entry.value)) or "no groups"
    return value_text(entry.value)


def _group_text(group: Any) -> str:
    if not isinstance(group, dict):
        return value_text(group)
    params = group.get("params")
    count = f"{len(params)} tensors" if isinstance(params, list) else value_text(params)
    said = group.get(OPTIMIZER_CLASS)
    classes = said.get("classes") if isinstance(said, dict) else None
    whose = [str(classes[0])[:80]] if isinstance(classes, list) and classes else []
    shown = {k: v for k, v in group.items() if k not in ("params", OPTIMIZER_CLASS)}
    rest = [f"{k}={value_text(v)}" for k, v in shown.items()]
    return " ".join([count, *whose, *rest])


def value_text(raw: Any, depth: int = 3) -> str:
    """Return an encoded value (spec section 7) in few words; decodes nothing.

    Types that this process has not registered are shown like all others.
    """
    if isinstance(raw, dict) and "$" in raw:
        return _tagged_text(raw, depth)
    if isinstance(raw, str):
        return repr(raw if len(raw) <= _TEXT_CHARS else raw[: _TEXT_CHARS - 3] + "...")
    if isinstance(raw, float):
        return f"{raw:.6g}"
    if isinstance(raw, list):
        return f"[{_items(raw, depth)}]"
    if isinstance(raw, dict):
        return f"{{{_items([[k, v] for k, v in raw.items()], depth, _pair)}}}"
    return str(raw)


def _tagged_text(raw: dict[str, Any], depth: int) -> str:
    tag, v = raw["$"], raw.get("v")
    match tag:
        case "tuple" if isinstance(v, list):
            return f"({_items(v, depth)}{',' if len(v) == 1 else ''})"
        case "set" | "frozenset" if isinstance(v, list):
            return f"{{{_items(v, depth)}}}"
        case "dict" if isinstance(v, list):
            pairs = [p for p in v if isinstance(p, list) and len(p) == 2]
            return f"{{{_items(pairs, depth, _pair)}}}"
        case "bytes" if isinstance(v, str):
            return f"{len(v) * 3 // 4 - v[-2:].count('=')} bytes"
        case "array":
            return f"{raw.get('dtype')}{raw.get('shape')}"
        case "shared":
            return value_text(v, depth)
        case "again":
            return "the same again"
        case "scalar":
            return f"one {raw.get('dtype')}"
        case "type":
            return f"{raw.get('name')}({value_text(v, depth - 1)})"
        case "int" if isinstance(v, str):
            return v
        case "complex" if isinstance(v, list):
            return "+".join(map(str, v)) + "j"
    return str(v)[:_TEXT_CHARS]


def _items(values: list[Any], depth: int, text: Callable[[Any, int], str] = value_text) -> str:
    if values and depth <= 0:
        return f"{len(values)} items"
    texts = [text(v, depth - 1) for v in values[:_MOST_ITEMS]]
    more = [f"... {len(values)} in all"] if len(values) > _MOST_ITEMS else []
    return ", ".join(texts + more)


def _pair(pair: list[Any], depth: int) -> str:
    key, value = pair
    return f"{key if isinstance(key, str) else value_text(key)}: {value_text(value, depth)}"


def hint_text(lay: str, sizes: Mapping[str, int]) -> str:
    """Return a kept program's name and sizes that are known besides, for people; or ""."""
    title = TITLE.match(lay)
    said = [f"{axis}={n}" for axis, n in sizes.items()]
    return " ".join([*([title[1]] if title else []), *said])


# -- tensors of unsupported kinds ------------------------------------------------------------

PLAIN_HINT = "save plain tensors: dequantize(), to_dense() or unwrap it before torch.save"
MODULE = "a module, pickled whole: "
MODULE_HINT = (
    "where its classes can be imported, and if you trust it, as this runs code of the file:"
    " torch.save(torch.load(OLD, weights_only=False).state_dict(), NEW)"
)
_MOST_SHOWN = 8


def unread_tensors(values: Mapping[str, str], where: str, hint: str = "") -> RefusedError:
    """Return the error for tensors of unsupported kinds: their names, and what each is."""
    is_module = any(kind.startswith(MODULE) for kind in values.values())
    return RefusedError(
        "tensors of unsupported kinds",
        kind="unreadable-format",
        where=where,
        found=shown_tensors(values),
        hint=(MODULE_HINT if is_module else PLAIN_HINT) + hint,
    )


def shown_tensors(values: Mapping[str, str]) -> str:
    """Return names of tensors with what each is, in words; empty for none."""
    return first_few([f"{name} ({kind})"[:200] for name, kind in values.items()], _MOST_SHOWN)
