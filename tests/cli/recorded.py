"""Folders of events, as jobs record them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ckptd.events.event import AnyEvent, Opened, SaveBegun, SaveDurable, SaveFailed, Span

START_NS = 1_790_000_000_000_000_000
MS = 1_000_000


def opened(pid: int, *, host: str = "node", clock: str = "boot", offset_ns: int = 0) -> Opened:
    """Return the first line of a file whose wall clock is `offset_ns` ahead."""
    return Opened(
        host=host, pid=pid, clock=clock, wall_ns=START_NS + offset_ns, monotonic_ns=5 * MS
    )


def span(name: str, rank: int, begin_ms: int, took_ms: int, **fields: object) -> Span:
    """Return a span of save 10, at a time after `START_NS`."""
    given = {"step": 10, "generation": 1, "attempt": "0001", "tier": "local"} | fields
    took = took_ms * MS
    return Span(
        name=name,
        rank=rank,
        start_ns=START_NS + begin_ms * MS,
        duration_ns=took,
        busy_ns=took,
        **given,  # type: ignore[arg-type]
    )


def save_of(rank: int, step: int = 10, *, write_ms: int = 100) -> list[AnyEvent]:
    """Return what one rank tells of a save that succeeds."""
    ids = {"step": step, "generation": 1, "attempt": f"{step:04d}", "rank": rank}
    same = {"step": step, "attempt": f"{step:04d}"}
    return [
        SaveBegun(**ids, at_ns=START_NS),  # type: ignore[arg-type]
        span("call", rank, 0, 3 + rank, **same),
        span("gate_wait", rank, 20, 2, **same),
        span("write", rank, 5, write_ms, bytes=1 << 20, **same),
        SaveDurable(**ids, at_ns=START_NS + 400 * MS, tier="local", bytes=7),  # type: ignore[arg-type]
    ]


def failed_of(rank: int, step: int, message: str) -> SaveFailed:
    """Return the end of a save that fails."""
    return SaveFailed(
        step=step,
        generation=1,
        attempt=f"{step:04d}",
        rank=rank,
        at_ns=START_NS,
        message=message,
    )


def write_file(path: Path, head: Opened, events: list[AnyEvent]) -> None:
    """Write one process's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in (head, *events)))


def write_events(folder: Path) -> str:
    """Write a folder of two ranks and two saves; rank 1 is slow in the second."""
    for rank in (0, 1):
        events = save_of(rank) + save_of(rank, 20, write_ms=100 + 200 * rank)
        write_file(folder / f"node-{rank}.000000.jsonl", opened(rank), events)
    return str(folder)
