"""Clones of what may change at once; torch makes them alike on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.torch.copy import CopyForm, CopySources
from ckptd.checkpoint.torch.feed import CopyStep, StridedWindow
from ckptd.checkpoint.torch.ondevice import (
    DeviceCopies,
    DeviceLane,
    DeviceSnapshot,
    OnDevice,
    _packed,
    cloned,
)
from ckptd.checkpoint.torch.state.leaves import TensorLeaf

CPU = torch.device("cpu")


class HostLane(DeviceLane):
    """Copies nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        pass


class HostCopies(DeviceCopies):
    """Has lanes on the host."""

    def lanes(
        self,
        devices: Iterable[torch.device],
        slot: Slot,
        steps: Sequence[CopyStep],
        sources: Callable[[Sequence[int]], Sequence[torch.Tensor]],
        is_placed: Callable[[int], bool],
    ) -> dict[torch.device, DeviceLane]:
        return {device: HostLane(device) for device in devices}


class Copied(TorchDispatchMode):
    """Notes the elements of every tensor that is cloned, as `contiguous` does too."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_windows_of_a_turned_tensor_share_one_copy_of_it() -> None:
    """Each of its cuts kept a copy of the whole until all were cloned: n times the memory."""
    rows, columns, size = 24, 10, 4
    tensors = {name: torch.randn(columns, rows).t() for name in ("w", "v")}
    leaves = {n: TensorLeaf(n, t, t, "model", "param", n, t) for n, t in tensors.items()}
    steps = [
        CopyStep(
            name, StridedWindow((2, columns), (columns, 1), at * columns), 0, 2 * columns * size
        )
        for name in tensors
        for at in range(0, rows, 2)
    ]
    sources = CopySources(CopyForm(steps, leaves, lambda leaf: False), leaves)
    slot, early = Slot(0, 64), list(range(len(steps)))
    parts = {CPU: OnDevice(early=early)}
    with Copied() as copied:
        snapshot = DeviceSnapshot(
            HostCopies(), slot, parts, sources.form.steps, sources.parts, clone=True, timeout_s=1.0
        )
    assert copied.numels.count(rows * columns) == len(tensors)
    wanted = torch.cat([t.clone() for t in tensors.values()])
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(torch.cat(list(snapshot._sources(early))), wanted)
    snapshot.release()
    slot.close()


def test_no_memory_for_what_is_cloned_is_no_memory_for_the_clones() -> None:
    def full() -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no memory for a contiguous copy")

    assert cloned(CPU, 8, full) is None


class _NoNewTypes(TorchDispatchMode):
    """Joins tensors as CUDA does: not those of types that came late."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.cat.default and args[0][0].dtype not in (
            torch.uint8,
            torch.float32,
        ):
            raise RuntimeError(f'"cat_cuda" not implemented for {args[0][0].dtype}')
        return func(*args, **(kwargs or {}))


def test_small_tensors_of_any_type_are_packed() -> None:
    names = ("float32", "float8_e4m3fn", "float4_e2m1fn_x2", "uint16")
    for dtype in (getattr(torch, n) for n in names if hasattr(torch, n)):
        raw = torch.arange(48, dtype=torch.uint8)
        parts = [raw[:16].view(dtype), raw[16:32].view(dtype), raw[32:].view(dtype)]
        with _NoNewTypes():
            assert torch.equal(_packed(parts, [0, 0, 0]), raw)
            spread = _packed(parts, [8, 0, 0])
        assert torch.equal(torch.cat([spread[:16], spread[24:]]), raw)
