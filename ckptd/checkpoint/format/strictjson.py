"""JSON as the format allows it: one meaning for every reader (spec section 1.3)."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

__all__ = ["parse_json", "unique_keys"]

K = TypeVar("K")
V = TypeVar("V")

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON.

    Raises
    ------
    ValueError
        Not JSON, a repeated key, NaN, infinity, a lone surrogate.
    RecursionError
        Nesting without end.
    """
    document = json.loads(
        str(raw, "utf-8"),
        object_pairs_hook=unique_keys,
        parse_constant=_no_constant,
        parse_float=_finite,
    )
    if _ESCAPED_SURROGATE.search(raw):  # alone it is no character, and it cannot be encoded
        json.dumps(document, ensure_ascii=False).encode()
    return document


def unique_keys(pairs: list[tuple[K, V]]) -> dict[K, V]:
    """Refuse duplicate keys, which readers of one file could otherwise resolve differently."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate key")
    return table


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is no number")
    return value
