"""The pulse of a rank: a thread that says that it runs, and asks the main thread to say the same.

From the two stamps and the state of the process others tell apart a rank that is stopped, that
holds the GIL in C, whose main thread is blocked in C, and one that still runs Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ckptd.monitor.ring import RingWriter
from ckptd.train.recorder_phases import CheckpointPhase, CompilePhase

__all__ = ["Pulse"]

_BEAT_S = 0.1
_BEATS_A_PROBE = 5
_STOP_S = 2.0

# Python may run a pending call after whoever left it is gone, so these are kept for ever.
_kept: list[Any] = []
_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Pulse:
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
