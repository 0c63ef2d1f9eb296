"""What saves cost, and which checkpoint each tier holds: from recorded events."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ckptd.errors import CkptdError
from ckptd.events.event import STALL_PHASES
from ckptd.events.eventfiles import EventFolder
from ckptd.events.profile import Profiles, SaveProfile

__all__ = ["Checkpoints"]

_FRESH_S = 10.0
_LAST = 50


class Checkpoints:
    """Reads event folders when somebody asks, at most every ten seconds.

    Parameters
    ----------
    folders
        What ``Checkpointer(events=...)`` writes to.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._document: dict[str, Any] = {"tiers": [], "saves": [], "problems": []}

    def document(self) -> dict[str, Any]:
        """Return what GET /checkpoints tells. Reads files, so it takes its time."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                self._document = self._read()
                self._read_at = time.monotonic()
            return self._document

    def _read(self) -> dict[str, Any]:
        profiles = Profiles(last=_LAST)
        problems = []
        for folder in self._folders:
            try:
                for _, event in EventFolder.open(folder).read():
                    profiles.add(event)
            except CkptdError as error:
                problems.append(error.to_dict())
        saves = profiles.saves()
        return {"tiers": _tiers(saves), "saves": [_save(s) for s in saves], "problems": problems}


def _tiers(saves: Sequence[SaveProfile]) -> list[dict[str, Any]]:
    newest: dict[str, dict[str, Any]] = {}
    for save in saves:
        for tier, seconds in save.durable_s.items():
            at = save.begun_ns / 1e9 + seconds
            if tier not in newest or newest[tier]["durable_at"] <= at:
                newest[tier] = {
                    "tier": tier,
                    "last_step": save.step,
                    "durable_at": at,
                    "bytes": save.bytes,
                }
    return list(newest.values())


def _save(save: SaveProfile) -> dict[str, Any]:
    stalls = {p.name: p.max_s for p in save.phases if p.name in STALL_PHASES}
    return {
        "step": save.step,
        "generation": save.generation,
        "begun_at": save.begun_ns / 1e9,
        "outcome": save.outcome,
        "reason": save.reason,
        "bytes": save.bytes,
        "stalls_s": stalls,
        "slowest_rank": save.stall.slowest_rank if save.stall else None,
        "slowest": save.slowest,
        "durations_s": {"all": save.seconds, **save.durable_s},
    }
