"""Cost of each save and its slowest rank, from the events of all ranks (``ckptd trace``).

In it: how many figures and saves are kept; phases that are no work.

Events may come in any order and from any number of processes; memory is bounded by the number of
saves that are kept, and by the number of figures in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from ckptd.events.event import (
    SAVE_PHASES,
    STALL_PHASES,
    AnyEvent,
    LoadDone,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    Span,
    VersionApplied,
    VersionPublished,
)

MOST_FIGURES = 4_000_000
_MOST_PHASES = 64
_PLACES = {name: i for i, name in enumerate(SAVE_PHASES)}
_NOT_WORK = frozenset({"call", "gather"})
"""Phases that contain others, or that wait for other ranks: never the cause of anything."""

_DECISIVE = frozenset({"call", "gather", "commit"})
"""Phases whose errors end a save."""


class PhaseStats(msgspec.Struct, frozen=True):
    """One phase of a save over all ranks that had it; times in seconds in the activity itself.

    Attributes
    ----------
    slowest_rank
        The rank of `max_s`; the lowest, where there are several.
    bytes
        Of all ranks together.
    """

    name: str
    tier: str
    ranks: int
    min_s: float
    median_s: float
    max_s: float
    slowest_rank: int
    bytes: int


class SaveProfile(msgspec.Struct, frozen=True):
    """One save.

    Attributes
    ----------
    outcome
        ``durable``, ``failed``, ``skipped``, or ``unfinished``.
    reason
        Why it failed or was skipped.
    ranks
        From which anything was heard.
    begun_ns
        Nanoseconds since 1970.
    seconds
        From its first event to its last one, retention not counted.
    durable_s
        Seconds from its first event until it was durable, by tier.
    stall
        What the training loop waited for; None when nothing was recorded of it.
    slowest
        The phase with the largest `max_s` that did work itself; empty when there is none.
    numbers
        Those of its metadata, such as a loss.
    """

    step: int
    generation: int
    attempt: str
    outcome: str
    reason: str
    ranks: int
    begun_ns: int
    seconds: float
    durable_s: dict[str, float]
    bytes: int
    stall: PhaseStats | None
    slowest: str
    phases: tuple[PhaseStats, ...]
    numbers: dict[str, float]


@dataclass
class _Phase:
    busy: dict[int, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass
class _Save:
    phases: dict[tuple[str, str], _Phase] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    first: int | None = None
    last: int = 0
    durable: dict[str, int] = field(default_factory=dict)
    committed: bool = False
    failed: str | None = None
    skipped: str | None = None
    events: int = 0
    figures: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


_Key = tuple[int, int, str]


class Profiles:
    """Gathers events into profiles of the newest saves.

    Parameters
    ----------
    last
        How many saves to keep: those of the highest generation and step.
    most_figures
        Bound of the figures that are held, a phase of a rank each.
    """

    def __init__(self, last: int = 100, most_figures: int = MOST_FIGURES) -> None:
        self._last = max(1, last)
        self._most = most_figures
        self._figures = 0
        self._saves: dict[_Key, _Save] = {}
        self._floor: _Key | None = None
        self.loads = 0
        self.left_out = 0
        """Events of older saves, and those for which there was no room."""

    def add(self, event: AnyEvent) -> None:
        """Take an event in."""
        if isinstance(event, VersionPublished | VersionApplied):
            return  # no saves
        if isinstance(event, LoadDone):
            self.loads += 1
        elif not isinstance(event, Span) or event.attempt or event.name in SAVE_PHASES:
            save = self._save(event)
            if save is None or not self._room(save, event):
                self.left_out += 1
            else:
                _add(save, event)

    def _save(self, event: AnyEvent) -> _Save | None:
        key = (event.generation, event.step, event.attempt)
        if self._floor is not None and key <= self._floor:
            return None
        self._saves.setdefault(key, _Save())
        if len(self._saves) > self._last:
            self._drop_oldest()
        return self._saves.get(key)

    def _drop_oldest(self) -> None:
        self._floor = min(self._saves)
        gone = self._saves.pop(self._floor)
        self._figures -= gone.figures
        self.left_out += gone.events

    def _room(self, save: _Save, event: AnyEvent) -> bool:
        before = _figures_of(save, event)
        if not before:
            return True
        if isinstance(event, Span):
            known = (event.name, event.tier) in save.phases
            if not known and len(save.phases) >= _MOST_PHASES:
                return False
        while self._figures + before > self._most:
            if len(self._saves) == 1:
                return False
            self._drop_oldest()
        key = (event.generation, event.step, event.attempt)
        if key not in self._saves:
            return False
        self._figures += before
        save.figures += before
        return True

    def saves(self) -> list[SaveProfile]:
        """Return the profiles, the oldest save first."""
        return [_profile(key, self._saves[key]) for key in sorted(self._saves)]


def _figures_of(save: _Save, event: AnyEvent) -> int:
    """Return how many figures more there are with this event."""
    more = int(event.rank not in save.ranks)
    if isinstance(event, Span):
        phase = save.phases.get((event.name, event.tier))
        more += int(phase is None or event.rank not in phase.busy)
    elif isinstance(event, SaveDurable):
        more += int(event.tier not in save.durable)
    return more


def _add(save: _Save, event: AnyEvent) -> None:
    save.events += 1
    save.ranks.add(event.rank)
    if isinstance(event, Span):
        _add_span(save, event)
        return
    _extend(save, event.time_ns, event.time_ns)
    if isinstance(event, SaveDurable):
        at = save.durable.get(event.tier, event.at_ns)
        save.durable[event.tier] = min(at, event.at_ns)
    elif isinstance(event, SaveFailed):
        save.failed = _first_of(save.failed, event.message)
    elif isinstance(event, SaveStaged):
        save.numbers |= event.numbers
    elif isinstance(event, SaveSkipped):
        save.skipped = _first_of(save.skipped, event.reason)


def _add_span(save: _Save, span: Span) -> None:
    phase = save.phases.setdefault((span.name, span.tier), _Phase())
    phase.busy[span.rank] = phase.busy.get(span.rank, 0) + span.busy_ns
    phase.bytes += span.bytes
    if span.name != "retention":
        _extend(save, span.start_ns, span.start_ns + span.duration_ns)
    if span.name == "commit" and not span.error:
        save.committed = True
    if span.name in _DECISIVE and span.error:
        save.failed = _first_of(save.failed, span.error)


def _first_of(text: str | None, other: str) -> str:
    """Choose alike for every order of events."""
    return other if text is None else min(text, other)


def _extend(save: _Save, first: int, last: int) -> None:
    save.first = first if save.first is None else min(save.first, first)
    save.last = max(save.last, last)


def _profile(key: _Key, save: _Save) -> SaveProfile:
    generation, step, attempt = key
    phases = tuple(_stats(n, t, p.busy, p.bytes) for (n, t), p in _in_order(save.phases))
    begun = save.first or 0
    working = [p for p in phases if p.name not in _NOT_WORK]
    slowest = max(working, key=lambda p: p.max_s, default=None)
    outcome, reason = _outcome(save)
    return SaveProfile(
        step=step,
        generation=generation,
        attempt=attempt,
        outcome=outcome,
        reason=reason,
        ranks=len(save.ranks),
        begun_ns=begun,
        seconds=max(0, save.last - begun) / 1e9,
        durable_s={t: max(0, at - begun) / 1e9 for t, at in sorted(save.durable.items())},
        bytes=sum(p.bytes for p in phases if p.name == "write"),
        stall=_stall(save),
        slowest=slowest.name if slowest else "",
        phases=phases,
        numbers=save.numbers,
    )


def _outcome(save: _Save) -> tuple[str, str]:
    if save.durable or save.committed:
        return "durable", ""
    if save.failed is not None:
        return "failed", save.failed
    if save.skipped is not None:
        return "skipped", save.skipped
    return "unfinished", ""


def _stall(save: _Save) -> PhaseStats | None:
    by_rank: dict[int, int] = {}
    for (name, _), phase in save.phases.items():
        if name in STALL_PHASES:
            for rank, busy in phase.busy.items():
                by_rank[rank] = by_rank.get(rank, 0) + busy
    return _stats("stall", "", by_rank, 0) if by_rank else None


def _stats(name: str, tier: str, busy: Mapping[int, int], nbytes: int) -> PhaseStats:
    slowest = min(busy, key=lambda r: (-busy[r], r))
    values = busy.values()
    middle = median(values) / 1e9
    return PhaseStats(
        name, tier, len(busy), min(values) / 1e9, middle, max(values) / 1e9, slowest, nbytes
    )


def _in_order(
    phases: Mapping[tuple[str, str], _Phase],
) -> list[tuple[tuple[str, str], _Phase]]:
    return sorted(phases.items(), key=lambda i: (_PLACES.get(i[0][0], len(_PLACES)), i[0]))
