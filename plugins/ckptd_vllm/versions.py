"""A worker waits for the version that its trainer names."""

from __future__ import annotations

import math

import ckptd
from ckptd.errors import DeadlineError

__all__ = ["have"]

_LOOK_S = 5.0


def have(subscriber: ckptd.Subscriber, number: int, epoch: str, wait_s: float) -> None:
    """Have the version that is named, or a newer one of the same trainer; each rank calls it.

    Raises
    ------
    DeadlineError
        It is not there in time, on any rank.
    """
    # Ranks give up after as many looks, which have the same result on all of them: by its own
    # clock one of them would, while others go on.
    looks = left = max(1, math.ceil(wait_s / _LOOK_S))
    while not _has(subscriber, number, epoch):
        if not left:
            raise DeadlineError(
                "the version did not arrive",
                kind="no-version",
                wanted=f"version {number} within {wait_s:.0f} s",
                found=str(subscriber.last_error or subscriber.version),
            )
        if subscriber.update(wait_s / looks) is None:
            left -= 1


def _has(subscriber: ckptd.Subscriber, number: int, epoch: str) -> bool:
    held = subscriber.version
    return held is not None and held.epoch == epoch and held.number >= number
