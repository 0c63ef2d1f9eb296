"""Near tiers of a checkpointer: when they are due, agents of all nodes, where a load looks.

In it: ``CKPTD_DOMAIN``; how long another node's agent is tried.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckptd.base.grouping import by_key
from ckptd.base.net.handed import ranks_key
from ckptd.base.net.signing import SECRET_VARIABLE, derived_key
from ckptd.base.runtime.agentlink import AgentPlace
from ckptd.base.runtime.announcements import Announcements
from ckptd.base.runtime.host import host_id
from ckptd.base.runtime.ranks import Board, posted
from ckptd.base.torch.ranks import Agreement, bind_address, host_members
from ckptd.checkpoint.load.union import UnionSource
from ckptd.checkpoint.root.opening import served_spec
from ckptd.checkpoint.root.policy import Every
from ckptd.checkpoint.save.client import AgentSpec, WriterClient
from ckptd.checkpoint.save.messages import Neighbours, Partner
from ckptd.checkpoint.save.peers import (
    MOST_TOLD,
    Distant,
    KnownNode,
    followers,
    former_nodes,
    known_node,
    older,
    partners,
)
from ckptd.checkpoint.save.tiers import LINGER_S, NEAR, Local, Tier, tier_specs
from ckptd.checkpoint.torch.schedule import StepTimes
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, UsageError

if TYPE_CHECKING:
    from ckptd.store import StoreSpec
    from ckptd.store.base import Store


class TierRules:
    """Evaluates the rules of near tiers.

    Rules by step are a function of the step. Those by clock are decided by rank 0, which announces
    for a coming call which tiers are due then.

    Parameters
    ----------
    tiers
        One of each kind at most.
    """

    def __init__(self, tiers: Sequence[Tier], board: Board) -> None:
        self._rules = {
            t.name: None if t.every is None else Every.of(t.every)
            for t in sorted(tiers, key=lambda t: NEAR.index(t.name))
        }
        self._announcements = Announcements(board, "near-due")
        self._steps = StepTimes()
        self._last: dict[str, int] = {}
        self._since = dict.fromkeys(self._rules, time.monotonic())

    def due(self, step: int, root: bool, *, forced: bool) -> tuple[str, ...]:
        """Return the near tiers that the save of `step` goes to; every rank asks at each call.

        Parameters
        ----------
        root
            Whether the root's rule says that the save is due: tiers without a rule follow it.
        forced
            All are due.
        """
        by_clock = self._due_by_clock()
        return tuple(
            name
            for name, rule in self._rules.items()
            if forced
            or (root if rule is None else name in by_clock or rule.due(step, self._last.get(name)))
        )

    def saved(self, step: int, names: Collection[str]) -> None:
        """Note that a save began, or that `step` was loaded: time and steps start over."""
        for name in names:
            self._last[name] = step
            self._since[name] = time.monotonic()

    def loaded(self, step: int) -> None:
        """Note that the state is that of a checkpoint."""
        self.saved(step, tuple(self._rules))

    def _due_by_clock(self) -> set[str]:
        clocked = {n: rule for n, rule in self._rules.items() if rule and rule.by_clock}
        if not clocked:
            return set()
        self._steps.call(time.monotonic(), False)
        word = self._announcements.word(partial(self._decide, clocked), self._steps.usual_s)
        self._steps.leave(time.monotonic())
        return set(word.split("+")) - {""}

    def _decide(self, clocked: Mapping[str, Every], announced: Collection[str]) -> str:
        """On rank 0: what to announce; a tier that is announced already not again."""
        waiting = {name for word in announced for name in word.split("+")}
        now = time.monotonic()
        late = [
            name
            for name, rule in clocked.items()
            if name not in waiting and rule.late(now - self._since[name])
        ]
        return "+".join(late)


_log = logging.getLogger("ckptd")

_PATIENCE = {"connect_s": 1.5, "retry_s": 0.0}
"""Options for nodes that may be gone, in seconds: a lost packet may come again, and no more.

A restart waits for this where a node was lost: an agent that has ended refuses at once.
"""


class _Node(msgspec.Struct, frozen=True):
    """A node's agent, as the other nodes need to know it."""

    name: str
    domain: str
    memory: str
    local: str
    secret: str
    """Empty where the key is derived from the job's secret, which all ranks have."""


_nodes = json_decoder(_Node)


_Nodes = dict[str, _Node]
_AGAIN = "agents-again"
"""Counts agents that came in place of dead ones; below it are their nodes' names."""


class _Report(msgspec.Struct, frozen=True):
    """A rank's report: its node, and the nodes that this node's agent knew."""

    node: _Node
    former: tuple[KnownNode, ...] = ()


_reports = json_decoder(_Report)


class _Table(msgspec.Struct, frozen=True):
    """Table that all ranks get: the nodes that are there, and those that were."""

    nodes: _Nodes
    former: list[KnownNode]


_tables = json_decoder(_Table)


class Nearby:
    """Knows the agents of a job.

    Parameters
    ----------
    tiers
        The near tiers.
    root
        URL of the root: with ``CKPTD_JOB`` unset it names the job, so that the next life finds the
        agents of this one.

    Attributes
    ----------
    rules
        Which saves go where.
    agent
        For the client of the writing process.
    """

    def __init__(self, tiers: Sequence[Tier], root: str, agreement: Agreement) -> None:
        self.rules = TierRules(tiers, agreement.board)
        self._agreement = agreement
        self._node = host_id()
        specs = tier_specs(tiers)
        self._folder = next((s.store for s in specs if s.store is not None), None)
        members = host_members(agreement)
        alone = len(members) == agreement.board.world
        self._reports_former = members[0] == agreement.board.rank
        self._place = AgentPlace(os.environ.get("CKPTD_JOB") or root, self._node)
        secret = self._secret = ranks_key()
        agent_ttl_s = max(
            (t.agent_ttl_s for t in tiers if not isinstance(t, Local)), default=LINGER_S
        )
        bind, key = ("", "") if alone else (bind_address(), self._key_of(self._node))
        self.agent = AgentSpec(self._place, specs, agent_ttl_s, bind, key)
        if not alone and secret is None and self._reports_former and agreement.board.rank == 0:
            _log.warning(
                "%s is not set: any process that reaches the port of torch's store can read the "
                "key to the memory of these nodes; set it to the same value on all nodes",
                SECRET_VARIABLE,
            )
        self._nodes: _Nodes = {}
        self._former: list[KnownNode] = []
        self._gone: set[str] = set()
        self._replaced_read = 0
        self._here = ""
        self._exchanged: tuple[WriterClient, int] | None = None
        self._partner: _Node | None = None
        self._sources: list[UnionSource] = []

    # -- the other nodes ---------------------------------------------------------------------------

    def exchange(self, client: WriterClient) -> None:
        """Exchange the addresses of agents with the other nodes, and send this one's its peer.

        Once a client. The first time is a round of all ranks; a client that came later, because its
        agent had died, posts its address on the board. One rank a node reports besides which nodes
        its agent knew in the life before: those may be left out of this one and live.

        Raises
        ------
        ProcessError
            The node's agent does not answer.
        """
        life = client.life
        if self._exchanged == (client, life):
            if self._refresh(client):
                client.set_peers(self._neighbours())
            return
        again = bool(self._nodes)
        if again:
            own = self._report(client).node
        else:
            # The report of a rank that has no agent is not waited for.
            report = self._agreement.on_every_rank(lambda: self._report(client))
            raw = self._agreement.all_reports("agents", msgspec.json.encode(report), _tabulate)
            table = posted(_tables, raw)
            own, self._nodes, self._former = report.node, table.nodes, table.former
        self._agreement.board.set(self._key(own.name), msgspec.json.encode(own))
        if again:  # so that not every node's is read again
            board = self._agreement.board
            board.set(f"{_AGAIN}/{board.add(_AGAIN)}", own.name.encode())
        self._nodes[own.name] = own
        self._exchanged, self._partner = (client, life), None
        if self._chosen() is None:
            # The agent may still have that of an earlier generation, and would try it at each save.
            client.set_peers(Partner("", ""))
        self._refresh(client)
        client.set_peers(self._neighbours())

    def _read_replaced(self) -> None:
        """Read the addresses of agents that came in the place of dead ones."""
        board = self._agreement.board
        for number in range(self._replaced_read + 1, board.count(_AGAIN) + 1):
            name = board.peek(f"{_AGAIN}/{number}")
            if name is None:  # it is just being announced
                return
            if (raw := board.peek(self._key(name.decode()))) is not None:
                self._nodes[name.decode()] = posted(_nodes, raw)
            self._replaced_read = number

    def _report(self, client: WriterClient) -> _Report:
        answer = client.answer()
        self._here = answer.here
        domain = os.environ.get("CKPTD_DOMAIN") or self._node
        node = _Node(self._node, domain, answer.memory, answer.local, answer.secret)
        return _Report(node, answer.neighbours if self._reports_former else ())

    def _neighbours(self) -> Neighbours:
        """Return what this node's agent is to remember for the next life.

        Nodes that this life left out stay known, for some lives: it may end before it has a
        snapshot of its own, and theirs are wanted again.
        """
        former = by_key((aged.name, aged) for aged in filter(None, map(older, self._former)))
        known: list[KnownNode] = []
        for name in followers({*self._nodes, *former}, self._node):
            if (node := self._nodes.get(name)) is None:
                known += former[name]
            elif found := known_node(name, node.memory, node.local, node.secret):
                known.append(found)
        return Neighbours(tuple(known[:MOST_TOLD]))

    def _chosen(self) -> str | None:
        """Return which node is to keep this one's snapshots; None if there is no other."""
        return partners({n.name: n.domain for n in self._nodes.values()}).get(self._node)

    def _key(self, node: str) -> str:
        return f"agents/{node}"

    def _refresh(self, client: WriterClient) -> bool:
        """Send the agent its peer, if that is another one than it was; return whether it is."""
        chosen = self._chosen()
        if chosen is None:
            return False
        raw = self._agreement.board.peek(self._key(chosen))
        node = self._nodes[chosen] if raw is None else posted(_nodes, raw)
        if node == self._partner or not node.memory:
            return False
        self._nodes[chosen] = self._partner = node
        client.set_peers(Partner(node.memory, self._key_of(node.name, node.secret)))
        return True

    def _key_of(self, node: str, drawn: str = "") -> str:
        """Return what opens the agent of a node: what it drew, or what every rank can derive."""
        if drawn or self._secret is None:
            return drawn
        return derived_key(self._secret, "agent", node).hex()

    # -- what they have ----------------------------------------------------------------------------

    def sources(self) -> list[UnionSource]:
        """Return what may hold snapshots, nearest first: this node, the others, former ones.

        Other nodes are connected to when something is wanted of them. Former ones are not waited
        for long, and those that could not be reached have nothing.
        """
        self.close()
        if self._nodes:
            self._read_replaced()
        for tier, spec in (("memory", served_spec(self._here)), ("local", self._folder)):
            if spec is not None:
                try:
                    store = spec.open()
                    _ = store.capabilities  # asks an agent, which may have died by now
                    self._sources.append(UnionSource(store, tier, f"{self._node} {tier}"))
                except CkptdError as error:
                    _log.warning("this node's snapshots cannot be read: %s", error.message)
        others = [n for n in self._nodes.values() if n.name != self._node]
        for node in others:
            self._add("peer", node, "memory", node.memory)
        for node in others:
            self._add("local", node, "local", node.local)
        for known in self._former:
            self._add_former("peer", known, "memory", known.memory)
        for known in self._former:
            self._add_former("local", known, "local", known.local)
        return list(self._sources)

    def _add(self, tier: str, node: _Node, what: str, url: str) -> None:
        spec = served_spec(url, self._key_of(node.name, node.secret))
        if spec is not None:
            self._sources.append(UnionSource(Distant(url, spec.open), tier, f"{node.name} {what}"))

    def _add_former(self, tier: str, node: KnownNode, what: str, url: str) -> None:
        key = self._key_of(node.name, node.secret)
        hasty, spec = served_spec(url, key, **_PATIENCE), served_spec(url, key)
        if hasty is None or spec is None:
            return
        # One name may have several addresses, and ranks name a source to one another.
        name = f"{node.name} {what} at {url}"
        keys: frozenset[str] | None = frozenset() if url in self._gone else None
        store = Distant(url, partial(self._reached, hasty, spec))
        self._sources.append(UnionSource(store, tier, name, keys, former=True))

    def _reached(self, hasty: StoreSpec, spec: StoreSpec) -> Store:
        """Open what a former node serves; one that does not answer is tried once in this life.

        It lives, once it has answered: reads of it wait as for any other node, since many may read
        at a time. Rank 0 has tried it for the others.
        """
        if self._agreement.board.rank == 0:
            try:
                with closing(hasty.open()) as store:
                    _ = store.capabilities
            except CkptdError:
                self._gone.add(spec.url)
                raise
        return spec.open()

    def close(self) -> None:
        """Close the connections that `sources` made. Idempotent."""
        for source in self._sources:
            source.store.close()
        self._sources.clear()


def near_tiers(tiers: Sequence[Tier], store: Store, agreement: Agreement) -> Nearby:
    """Return the near tiers of a checkpointer whose root is `store`.

    Raises
    ------
    UsageError
        No other process can open the root.
    """
    if not store.capabilities.shared:
        raise UsageError(
            "a root in this process's memory has no near tiers",
            where=store.url,
            wanted="a root that another process can open",
        )
    return Nearby(tiers, store.url, agreement)


def _tabulate(raw: list[bytes]) -> bytes:
    reports = [_reports.decode(each) for each in raw]
    nodes = {report.node.name: report.node for report in reports}
    former = former_nodes(nodes, (known for report in reports for known in report.former))
    return msgspec.json.encode(_Table(nodes, former))
