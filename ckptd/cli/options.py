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
        raise UsageError("invalid size", where=where, wanted="5GB, 500MB, 2GiB", found=text)
    return int(float(found[1]) * unit)


def duration_s(text: str, where: str) -> float:
    """Return a duration such as ``90s``, ``30m``, ``6h``, ``7d`` or ``2w`` in seconds.

    Raises
    ------
    UsageError
        It is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if not found:
        raise UsageError("invalid duration", where=where, wanted="30m, 6h, 7d", found=text)
    return float(found[1]) * _SECONDS[found[2]]
