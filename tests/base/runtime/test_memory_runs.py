"""Runs of memory that are copied together arrive as each by itself would."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.base.runtime import memory
from ckptd.base.runtime.memory import copy_memory

Ints = NDArray[np.int64]


def scattered(seed: int, sizes: Ints, words: bool) -> tuple[NDArray[np.uint8], Ints]:
    """Return a source, and runs in it with gaps between, whose targets are in another order."""
    random = np.random.default_rng(seed)
    step = 8 if words else 1
    gaps = random.integers(0, 5, (2, len(sizes))) * step
    starts = gaps.cumsum(axis=1)
    starts[:, 1:] += sizes[:-1].cumsum()
    order = random.permutation(len(sizes))
    placed = np.zeros(len(sizes), np.int64)
    placed[order] = gaps[1].cumsum() + np.concatenate(([0], sizes[order][:-1].cumsum()))
    source = random.integers(0, 256, int(starts[0, -1] + sizes[-1]) + 8, np.uint8)
    return source, np.stack((starts[0], placed, sizes), axis=1)


@pytest.mark.parametrize("at_once", [1, 7, 64, 1 << 14])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_runs_arrive_whole_and_nothing_beside_them(
    seed: int, words: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_SMALL_WORDS", at_once)
    sizes = np.random.default_rng(seed).choice([0, 8, 16, 24, 4096, 4104, 1, 9, 511], 200)
    sizes = sizes // 8 * 8 if words else sizes
    source, runs = scattered(seed, sizes.astype(np.int64), words)
    target = np.full(int((runs[:, 1] + runs[:, 2]).max()) + 8, 7, np.uint8)
    wanted = target.copy()
    for at, to, nbytes in runs.tolist():
        wanted[to : to + nbytes] = source[at : at + nbytes]
    copy_memory(runs + np.array((source.ctypes.data, target.ctypes.data, 0)))
    assert np.array_equal(target, wanted)


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (4, 4), (0, 0)])
def test_what_does_not_consist_of_words_is_copied_too(shift: tuple[int, int]) -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    at, to = source.ctypes.data + shift[0], target.ctypes.data + shift[1]
    copy_memory(np.array([(at, to, 16), (at + 16, to + 16, 3)]))
    found = target[shift[1] :][:19]
    assert np.array_equal(found, source[shift[0] :][:19])
    assert not target[: shift[1]].any()
    assert not target[shift[1] + 19 :].any()


def test_no_runs_are_no_work() -> None:
    copy_memory(np.zeros((0, 3), np.int64))
    copy_memory(np.array([(0, 0, 0)]))
