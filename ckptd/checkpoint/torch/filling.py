"""Live tensors as targets of a read, on host and devices; memory that cannot be filled in place.

In it: how long earlier copies are awaited after a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.grids.block import Fill, Region
from ckptd.base.grids.grid import is_unshared
from ckptd.base.grids.owners import distinct
from ckptd.base.runtime.memory import HostBuffers
from ckptd.base.torch.device import kind_of
from ckptd.base.torch.tensors import as_bytes, bytes_at, flat_memory, is_dtensor, local_tensor
from ckptd.checkpoint.format.witness import VALUE_BYTES, check_elements, gather
from ckptd.checkpoint.load.plan import Want, put_fill
from ckptd.checkpoint.torch.state.describe import Describer, whole_region
from ckptd.checkpoint.torch.upload import BUFFER_BYTES, STALL_S, BufferRing, DeviceBuffer, Upload
from ckptd.errors import CkptdError, DeadlineError
from ckptd.types import DType

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
LiveTarget = U8 | DeviceBuffer
Buffer = tuple[int, tuple[Region, ...]]
_HUNG_S = 1.0
"""Limit in seconds of the wait for earlier copies, after one wait has met its deadline."""
_kept: dict[int, object] = {}
"""Memory that a device which hangs may still copy from or to: it must not be used again."""


class Filling:
    """Collects what a load fills; its block, in a ``with``, is what a load writes in.

    A tensor is filled where it lies, on the host by the threads that read, on a device by copies
    on a stream of ckptd's own (`ckptd.checkpoint.torch.upload`); its strides are those of its
    regions. What cannot be filled so (a layout counts its elements row by row, and it is strided;
    several elements lie at one place; torch has no module for its device) gets a buffer beside it
    with the values that it has, and `finish` copies that over.

    The copies to devices come after everything that the program's current streams hold at the
    beginning of the block, and `finish` returns once they are done: any stream may use the values.

    Attributes
    ----------
    wants
        For `ckptd.checkpoint.load.plan.read_plan`.
    names
        Of the tensor of each want.
    host
        The targets, where all are whole tensors of the host that were added at once.
    recalled
        What is filled in their place: buffers as `WitnessPlan.select_all` takes them, and targets.
    """

    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ring: BufferRing | None = None
        self._uploads: dict[torch.device, Upload] = {}
        self.wants: list[Want] = []
        self.names: list[str] = []
        self.host: HostBuffers | None = None
        self.recalled: tuple[Sequence[Buffer], HostBuffers] | None = None

    @property
    def filled(self) -> tuple[Sequence[Buffer], Sequence[LiveTarget]]:
        """Tensor and regions of each buffer that is filled, and the buffers."""
        if self.recalled is not None:
            return self.recalled
        buffers = [(want.tensor, want.regions) for want in self.wants]
        if self.host is not None and len(self.host) == len(buffers):
            return buffers, self.host
        return buffers, cast("list[LiveTarget]", [want.target for want in self.wants])

    @property
    def is_in_place(self) -> bool:
        """Whether all that is filled is memory of the host, where tensors lie."""
        return not self._later and not self._uploads

    # -- what is filled --------------------------------------------------------------------------

    def add(self, tensors: Iterable[tuple[str, torch.Tensor, int]]) -> None:
        """Ask for what this rank holds of tensors, from those of the manifest with these numbers.

        Whole tensors of the host are slices of one view, and cost no call each.
        """
        found: list[tuple[torch.Tensor, tuple[Region, ...], int, int, int]] = []
        named: list[str] = []
        for name, tensor, number in tensors:
            local = tensor
            regions: tuple[Region, ...] = whole_region(tensor.shape)
            if type(tensor) is not torch.Tensor and is_dtensor(tensor):
                held = self._describer.held(name, tensor)
                local, regions = held.local.detach(), held.regions
            bare = type(local) in (torch.Tensor, torch.nn.Parameter)
            plain = bare and local.is_cpu and local.is_contiguous()
            if plain and not local.is_neg() and not local.is_conj() and local.data_ptr():
                at = local.data_ptr()
                if local.nbytes:
                    found.append((local, regions, number, at, at + local.nbytes))
                    named.append(name)
            elif (boxes := self.boxes(name, tensor)) is not None:
                self.wants.append(Want(number, boxes[1], boxes[0]))
                self.names.append(name)
        self.names += named
        if found:
            locals, _, _, starts, ends = zip(*found, strict=True)
            first = min(starts)
            # Not the tensors, which may have another storage soon.
            kept = [local.untyped_storage() for local in locals]
            memory = bytes_at(first, max(ends) - first, kept)
            if not self.wants:
                places = np.array((starts, ends), dtype=np.int64).T
                places[:, 1] -= places[:, 0]
                self.host = HostBuffers(memory, first, places)
            self.wants += [
                Want(number, regions, memory[start - first : end - first])
                for _, regions, number, start, end in found
            ]

    def boxes(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[LiveTarget, tuple[Region, ...]] | None:
        """Return the target for what this rank holds of a tensor, and which boxes lie where in it.

        None where it holds nothing.
        """
        held = self._describer.held(name, tensor)
        local = held.local.detach()
        if not local.numel():
            return None
        if not _is_memory(local):
            return self._beside(local), held.regions
        if not local.is_contiguous():
            held = self._describer.held(name, tensor, strided=True)
        return self._memory(local), held.regions

    def rows(self, local: torch.Tensor) -> LiveTarget | None:
        """Return the target for a local tensor, row-major; None where there are no elements."""
        if not local.numel():
            return None
        if local.is_contiguous() and _is_memory(local):
            return self._memory(local)
        return self._beside(local)

    def value(self, local: torch.Tensor) -> U8 | None:
        """Return bytes of the host for a small tensor, wherever it is; None without elements."""
        if not local.numel():
            return None
        if local.device.type == "cpu" and local.is_contiguous() and _is_memory(local):
            return as_bytes(local)
        host = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        self._later.append((local, host))
        return as_bytes(host)

    def _memory(self, local: torch.Tensor) -> LiveTarget:
        if local.device.type != "cpu":
            return DeviceBuffer(local_tensor(local), self._upload(local.device))
        return as_bytes(local if local.is_contiguous() else flat_memory(local))

    def _beside(self, local: torch.Tensor) -> LiveTarget:
        """Return a buffer with the values of a tensor, which is copied over it in the end."""
        device = local.device if _has_memory(local) else torch.device("cpu")
        try:
            buffer = torch.empty(local.shape, dtype=local.dtype, device=device)
        except torch.OutOfMemoryError:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        buffer.copy_(local)  # what the checkpoint leaves out stays as it is
        self._later.append((local, buffer))
        return self._memory(buffer)

    def _upload(self, device: torch.device) -> Upload:
        if self._ring is None:
            self._ring = BufferRing(BUFFER_BYTES)
        if device not in self._uploads:
            self._uploads[device] = Upload(device, self._ring)
        return self._uploads[device]

    # -- filling ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        for upload in self._uploads.values():
            upload.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for what is under way: nothing may be copied from memory that is given back."""
        if error is None:
            return
        kept = self._ring, self._later
        _kept[id(kept)] = kept  # also where an interrupt comes once more
        try:
            self._settle(_HUNG_S if isinstance(error, DeadlineError) else STALL_S)
        except (CkptdError, RuntimeError) as other:
            error.add_note(f"earlier copies to devices failed: {other}")
        else:
            del _kept[id(kept)]  # another load of this process may have kept its own since

    def fill(self, target: LiveTarget, fill: Fill, dtype: DType) -> None:
        """Write a value to places of a target that no element of the checkpoint represents."""
        if isinstance(target, DeviceBuffer):
            target.fill(fill, dtype)
        else:
            put_fill(fill, dtype, target)

    def finish(self) -> None:
        """Copy buffers into their tensors; the state is complete on return, for any stream.

        Raises
        ------
        DeadlineError
            kind ``stalled``: a device hangs.
        """
        with torch.no_grad():
            for local, buffer in self._later:
                if local.device in self._uploads:
                    with self._uploads[local.device].order():
                        local.copy_(buffer)
                else:
                    local.copy_(buffer)
        self._settle(STALL_S)
        self._later.clear()

    def _settle(self, timeout_s: float) -> None:
        for upload in self._uploads.values():
            upload.settle(timeout_s)

    # -- what was filled -------------------------------------------------------------------------

    def values(self, targets: Sequence[LiveTarget], itemsizes: I64) -> Callable[[I64, I64], U8]:
        """Return what gives values as `ckptd.checkpoint.format.witness.gather` does.

        It is called with numbers of the targets and elements of these: one copy a device a call.

        Parameters
        ----------
        itemsizes
            Of each target.
        """
        there: dict[Upload, list[int]] = {}
        if isinstance(targets, HostBuffers):
            places, sizes = targets.places.T
        else:
            places = np.zeros(len(targets), dtype=np.int64)
            sizes = np.array([t.nbytes for t in targets], dtype=np.int64)
        counts = sizes // itemsizes
        for number, target in enumerate(() if isinstance(targets, HostBuffers) else targets):
            if isinstance(target, DeviceBuffer):
                there.setdefault(target.writer, []).append(number)
            else:
                places[number] = target.__array_interface__["data"][0]

        sizes = distinct(itemsizes).tolist()
        alike = len(sizes) == 1 and bool(places.all())

        def read(which: I64, elements: I64) -> U8:
            outside = (elements < 0) | (elements >= counts.take(which))
            for number in distinct(which[outside]).tolist():
                check_elements(elements[which == number], int(counts[number]))
            if alike:
                return _gather(places.take(which) + elements * sizes[0], sizes[0])
            out = np.zeros((len(which), VALUE_BYTES), dtype=np.uint8)
            for size in sizes:
                mine = np.flatnonzero((itemsizes[which] == size) & (places[which] != 0))
                out[mine] = _gather(places[which[mine]] + elements[mine] * size, size)
            ends = np.cumsum(np.bincount(which, minlength=len(targets)))
            of = np.split(np.argsort(which, kind="stable"), ends[:-1]) if there else []
            for upload, numbers in there.items():
                rows = {n: of[n] for n in numbers if len(of[n])}
                picked = [
                    (cast("DeviceBuffer", targets[n]), int(itemsizes[n]), elements[mine])
                    for n, mine in rows.items()
                ]
                taken = upload.values(picked) if picked else []
                for (_, size, at), mine, raw in zip(picked, rows.values(), taken, strict=True):
                    out[mine] = gather(raw, size, np.arange(len(at)))
            return out

        return read


def _gather(places: I64, itemsize: int) -> U8:
    """Return the values of elements of the host, by their addresses."""
    if not len(places):
        return np.empty((0, VALUE_BYTES), dtype=np.uint8)
    first = int(places.min()) // 16 * 16
    memory, at = bytes_at(first, int(places.max()) - first + 16), places - first
    if not (at & (itemsize - 1)).any():  # a power of two
        return gather(memory, itemsize, at >> (itemsize.bit_length() - 1))
    raw = memory[at[:, np.newaxis] + np.arange(itemsize)].ravel()
    return gather(raw, itemsize, np.arange(len(at)))


def _is_memory(local: torch.Tensor) -> bool:
    """Tell whether a tensor's values are bytes in memory, each element at a place of its own."""
    if not _has_memory(local):
        return False
    return local.is_contiguous() or is_unshared(tuple(local.shape), local.stride())


def _has_memory(local: torch.Tensor) -> bool:
    """Tell whether views of a tensor's memory can be had."""
    return local.device.type == "cpu" or kind_of(local.device).module is not None
