"""Buckets of Megatron's distributed optimizer, seen as one buffer of a rank.

In it: alignment and padding; errors where saved parts do not end where the layout's tensors do.

A buffer is cut into buckets where the job says, on the first pipeline stage only: so a layout packs
all of a rank's tensors into one buffer, and a bucket is a part of it that begins where a tensor
does. The parts that were saved of a bucket end where tensors, what is left out between them, and
shares of data-parallel ranks end. They say which lengths follow each other, and so does the layout:
both must be the same.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptd.base.grids.grid import Grid
from ckptd.errors import CorruptError, MismatchError
from ckptd.lay.local import LocalPiece

_ALIGNMENT = 64
"""Each tensor starts at a multiple of so many elements of its bucket."""
_HINT = "put the rules in the order of named_parameters(), and check that the mesh is the job's"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket.

    Attributes
    ----------
    number
        Of the tensor of the manifest that it is.
    start
        Its first element in the buffer.
    bounds
        Where the parts that were saved begin, in elements of the bucket, and the end of the last.
    padded
        Its length with what fills it up, which is not saved.
    """

    number: int
    start: int
    bounds: tuple[int, ...]
    padded: int

    @property
    def end(self) -> int:
        """The end of its last tensor in the buffer."""
        return self.start + self.bounds[-1]


def join_buckets(
    found: Mapping[int, tuple[int, Grid]], padded: Sequence[int], where: str
) -> tuple[Bucket, ...]:
    """Return the buckets of a buffer in their order.

    Parameters
    ----------
    found
        By the number of the bucket: number of its tensor, and how this is cut.
    padded
        Lengths of all buckets with what fills them up.
    where
        The buffer, for errors.

    Raises
    ------
    CorruptError
        There is none of a number;: one is longer than with what fills it up.
    """
    if sorted(found) != list(range(len(padded))):
        raise CorruptError(
            "buckets of an optimizer are missing, or are too many",
            where=where,
            wanted=f"{len(padded)} buckets, numbered from 0",
            found=", ".join(map(str, sorted(found)[:8])),
        )
    out: list[Bucket] = []
    for index, whole in enumerate(padded):
        number, grid = found[index]
        (axis,) = grid.axes
        sizes = (size for size, count in axis.runs for _ in range(count))
        bounds = tuple(accumulate(sizes, initial=0))
        if bounds[-1] > whole:
            raise CorruptError(
                "a bucket is longer than the optimizer says",
                where=f"{where}, bucket {index}",
                wanted=f"at most {whole} elements",
                found=f"{bounds[-1]} elements",
            )
        start = -(-out[-1].end // _ALIGNMENT) * _ALIGNMENT if out else 0
        out.append(Bucket(number, start, bounds, whole))
    return tuple(out)


def place_pieces(
    buckets: Sequence[Bucket], pieces: Sequence[LocalPiece]
) -> tuple[tuple[int, int, tuple[LocalPiece, ...]], ...]:
    """Return where a tensor of the buffer lies.

    Returns
    -------
    tuple
        Of each part that was saved: the number of the bucket's tensor, that of the part in it, and
        what the part holds; `at` is a position in the part.
    """
    out = []
    for piece in pieces:
        bucket = _bucket_at(buckets, piece.at)
        shift = piece.lo - (piece.at - bucket.start)
        first = bisect.bisect_right(bucket.bounds, piece.at - bucket.start) - 1
        for part in range(first, len(bucket.bounds) - 1):
            begin, end = bucket.bounds[part : part + 2]
            lo, hi = max(piece.lo, begin + shift), min(piece.hi, end + shift)
            if lo >= hi:
                break
            held = LocalPiece(piece.rule, piece.indexes, lo, hi, lo - shift - begin)
            out.append((bucket.number, part, (held,)))
    return tuple(out)


def _bucket_at(buckets: Sequence[Bucket], at: int) -> Bucket:
    return buckets[bisect.bisect_right(buckets, at, key=lambda b: b.start) - 1]


def check_bounds(
    buckets: Sequence[Bucket], pieces: Sequence[LocalPiece], names: Sequence[str], where: str
) -> None:
    """Check that the parts that were saved end where the layout's tensors do, and nowhere else.

    Parameters
    ----------
    buckets
        Those of a buffer.
    pieces
        What the layout has in it; each is a whole tensor of the rank.
    names
        What each of them is, for errors.
    where
        The buffer, for errors.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: a tensor of the layout begins or ends inside a part, or parts end where
        neither a tensor does nor a data-parallel rank's share.
    """
    ends: dict[int, set[int]] = {bucket.number: {0} for bucket in buckets}
    for piece, name in zip(pieces, names, strict=True):
        bucket = _bucket_at(buckets, piece.at)
        lo = piece.at - bucket.start
        hi = lo + piece.hi - piece.lo
        for bound in (lo, hi):
            near = bisect.bisect_left(bucket.bounds, bound)
            if bucket.bounds[near : near + 1] != (bound,):
                raise MismatchError(
                    "a bucket of the optimizer is not cut where the layout says",
                    kind="lay-fit",
                    where=where,
                    wanted=f"{name} in elements {lo} to {hi} of bucket {buckets.index(bucket)}",
                    found=f"parts that end at {_near(bucket.bounds, near)}",
                    hint=_HINT,
                )
        ends[bucket.number] |= {lo, hi}
    for index, bucket in enumerate(buckets):
        _check_shares(bucket, ends[bucket.number], f"{where}, bucket {index}")


def _near(bounds: Sequence[int], at: int) -> str:
    return ", ".join(map(str, bounds[max(0, at - 2) : at + 2]))


def _check_shares(bucket: Bucket, ends: set[int], where: str) -> None:
    """Check the ends of parts where no tensor ends: shares are equal parts of what is padded."""
    others = [bound for bound in bucket.bounds if bound not in ends]
    share = math.gcd(bucket.padded, *others)
    shares = range(share, bucket.bounds[-1], share) if others else ()
    count = len(bucket.bounds)
    good = len(shares) < count and set(shares) <= set(bucket.bounds)
    if not good or bucket.bounds[-1] not in ends:
        raise MismatchError(
            "a bucket of the optimizer has parts that the layout lacks",
            kind="lay-fit",
            where=where,
            wanted="ends where a tensor ends, or an equal share of "
            f"{bucket.padded} elements for each data-parallel rank",
            found=f"parts that end at {', '.join(map(str, others[:6])) or bucket.bounds[-1]}",
            hint=_HINT,
        )
