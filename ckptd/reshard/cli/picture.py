"""Picture of which rank holds which part of a tensor, as text and SVG (``ckptd lay show``).

In it: colors, legend, sizes; the most cells and ranks that are drawn.

The drawing reads on light and on dark pages.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from itertools import product
from typing import Any

from ckptd.base.grids.grid import strides_of
from ckptd.checkpoint.format.words import ranks_text
from ckptd.errors import NotFoundError, UsageError
from ckptd.lay.regions import box_parts
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.stored import StoredForm, StoredTensor, local_cells
from ckptd.lay.syntax import show
from ckptd.types import Box

_MOST_CELLS = 4096
_MOST_RANKS = 1 << 16


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
        No tensor has that name, or matches that pattern.
    UsageError
        It has too many cells to draw.
    """
    key = form.by_name.get(name)
    if key is None:
        near = get_close_matches(name, form.by_name, n=3)
        raise NotFoundError(
            "unknown tensor of the layout",
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


def text_of(p: Picture) -> str:
    """Return the picture as text: a table of cells, rows down and columns across."""
    lines = [f"{p.name} [{' '.join(map(str, p.shape))}]", f"  {p.rule}", ""]
    across, down = columns(p), rows(p)
    heads = [span_text(p, column) for column in across]
    table = [["", *heads]]
    for row in down:
        cells = [cell_of(p, row, column) for column in across]
        table.append([row_text(p, row), *(f"r{ranks_text(c.ranks) or '-'}" for c in cells)])
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


def rows(p: Picture) -> list[int]:
    """Return the numbers of all rows of cells."""
    return list(range(p.cell_shape[0] if p.cell_shape else 1))


def columns(p: Picture) -> list[tuple[int, ...]]:
    """Return the numbers of all columns: cells of all dimensions but the first."""
    return list(product(*map(range, p.cell_shape[1:])))


def cell_of(p: Picture, row: int, column: tuple[int, ...]) -> Cell:
    """Return a cell."""
    at = (row, *column)[: len(p.cell_shape)]
    return p.cells[sum(c * s for c, s in zip(at, strides_of(p.cell_shape), strict=True))]


def row_text(p: Picture, row: int) -> str:
    """Return the elements of a row: ``0..768``."""
    if not p.shape:
        return "number"
    cell = cell_of(p, row, (0,) * (len(p.cell_shape) - 1))
    return f"{cell.box.offset[0]}..{cell.box.end[0]}"


def span_text(p: Picture, column: tuple[int, ...]) -> str:
    """Return the elements of a column."""
    cell = cell_of(p, 0, column)
    ends = zip(cell.box.offset[1:], cell.box.end[1:], strict=True)
    return " x ".join(f"{o}..{e}" for o, e in ends)


_WIDTH, _HEIGHT, _LEFT, _TOP, _MARGIN = 720, 480, 120, 74, 16
_SMALLEST = 14
_LETTER, _WIDE = 6.2, 6.8
"""Widths of letters, in the two fonts."""

_LINE = 14
_MOST_SHOWN = 24
_SWATCH = 52


def drawing(p: Picture) -> str:
    """Return the picture as an SVG document, cells to scale as far as they can be seen."""
    across, down = columns(p), rows(p)
    heights = _scaled([_extent(cell_of(p, r, across[0]), 0, 1) for r in down], _HEIGHT)
    widths = _scaled([_extent(cell_of(p, 0, c), 1, None) for c in across], _WIDTH)
    heads = [span_text(p, c) for c in across]
    upright = any(len(h) * _LETTER > w for h, w in zip(heads, widths, strict=True))
    top = _TOP + (max(len(h) for h in heads) * _LETTER - 10 if upright else 0)
    body = [_text(_MARGIN, 26, p.name, "title"), _text(_MARGIN, 46, p.rule, "rule")]
    x = float(_LEFT)
    for head, width in zip(heads, widths, strict=True):
        turn = f' transform="rotate(-90 {x + width / 2 + 4:.1f} {top - 6:.1f})"' if upright else ""
        body.append(_text(x + (width / 2 + 4 if upright else 4), top - 6, head, "column", turn))
        x += width
    y = float(top)
    for row, height in zip(down, heights, strict=True):
        x = float(_LEFT)
        body.append(_text(_LEFT - 8, y + height / 2 + 4, row_text(p, row), "row"))
        for column, width in zip(across, widths, strict=True):
            body += _box(cell_of(p, row, column), x, y, width, height)
            x += width
        y += height
    lines = list(_legend(p, y + 24))
    longest = max(len(p.rule) * _WIDE, len(p.name) * 9)
    width = max(_LEFT + sum(widths), _MARGIN + longest) + _MARGIN
    return _SVG.format(
        width=math.ceil(width),
        height=math.ceil(y + 24 + _LINE * (1 + math.ceil(len(lines) / _per_line()))),
        body="\n".join([*body, *lines]),
    )


def _extent(cell: Cell, first: int, end: int | None) -> int:
    return math.prod(cell.box.shape[first:end])


def _scaled(sizes: Sequence[int], total: int) -> list[float]:
    whole = sum(sizes) or 1
    return [max(_SMALLEST, total * n / whole) for n in sizes]


def _box(cell: Cell, x: float, y: float, width: float, height: float) -> Iterator[str]:
    label = f"r{ranks_text(cell.ranks)}" if cell.ranks else "fill"
    yield f"<g><title>{escape(f'{label}: {cell.holds}')}</title>"
    numel = max(1, cell.box.numel)
    for start, end, rank in cell.flat or ((0, numel, cell.ranks[0] if cell.ranks else -1),):
        top, bottom = y + height * start / numel, y + height * end / numel
        yield (
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
            f' fill="{_color(rank)}"/>'
        )
        if cell.flat:
            yield from _labels(f"r{rank}", f"{start}..{end}", x, top, width, bottom - top)
    if not cell.flat:
        yield from _labels(label, cell.holds, x, y, width, height)
    yield "</g>"


def _labels(
    label: str, holds: str, x: float, y: float, width: float, height: float
) -> Iterator[str]:
    """Yield the holders of a part and the part, below each other or side by side, if they fit."""
    beside = (len(label) + 2) * _LETTER
    if height < 12 or width < len(label) * _LETTER + 4:
        return
    line = y + min(height / 2 + 4, 13)
    yield _text(x + 4, line, label, "label")
    if height >= 30 and width >= len(holds) * _WIDE + 6:
        yield _text(x + 4, line + _LINE, holds, "holds")
    elif width >= beside + len(holds) * _WIDE + 6:
        yield _text(x + 4 + beside, line, holds, "holds")
    elif height >= len(holds) * _WIDE + 28:
        middle = x + width / 2 - 4
        turn = f' transform="rotate(90 {middle:.1f} {y + 20:.1f})"'
        yield _text(middle, y + 20, holds, "holds", turn)


def _legend(p: Picture, y: float) -> Iterator[str]:
    """Yield what the colors mean: a rank each, the one that writes."""
    found = {c.ranks[0] for c in p.cells if c.ranks} | {r for c in p.cells for _, _, r in c.flat}
    ranks = sorted(found)
    yield _text(_MARGIN, y, "written by" if ranks else "", "legend")
    per_line = _per_line()
    for i, rank in enumerate(ranks[:_MOST_SHOWN]):
        at, line = _LEFT + i % per_line * _SWATCH, y + i // per_line * _LINE
        yield (
            f'<rect x="{at}" y="{line - 10:.1f}" width="12" height="12" fill="{_color(rank)}"/>'
            + _text(at + 16, line, f"r{rank}", "legend")
        )
    if len(ranks) > _MOST_SHOWN:
        rest = f"and {len(ranks) - _MOST_SHOWN} more ranks"
        yield _text(_LEFT, y + _MOST_SHOWN // per_line * _LINE + _LINE, rest, "legend")


def _per_line() -> int:
    return _WIDTH // _SWATCH


def _color(rank: int) -> str:
    """Return a light color; neighbours among the ranks differ, and every eight the shade does."""
    if rank < 0:
        return "#eeeeee"
    shade = (0.8, 0.68, 0.88)[rank // 8 % 3]
    red, green, blue = colorsys.hls_to_rgb(rank * 0.61803398875 % 1, shade, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(text)}</text>'


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
  viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<style>
  .page {{ fill: #ffffff; stroke: none }}
  rect {{ stroke: #555555; stroke-width: 0.6 }}
  text {{ fill: #222222 }}
  .title {{ font-size: 15px; font-weight: bold }}
  .rule, .holds {{ font-family: monospace }}
  .row {{ text-anchor: end }}
  @media (prefers-color-scheme: dark) {{
    .page {{ fill: #1b1d20 }}
    .title, .rule, .row, .column, .legend {{ fill: #dddddd }}
  }}
</style>
<rect class="page" width="100%" height="100%"/>
{body}
</svg>
"""
