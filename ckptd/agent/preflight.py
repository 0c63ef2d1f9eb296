"""A node's part of the check before a job: it comes to the coordinator and does what that orders.

Everything between nodes is signed with the job's secret, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.agent.pairs import MOST_PROBE_BYTES, Answerer, probe_pair
from ckptd.agent.selftest import self_test
from ckptd.decoding import msgpack_decoder
from ckptd.errors import DeadlineError, TransientStoreError
from ckptd.monitor.links.machines import MachineTest
from ckptd.monitor.links.preflight import PairProbe, PreflightFinding
from ckptd.net.address import is_loopback
from ckptd.net.connection import Connection, greet_server

__all__ = [
    "ORDER_S",
    "PURPOSE",
    "ClockReading",
    "NodeHello",
    "PairOrder",
    "PreflightNode",
    "PreflightOutcome",
    "Probed",
    "ReadClock",
    "Test",
    "Tested",
    "take_part",
]

PURPOSE = "preflight"
"""Of the connections to a coordinator, see `ckptd.net.connection.Greeting`."""
ORDER_S = 30.0
"""For one order to be done, in seconds."""
_RETRY_S = 0.2
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
    """Coordinator, last of all: what came of it."""

    healthy: bool
    findings: tuple[PreflightFinding, ...]


class Tested(_Message, frozen=True, tag="tested"):
    """Node: what it found about itself."""

    machine: MachineTest


class ClockReading(_Message, frozen=True, tag="moment"):
    """Node: seconds since 1970."""

    unix_s: float


class Probed(_Message, frozen=True, tag="probed"):
    """Node: what it measured."""

    probe: PairProbe


_ORDER = msgpack_decoder(Test | ReadClock | PairOrder | PreflightOutcome)


@dataclass(frozen=True, slots=True)
class PreflightNode:
    """Who a node is.

    Attributes
    ----------
    name
        Its name; a node that never comes is missed by it.
    rank
        Its number among the nodes, -1 where nobody gave it one.
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
        Kind ``no-rendezvous``: the coordinator cannot be reached.
    StoreError
        Kind ``permission``: it has another secret.
    TransientStoreError
        It ended in the middle.
    """
    wire, own_host = _join(coordinator, secret, join_s)
    try:
        host = own_host
        if is_loopback(host) and not is_loopback(coordinator[0]):
            host = "::" if ":" in host else "0.0.0.0"  # the coordinator tells others where
        with Answerer(host, secret) as answerer:
            wire.send(NodeHello(member.name, member.rank, own_host, answerer.port))
            while True:
                order, _ = wire.receive(_ORDER, patience_s)
                if isinstance(order, PreflightOutcome):
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
                greet_server(wire, secret, PURPOSE, wait_s=_GREETING_S)
            return wire, host
        except (OSError, TransientStoreError) as error:
            if time.monotonic() > end:
                raise DeadlineError(
                    "the coordinator cannot be reached",
                    kind="no-rendezvous",
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
