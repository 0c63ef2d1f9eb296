"""Timeline of events as a Chrome trace for Perfetto: lanes, most events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from ckptd.events.event import LOAD_PHASES, SAVE_PHASES, AnyEvent, SaveFailed, SaveSkipped, Span

MOST_EVENTS = 1_000_000
"""More than a browser shows."""
_LANES = {name: i for i, name in enumerate((*SAVE_PHASES, *LOAD_PHASES), start=1)}
_OTHER = len(_LANES) + 1
_LANE_NAMES = ("saves and loads", *_LANES, "other")


class Timeline:
    """Writes one JSON array of trace events: a process for each rank, a thread for each activity.

    Parameters
    ----------
    out
        Written front to back; `finish` ends the array.
    base_ns
        Moment that is zero in the trace, in nanoseconds since 1970.
    most
        Events to write; `left_out` counts the rest.
    """

    def __init__(self, out: TextIO, base_ns: int, most: int = MOST_EVENTS) -> None:
        self._out = out
        self._base = base_ns
        self._most = most
        self._named: set[tuple[int, int]] = set()
        self.written = 0
        self.left_out = 0
        out.write("[")

    def add(self, host: str, event: AnyEvent) -> None:
        """Write one event of a process on `host`."""
        if self.written >= self._most:
            self.left_out += 1
            return
        for item in self._items(host, event):
            raw = msgspec.json.encode(item).decode()
            self._out.write(f",\n{raw}" if self.written else f"\n{raw}")
            self.written += 1

    def finish(self) -> None:
        """End the array."""
        self._out.write("\n]\n")

    def _items(self, host: str, event: AnyEvent) -> Iterator[dict[str, Any]]:
        pid = event.rank
        lane = _LANES.get(event.name, _OTHER) if isinstance(event, Span) else 0
        if (pid, -1) not in self._named:
            self._named.add((pid, -1))
            yield _named("process_name", pid, 0, f"rank {pid} on {host}")
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        if (pid, lane) not in self._named:
            self._named.add((pid, lane))
            yield _named("thread_name", pid, lane, _LANE_NAMES[lane])
        yield self._event(event, pid, lane)

    def _event(self, event: AnyEvent, pid: int, lane: int) -> dict[str, Any]:
        args = {"step": event.step, "generation": event.generation, "attempt": event.attempt}
        at = {"pid": pid, "tid": lane, "ts": (event.time_ns - self._base) / 1000}
        if isinstance(event, Span):
            args |= {"bytes": event.bytes, "busy_ms": event.busy_ns / 1e6}
            args |= {k: v for k, v in (("tier", event.tier), ("error", event.error)) if v}
            took = event.duration_ns / 1000
            title = f"{event.name} {event.step}"
            return {"ph": "X", "name": title, "cat": event.name, **at, "dur": took, "args": args}
        if isinstance(event, SaveFailed | SaveSkipped):
            args["reason"] = event.message if isinstance(event, SaveFailed) else event.reason
        title = f"{type(event).__name__} {event.step}"
        return {"ph": "i", "s": "p", "name": title, "cat": "save", **at, "args": args}


def _named(what: str, pid: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": lane, "args": {"name": name}}
