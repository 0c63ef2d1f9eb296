"""Calls as the dispatcher hook in Python sees them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ckptd.monitor.ring import RingGroup, RingWriter
from ckptd.monitor.ringlayout import RecorderState
from ckptd.monitor.view import CallFlag
from ckptd.train.recorder_calls import CallKind, first_tensor, nbytes
from ckptd.train.recorder_device import DeviceEnds
from ckptd.train.recorder_ends import Ends
from ckptd.train.recorder_groups import Groups
from ckptd.train.recorder_hook import DispatcherHook, hook_works
from ckptd.train.recorder_sites import Sites
from ckptd.train.recorder_sources import Broken

__all__ = ["PythonSource"]

_Call = tuple[RingGroup, int, int]
# With the device that ends it (None: the host), a tensor that it writes, and whether the caller
# waits at once.
_Started = tuple[_Call, Any, Any, bool]


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
            group = self._group(kind, args)
            if group is None:
                self._ring.lost()
                return None
            tensors = args[max(kind.tensors, 0)]
            first = first_tensor(tensors)
            sized = first is not None and kind.tensors >= 0
            is_async = kind.is_async(args)
            flags = CallFlag.ASYNC.value if is_async else 0
            if kind.is_variable(args):
                flags |= CallFlag.VARIABLE.value
            number, seq = self._ring.enter(
                group,
                self._code(kind.text(args)),
                nbytes(tensors) if sized else 0,
                self._code(first.dtype) if sized else 0,
                args[kind.root] if kind.root >= 0 else -1,
                flags,
                self._sites.here(),
            )
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)
            return None
        device = None if first is None or first.is_cpu else first.device
        waits = kind.async_op >= 0 and not is_async
        return (group, number, seq), device, first_tensor(args[0]), waits

    def launched(self, call: _Started | None, kind: CallKind, result: Any) -> None:
        """See `HookTarget`."""
        if call is None:
            return
        try:
            started, device, output, waits = call
            work = None
            if result is not None:
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)

            def ended(failed: bool, at: int | None = None) -> None:
                self._ended(started, failed=failed, at=at)

            if work is None:
                ended(False)
            elif device is None:
                self._ends.watch(work, kind.operator, output, ended, waits=waits)
            else:
                self._device.watch(work, device, output, ended)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def failed(self, call: _Started | None) -> None:
        """See `HookTarget`."""
        if call is not None:
            self._ended(call[0], failed=True)

    def _ended(self, call: _Call, *, failed: bool, at: int | None = None) -> None:
        if not self.on:
            return
        try:
            self._ring.leave(*call, failed=failed, at=at)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def _group(self, kind: CallKind, args: tuple[Any, ...]) -> RingGroup | None:
        peer = args[kind.peer] if kind.peer >= 0 else -1
        return self._groups.row(kind, dist.ProcessGroup.unbox(args[kind.group]), peer)

    def _code(self, thing: object) -> int:
        code = self._codes.get(thing)
        if code is None:
            code = self._codes[thing] = self._ring.text(str(thing).removeprefix("torch."))
        return code
