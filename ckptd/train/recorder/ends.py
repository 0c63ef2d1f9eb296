"""How the end of a call is learnt."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptd.train.device import kind_of
from ckptd.train.recorder.calls import first_tensor

__all__ = ["DeviceClock", "DeviceEnds", "Ends"]


_MOST_AWAITED = 1024

Ended = Callable[[bool], None]
"""Called once, with whether the call failed; must not raise."""


class Ends:
    """Tells when works end: by their future, or when somebody waits, as the caller does at once.

    The future of an accelerator's work fires when that is enqueued: see `recorder_device`.
    """

    def __init__(self, broken: Callable[[BaseException], None]) -> None:
        self._broken = broken
        self._awaited: OrderedDict[int, tuple[Any, Ended]] = OrderedDict()
        self._by_output: dict[int, int] = {}
        self._library: torch.library.Library | None = None
        self._without: set[str] = set()
        self._wait: Any = None

    def install(self) -> None:
        """Watch the waits, which is all there is for some works of gloo, as send and receive."""
        self._watch_functional()
        self._wait = wait = dist.Work.wait

        def watched(work: Any, *args: Any, **more: Any) -> Any:
            entry = self._awaited.pop(id(work), None) if self._awaited else None
            if entry is None:
                return wait(work, *args, **more)
            try:
                result = wait(work, *args, **more)
            except BaseException:
                entry[1](True)
                raise
            entry[1](False)
            return result

        watched.__doc__ = wait.__doc__
        dist.Work.wait = watched  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Leave `Work.wait` as it was found."""
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None
        if self._library is not None:
            self._library._destroy()
            self._library = None
        self._awaited.clear()
        self._by_output.clear()

    def _watch_functional(self) -> None:
        """Watch the operator with which functional calls wait: it does so below Python."""
        redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def watched(keyset: Any, tensor: Any) -> Any:
            result = redispatch(keyset & below, tensor)
            if self._by_output:
                self._written(tensor)
            return result

        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("wait_tensor", watched, "BackendSelect", with_keyset=True)
        self._library = library

    def _written(self, tensor: Any) -> None:
        try:
            key = self._by_output.pop(_address(tensor), None)
            entry = None if key is None else self._awaited.pop(key, None)
            if entry is not None:
                entry[1](False)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def watch(self, work: Any, operator: str, output: Any, ended: Ended) -> None:
        """Call `ended` when `work` is done, which writes `output`."""
        if operator not in self._without:
            try:
                future = work.get_future()
            except (RuntimeError, NotImplementedError):
                self._without.add(operator)  # this backend has none for this operator
            else:
                future.add_done_callback(lambda done: ended(_has_failed(done)))
                return
        self.at_its_wait(work, ended, output)

    def at_its_wait(self, work: Any, ended: Ended, output: Any = None) -> None:
        """Call `ended` when somebody has waited for `work`, or for what it writes if that is given.

        Where the caller waits at once this is cheaper than a future, which takes the GIL in a
        thread of the backend.
        """
        # The same object comes back to the caller as long as it is held here.
        self._awaited[id(work)] = (work, ended)
        if len(self._awaited) > _MOST_AWAITED:
            # Nobody waits for this one any more. For ever under way, it would look like a hang.
            self._awaited.popitem(last=False)[1][1](False)
        written = None if output is None else first_tensor(output)
        if written is not None:
            self._by_output[_address(written)] = id(work)
            if len(self._by_output) > _MOST_AWAITED:
                del self._by_output[next(iter(self._by_output))]


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _has_failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # noqa: BLE001 - whatever it is, the program gets it from its own wait
        return True
    return False


_RENEW_S = 60.0
_MOST = 4096

DeviceEnded = Callable[..., None]


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

    def __init__(self, work: Any, ended: DeviceEnded) -> None:
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

    def watch(self, work: Any, device: Any, output: Any, ended: DeviceEnded) -> None:
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
            self._free = kind_of("cuda").ignore_captures()
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
