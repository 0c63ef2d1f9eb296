"""Options that several verbs share; sizes (``5GB``) and durations (``30m``) as people write."""

from __future__ import annotations

import re
from typing import Annotated

from cyclopts import Parameter

from ckptd.cli.output import flag, option
from ckptd.errors import UsageError

Daemon = Annotated[
    str | None,
    Parameter(help="URL that ckptd serve printed; by default that of --job on this machine."),
]
DaemonJob = Annotated[str | None, Parameter(help="Name of the job; by default CKPTD_JOB.")]

Section = Annotated[
    str | None,
    option("Only what lies below this name, such as 'model', and without it in names."),
]
Dequantize = Annotated[
    bool, flag("Read torchao's int8, int4 and fp8 weights as plain, dequantized ones.")
]

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_MOST_S = 100 * 365 * _SECONDS["d"]
"""Beyond it no date can be computed."""


def size_of(text: str, where: str) -> int:
    """Return a size such as ``5GB``, ``500MB`` or ``2GiB`` in bytes.

    Raises
    ------
    UsageError
        It is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(i)?)?B?", text)
    base = 1024 if found and found[3] else 1000
    size = float(found[1]) * base ** " KMGT".index(found[2] or " ") if found else 0.0
    if not 1 <= size < 1 << 63:
        raise UsageError("invalid size", where=where, wanted="5GB, 500MB, 2GiB", found=text)
    return int(size)


def duration_s(text: str, where: str) -> float:
    """Return a duration such as ``90s``, ``30m``, ``6h``, ``7d`` or ``2w`` in seconds.

    Raises
    ------
    UsageError
        It is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else _MOST_S
    if seconds >= _MOST_S:
        raise UsageError("invalid duration", where=where, wanted="30m, 6h, 7d", found=text)
    return seconds
