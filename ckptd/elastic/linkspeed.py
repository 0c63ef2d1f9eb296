"""Speed of a node's links: what the check before a job measured, what its network cards say.

In it: how old a measure may be, which speeds are absurd, how many paces slower nodes are.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from ckptd.decoding import json_decoder

_FILE = "link.json"
_MOST_BYTES = 4096
_OLD_S = 86_400.0
_RANGE = (10**4, 10**13)
"""Bytes per second that a link may have: anything else is no measure."""
_SLOWEST = 6


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A measure in a file: bytes per second, and its moment in seconds since 1970."""

    bytes_per_s: float
    at: float


_measures = json_decoder(_Measured)


def keep_measured(bytes_per_s: float, folder: Path) -> None:
    """Keep what was measured of this machine in a run folder, for launchers of the next day.

    What is no measure, or cannot be written, is not kept.
    """
    path = folder / _FILE
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    with suppress(OSError):
        if _sane(bytes_per_s):
            found = _Measured(bytes_per_s=bytes_per_s, at=time.time())
            draft.write_bytes(msgspec.json.encode(found))
            os.replace(draft, path)


def measured(folder: Path) -> int:
    """Return the bytes per second that were measured last; 0 if none are known, or too old."""
    with suppress(OSError, msgspec.MsgspecError):
        with open(folder / _FILE, "rb") as file:
            found = _measures.decode(file.read(_MOST_BYTES))
        if 0 <= time.time() - found.at < _OLD_S:
            return _sane(found.bytes_per_s)
    return 0


def of_cards(root: Path = Path("/sys/class")) -> int:
    """Return the bytes per second of active RDMA ports, else of the fastest card; 0: unknown."""
    ports = (
        _number(port / "rate", 1e9)
        for port in root.glob("infiniband/*/ports/*")
        if "ACTIVE" in _text(port / "state")
    )
    cards = (
        _number(card.parent / "speed", 1e6)
        for card in root.glob("net/*/device")
        if "up" in _text(card.parent / "operstate")
    )
    return _sane(sum(ports) or max(cards, default=0.0))


def paces(speeds: Iterable[tuple[int, int]]) -> list[int]:
    """Return how many times each node's links are half as fast as the fastest of all.

    Rounded, so that nodes that differ by little are alike. Measures are compared with measures
    and cards with cards, since one stream measures less than a fast card can do; the worse counts.

    Parameters
    ----------
    speeds
        Bytes per second of each node, as measured and of its cards; 0 and absurd ones say nothing.
    """
    kinds = [[_sane(speed) for speed in kind] for kind in zip(*speeds, strict=True)]
    return [max(found) for found in zip(*map(_paces, kinds), strict=True)]


def _paces(speeds: list[int]) -> list[int]:
    best = max(speeds)
    return [min(round(math.log2(best / own)), _SLOWEST) if own else 0 for own in speeds]


def _sane(bytes_per_s: float) -> int:
    low, high = _RANGE
    return int(bytes_per_s) if low <= bytes_per_s <= high else 0  # NaN is neither


def _number(path: Path, bits: float) -> float:
    found = re.match(r"\d{1,9}(\.\d{1,3})?", _text(path))
    return float(found[0]) * bits / 8 if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
