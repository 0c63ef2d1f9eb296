"""Signs of life beside the seat: who hears whom, seen by all that reach the job's log.

A launcher that hears no controller cannot know whether that one is gone or itself is cut off. So
the controller leaves a sign twice a second, with how many nodes it hears, and launchers that hear
none leave theirs. Whether a sign is fresh is seen by its changing, with the reader's own clock.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

__all__ = ["LOOK_S", "PULSE", "Outlook", "Sign", "SignBook", "may_stand_in"]

PULSE = "pulse"
"""Name of the controller's sign."""
LOOK_S = 0.5
"""Between two signs of one process, and between two looks."""
_FRESH_S = 2.0
_OLD_S = 1.5
_DEAD_S = 6.0

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """One sign of life.

    Attributes
    ----------
    by
        Which process left it.
    beat
        Rises.
    hears, knows
        Of a controller: how many nodes it has heard of in the last moments, and how many there
        should be.
    """

    by: Annotated[str, msgspec.Meta(max_length=256)]
    beat: _Count
    hears: _Count = 0
    knows: _Count = 0


class SignBook(Protocol):
    """Where signs are left: the place of the seat."""

    def sign(self, name: str, sign: Sign) -> None:
        """Leave a sign in place of the last one of that name.

        Raises
        ------
        StoreError
            The place cannot be written.
        """
        ...

    def signs(self) -> dict[str, Sign]:
        """Return all signs by name; one that cannot be read is left out.

        Raises
        ------
        StoreError
            The place cannot be read.
        """
        ...


def may_stand_in(pulse_old_s: float, hears: int, knows: int, silent: int, *, met: bool) -> bool:
    """Return whether a launcher that hears no controller may start the next one.

    Parameters
    ----------
    pulse_old_s
        For how long the controller's sign has not changed; infinite if there is none.
    hears, knows
        As that sign says.
    silent
        Launchers, this one among them, that say that they hear no controller.
    met
        Whether this launcher ever heard one.
    """
    if pulse_old_s < _OLD_S:
        # It lives, and reaches the log: it is cut off itself if it is the smaller part.
        return silent > hears
    # Those that still hear it would be torn from it; after longer it decides nothing any more.
    return not met or 2 * silent >= knows or pulse_old_s >= _DEAD_S


class Outlook:
    """What one process leaves and sees.

    Parameters
    ----------
    book
        See `SignBook`.
    name
        Of the node; empty for the controller.
    clock
        Seconds that never go back.
    """

    def __init__(
        self, book: SignBook, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._book, self._clock = book, clock
        self._name = _name_of(name) if name else PULSE
        self._by, self._beat = secrets.token_hex(8), 0
        self._seen: dict[str, tuple[Sign, float, bool]] = {}
        """Each sign, when it was first seen so, and whether it was ever seen to change."""
        self._looked = -LOOK_S

    def leave(self, hears: int = 0, knows: int = 0) -> None:
        """Leave a sign: of a launcher, that it hears no controller; see `SignBook.sign`."""
        self._beat += 1
        self._book.sign(self._name, Sign(by=self._by, beat=self._beat, hears=hears, knows=knows))

    def look(self) -> None:
        """See what has changed; see `SignBook.signs`."""
        now = self._clock()
        for name, sign in self._book.signs().items():
            before = self._seen.get(name)
            if before is None or before[0] != sign:
                self._seen[name] = (sign, now, before is not None)

    def say_silent(self) -> None:
        """Leave a launcher's sign and look, twice a second however often this is called."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        if now - self._looked > _DEAD_S:
            self._seen.clear()  # what was fresh the last time is none of this time
        self._looked = now
        self.leave()
        self.look()

    @property
    def looked(self) -> bool:
        """Whether enough was seen to tell a fresh sign from an old one."""
        return self._beat > 1 and self._clock() - self._looked < _FRESH_S

    def silent(self) -> int:
        """Return how many launchers say that they hear no controller."""
        now = self._clock()
        return sum(
            name == self._name or (changed and now - at < _FRESH_S)
            for name, (_, at, changed) in self._seen.items()
            if name != PULSE
        )

    def may_stand_in(self, *, met: bool) -> bool:
        """See `may_stand_in`."""
        pulse = self._seen.get(PULSE)
        if pulse is None:
            return True
        sign, at, _ = pulse
        silent = self.silent()
        return may_stand_in(self._clock() - at, sign.hears, sign.knows, silent, met=met)


def _name_of(node: str) -> str:
    return f"silent-{hashlib.sha256(node.encode()).hexdigest()[:20]}"
