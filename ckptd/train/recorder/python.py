"""Calls as the dispatcher hook in Python sees them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from ckptd.monitor.job import CallFlag
from ckptd.monitor.ring import RecorderState, RingGroup, RingWriter
from ckptd.train.recorder.calls import CallKind, Groups, Sites, first_tensor, nbytes
from ckptd.train.recorder.ends import DeviceEnds, Ends
from ckptd.train.recorder.hook import DispatcherHook, hook_works
from ckptd.train.recorder.sources import Broken

__all__ = ["PythonSource"]

# Group, number, number in the group; the device that ends it (None: the host), what it writes, and
# whether the caller waits at once.
_Started = tuple[RingGroup, int, int, Any, Any, bool]

# Every call passes here, so nothing is looked up twice.
_ASYNC, _VARIABLE = CallFlag.ASYNC.value, CallFlag.VARIABLE.value
_unbox_group = dist.ProcessGroup.unbox
_unbox_work: Any = dist.Work.unbox  # None where there is no work to wait for
# Frames between a call's site and the search for it: of the hook's kernel, and of `begin`.
_OWN_FRAMES = 2


class PythonSource:
    """Writes down what the hook in Python is told."""

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
            bytes_ = dtype = 0
            if sized and first is not None:
                bytes_, dtype = nbytes(tensors), self._code(first.dtype)
            number, seq = self._ring.enter(
                row,
                self._code(kind.text(args)),
                bytes_,
                dtype,
                args[kind.root] if kind.root >= 0 else -1,
                flags,
                self._sites.here(_OWN_FRAMES),
            )
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)
            return None
        device = None if first is None or first.is_cpu else first.device
        return row, number, seq, device, args[0], at >= 0 and not is_async

    def launched(self, call: _Started | None, kind: CallKind, result: Any) -> None:
        """See `HookTarget`."""
        if call is None:
            return
        try:
            row, number, seq, device, written, waits = call
            ended = partial(self._ended, row, number, seq)
            if result is None:
                ended(False)
                return
            work = _unbox_work(result[-1] if isinstance(result, tuple) else result)
            if work is None:
                ended(False)
            elif device is not None:
                self._device.watch(work, device, written, ended)
            elif waits:
                self._ends.at_its_wait(work, ended)
            else:
                self._ends.watch(work, kind.operator, written, ended)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def failed(self, call: _Started | None) -> None:
        """See `HookTarget`."""
        if call is not None:
            self._ended(*call[:3], failed=True)

    def _ended(
        self, row: RingGroup, number: int, seq: int, failed: bool, at: int | None = None
    ) -> None:
        if not self.on:
            return
        try:
            self._ring.leave(row, number, seq, failed=failed, at=at)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def _channel(self, kind: CallKind, group: Any, args: tuple[Any, ...]) -> RingGroup | None:
        return self._groups.row(kind, group, args[kind.peer] if kind.peer >= 0 else -1)

    def _code(self, thing: object) -> int:
        code = self._codes.get(thing)
        if code is None:
            code = self._codes[thing] = self._ring.text(str(thing).removeprefix("torch."))
        return code
