"""Lattices: positions that a strided box takes in a buffer, and how intervals cut them.

A lattice is the set of all ``i0*s0 + i1*s1 + ...`` with ``0 <= ik < nk``, where each stride is
beyond the reach of all inner ones. Every box of a dimension's sequence is one, and so is every box
of a row-major tensor. The order of positions is then the order of the indexes, and an interval
cuts a lattice of d dimensions into at most 2d - 1 smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Steps = Sequence[tuple[int, int]]
"""``(count, stride)`` of each dimension, largest stride first; counts are one or more."""

_Ranges = tuple[tuple[int, int], ...]


def reach(steps: Steps) -> int:
    """Return the last position."""
    return sum((n - 1) * s for n, s in steps)


def first_from(steps: Steps, at: int) -> int | None:
    """Return the first position that is not before `at`, or None."""
    rest = reach(steps)
    if at > rest:
        return None
    position = 0
    for n, stride in steps:
        if at <= 0:
            break
        rest -= (n - 1) * stride
        if n > 1:
            i = max(0, -((rest - at) // stride))
            position += i * stride
            at -= i * stride
    return position


def within(steps: Steps, lo: int, hi: int) -> Iterator[tuple[int, _Ranges]]:
    """Yield the parts of a lattice with positions in ``[lo, hi)``, in order.

    Yields
    ------
    tuple
        First position of the part, and ``(first index, count)`` of each dimension.
    """
    yield from _within(steps, reach(steps), lo, hi)


def _within(steps: Steps, last: int, lo: int, hi: int) -> Iterator[tuple[int, _Ranges]]:
    if hi <= 0 or lo > last:
        return
    if lo <= 0 and hi > last:
        yield 0, tuple((0, n) for n, _ in steps)
        return
    (n, stride), inner = steps[0], steps[1:]
    rest = last - (n - 1) * stride
    if n == 1:
        for position, ranges in _within(inner, rest, lo, hi):
            yield position, ((0, 1), *ranges)
        return
    first, end = max(0, -((rest - lo) // stride)), min(n, -(-hi // stride))
    # Rows [whole, whole_end) lie inside as they are; at most one before and one behind is cut.
    whole = max(first, -(-lo // stride))
    whole_end = max(whole, min(end, (hi - 1 - rest) // stride + 1))
    for i in range(first, min(whole, end)):
        yield from _row(inner, rest, lo, hi, i, stride)
    if whole < whole_end:
        yield whole * stride, ((whole, whole_end - whole), *((0, m) for m, _ in inner))
    for i in range(whole_end, end):
        yield from _row(inner, rest, lo, hi, i, stride)


def _row(
    inner: Steps, rest: int, lo: int, hi: int, i: int, stride: int
) -> Iterator[tuple[int, _Ranges]]:
    """Yield the parts of row `i` of the outermost dimension."""
    for position, ranges in _within(inner, rest, lo - i * stride, hi - i * stride):
        yield i * stride + position, ((i, 1), *ranges)
