"""Source in Python: writes the calls that the dispatcher hook sees into the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from ckptd.monitor.job import CallFlag
from ckptd.monitor.ring import RecorderState, RingGroup, RingWriter
from ckptd.monitor.torch.recorder.calls import CallKind, Groups, Sites, first_tensor, nbytes
from ckptd.monitor.torch.recorder.ends import DeviceEnds, Ends, QueuedCall
from ckptd.monitor.torch.recorder.finite import FiniteCheck, sums
from ckptd.monitor.torch.recorder.hook import DispatcherHook, hook_works
from ckptd.monitor.torch.recorder.sources import Broken

# Group, number, number in the group; whether a device carries it out, and as what (None: its end
# will not be known); what it writes, and whether the caller waits at once.
_Started = tuple[RingGroup, int, int, bool, QueuedCall | None, Any, bool]

# Every call passes here, so nothing is looked up twice.
_ASYNC, _VARIABLE = CallFlag.ASYNC.value, CallFlag.VARIABLE.value
_QUEUED = CallFlag.QUEUED.value
_unbox_group = dist.ProcessGroup.unbox
_unbox_work: Any = dist.Work.unbox  # None where there is no work to wait for
# Frames between a call's site and the search for it: of the hook's kernel, and of `begin`.
_OWN_FRAMES = 2


class _OnDevice:
    """See `DeviceCall`."""

    __slots__ = ("_number", "_row", "_seq", "_source")

    def __init__(self, source: PythonSource, row: RingGroup, number: int, seq: int) -> None:
        self._source = source
        self._row = row
        self._number = number
        self._seq = seq

    def reached(self) -> None:
        self._source._reached(self._number)

    def ended(self, failed: bool, at: int | None = None, *, seen: bool = True) -> None:
        self._source._ended(self._row, self._number, self._seq, failed, at, seen=seen)


class PythonSource:
    """Writes down what the hook in Python receives."""

    name = "python"
    state = RecorderState.CALLS

    def __init__(self, ring: RingWriter, broken: Broken) -> None:
        self.on = True
        self._ring = ring
        self._broken = broken
        self._groups = Groups(ring)
        self._sites = Sites(ring)
        self._ends = Ends(broken)
        self._device = DeviceEnds(self._ends)
        self._hook = DispatcherHook(self)
        self._codes: dict[object, int] = {}
        self._finite: FiniteCheck | None = None

    def start(self) -> None:
        """See `Source`."""
        try:
            self._hook.install()
            if not hook_works(self._hook):
                raise RuntimeError("the self-test of the dispatcher hook saw something else")
            self._ends.install()
        except BaseException:
            self.stop()
            raise

    def silence(self) -> None:
        """See `Source`."""
        self.on = False

    def look(self, finite: FiniteCheck) -> None:
        """See `Source`."""
        self._finite = finite

    def stop(self) -> None:
        """See `Source`."""
        self._hook.remove()
        self._ends.remove()

    def beat(self) -> None:
        """See `Source`."""
        self._device.poll()

    # --- calls ----------------------------------------------------------------------------------

    def begin(self, kind: CallKind, args: tuple[Any, ...]) -> _Started | None:
        """See `HookTarget`."""
        try:
            group = _unbox_group(args[kind.group])
            row = self._channel(kind, group, args) if kind.is_p2p else self._groups.of(group)
            if row is None:
                self._ring.lost()
                return None
            sized = kind.tensors >= 0
            tensors = args[kind.tensors] if sized else args[0]
            first = first_tensor(tensors)
            at = kind.async_op
            is_async = at >= 0 and (len(args) <= at or args[at] is not False)
            flags = _ASYNC if is_async else 0
            if kind.may_vary and kind.is_variable(args):
                flags |= _VARIABLE
            on_device = first is not None and not first.is_cpu
            if on_device:
                flags |= _QUEUED
            bytes_ = dtype = 0
            if sized and first is not None:
                bytes_, dtype = nbytes(tensors), self._code(first.dtype)
            operation = kind.text(args)
            number, seq = self._ring.enter(
                row,
                self._code(operation),
                bytes_,
                dtype,
                args[kind.root] if kind.root >= 0 else -1,
                flags,
                self._sites.here(_OWN_FRAMES),
            )
            if self._finite is not None and sums(operation):
                self._finite.look(tensors, row.index, seq)
            queued = None
            if on_device:
                call = _OnDevice(self, row, number, seq)
                queued = self._device.enqueue(first.device, call)
                if queued is None:
                    self._ring.reached(number)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)
            return None
        return row, number, seq, on_device, queued, args[0], at >= 0 and not is_async

    def launched(self, call: _Started | None, kind: CallKind, result: Any) -> None:
        """See `HookTarget`."""
        if call is None:
            return
        try:
            row, number, seq, on_device, queued, written, waits = call
            last = result[-1] if isinstance(result, tuple) else result
            work = None if last is None else _unbox_work(last)
            if queued is not None:
                self._device.taken(queued, work, written)
            elif work is None or on_device:
                self._ended(row, number, seq, failed=False, seen=not on_device)
            elif waits:
                self._ends.at_its_wait(work, partial(self._ended, row, number, seq))
            else:
                ended = partial(self._ended, row, number, seq)
                self._ends.watch(work, kind.operator, written, ended)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def failed(self, call: _Started | None) -> None:
        """See `HookTarget`."""
        if call is not None:
            if call[4] is not None:
                self._device.refused(call[4])
            self._ended(*call[:3], failed=True)

    def _reached(self, number: int) -> None:
        if not self.on:
            return
        try:
            self._ring.reached(number)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def _ended(
        self,
        row: RingGroup,
        number: int,
        seq: int,
        failed: bool,
        at: int | None = None,
        *,
        seen: bool = True,
    ) -> None:
        if not self.on:
            return
        try:
            self._ring.leave(row, number, seq, failed=failed, at=at, seen=seen)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def _channel(self, kind: CallKind, group: Any, args: tuple[Any, ...]) -> RingGroup | None:
        return self._groups.row(kind, group, args[kind.peer] if kind.peer >= 0 else -1)

    def _code(self, thing: object) -> int:
        code = self._codes.get(thing)
        if code is None:
            code = self._codes[thing] = self._ring.text(str(thing).removeprefix("torch."))
        return code
