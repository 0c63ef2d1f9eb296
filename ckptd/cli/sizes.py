"""Sizes as people write them."""

from __future__ import annotations

import re

from ckptd.errors import UsageError

__all__ = ["size_of"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def size_of(text: str, where: str) -> int:
    """Return a size such as ``5GB``, ``500MB`` or ``2GiB`` in bytes.

    Raises
    ------
    UsageError
        It is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?)?B?", text)
    unit = (_UNITS | _BINARY).get(found[2] or "") if found else None
    if not found or unit is None or float(found[1]) * unit < 1:
        raise UsageError(
            "not a size", kind="bad-argument", where=where, wanted="5GB, 500MB, 2GiB", found=text
        )
    return int(float(found[1]) * unit)
