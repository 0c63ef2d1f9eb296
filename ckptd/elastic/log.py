"""`MembershipLog`: create-only records in a store; their names, folder and largest size.

In it: the error where another controller wrote a record first.
"""

from __future__ import annotations

from ckptd.elastic.membership import Record, check_log, decode_record, encode_record
from ckptd.errors import ConflictError, CorruptError
from ckptd.store.base import Store

FOLDER = "membership/"
_MOST_ENTRY_BYTES = 16 << 20
_DIGITS = 12


def entry_key(number: int) -> str:
    """Return the name of record `number`; names sort as numbers do."""
    return f"{number:0{_DIGITS}}.json"


def entry_number(name: str) -> int | None:
    """Return which record has this name; None if it is none's."""
    digits = name.removesuffix(".json")
    number = int(digits) if digits.isdecimal() and digits.isascii() else -1
    return number if number >= 0 and entry_key(number) == name else None


class MembershipLog:
    """Records that several may try to append, of which one wins: objects of a store.

    Parameters
    ----------
    store
        Objects are made below `FOLDER`, with create-only puts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> list[Record]:
        """Return all records, the oldest first.

        Raises
        ------
        CorruptError
            A record is damaged, missing between others, or goes backwards.
        StoreError
            The store cannot be read.
        """
        where = f"{self._store.url.rstrip('/')}/{FOLDER}"
        found = {}
        for info, raw in self._store.read_all(FOLDER, most_bytes=_MOST_ENTRY_BYTES):
            name = info.key.removeprefix(FOLDER)
            number = entry_number(name)
            if number is None:
                continue
            if raw is None:
                # The log is never cut: without its newest record a generation would be begun twice.
                raise CorruptError(
                    "a record of the membership log cannot be read",
                    where=where + name,
                    wanted=f"at most {_MOST_ENTRY_BYTES} bytes, and never deleted",
                    found=f"{info.size} bytes when it was listed",
                )
            found[number] = raw
        if sorted(found) != list(range(len(found))):
            missing = next(n for n in range(len(found)) if n not in found)
            raise CorruptError(
                "a record of the membership log is missing",
                where=where,
                wanted=entry_key(missing),
                found=f"{len(found)} records",
            )
        records = [decode_record(found[n], f"{where}{entry_key(n)}") for n in sorted(found)]
        check_log(records, where)
        return records

    def append(self, record: Record, number: int) -> None:
        """Write the record that `number` others come before; durable on return.

        Raises
        ------
        ConflictError
            Another controller has written that record; this one decides nothing any more.
        StoreError
            The store cannot be written; the record may be there or not, and the same call may be
            made again.
        """
        key = FOLDER + entry_key(number)
        try:
            self._store.put(key, encode_record(record), create_only=True)
        except ConflictError as error:
            raise ConflictError(
                "another controller wrote to the log first",
                where=f"{self._store.url.rstrip('/')}/{key}",
                hint="this controller ends; the other one goes on",
            ) from error
