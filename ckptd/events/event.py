"""Event structs: saves, loads, versions; phases of a save; bounds of fields; clocks.

The bounds on fields are for readers: a file may hold anything.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SAVE_PHASES = (
    "call",
    "flatten",
    "plan",
    "acquire",
    "enqueue",
    "gate_wait",
    "copy",
    "digest",
    "write",
    "sync",
    "upload",
    "part",
    "gather",
    "commit",
    "retention",
)
"""Names of a save's spans, in the order in which they begin."""
LOAD_PHASES = ("fetch", "fill", "verify")
"""Names of a load's spans."""
STALL_PHASES = ("call", "gate_wait")
"""Spans that hold the training loop; `call` contains flatten, plan, acquire and enqueue."""

MOST_TEXT = 2000
"""Characters of a message or reason."""

MOST_NUMBERS = 16
"""Most numbers of a save's metadata in one event."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Rank = Annotated[int, Meta(ge=0, lt=10**8)]
_Word = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Phase = Annotated[str, Meta(pattern="^[a-z][a-z_]{0,31}$")]


class SaveId(msgspec.Struct, frozen=True):
    """Which save, and whose share of it; of a load: which checkpoint, with an empty attempt."""

    step: int
    generation: int
    attempt: str
    rank: int

    def fields(self) -> dict[str, Any]:
        """Return what an `Event` takes of it."""
        return msgspec.structs.asdict(self)


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """The fields of all events.

    Attributes
    ----------
    step, generation, attempt
        The save; a load has no attempt.
    rank
        In the job, or in the process group of the checkpointer.
    """

    step: _Count
    generation: _Count
    attempt: _Word = ""
    rank: _Rank

    @property
    def time_ns(self) -> int:
        """When it happened, or began."""
        raise NotImplementedError


class Span(Event, frozen=True, kw_only=True, tag=True):
    """An activity that has ended.

    Attributes
    ----------
    name
        One of `SAVE_PHASES` or `LOAD_PHASES`.
    tier
        Where to; empty where that does not matter.
    start_ns
        Nanoseconds since 1970, from `ckptd.events.now_ns`.
    duration_ns
        From its first moment to its last.
    busy_ns
        Of these, in the activity itself: less than `duration_ns` where pieces of it take turns with
        something else, more where pieces run beside each other.
    bytes
        Moved or looked at; 0 where that does not matter.
    referred
        Of `part`: bytes of this rank that an older checkpoint holds, and that were not written.
    error
        Kind of the error that ended it.
    """

    name: _Phase
    tier: _Word = ""
    start_ns: _Count
    duration_ns: _Count
    busy_ns: _Count
    bytes: _Count = 0
    referred: _Count = 0
    error: _Word = ""

    @property
    def time_ns(self) -> int:
        """When it began."""
        return self.start_ns


class _Moment(Event, frozen=True, kw_only=True):
    at_ns: _Count

    @property
    def time_ns(self) -> int:
        """When it happened."""
        return self.at_ns


class SaveBegun(_Moment, frozen=True, kw_only=True, tag=True):
    """A save is due and begins."""


class SaveStaged(_Moment, frozen=True, kw_only=True, tag=True):
    """Every byte of this rank's state is copied.

    `numbers` are the first of those in the save's metadata, such as a loss; rank 0 tells them.
    """

    bytes: _Count = 0
    numbers: Annotated[dict[_Word, float], Meta(max_length=MOST_NUMBERS)] = {}


def numbers_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the first `MOST_NUMBERS` finite numbers of a save's metadata."""
    found = {
        key: float(value)
        for key, value in metadata.items()
        if type(value) in (int, float) and len(key) <= 64 and abs(value) < 1e300
    }
    return dict(itertools.islice(found.items(), MOST_NUMBERS))


class SaveDurable(_Moment, frozen=True, kw_only=True, tag=True):
    """The checkpoint exists on a tier, and this rank knows of it; `bytes` are its own."""

    tier: _Word = ""
    bytes: _Count = 0


class SaveFailed(_Moment, frozen=True, kw_only=True, tag=True):
    """The save will not become durable on a tier; `kind` and `message` are the error's."""

    tier: _Word = ""
    kind: _Word = ""
    message: _Text = ""


class SaveSkipped(_Moment, frozen=True, kw_only=True, tag=True):
    """A save was due and did not begin; `reason` says why."""

    reason: _Text = ""


class LoadDone(_Moment, frozen=True, kw_only=True, tag=True):
    """A load has filled the live state.

    `bytes` were written to this rank's buffers, `fetched` brought from the store by this rank;
    `skipped` newer steps were corrupt; `warnings` tell what could not be done besides.
    """

    duration_ns: _Count
    bytes: _Count = 0
    fetched: _Count = 0
    skipped: _Count = 0
    warnings: Annotated[tuple[str, ...], Meta(max_length=16)] = ()


class VersionPublished(_Moment, frozen=True, kw_only=True, tag=True):
    """The share of this rank in a published version is in its slot, or the version is skipped.

    Attributes
    ----------
    number
        Counts the versions of one publisher.
    bytes
        Of the share.
    duration_ns
        Since `publish` was called.
    skipped
        Why there was no slot; empty where there was.
    """

    number: _Count
    bytes: _Count = 0
    duration_ns: _Count = 0
    skipped: _Text = ""


class VersionApplied(_Moment, frozen=True, kw_only=True, tag=True):
    """The tensors of this rank of a rollout hold a published version.

    Attributes
    ----------
    number
        As in `VersionPublished`.
    bytes, unchanged
        What was pulled, and what was left out since the tensors held it.
    received
        So many bytes came over sockets for it: fewer than `bytes` where what changed was enough.
    duration_ns
        Of the update, without the wait for a version.
    lag_ns
        Since the version was published.
    """

    number: _Count
    bytes: _Count = 0
    unchanged: _Count = 0
    received: _Count = 0
    duration_ns: _Count = 0
    lag_ns: _Count = 0


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """First line of a file: its writer, and what its clocks said at one moment.

    Attributes
    ----------
    clock
        Files with the same name here were written with the same monotonic clock.
    wall_ns, monotonic_ns
        Both clocks at one moment. Events carry monotonic time plus their difference.
    """

    schema: _Count = 1
    host: Annotated[str, Meta(max_length=255)]
    pid: _Count
    clock: Annotated[str, Meta(max_length=255)]
    wall_ns: _Count
    monotonic_ns: _Count
    version: _Word = ""


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """So many events could not be written to this file since the last such line."""

    count: _Count


AnyEvent = (
    Span
    | SaveBegun
    | SaveStaged
    | SaveDurable
    | SaveFailed
    | SaveSkipped
    | LoadDone
    | VersionPublished
    | VersionApplied
)


# -- the clock: CLOCK_MONOTONIC, mapped to wall time once a process ----------------------


def _take_pair() -> tuple[int, int]:
    """Read both clocks at one moment, as nearly as three tries can."""
    tries = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall, (before + after) // 2))
    _, wall, monotonic = min(tries)
    return wall, monotonic


_PAIR = _take_pair()
_OFFSET = _PAIR[0] - _PAIR[1]


def pair() -> tuple[int, int]:
    """Return what both clocks said when this process began: (wall, monotonic), nanoseconds."""
    return _PAIR


def now_ns() -> int:
    """Return nanoseconds since 1970; never steps back, whatever is done to the wall clock."""
    return time.monotonic_ns() + _OFFSET


def clock_id() -> str:
    """Name the monotonic clock: processes with one name read the very same clock.

    Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
    return f"{boot} {namespace}"
