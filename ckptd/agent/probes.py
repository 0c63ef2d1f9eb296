"""Links between nodes, measured while the job runs: one at a time, and only when asked for."""

from __future__ import annotations

import socket

from ckptd.agent.pairs import Answerer, probe_pair
from ckptd.errors import CkptdError, StoreError
from ckptd.monitor.report import LinkProbe, ProbeResult
from ckptd.net.address import Address, parse_address
from ckptd.runtime.host import BIND_VARIABLE, address_towards

__all__ = ["listen_for_probes", "measure", "shown_address"]

_MOST_ERROR = 200


def listen_for_probes(secret: bytes, towards: str = "localhost") -> Answerer:
    """Answer the probes of other nodes, at the address by which `towards` reaches this one.

    Beside a daemon on this machine that is the loopback; see `address_towards`. Whoever asks proves
    first that it knows the job's secret.

    Raises
    ------
    StoreError
        kind ``listen``: the address cannot be had.
    """
    host = address_towards(towards)
    try:
        return Answerer(host, secret)
    except OSError as error:
        raise StoreError(
            "link probes cannot be answered here",
            kind="listen",
            where=host,
            found=error.strerror or str(error),
            hint=f"set {BIND_VARIABLE} to an address of this node",
        ) from error


def shown_address(answerer: Answerer, towards: str = "localhost") -> str:
    """Return ``host:port`` as others are told it."""
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
    try:
        address = parse_address(probe.address, "the address of a probe")
        pair = probe_pair(0, 1, address, secret, probe.size)
        seconds, error = pair.out_s, pair.error
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
    )
