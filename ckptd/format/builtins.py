"""Values of the standard library that training states hold: dates, paths, exact numbers, ranges."""

from __future__ import annotations

import datetime as dt
import fractions
import pathlib
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any

from ckptd.errors import UsageError
from ckptd.format.codec import register

__all__: list[str] = []


def _delta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _made_delta(raw: list[int]) -> dt.timedelta:
    return dt.timedelta(*raw)


def _zone(value: dt.timezone) -> list[Any]:
    offset = _delta(value.utcoffset(None))
    # A name that was given is part of the value; the one that follows from the offset is not.
    named = value.tzname(None) != dt.timezone(value.utcoffset(None)).tzname(None)
    return [offset, value.tzname(None) if named else None]


def _made_zone(raw: list[Any]) -> dt.timezone:
    offset = dt.timedelta(*raw[0])
    return dt.timezone(offset) if raw[1] is None else dt.timezone(offset, raw[1])


def _key(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise UsageError(
            "a time zone without a name cannot be saved",
            kind="unsavable",
            hint="ZoneInfo(key), or the time in UTC",
        )
    return value.key


def _moment(value: dt.datetime | dt.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _made_datetime(raw: list[Any]) -> dt.datetime:
    return dt.datetime.fromisoformat(raw[0]).replace(tzinfo=_tz(raw[1]), fold=int(raw[2]))


def _made_time(raw: list[Any]) -> dt.time:
    return dt.time.fromisoformat(raw[0]).replace(tzinfo=_tz(raw[1]), fold=int(raw[2]))


def _tz(value: Any) -> dt.tzinfo | None:
    if value is not None and not isinstance(value, dt.tzinfo):
        raise TypeError("not a time zone")
    return value


def _bounds(value: range | slice) -> list[Any]:
    return [value.start, value.stop, value.step]


def _made_range(raw: list[int]) -> range:
    return range(*raw)


def _made_slice(raw: list[Any]) -> slice:
    return slice(*raw)


def _register() -> None:
    register(dt.datetime, name="datetime.datetime", encode=_moment, decode=_made_datetime)
    register(dt.date, name="datetime.date", encode=dt.date.isoformat, decode=dt.date.fromisoformat)
    register(dt.time, name="datetime.time", encode=_moment, decode=_made_time)
    register(dt.timedelta, name="datetime.timedelta", encode=_delta, decode=_made_delta)
    register(dt.timezone, name="datetime.timezone", encode=_zone, decode=_made_zone)
    register(zoneinfo.ZoneInfo, name="zoneinfo.ZoneInfo", encode=_key, decode=zoneinfo.ZoneInfo)
    # A path of this system is one of the system that loads it.
    register(type(pathlib.Path()), name="pathlib.Path", encode=str, decode=pathlib.Path)
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
        register(kind, name=f"pathlib.{kind.__name__}", encode=str, decode=kind)
    register(uuid.UUID, name="uuid.UUID", encode=str, decode=uuid.UUID)
    register(Decimal, name="decimal.Decimal", encode=str, decode=Decimal)
    register(
        fractions.Fraction,
        name="fractions.Fraction",
        encode=lambda f: [f.numerator, f.denominator],
        decode=lambda raw: fractions.Fraction(*raw),
    )
    register(range, name="range", encode=_bounds, decode=_made_range)
    register(slice, name="slice", encode=_bounds, decode=_made_slice)


_register()
