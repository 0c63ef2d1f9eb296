"""Heartbeat thread of a rank, ping of its main thread; phases of compiling and checkpoints.

In it: how often it beats and pings.

From the two stamps and the state of the process others tell apart a rank that is stopped, that
holds the GIL in C, whose main thread is blocked in C, and one that still runs Python.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from ckptd.monitor.job import Phase
from ckptd.monitor.ring import RingWriter


class CompilePhase:
    """Marks the phase COMPILE while PyTorch compiles, once its compiler has been imported."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._handler: Any = None
        self._before = Phase.TRAIN

    def install(self) -> None:
        """Register; again after `torch.compiler.reset`, which forgets all listeners."""
        module = sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)
        if handler is not None and self._started not in handler.start_callbacks:
            self._handler = handler
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._ended)

    def remove(self) -> None:
        """Listen no more; harmless again."""
        handler, self._handler = self._handler, None
        if handler is not None and self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)
            handler.remove_end_callback(self._ended)

    def _started(self, _: object) -> None:
        if self._handler is not None and self._ring.phase is not Phase.COMPILE:
            self._before, self._ring.phase = self._ring.phase, Phase.COMPILE

    def _ended(self, _: object) -> None:
        if self._handler is not None and self._ring.phase is Phase.COMPILE:
            self._ring.phase = self._before


class CheckpointPhase:
    """Marks the phase CKPT while the main thread saves or loads by `torch.distributed.checkpoint`.

    Every step of a save or load (to plan, to write, to read, to agree) goes through one class, so
    that it makes no difference where a program has its functions from. A save in another thread is
    none of this: the main thread trains meanwhile.
    """

    _STEPS = ("reduce_scatter", "all_reduce", "all_gather")

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._wrapped: Any = None
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap that class, once it has been imported."""
        if self._wrapped is not None:
            return
        module = sys.modules.get("torch.distributed.checkpoint.utils")
        wrapped = getattr(module, "_DistWrapper", None)
        if wrapped is not None and all(hasattr(wrapped, name) for name in self._STEPS):
            self._wrapped = wrapped
            for name in self._STEPS:
                self._before[name] = getattr(wrapped, name)
                setattr(wrapped, name, self._marked(self._before[name]))

    def remove(self) -> None:
        """Leave the class as it was found; harmless again."""
        wrapped, self._wrapped = self._wrapped, None
        if wrapped is not None:
            for name, before in self._before.items():
                setattr(wrapped, name, before)

    def _marked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def marked(*args: Any, **more: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if not main or self._wrapped is None:
                return step(*args, **more)
            before, self._ring.phase = self._ring.phase, Phase.CKPT
            try:
                return step(*args, **more)
            finally:
                self._ring.phase = before

        return marked


_BEAT_S = 0.1
_BEATS_A_PROBE = 5
_STOP_S = 2.0

# Python may run a pending call after its `RingPulse` is gone, so these are kept for ever.
_kept: list[Any] = []
_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class RingPulse:
    """Beats into `ring` until stopped, and calls `beat`; `failed` hears of it if that breaks."""

    def __init__(
        self,
        ring: RingWriter,
        beat: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._ring = ring
        self._also = beat
        self._failed = failed
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._phases = (CompilePhase(ring), CheckpointPhase(ring))
        self._answer = _PendingCall(self._interpreted)
        _kept.append(self._answer)

    def start(self) -> None:
        """Begin to beat, in a thread that does not keep the process alive."""
        self._thread = threading.Thread(target=self._run, name="ckptd-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; harmless when stopped."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_S)
        for phase in self._phases:
            phase.remove()

    @property
    def threads(self) -> tuple[int, ...]:
        """The identifier of its thread, if that runs."""
        thread = self._thread
        return () if thread is None or thread.ident is None else (thread.ident,)

    def forget(self) -> None:
        """Know that the thread has not come along into a forked child."""
        self._end.set()
        self._thread = None

    def _run(self) -> None:
        try:
            beat = 0
            while True:
                self._ring.beat()
                for phase in self._phases:
                    phase.install()
                self._also()
                if beat % _BEATS_A_PROBE == 0 and not self._asked:
                    self._asked = True
                    # -1: the queue is full, so try at the next turn.
                    if ctypes.pythonapi.Py_AddPendingCall(self._answer, None):
                        self._asked = False
                beat += 1
                if self._end.wait(_BEAT_S):
                    return
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._failed(error)

    def _interpreted(self, _: object) -> int:
        if not self._end.is_set():
            self._ring.interpreted()
            self._asked = False
        return 0
