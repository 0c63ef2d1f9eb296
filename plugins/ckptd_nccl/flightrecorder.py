"""Dumps of PyTorch's flight recorder as views of ranks: a second source, where no ring is.

Dumps are JSON or pickled, one file a rank, and are not trusted. They hold less than a ring: nothing
of the process, of steps and of call sites; on Gloo neither ranks of groups nor ends of calls, and
no point-to-point call at all. Groups are joined by name: their ids count what each rank made.
Verified with dumps of PyTorch 2.13 on Gloo; fields that only NCCL fills are read as its source
says, and were not run.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from ckptd.decoding import converter, json_decoder
from ckptd.errors import CkptdError, CorruptError, NotFoundError, one_line
from ckptd.monitor import CALL, GROUP, CallFlag, HangLimits, Phase, RankView, text_hash
from ckptd_nccl.plainpickle import loads

__all__ = ["STUCK", "FlightRecords", "lines", "read", "read_folder"]

FILE_BYTES = 64 << 20
"""Largest dump that is read; 2,000 calls with their stacks take a few MiB."""
FILES = 1 << 16
"""Most files of a folder."""
_SHOWN, _WORD = 8, 60
RANKS = 1 << 20
"""Most ranks that a job may have: what a dump claims is not allocated beyond."""

STUCK = HangLimits(floors=dict.fromkeys(Phase, 0.0), warm_steps=0, majority_wait=0.0)
"""Limits for dumps: to take one is to say that the job stands still, and its ages are unknown."""

_ITEM_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
}
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter")
_PEERS = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
_NUMBERS = re.compile(r"\d{1,8}")

_Count = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Entry(msgspec.Struct):
    """One call, as far as it is used; anything else is left unread."""

    process_group: tuple[str, str]
    profiling_name: str
    time_created_ns: _Time
    collective_seq_id: _Count = 0
    pg_id: _Count = -1
    record_id: _Count = -1
    is_p2p: bool = False
    retired: bool = False
    state: str | None = None
    time_discovered_completed_ns: _Time | None = None
    input_sizes: list[list[_Count]] = []
    input_dtypes: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the call is known to have ended."""
        return self.retired or self.state == "completed" or bool(self.time_discovered_completed_ns)


class _Group(msgspec.Struct):
    ranks: str = "[]"


class _Status(msgspec.Struct):
    last_enqueued_collective: _Count = -1
    last_completed_collective: _Count = -1


class _Dump(msgspec.Struct):
    version: str
    entries: list[_Entry] = []
    pg_config: dict[str, _Group] = {}
    pg_status: dict[str, _Status] = {}


_to_dump = converter(_Dump, strict=False)


_dumps = json_decoder(_Dump, strict=False)


@dataclass
class FlightRecords:
    """Dumps of a folder.

    Attributes
    ----------
    views
        One a rank, by rank.
    unread
        Files that are no dumps, and why; a job is judged without them.
    """

    views: list[RankView] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def read_folder(folder: Path) -> FlightRecords:
    """Return what the dumps of a folder show; a file's last number is its rank.

    Of a rank with several files the newest counts: a dump is often there in both forms.

    Raises
    ------
    NotFoundError
        There is no such folder, or no dump in it.
    """
    try:
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != ".")
    except OSError as error:
        raise _none(folder, str(error.strerror)) from error
    out = FlightRecords()
    found: dict[int, tuple[_Dump, float]] = {}
    for path in files[:FILES]:
        rank = _rank_of(path)
        try:
            if rank is None:
                raise CorruptError("no rank number in its name")
            dump, at = read(path)
        except CkptdError as error:
            out.unread[path.name] = error.found or error.message
            continue
        if rank not in found or found[rank][1] < at:
            found[rank] = (dump, at)
    if not found:
        raise _none(folder, f"{len(files)} files, none of them a dump")
    out.views = _views(found)
    return out


def _none(folder: Path, found: str) -> NotFoundError:
    return NotFoundError(
        "no dump of a flight recorder found",
        where=str(folder),
        found=found,
        hint="TORCH_FR_BUFFER_SIZE=2000 keeps one; a file a rank, with its number in the name",
    )


def _rank_of(path: Path) -> int | None:
    numbers = _NUMBERS.findall(path.name.removesuffix(".json"))
    return int(numbers[-1]) if numbers and int(numbers[-1]) < RANKS else None


def read(path: Path) -> tuple[_Dump, float]:
    """Return a dump, and when its file was written (s of the wall clock).

    Raises
    ------
    CorruptError
        It is too large, or no dump.
    """
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            written = os.fstat(file.fileno())
            if not stat.S_ISREG(written.st_mode):
                raise _bad(path, "no file")
            data = file.read(min(written.st_size, FILE_BYTES) + 1)
    except OSError as error:
        raise _bad(path, str(error.strerror)) from error
    if len(data) > FILE_BYTES:
        raise _bad(path, f"more than {FILE_BYTES} bytes")
    try:
        if data[:1] == b"\x80":
            return _to_dump(loads(data, str(path))), written.st_mtime
        return _dumps.decode(data), written.st_mtime
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad(path, str(error)[:200]) from error


def lines(path: Path) -> list[str]:
    """Return the last calls of a dump in the order of time, those first that have not ended.

    Raises
    ------
    CorruptError
        As of `read`.
    """
    calls = read(path)[0].entries
    waiting = [e for e in calls if not e.ended][:_SHOWN]
    ended = [e for e in calls if e.ended][-_SHOWN:]
    return [_line(e) for e in sorted([*waiting, *ended], key=lambda e: e.time_created_ns)]


def _line(entry: _Entry) -> str:
    seconds, part = divmod(entry.time_created_ns, 10**9)
    at = time.strftime("%Y-%m-%d %T", time.localtime(seconds))
    name, group = one_line(entry.profiling_name)[:_WORD], one_line(entry.process_group[0])[:_WORD]
    end = "ended" if entry.ended else "entered, not ended"
    return f"{at}.{part // 1000:06d} call {entry.collective_seq_id} of group {group}, {name}: {end}"


def _bad(path: Path, found: str) -> CorruptError:
    return CorruptError("not a flight recorder dump", where=str(path), found=found)


# --- views --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Channel:
    """A group, or two ranks of one that send to each other."""

    name: str
    ends: tuple[int, int] | None = None

    @property
    def ident(self) -> int:
        return xxhash.xxh3_64_intdigest(f"{self.name} {self.ends}".encode()) or 1


def _views(found: dict[int, tuple[_Dump, float]]) -> list[RankView]:
    shown: dict[str, set[int]] = {}
    stated: dict[str, tuple[int, ...]] = {}
    for rank, (dump, _) in found.items():
        for entry in dump.entries:
            shown.setdefault(entry.process_group[0], set()).add(rank)
        for name, group in dump.pg_config.items():
            stated.setdefault(name, _ranks(group.ranks))
    every = [*found, *(r for ranks in stated.values() for r in ranks)]
    world = max(every) + 1
    # Without a list, the members are those that show the group; all are in the first one.
    members = {name: stated.get(name) or tuple(sorted(who)) for name, who in shown.items()}
    if "0" in members and not stated.get("0"):
        members["0"] = tuple(range(world))
    return [_view(r, world, *found[r], members) for r in sorted(found)]


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of a group as a dump lists them; none of a list that cannot be."""
    ranks = tuple(int(n) for n in _NUMBERS.findall(text[: 8 * RANKS]))
    return ranks if max(ranks, default=0) < RANKS and len(set(ranks)) == len(ranks) else ()


def _view(
    rank: int, world: int, dump: _Dump, written: float, members: dict[str, tuple[int, ...]]
) -> RankView:
    calls, channels = _calls(dump.entries)
    groups, ranks_of = _groups(dump, calls, channels, members)
    waiting = calls[np.isnan(calls["end"])]
    last = float(np.nanmax(np.append(calls["start"], calls["end"]))) if len(calls) else written
    pending: dict[str, Any] = {}
    if len(waiting):
        pending["pending_group"] = int(waiting[0]["group"])
        pending["pending_seq"] = int(waiting[0]["seq"])
        pending["pending_since"] = float(waiting[0]["start"])
    return RankView(
        rank=rank,
        world=world,
        node=f"rank-{rank}",
        at=max(written, math.nextafter(last, math.inf)),
        heartbeat=math.nan,
        moved=last,
        groups=groups,
        calls=calls,
        members=ranks_of,
        **pending,
    )


def _calls(entries: Sequence[_Entry]) -> tuple[np.ndarray[Any, Any], dict[int, _Channel]]:
    """Return rows of calls in order, one for each (group, sequence number), and their groups.

    Calls that were coalesced share a number; the last of them counts.
    """
    counted: dict[int, int] = {}
    rows: dict[tuple[int, int], Any] = {}
    channels: dict[int, _Channel] = {}
    # What was overwritten is not counted, so that both ends of a channel would count apart.
    whole = not entries or entries[0].record_id == 0
    for entry in entries:
        channel = _channel(entry)
        if channel is None or (channel.ends is not None and not whole):
            continue
        ident = channel.ident
        channels[ident] = channel
        counted[ident] = counted.get(ident, 0) + 1
        seq = counted[ident] if channel.ends is not None else entry.collective_seq_id
        rows.pop((ident, seq), None)
        rows[ident, seq] = _row(entry, ident, seq)
    out = np.array(list(rows.values()), CALL) if rows else np.zeros(0, CALL)
    return out, channels


def _channel(entry: _Entry) -> _Channel | None:
    name = entry.process_group[0]
    if not entry.is_p2p:
        return _Channel(name)
    match = _PEERS.search(entry.profiling_name)
    if match is None:
        return None
    me, other = int(match[2]), int(match[3])
    return _Channel(name, (me, other) if match[1] == "send" else (other, me))


def _row(entry: _Entry, ident: int, seq: int) -> tuple[Any, ...]:
    name = entry.profiling_name.rpartition(":")[2]
    name = "p2p" if entry.is_p2p else name
    dtype = entry.input_dtypes[0] if entry.input_dtypes else ""
    start = entry.time_created_ns * 1e-9
    end = (entry.time_discovered_completed_ns or 0) * 1e-9
    flags = CallFlag.VARIABLE if name.lstrip("_").startswith(_UNEVEN) else 0
    size = _bytes(entry, dtype)
    ended = max(start, end) if entry.ended else math.nan
    kind = text_hash(dtype) if dtype else 0
    return ident, seq, text_hash(name), kind, size, -1, flags, 0, -1, Phase.TRAIN, start, ended


def _bytes(entry: _Entry, dtype: str) -> int:
    each = _ITEM_BYTES.get(dtype)
    if each is None or not entry.input_sizes:
        return -1
    total = each
    for length in entry.input_sizes[0]:
        total *= max(length, 0)
        if total >= 1 << 62:
            return -1
    return total


def _groups(
    dump: _Dump,
    calls: np.ndarray[Any, Any],
    channels: dict[int, _Channel],
    members: dict[str, tuple[int, ...]],
) -> tuple[np.ndarray[Any, Any], dict[int, tuple[int, ...]]]:
    status = {
        entry.process_group[0]: dump.pg_status[str(entry.pg_id)]
        for entry in dump.entries
        if str(entry.pg_id) in dump.pg_status
    }
    rows, ranks_of = [], {}
    for ident, channel in channels.items():
        mine = calls[calls["group"] == ident]
        entered = int(mine["seq"].max())
        ended = mine["seq"][~np.isnan(mine["end"])]
        completed = int(ended.max()) if len(ended) else 0
        ranks = members[channel.name]
        if channel.ends is not None:
            known = max(channel.ends) < len(ranks)
            ranks = tuple(ranks[e] for e in channel.ends) if known else ()
        elif channel.name in status:
            entered = max(entered, status[channel.name].last_enqueued_collective)
            completed = max(completed, status[channel.name].last_completed_collective)
        rows.append((ident, 2 if channel.ends else len(ranks), entered, min(completed, entered)))
        if ranks:
            ranks_of[ident] = ranks
    return _table(rows), ranks_of


def _table(rows: Iterable[tuple[int, int, int, int]]) -> np.ndarray[Any, Any]:
    rows = list(rows)
    return np.array(rows, GROUP) if rows else np.zeros(0, GROUP)
