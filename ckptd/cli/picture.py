"""Which rank holds which part of a tensor, as text and as SVG."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from itertools import product
from typing import Any

from ckptd.errors import NotFoundError, UsageError
from ckptd.layout.grid import strides_of
from ckptd.layout.lay.printer import show
from ckptd.layout.lay.regions import box_parts
from ckptd.layout.lay.ruleform import RuleForm
from ckptd.layout.lay.stored import StoredForm, StoredTensor, local_cells
from ckptd.types import Box

__all__ = ["Cell", "Picture", "drawing", "picture", "text_of"]

_MOST_CELLS = 4096
_MOST_RANKS = 1 << 16
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 480, 110, 70
_SMALLEST = 14


@dataclass(frozen=True)
class Cell:
    """A cell of the stored tensor.

    Attributes
    ----------
    box
        In elements.
    ranks
        All that hold it, rising; the first one writes it.
    holds
        What it is, as text: ``q[kv 0-1, rep 0-3]``.
    flat
        ``(start, end, rank)`` of its parts, where it is cut by elements.
    """

    box: Box
    ranks: tuple[int, ...]
    holds: str
    flat: tuple[tuple[int, int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "offset": self.box.offset,
            "shape": self.box.shape,
            "ranks": self.ranks,
            "holds": self.holds,
            "flat": self.flat,
        }


@dataclass(frozen=True)
class Picture:
    """A tensor, cut.

    Attributes
    ----------
    name, rule
        The tensor and its rule.
    shape, cell_shape
        In elements, and in cells.
    dims
        The rule's dimensions as text.
    cells
        All of them, row-major.
    """

    name: str
    rule: str
    shape: tuple[int, ...]
    cell_shape: tuple[int, ...]
    dims: tuple[str, ...]
    cells: tuple[Cell, ...]


def picture(form: StoredForm, name: str) -> Picture:
    """Return how a stored tensor is cut.

    Raises
    ------
    NotFoundError
        kind ``no-tensor``.
    UsageError
        It has too many cells to draw.
    """
    key = form.by_name.get(name)
    if key is None:
        near = get_close_matches(name, form.by_name, n=3)
        raise NotFoundError(
            "the layout stores no such tensor",
            kind="no-tensor",
            where=name,
            hint=f"near: {', '.join(near)}" if near else None,
        )
    tensor = form.tensor(*key)
    rule = form.rules[tensor.rule]
    if tensor.grid.ncells > _MOST_CELLS or form.mesh.world > _MOST_RANKS:
        raise UsageError(
            "too much to draw",
            where=name,
            wanted=f"at most {_MOST_CELLS} cells on {_MOST_RANKS} ranks",
            found=f"{tensor.grid.ncells} cells on {form.mesh.world} ranks",
        )
    return Picture(
        name,
        rule.equation.text or show(rule.equation.name),
        tensor.shape,
        tensor.grid.cell_shape,
        tuple(show(d) for d in rule.equation.dims),
        tuple(_cells(form, rule, tensor)),
    )


def _cells(form: StoredForm, rule: RuleForm, tensor: StoredTensor) -> Iterator[Cell]:
    holders: list[list[int]] = [[] for _ in range(tensor.grid.ncells)]
    known: dict[tuple[int, ...], list[int]] = {}
    for rank in range(form.mesh.world):
        coordinates = form.mesh.coordinates(rank)
        if rule.holds(tensor.indexes, coordinates):
            who = rule.who(coordinates)
            if who not in known:
                known[who] = [cell for cell, _ in local_cells(rule, who)]
            for cell in known[who]:
                holders[cell].append(rank)
    for number in range(tensor.grid.ncells):
        box = tensor.grid.cell_box(number)
        flat = tuple(_flat(tensor, number))
        ranks = tuple(dict.fromkeys(r for _, _, r in flat)) or tuple(holders[number])
        yield Cell(box, ranks, _holds(rule, box), flat)


def _flat(tensor: StoredTensor, cell: int) -> Iterator[tuple[int, int, int]]:
    axis = tensor.grid.flat_axis(cell)
    if axis is None:
        return
    first = tensor.grid.first_piece(cell)
    for part in range(axis.ncells):
        start, size = axis.cell(part)
        yield start, start + size, tensor.owners.owner(first + part, tensor.base)


def _holds(rule: RuleForm, box: Box) -> str:
    """Return what a box is: tags and ranges of axes, those that are whole left out."""
    found = box_parts(rule.dims, box)
    by_tags: dict[tuple[str, ...], dict[str, tuple[int, int]]] = {}
    for part in found.parts:
        ranges = by_tags.setdefault(part.tags, {})
        for run in part.runs:
            lo, hi = ranges.get(run.axis, (run.start, run.start + run.size))
            ranges[run.axis] = min(lo, run.start), max(hi, run.start + run.size)
    texts = [_ranged(rule, tags, ranges) for tags, ranges in by_tags.items()]
    return " ".join([*texts, *(["fill"] if found.fills else [])])


def _ranged(rule: RuleForm, tags: tuple[str, ...], ranges: dict[str, tuple[int, int]]) -> str:
    family = rule.equation.families[tags].name.rpartition(".")[2]
    said = []
    for axis, (lo, hi) in ranges.items():
        if (lo, hi) != (0, rule.scope.sizes.get(axis, -1)):
            said.append(f"{axis} {lo}" if hi == lo + 1 else f"{axis} {lo}-{hi - 1}")
    return f"{family}[{', '.join(said)}]" if said else family


# -- text ------------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for people: ``0-3,8``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:8]]
    return ",".join(shown) + (",..." if len(runs) > 8 else "")


def text_of(p: Picture) -> str:
    """Return the picture as text: a table of cells, rows down and columns across."""
    lines = [f"{p.name} [{' '.join(map(str, p.shape))}]", f"  {p.rule}", ""]
    columns = _columns(p)
    rows = _rows(p)
    heads = [_span_text(p, column) for column in columns]
    table = [["", *heads]]
    for row in rows:
        cells = [_cell_of(p, row, column) for column in columns]
        table.append([_row_text(p, row), *(f"r{ranks_text(c.ranks) or '-'}" for c in cells)])
        held = [c.holds for c in cells]
        if any(held):
            table.append(["", *held])
        table += [["", *line] for line in _flat_lines(cells)]
    widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
    lines += [
        "  ".join(text.ljust(w) for text, w in zip(r, widths, strict=True)).rstrip() for r in table
    ]
    return "\n".join(lines)


def _flat_lines(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for i in range(max((len(c.flat) for c in cells), default=0)):
        yield [
            f"  {c.flat[i][0]}..{c.flat[i][1]} r{c.flat[i][2]}" if i < len(c.flat) else ""
            for c in cells
        ]


def _rows(p: Picture) -> list[int]:
    return list(range(p.cell_shape[0] if p.cell_shape else 1))


def _columns(p: Picture) -> list[tuple[int, ...]]:
    return list(product(*map(range, p.cell_shape[1:])))


def _cell_of(p: Picture, row: int, column: tuple[int, ...]) -> Cell:
    at = (row, *column)[: len(p.cell_shape)]
    return p.cells[sum(c * s for c, s in zip(at, strides_of(p.cell_shape), strict=True))]


def _row_text(p: Picture, row: int) -> str:
    if not p.shape:
        return "number"
    cell = _cell_of(p, row, (0,) * (len(p.cell_shape) - 1))
    return f"{cell.box.offset[0]}..{cell.box.end[0]}"


def _span_text(p: Picture, column: tuple[int, ...]) -> str:
    cell = _cell_of(p, 0, column)
    ends = zip(cell.box.offset[1:], cell.box.end[1:], strict=True)
    return " x ".join(f"{o}..{e}" for o, e in ends)


# -- SVG -------------------------------------------------------------------------------------------


def drawing(p: Picture) -> str:
    """Return the picture as an SVG document, cells to scale as far as they can be seen."""
    rows, columns = _rows(p), _columns(p)
    heights = _scaled([_extent(_cell_of(p, r, columns[0]), 0, 1) for r in rows], _HEIGHT)
    widths = _scaled([_extent(_cell_of(p, 0, c), 1, None) for c in columns], _WIDTH)
    body = [
        _text(16, 24, p.name, "title"),
        _text(16, 42, p.rule, "rule"),
    ]
    y = float(_TOP)
    for row, height in zip(rows, heights, strict=True):
        x = float(_LEFT)
        body.append(_text(_LEFT - 8, y + height / 2 + 4, _row_text(p, row), "row"))
        for column, width in zip(columns, widths, strict=True):
            if row == 0:
                body.append(_text(x + 4, _TOP - 6, _span_text(p, column), "column"))
            body += _box(_cell_of(p, row, column), x, y, width, height)
            x += width
        y += height
    full = (_LEFT + sum(widths) + 16, _TOP + sum(heights) + 16)
    return _SVG.format(width=math.ceil(full[0]), height=math.ceil(full[1]), body="\n".join(body))


def _extent(cell: Cell, first: int, end: int | None) -> int:
    return math.prod(cell.box.shape[first:end])


def _scaled(sizes: Sequence[int], total: int) -> list[float]:
    whole = sum(sizes) or 1
    return [max(_SMALLEST, total * n / whole) for n in sizes]


def _box(cell: Cell, x: float, y: float, width: float, height: float) -> Iterator[str]:
    label = f"r{ranks_text(cell.ranks)}" if cell.ranks else "fill"
    title = escape(f"{label}: {cell.holds}")
    numel = max(1, cell.box.numel)
    parts = cell.flat or ((0, numel, cell.ranks[0] if cell.ranks else -1),)
    yield f"<g><title>{title}</title>"
    for start, end, rank in parts:
        top, bottom = y + height * start / numel, y + height * end / numel
        yield (
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
            f' fill="{_color(rank)}"/>'
        )
    if height >= 12 and width >= 7 * len(label):
        yield _text(x + 4, y + min(height, 16) - 3, label, "label")
    if height >= 28 and width >= 6 * len(cell.holds):
        yield _text(x + 4, y + 26, cell.holds, "holds")
    yield "</g>"


def _color(rank: int) -> str:
    """Return a light color; neighbours among the ranks differ."""
    if rank < 0:
        return "#eeeeee"
    red, green, blue = colorsys.hls_to_rgb(rank * 0.61803398875 % 1, 0.8, 0.55)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
  viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<style>
  rect {{ stroke: #555555; stroke-width: 0.6 }}
  .title {{ font-size: 15px; font-weight: bold }}
  .rule, .holds {{ font-family: monospace; fill: #333333 }}
  .row {{ text-anchor: end }}
</style>
{body}
</svg>
"""
