"""Checks on buffers and ranges that every store makes alike."""

from __future__ import annotations

from ckptd.errors import CorruptError, UsageError

__all__ = ["as_bytes_view", "check_end"]


def as_bytes_view(data: memoryview) -> memoryview:
    """Return `data` as flat bytes without a copy; `UsageError` when it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise UsageError("a buffer must be C-contiguous", kind="buffer")
    return view.cast("B") if view.ndim != 1 or view.format != "B" else view


def check_end(where: str, end: int, size: int) -> None:
    """Raise `CorruptError` when an object of `size` bytes has no byte `end` - 1."""
    if end > size:
        raise CorruptError(
            "the object is shorter than the range asked for",
            kind="truncated",
            where=where,
            wanted=f"{end} bytes",
            found=f"{size} bytes",
        )
