"""The user's metadata of a checkpoint: JSON values, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckptd.checkpoint.format.codec import MAX_DEPTH
from ckptd.checkpoint.format.strictjson import parse_json
from ckptd.errors import UsageError

__all__ = ["MAX_METADATA_BYTES", "checked_metadata"]

MAX_METADATA_BYTES = 1 << 18
"""Of its JSON. Listings read it with every commit record."""


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as a reader will get it: tuples are lists, numbers that are none are None.

    Raises
    ------
    UsageError
        kind ``bad-metadata``: names the key whose value is no JSON, or the largest when all of it
        is too large.
    """
    texts = {key: _encoded(key, value) for key, value in metadata.items()}
    total = sum(len(key.encode()) + len(text) + 4 for key, text in texts.items())
    if total > MAX_METADATA_BYTES:
        largest = max(texts, key=lambda key: len(texts[key]))
        raise _bad(
            "the metadata is too large",
            largest,
            f"at most {MAX_METADATA_BYTES} bytes of JSON in all",
            f"{total} bytes, of which {len(texts[largest])} are this key's",
            "what is large belongs into the state",
        )
    return {key: parse_json(text) for key, text in texts.items()}


def _encoded(key: object, value: object) -> bytes:
    wanted = f"JSON: numbers, text, lists, dicts with text as keys; at most {MAX_DEPTH} deep"
    hint = "a tensor's or an array's number is tensor.item()"
    if not isinstance(key, str):
        raise _bad("a key of the metadata is no text", key, "str", type(key).__name__, None)
    try:
        key.encode()
        _check(value, MAX_DEPTH)
        text = msgspec.json.encode(value)
        parse_json(text)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        found = f"{type(value).__name__}: {error}"[:200]
        raise _bad("a value of the metadata is no JSON", key, wanted, found, hint) from error
    return text


def _check(value: object, left: int) -> None:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("an integer of more than 64 bits")
    if not isinstance(value, Mapping | list | tuple):
        return
    if left == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep, or within itself")
    for inner in value.values() if isinstance(value, Mapping) else value:
        _check(inner, left - 1)


def _bad(what: str, key: object, wanted: str, found: str, hint: str | None) -> UsageError:
    where = f"metadata[{str(key)[:80]!r}]" if isinstance(key, str) else f"metadata[{key!r}]"[:100]
    return UsageError(what, kind="bad-metadata", where=where, wanted=wanted, found=found, hint=hint)
