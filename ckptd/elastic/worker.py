"""`WorkerLink`: a worker's connection to its launcher: marks, steps, saves asked for, orders.

In it: how long last words may take; the end of a worker whose launcher is gone.

The launcher's own end is in `ckptd.elastic.workerend`.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import ClassVar, Literal

import msgspec

from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.launched import LAUNCHER_VARIABLE
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.elastic import messages
from ckptd.elastic.lease import WorkerLease
from ckptd.errors import ProcessError

_log = logging.getLogger("ckptd.elastic")
_POLL_S = 1.0
_LAST_WORDS_S = 2.0


class WorkerLink(OfOneProcess):
    """One process's connection; made by `current`, thread-safe.

    A thread of its own sends the messages: a launcher that is stopped holds no rank up.

    Attributes
    ----------
    rank, generation
        Of this worker, now: both change where a session goes on in another generation.
    lease
        Until when this worker may step; None without a lease.
    welcome
        What the launcher said last of this job; None until it has answered.
    """

    _current: ClassVar[WorkerLink | None] = None
    _tried: ClassVar[int] = 0
    """Process that has looked for a launcher: one that was forked from it is no worker."""
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, sock: socket.socket, rank: int, generation: int, lease: WorkerLease | None
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.lease = lease
        self.welcome: messages.Welcome | None = None
        self._session = False
        self._marked: set[str] = set()
        self._loaded = -1
        self._committed = -1
        self._asked = False
        self._serving: int | None = None
        self._hooks: list[Callable[[messages.ToWorker | None], None]] = []
        self._changed = threading.Condition()
        self._gone = False
        self._channel = SocketChannel(sock, messages.ToWorker, messages.MOST_BYTES)
        self._outbox: queue.SimpleQueue[messages.FromWorker | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self.tell(self._attach())
        self._writer = threading.Thread(target=self._write, name="ckptd-to-launcher", daemon=True)
        self._reader = threading.Thread(target=self._read, name="ckptd-launcher", daemon=True)
        self._writer.start()
        self._reader.start()

    @classmethod
    def current(cls) -> WorkerLink | None:
        """Return the connection of this process, made at the first call.

        None where no launcher of ckptd started it, or the launcher cannot be reached: the rank then
        trains as it would anywhere, until its lease is over.
        """
        if cls._tried == os.getpid():
            return cls._current
        with cls._making:
            if cls._tried != os.getpid():
                cls._current = None if cls._tried else cls._connect()
                cls._tried = os.getpid()
        return cls._current

    @classmethod
    def _connect(cls) -> WorkerLink | None:
        path = os.environ.get(LAUNCHER_VARIABLE)
        if not path:
            return None
        leased = os.environ.get(messages.LEASE_VARIABLE)
        lease = WorkerLease(leased) if leased else None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
            return cls(sock, _number("RANK"), _number("CKPTD_GENERATION"), lease)
        except OSError as error:
            sock.close()
            _log.warning("the launcher at %s cannot be reached: %s", path, error)
            return None

    # -- messages to the launcher ----------------------------------------------------------------

    def tell(self, message: messages.FromWorker) -> None:
        """Queue `message` for the launcher, in order; does nothing once the launcher is gone."""
        self._outbox.put(message)

    def _attach(self) -> messages.Attach:
        return messages.Attach(os.getpid(), self.rank, self.generation, self._session)

    def hold_session(self) -> None:
        """Say that this worker can go on in another generation."""
        self._session = True
        self.tell(self._attach())

    def mark(self, name: Literal["imported", "initialised", "loaded", "stepped"]) -> None:
        """Say how far the start of this generation is; only the first time counts."""
        with self._changed:
            if name in self._marked:
                return
            self._marked.add(name)
        self.tell(messages.Mark(self.generation, name))

    def loaded(self, generation: int, step: int) -> None:
        """Say that this rank has its state of `step`; only the first time counts.

        What comes of another generation than the one that this process is in now is left out.
        """
        with self._changed:
            if self._loaded >= 0 or generation != self.generation:
                return
            self._loaded = step
        self.mark("loaded")
        self.tell(messages.Loaded(generation=generation, step=step))

    def committed(self, generation: int, step: int) -> None:
        """Say that `step` is where a restart would find it, for every rank; see `loaded`."""
        with self._changed:
            if step <= self._committed or generation != self.generation:
                return
            self._committed = step
            answered = self._serving is not None and step >= self._serving
            if answered:
                self._serving = None
        self.mark("stepped")
        self.tell(messages.Progress(generation=generation, step=step))
        if answered:
            self.tell(messages.Saved(generation=generation, step=step))

    @property
    def save_asked(self) -> bool:
        """Whether a save is asked for, and none has begun since."""
        return self._asked

    def take_save(self) -> bool:
        """Tell whether a save is asked for; from now on it is so no more."""
        with self._changed:
            asked, self._asked = self._asked, False
        return asked

    def serves(self, step: int) -> None:
        """The save of `step` begins, and is the answer to what `take_save` took."""
        with self._changed:
            self._serving = step

    def out(self, generation: int) -> None:
        """Say that `generation` is left."""
        self.tell(messages.Out(generation))

    def unfit(self, generation: int, reason: str, *, device: bool = False) -> None:
        """Say that this process can go on in no generation; returns as `done` does."""
        self.tell(messages.Out(generation, reason[:2000], device))
        self._flush()

    def broken(self, reason: str) -> None:
        """Report that a call failed without an interrupt."""
        self.tell(messages.Broken(generation=self.generation, reason=reason[:2000]))

    def done(self) -> None:
        """Say that the session has returned; returns when it is said, or after two seconds."""
        self.tell(messages.Done(self.generation))
        self._flush()

    def _flush(self) -> None:
        said = threading.Event()
        self._outbox.put(said)
        said.wait(_LAST_WORDS_S)  # the process may end right after this, and its threads with it

    def goes_on(self, generation: int, rank: int) -> None:
        """Be another rank, of another generation, from now on."""
        with self._changed:
            self.generation, self.rank = generation, rank
            self._marked.clear()
            self._loaded = self._committed = -1
            self._asked, self._serving = False, None
        self.tell(self._attach())

    # -- what is heard ---------------------------------------------------------------------------

    def listen(self, hook: Callable[[messages.ToWorker | None], None]) -> None:
        """Call `hook` with each message from now on, and with None when the launcher is gone.

        It is called by the thread that reads: it must not wait.
        """
        with self._changed:
            self._hooks.append(hook)
            gone = self._gone
        if gone:
            hook(None)

    def unlisten(self, hook: Callable[[messages.ToWorker | None], None]) -> None:
        """Undo `listen`."""
        with self._changed:
            self._hooks.remove(hook)

    @property
    def gone(self) -> bool:
        """Whether the launcher has ended, or let go of this worker."""
        return self._gone

    def close(self) -> None:
        """Send what is left, and close. Idempotent; waits for a launcher for two seconds."""
        self._outbox.put(None)
        self._writer.join(_LAST_WORDS_S)
        self._gone = True
        self._channel.shut()
        if threading.current_thread() is not self._reader:
            self._reader.join(2 * _POLL_S)  # it must not read what has this number next
        self._channel.close()
        if WorkerLink._current is self:
            WorkerLink._current, WorkerLink._tried = None, 0

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                self._channel.send(message)
            except ProcessError:
                return  # the thread that reads tells of it

    def _read(self) -> None:
        while not self._gone:
            try:
                item = self._channel.receive(_POLL_S)
            except (EOFError, msgspec.MsgspecError, ValueError):
                self._receive(None)
                return
            if item is not None:
                message, fd = item
                if fd is not None:
                    os.close(fd)  # no message of a launcher has one
                self._receive(message)

    def _receive(self, message: messages.ToWorker | None) -> None:
        with self._changed:
            if message is None:
                self._gone = True
            elif isinstance(message, messages.Welcome):
                self.welcome = message
            elif isinstance(message, messages.SaveNow) and message.generation == self.generation:
                self._asked = True
            hooks = tuple(self._hooks)
            self._changed.notify_all()
        for hook in hooks:
            hook(message)


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise ProcessError("a launcher's variable is not a number", where=name, found=text)
    return int(text)
