"""Check before a job (``doctor --cluster``): coordinator and nodes, their messages and deadlines.

In it: how long nodes are awaited, retries, confirmation of slow links; what is said of nodes that
did not come.

Everything between nodes is signed with the job's secret, and every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ckptd.base.net.address import is_loopback
from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.door import Door
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.linkspeed import keep_measured
from ckptd.errors import CkptdError, DeadlineError, TransientStoreError
from ckptd.monitor import preflight
from ckptd.monitor.agent.probes import MOST_PROBE_BYTES, Answerer, probe_pair
from ckptd.monitor.agent.selftest import self_test
from ckptd.monitor.links import Effect

# --- the node's side ------------------------------------------------------------------------------


PURPOSE = "preflight"
"""Of the connections to a coordinator, see `ckptd.base.net.roles.DOORS`."""
ORDER_S = 30.0
"""For one order to be done, in seconds."""
_RETRY_S = 0.2
_LATEST_S = 253_402_300_799.0
"""9999-12-31, which no clock is after."""
_CONNECT_S = 2.0
_GREETING_S = 10.0


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what coordinator and nodes say to each other."""


class NodeHello(_Message, frozen=True, tag="hello"):
    """Node, first of all: its name, its rank (-1: none was given), where it answers probes."""

    name: str
    rank: int
    host: str
    port: int


class Test(_Message, frozen=True, tag="test"):
    """Coordinator: test yourself, waiting so many seconds for your turn. Answer: `Tested`."""

    turn_s: float


class ReadClock(_Message, frozen=True, tag="time"):
    """Coordinator: what time is it? Answer: `ClockReading`."""


class PairOrder(_Message, frozen=True, tag="probe"):
    """Coordinator: measure the links to the node `to`. Answer: `Probed`."""

    source: int
    to: int
    host: str
    port: int
    size: int


class PreflightOutcome(_Message, frozen=True, tag="outcome"):
    """Coordinator, last of all: what came of it, and the rate of this node's best link."""

    healthy: bool
    findings: tuple[preflight.PreflightFinding, ...]
    bytes_per_s: float = 0.0


class Tested(_Message, frozen=True, tag="tested"):
    """Node: what it found about itself."""

    machine: preflight.MachineTest


class ClockReading(_Message, frozen=True, tag="moment"):
    """Node: seconds since 1970."""

    unix_s: Annotated[float, Meta(ge=0, le=_LATEST_S)]


class Probed(_Message, frozen=True, tag="probed"):
    """Node: what it measured."""

    probe: preflight.PairProbe


_ORDER = msgpack_decoder(Test | ReadClock | PairOrder | PreflightOutcome)


@dataclass(frozen=True, slots=True)
class PreflightNode:
    """Identity of a node.

    Attributes
    ----------
    name
        Its name; a node that never comes is missed by it.
    rank
        Its number among the nodes, -1 where it was given none.
    folder
        Where it writes for a moment to test its disk.
    """

    name: str
    rank: int
    folder: Path


def take_part(
    coordinator: tuple[str, int],
    secret: bytes,
    member: PreflightNode,
    join_s: float,
    patience_s: float,
) -> PreflightOutcome:
    """Do what the coordinator orders until it says what came of it.

    Parameters
    ----------
    coordinator
        Host and port.
    secret
        The job's, as bytes.
    member
        This node.
    join_s
        For the coordinator to be there, in seconds.
    patience_s
        For its next order, in seconds: others may come late.

    Raises
    ------
    DeadlineError
        The coordinator cannot be reached.
    StoreError
        Kind ``permission``: it has another secret.
    TransientStoreError
        It ended in the middle.
    """
    wire, own_host = _join(coordinator, secret, join_s)
    try:
        host = own_host
        if is_loopback(host) and not is_loopback(coordinator[0]):
            host = "::" if ":" in host else "0.0.0.0"  # the coordinator sends others the address
        with Answerer(host, secret) as answerer:
            wire.send(NodeHello(member.name, member.rank, own_host, answerer.port))
            while True:
                order, _ = wire.receive(_ORDER, patience_s)
                if isinstance(order, PreflightOutcome):
                    keep_measured(order.bytes_per_s, member.folder)
                    return order
                wire.send(_done(order, member, secret))
    finally:
        wire.release()


def _done(order: Test | ReadClock | PairOrder, member: PreflightNode, secret: bytes) -> _Message:
    match order:
        case Test():
            return Tested(self_test(member.folder, order.turn_s))
        case ReadClock():
            return ClockReading(time.time())
        case PairOrder():
            size = min(order.size, MOST_PROBE_BYTES)
            address = (order.host, order.port)
            return Probed(probe_pair(order.source, order.to, address, secret, size))


def _join(coordinator: tuple[str, int], secret: bytes, join_s: float) -> tuple[Connection, str]:
    """Return the connection to the coordinator, and this node's address on it."""
    peer = f"{coordinator[0]}:{coordinator[1]}"
    end = time.monotonic() + join_s
    while True:
        try:
            sock = socket.create_connection(coordinator, timeout=_CONNECT_S)
            host = str(sock.getsockname()[0])
            wire = Connection(sock, peer, ORDER_S)
            with _released_on_error(wire):
                greet_server(wire, secret, PURPOSE, role="agent", wait_s=_GREETING_S)
            return wire, host
        except (OSError, TransientStoreError) as error:
            if time.monotonic() > end:
                raise DeadlineError(
                    "the coordinator cannot be reached",
                    where=peer,
                    wanted=f"a connection within {join_s:.0f} s",
                    found=error,
                    hint="start the same command on the node with that address, or open the port",
                ) from error
        time.sleep(_RETRY_S)


@contextlib.contextmanager
def _released_on_error(wire: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        wire.release()
        raise


# --- the coordinator's side -----------------------------------------------------------------------


_HELLO = msgpack_decoder(NodeHello)
_TESTED = msgpack_decoder(Tested)
_MOMENT = msgpack_decoder(ClockReading)
_PROBED = msgpack_decoder(Probed)
_GREETED_S = 5.0
_LOOK_S = 0.05
_MOST_HELLOS = 4096
_TURN_S = 15.0
_SKEWS = 3
_GIVE_UP = 3
"""Failed peers of a node that reaches none, after which no further peer probes it."""
_AGAIN = 16
_CONFIRMED_BY = 2
"""Probes of a pair, some time apart."""
_RETESTS = 3
_LATE_S = 2.0
"""For an order to be done once the time is over."""
_MOST_SHOWN = 200
_RESERVE = 0.25
"""Share of the time that is kept for confirming."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan:
    """Expected nodes of a preflight, and its limits.

    Attributes
    ----------
    nodes
        How many nodes.
    names
        Their names; empty where only their number is known.
    wait_s
        For all to come, in seconds.
    limit_s
        For tests and probes after that, in seconds.
    probe_bytes
        Bytes of a probe.
    seed
        Seed of the order of probes.
    """

    nodes: int
    names: tuple[str, ...] = ()
    wait_s: float = 30.0
    limit_s: float = 60.0
    probe_bytes: int = 4 << 20
    seed: int = 0


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and rate of a usual link, by the probes.

    Attributes
    ----------
    pairs, of
        Pairs of nodes that were probed, and all that there are.
    latency_s
        Median time of a small message and its answer, in seconds; null without probes.
    bytes_per_s
        Median rate of a probe's bytes; null without probes.
    """

    pairs: int
    of: int
    latency_s: float | None
    bytes_per_s: float | None


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check.

    Attributes
    ----------
    nodes
        Names of the nodes that came.
    findings
        What is wrong, failures first.
    machines
        Self-tests, by name.
    skews_s
        How many seconds each clock is ahead of the coordinator's, by name.
    links
        What probes show.
    probes
        All of them; indices count `nodes`.
    seconds
        Time of each stage: ``gather``, ``test``, ``probe``, ``confirm``.
    """

    nodes: tuple[str, ...]
    findings: tuple[preflight.PreflightFinding, ...]
    machines: dict[str, preflight.MachineTest]
    skews_s: dict[str, float]
    links: LinkSummary
    probes: tuple[preflight.PairProbe, ...]
    seconds: dict[str, float]

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(f.status != "fail" for f in self.findings)


@dataclass(slots=True)
class _Connected:
    wire: Connection
    hello: NodeHello
    here: str
    """The coordinator's address on this connection."""
    name: str = ""
    lost: str = ""


@dataclass(slots=True)
class _Gathered:
    nodes: list[_Connected] = field(default_factory=list)
    refused: int = 0


def coordinate(
    listener: socket.socket, secret: bytes, plan: PreflightPlan, tell: Tell
) -> Preflight:
    """Run a check over the nodes that come to `listener`, and send them the outcome.

    Parameters
    ----------
    listener
        Listens, until all have come; then it is closed.
    secret
        The job's, as bytes.
    plan
        What is expected.
    tell
        Takes a line for people at each stage.
    """
    started = time.monotonic()
    gathered = _gather(listener, secret, plan)
    try:
        check = _Check(gathered, plan, tell, time.monotonic() - started)
        found = check.run()
        usual = preflight.rates(found.probes, plan.probe_bytes)
        for number, node in check.live():
            outcome = PreflightOutcome(
                found.healthy, found.findings[:_MOST_SHOWN], usual.get(number, 0.0)
            )
            with contextlib.suppress(CkptdError):  # a node that is gone needs no answer
                node.wire.send(outcome)
        return found
    finally:
        for node in gathered.nodes:
            node.wire.release()


# -- gathering -------------------------------------------------------------------------------------


def _gather(listener: socket.socket, secret: bytes, plan: PreflightPlan) -> _Gathered:
    """Accept nodes until all are there or the time is over."""
    found = _Gathered()
    end = time.monotonic() + plan.wait_s
    door = Door(
        listener,
        lambda: secret,
        PURPOSE,
        lambda wire: _hear(wire, found),
        name="a node",
        clients=_MOST_HELLOS,
        greeting_s=_GREETED_S,
        send_s=ORDER_S,
    )
    while not _complete(found.nodes, plan) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    door.close(2 * _GREETED_S, cut=False)
    found.refused = door.counts().refused
    _name(found)
    return found


def _name(found: _Gathered) -> None:
    """Put nodes in order, name those apart that say the same, and give each an address."""
    found.nodes.sort(key=lambda n: (n.hello.rank < 0, n.hello.rank, n.hello.name))
    # The coordinator's own node may know itself by a loopback address only.
    outside = next((n.here for n in found.nodes if not is_loopback(n.here)), None)
    seen: dict[str, int] = {}
    for node in found.nodes:
        number = seen[node.hello.name] = seen.get(node.hello.name, 0) + 1
        node.name = node.hello.name if number == 1 else f"{node.hello.name}#{number}"
        if outside is not None and is_loopback(node.hello.host):
            node.hello = msgspec.structs.replace(node.hello, host=outside)


def _complete(nodes: Sequence[_Connected], plan: PreflightPlan) -> bool:
    if plan.names:
        return set(plan.names) <= {n.hello.name for n in tuple(nodes)}
    return len(nodes) >= plan.nodes


def _hear(wire: Connection, found: _Gathered) -> bool:
    hello, _ = wire.receive(_HELLO, _GREETED_S)
    found.nodes.append(_Connected(wire, hello, wire.here))
    return True


# -- the check -------------------------------------------------------------------------------------


class _Check:
    """One check: orders go to all nodes at once, answers are taken one after another."""

    def __init__(
        self, gathered: _Gathered, plan: PreflightPlan, tell: Tell, gather_s: float
    ) -> None:
        self._nodes = gathered.nodes
        self._refused = gathered.refused
        self._plan = plan
        self._tell = tell
        self._names = [node.name for node in self._nodes]
        self._end = time.monotonic() + plan.limit_s
        self._seconds = {"gather": gather_s}
        self._probes: list[preflight.PairProbe] = []

    def live(self) -> list[tuple[int, _Connected]]:
        """Return the nodes that still answer, with their numbers."""
        return [(number, node) for number, node in enumerate(self._nodes) if not node.lost]

    def run(self) -> Preflight:
        """Run all stages."""
        tell, seconds = self._tell, self._seconds
        tell(f"{len(self._nodes)} of {self._plan.nodes} nodes came in {seconds['gather']:.1f} s")
        with self._timed("test"):
            machines = self._test()
            skews = self._skews()
        tell(f"self-tests: {len(machines)} nodes in {seconds['test']:.1f} s")
        with self._timed("probe"):
            self._probe_all()
        tell(f"links: {len(self._probes)} pairs in {seconds['probe']:.1f} s")
        with self._timed("confirm"):
            findings = [
                *self._reach(),
                *self._links(),
                *preflight.machine_findings(self._names, machines, skews),
                *self._slow(machines),
            ]
        findings = [*self._absent(), *self._lost(), *findings]
        return Preflight(
            nodes=tuple(self._names),
            findings=tuple(sorted(findings, key=lambda f: f.status != "fail")),
            machines={self._names[k]: m for k, m in machines.items()},
            skews_s={self._names[k]: s for k, s in skews.items()},
            links=self._summary(),
            probes=tuple(self._probes),
            seconds=seconds,
        )

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Any:
        started = time.monotonic()
        yield
        self._seconds[stage] = time.monotonic() - started

    def _order(
        self, orders: Mapping[int, msgspec.Struct], kind: Any, wait_s: float = ORDER_S
    ) -> dict[int, Any]:
        """Give orders to nodes and return the answers of those that answer."""
        asked = []
        for number, order in orders.items():
            if not self._nodes[number].lost and self._try(number, order):
                asked.append(number)
        # Nodes that hang must not add up beyond the limit.
        end = min(time.monotonic() + wait_s, max(self._end, time.monotonic() + _LATE_S))
        answers = {}
        for number in asked:
            node = self._nodes[number]
            try:
                left = max(end - time.monotonic(), 0.1)
                answers[number], _ = node.wire.receive(kind, left)
            except CkptdError as error:
                node.lost = error.message
        return answers

    def _try(self, number: int, order: msgspec.Struct) -> bool:
        node = self._nodes[number]
        try:
            node.wire.send(order)
        except CkptdError as error:
            node.lost = error.message
        return not node.lost

    # -- machines ------------------------------------------------------------------------------

    def _test(self) -> dict[int, preflight.MachineTest]:
        orders = {k: Test(_TURN_S) for k in range(len(self._nodes))}
        answers = self._order(orders, _TESTED, ORDER_S + _TURN_S)
        return {k: answer.machine for k, answer in answers.items()}

    def _skews(self) -> dict[int, float]:
        """Return how many seconds each clock is ahead, of the quickest of some answers."""
        skews = {}
        for number in range(len(self._nodes)):
            best = float("inf")
            for _ in range(_SKEWS):
                before, started = time.time(), time.monotonic()
                answer = self._order({number: ReadClock()}, _MOMENT).get(number)
                taken = time.monotonic() - started
                if answer is not None and taken < best:
                    best, skews[number] = taken, answer.unix_s - before - taken / 2
        return skews

    def _slow(self, machines: dict[int, preflight.MachineTest]) -> list[preflight.PreflightFinding]:
        """Test nodes that seem slow again, one after another while the rest is quiet."""
        for _ in range(_RETESTS):
            for number in itertools.islice(preflight.slow_machines(self._names, machines), _AGAIN):
                answer = self._order({number: Test(_TURN_S)}, _TESTED).get(number)
                if answer is not None:
                    machines[number] = _better(machines[number], answer.machine)
        return list(itertools.chain(*preflight.slow_machines(self._names, machines).values()))

    # -- links ---------------------------------------------------------------------------------

    def _probe_all(self) -> None:
        last = self._end - _RESERVE * self._plan.limit_s
        for pairs in preflight.rounds(len(self._nodes), self._plan.seed):
            if time.monotonic() > last:
                self._tell("the time ran out before all pairs were probed")
                return
            gone = self._unreachable()
            self._probes += self._probe([p for p in pairs if not gone & set(p)]).values()

    def _probe(
        self, pairs: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, int], preflight.PairProbe]:
        orders: dict[int, PairOrder] = {}
        for source, to in pairs:
            peer = self._nodes[to].hello
            if not self._nodes[to].lost:
                orders[source] = PairOrder(source, to, peer.host, peer.port, self._plan.probe_bytes)
        found = {}
        for source, answer in self._order(orders, _PROBED).items():
            to = orders[source].to  # nobody answers for others
            found[source, to] = msgspec.structs.replace(answer.probe, source=source, to=to)
        return found

    def _unreachable(self) -> set[int]:
        cut: dict[int, int] = {}
        reached: set[int] = set()
        for probe in self._probes:
            for node in (probe.source, probe.to):
                if probe.cut:
                    cut[node] = cut.get(node, 0) + 1
                else:
                    reached.add(node)
        return {node for node, count in cut.items() if count >= _GIVE_UP and node not in reached}

    def _islands(self) -> list[list[int]]:
        alive = [k for k, node in enumerate(self._nodes) if not node.lost]
        return preflight.islands(alive, self._probes)

    def _reach(self) -> list[preflight.PreflightFinding]:
        """Return what cannot be reached: nodes outside the largest island, then inside it."""
        main, *others = self._islands() or [[]]
        found = []
        for node in itertools.chain(*others):
            text = f"reaches none of the {len(main)} nodes that reach each other"
            found.append(preflight.failure("node", self._names[node], "reach", text))
        nodes, links = preflight.unreached(main, self._probes)
        for node, (cut, of) in nodes.items():
            text = f"does not reach {cut} of {of} nodes"
            found.append(preflight.failure("node", self._names[node], "reach", text))
        for probe in links:
            name = f"{self._names[probe.source]}>{self._names[probe.to]}"
            found.append(preflight.failure("link", name, "reach", f"cannot connect: {probe.error}"))
        return found

    def _links(self) -> list[preflight.PreflightFinding]:
        """Judge the probes, and probe what stands out again while the rest is quiet."""
        effects = preflight.link_effects(len(self._nodes), self._probes)
        found, confirmed = self._confirmed(effects)
        strays, _ = self._confirmed(preflight.stray_links(self._probes, confirmed))
        return found + strays

    def _confirmed(
        self, effects: Mapping[str, Sequence[Effect]]
    ) -> tuple[list[preflight.PreflightFinding], dict[str, list[Effect]]]:
        main = (self._islands() or [[]])[0]
        asked, controls = preflight.confirmations(effects, main, self._plan.seed)
        wanted = [*controls, *(p for c in asked for p in c.pairs)] if asked else []
        again: dict[tuple[int, int], preflight.PairProbe] = {}
        for pair in list(dict.fromkeys(wanted)) * _CONFIRMED_BY:
            if time.monotonic() < self._end:
                for key, probe in self._probe([pair]).items():
                    again[key] = preflight.better(again.get(key), probe)
        again = {pair: probe for pair, probe in again.items() if not probe.cut}
        found: list[preflight.PreflightFinding] = []
        confirmed: dict[str, list[Effect]] = {}
        by_effect = {id(c.effect): c for c in asked}
        for what, list_ in effects.items():
            for effect in list_:
                there, value, usual = preflight.confirm(
                    what, by_effect[id(effect)], again, controls
                )
                if there and not effect.echo:
                    figures, size = (value, usual), self._plan.probe_bytes
                    found.append(preflight.link_findings(self._names, what, effect, figures, size))
                    confirmed.setdefault(what, []).append(effect)
        return found, confirmed

    def _summary(self) -> LinkSummary:
        good = [p for p in self._probes if not p.cut]
        bulk = [s for p in good for s in (p.out_s, p.in_s)]
        nodes = len(self._nodes)
        return LinkSummary(
            pairs=len({frozenset((p.source, p.to)) for p in self._probes}),
            of=nodes * (nodes - 1) // 2,
            latency_s=float(np.median([p.latency_s for p in good])) if good else None,
            bytes_per_s=float(self._plan.probe_bytes / np.median(bulk)) if good else None,
        )

    # -- absent nodes --------------------------------------------------------------------------

    def _absent(self) -> list[preflight.PreflightFinding]:
        plan = self._plan
        text = f"did not connect within {plan.wait_s:.0f} s"
        if self._refused:
            text += f"; {self._refused} connections refused: wrong secret, or not of this job"
        came = [(node.hello.name, node.hello.rank) for node in self._nodes]
        return preflight.absent_findings(came, plan.nodes, plan.names, text)

    def _lost(self) -> list[preflight.PreflightFinding]:
        return [
            preflight.failure("node", node.name, "lost", f"stopped answering: {node.lost}")
            for node in self._nodes
            if node.lost
        ]


def _better(first: preflight.MachineTest, second: preflight.MachineTest) -> preflight.MachineTest:
    """Return the second test with the better figures of both."""
    return msgspec.structs.replace(
        second,
        wrong=first.wrong or second.wrong,
        compute_s=min(first.compute_s, second.compute_s),
        copy_bytes_per_s=max(first.copy_bytes_per_s, second.copy_bytes_per_s),
        disk_s=min(first.disk_s, second.disk_s),
    )
