"""Typed events that every layer emits: to files, to metrics, to subscribers.

Nothing here raises into the code that emits, and nothing here waits. The fields, and the files that
a process writes: ``docs/reference/events.md``.
"""

from __future__ import annotations

from ckptd.events.bus import Subscription, emit, listening, relay, subscribe
from ckptd.events.event import (
    LOAD_PHASES,
    MOST_TEXT,
    SAVE_PHASES,
    Event,
    LoadDone,
    SaveBegun,
    SaveDurable,
    SaveFailed,
    SaveId,
    SaveSkipped,
    SaveStaged,
    Span,
    VersionApplied,
    VersionPublished,
    now_ns,
    numbers_of,
)
from ckptd.events.recording import FOLDER_VARIABLE, Recording, record
from ckptd.events.span import Activity, about, current, span

__all__ = [
    "FOLDER_VARIABLE",
    "LOAD_PHASES",
    "MOST_TEXT",
    "SAVE_PHASES",
    "Activity",
    "Event",
    "LoadDone",
    "Recording",
    "SaveBegun",
    "SaveDurable",
    "SaveFailed",
    "SaveId",
    "SaveSkipped",
    "SaveStaged",
    "Span",
    "Subscription",
    "VersionApplied",
    "VersionPublished",
    "about",
    "current",
    "emit",
    "listening",
    "now_ns",
    "numbers_of",
    "record",
    "relay",
    "span",
    "subscribe",
]
