"""Interrupts the main thread out of a generation: signal, aborts of groups, closed sockets.

In it: how often and after which time each means is tried; what is never cut short.

What it may wait in, and what ends that:

- a collective of gloo: its connections are shut down once they are at rest, and it raises;
- a collective of NCCL, or a wait for the device behind one: all groups are aborted at once, see
  `ckptd.elastic.torch.session.groups`;
- the job's store: the connection is shut down, if the thread is still there after a moment;
- Python, sleeps and locks included: a signal, whose handler raises;
- anything else, as a long computation or a file system that hangs: nothing. The launcher kills a
  process that is not out in time (``ckptd run --interrupt``), and starts another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType

from ckptd.base.runtime import launched
from ckptd.base.runtime.ownership import in_child
from ckptd.elastic.torch.session import sockets
from ckptd.elastic.torch.session.groups import GroupAborts
from ckptd.errors import UsageError

_SIGNAL = signal.SIGURG
"""Ignored where no handler is set, and hardly ever used."""
_POKE_S = 0.02
_STORES_S = 0.1
"""After so long the connection to the job's store is shut down too."""
_REST_S = 0.4
"""After so long connections of groups are shut down also where bytes still move."""
_UNWIND_S = 0.25
"""For so long blocks that an exception ends are left alone to put back what they have changed.

Whether gradients are recorded, say: it would stay so in the generations to come.
"""
_WHOLE = frozenset({"__enter__", "__exit__", "acquire", "release", "_acquire_restore"})
"""A lock that is just being taken would stay taken for ever."""
_IMPORTS = "<frozen importlib."
"""A module that is imported by half may not be importable again in this process."""


class Interrupted(BaseException):
    """The generation is over; `session` catches it, and calls the program in the next one.

    Not an `Exception`, so that a program that goes on after errors does not go on after this.
    """


class Interrupter:
    """Ends a generation in the main thread, on the word of another thread.

    Raises
    ------
    UsageError
        Made in another thread than the main one.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "only the main thread can be interrupted",
                where=threading.current_thread().name,
                wanted="ckptd.elastic.session() in the main thread",
            )
        self._main = threading.get_ident()
        self._inside = False
        self._outermost: CodeType | None = None
        self._handled: BaseException | None = None
        self._unwound_by = 0.0
        self._wanted = threading.Event()
        self._out = threading.Condition()
        self._thread: threading.Thread | None = None
        self._aborts = GroupAborts()
        self._sockets = sockets.GroupSockets()
        self._sockets.watch()
        self._before = signal.signal(_SIGNAL, self._on_signal)
        in_child(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """Interrupt nothing in a forked child: it is no rank, and is in no generation."""
        self._inside = False
        self._wanted = threading.Event()
        if launched.current is self:
            launched.current = None
        if self._before is not None and signal.getsignal(_SIGNAL) == self._on_signal:
            signal.signal(_SIGNAL, self._before)

    @property
    def wanted(self) -> bool:
        """Whether the generation is to end, or has."""
        return self._wanted.is_set()

    @property
    def aborts(self) -> GroupAborts:
        """The aborts of the groups of this generation; others in the next one."""
        return self._aborts

    def check(self) -> None:
        """Raise `Interrupted` in a generation that is to end."""
        if self._inside and self._wanted.is_set():
            raise Interrupted

    def enter(self) -> None:
        """The main thread is in a generation from now on.

        Raises
        ------
        Interrupted
            The generation ended before this: its end saw no call inside, and is over.
        """
        with self._out:
            if self._wanted.is_set():
                raise Interrupted
            self._outermost, self._handled = sys._getframe(1).f_code, sys.exc_info()[1]
            self._inside = True

    def leave(self) -> None:
        """The main thread is out: nothing is raised in it any more."""
        with self._out:
            self._inside, self._handled = False, None
            self._out.notify_all()

    def settle(self, until: float) -> list[str]:
        """Wait until groups may be destroyed: all is done that ends the generation.

        Parameters
        ----------
        until
            When to give up, by ``time.monotonic``.

        Returns
        -------
        list
            Names of groups whose abort hangs. Nothing may be destroyed then.
        """
        if self._thread is not None:
            self._thread.join()  # it ends by itself once the main thread is out
            self._thread = None
        return self._aborts.wait(until)

    def again(self) -> None:
        """Another generation may begin; everything of the last one is gone, by `settle` as well."""
        self._aborts = GroupAborts()
        self._sockets.forget()
        self._wanted.clear()

    def interrupt(self) -> None:
        """End the generation; returns at once. Idempotent."""
        with self._out:
            if self._wanted.is_set():
                return
            self._unwound_by = time.monotonic() + _UNWIND_S
            self._wanted.set()
            self._thread = threading.Thread(target=self._drive, name="ckptd-interrupt", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Be of no effect any more, and put back what was there before. Idempotent."""
        self.leave()
        self._sockets.close()
        if self._before is not None and signal.getsignal(_SIGNAL) == self._on_signal:
            signal.signal(_SIGNAL, self._before)

    def _drive(self) -> None:
        began = time.monotonic()
        while True:
            self._aborts.begin()  # also of groups that were made meanwhile
            since = time.monotonic() - began
            # Also where the main thread is out already, by an error: calls that are still under way
            # in the background wait for one another's ranks, and destroying a group for them.
            left = self._sockets.shut(
                store_ports=_store_ports(), stores=since > _STORES_S, whole=since > _REST_S
            )
            if not self._inside:
                if not left:
                    return
                time.sleep(_POKE_S)
                continue
            with contextlib.suppress(ProcessLookupError):  # the thread has ended with its process
                signal.pthread_kill(self._main, _SIGNAL)
            with self._out:
                self._out.wait_for(lambda: not self._inside, _POKE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._wanted.is_set():
            if callable(self._before):
                self._before(number, frame)
            return
        if self._inside and frame is not None and not self._is_whole(frame):
            raise Interrupted

    def _is_whole(self, frame: FrameType) -> bool:
        """Whether what runs there must not be cut short; it is short, and soon asked again."""
        code = frame.f_code
        if code.co_name in _WHOLE or code.co_filename in (__file__, sockets.__file__):
            return True
        if sys.exc_info()[1] is not self._handled and time.monotonic() < self._unwound_by:
            return True
        caller: FrameType | None = frame
        while caller is not None and caller.f_code is not self._outermost:
            if launched.is_whole(caller.f_code) or caller.f_code.co_filename.startswith(_IMPORTS):
                return True
            caller = caller.f_back
        return False


def _store_ports() -> frozenset[int]:
    text = os.environ.get("MASTER_PORT", "")
    return frozenset({int(text)} if text.isdecimal() else ())
