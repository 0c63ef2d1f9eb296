"""A second opinion: what grids and plans mean, cell by cell, with no code of the package.

Cuts are plain lists of sizes. An element is its coordinate, a buffer is the list of the elements it
holds, and everything is enumerated. Slow on purpose and obvious on purpose.
"""

from __future__ import annotations

import itertools
from typing import Any

Coordinate = tuple[int, ...]


def elements(offset: Coordinate, shape: Coordinate) -> list[Coordinate]:
    """All coordinates of a box, row-major."""
    ranges = [range(o, o + n) for o, n in zip(offset, shape, strict=True)]
    return list(itertools.product(*ranges))


def cells(cuts: list[list[int]]) -> list[tuple[Coordinate, Coordinate]]:
    """``(offset, shape)`` of all cells, row-major."""
    per_dim = []
    for sizes in cuts:
        at, parts = 0, []
        for size in sizes:
            parts.append((at, size))
            at += size
        per_dim.append(parts)
    return [
        (tuple(p[0] for p in combo), tuple(p[1] for p in combo))
        for combo in itertools.product(*per_dim)
    ]


def pieces(cuts: list[list[int]], flats: list[list[int]] | None) -> list[list[Coordinate]]:
    """The elements of each piece, in the order in which its buffer holds them."""
    out = []
    for number, (offset, shape) in enumerate(cells(cuts)):
        inside = elements(offset, shape)
        at = 0
        for size in [len(inside)] if flats is None else flats[number]:
            out.append(inside[at : at + size])
            at += size
    return out


def region_places(
    offset: Coordinate, shape: Coordinate, start: int, strides: Coordinate
) -> dict[int, Coordinate]:
    """Which element lies at which place of a buffer, for one strided box."""
    out = {}
    for coordinate in elements(offset, shape):
        steps = ((c - o) * s for c, o, s in zip(coordinate, offset, strides, strict=True))
        out[start + sum(steps)] = coordinate
    return out


def block_places(block: Any) -> list[tuple[int, int]]:
    """``(source place, target place)`` of each element that a block copies."""
    out = []
    for index in itertools.product(*(range(n) for n in block.shape)):
        source, target = block.source_start, block.target_start
        for i, a, b in zip(index, block.source_strides, block.target_strides, strict=True):
            source += i * a
            target += i * b
        out.append((source, target))
    return out


def execute(copies: list[Any], sources: list[list[Coordinate]]) -> dict[int, Coordinate]:
    """Run a plan on coordinates: what lies where in the target buffer afterwards.

    Fails when a place is written twice, or a source place does not exist.
    """
    target: dict[int, Coordinate] = {}
    for copy in copies:
        for block in copy.blocks:
            for source_place, target_place in block_places(block):
                assert source_place >= 0
                assert target_place >= 0
                assert target_place not in target, f"place {target_place} is written twice"
                target[target_place] = sources[copy.piece][source_place]
    return target
