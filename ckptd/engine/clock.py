"""Times as records carry them: UTC, ISO 8601, milliseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from ckptd.errors import CorruptError

__all__ = ["seconds_of", "stamp"]


def stamp(seconds: float | None = None) -> str:
    """Return a time (seconds since 1970; default: now) as a record's ``created`` field."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: str, where: str) -> float:
    """Return a record's time in seconds since 1970; `CorruptError` when it is none.

    A time without a zone is UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise CorruptError(
            "not a time", kind="bad-record", where=where, wanted="ISO 8601", found=repr(text[:80])
        ) from None
