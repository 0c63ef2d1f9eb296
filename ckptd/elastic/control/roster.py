"""Nodes as the controller knows them: seen, silent, faulty, left out for how long, usable slots.

In it: how the time that a faulty node is left out doubles, and how often at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptd.elastic.linkspeed import paces
from ckptd.elastic.membership import Record
from ckptd.elastic.messages import NodeUp
from ckptd.elastic.placement import Coordinate, Domains, NodeSlot

MOST_DOUBLED = 6


@dataclass
class Node:
    """One node.

    Attributes
    ----------
    name, life, slots, sessions, host, sick, domains
        As it said; see `ckptd.elastic.messages.NodeUp`. Sessions as when workers last ran on it.
    seen
        When it last reported; of a member, at least when the controller began.
    stopped_at
        When its launcher was last known to be stopped, and so to be alive.
    came
        Since when it is there.
    up
        Whether it has not said goodbye, nor been given up.
    fenced
        No worker of this or an earlier generation runs on it.
    running
        The generation whose workers run on it, as far as is known; 0 if none do.
    out_until
        Not used before this moment; infinite until an operator orders otherwise.
    faults
        When it was at fault.
    outs, out_at
        How often it was left out because of them, and when last.
    out_why
        Why it was left out last, for people.
    leaving
        The life that will be taken away: not used any more.
    dismissed
        The life that is being replaced by another one.
    asked
        The life for which another one was asked for.
    stuck_at
        Since when it counts as gone because it does not fence; its lease is not renewed.
    speeds
        Bytes per second of its links, as measured and of its cards; 0 is unknown.
    idle_since
        Since when it says that it runs nothing of a generation that it has run.
    """

    name: str
    life: str = ""
    slots: int = 0
    sessions: bool = False
    host: str = ""
    seen: float = -math.inf
    stopped_at: float = -math.inf
    came: float = -math.inf
    up: bool = False
    fenced: int = 0
    running: int = 0
    out_until: float = -math.inf
    faults: list[float] = field(default_factory=list)
    outs: int = 0
    out_at: float = -math.inf
    out_why: str = ""
    leaving: str | None = None
    dismissed: str | None = None
    asked: str | None = None
    stuck_at: float | None = None
    idle_since: float | None = None
    sick: tuple[str, ...] = ()
    domains: Domains = ()
    speeds: tuple[int, int] = (0, 0)

    def usable(self, now: float, *, all_up: bool = False) -> bool:
        """Return whether it may run ranks at this moment; see `Roster.slots`."""
        if not self.up or self.stuck_at is not None or self.leaving == self.life:
            return False
        return self.out_until <= now or (all_up and self.out_until < math.inf)

    def leased(self) -> float:
        """Return when its workers' lease was renewed last."""
        return self.seen if self.stuck_at is None else self.stuck_at


class Roster:
    """All nodes that ever reported, by name."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def __getitem__(self, name: str) -> Node:
        return self._nodes.setdefault(name, Node(name))

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def excuse(self, seconds: float, now: float) -> None:
        """Leave out of every silence the time in which the controller did not listen."""
        for node in self:
            node.seen = max(node.seen, min(node.seen + seconds, now))
            if node.idle_since is not None:
                node.idle_since = min(node.idle_since + seconds, now)

    def hear(self, said: NodeUp, now: float) -> bool:
        """Note that a node is there; return whether it is another process than before."""
        node = self[said.node]
        other = node.life not in ("", said.life)
        node.life, node.slots, node.host, node.seen = said.life, said.slots, said.host, now
        node.sick, node.domains = said.sick, said.domains
        node.speeds = said.link_bytes_per_s, said.card_bytes_per_s
        if other or not node.up:
            node.came = now
        node.up = node.dismissed != said.life
        node.fenced = said.fenced if other else max(node.fenced, said.fenced)
        node.running = said.running
        if other:
            node.sessions, node.stuck_at, node.dismissed = False, None, None
        if said.running:
            node.sessions = said.sessions
        return other

    def forget(self, name: str) -> None:
        """Know no more of a node."""
        del self._nodes[name]

    def up(self) -> tuple[str, ...]:
        """Return the names of nodes that are there, sorted."""
        return tuple(sorted(n.name for n in self if n.up))

    def usable_slots(self, now: float) -> int:
        """Return how many ranks the usable nodes can run."""
        return sum(n.slots for n in self if n.usable(now))

    def recent(self, name: str, now: float, window_s: float) -> int:
        """Return how many faults of the last so many seconds are counted against a node."""
        return sum(now - at < window_s for at in self[name].faults)

    def blame(self, name: str, now: float, *, window_s: float, most: int, out_s: float) -> bool:
        """Count a fault; return whether the node is left out from now on because of it."""
        node = self[name]
        node.faults = [at for at in node.faults if now - at < window_s] + [now]
        if len(node.faults) < most or node.out_until > now:
            return False
        # A node that comes back and is at fault again stays away longer each time.
        node.out_until = now + out_s * 2 ** min(node.outs, MOST_DOUBLED)
        node.outs, node.out_at = node.outs + 1, now
        return True

    def slots(
        self,
        now: float,
        last: Record | None,
        *,
        all_up: bool = False,
        clean_s: float = -math.inf,
    ) -> list[NodeSlot]:
        """Return the slots of usable nodes, with what they held in the last generation.

        Parameters
        ----------
        all_up
            Those that are left out for a time as well; never those that an operator ordered out.
        clean_s
            None that was left out because of its faults in the last so many seconds.
        """
        members = last.members if last is not None else ()
        held = {(m.node, m.slot): Coordinate(m.pp, m.dp, m.tp) for m in members}
        nodes = [
            node
            for node in sorted(self, key=lambda n: n.name)
            if node.usable(now, all_up=all_up) and now - node.out_at >= clean_s
        ]
        return [
            NodeSlot(node.name, number, held.get((node.name, number)), node.domains, pace)
            for node, pace in zip(nodes, paces(n.speeds for n in nodes), strict=True)
            for number in range(node.slots)
        ]
