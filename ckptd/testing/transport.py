"""`TransportContract`: the tests that every transport between live ranks passes.

In it: sizes of the messages; its time limit.

A transport's author subclasses it with one function of a module, which every rank calls::

    def make() -> Transport:
        return MyTransport(...)


    class TestMyTransport(TransportContract):
        make = staticmethod(make)

The tests start real ranks, in which ``torch.distributed`` is initialised with gloo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.errors import CkptdError, UsageError
from ckptd.reshard.live.transport import PendingMessage, Transport
from ckptd.testing.ranks import rank_outcomes, run_ranks

__all__ = ["TransportContract"]

U8 = NDArray[np.uint8]

Make = Callable[[], Transport]

_LIMIT = 1 << 16
_SIZES = (1, 4096, _LIMIT, 17, 0x3000)
_PATIENCE_S = 60.0


class TransportContract:
    """See the module."""

    make: ClassVar[staticmethod[[], Transport]]

    @pytest.mark.timeout(300)
    def test_messages_arrive_in_order(self) -> None:
        """Every rank sends to every other, two messages at a time, while it receives."""
        assert run_ranks(3, _exchange, self.make, deadline_s=200.0) == [True] * 3

    @pytest.mark.timeout(300)
    def test_a_wait_ends_and_can_be_repeated(self) -> None:
        """A message that is late is no error, and is not lost."""
        assert run_ranks(2, _late, self.make, deadline_s=200.0) == [True, True]

    @pytest.mark.timeout(300)
    def test_a_rank_that_dies_ends_waits(self) -> None:
        """A wait for a rank that was killed ends with an error, and never hangs."""
        outcomes = rank_outcomes(2, _orphan, self.make, deadline_s=200.0, grace_s=90.0)
        assert outcomes[1].exit_code == -signal.SIGKILL
        assert outcomes[0].value == "rank-died", outcomes[0]

    @pytest.mark.timeout(300)
    def test_close_is_final_and_idempotent(self) -> None:
        """After `close` nothing is sent."""
        assert run_ranks(2, _closed, self.make, deadline_s=200.0) == [True, True]


def _message(source: int, target: int, number: int) -> U8:
    rng = np.random.default_rng([source, target, number])
    return rng.integers(0, 256, _SIZES[number], dtype=np.uint8)


def _through(pending: PendingMessage) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not pending.wait(0.05):
        if time.monotonic() > end:
            raise CkptdError("a message was not delivered")


def _exchange(make: Make) -> bool:
    transport = make()
    transport.begin(_LIMIT)
    failed: list[BaseException] = []

    def send() -> None:
        try:
            for step in range(1, transport.world):
                peer = (transport.rank + step) % transport.world
                waiting: list[PendingMessage] = []
                for number in range(len(_SIZES)):
                    waiting.append(transport.send(peer, _message(transport.rank, peer, number)))
                    if len(waiting) == 2:
                        _through(waiting.pop(0))
                for pending in waiting:
                    _through(pending)
        except BaseException as error:
            failed.append(error)
            raise

    sender = threading.Thread(target=send)
    sender.start()
    good = True
    for step in range(1, transport.world):
        peer = (transport.rank - step) % transport.world
        found = [np.zeros(size, dtype=np.uint8) for size in _SIZES]
        first = transport.receive(peer, found[0])
        for number in range(len(_SIZES)):
            behind = number + 1
            second = transport.receive(peer, found[behind]) if behind < len(_SIZES) else None
            _through(first)
            good &= bool(np.array_equal(found[number], _message(peer, transport.rank, number)))
            first = second if second is not None else first
    sender.join()
    transport.close()
    return good and not failed


def _late(make: Make) -> bool:
    transport = make()
    transport.begin(_LIMIT)
    if transport.rank == 0:
        time.sleep(1.0)
        _through(transport.send(1, _message(0, 1, 1)))
        into = np.zeros(1, dtype=np.uint8)
        _through(transport.receive(1, into))
        transport.close()
        return True
    into = np.zeros(_SIZES[1], dtype=np.uint8)
    pending = transport.receive(0, into)
    early = pending.wait(0.01)
    _through(pending)
    good = bool(np.array_equal(into, _message(0, 1, 1)))
    _through(transport.send(0, np.ones(1, dtype=np.uint8)))
    transport.close()
    return good and not early


def _orphan(make: Make) -> str:
    transport = make()
    transport.begin(_LIMIT)
    if transport.rank == 1:
        _through(transport.send(0, _message(1, 0, 1)))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    into = np.zeros(_SIZES[1], dtype=np.uint8)
    _through(transport.receive(1, into))
    try:
        _through(transport.receive(1, into))
    except CkptdError as error:
        return error.kind
    return "nothing"


def _closed(make: Make) -> bool:
    transport = make()
    transport.begin(_LIMIT)
    transport.close()
    transport.close()
    try:
        transport.send(1 - transport.rank, np.ones(1, dtype=np.uint8))
    except UsageError:
        return True
    return False
