"""Names of a checkpoint that the live state has no place for, on any rank of the job.

Stages of a pipeline have names that others lack, so that no rank can judge alone. Each rank marks
what it has no place for in a bitmap of the checkpoint's names, which is packed, and ranks join
theirs in a tree: what is left marked has no place anywhere. Most ranks of most jobs have nothing to
mark, and post nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.torch.state.restore import SavedState

_UNKNOWN = b"?"
"""Of a rank that failed before it knew; its error is raised on all ranks."""


def without_place(
    agreement: Agreement, saved: SavedState | None, unexpected: Sequence[str]
) -> list[str]:
    """Return the names that no rank has a place for, the same on every rank.

    Parameters
    ----------
    saved
        The checkpoint; None where this rank failed, and does not know what it has a place for.
    unexpected
        Names of the checkpoint that this rank has no place for.
    """
    if agreement.board.world == 1:
        return list(unexpected)
    names: dict[str, int] = {}
    own = b"" if saved else _UNKNOWN
    if saved and unexpected:
        every = (*saved.tensors, *saved.objects, *saved.per_rank, *saved.aliases)
        names = {name: at for at, name in enumerate(dict.fromkeys(every))}
        marks = np.zeros(len(names), dtype=np.bool_)
        marks[[names[name] for name in unexpected]] = True
        own = zlib.compress(np.packbits(marks).tobytes())
    found = agreement.in_tree("unexpected", own, _joined)
    if not names or found in (b"", _UNKNOWN):
        return []
    left = np.unpackbits(_bits(found), count=len(names))
    return [name for name in dict.fromkeys(unexpected) if left[names[name]]]


def _joined(marks: list[bytes]) -> bytes:
    """Return the bitmap of what is marked in all."""
    known = {m for m in marks if m != _UNKNOWN}
    if not known or b"" in known:
        return b"" if known else _UNKNOWN
    if len(known) == 1:
        return known.pop()
    left = np.bitwise_and.reduce([_bits(m) for m in known])
    return zlib.compress(left.tobytes()) if left.any() else b""


def _bits(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
