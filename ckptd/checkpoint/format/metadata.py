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


def checked_metadata(metadata: Mapping[str, Any], *, numbers: bool = True) -> dict[str, Any]:
    """Return metadata as a reader will get it: tuples are lists, numbers that are none are None.

    Tensors, arrays and scalars of one number are that number.

    Parameters
    ----------
    numbers
        False: they are not asked for it, for which a device would have to end what it does.

    Raises
    ------
    UsageError
        kind ``bad-metadata``: names the key whose value is no JSON, or the largest when all of it
        is too large.
    """
    if not isinstance(metadata, Mapping):
        raise UsageError(
            "the metadata is no dict",
            kind="bad-metadata",
            where="metadata",
            wanted="a dict with text as keys",
            found=type(metadata).__name__,
        )
    texts = {key: _encoded(key, value, numbers) for key, value in metadata.items()}
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


def _encoded(key: object, value: object, numbers: bool) -> bytes:
    wanted = f"JSON: numbers, text, lists, dicts with text as keys; at most {MAX_DEPTH} deep"
    hint = "a tensor or an array has one number here; what has more belongs into the state"
    if not isinstance(key, str):
        raise _bad("a key of the metadata is no text", key, "str", type(key).__name__, None)
    try:
        key.encode()
        text = msgspec.json.encode(_plain(value, MAX_DEPTH, numbers))
        parse_json(text)
    except (TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError) as error:
        found = f"{type(value).__name__}: {error}"[:200]
        raise _bad("a value of the metadata is no JSON", key, wanted, found, hint) from error
    return text


def _plain(value: object, left: int, numbers: bool) -> object:
    """Return a value without tensors, arrays and scalars; raises where it is none that JSON has."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("an integer of more than 64 bits")
    if isinstance(value, Mapping | list | tuple):
        if left == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep, or within itself")
        if isinstance(value, Mapping):
            return {key: _plain(inner, left - 1, numbers) for key, inner in value.items()}
        return [_plain(inner, left - 1, numbers) for inner in value]
    if not callable(getattr(value, "item", None)):
        return value
    return _number(value, numbers)


def _number(value: Any, numbers: bool) -> object:
    """Return the number of a tensor, an array or a scalar."""
    if hasattr(value, "full_tensor"):
        # It may be in parts, and one rank alone would wait for the others for ever.
        raise TypeError("a DTensor: value.full_tensor().item() on every rank is its number")
    count = (
        value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", None)
    )
    if count != 1:
        raise TypeError(f"it has {count} numbers")
    if not numbers and getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        if value.device.type == "meta" or value.is_complex():
            raise TypeError(f"no number: {value.dtype} on {value.device}")
        return 0
    return _plain(value.item(), 0, numbers)


def _bad(what: str, key: object, wanted: str, found: str, hint: str | None) -> UsageError:
    where = f"metadata[{str(key)[:80]!r}]" if isinstance(key, str) else f"metadata[{key!r}]"[:100]
    return UsageError(what, kind="bad-metadata", where=where, wanted=wanted, found=found, hint=hint)
