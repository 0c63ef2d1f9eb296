"""Bounds of buckets against those of a layout."""

from __future__ import annotations

import re

import pytest

from ckptd.base.grids.grid import Axis, Grid
from ckptd.errors import CkptdError
from ckptd.lay.local import LocalPiece
from ckptd.reshard.buckets import Bucket, check_bounds, join_buckets, place_pieces


def buffer(*cuts: list[int], padded: int = 512) -> tuple[Bucket, ...]:
    """Return buckets whose parts have some sizes."""
    grids = {i: (10 + i, Grid((Axis.from_sizes(sizes),))) for i, sizes in enumerate(cuts)}
    return join_buckets(grids, [padded] * len(cuts), "gbuf")


def pieces(*ranges: tuple[int, int]) -> list[LocalPiece]:
    return [LocalPiece(i, (), 0, n, at) for i, (at, n) in enumerate(ranges)]


def check(buckets: tuple[Bucket, ...], *ranges: tuple[int, int]) -> None:
    found = pieces(*ranges)
    check_bounds(buckets, found, [f"tensor {p.rule}" for p in found], "gbuf")


def test_buckets_begin_at_multiples() -> None:
    first, second = buffer([100, 28, 40], [64, 200])
    assert (first.start, first.end, second.start, second.end) == (0, 168, 192, 456)
    assert second.bounds == (0, 64, 264)


@pytest.mark.parametrize(
    ("sizes", "ranges"),
    [
        ([100, 28, 40], [(0, 100), (128, 40)]),
        ([100, 28, 128, 44], [(0, 100), (128, 172)]),  # two shares of 256
        ([100, 28, 128, 128, 36], [(0, 100), (128, 292)]),  # four shares of 128, one on a bound
    ],
)
def test_bounds_that_agree(sizes: list[int], ranges: list[tuple[int, int]]) -> None:
    check(buffer(sizes), *ranges)


@pytest.mark.parametrize(
    ("sizes", "ranges", "message"),
    [
        ([100, 28, 40], [(0, 40), (64, 104)], r"is not cut where .* tensor 0 in elements 0 to 40"),
        ([96, 32, 192], [(0, 320)], "has parts that the layout lacks"),
        ([128, 192], [(0, 320)], "has parts that the layout lacks"),
        ([100, 92], [(0, 192)], "has parts that the layout lacks"),
        ([128, 64], [(0, 128)], "has parts that the layout lacks"),  # the rest is nobody's
    ],
)
def test_bounds_that_do_not_agree(
    sizes: list[int], ranges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(CkptdError) as caught:
        check(buffer(sizes), *ranges)
    assert caught.value.kind == "lay-fit"
    assert re.search(message, f"{caught.value.message} {caught.value.wanted}")


def test_a_tensor_over_two_buckets() -> None:
    with pytest.raises(CkptdError, match="is not cut where"):
        check(buffer([128], [128]), (0, 256))


def test_a_tensor_lies_in_the_parts_of_several_ranks() -> None:
    _, second = buckets = buffer([128], [100, 28, 128, 44])
    [piece] = pieces((256, 172))
    assert second.start == 128
    assert place_pieces(buckets, [piece]) == (
        (11, 2, (LocalPiece(0, (), 0, 128, 0),)),
        (11, 3, (LocalPiece(0, (), 128, 172, 0),)),
    )


def test_tables_of_buckets_that_lie() -> None:
    grid = Grid((Axis.from_sizes([128]),))
    for found, lengths, words in [
        ({0: (1, grid), 2: (2, grid)}, [128, 128], "are missing, or are too many"),
        ({0: (1, grid)}, [128, 128], "are missing, or are too many"),
        ({0: (1, grid)}, [64], "longer than the optimizer says"),
    ]:
        with pytest.raises(CkptdError) as caught:
            join_buckets(found, lengths, "gbuf")
        assert words in caught.value.message
