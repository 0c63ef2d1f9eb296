"""A watch that is fed simulated jobs, node by node, over the real wire form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ckptd.monitor.incidents import Incident
from ckptd.monitor.job import JobView, Phase, RankView
from ckptd.monitor.report import (
    STEP,
    AgentState,
    GroupInfo,
    NodeReport,
    RankNote,
    from_views,
    pack,
    unpack_report,
)
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.watch import JobWatch
from ckptd_simulated.job import Mesh, group_ids, play, views

JOB = "job"
START = 1000.0
PERIOD = 0.25

KINDS = ("tp", "dp", "mp", "p2p", "p2p", "p2p", "p2p")


def infos(mesh: Mesh) -> dict[int, GroupInfo]:
    """What agents tell of the groups of a mesh."""
    ids = group_ids(mesh)
    out = {}
    for slot, kind in enumerate(KINDS):
        for group in np.unique(ids[:, slot]).tolist():
            if group:
                ranks = np.flatnonzero(ids[:, slot] == group).tolist()
                out[group] = GroupInfo.of(ranks, f"{kind} of {ranks[0]}", kind)
    return out


class Fed:
    """A watch, and agents that feed it."""

    def __init__(self, settings: WatchSettings | None = None, **other: Any) -> None:
        self.watch = JobWatch(JOB, settings, **{"epoch": 1e9, **other})
        self.now = START
        self.opened: list[Incident] = []
        self.updated: list[Incident] = []
        self.closed: list[Incident] = []
        self.notes: dict[int, RankNote] = {}
        self.agents: dict[str, AgentState] = {}
        self.life = "a"
        self._numbers = itertools.count(1)

    def send(
        self,
        seen: Iterable[RankView],
        *,
        skip: Sequence[str] = (),
        members: Mapping[int, GroupInfo] | None = None,
        steps: Mapping[str, Any] | None = None,
    ) -> None:
        """Let the agent of each node send what its ranks show."""
        nodes: dict[str, list[RankView]] = {}
        for view in seen:
            nodes.setdefault(view.node, []).append(view)
        for node, mine in nodes.items():
            if node in skip:
                continue
            sheet = from_views(
                mine,
                job=JOB,
                source=f"{node}-{self.life}",
                number=next(self._numbers),
                notes=self.notes,
                agents={node: self.agents.get(node, AgentState())},
                members=members,
                **({"steps": steps[node]} if steps and node in steps else {}),
            )
            self.watch.take(unpack_report(pack(sheet)), self.now)

    def round(self) -> None:
        """One round, a period later."""
        self.now += PERIOD
        changes = self.watch.round(self.now)
        self.opened += changes.opened
        self.updated += changes.updated
        self.closed += changes.closed

    def show(self, job: JobView | Sequence[RankView], rounds: int = 1, **how: Any) -> None:
        """Send and judge the same moment so many times."""
        seen = views(job) if isinstance(job, JobView) else job
        for _ in range(rounds):
            self.send(seen, **how)
            self.round()

    def settle(self, job: JobView | Sequence[RankView], **how: Any) -> None:
        """Show a job that is well until the watch takes things for known."""
        self.show(job, **how)
        self.now += self.watch.settings.settle_s
        self.show(job, **how)

    def tell(self, mesh: Mesh, own: Any, first: int, wall: Any = None) -> None:
        """Tell a table of own times, shape (steps, ranks), in seconds."""
        seen = views(replace(play(mesh, [], np.random.default_rng(0), age=0.0, rounds=6)))
        table = {}
        for k in range(mesh.nodes):
            ranks = np.arange(k * mesh.per_node, min((k + 1) * mesh.per_node, mesh.ranks))
            rows = np.zeros(len(own) * len(ranks), STEP)
            rows["row"] = np.tile(np.arange(len(ranks)), len(own))
            rows["step"] = first + np.repeat(np.arange(len(own)), len(ranks))
            rows["phase"] = Phase.TRAIN
            rows["self_s"] = own[:, ranks].ravel()
            rows["wall_s"] = (own.max(1, keepdims=True) * 1.1 if wall is None else wall)[
                :, np.zeros(len(ranks), int)
            ].ravel()
            rows["inside_s"] = rows["wall_s"] - rows["self_s"]
            table[f"n{k}"] = rows
        step = first + len(own)
        moved = [
            msgspec.structs.replace(
                v,
                step=step,
                steps_done=step,
                calls=v.calls[:0],
                pending_group=0,
                pending_seq=0,
                pending_since=float("nan"),
            )
            for v in seen
        ]
        self.send(moved, members=infos(mesh) if first == 0 else {}, steps=table)
        self.round()


def clean(mesh: Mesh, rounds: int = 20) -> JobView:
    """A job in the middle of a step."""
    return play(mesh, [], np.random.default_rng(7), age=0.01, rounds=rounds)


def told(incidents: Iterable[Incident]) -> list[tuple[str, tuple[str, ...]]]:
    """Class and ranks of incidents."""
    return [(i.kind, i.verdict.names()) for i in incidents]


def resent(sheet: NodeReport, **fields: Any) -> NodeReport:
    return msgspec.structs.replace(sheet, **fields)
