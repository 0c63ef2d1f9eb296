"""Calls as the native hook sees them; Python answers its questions, once for each thing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ckptd.crashes import report_crashes
from ckptd.errors import UsageError
from ckptd.monitor.ring import (
    COUNTER,
    GROUP_ROW,
    HEADER_BYTES,
    SLOT,
    RecorderState,
    RingShape,
    RingWriter,
    read,
)
from ckptd.runtime.torchextension import TorchExtension
from ckptd.train.recorder.calls import CallKind, Groups, Sites, call_kinds
from ckptd.train.recorder.ends import DeviceEnds, Ends, QueuedCall
from ckptd.train.recorder.hook import one_call
from ckptd.train.recorder.sources import Broken

__all__ = ["NativeSource", "build", "built", "load", "main"]


_NAME = "ckptd_recorder"
_EXTENSION = TorchExtension(
    _NAME,
    Path(__file__).with_name("recorder.cpp"),
    purpose="the native recorder",
    libraries=("c10", "torch_cpu", "torch_python", "torch"),
    hint="the recorder in Python is used until then",
)


def built() -> Path | None:
    """Return the newest build that fits, or None. What others may write is never taken."""
    return _EXTENSION.built()


def load(path: Path) -> ModuleType:
    """Import a build; raises what an extension that does not fit raises."""
    known = sys.modules.get(_NAME)
    if known is not None:
        return known
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def build() -> Path:
    """Compile, unless it is there; return the file. See `TorchExtension.build`."""
    return _EXTENSION.build()


def main() -> None:
    """Build, and print the file."""
    report_crashes()
    try:
        sys.stdout.write(f"{build()}\n")
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()


_FIELDS: Mapping[str, Any] = SLOT.fields or {}
_LAYOUT = {
    "header": HEADER_BYTES,
    "counters": COUNTER,
    "slot": SLOT.itemsize,
    "slot_group": _FIELDS["group"][1],
    "slot_end": _FIELDS["end"][1],
    "group": GROUP_ROW.itemsize,
}
_SMALL = RingShape(slots=4, groups=2, members=2, texts=8)


class NativeSource:
    """Lets the native hook write the ring."""

    name = "native"
    state = RecorderState.CALLS

    def __init__(self, ring: RingWriter, broken: Broken) -> None:
        self._ring = ring
        self._broken = broken
        self._native: ModuleType | None = None
        self._kinds = call_kinds()
        self._answers: _Answers
        self._told = False

    def start(self) -> None:
        """See `Source`."""
        path = built()
        if path is None:
            raise RuntimeError("no build fits: `ckptd recorder build` makes one")
        native = load(path)
        if native.layout() != _LAYOUT:
            raise RuntimeError("the build writes another layout")
        native.install([_as_row(i, kind) for i, kind in enumerate(self._kinds)])
        self._native = native
        try:
            self._test(native)
            self._begin(native, self._ring)
        except BaseException:
            self.stop()
            raise

    def silence(self) -> None:
        """See `Source`."""
        if self._native is not None:
            self._native.stop()

    def stop(self) -> None:
        """See `Source`."""
        native, self._native = self._native, None
        if native is not None:
            native.uninstall()
            self._answers.remove()

    def beat(self) -> None:
        """See `Source`."""
        native = self._native
        if native is None:
            return
        self._answers.device.poll()
        if not self._told and native.error():
            self._told = True
            self._broken(RuntimeError(native.error()))

    def _begin(self, native: ModuleType, ring: RingWriter) -> None:
        self._answers = _Answers(ring, self._kinds, self._broken, native)
        native.begin(ring.address, ring.shape.slots, ring.shape.groups_at, self._answers)

    def _test(self, native: ModuleType) -> None:
        """Let the hook see a call of one rank that reaches no network, in a ring of its own."""
        path = self._ring.path.with_suffix(".test")
        ring = RingWriter(path, self._ring.identity, _SMALL)
        try:
            self._begin(native, ring)
            tensor = one_call()
            native.end()
            view = read(path)
        finally:
            path.unlink()
        seen = [(int(c["bytes"]), int(c["seq"]), bool(c["end"] > 0)) for c in view.calls]
        if seen != [(12, 1, True)] or tensor.tolist() != [5.0] * 3 or native.error():
            raise RuntimeError(f"the self-test of the native hook saw {seen} {native.error()}")


class _OnDevice:
    """See `DeviceCall`."""

    __slots__ = ("_life", "_native", "_number", "_row", "_seq")

    def __init__(self, native: ModuleType, row: int, number: int, seq: int) -> None:
        self._native = native
        self._row = row
        self._number = number
        self._seq = seq
        self._life = native.life()

    def reached(self) -> None:
        self._native.reached(self._number, self._life)

    def ended(self, failed: bool, at: int | None = None, *, seen: bool = True) -> None:
        self._native.leave(self._row, self._number, self._seq, failed, at or 0, seen, self._life)


class _Answers:
    """What the native hook asks. Nothing here raises but what it then steps aside for."""

    def __init__(
        self, ring: RingWriter, kinds: list[CallKind], broken: Broken, native: ModuleType
    ) -> None:
        self._ring = ring
        self._kinds = kinds
        self._native = native
        self.groups = Groups(ring)
        self._sites = Sites(ring)
        self.foreign = self._sites.foreign
        self.site = self._sites.named
        self._ends = Ends(broken)
        self._ends_on = False
        # By number, until the backend has taken or refused them: it may make calls within one.
        self._begun: dict[int, tuple[_OnDevice, QueuedCall | None]] = {}
        self.device = DeviceEnds(self._ends)

    def row(self, kind: int, group: Any, peer: int) -> tuple[int, int]:
        """Return the row of a group or channel and its count; -1 where there is no room."""
        row = self.groups.row(self._kinds[kind], dist.ProcessGroup.unbox(group), peer)
        return (-1, 0) if row is None else (row.index, row.entered)

    def op(self, kind: int, reduction: int) -> int:
        """Return the code of an operation."""
        texts = self._kinds[kind].texts
        return self._ring.text(texts[reduction] if reduction < len(texts) else texts[0])

    def dtype(self, tensor: torch.Tensor) -> int:
        """Return the code of an element type."""
        return self._ring.text(str(tensor.dtype).removeprefix("torch."))

    def enqueue(self, row: int, number: int, seq: int, tensor: torch.Tensor) -> None:
        """Take note of a call that this thread is about to enqueue on an accelerator."""
        call = _OnDevice(self._native, row, number, seq)
        queued = self.device.enqueue(tensor.device, call)
        self._begun[number] = call, queued
        if queued is None:
            call.reached()  # for all that anybody will know

    def taken(self, number: int, work: Any, output: Any) -> None:
        """Take note that the backend has taken a call; `work` is None where there is none."""
        call, queued = self._begun.pop(number, (None, None))
        if call is None:
            return  # its beginning has failed, which is logged
        if queued is None:
            call.ended(False, seen=False)
            return
        if not self._ends_on:
            self._ends_on = True
            self._ends.install()
        self.device.taken(queued, None if work is None else dist.Work.unbox(work), output)

    def refused(self, number: int) -> None:
        """Take note that the backend has refused a call."""
        _, queued = self._begun.pop(number, (None, None))  # none where its beginning has failed
        if queued is not None:
            self.device.refused(queued)

    def remove(self) -> None:
        """Take away what was hooked for accelerators."""
        if self._ends_on:
            self._ends.remove()


def _as_row(index: int, kind: CallKind) -> dict[str, Any]:
    names = ("operator", "group", "tensors", "root", "peer", "splits", "async_op", "reduce")
    row = {name: getattr(kind, name) for name in (*names, "is_p2p")}
    sends, variable = kind.operator == "send", kind.operator == "alltoall_"
    return row | {"index": index, "sends": sends, "variable": variable}
