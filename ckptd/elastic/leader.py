"""Which controller leads: its record, signs of life, when another may be started (stand-in).

In it: how old a sign may be; seconds after which a silent controller counts as dead, by how many
nodes hear it; how often records are read.

The record is for liveness alone: nodes find the controller by it, and when that one does not
answer, some of them start another one, of which one becomes the leader. Safety is the membership
log's: its records are create-only, and a controller that finds one taken decides nothing any more.

A launcher that hears no controller cannot know whether that one is gone or itself is cut off. So
the controller leaves a sign twice a second, with how many nodes it hears, and launchers that hear
none leave theirs. Whether a sign is fresh is seen by its changing, with the reader's own clock.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import msgspec

from ckptd.decoding import json_decoder
from ckptd.elastic.log import entry_key, entry_number
from ckptd.errors import ConflictError, CorruptError, NotFoundError
from ckptd.store.base import ObjectInfo, Store

FOLDER = "controller/"
SIGNS = "signs/"
PULSE = "pulse"
"""Name of the controller's sign."""
LOOK_S = 0.5
"""Between two signs of one process, and between two looks."""
_FRESH_S = 2.0
_OLD_S = 1.5
_DEAD_S = 6.0
_MOST_BYTES = 4096
_MOST_TRIED = 6

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """A controller that took the lead.

    Attributes
    ----------
    number
        How many took it before.
    address
        ``HOST:PORT``.
    by
        Which life of which controller.
    at
        Seconds since 1970, for people.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    address: _Word
    by: _Word
    at: float


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One sign of life.

    Attributes
    ----------
    by
        Which process left it.
    beat
        Rises.
    hears, knows
        Of a controller: how many nodes reported in the last moments, and how many should.
    """

    by: Annotated[str, msgspec.Meta(max_length=256)]
    beat: _Count
    hears: _Count = 0
    knows: _Count = 0


_leaders = json_decoder(Leader)
_signs = json_decoder(Heartbeat)


class LeaderRecord:
    """All that ever were the controller of one job, and signs of life beside them.

    Objects of the store that has the membership log.

    Parameters
    ----------
    store
        Objects are made below `FOLDER`, with create-only puts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def newest(self) -> Leader | None:
        """Return the controller that came last; None if there never was one.

        Raises
        ------
        CorruptError
            The record is damaged.
        StoreError
            The store cannot be read.
        """
        last = self._store.last(FOLDER)
        if last is None:
            return None
        number = _number(last)
        if number is None:  # other objects are there
            numbers = [n for info in self._store.list(FOLDER) if (n := _number(info)) is not None]
            if not numbers:
                return None
            number = max(numbers)
        key = FOLDER + entry_key(number)
        try:
            raw = self._store.get(key)
        except NotFoundError:
            return None
        try:
            return _leaders.decode(raw)
        except msgspec.MsgspecError as error:
            raise CorruptError(
                "not a valid address record of a controller",
                where=self._where(key),
                found=str(error)[:200],
            ) from error

    def take(self, number: int, address: str, by: str) -> Leader:
        """Become the controller after `number` others; durable on return.

        Raises
        ------
        ConflictError
            Another one was faster.
        StoreError
            The store cannot be written.
        """
        record = Leader(number=number, address=address, by=by, at=time.time())
        key = FOLDER + entry_key(number)
        try:
            self._store.put(key, msgspec.json.encode(record), create_only=True)
        except ConflictError as error:
            raise seat_taken(self._where(key)) from error
        return record

    def still(self, by: str) -> bool:
        """Return whether this life of a controller is the one that came last."""
        newest = self.newest()
        return newest is not None and newest.by == by

    def sign(self, name: str, sign: Heartbeat) -> None:
        """Leave a sign in place of the last one of that name.

        Raises
        ------
        StoreError
            The store cannot be written.
        """
        self._store.put(SIGNS + name, msgspec.json.encode(sign))

    def signs(self) -> dict[str, Heartbeat]:
        """Return all signs by name, without those that cannot be read.

        Raises
        ------
        StoreError
            The store cannot be read.
        """
        found = {}
        for info, raw in self._store.read_all(SIGNS, most_bytes=_MOST_BYTES):
            if raw is not None:
                # One that is damaged is no sign.
                with suppress(msgspec.MsgspecError):
                    found[info.key.removeprefix(SIGNS)] = _signs.decode(raw)
        return found

    def _where(self, key: str) -> str:
        return f"{self._store.url.rstrip('/')}/{key}"


def _number(info: ObjectInfo) -> int | None:
    """Return which record an object is; None if it is none."""
    return entry_number(info.key.removeprefix(FOLDER)) if info.size <= _MOST_BYTES else None


def seat_taken(where: str) -> ConflictError:
    """Return the error of a controller that came second."""
    return ConflictError(
        "another controller registered first",
        where=where,
        hint="this one ends; nodes find the other one by themselves",
    )


def stand_in_pause_s(order: int) -> float:
    """Return how long a node waits in silence before it starts a controller.

    The first one waits a second. The others wait longer, a few nodes at a time: of many
    controllers that are started at once, all but one end again.

    Parameters
    ----------
    order
        Its rank among the nodes of the last generation; those without one count as the last.
    """
    return 1 + min(order, _MOST_TRIED) / 2 + random.uniform(0, 0.2)


def may_stand_in(pulse_old_s: float, hears: int, knows: int, silent: int, *, known: bool) -> bool:
    """Return whether a launcher that hears no controller may start the next one.

    Parameters
    ----------
    pulse_old_s
        For how long the controller's sign has not changed; infinite if there is none.
    hears, knows
        As that sign says.
    silent
        Launchers, this one among them, that say that they hear no controller.
    known
        Whether this launcher ever heard one.
    """
    if pulse_old_s < _OLD_S:
        # It lives, and reaches the log: it is cut off itself if it is the smaller part.
        return silent > hears
    # Those that still hear it would be torn from it; after longer it decides nothing any more.
    return not known or 2 * silent >= knows or pulse_old_s >= _DEAD_S


class LeaderView:
    """One process's signs of life, and its view of those of others.

    Parameters
    ----------
    book
        See `LeaderRecord.sign`.
    name
        Of the node; empty for the controller.
    clock
        Seconds that never go back.
    """

    def __init__(
        self, book: LeaderRecord, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._book, self._clock = book, clock
        self._name = _name_of(name) if name else PULSE
        self._by, self._beat = secrets.token_hex(8), 0
        self._seen: dict[str, tuple[Heartbeat, float, bool]] = {}
        """Each sign, when it was first seen so, and whether it was ever seen to change."""
        self._looked = -LOOK_S

    def leave(self, hears: int = 0, knows: int = 0) -> None:
        """Leave a sign: of a launcher, that it hears no controller; see `LeaderRecord.sign`."""
        self._beat += 1
        self._book.sign(
            self._name, Heartbeat(by=self._by, beat=self._beat, hears=hears, knows=knows)
        )

    def look(self) -> None:
        """See what has changed; see `LeaderRecord.signs`."""
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

    def may_stand_in(self, *, known: bool) -> bool:
        """See `may_stand_in`."""
        pulse = self._seen.get(PULSE)
        if pulse is None:
            return True
        sign, at, _ = pulse
        silent = self.silent()
        return may_stand_in(self._clock() - at, sign.hears, sign.knows, silent, known=known)


def _name_of(node: str) -> str:
    return f"silent-{hashlib.sha256(node.encode()).hexdigest()[:20]}"
