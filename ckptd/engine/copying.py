"""Pass 2 of a read: copy verified bytes into live buffers. The only code that writes live state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.localfiles import LocalFiles
from ckptd.engine.pool import run_all
from ckptd.engine.wants import Move

__all__ = ["copy_from_files", "copy_from_memory"]

FAR_BYTES = 256 << 10
"""Runs this far apart are read one by one; nearer ones as one window (measured break-even)."""

_TASK_BYTES = 4 << 20
_TASK_MOVES = 256
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

OnBytes = Callable[[int], None]


def copy_from_memory(
    moves: Sequence[Move],
    memory: NDArray[np.uint8],
    offset: Callable[[int, int, int], int],
    *,
    threads: int,
    stall_s: float,
    on_bytes: OnBytes,
) -> None:
    """Copy `moves` out of memory that holds all their bytes.

    Parameters
    ----------
    offset
        ``offset(file, start, end)`` tells where bytes of a file's data section lie in `memory`.
    """

    def work(task: list[Move]) -> None:
        for move in task:
            lo, hi = move.span
            _copy(move, memory, offset(move.file, lo, hi))
        on_bytes(sum(m.byte_count for m in task))

    run_all(_tasks(moves), work, threads=threads, stall_s=stall_s, what="copying")


def copy_from_files(
    moves: Sequence[Move], files: LocalFiles, *, threads: int, stall_s: float, on_bytes: OnBytes
) -> None:
    """Copy `moves` out of local files: long runs straight into place, others through a window."""
    windows = _Windows()

    def work(task: list[Move]) -> None:
        with files.use(task[0].file) as fd:
            for move in task:
                _read_move(move, files, fd, windows)
        on_bytes(sum(m.byte_count for m in task))

    run_all(_tasks(moves), work, threads=threads, stall_s=stall_s, what="copying")


def _tasks(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Group neighbouring moves of one file, so that small tensors do not cost a task each."""
    task: list[Move] = []
    held = 0
    for move in moves:
        lo, hi = move.span
        if task and (
            move.file != task[0].file or held + hi - lo > _TASK_BYTES or len(task) >= _TASK_MOVES
        ):
            yield task
            task, held = [], 0
        task.append(move)
        held += hi - lo
    if task:
        yield task


class _Windows(threading.local):
    """One reusable window a thread."""

    def __init__(self) -> None:
        self._array = np.empty(0, dtype=np.uint8)

    def get(self, size: int) -> NDArray[np.uint8]:
        if len(self._array) < size:
            self._array = np.empty(max(size, _TASK_BYTES), dtype=np.uint8)
        return self._array[:size]


def _read_move(move: Move, files: LocalFiles, fd: int, windows: _Windows) -> None:
    block, itemsize = move.block, move.itemsize
    if len(block.shape) <= 1 and block.run_length == block.numel:
        _read_run(move, files, fd, block.source_start, block.target_start, block.numel)
    elif block.source_strides[-1] == 1 == block.target_strides[-1] and (
        min(block.source_strides[:-1]) * itemsize >= FAR_BYTES
    ):
        sources = _offsets(block.shape[:-1], block.source_strides[:-1], block.source_start)
        targets = _offsets(block.shape[:-1], block.target_strides[:-1], block.target_start)
        for source, target in zip(sources, targets, strict=True):
            _read_run(move, files, fd, source, target, block.shape[-1])
    else:
        lo, hi = move.span
        window = windows.get(hi - lo)
        files.read_exact(fd, move.file, lo, window.data)
        _copy(move, window, 0)


def _read_run(move: Move, files: LocalFiles, fd: int, source: int, target: int, numel: int) -> None:
    size = move.itemsize
    view = move.target.data[target * size : (target + numel) * size]
    files.read_exact(fd, move.file, move.start + source * size, view)


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> list[int]:
    offsets = np.full(1, start, dtype=np.int64)
    for n, stride in zip(shape, strides, strict=True):
        offsets = np.add.outer(offsets, stride * np.arange(n, dtype=np.int64)).ravel()
    return offsets.tolist()


def _copy(move: Move, memory: NDArray[np.uint8], at: int) -> None:
    """Copy a move whose first source byte lies at `at` of `memory`."""
    block, size = move.block, move.itemsize
    source = _strided(memory, at, block.shape, block.source_strides, size)
    target = _strided(
        move.target, block.target_start * size, block.shape, block.target_strides, size
    )
    np.copyto(target, source, casting="no")


def _strided(
    memory: NDArray[np.uint8],
    at: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
) -> NDArray[Any]:
    """Return a view of words; numpy checks that it stays inside `memory`."""
    steps = tuple(s * itemsize for s in strides)
    return np.ndarray(shape, np.dtype(_WORDS[itemsize]), memory, at, steps)
