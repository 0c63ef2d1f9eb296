"""``ckptd doctor --cluster``: options, port, places of nodes, prints of the check before a job.

In it: how long the coordinator is awaited.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ckptd.base.net.address import bound, is_loopback
from ckptd.base.net.signing import SECRET_VARIABLE, job_secret
from ckptd.base.runtime.agentlink import run_folder
from ckptd.cli.output import Document, Reply, note, print_table
from ckptd.errors import CkptdError, StoreError, UsageError, size_text
from ckptd.monitor.agent.preflight import (
    LinkSummary,
    Preflight,
    PreflightNode,
    PreflightPlan,
    coordinate,
    take_part,
)
from ckptd.monitor.agent.probes import MOST_PROBE_BYTES
from ckptd.monitor.preflight import MachineTest, PairProbe, PreflightFinding

PORT = 29449
"""Default port of the coordinator."""
_PATIENCE_S = 60.0
_JOIN_S = 60.0
_BACKLOG = 1024


class ClusterDocument(Document, frozen=True, kw_only=True, tag="doctor --cluster"):
    """The document that ``ckptd doctor --cluster --json`` prints.

    Nodes that do not coordinate leave out what only the coordinator knows.

    Attributes
    ----------
    role
        ``coordinator`` or ``node``.
    healthy
        Nothing failed.
    findings
        What is wrong: ``status`` (``fail``, ``warn``), ``target``, ``name``, ``what``,
        ``message``, ``value``, ``usual``.
    nodes
        Names of those that came.
    machines
        Self-tests by name: seconds, bytes.
    skews_s
        How many seconds each clock is ahead of the coordinator's.
    links
        Pairs probed, medians in seconds and bytes per second.
    probes
        All of them, in seconds; ``source`` and ``to`` count `nodes`; null: nothing came.
    seconds
        Time of each stage.
    """

    role: str
    healthy: bool
    findings: tuple[PreflightFinding, ...]
    nodes: tuple[str, ...] | None = None
    machines: dict[str, MachineTest] | None = None
    skews_s: dict[str, float] | None = None
    links: LinkSummary | None = None
    probes: tuple[PairProbe, ...] | None = None
    seconds: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Number of this process among the nodes, and where the coordinator listens."""

    count: int
    names: tuple[str, ...]
    rank: int
    host: str
    port: int


def doctor_cluster(
    nodes: str | None,
    node_rank: int | None,
    rendezvous: str | None,
    wait_s: float,
    limit_s: float,
    probe_bytes: int,
) -> Reply | int:
    """Run this node's part; the coordinator's reply has what came of it.

    The exit code is 0 if there are no problems, else 1: the same on every node.
    """
    if not 0 < probe_bytes <= MOST_PROBE_BYTES:
        raise UsageError(
            "invalid size of a probe", where="--probe-bytes", wanted=f"1 to {MOST_PROBE_BYTES}"
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # another process of this node does it
    place = _place(os.environ, nodes, node_rank, rendezvous)
    secret = _secret()
    member = PreflightNode(
        os.environ.get("CKPTD_NODE") or socket.gethostname(), place.rank, run_folder()
    )
    patience_s = wait_s + limit_s + _PATIENCE_S
    listener = _listener(place)
    if listener is None:
        outcome = take_part((place.host, place.port), secret, member, _JOIN_S, patience_s)
        of_node = ClusterDocument(role="node", healthy=outcome.healthy, findings=outcome.findings)
        return Reply(of_node, _show_node, 0 if outcome.healthy else 1)
    plan = PreflightPlan(
        nodes=place.count,
        names=place.names,
        wait_s=wait_s,
        limit_s=limit_s,
        probe_bytes=probe_bytes,
        seed=int.from_bytes(os.urandom(4), "little"),
    )
    with listener:
        found = _coordinate(listener, secret, plan, place, member, patience_s)
    fields = msgspec.structs.asdict(found)
    document = ClusterDocument(role="coordinator", healthy=found.healthy, **fields)
    return Reply(document, lambda _: _show(found, plan), 0 if found.healthy else 1)


def _coordinate(
    listener: socket.socket,
    secret: bytes,
    plan: PreflightPlan,
    place: _Place,
    member: PreflightNode,
    patience_s: float,
) -> Preflight:
    """Coordinate, and be one of the nodes in a thread beside it."""
    failed: list[CkptdError] = []

    def own_part() -> None:
        try:
            take_part((place.host, place.port), secret, member, plan.wait_s, patience_s)
        except CkptdError as error:
            failed.append(error)  # the coordinator misses this node and says so

    own = threading.Thread(target=own_part, name="own part", daemon=True)
    own.start()
    found = coordinate(listener, secret, plan, note)
    own.join(_PATIENCE_S)
    for error in failed:
        note(f"the coordinator's own part: {error}")
    return found


# -- nodes and addresses ---------------------------------------------------------------------------


def _place(
    env: Mapping[str, str], nodes: str | None, node_rank: int | None, rendezvous: str | None
) -> _Place:
    """Return this process's place, from options first, then from what launchers set."""
    names: tuple[str, ...] = ()
    count = _number(env, "GROUP_WORLD_SIZE", "SLURM_NNODES", "WORLD_SIZE")
    if nodes is not None and nodes.isdecimal():
        count = int(nodes)
    elif nodes is not None:
        names = tuple(name for name in nodes.split(",") if name)
        count = len(set(names))
    if not count:
        raise UsageError(
            "the number of nodes is unknown", where="--nodes", wanted="a number, or names"
        )
    rank = node_rank
    if rank is None:
        rank = _number(env, "GROUP_RANK", "SLURM_NODEID", "RANK")
    host, port = _address(rendezvous or env.get("MASTER_ADDR", ""))
    return _Place(count, names, -1 if rank is None else rank, host, port)


def _number(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if (text := env.get(name, "")).isdecimal():
            return int(text)
    return None


def _address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT``."""
    host, port = text, str(PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            "the address of the coordinator is unknown",
            where="--rendezvous",
            wanted="HOST:PORT, or MASTER_ADDR in the environment",
            found=text or None,
        )
    return host, int(port)


def _secret() -> bytes:
    """Return the key that nodes greet each other with."""
    if not os.environ.get(SECRET_VARIABLE):
        raise UsageError(
            "the nodes need a common secret",
            where=SECRET_VARIABLE,
            wanted="the same random text on all nodes, at least 16 characters",
            hint="openssl rand -hex 32",
        )
    return hmac.digest(job_secret("", run_folder()), b"ckptd preflight", "sha256")


def _listener(place: _Place) -> socket.socket | None:
    """Return the coordinator's listener; None if another node coordinates.

    Node 0 does. Where no node has a number, it is the node that has the address.
    """
    if place.rank > 0:
        return None
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        family, host = found[0][0], str(found[0][4][0])
        if place.rank < 0:
            bound(host, 0).close()  # only on the node that has this address
        if is_loopback(host) and not is_loopback(place.host):
            # Hosts often know their own name as a loopback address; others come from outside.
            host = "::" if family == socket.AF_INET6 else "0.0.0.0"
        listener = bound(host, place.port)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if place.rank < 0:
            return None
        raise StoreError(
            "the coordinator cannot listen",
            kind="listen",
            where=f"{place.host}:{place.port}",
            found=error.strerror or error,
            hint="--rendezvous HOST:PORT with an address of node 0 and a free port",
        ) from error


# -- showing ---------------------------------------------------------------------------------------


def _show_node(document: ClusterDocument) -> None:
    failed = sum(f.status == "fail" for f in document.findings)
    print("no problems found" if document.healthy else f"{failed} suspects: see the coordinator")


def _show(found: Preflight, plan: PreflightPlan) -> None:
    links = found.links
    print(f"nodes    {len(found.nodes)} of {plan.nodes}")
    if links.latency_s is not None and links.bytes_per_s is not None:
        print(
            f"links    {links.pairs} of {links.of} pairs, median {links.latency_s * 1e6:.0f} us,"
            f" {size_text(links.bytes_per_s)}/s"
        )
    print(f"time     {sum(found.seconds.values()):.1f} s")
    if found.findings:
        print()
        rows = [(f.status, f.target, f.name, f.what, f.message) for f in found.findings]
        print_table(("", "target", "name", "what", ""), rows)
    print("\nno problems found" if found.healthy else "\nnot healthy: see `fail` above")
