"""Sources of reports: newest report of each node, silent agents, how often agents send."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ckptd.errors import ConflictError
from ckptd.monitor.report import REPORT_RANK, AgentState, GroupInfo, NodeReport
from ckptd.monitor.settings import WatchSettings

MOST_SOURCES = 1 << 15
"""Sources that are remembered, those that are silent included."""


class AgentHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The agent of a node, as far as it is known.

    Attributes
    ----------
    node
        Name of the node.
    source
        Source of the report: the agent itself, or a forwarder.
    age_s
        Seconds since the agent's last report.
    missed
        Reports that did not come, in a row.
    silent
        Whether it is taken for silent: its ranks do not report.
    state
        Its state in the last report.
    """

    node: str
    source: str
    age_s: float
    missed: int
    silent: bool
    state: AgentState


@dataclass
class ReportSource:
    """One life of a sender.

    Attributes
    ----------
    report
        The newest.
    arrived
        When it came.
    found
        Highest number of findings taken.
    named
        Whether members and texts came since they were last asked for.
    """

    report: NodeReport
    arrived: float
    found: int = -1
    named: bool = False


@dataclass
class ReportSources:
    """The newest report of each source, and what sources sent once.

    Attributes
    ----------
    settings
        When a source is silent, and when it is forgotten.
    by_name
        Sources.
    members, names, texts
        Global ranks of groups, their infos, and what hashes represent.
    """

    settings: WatchSettings
    by_name: dict[str, ReportSource] = field(default_factory=dict)
    members: dict[int, Sequence[int]] = field(default_factory=dict)
    names: dict[int, GroupInfo] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    usage: dict[int, np.void] = field(default_factory=dict)
    """Newest row of `ckptd.monitor.report.USAGE` of each rank."""
    _ranks: int = 0
    _addresses: dict[str, str] = field(default_factory=dict)
    _outside: dict[str, str] = field(default_factory=dict)

    @property
    def period_s(self) -> float:
        """How often each source is asked to send, in seconds: rarer with many of them."""
        s = self.settings
        return max(s.period_s, s.per_source_s * len(self.by_name), s.per_rank_s * self._ranks)

    def take(self, report: NodeReport, now: float) -> None:
        """Take a report; ConflictError unless it is newer than the last one."""
        before = self.by_name.get(report.source)
        if before is None:
            self._make_room(report, now)
            self.by_name[report.source] = ReportSource(report, now, named=bool(report.members))
        elif report.number <= before.report.number:
            raise old(report.source, before.report.number, report.number)
        else:
            self._ranks -= _count(before.report)
            before.report, before.arrived = report, now
            before.named |= bool(report.members)
        self._ranks += _count(report)
        if len(report.usage):
            rows = report.table("usage")
            told = report.table("ranks")["rank"][rows["row"]].tolist()
            self.usage.update(zip(told, rows, strict=True))
        self._tell(report)

    def _make_room(self, report: NodeReport, now: float) -> None:
        """Forget earlier lives of the same agents, and agents that were silent for long."""
        nodes = set(report.nodes)
        for name, source in list(self.by_name.items()):
            other = source.report.nodes
            gone = now - source.arrived > self.settings.forget_s
            if gone or (other and nodes.issuperset(other) and self._quiet(source, now)):
                self._drop(name)
        while len(self.by_name) >= MOST_SOURCES:
            self._drop(min(self.by_name, key=lambda n: self.by_name[n].arrived))

    def _drop(self, name: str) -> None:
        report = self.by_name.pop(name).report
        self._ranks -= _count(report)
        for node in report.nodes:
            self._addresses.pop(node, None)
            self._outside.pop(node, None)

    def _quiet(self, source: ReportSource, now: float) -> bool:
        return now - source.arrived > 2 * self.period_s

    def _tell(self, report: NodeReport) -> None:
        for node, state in zip(report.nodes, report.agents, strict=True):
            if state.address:
                self._addresses[node] = state.address
                self._outside.pop(node, None)
                if not _loopback(state.address):
                    self._outside[node] = state.address
        most = self.settings.sheets
        for ident, info in report.members.items():
            if ident in self.names or len(self.names) < most.members:
                self.names[ident] = info
                ranks = info.ranks()
                if len(ranks):
                    self.members[ident] = ranks
        for key, text in report.texts.items():
            if key in self.texts or len(self.texts) < most.texts:
                self.texts[key] = text

    # --- agents that report ---------------------------------------------------------------------

    def silent_after(self) -> float:
        """Return after how many seconds without a report a source is silent."""
        return max(self.settings.silent_s, 3 * self.period_s)

    def recent(self, now: float) -> list[NodeReport]:
        """Return the newest reports of sources that are not silent."""
        limit = self.silent_after()
        return [s.report for s in self.by_name.values() if now - s.arrived <= limit]

    def agents(self, now: float) -> list[AgentHealth]:
        """Return all agents; of a node in several sources, the one that reported last."""
        found: dict[str, AgentHealth] = {}
        limit = self.silent_after()
        for name, source in self.by_name.items():
            waited = now - source.arrived
            for node, state in zip(source.report.nodes, source.report.agents, strict=True):
                age = waited + state.age_s
                if node in found and found[node].age_s <= age:
                    continue
                found[node] = AgentHealth(
                    node=node,
                    source=name,
                    age_s=age,
                    missed=max(int(age / self.period_s) - 1, 0),
                    silent=age > limit,
                    state=state,
                )
        return list(found.values())

    def addresses(self) -> Mapping[str, str]:
        """Return where nodes answer probes.

        Where some nodes have addresses that others reach, a loopback address is none: at it, others
        would find themselves.
        """
        return self._outside or self._addresses

    def running(self, nodes: Collection[str], fenced: int = 0) -> set[str]:
        """Return those of `nodes` on which ranks ran in their last report.

        Ranks of a generation from 1 to before `fenced` do not count.
        """
        out: set[str] = set()
        for source in self.by_name.values():
            here = source.report.nodes
            if not nodes or out.issuperset(here):
                continue
            rows = source.report.table("ranks")
            here_on = (rows["generation"] == 0) | (rows["generation"] >= fenced)
            alive = np.unique(rows["node"][(rows["alive"] != 0) & here_on])
            out |= {here[i] for i in alive.tolist()} & set(nodes)
        return out


def _loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost:", "[::1]:"))


def _count(report: NodeReport) -> int:
    return len(report.ranks) // REPORT_RANK.itemsize


def old(source: str, taken: int, number: int) -> ConflictError:
    """Return the error of a message that is not newer than what was taken."""
    return ConflictError(
        "this report, or a newer one of its source, was already received",
        where=source,
        wanted=f"a number above {taken}",
        found=str(number),
    )
