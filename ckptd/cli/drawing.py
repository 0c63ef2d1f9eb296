"""A picture of a cut tensor as SVG; reads on light and on dark pages."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from html import escape

from ckptd.cli.picture import (
    Cell,
    Picture,
    cell_of,
    columns,
    row_text,
    rows,
    span_text,
)
from ckptd.readers.words import ranks_text

__all__ = ["drawing"]

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
    """Yield who holds a part and what it is, below each other or side by side, where they fit."""
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
