"""Cutting copies at windows, and moving them into larger tensors, on random blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptd.base.grids.block import Block, Fill
from ckptd.base.grids.clip import clip, clip_fill, restride
from ckptd.base.grids.grid import strides_of


def pairs(block: Block) -> list[tuple[int, int]]:
    """Source and target position of every element."""
    out = [(block.source_start, block.target_start)]
    for n, s, t in zip(block.shape, block.source_strides, block.target_strides, strict=True):
        out = [(a + i * s, b + i * t) for a, b in out for i in range(n)]
    return sorted(out)


def random_block(rng: random.Random, shape: tuple[int, ...]) -> Block:
    """Return a copy of a strided box of a row-major tensor into one with turned dimensions."""
    own = strides_of(shape)
    order = list(range(len(shape)))
    rng.shuffle(order)
    picks = []
    for n in shape:
        step = rng.randrange(1, 3)
        first = rng.randrange(n)
        picks.append((first, step, rng.randrange(1, (n - 1 - first) // step + 2)))
    target = [0] * len(shape)
    inner = 1
    for d in order:
        target[d] = inner
        inner *= picks[d][2]
    start = sum(first * s for (first, _, _), s in zip(picks, own, strict=True))
    sizes = tuple(n for _, _, n in picks)
    source = tuple(step * s for (_, step, _), s in zip(picks, own, strict=True))
    return lowest(Block(sizes, start, source, rng.randrange(5), tuple(target)))


def lowest(block: Block) -> Block:
    """Join what steps on alike, as the planner does."""
    dims: list[tuple[int, int, int]] = []
    for n, s, t in zip(block.shape, block.source_strides, block.target_strides, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * s and dims[-1][2] == n * t:
            dims[-1] = (dims[-1][0] * n, s, t)
        else:
            dims.append((n, s, t))
    return Block(
        tuple(n for n, _, _ in dims),
        block.source_start,
        tuple(s for _, s, _ in dims),
        block.target_start,
        tuple(t for _, _, t in dims),
    )


@pytest.mark.parametrize("seed", range(150))
def test_parts_are_what_lies_inside(seed: int) -> None:
    rng = random.Random(seed)
    block = random_block(rng, tuple(rng.randrange(1, 6) for _ in range(rng.randrange(4))))
    every = pairs(block)
    for side, at in (("source", 0), ("target", 1)):
        lo = rng.randrange(0, 40)
        hi = lo + rng.randrange(60)
        parts = list(clip(block, side, lo, hi))  # type: ignore[arg-type]
        found = sorted(p for part in parts for p in pairs(part))
        assert found == [p for p in every if lo <= p[at] < hi]
        assert len(parts) <= max(1, 2 * len(block.shape) - 1)


@pytest.mark.parametrize("seed", range(50))
def test_fills_are_cut_like_copies(seed: int) -> None:
    rng = random.Random(seed)
    block = random_block(rng, tuple(rng.randrange(1, 6) for _ in range(3)))
    steps = tuple(zip(block.shape, block.target_strides, strict=True))
    fill = Fill(steps, block.target_start, 0.0)
    lo = rng.randrange(30)
    hi = lo + rng.randrange(60)
    found = []
    for part in clip_fill(fill, lo, hi):
        places = [part.start]
        for n, s in part.steps:
            places = [p + i * s for p in places for i in range(n)]
        found += places
    assert sorted(found) == sorted(t for _, t in pairs(block) if lo <= t < hi)


@pytest.mark.parametrize("seed", range(150))
def test_a_copy_out_of_a_cell_is_one_out_of_its_tensor(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
    outer = tuple(n + rng.randrange(4) for n in shape)
    offset = tuple(rng.randrange(m - n + 1) for n, m in zip(shape, outer, strict=True))
    block = random_block(rng, shape)
    strides = strides_of(outer)
    base = sum(o * s for o, s in zip(offset, strides, strict=True))
    whole = np.arange(int(np.prod(outer))).reshape(outer)
    cell = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].reshape(-1)
    found = sorted(p for part in restride(block, shape, strides, base) for p in pairs(part))
    assert found == sorted((int(cell[s]), t) for s, t in pairs(block))
