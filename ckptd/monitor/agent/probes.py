"""Probes of links between two nodes: latency and bytes both ways; answers, timeouts, sizes.

The node that asks measures both directions, so no clocks are compared. Both prove first that they
know the job's secret. The check before a job and the
watch of a running job probe in the same way.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec

from ckptd.base.closing import Closing
from ckptd.base.net.address import Address, listen_at, parse_address
from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.door import Door
from ckptd.base.runtime.host import BIND_VARIABLE, address_towards
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, StoreError
from ckptd.monitor.preflight import PairProbe
from ckptd.monitor.report import LinkProbe, ProbeResult

MOST_PROBE_BYTES = 64 << 20
"""Largest probe that a node answers."""

_PURPOSE = "probe"
_CONNECT_S = 1.0
_GREETING_S = 2.0
_PROBE_S = 5.0
_IDLE_S = 10.0
_SMALL = 20
_LARGE = 5
_ENOUGH_S = 0.1
_STARVED_S = 1.0
_AT_ONCE = 8
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_Shows = Literal["link", "node", "nothing"]
_Measured = tuple[float, bool]
"""Seconds, and whether they are of the link."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what two nodes say to each other."""


class _Ping(_Message, frozen=True, tag="ping"):
    """Answer at once."""


class _Take(_Message, frozen=True, tag="take"):
    """Bytes follow; answer when they are there."""


class _Give(_Message, frozen=True, tag="give"):
    """Answer with so many bytes."""

    size: int


class _Pong(_Message, frozen=True, tag="pong"):
    """The answer; bytes may follow. `waited_s` is `_waited_s` of who answers, for this answer."""

    waited_s: float = 0.0


_ASKED = msgpack_decoder(_Ping | _Take | _Give)
_ANSWER = msgpack_decoder(_Pong)


class Answerer(Closing):
    """Answers probes of other nodes in threads of its own.

    Parameters
    ----------
    host
        Address to listen at.
    secret
        The job's, as bytes.

    Raises
    ------
    StoreError
        kind ``listen``: the address cannot be had.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        listener = listen_at(host, 0, "the answerer of link probes")
        self.port: int = listener.getsockname()[1]
        self._door = Door(
            listener,
            lambda: secret,
            _PURPOSE,
            self._serve,
            name="a node that probes",
            clients=_AT_ONCE,
            greeting_s=_GREETING_S,
            send_s=_PROBE_S,
        )

    def _serve(self, wire: Connection) -> None:
        while True:
            self._answer(wire)

    def _answer(self, wire: Connection) -> None:
        began = _waited_s()
        asked, bulk = wire.receive(_ASKED, _IDLE_S, most_bulk=MOST_PROBE_BYTES)
        wire.permit(asked, _PURPOSE)
        if isinstance(asked, _Give) and 0 <= asked.size <= MOST_PROBE_BYTES:
            wire.send(_Pong(_waited_s() - began), memoryview(bytes(asked.size)))
            return
        _drop(wire, bulk)
        wire.send(_Pong(_waited_s() - began))

    def close(self) -> None:
        """Stop answering."""
        self._door.close(_IDLE_S)


def _drop(wire: Connection, count: int) -> None:
    buffer = memoryview(bytearray(min(count, 1 << 20)))
    while count > 0:
        part = buffer[: min(count, len(buffer))]
        wire.fill(part, _PROBE_S)
        count -= len(part)


def probe_pair(
    source: int, to: int, address: tuple[str, int], secret: bytes, size: int
) -> PairProbe:
    """Measure the links between this node and another; what goes wrong is in ``error``.

    Takes about 8 s at most.

    Parameters
    ----------
    source, to
        Indices of this node and of the other.
    address
        Host and port of the other's `Answerer`.
    secret
        The job's, as bytes.
    size
        Bytes of a probe.
    """
    (small, out, back), error, _ = _probed(address, secret, _small, _out(size), _back(size))
    return PairProbe(source=source, to=to, latency_s=small, out_s=out, in_s=back, error=error)


def _probed(
    address: tuple[str, int], secret: bytes, *measures: Callable[[Connection], _Measured]
) -> tuple[list[float], str, _Shows]:
    """Return the seconds of each measure at another's `Answerer`; all infinite with an error.

    And what they show, see `ProbeResult`.
    """
    failed = [float("inf")] * len(measures)
    try:
        sock = socket.create_connection(address, timeout=_CONNECT_S)
    except OSError as error:
        no_way = isinstance(error, TimeoutError) or error.errno in _NO_WAY
        refused = isinstance(error, ConnectionError)
        shows: _Shows = "link" if no_way else "node" if refused else "nothing"
        return failed, error.strerror or str(error), shows
    wire = Connection(sock, f"{address[0]}:{address[1]}", _PROBE_S)
    shows = "node"
    try:
        greet_server(wire, secret, _PURPOSE, role="agent", wait_s=_GREETING_S)
        shows = "link"
        found = [measure(wire) for measure in measures]
        return [taken for taken, _ in found], "", "link" if all(c for _, c in found) else "node"
    except CkptdError as error:
        return failed, _in_a_line(error), shows
    finally:
        wire.release()


def _small(wire: Connection) -> _Measured:
    return _least(lambda: _round_trip(wire, _Ping()), _SMALL)


def _out(size: int) -> Callable[[Connection], _Measured]:
    data = memoryview(bytes(size))
    return lambda wire: _least(lambda: _round_trip(wire, _Take(), data), _LARGE)


def _back(size: int) -> Callable[[Connection], _Measured]:
    return lambda wire: _least(lambda: _round_trip(wire, _Give(size)), _LARGE)


def _in_a_line(error: CkptdError) -> str:
    """Return an error in a line."""
    found = error.to_dict()["found"]
    return f"{error.message}: {found}"[:300] if found else error.message[:300]


def _least(measure: Callable[[], tuple[float, float]], most: int) -> _Measured:
    """Return the least of some measurements; fewer of them where one takes long.

    What an end waited for a CPU is taken off, but no more than half: of both ends' waits nobody
    knows how much came at the same time. Where it was more, it is measured again; and if it always
    was, it shows how busy the nodes are, and nothing of the link.
    """
    best, spent, calm = float("inf"), 0.0, 0
    for _ in range(4 * most):
        taken, waited = measure()
        best, spent = min(best, taken - min(waited, taken / 2)), spent + taken
        calm += waited < taken / 2
        if calm == most or spent > (_ENOUGH_S if calm else _STARVED_S):
            break
    return best, calm > 0


def _round_trip(
    wire: Connection, message: _Message, data: memoryview | None = None
) -> tuple[float, float]:
    """Return the seconds of an exchange, and how long the end that waited longer was not run."""
    started, began = time.perf_counter(), _waited_s()
    wire.send(message, data)
    answer, bulk = wire.receive(_ANSWER, _PROBE_S, most_bulk=MOST_PROBE_BYTES)
    _drop(wire, bulk)
    waited = max(_waited_s() - began, answer.waited_s)
    return time.perf_counter() - started, waited


def _waited_s() -> float:
    """Return for how long this thread has waited for a CPU so far; 0 where the kernel is silent."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    return 0.0


# --- probes of a running job ----------------------------------------------------------------------


_MOST_ERROR = 200


def listen_for_probes(secret: bytes, towards: str = "localhost") -> Answerer:
    """Answer the probes of other nodes, at the address by which `towards` reaches this one.

    Beside a daemon on this machine that is the loopback; see `address_towards`. A node that asks
    proves first that it knows the job's secret.

    Raises
    ------
    StoreError
        kind ``listen``: the address cannot be had.
    """
    host = address_towards(towards)
    try:
        return Answerer(host, secret)
    except StoreError as error:
        raise StoreError(
            "link probes cannot be answered here",
            kind="listen",
            where=host,
            found=error.found or error.message,
            hint=f"set {BIND_VARIABLE} to an address of this node",
        ) from error


def shown_address(answerer: Answerer, towards: str = "localhost") -> str:
    """Return ``host:port`` as it is announced to other nodes."""
    host = address_towards(towards)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return str(Address(host, answerer.port))


def measure(probe: LinkProbe, secret: bytes) -> ProbeResult:
    """Send a probe, and return how long its bytes took to get there; never raises.

    The least of several repetitions, in seconds, of the way there alone, so that the directions of
    a link can be told apart. Infinite with ``error`` if it did not come.
    """
    never = float("inf")
    shows: _Shows = "nothing"
    try:
        address = parse_address(probe.address, "the address of a probe")
        (seconds,), error, shows = _probed(address, secret, _out(probe.size))
    except CkptdError as failed:
        seconds, error = never, failed.message
    if not seconds > 0:
        seconds = never
    return ProbeResult(
        nonce=probe.nonce,
        src=probe.from_node,
        dst=probe.to_node,
        seconds=seconds,
        error=error[:_MOST_ERROR],
        shows=shows,
    )
