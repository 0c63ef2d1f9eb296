"""Copies of CUDA tensors into a slot, on a stream of their own, while training goes on.

The order that everything rests on, on each device: what produced the state (the stream that is
current in `save`), then the copies, then what changes it (the stream that is current at the gate).
Two events say so to the device, and the host waits for neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ckptd.engine.arena import Slot
from ckptd.errors import UsageError
from ckptd.train.cudapins import Pins
from ckptd.train.dtypes import as_bytes
from ckptd.train.feed import Group, Mark, Unit, grouped

__all__ = [
    "CHUNK_BYTES",
    "Buffers",
    "CudaCopies",
    "CudaLane",
    "cloned",
    "device_bytes",
    "is_capturing",
    "lane_groups",
    "refuse_capture",
]

_log = logging.getLogger("ckptd")

CHUNK_BYTES = 32 << 20
"""Of one group: 0.6 ms of a link of 50 GB/s."""
IN_FLIGHT = 4
"""Groups that wait for the link at a time: what else wants it waits no longer than for these."""
MOST_UNITS = 128
CLONE_ALWAYS = 64 << 20
"""Bytes that are cloned on the device without asking how much of it is free."""


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor on its device; a copy where it has to be."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class Buffers:
    """Page-locked buffers of `CHUNK_BYTES`, in place of a slot that is not.

    Attributes
    ----------
    count
        How many there are; 0 where nothing can be page-locked.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        try:
            self._idle += [_buffer() for _ in range(IN_FLIGHT)]
        except RuntimeError as error:
            _log.warning("no page-locked memory at all: each copy waits (%s)", error)
        self.count = len(self._idle)

    def take(self) -> torch.Tensor:
        """Return one that is idle; a new one where a save that failed has kept some."""
        return self._idle.pop() if self._idle else _buffer()

    def give(self, buffer: torch.Tensor) -> None:
        """Take one back."""
        self._idle.append(buffer)


def _buffer() -> torch.Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)


@dataclass(slots=True)
class _Copied:
    """A group behind an event; `after` carries it on, on the host."""

    event: torch.cuda.Event
    after: Callable[[], None] | None = None

    def done(self) -> bool:
        """See `Mark`."""
        if not self.event.query():
            return False
        if self.after is not None:
            self.after()
            self.after = None
        return True


class CudaLane:
    """The copies of one snapshot from one device. See `Lane`.

    Parameters
    ----------
    device
        Where the tensors are.
    stream
        What copies.
    target
        The slot's bytes.
    source
        Returns the live tensor, or its clone, of a unit.
    buffers
        In place of a slot that is not page-locked; None where it is. Where there are none, every
        copy is waited for.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: Callable[[Unit], torch.Tensor],
        buffers: Buffers | None = None,
    ) -> None:
        self.device = device
        self._stream = stream
        self._target = target
        self._source = source
        self._buffers = buffers
        self._last: torch.cuda.Event | None = None
        self.free = buffers is None
        self.limit = IN_FLIGHT if buffers is None else max(1, buffers.count)

    def begin(self) -> None:
        """Let everything that is copied come after what the current stream holds by now."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(ready)

    def push(self, group: Group) -> Mark:
        """See `Lane`."""
        after = None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            if self._buffers is None:
                for unit in group.units:
                    part = device_bytes(self._source(unit))
                    self._target[unit.start : unit.end].copy_(part, non_blocking=True)
            elif self._buffers.count:
                after = self._through(self._buffers, group.units)
            else:
                for unit in group.units:
                    self._target[unit.start : unit.end].copy_(device_bytes(self._source(unit)))
            if group.task is not None:
                group.task()
            self._last = torch.cuda.Event()
            self._last.record(self._stream)
        return _Copied(self._last, after)

    def _through(self, buffers: Buffers, units: Sequence[Unit]) -> Callable[[], None]:
        """Copy to a buffer; return what takes it from there to the slot."""
        buffer = buffers.take()
        runs = []
        at = 0
        for unit in units:
            end = at + unit.end - unit.start
            buffer[at:end].copy_(device_bytes(self._source(unit)), non_blocking=True)
            runs.append((at, end, unit.start))
            at = end

        def carry() -> None:
            for first, last, start in runs:
                to = as_bytes(self._target[start : start + last - first])
                np.copyto(to, as_bytes(buffer[first:last]))
            buffers.give(buffer)

        return carry

    def order(self) -> None:
        """Let what the current stream does from now on come after everything that is pushed."""
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small tensor to the host on the current stream; it is there when this is done."""
        locked = self._buffers is None or self._buffers.count > 0
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=locked)
        return host.copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class CudaCopies:
    """What the snapshots of one checkpointer share: a stream a device, page-locked memory.

    Attributes
    ----------
    pins
        Locks the slots.
    """

    pins: Pins = field(default_factory=Pins)
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)
    _buffers: dict[torch.device, Buffers] = field(default_factory=dict)

    def lanes(
        self,
        devices: Iterable[torch.device],
        slot: Slot,
        source: Callable[[Unit], torch.Tensor],
    ) -> dict[torch.device, CudaLane]:
        """Return a lane for each device; page-locks the slot the first time."""
        slot.allocate()
        locked = self.pins.lock(slot)
        target = torch.from_numpy(np.frombuffer(slot.data, dtype=np.uint8))
        found = {}
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            buffers = None if locked else self._buffers_of(device)
            found[device] = CudaLane(device, self._streams[device], target, source, buffers)
        return found

    def _buffers_of(self, device: torch.device) -> Buffers:
        if device not in self._buffers:
            self._buffers[device] = Buffers()
        return self._buffers[device]


def lane_groups(lane: CudaLane, units: Iterable[Unit]) -> list[Group]:
    """Return the groups in which a lane gets these units."""
    return list(grouped(lane, units, CHUNK_BYTES, MOST_UNITS))


def cloned(parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Clone tensors of one device on its current stream; None where memory does not allow it.

    Notes
    -----
    The clones may be freed once the host has seen their copies done: a stream that gets the
    memory next cannot be ahead of that.
    """
    nbytes = sum(p.numel() * p.element_size() for p in parts)
    if nbytes > CLONE_ALWAYS and nbytes > _free_bytes(parts[0].device) // 2:
        return None
    try:
        return [p.clone(memory_format=torch.contiguous_format) for p in parts]
    except torch.OutOfMemoryError:
        _log.info("no device memory to clone %.2f GB: save waits for their copies", nbytes / 1e9)
        return None


def _free_bytes(device: torch.device) -> int:
    free: int = torch.cuda.mem_get_info(device)[0]
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle


def refuse_capture() -> None:
    """Raise where the current stream is being captured into a CUDA graph.

    Raises
    ------
    UsageError
        kind ``capturing``.
    """
    if is_capturing():
        raise UsageError(
            "a save cannot be part of a CUDA graph: a replay would copy, and tell nobody",
            kind="capturing",
            wanted="save() outside torch.cuda.graph()",
            hint="save between replays, and call before_mutation() before the next one",
        )


def is_capturing() -> bool:
    """Tell whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
