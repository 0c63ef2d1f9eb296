"""What came of one seed; nothing else is imported with it."""

from __future__ import annotations

import msgspec

__all__ = ["Outcome"]


class Outcome(msgspec.Struct, frozen=True):
    """A line of JSON.

    Attributes
    ----------
    faults
        What must not be; empty when all is well.
    kills
        Victims and moment of each.
    restored
        Lives, by what they began from: a commit, a snapshot, nothing.
    promises, refused, raised
        What handles and calls said.
    folder
        What is left to look at when something is wrong.
    """

    seed: int
    faults: list[str]
    kills: list[tuple[str, str]]
    tiers: list[str]
    lives: int
    restored: dict[str, int]
    promises: dict[str, int]
    refused: dict[str, int]
    raised: dict[str, int]
    seconds: float
    folder: str = ""
