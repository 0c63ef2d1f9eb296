"""Calls of the last seconds as a Chrome trace; which ranks are asked for.

In it: the most ranks and messages looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckptd.errors import CorruptError, UsageError
from ckptd.monitor.daemon.documents import CallDocument, Names
from ckptd.monitor.job import JOINED_CALL
from ckptd.monitor.recording import RecordedFrame
from ckptd.monitor.report import NodeReport, unpack_report
from ckptd.monitor.stats import Array

_MOST_FRAMES = 20_000
_MOST_RANKS = 4096


def parse_ranks(text: str) -> Array:
    """Return the ranks that ``0-7,12`` names.

    Raises
    ------
    UsageError
        It names none, or more than 4,096.
    """
    out: list[int] = []
    for part in text.split(",")[:_MOST_RANKS]:
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, _MOST_RANKS)
        if found is None or last < first or last - first + len(out) >= _MOST_RANKS:
            raise UsageError(
                "the list of ranks cannot be parsed",
                where="ranks",
                wanted="such as 0-7,12: at most 4096",
                found=text[:100],
            )
        out += range(first, last + 1)
    return np.unique(np.array(out, np.int64))


def recent_calls(frames: Sequence[RecordedFrame], ranks: Array, since: float) -> Array:
    """Return the calls that `ranks` made after `since`, as far as reports have them.

    Parameters
    ----------
    frames
        Oldest first; only reports are read.
    ranks
        Global ranks.
    since
        Monotonic seconds.

    Returns
    -------
    numpy.ndarray
        `JOINED_CALL` rows whose ``row`` is the global rank and whose times are monotonic seconds
        of this machine; sorted by rank and time. A call in several reports is there once,
        as it was last.
    """
    parts: list[Array] = []
    for frame in frames[-_MOST_FRAMES:]:
        if frame.kind != "sheet":
            continue
        try:
            report = unpack_report(frame.body)
        except CorruptError:  # another version's: it was taken by what no longer runs
            continue
        part = calls_of(report, ranks)
        if len(part):
            part["start"] += frame.at
            part["end"] += frame.at
            parts.append(part)
    if not parts:
        return np.zeros(0, JOINED_CALL)
    calls = np.concatenate(parts)
    arrival = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    order = np.lexsort((arrival, calls["seq"], calls["group"], calls["row"]))
    calls = calls[order]
    last = np.ones(len(calls), bool)
    last[:-1] = _key_differs(calls)
    calls = calls[last]
    calls = calls[np.isnan(calls["end"]) | (calls["end"] >= since)]
    out: Array = calls[np.lexsort((calls["start"], calls["row"]))]
    return out


def _key_differs(calls: Array) -> Array:
    out = np.zeros(len(calls) - 1, bool)
    for name in ("row", "group", "seq"):
        out |= calls[name][1:] != calls[name][:-1]
    return out


def calls_of(report: NodeReport, ranks: Array) -> Array:
    """Return a report's calls of `ranks`, with the rank in place of the row."""
    rank = report.table("ranks")["rank"]
    wanted = np.isin(rank, ranks)
    calls = report.table("calls")
    if not wanted.any() or not len(calls):
        return np.zeros(0, JOINED_CALL)
    out: Array = calls[wanted[calls["row"]]].copy()
    out["row"] = rank[out["row"]]
    return out


def chrome_trace(calls: Array, names: Names, nodes: dict[int, str], now: float) -> dict[str, Any]:
    """Return calls in Chrome's trace format: a process a node, a thread a rank.

    Parameters
    ----------
    calls
        As of `recent_calls`.
    names
        Names of what they hold.
    nodes
        Name of the node of each rank.
    now
        End of a call that goes on, monotonic seconds.
    """
    places = {node: i + 1 for i, node in enumerate(sorted(set(nodes.values()) | {""}))}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": node or "?"}}
        for node, pid in places.items()
    ]
    zero = float(calls["start"].min()) if len(calls) else now
    for rank in np.unique(calls["row"]).tolist():
        where = {"pid": places[nodes.get(rank, "")], "tid": rank}
        events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": f"rank {rank}"}})
    for call in calls:
        what = CallDocument.of(call, names)
        rank = int(call["row"])
        end = now if what.end_s is None else what.end_s
        events.append(
            {
                "name": what.op,
                "cat": what.kind,
                "ph": "X",
                "ts": round(1e6 * (what.start_s - zero), 3),
                "dur": round(1e6 * max(end - what.start_s, 0.0), 3),
                "pid": places[nodes.get(rank, "")],
                "tid": rank,
                "args": {
                    "group": what.group,
                    "seq": what.seq,
                    "bytes": what.bytes,
                    "step": what.step,
                    "phase": what.phase,
                    "site": what.site,
                    "ended": what.end_s is not None and not what.unseen,
                },
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
