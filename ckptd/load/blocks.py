"""Sets of digest blocks: which 1 MiB blocks of which files a reader needs.

All blocks of all files of a checkpoint lie on one line of integers, file after file, so that a
set is a sorted array of runs and union, sharing and waves are a few numpy calls, whatever the
number of files. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError
from ckptd.format.digest import BLOCK_BYTES
from ckptd.layout.block import Block

__all__ = [
    "BlockLine",
    "Runs",
    "clip",
    "coalesce",
    "count",
    "cut_runs",
    "decode_runs",
    "encode_runs",
    "merge",
    "split",
    "sweep",
    "touched",
]

_steps = msgpack_decoder(list[int])

Runs = NDArray[np.int64]
"""Sorted, disjoint, non-touching half-open runs of line positions: shape ``(n, 2)``."""

_SPACER = 4  # positions between two files: runs of two files never touch, and never coalesce
_MAX_POSITION = 1 << 62


def no_runs() -> Runs:
    """Return the empty set."""
    return np.empty((0, 2), dtype=np.int64)


class BlockLine:
    """Positions of the blocks of all files.

    Parameters
    ----------
    data_bytes
        Length of each file's data section, in file order.

    Raises
    ------
    CorruptError
        kind ``limits``: the sizes add up to more than a line can hold.
    """

    def __init__(self, data_bytes: Sequence[int]) -> None:
        widths = [-(-n // BLOCK_BYTES) + _SPACER for n in data_bytes]
        if sum(widths) > _MAX_POSITION or any(n < 0 for n in data_bytes):
            raise CorruptError("impossible file sizes in the manifest", kind="limits")
        self._first = np.concatenate(([0], np.cumsum(np.array(widths, dtype=np.int64))))
        self._data_bytes = list(data_bytes)

    def first(self, file: int) -> int:
        """Position of the first block of `file`."""
        return int(self._first[file])

    def file_at(self, position: int) -> int:
        """Return the file that `position` belongs to."""
        return int(np.searchsorted(self._first, position, side="right")) - 1

    def files_of(self, runs: Runs) -> list[int]:
        """Return the files that a set touches, ascending."""
        files = np.searchsorted(self._first, runs[:, 0], side="right") - 1
        return [int(f) for f in np.unique(files)]

    def byte_range(self, file: int, lo: int, hi: int) -> tuple[int, int]:
        """Return the bytes of the data section of `file` that positions ``[lo, hi)`` stand for."""
        first = self.first(file)
        return (lo - first) * BLOCK_BYTES, min((hi - first) * BLOCK_BYTES, self._data_bytes[file])

    def byte_count(self, runs: Runs) -> int:
        """Bytes of a set: the last block of a file is short."""
        total = 0
        for lo, hi in runs.tolist():
            start, end = self.byte_range(self.file_at(lo), lo, hi)
            total += end - start
        return total

    def positions(self, file: int, start: int, end: int) -> tuple[int, int]:
        """Return the positions of the blocks that hold bytes ``[start, end)`` of `file`."""
        first = self.first(file)
        return first + start // BLOCK_BYTES, first + -(-end // BLOCK_BYTES)

    def windows(self, runs: Runs, blocks: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(file, lo, hi)`` pieces of a set, none longer than `blocks`, in order."""
        for lo, hi in runs.tolist():
            file = self.file_at(lo)
            for at in range(lo, hi, blocks):
                yield file, at, min(at + blocks, hi)


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

    A hole that somebody needs is somebody else's to read: two readers of one place could undo
    each other's check.
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
    points = np.unique(np.concatenate([s.ravel() for s in sets])) if sets else np.empty(0)
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


# --- blocks of the planner, in bytes of a file ---------------------------------------------------


def touched(block: Block, itemsize: int, start: int) -> list[tuple[int, int]]:
    """Return byte ranges that hold every source byte of `block`, its piece beginning at `start`.

    Two ranges are apart by a whole digest block or more; what lies between closer runs is read
    with them, since some block is needed for either side anyway.
    """
    span = itemsize
    loose: list[tuple[int, int]] = []
    for stride, n in sorted(zip(block.source_strides, block.shape, strict=True)):
        if stride * itemsize - span < BLOCK_BYTES and not loose:
            span += (n - 1) * stride * itemsize
        else:
            loose.append((stride * itemsize, n))
    offsets = np.zeros(1, dtype=np.int64)
    for stride, n in reversed(loose):
        offsets = np.add.outer(offsets, stride * np.arange(n, dtype=np.int64)).ravel()
    base = start + block.source_start * itemsize
    return [(base + o, base + o + span) for o in np.sort(offsets).tolist()]


def split(block: Block, itemsize: int, span_bytes: int) -> Iterator[Block]:
    """Cut `block` into parts, each of whose sources spans at most `span_bytes` without a big hole.

    So every part lies in neighbouring digest blocks that are all needed, and fits a small buffer.
    """
    lo, hi = block.source_span
    hole = _has_hole(block, itemsize)
    if not block.shape or ((hi - lo) * itemsize <= span_bytes and not hole):
        yield block
        return
    d = max(range(len(block.shape)), key=lambda i: block.source_strides[i])
    n, stride = block.shape[d], block.source_strides[d]
    inner = (hi - lo) - (n - 1) * stride
    step = 1 if hole else max(1, (span_bytes // itemsize - inner) // stride + 1)
    for at in range(0, n, step):
        yield from split(_part(block, d, at, min(step, n - at)), itemsize, span_bytes)


def _has_hole(block: Block, itemsize: int) -> bool:
    span = itemsize
    for stride, n in sorted(zip(block.source_strides, block.shape, strict=True)):
        if stride * itemsize - span >= BLOCK_BYTES:
            return True
        span += (n - 1) * stride * itemsize
    return False


def _part(block: Block, d: int, at: int, n: int) -> Block:
    """Return indices ``[at, at + n)`` of dimension `d`, in lowest terms again."""
    kept = (d,) if n > 1 else ()
    dims = (*range(d), *kept, *range(d + 1, len(block.shape)))
    return Block(
        tuple(n if i == d else block.shape[i] for i in dims),
        block.source_start + at * block.source_strides[d],
        tuple(block.source_strides[i] for i in dims),
        block.target_start + at * block.target_strides[d],
        tuple(block.target_strides[i] for i in dims),
    )
