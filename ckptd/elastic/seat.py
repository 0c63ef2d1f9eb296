"""Where the controller is: records beside the membership log, the newest of which counts.

The seat is for liveness alone: nodes find the controller by it, and when nobody answers there, some
of them start another one, of which one gets the seat. Safety is the membership log's: its records
are create-only, and who finds one taken decides nothing any more.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Annotated, Protocol

import msgspec

from ckptd.decoding import json_decoder
from ckptd.elastic.log import entry_key, entry_number
from ckptd.elastic.signs import Sign
from ckptd.errors import ConflictError, CorruptError, NotFoundError
from ckptd.store.base import Store

__all__ = [
    "FOLDER",
    "SIGNS",
    "SeatBook",
    "SeatRecord",
    "StoreSeat",
    "decode_seat",
    "decode_sign",
    "seat_taken",
    "stand_in_pause_s",
]

FOLDER = "controller/"
SIGNS = "signs/"
_sign_decoder = json_decoder(Sign)
_MOST_BYTES = 4096
_MOST_TRIED = 6
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class SeatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who took the seat.

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


_records = json_decoder(SeatRecord)


class SeatBook(Protocol):
    """All that ever took the seat of one job."""

    def newest(self) -> SeatRecord | None:
        """Return who took the seat last; None if nobody ever did.

        Raises
        ------
        CorruptError
            kind ``bad-seat``: the record is damaged.
        StoreError
            The place cannot be read.
        """
        ...

    def take(self, number: int, address: str, by: str) -> SeatRecord:
        """Take the seat after `number` others; durable on return.

        Raises
        ------
        ConflictError
            kind ``seat-taken``: somebody else did.
        StoreError
            The place cannot be written.
        """
        ...

    def still(self, by: str) -> bool:
        """Return whether this life of a controller is the one that took the seat last."""
        ...

    def sign(self, name: str, sign: Sign) -> None:
        """See `ckptd.elastic.signs.SignBook.sign`."""
        ...

    def signs(self) -> dict[str, Sign]:
        """See `ckptd.elastic.signs.SignBook.signs`."""
        ...


class StoreSeat:
    """The seat as objects of the store that has the membership log.

    Parameters
    ----------
    store
        Objects are made below `FOLDER`, with create-only puts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def newest(self) -> SeatRecord | None:
        """See `SeatBook.newest`."""
        numbers = [
            number
            for info in self._store.list(FOLDER)
            if (number := entry_number(info.key.removeprefix(FOLDER))) is not None
            and info.size <= _MOST_BYTES
        ]
        if not numbers:
            return None
        key = FOLDER + entry_key(max(numbers))
        try:
            raw = self._store.get(key)
        except NotFoundError:
            return None
        return decode_seat(raw, self._where(key))

    def take(self, number: int, address: str, by: str) -> SeatRecord:
        """See `SeatBook.take`."""
        record = SeatRecord(number=number, address=address, by=by, at=time.time())
        key = FOLDER + entry_key(number)
        try:
            self._store.put(key, msgspec.json.encode(record), create_only=True)
        except ConflictError as error:
            raise seat_taken(self._where(key)) from error
        return record

    def still(self, by: str) -> bool:
        """See `SeatBook.still`."""
        newest = self.newest()
        return newest is not None and newest.by == by

    def sign(self, name: str, sign: Sign) -> None:
        """See `ckptd.elastic.signs.SignBook.sign`."""
        self._store.put(SIGNS + name, msgspec.json.encode(sign))

    def signs(self) -> dict[str, Sign]:
        """See `ckptd.elastic.signs.SignBook.signs`."""
        found = {}
        for info in self._store.list(SIGNS):
            if info.size <= _MOST_BYTES:
                # One that is replaced just now, or is damaged, is no sign.
                with suppress(NotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
                    raw = self._store.get(info.key)
                    found[info.key.removeprefix(SIGNS)] = decode_sign(raw)
        return found

    def _where(self, key: str) -> str:
        return f"{self._store.url.rstrip('/')}/{key}"


def decode_seat(raw: bytes, where: str) -> SeatRecord:
    """Return the record that `raw` holds.

    Raises
    ------
    CorruptError
        kind ``bad-seat``: it is none.
    """
    try:
        return _records.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(
            "this does not say where a controller is",
            kind="bad-seat",
            where=where,
            found=str(error)[:200],
        ) from error


def decode_sign(raw: bytes) -> Sign:
    """Return the sign that `raw` holds.

    Raises
    ------
    msgspec.MsgspecError
        It is none.
    """
    return _sign_decoder.decode(raw)


def seat_taken(where: str) -> ConflictError:
    """Return the error of a controller that came second."""
    return ConflictError(
        "another controller was faster",
        kind="seat-taken",
        where=where,
        hint="this one ends; nodes find the other one by themselves",
    )


def stand_in_pause_s(order: int, stand_in_s: float = 1.0) -> float:
    """Return how long a node waits in silence before it starts a controller.

    Parameters
    ----------
    order
        Its rank among the nodes of the last generation; those without one count as the last.
    stand_in_s
        What the first one waits. The others wait longer, a few nodes at a time: of many
        controllers that are started at once, all but one end again.
    """
    return stand_in_s * (1 + min(order, _MOST_TRIED) / 2 + random.uniform(0, 0.2))
