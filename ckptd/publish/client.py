"""A rank's side of its publish server: starts the process, hands it slots, asks for places.

In it: how long it may take to start, answer and leave.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import CkptdError, ProcessError
from ckptd.publish.messages import (
    REPLY,
    AskSlot,
    Opening,
    PlaceLost,
    ServerEntry,
    ServerReady,
    ServerStop,
    SlotAnswer,
    VersionDropped,
    VersionKnown,
    VersionSettled,
    VersionWhole,
    most_listen_s,
)

T = TypeVar("T")

_START_S = 60.0
_ANSWER_S = 5.0
_LOOK_S = 5.0
_LEAVE_S = 1.0


class PublishClient(OfOneProcess):
    """Starts the server of this rank. `send` may be called by any thread, `place` by one.

    Parameters
    ----------
    lost
        Called by a thread of this client when the leader will never give a version to workers: it
        does not answer, or this server is gone; or, with its error, has lost the store.
    settled
        Called by that thread on rank 0 when a version is whole, or never will be.

    Attributes
    ----------
    silent
        Whether the server has not answered the last `place` yet.
    """

    def __init__(
        self,
        opening: Opening,
        lost: Callable[[int, CkptdError | None], None],
        settled: Callable[[int, bool], None],
    ) -> None:
        self._lost = lost
        self._settled = settled
        self.silent = False
        waits = opening.port or opening.to
        self._start_s = _START_S + (most_listen_s(opening) if waits else 0.0)
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        # A session of its own, as a writing process: it outlives a trainer that is interrupted.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptd.publish.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._channel = SocketChannel(ours, REPLY)
        self._sending = threading.Lock()
        self._unknown: set[int] = set()
        self._closed = self._ended = False
        self._asked = 0
        self._receiver = threading.Thread(target=self._receive, name="ckptd-published", daemon=True)
        self._receiver.start()
        self.send(opening)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def send(self, message: msgspec.Struct, slot: Slot | None = None) -> None:
        """Send a message, with the memory of a slot beside it.

        Raises
        ------
        ProcessError
            The server is gone.
        """
        with self._sending:
            if isinstance(message, VersionWhole):
                self._unknown.add(message.number)
            self._channel.send(message, None if slot is None else slot.fd)

    def ready(self) -> ServerEntry:
        """Return where it listens.

        Raises
        ------
        CkptdError
            It does not.
        """
        answer = self._next(ServerReady, self._start_s)
        if answer is None:
            raise ProcessError(
                "the server of a publisher does not answer",
                where=f"process {self._process.pid}",
                wanted=f"within {self._start_s:.0f} s",
            )
        if answer.entry is None:
            raise CkptdError.from_dict(answer.error or {})
        return answer.entry

    def place(self, number: int, step: int) -> SlotAnswer:
        """Return where a version goes, as the leader, which is this rank's server, decides.

        Nowhere, where it does not answer; it is waited for once, and not again before it has
        answered that. A server that is stopped does not stop the training.
        """
        wait_s = 0.0 if self.silent else _ANSWER_S
        if not self.silent:
            self.send(AskSlot(number, step))
            self._asked = number
        while (answer := self._next(SlotAnswer, wait_s)) is not None:
            if answer.number == self._asked:
                if not self.silent:
                    return answer
                self.silent = False
                return self.place(number, step)
        if not self.silent:
            self.silent = True
            self.send(VersionDropped(number))
        return SlotAnswer(number, -1, False, f"process {self.pid}, the server, does not answer")

    def _next(self, kind: type[T], wait_s: float) -> T | None:
        """Return the next answer of a kind; None: none in this time."""
        end = time.monotonic() + wait_s
        while True:
            try:
                message = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if message is None:
                self._answers.put(None)  # for the next call
                raise ProcessError(
                    "the publisher's server process has ended",
                    where=f"process {self._process.pid}",
                    found=f"exit code {self._process.poll()}",
                    hint="create a new Publisher",
                )
            if isinstance(message, kind):
                return message

    def _receive(self) -> None:
        """Take what comes, in a thread of its own, until the server is gone."""
        with contextlib.suppress(EOFError, OSError):
            while not self._closed:
                item = self._channel.receive(_LOOK_S)
                message = None if item is None else item[0]
                if isinstance(message, VersionKnown):
                    self._unknown.discard(message.number)
                    if not message.good:
                        self._lost(message.number, None)
                elif isinstance(message, PlaceLost):
                    self._lost(0, CkptdError.from_dict(message.error))
                elif isinstance(message, VersionSettled):
                    self._settled(message.number, message.whole)
                elif message is not None:
                    self._answers.put(message)
        self._answers.put(None)
        if not self._closed:
            for number in sorted(self._unknown):  # ranks may wait for these
                self._lost(number, None)

    def close(self) -> None:
        """Order the server to end as soon as no worker holds a version. Idempotent."""
        if self._ended:
            return
        self._closed = True
        with contextlib.suppress(ProcessError):  # it is gone already
            self.send(ServerStop())
        self._channel.shut()  # its thread is woken
        self._receiver.join(_LEAVE_S)  # it may wait for the board of a job that ends
        self._channel.close()
        # Do not wait: a worker that pulls gets the rest. The thread collects the exit code.
        threading.Thread(target=self._process.wait, daemon=True).start()
        self._ended = True
