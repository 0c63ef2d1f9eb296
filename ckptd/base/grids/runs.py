"""Sets of integers as sorted arrays of runs: union, holes filled, cuts; as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.owners import distinct
from ckptd.decoding import msgpack_decoder

_steps = msgpack_decoder(list[int])

Runs = NDArray[np.int64]
"""Sorted, disjoint, non-touching half-open runs of positions: shape ``(n, 2)``."""


_MAX_POSITION = 1 << 62


def no_runs() -> Runs:
    """Return the empty set."""
    return np.empty((0, 2), dtype=np.int64)


def merge(pairs: NDArray[np.int64], gap: int = 0) -> Runs:
    """Return the union of any half-open intervals; holes of at most `gap` are filled."""
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return no_runs()
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(pairs[:, 1])
    opens = np.concatenate(([True], pairs[1:, 0] > ends[:-1] + gap))
    closes = np.concatenate((opens[1:], [True]))
    return np.stack((pairs[opens, 0], ends[closes]), axis=1)


def coalesce(runs: Runs, gap: int, needed: Runs) -> Runs:
    """Fill holes of at most `gap` positions in `runs`, but never one that `needed` touches.

    Another reader reads a hole that is needed: two readers of one place could undo each other's
    check.
    """
    if gap <= 0 or len(runs) < 2:
        return runs
    lo, hi = runs[:-1, 1], runs[1:, 0]
    at = np.searchsorted(needed[:, 1], lo, side="right")
    starts = np.append(needed[:, 0], _MAX_POSITION)
    fill = (hi - lo <= gap) & (starts[at] >= hi)
    opens = np.concatenate(([True], ~fill))
    closes = np.concatenate((~fill, [True]))
    return np.stack((runs[opens, 0], runs[closes, 1]), axis=1)


def clip(runs: Runs, lo: int, hi: int) -> Runs:
    """Return the part of a set in ``[lo, hi)``."""
    cut = np.clip(runs, lo, hi)
    return cut[cut[:, 1] > cut[:, 0]]


def count(runs: Runs) -> int:
    """Number of positions in a set."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def cut_runs(runs: Runs, size: int) -> list[int]:
    """Return positions that cut a set into parts of `size` positions: first, cuts, past the end."""
    if not len(runs):
        return [0, 0]
    lengths = np.cumsum(runs[:, 1] - runs[:, 0])
    cuts = [int(runs[0, 0])]
    for seen in range(size, int(lengths[-1]), size):
        i = int(np.searchsorted(lengths, seen, side="right"))
        before = int(lengths[i - 1]) if i else 0
        cuts.append(int(runs[i, 0]) + seen - before)
    return [*cuts, int(runs[-1, 1])]


def sweep(sets: Sequence[Runs]) -> tuple[Runs, NDArray[np.bool_]]:
    """Cut the union of several sets where any of them begins or ends.

    Returns
    -------
    segments
        Disjoint runs in order (neighbours may touch).
    members
        ``members[i, s]``: set `s` holds segment `i`.
    """
    points = distinct(np.concatenate([s.ravel() for s in sets])) if sets else np.empty(0)
    if len(points) < 2:
        return no_runs(), np.empty((0, len(sets)), dtype=np.bool_)
    segments = np.stack((points[:-1], points[1:]), axis=1).astype(np.int64)
    members = np.zeros((len(segments), len(sets)), dtype=np.bool_)
    for s, runs in enumerate(sets):
        if len(runs):
            at = np.searchsorted(runs[:, 0], segments[:, 0], side="right") - 1
            members[:, s] = (at >= 0) & (segments[:, 0] < runs[np.maximum(at, 0), 1])
    held = members.any(axis=1)
    return segments[held], members[held]


def encode_runs(runs: Runs) -> bytes:
    """Return a set as bytes: differences of its ends, so that most take one or two bytes."""
    return msgspec.msgpack.encode(np.diff(runs.ravel(), prepend=0).tolist())


def decode_runs(raw: bytes) -> Runs:
    """Invert `encode_runs`."""
    steps = _steps.decode(raw)
    return np.cumsum(np.array(steps, dtype=np.int64), dtype=np.int64).reshape(-1, 2)
