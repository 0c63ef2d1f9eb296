"""When calls on CUDA tensors end: by events that the pulse looks at, never by waiting.

Where the program waits for a call, its current stream does; an event behind that tells when. Calls
that nobody has waited for yet are asked themselves, to a tenth of a second. Calls that a graph
captures count as ended when they are captured: they do not run then, and replays are not seen.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptd.train.recorder_ends import Ends

__all__ = ["DeviceClock", "DeviceEnds"]

_RENEW_S = 60.0
_MOST = 4096
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal

Ended = Callable[..., None]


class DeviceClock:
    """The host's time of moments that a device knows as milliseconds since an anchor.

    An event is seen some time after it happened, never before; so the least difference between the
    two clocks that was ever seen is nearest to the truth.
    """

    def __init__(self) -> None:
        self._offset = math.inf

    def host_ns(self, device_ms: float, seen_ns: int) -> int:
        """Return when something happened that was seen at `seen_ns`, monotonic nanoseconds."""
        moment = device_ms * 1e6
        self._offset = min(self._offset, seen_ns - moment)
        return min(seen_ns, int(self._offset + moment))


class _Anchor:
    """An event to count from, and the clock that goes with it."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()
        self.clock = DeviceClock()
        self.until = time.monotonic() + _RENEW_S


class _Pending:
    """A call under way on a device."""

    __slots__ = ("anchor", "ended", "event", "work")

    def __init__(self, work: Any, ended: Ended) -> None:
        self.work = work
        self.ended = ended
        self.event: Any = None
        self.anchor: _Anchor | None = None


class DeviceEnds:
    """Tells when calls on an accelerator end; `ends` hears of waits."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._pending: deque[_Pending] = deque()
        self._anchors: dict[int, _Anchor] = {}
        self._free: bool | None = None

    def watch(self, work: Any, device: Any, output: Any, ended: Ended) -> None:
        """Call ``ended(failed, at)`` when `work` is done on `device`."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            ended(False)
            return
        pending = _Pending(work, ended)
        self._pending.append(pending)
        if len(self._pending) > _MOST:
            # Nobody could look at them in time. For ever under way, they would look like a hang.
            self._pending.popleft().ended(False)

        def waited(failed: bool) -> None:
            self._waited(pending, device.index or 0, failed)

        self._ends.at_its_wait(work, waited, output)

    def _waited(self, pending: _Pending, device: int, failed: bool) -> None:
        if failed or torch.cuda.is_current_stream_capturing():
            self._forget(pending)
            pending.ended(failed)
            return
        with torch.cuda.device(device):
            anchor = self._anchors.get(device)
            if anchor is None or anchor.until < time.monotonic():
                anchor = self._anchors[device] = _Anchor()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        pending.anchor, pending.event, pending.work = anchor, event, None

    def _forget(self, pending: _Pending) -> None:
        if pending in self._pending:
            self._pending.remove(pending)

    def poll(self) -> None:
        """Tell of what has ended. Called by one thread, which is no thread of the program's."""
        if not self._pending:
            return
        if self._free is None:
            self._free = _free_of_captures()
        for _ in range(len(self._pending)):
            try:
                pending = self._pending.popleft()
            except IndexError:
                return
            # Without that freedom asking would break the capture of a graph in another thread.
            if not self._free:
                pending.ended(False)
            elif not self._done(pending):
                self._pending.append(pending)

    def _done(self, pending: _Pending) -> bool:
        seen = time.monotonic_ns()
        work, event, anchor = pending.work, pending.event, pending.anchor
        if event is not None and anchor is not None:
            if not event.query() or not anchor.event.query():
                return False
            pending.ended(False, anchor.clock.host_ns(anchor.event.elapsed_time(event), seen))
            return True
        if work is None or not work.is_completed():
            return False
        pending.ended(work.exception() is not None, seen)
        return True


def _free_of_captures() -> bool:
    """Let this thread ask events while other threads capture graphs; False if it cannot be."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = next(w for line in maps.splitlines() for w in line.split() if "libcudart" in w)
        mode = ctypes.c_int(_THREAD_LOCAL)
        code = ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, StopIteration, AttributeError):
        return False
    return int(code) == 0
