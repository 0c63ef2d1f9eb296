"""Where two encoded objects differ: pure functions on their JSON (spec section 7)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from ckptd.engine.inspect import value_text
from ckptd.engine.values import PerRankValues

__all__ = ["Change", "changes"]

_MOST_DEPTH = 32


class Change(msgspec.Struct, frozen=True):
    """One place where two values differ.

    Attributes
    ----------
    path
        From the object down: ``.last_epoch``, ``[0].lr``, ``rank 2.seed``; empty for the whole.
    left, right
        Both sides in words; None where there is none.
    """

    path: str
    left: str | None
    right: str | None


def changes(a: Any, b: Any, most: int) -> tuple[Change, ...]:
    """Return the first `most` places where two values differ."""
    return tuple(islice(_walk(a, b, "", 0), most))


def _walk(a: Any, b: Any, path: str, depth: int) -> Iterator[Change]:
    if _same(a, b):
        return
    if depth < _MOST_DEPTH and isinstance(a, dict) and isinstance(b, dict):
        if _is_nest(a) and _is_nest(b) and a["$"] == b["$"]:
            yield from _walk(a["v"], b["v"], path, depth + 1)
            return
        if "$" not in a and "$" not in b:
            yield from _walk_dicts(a, b, path, depth)
            return
    if depth < _MOST_DEPTH and isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _walk(x, y, f"{path}[{i}]", depth + 1)
        return
    yield Change(path, _words(a), _words(b))


def _is_nest(raw: dict[Any, Any]) -> bool:
    return raw.keys() == {"$", "v"} and raw["$"] in ("tuple", "set", "frozenset", "dict")


def _walk_dicts(a: dict[Any, Any], b: dict[Any, Any], path: str, depth: int) -> Iterator[Change]:
    ranked = isinstance(a, PerRankValues)
    for key in [*a, *(k for k in b if k not in a)]:
        below = f"rank {key}" if ranked else f"{path}.{key}"
        if key not in a:
            yield Change(below, None, _words(b[key]))
        elif key not in b:
            yield Change(below, _words(a[key]), None)
        else:
            yield from _walk(a[key], b[key], below, depth + 1)


def _same(a: Any, b: Any) -> bool:
    """Compare as text: 1, 1.0 and true are equal in Python and not here."""
    return _canonical(a) == _canonical(b)


def _canonical(raw: Any) -> bytes:
    if isinstance(raw, PerRankValues):
        raw = {str(rank): value for rank, value in raw.items()}
    return msgspec.json.encode(raw, order="deterministic")


def _words(value: Any) -> str:
    return f"{len(value)} ranks" if isinstance(value, PerRankValues) else value_text(value)
