"""Native recorder: its build, load, self test, and answers to its questions."""

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
from torch.distributed import distributed_c10d

from ckptd.base.runtime.torchextension import TorchExtension
from ckptd.base.torch.device import kind_of
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
from ckptd.monitor.torch.recorder.calls import CallKind, Groups, Sites, call_kinds
from ckptd.monitor.torch.recorder.ends import FollowedKinds
from ckptd.monitor.torch.recorder.finite import FiniteCheck, sums
from ckptd.monitor.torch.recorder.hook import one_call
from ckptd.monitor.torch.recorder.sources import Broken

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
        raise ImportError(f"'{path} is not a module'")
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
            raise RuntimeError("no build fits: run `ckptd recorder build`")
        native = load(path)
        if native.layout() != _LAYOUT:
            raise RuntimeError("the build uses another ring layout")
        native.install([_as_row(i, kind) for i, kind in enumerate(self._kinds)])
        self._native = native
        try:
            self._test(native)
            self._begin(native, self._ring)
        except BaseException:
            self.stop()
            raise

    def look(self, finite: FiniteCheck) -> None:
        """See `Source`."""
        self._answers.finite = finite
        if self._native is not None:
            self._native.look_at({i for i, k in enumerate(self._kinds) if sums(k.texts[0])})

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
        native.look()
        if not self._told and native.error():
            self._told = True
            self._broken(RuntimeError(native.error()))

    def _begin(self, native: ModuleType, ring: RingWriter) -> None:
        self._answers = _Answers(ring, self._kinds, native)
        native.begin(ring.address, ring.shape.slots, ring.shape.groups_at, self._answers)

    def _test(self, native: ModuleType) -> None:
        """Test the hook with a call of one rank, without a network, in a ring of its own."""
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


class _Answers:
    """Answers to the native hook; where a method raises, the hook steps aside."""

    def __init__(self, ring: RingWriter, kinds: list[CallKind], native: ModuleType) -> None:
        self._ring = ring
        self._kinds = kinds
        self._native = native
        self.groups = Groups(ring)
        self._sites = Sites(ring)
        self.foreign = self._sites.foreign
        self.site = self._sites.named
        self._followed = FollowedKinds()
        self._wait: Any = None
        self.finite: FiniteCheck | None = None

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

    def follows(self, device: torch.device) -> bool | None:
        """Tell whether calls on such devices may be captured; None where their ends are not known.

        Asked once a kind, before the first of its calls: waits are watched from then on.
        """
        kind = kind_of(device.type)
        if not self._followed.follows(kind):
            return None
        if self._wait is None:
            self._wait = dist.Work.wait
            watched = self._native.watch_waits(
                dist.Work, self._wait, distributed_c10d._world.pg_coalesce_state
            )
            dist.Work.wait = watched  # type: ignore[method-assign]
        return hasattr(kind.module, "is_current_stream_capturing")

    def look(self, kind: int, reduction: int, tensors: Any, row: int, seq: int) -> None:
        """Look at the input of a call."""
        texts = self._kinds[kind].texts
        if self.finite is not None and sums(texts[reduction if reduction < len(texts) else 0]):
            self.finite.look(tensors, row, seq)

    def captures(self, device: torch.device) -> bool:
        """Tell whether this thread's current stream is being captured into a graph."""
        return kind_of(device.type).is_capturing()

    def may_ask(self, device: torch.device) -> bool:
        """Permit this thread, which looks at events, to query the driver; False where it cannot."""
        return self._followed.may_ask(device)

    def remove(self) -> None:
        """Leave `Work.wait` as it was found."""
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]


def _as_row(index: int, kind: CallKind) -> dict[str, Any]:
    names = ("operator", "group", "tensors", "root", "peer", "splits", "async_op", "reduce")
    row = {name: getattr(kind, name) for name in (*names, "is_p2p")}
    sends, variable = kind.operator == "send", kind.operator == "alltoall_"
    return row | {"index": index, "sends": sends, "variable": variable}
