"""Small jobs by hand: views of ranks that are inside a call, before it or behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.job import CALL, GROUP, JobView, Phase, RankView, join
from ckptd.monitor.verdict import SuspectKind, Verdict

NOW = 1000.0


def groups(rows: Mapping[int, tuple[int, int, int]]) -> Any:
    """A table of groups from {group: (size, entered, completed)}."""
    return np.array([(g, *row) for g, row in rows.items()], GROUP)


def call(group: int, seq: int, start: float, end: float = np.nan, **other: Any) -> Any:
    row = np.zeros(1, CALL)
    row["group"], row["seq"], row["start"], row["end"] = group, seq, start, end
    row["op"], row["dtype"], row["bytes"], row["root"] = 1, 1, 1024, -1
    row["step"], row["phase"] = -1, Phase.TRAIN
    for name, value in other.items():
        row[name] = value
    return row


def calls(*rows: Any) -> Any:
    return np.concatenate(rows) if rows else np.zeros(0, CALL)


def view(rank: int, world: int = 4, **other: Any) -> RankView:
    """A rank that is well and in no call, on one of two nodes."""
    usual: dict[str, Any] = {
        "node": f"n{2 * rank // world}",
        "at": NOW,
        "heartbeat": NOW - 0.1,
        "moved": NOW - 0.1,
        "steps_done": 100,
    }
    return RankView(rank=rank, world=world, **(usual | other))


def inside(rank: int, group: int, seq: int, age: float, size: int, **other: Any) -> RankView:
    """A rank that is inside call `seq` of its only group for `age` seconds."""
    usual: dict[str, Any] = {
        "groups": groups({group: (size, seq, seq - 1)}),
        "pending_group": group,
        "pending_seq": seq,
        "pending_since": NOW - age,
        "moved": NOW - age,
    }
    return view(rank, **({"world": size} | usual | other))


def outside(rank: int, group: int, seq: int, idle: float, size: int, **other: Any) -> RankView:
    """A rank that has completed call `seq` of its only group and is in no other."""
    usual: dict[str, Any] = {
        "groups": groups({group: (size, seq, seq)}),
        "moved": NOW - idle,
    }
    return view(rank, **({"world": size} | usual | other))


def changed(one: RankView, **other: Any) -> RankView:
    return msgspec.structs.replace(one, **other)


def job(*views: RankView, **other: Any) -> JobView:
    return join(views, **other)


def told(verdicts: Any, target: SuspectKind = SuspectKind.RANK) -> list[tuple[str, list[str]]]:
    """Class and names of each verdict."""
    out: list[tuple[str, list[str]]] = []
    for v in verdicts:
        assert isinstance(v, Verdict)
        out.append((str(v.kind), sorted(v.names(target))))
    return out
