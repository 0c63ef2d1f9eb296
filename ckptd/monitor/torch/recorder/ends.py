"""Ends of calls: by futures, waits, and device events (CUDA events, their clock, captures).

In it: how many calls and events are followed at once.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptd.base.torch.device import DeviceKind, kind_of
from ckptd.monitor.torch.recorder.calls import first_tensor

_log = logging.getLogger("ckptd.monitor")
_MOST_AWAITED = 1024

Ended = Callable[..., None]
"""Called once, as ``ended(failed)``, or ``ended(failed, seen=False)``; must not raise.

See `DeviceCall.ended`.
"""


Forgotten = Callable[[], None]
"""Called where the program has not waited for a work for so long that it is forgotten."""


class _Awaited(NamedTuple):
    work: Any
    ended: Ended
    forgotten: Forgotten
    number: int


class Ends:
    """Tells when works end: by their future, or when the program waits, as the caller does at once.

    The future of an accelerator's work fires when that is enqueued: see `DeviceEnds`.
    """

    def __init__(self, broken: Callable[[BaseException], None]) -> None:
        self._broken = broken
        self._awaited: OrderedDict[int, _Awaited] = OrderedDict()
        # An address and the id of a work serve again when that is let go of: numbers do not.
        self._by_output: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count()
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
                self._tell(entry.ended, True)
                raise
            self._tell(entry.ended, False)
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

    def _tell(self, ended: Ended, failed: bool) -> None:
        try:
            ended(failed)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

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
            key, number = self._by_output.pop(_address(tensor), (0, -1))
            entry = self._awaited.get(key)
            if entry is not None and entry.number == number:
                self._awaited.pop(key, None)
                entry.ended(False)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def watch(self, work: Any, operator: str, output: Any, ended: Ended) -> None:
        """Call `ended` when `work` is done, which writes `output`."""
        if operator not in self._without:
            try:
                future = work.get_future()
            except RuntimeError:
                self._without.add(operator)  # this backend has none for this operator
            else:
                future.add_done_callback(lambda done: ended(_has_failed(done)))
                return
        self.at_its_wait(work, ended, output)

    def forget(self, work: Any) -> None:
        """Look no more for a wait for `work`, whose tensors live as long as it does."""
        self._awaited.pop(id(work), None)

    def at_its_wait(
        self, work: Any, ended: Ended, output: Any = None, forgotten: Forgotten | None = None
    ) -> None:
        """Call `ended` when the program has waited for `work`, or for `output` if that is given.

        Where the caller waits at once this is cheaper than a future, which takes the GIL in a
        thread of the backend. Without a wait, and without `forgotten`, by which the caller looks
        itself, the call counts as one whose end is not known: for ever under way, it would look
        like a hang.
        """
        # The same object comes back to the caller as long as it is held here.
        number = next(self._numbers)
        forgotten = forgotten or partial(ended, False, seen=False)
        self._awaited[id(work)] = _Awaited(work, ended, forgotten, number)
        if len(self._awaited) > _MOST_AWAITED:
            self._awaited.popitem(last=False)[1].forgotten()
        written = None if output is None else first_tensor(output)
        if written is not None:
            self._by_output[_address(written)] = id(work), number
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
_MOST_IDLE = 256
"""Events that are kept for calls to come."""


class DeviceCall(Protocol):
    """A call of the ring that a device carries out. Nothing here raises."""

    def reached(self) -> None:
        """Write down that the device has come to it."""

    def ended(self, failed: bool, at: int | None = None, *, seen: bool = True) -> None:
        """Write down that it has ended, now or `at` that time in monotonic nanoseconds.

        Without `seen` its end is not known.
        """


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

    def __init__(self, kind: DeviceKind, stream: torch.Stream) -> None:
        self.event = kind.make_event(timing=True)
        self.event.record(stream)
        self.clock = DeviceClock()
        self.until = time.monotonic() + _RENEW_S


class QueuedCall:
    """A call that is enqueued on a device, from before it is. Made by `DeviceEnds.enqueue`."""

    __slots__ = (
        "anchor",
        "begun",
        "begun_on",
        "call",
        "device",
        "end",
        "end_on",
        "kind",
        "over",
        "work",
    )

    def __init__(
        self,
        call: DeviceCall,
        kind: DeviceKind,
        device: torch.device,
        stream: torch.Stream,
        begun: torch.Event,
    ) -> None:
        self.call = call
        self.kind = kind
        self.device = device
        self.begun_on = self.end_on = stream
        self.begun: torch.Event | None = begun
        """Behind what was enqueued before it; None once the device has come there."""
        self.work: Any = None
        """From when the backend took the call until the program has waited for it."""
        self.end: torch.Event | None = None
        """Behind the program's wait."""
        self.anchor: _Anchor | None = None
        self.over = False


class FollowedKinds:
    """Which kinds of devices say when they come to calls and end them; what does not is logged."""

    def __init__(self) -> None:
        self._blind: set[DeviceKind] = set()

    def follows(self, kind: DeviceKind) -> bool:
        """Tell whether calls on devices of a kind can be followed, as far as that is known."""
        if not kind.has_streams:
            self._cannot_look(kind, f"torch.{kind.type} has no events")
        return kind not in self._blind

    def may_ask(self, device: torch.device) -> bool:
        """Permit this thread to query events of a device; False where that would break captures."""
        kind = kind_of(device.type)
        if kind not in self._blind and not kind.ignore_captures(device):
            # Without that freedom asking would break a capture in another thread.
            self._cannot_look(kind, "asking for events would break captures of graphs")
        return kind not in self._blind

    def _cannot_look(self, kind: DeviceKind, why: str) -> None:
        if kind not in self._blind:
            self._blind.add(kind)
            _log.warning(
                "cannot see when collectives on %s tensors end (%s): each counts as ended when "
                "enqueued, and a hang inside one looks like a hang outside",
                kind.type,
                why,
            )


class DeviceEnds:
    """Tells when devices come to calls and end them; `ends` tells of waits.

    Parameters
    ----------
    ends
        Shared with calls of the host.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._pending: deque[QueuedCall] = deque()
        self._anchors: dict[torch.device, _Anchor] = {}
        # An event belongs to the device on which it was first recorded.
        self._idle: dict[tuple[torch.device, bool], list[torch.Event]] = {}
        self._captures: dict[DeviceKind, Callable[[], bool]] = {}
        self._followed = FollowedKinds()
        # A wait that fails and the look at events are in two threads: each call ends once.
        self._lock = threading.Lock()

    # -- in the thread that calls ----------------------------------------------------------------

    def enqueue(self, device: torch.device, call: DeviceCall) -> QueuedCall | None:
        """Take note that a call is about to be enqueued behind what the current stream holds.

        None where its end will not be known: it is captured into a graph, which runs later, or
        this kind of device has no events, which is logged once. The backend may block before it
        takes the call, so devices are looked at from now on.
        """
        kind = kind_of(device.type)
        if not self._followed.follows(kind) or self._is_capturing(kind):
            return None
        stream = kind.current_stream(device)
        begun = self._recorded(kind, device, stream, timing=False)
        queued = QueuedCall(call, kind, device, stream, begun)
        self._pending.append(queued)
        if len(self._pending) > _MOST:
            # Too many to look at in time. For ever under way, they would look like a hang.
            self._end(self._pending.popleft(), seen=False)
        return queued

    def _is_capturing(self, kind: DeviceKind) -> bool:
        # Asked twice a call, of a kind that is in use: `DeviceKind.is_capturing` asks for more.
        asked = self._captures.get(kind)
        if asked is None:
            asked = getattr(kind.module, "is_current_stream_capturing", None) or bool
            self._captures[kind] = asked
        return asked()

    def _recorded(
        self, kind: DeviceKind, device: torch.device, stream: torch.Stream, *, timing: bool
    ) -> torch.Event:
        """Return an event behind what a stream of a device holds by now."""
        idle = self._idle.get((device, timing))
        event = idle.pop() if idle else kind.make_event(timing=timing)
        event.record(stream)
        return event

    def _give_back(self, device: torch.device, event: torch.Event, *, timing: bool) -> None:
        idle = self._idle.setdefault((device, timing), [])
        if len(idle) < _MOST_IDLE:
            idle.append(event)

    def refused(self, queued: QueuedCall) -> None:
        """Look no more at a call that the backend did not take."""
        with self._lock:
            queued.over = True

    def taken(self, queued: QueuedCall, work: Any, output: Any) -> None:
        """Take note that the backend has taken a call: `work`, which writes `output`.

        A call that is coalesced with others has no work, or one that counts as completed before it
        has begun: its end will not be known.
        """
        if work is None or getattr(distributed_c10d._world, "pg_coalesce_state", None):
            self._end(queued, seen=False)
            return
        queued.work = work
        # Without a wait of the program the work itself is asked.
        self._ends.at_its_wait(work, partial(self._waited, queued), output, _nothing)

    def _waited(self, queued: QueuedCall, failed: bool) -> None:
        kind = queued.kind
        if failed or self._is_capturing(kind):
            self._end(queued, failed, seen=failed)
            return
        device = queued.device
        stream = kind.current_stream(device)
        anchor = self._anchors.get(device)
        if anchor is None or anchor.until < time.monotonic():
            anchor = self._anchors[device] = _Anchor(kind, stream)
        queued.end_on, queued.anchor = stream, anchor
        # From now on the other thread looks.
        queued.end = self._recorded(kind, device, stream, timing=True)
        queued.work = None

    def _end(
        self, queued: QueuedCall, failed: bool = False, at: int | None = None, *, seen: bool = True
    ) -> None:
        with self._lock:
            if not queued.over:
                queued.over = True
                queued.call.ended(failed, at, seen=seen)

    # -- in the thread that looks ----------------------------------------------------------------

    def poll(self) -> None:
        """Tell what devices have come to and ended. Called by one thread, which makes no calls."""
        # A queue is in order: behind an event that has not happened none has.
        ahead: set[torch.Stream] = set()
        open_: set[torch.Stream] = set()
        kept: list[QueuedCall] = []
        try:
            for _ in range(len(self._pending)):
                try:
                    queued = self._pending.popleft()
                except IndexError:
                    return
                if queued.over:
                    continue
                if not self._followed.may_ask(queued.device):
                    self._end(queued, seen=False)
                elif not self._is_over(queued, ahead, open_):
                    kept.append(queued)
        finally:
            # Before what was enqueued meanwhile: the order is that of the queues.
            self._pending.extendleft(reversed(kept))

    def _is_over(
        self, queued: QueuedCall, ahead: set[torch.Stream], open_: set[torch.Stream]
    ) -> bool:
        seen = time.monotonic_ns()
        begun = queued.begun
        if begun is not None:
            if queued.begun_on in ahead:
                return False
            if not begun.query():
                ahead.add(queued.begun_on)
                return False
            self._reached(queued, begun)
        end, anchor, work = queued.end, queued.anchor, queued.work
        if end is not None and anchor is not None:
            if queued.end_on in open_:
                return False
            if not end.query() or not anchor.event.query():
                open_.add(queued.end_on)
                return False
            self._end(queued, at=_host_ns(anchor, end, seen))
            self._give_back(queued.device, end, timing=True)
            return True
        if work is None or not work.is_completed():
            return False
        self._end(queued, _work_has_failed(work), seen)
        self._ends.forget(work)
        return True

    def _reached(self, queued: QueuedCall, begun: torch.Event) -> None:
        queued.begun = None
        self._give_back(queued.device, begun, timing=False)
        with self._lock:
            if not queued.over:
                queued.call.reached()


def _nothing() -> None:
    """Do nothing."""


def _host_ns(anchor: _Anchor, end: torch.Event, seen: int) -> int:
    """Return when an event happened; when it was seen where the device has no clock for it."""
    try:
        return anchor.clock.host_ns(anchor.event.elapsed_time(end), seen)
    except RuntimeError:
        return seen


def _work_has_failed(work: Any) -> bool:
    """Whether a work that is completed has failed, as far as its backend says.

    `Work.exception` would print that it is deprecated. A future of NCCL's that is done says only
    that the call was enqueued; its other one has the result.
    """
    try:
        future = work.get_future_result()
    except RuntimeError:
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        return bool(future.done()) and _has_failed(future)
    return bool(future.done()) and (_has_failed(future) or bool(int(future.value())))
