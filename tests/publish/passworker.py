"""A worker that passes on what it pulls, as a program; with a fault, if it is given one.

``python -m tests.publish.passworker SPEC``: SPEC is JSON of `Worker`. It writes a line of JSON for
each update, and stays until it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ckptd
from ckptd.base.digest import digest_hex
from ckptd.errors import CkptdError
from ckptd.publish import passing, pull
from ckptd.publish.blocks import incoming_digest
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import AskPassed, Passed, ReadBytes
from ckptd.publish.passing import Passing, _Taker, sum_of
from tests.processes import until
from tests.reshard.torch.layout.jobs import Tree, whole
from tests.reshard.torch.layout.test_binder import FUSED, fused

__all__ = ["Done", "Worker"]

_RECEIVED = slice(128, 136)
"""Where `struct tcp_info` has the bytes received."""


class Worker(msgspec.Struct):
    """What a worker does.

    Attributes
    ----------
    fault
        One of the functions below, without ``fault_``.
    late_s
        For an answer of another worker.
    asked
        A file that is made when a fault is at work, and another one, ``.go``, that it waits for.
    before
        Files that updates after the first wait for: this name, with the update's number behind it.
    """

    at: str
    updates: int = 1
    wait_s: float = 60.0
    fault: str = ""
    late_s: float = 15.0
    pass_on: bool = True
    asked: str = "/dev/null"
    before: str = ""


class Done(msgspec.Struct):
    """What an update did; `step` -1: nothing.

    Attributes
    ----------
    values
        Of all tensors, in hexadecimal digits of a digest.
    of_trainer
        Bytes that the kernel got over this worker's connections to the trainer, so far.
    """

    step: int
    values: str
    received: int = 0
    passed: int = 0
    of_trainer: int = 0
    error: str = ""


def fault_killed(taker: _Taker, at: int) -> None:
    """Die in the middle of what another worker takes."""
    if at == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def fault_stopped(taker: _Taker, at: int) -> None:
    """Stop there."""
    if at == 3:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further


def fault_slow(taker: _Taker, at: int) -> None:
    """Wait there."""
    if at == 3:
        _asked.touch()
        until(_asked.with_suffix(".go").exists, "leave to go on")


def fault_bytes(taker: _Taker, at: int) -> None:
    """Give one wrong bit."""
    if at == 3 and taker._share is not None:
        answer, data = taker._share.answers[at]
        other = bytearray(data)
        other[len(other) // 2] ^= 1
        taker._share.answers[at] = answer, memoryview(other)


def fault_digest(taker: _Taker, at: int) -> None:
    """Give a wrong bit in what stands before the bytes."""
    if at == 3 and taker._share is not None:
        answer, data = taker._share.answers[at]
        taker._share.answers[at] = ReadBytes(bytes(16), answer.sizes), data


def lie(taker: _Taker, said: Passed) -> Passed:
    """Offer wrong bytes with sums and digests that fit."""
    share = taker._share
    if not said.sums or share is None:
        return said
    _, data = share.answers[3]
    other = bytearray(data)
    other[len(other) // 2] ^= 1
    places, requests = _kept[-1]
    answer = ReadBytes(incoming_digest(places, requests[3].blocks, np.frombuffer(other, np.uint8)))
    share.answers[3] = answer, memoryview(other)
    sums = list(said.sums)
    sums[3] = sum_of(answer, [memoryview(other)])
    return Passed(True, said.progress, tuple(sums))


def older(taker: _Taker, said: Passed) -> Passed:
    """Offer the second version for the third."""
    share = taker._share
    if not said.sums or share is None:
        return said
    _kept.append(([(a, memoryview(bytes(d))) for a, d in share.answers], list(share.sums)))
    if len(_kept) < 3:
        return said
    share.answers, share.sums = _kept[1]
    return Passed(True, said.progress, tuple(share.sums))


def waits(taker: _Taker, said: Passed) -> Passed:
    """Never have it."""
    taker._end_turn()
    _asked.touch()
    time.sleep(0.05)
    return Passed(True, 7)


_kept: list[Any] = []
_asked = Path("/dev/null")
GIVE = {"killed": fault_killed, "stopped": fault_stopped, "bytes": fault_bytes}
GIVE |= {"digest": fault_digest, "slow": fault_slow}
OFFER = {"lie": lie, "older": older, "waits": waits}


def break_it(fault: str, asked: str) -> None:
    """Put a fault where a worker gives."""
    global _asked
    _asked = Path(asked)
    give, offer = _Taker._give, _Taker._offered

    def gives(taker: _Taker, at: int) -> None:
        GIVE[fault](taker, at)
        give(taker, at)

    def offers(taker: _Taker, asked: AskPassed) -> Passed:
        return OFFER[fault](taker, offer(taker, asked))

    take = Passing.arrivals

    def takes(own: Passing, link: ServerLink, number: int, asked: Any, beat: Any) -> Any:
        _kept.append((link.places, list(asked)))
        return take(own, link, number, _kept[-1][1], beat)

    if fault == "lie":
        setattr(Passing, "arrivals", takes)  # noqa: B010
    if fault in GIVE:
        setattr(_Taker, "_give", gives)  # noqa: B010
    elif fault:
        setattr(_Taker, "_offered", offers)  # noqa: B010


def links_of(subscriber: ckptd.Subscriber) -> list[ServerLink]:
    """Return the connections that a subscriber makes from now on, in a list that grows."""
    links: list[ServerLink] = []
    inner = subscriber._link

    def link(*args: Any) -> ServerLink:
        links.append(inner(*args))
        return links[-1]

    setattr(subscriber, "_link", link)  # noqa: B010
    return links


def received(links: list[ServerLink]) -> int:
    """Return the bytes that the kernel got over some connections."""
    total = 0
    for link in links:
        sock = link._connection._sock
        with suppress(OSError):  # closed
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack("=Q", info[_RECEIVED])[0]
    return total


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Worker)
    pull._MESSAGE_BYTES = 1 << 10  # so that a version comes in several messages
    passing._LATE_S, passing._STUCK_S = spec.late_s, spec.late_s
    break_it(spec.fault, spec.asked)
    module = Tree(fused(whole(99)))
    with ckptd.Subscriber(FUSED, module, spec.at, pass_on=spec.pass_on, timeout_s=60) as worker:
        links = links_of(worker)
        for number in range(1, spec.updates + 1):
            if spec.before and number > 1:
                until(Path(f"{spec.before}{number}").exists, "leave to update")
            done = Done(-1, "")
            try:
                report = worker.update(wait_s=spec.wait_s)
            except CkptdError as error:
                report, done.error = None, error.kind
            if report is not None:
                done.step, done.received = report.version.step, report.bytes_received
                done.passed = report.bytes_passed
            done.values = values_of(dict(module.state_dict()))
            done.of_trainer = received(links)
            print(msgspec.json.encode(done).decode(), flush=True)
        signal.pause()


def values_of(tensors: dict[str, Any]) -> str:
    """Return a digest of tensors."""
    return digest_hex(b"".join(tensors[n].numpy().tobytes() for n in sorted(tensors)))


if __name__ == "__main__":
    main()
