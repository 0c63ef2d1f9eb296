"""Device side of a snapshot: clones, copy streams, pinned buffers and their sizes, graph captures.

In it: sizes of copies and how many are under way; from which size on tensors are cloned; writes
that torch does not count.

For devices of any kind that has streams and events (`ckptd.base.torch.device`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property
from typing import ClassVar, Literal

import msgspec
import numpy as np
import torch
from torch._utils import _flatten_dense_tensors

from ckptd.base.torch.device import DeviceKind, kind_of
from ckptd.base.torch.tensors import as_bytes
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.torch.feed import CopyFeed, CopyGroup, CopyMark, CopyStep, grouped
from ckptd.checkpoint.torch.replicas import Samples, digest_of_sample, sampled_bytes
from ckptd.errors import UsageError, size_text

_log = logging.getLogger("ckptd")


class _Pin:
    """One slot that is locked, or may be; it is unlocked when it is closed and nothing uses it."""

    _left: ClassVar[set[_Pin]] = set()
    """Slots that were closed while a device still copied to them, or while they were locked."""

    def __init__(self, slot: Slot, kind: DeviceKind) -> None:
        self.nbytes = 0
        """Bytes that are locked."""
        self.tried = False
        self._kind = kind
        self._slot = weakref.ref(slot)
        self._address = 0
        self.closed = False
        self._users = 0
        self._mapped: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._lock = threading.Lock()
        slot.before_close = self.release

    def use(self, more: int) -> None:
        """Count the copies under way; the last one unlocks a slot that was closed meanwhile."""
        with self._lock:
            self._users += more
            if self._users:
                return
            if self in self._left:
                self._left.discard(self)
                self._unlock()
            self._mapped = None

    def lock(self) -> str | None:
        """Lock the slot, which may take seconds; return what kept that from being done."""
        with self._lock:
            slot = self._slot()
            if self.closed or slot is None:
                return "it was closed"
            self._users += 1  # what is being locked stays mapped
            self._mapped = np.frombuffer(slot.data, dtype=np.uint8)
            self._address = self._mapped.ctypes.data
            nbytes = slot.nbytes
        try:
            self._kind.ignore_captures()
            refused = self._kind.lock_pages(self._address, nbytes)
            if refused is None:
                self.nbytes = nbytes
            return refused
        finally:
            self.use(-1)

    def covers(self, start: int, nbytes: int) -> bool:
        """Tell whether memory from an address on is part of what is locked."""
        return self._address <= start and start + nbytes <= self._address + self.nbytes

    def release(self) -> None:
        """Unlock the slot, which is about to be closed, as soon as nothing is copied to it."""
        with self._lock:
            self.closed = True
            if not self._users:
                self._unlock()
                return
            # To unlock it now would wait for a device that hangs. What is locked stays mapped:
            # other memory at its address would be taken for it, and could not be locked itself.
            slot = self._slot()
            self._mapped = None if slot is None else np.frombuffer(slot.data, dtype=np.uint8)
            self._left.add(self)

    def _unlock(self) -> None:
        if not self.nbytes:
            return
        refused = self._kind.unlock_pages(self._address)
        self.nbytes = 0
        if refused is not None:
            _log.warning("a slot is not unlocked: %s", refused)


class Pins:
    """Locks slots, once each. Thread-safe.

    Parameters
    ----------
    budget
        Bytes that may be locked at a time; None is three quarters of the machine's memory.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._known: weakref.WeakKeyDictionary[Slot, _Pin] = weakref.WeakKeyDictionary()
        self._guard = threading.Lock()

    @property
    def locked(self) -> int:
        """Bytes that are locked now."""
        with self._guard:
            return sum(p.nbytes for p in self._known.values())

    def is_locked(self, slot: Slot, kind: DeviceKind) -> bool:
        """Tell whether a slot is locked; from now on it is unlocked before it is closed."""
        return self._of(slot, kind).nbytes > 0

    def _of(self, slot: Slot, kind: DeviceKind) -> _Pin:
        with self._guard:
            pin = self._known.get(slot)
            if pin is None:
                pin = self._known[slot] = _Pin(slot, kind)
            return pin

    def lock(self, slot: Slot, kind: DeviceKind) -> bool:
        """Lock a slot unless it is already; False where that cannot be had, which is logged.

        Takes seconds for a large one, and is tried once.
        """
        pin = self._of(slot, kind)
        with self._guard:
            if pin.tried or not slot.nbytes:
                return pin.nbytes > 0
            pin.tried = True
            if self._budget is None:
                self._budget = 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
            locked = sum(p.nbytes for p in self._known.values())
        if locked + slot.nbytes > self._budget:
            refused: str | None = f"more than {size_text(self._budget)} would be locked"
        else:
            refused = pin.lock()
        if refused is not None and not pin.closed:
            _log.warning(
                "%s for snapshots cannot be page-locked (%s): copies go through a small "
                "buffer, and optimizers' steps wait for them",
                size_text(slot.nbytes),
                refused,
            )
        return refused is None

    def covers(self, memory: memoryview) -> bool:
        """Tell whether memory is part of a slot that is locked."""
        start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._guard:
            return any(pin.covers(start, len(memory)) for pin in self._known.values())

    def use(self, slot: Slot, more: int) -> None:
        """Count the snapshots that are copied to a slot: `more` is 1 or -1."""
        with self._guard:
            pin = self._known.get(slot)
        if pin is not None:
            pin.use(more)


CHUNK_BYTES = 32 << 20
"""Of one group: 0.6 ms of a link of 50 GB/s."""
IN_FLIGHT = 4
"""Groups that wait for the link at a time: what else wants it waits no longer than for these."""
MOST_STEPS = 512
PACKED_BYTES = 256 << 10
"""Of a tensor that is packed with its neighbours: to launch a copy costs as much as 5 us of it."""
MOST_BETWEEN = 4096
"""Bytes that lie between neighbours in the file and are written twice for it."""
_JOINED = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
)
"""Types that every PyTorch joins on every device; those of one byte or half of it came later."""
CLONE_ALWAYS = 64 << 20
"""Bytes that are cloned on the device without asking how much of it is free."""


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor on its device; a copy where it has to be."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class Buffers:
    """Page-locked buffers of `CHUNK_BYTES`, in place of a slot that is not; made at first use."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    @cached_property
    def count(self) -> int:
        """How many there are; 0 where nothing can be page-locked."""
        try:
            self._idle += [_buffer() for _ in range(IN_FLIGHT)]
        except RuntimeError as error:
            _log.warning("no page-locked memory: each copy is synchronous (%s)", error)
        return len(self._idle)

    def take(self) -> torch.Tensor:
        """Return one that is idle; a new one where a save that failed has kept some."""
        try:
            return self._idle.pop()
        except IndexError:
            return _buffer()

    def give(self, buffer: torch.Tensor) -> None:
        """Take one back."""
        self._idle.append(buffer)


def _buffer() -> torch.Tensor:
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Copied(msgspec.Struct):
    """A group behind an event; `after` carries it on, on the host."""

    event: torch.Event
    after: Callable[[], None] | None = None

    def done(self) -> bool:
        """See `CopyMark`."""
        if not self.event.query():
            return False
        if self.after is not None:
            self.after()
            self.after = None
        return True


class _Piece(msgspec.Struct):
    """Steps whose bytes are copied in one go.

    Attributes
    ----------
    between
        Bytes behind each step that belong to none of them.
    """

    numbers: list[int]
    start: int
    end: int
    between: list[int]


def _pieces(
    steps: Sequence[CopyStep], numbers: Sequence[int], is_placed: Callable[[int], bool] | None
) -> Iterator[_Piece]:
    """Put small steps together.

    Parameters
    ----------
    is_placed
        Whether the bytes of a step are in place: a few of those may lie between. None: it does not
        matter what lies between, since nothing there is written.
    """
    piece: _Piece | None = None
    for number in numbers:
        step = steps[number]
        small = step.end - step.start <= PACKED_BYTES
        if piece is not None and small:
            gap, between = step.start - piece.end, range(piece.numbers[-1] + 1, number)
            near = 0 < gap <= MOST_BETWEEN and len(between) > 0
            if is_placed is None or not gap or (near and all(map(is_placed, between))):
                piece.between[-1] = 0 if is_placed is None else gap
                piece.between.append(0)
                piece.numbers.append(number)
                piece.end = step.end
                continue
        if piece is not None:
            yield piece
        piece = _Piece([number], step.start, step.end, [0])
        if not small:
            yield piece
            piece = None
    if piece is not None:
        yield piece


def _packed(parts: Sequence[torch.Tensor], between: Sequence[int]) -> torch.Tensor:
    """Return the bytes of tensors behind one another on their device, by as few kernels as can be.

    Parameters
    ----------
    between
        Bytes of no value behind each of them.
    """
    if len(parts) == 1:
        return device_bytes(parts[0])
    first = parts[0]
    size = first.element_size()
    alike = first.dtype in _JOINED and all(
        p.dtype == first.dtype and not (p.is_conj() or p.is_neg()) for p in parts
    )
    if not alike or any(n % size for n in between):
        parts, size = [device_bytes(p) for p in parts], 1
    fillers = {n: parts[0].new_empty(n // size) for n in set(between) if n}
    pieces: list[torch.Tensor] = []
    for part, nbytes in zip(parts, between, strict=True):
        pieces.append(part)
        if nbytes:
            pieces.append(fillers[nbytes])
    flat: torch.Tensor = _flatten_dense_tensors(pieces)
    return flat.view(torch.uint8)


class DeviceLane:
    """The copies of one snapshot from one device. See `CopyLane`.

    Parameters
    ----------
    device
        Where the tensors are.
    stream
        What copies.
    slot
        Where they go.
    steps
        Of the snapshot.
    sources
        Returns what the steps of some numbers copy: live tensors, or their clones.
    is_placed
        Tells of the number of a step whether its bytes were in place before any was pushed.
    buffers
        In place of a slot that is not page-locked; None where it is. Where there are none, every
        copy is waited for.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.Stream,
        slot: Slot,
        steps: Sequence[CopyStep],
        sources: Callable[[Sequence[int]], Sequence[torch.Tensor]],
        is_placed: Callable[[int], bool],
        buffers: Buffers | None = None,
    ) -> None:
        self.device = device
        self._kind = kind_of(device)
        self._stream = stream
        self._slot = slot
        # Held, so that the memory stays mapped as long as a device may write to it.
        self._bytes = np.frombuffer(slot.data, dtype=np.uint8)
        self._target = torch.from_numpy(self._bytes)
        self._steps = steps
        self._sources = sources
        self._is_placed = is_placed
        self._buffers = buffers
        self._last: torch.Event | None = None
        self.free = buffers is None

    @property
    def limit(self) -> int:
        """See `CopyLane`."""
        return IN_FLIGHT if self._buffers is None else max(1, self._buffers.count)

    def begin(self) -> None:
        """Order all copies after the work that the current stream holds by now."""
        ready = self._kind.make_event()
        ready.record(self._kind.current_stream(self.device))
        self._stream.wait_event(ready)

    def push(self, group: CopyGroup) -> CopyMark:
        """See `CopyLane`."""
        with self._kind.on_stream(self.device, self._stream), torch.no_grad():
            if self._buffers is None:
                after = self._to_slot(group.steps)
            elif self._buffers.count:
                after = self._through(self._buffers, group.steps)
            else:
                after = None
                self._at_once(group.steps)
            if group.task is not None:
                group.task()
            self._last = self._kind.make_event()
            self._last.record(self._stream)
        return _Copied(self._last, after)

    def _taken(self, piece: _Piece) -> list[tuple[torch.Tensor, _Piece]]:
        """Return the bytes of a piece on the device; of each step where there is no memory."""
        parts = self._sources(piece.numbers)
        try:
            return [(_packed(parts, piece.between), piece)]
        except torch.OutOfMemoryError:
            if len(parts) == 1:
                raise
        steps = [self._steps[number] for number in piece.numbers]
        alone = [
            _Piece([n], s.start, s.end, [0]) for n, s in zip(piece.numbers, steps, strict=True)
        ]
        return [(device_bytes(part), one) for part, one in zip(parts, alone, strict=True)]

    def _to_slot(self, numbers: Sequence[int]) -> Callable[[], None] | None:
        """Copy into the slot; return what puts back the bytes between, which are copied over."""
        kept = []
        for piece in _pieces(self._steps, numbers, self._is_placed):
            for raw, copied in self._taken(piece):
                if any(copied.between):
                    at = self._between(copied)
                    kept.append((at, self._bytes[at]))
                self._target[copied.start : copied.end].copy_(raw, non_blocking=True)
        if not kept:
            return None

        def put_back() -> None:
            for at, values in kept:
                self._bytes[at] = values

        return put_back

    def _between(self, piece: _Piece) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return where the bytes lie in the slot that belong to no step of a piece."""
        widths = np.array(piece.between, dtype=np.int64)
        ends = np.array([self._steps[n].end for n in piece.numbers], dtype=np.int64)
        before = np.cumsum(widths) - widths
        return np.repeat(ends - before, widths) + np.arange(int(widths.sum()))

    def _through(self, buffers: Buffers, numbers: Sequence[int]) -> Callable[[], None]:
        """Copy to a buffer; return what takes it from there to the slot."""
        buffer = buffers.take()
        runs: list[tuple[int, int, int]] = []
        at = 0
        for piece in _pieces(self._steps, numbers, None):
            for raw, copied in self._taken(piece):
                buffer[at : at + raw.numel()].copy_(raw, non_blocking=True)
                for number in copied.numbers:
                    step = self._steps[number]
                    end = at + step.end - step.start
                    if runs and runs[-1][2] + at - runs[-1][0] == step.start:
                        runs[-1] = (runs[-1][0], end, runs[-1][2])
                    else:
                        runs.append((at, end, step.start))
                    at = end

        def carry() -> None:
            for first, last, start in runs:
                self._slot.put(start, as_bytes(buffer[first:last]))
            buffers.give(buffer)

        return carry

    def _at_once(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            step = self._steps[number]
            place = torch.from_numpy(self._slot.place(step.start, step.end))
            place.copy_(device_bytes(self._sources((number,))[0]))

    def order(self) -> None:
        """Order later work on the current stream after everything that is pushed."""
        if self._last is not None:
            self._kind.current_stream(self.device).wait_event(self._last)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small tensor to the host on the current stream; it is there when this is done."""
        locked = self._buffers is None or self._buffers.count > 0
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=locked)
        return host.copy_(tensor, non_blocking=True)


class DeviceCopies(msgspec.Struct):
    """Resources that one checkpointer's snapshots share: a stream a device, page-locked memory.

    Attributes
    ----------
    pins
        Locks the slots.
    """

    pins: Pins = msgspec.field(default_factory=Pins)
    _streams: dict[torch.device, torch.Stream] = {}
    _buffers: defaultdict[torch.device, Buffers] = msgspec.field(
        default_factory=lambda: defaultdict(Buffers)
    )
    _locker: ThreadPoolExecutor = msgspec.field(
        default_factory=lambda: ThreadPoolExecutor(1, "ckptd-lock")
    )

    def lanes(
        self,
        devices: Iterable[torch.device],
        slot: Slot,
        steps: Sequence[CopyStep],
        sources: Callable[[Sequence[int]], Sequence[torch.Tensor]],
        is_placed: Callable[[int], bool],
    ) -> dict[torch.device, DeviceLane]:
        """Return a lane for each device; waits for nothing."""
        found = {}
        for device in devices:
            kind = kind_of(device)
            if device not in self._streams:
                self._streams[device] = kind.make_stream(device)
            buffers = None
            if self.pins.is_locked(slot, kind):
                self._buffers.pop(device, None)
            else:
                buffers = self._buffers[device]
            stream = self._streams[device]
            found[device] = DeviceLane(device, stream, slot, steps, sources, is_placed, buffers)
        return found

    def lock_later(self, slot: Slot, devices: Iterable[torch.device]) -> None:
        """Page-lock a slot for later snapshots, in a thread of its own; returns at once."""
        device = next((d for d in devices if kind_of(d).locks_in_place), None)
        if device is not None and not self.pins.is_locked(slot, kind_of(device)):
            with suppress(RuntimeError):  # closed
                self._locker.submit(self._lock, slot, device)

    def _lock(self, slot: Slot, device: torch.device) -> None:
        kind = kind_of(device)
        try:
            kind.ignore_captures(device)
            self.pins.lock(slot, kind)
        except Exception as error:  # noqa: BLE001 - no other thread would see it
            _log.warning("a slot is not page-locked: %r", error)

    def close(self) -> None:
        """Lock nothing more, and give the buffers back as soon as no copy is under way in them.

        What is being locked is unlocked when its slot is closed.
        """
        self._locker.shutdown(wait=False, cancel_futures=True)
        self._buffers.clear()


def cloned(
    device: torch.device, nbytes: int, parts: Callable[[], Sequence[torch.Tensor]]
) -> list[torch.Tensor] | None:
    """Clone tensors of one device on its current stream; None where memory does not allow it.

    Parameters
    ----------
    nbytes
        Of all clones.
    parts
        Returns the tensors; may need device memory itself.

    Notes
    -----
    The clones may be freed once the host has seen their copies done: a stream that gets the
    memory next cannot be ahead of that.
    """
    if nbytes > CLONE_ALWAYS and nbytes > _free_bytes(device) // 2:
        return None
    try:
        return [p.clone(memory_format=torch.contiguous_format) for p in parts()]
    except torch.OutOfMemoryError:
        _log.info("no device memory to clone %s: save() waits for the copy", size_text(nbytes))
        return None


def _free_bytes(device: torch.device) -> int:
    return kind_of(device).free_bytes(device) or 0


def captured(call: Literal["save", "load", "publish"]) -> UsageError:
    """Return the refusal of a call whose copies would become part of a graph."""
    return UsageError(
        f"a {call} cannot be part of a graph: a replay would copy, and {call} nothing",
        wanted=f"{call}() outside the capture of a graph, as torch.cuda.graph() makes it",
        hint=f"{call} between replays"
        + (", and call before_mutation() before the next one" if call == "save" else ""),
    )


MOST_WATCHED = 64
WATCHED_BYTES = 256


class DeviceSamples:
    """The bytes that `replicas.sample_digest` digests, of tensors on one device."""

    def __init__(self) -> None:
        self._of: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._taken: list[torch.Tensor] = []
        self._host: torch.Tensor | None = None

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the samples of local tensors on the current stream."""
        parts = [sampled_bytes(tensor) for tensor in tensors]
        self._of += tensors
        self._sizes += [part.numel() for part in parts]
        if parts:
            self._taken.append(torch.cat(parts))

    def fetch(self, lane: DeviceLane) -> None:
        """Bring to the host what was taken, on the current stream."""
        if self._taken:
            self._host = lane.fetch(torch.cat(self._taken))

    def give(self, samples: Samples) -> None:
        """Digest what was fetched, once that is done."""
        if self._host is None:
            return
        parts = np.split(self._host.numpy(), np.cumsum(self._sizes)[:-1])
        for tensor, part in zip(self._of, parts, strict=True):
            samples.put(tensor, digest_of_sample(part))


class FirstBytesWatch:
    """Watches the first bytes of some tensors: a step that torch does not count changes nearly all.

    Parameters
    ----------
    tensors
        Local tensors on one device, by name, that may not change until they are copied. They are
        looked at on the current stream.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        whole = {n: t for n, t in tensors.items() if t.is_contiguous() and t.numel()}
        every = -(-len(whole) // MOST_WATCHED) or 1
        self._watched = dict(list(whole.items())[::every])
        self._before = self._look()
        self._same: torch.Tensor | None = None

    def _look(self) -> torch.Tensor | None:
        parts = [device_bytes(t)[:WATCHED_BYTES] for t in self._watched.values()]
        return torch.cat(parts) if parts else None

    def look_again(self, lane: DeviceLane) -> None:
        """Compare, on the current stream: behind the copies, before anything may change."""
        now = self._look()
        if now is not None and self._before is not None:
            self._same = lane.fetch(now == self._before)

    def changed(self) -> list[str]:
        """Return the names of what has changed, once that is fetched."""
        if self._same is None:
            return []
        found = []
        at = 0
        for name, tensor in self._watched.items():
            end = at + min(WATCHED_BYTES, tensor.numel() * tensor.element_size())
            if not bool(self._same[at:end].all()):
                found.append(name)
            at = end
        return found


class OnDevice(msgspec.Struct):
    """Part of a snapshot that is on one device.

    Attributes
    ----------
    early, late
        Numbers of the steps of tensors that may change once `save` has returned, and of those
        that may not.
    held
        Local tensors that are copied late, by name.
    common_early, common_late
        Tensors that other ranks hold as well.
    """

    early: list[int] = msgspec.field(default_factory=list)
    late: list[int] = msgspec.field(default_factory=list)
    held: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)
    common_early: list[torch.Tensor] = msgspec.field(default_factory=list)
    common_late: list[torch.Tensor] = msgspec.field(default_factory=list)


class DeviceSnapshot:
    """Begins the copies of one snapshot from all devices, without waiting.

    What may change at once is cloned on the device first; where memory does not allow that, it is
    copied before this returns. Groups for the rest are in `groups`.

    Parameters
    ----------
    parts
        What is on each device.
    steps
        Of the snapshot.
    live
        Returns what the steps of some numbers copy.
    clone
        False: nothing changes before everything is copied, so nothing needs a clone.
    placed
        Numbers of the steps that are in place already, from the host.

    Attributes
    ----------
    groups
        For a `CopyFeed`, in the order in which lanes get them.
    placed
        Numbers of the steps that are in place on return, from a device.
    """

    def __init__(
        self,
        shared: DeviceCopies,
        slot: Slot,
        parts: Mapping[torch.device, OnDevice],
        steps: Sequence[CopyStep],
        live: Callable[[Sequence[int]], Sequence[torch.Tensor]],
        *,
        clone: bool,
        placed: Collection[int] = (),
        timeout_s: float,
    ) -> None:
        self._shared = shared
        self._slot = slot
        self._clones: dict[int, torch.Tensor] = {}
        self._steps = steps
        self._live = live
        self.groups: list[CopyGroup] = []
        self.placed: list[int] = []
        before = frozenset(placed)
        self._lanes = shared.lanes(parts, slot, steps, self._sources, before.__contains__)
        shared.pins.use(slot, 1)
        self._samples = {device: DeviceSamples() for device in parts}
        self._watches: list[FirstBytesWatch] = []
        try:
            for device, part in parts.items():
                # Before clones take the memory: what is looked at needs some kilobytes.
                self._samples[device].take(part.common_early)
                watch = FirstBytesWatch(part.held)
                self._watches.append(watch)
                at_once = clone and not self._clone(device, part.early)
                self._begin(self._lanes[device], part, watch, at_once, timeout_s)
        except BaseException:
            self.release()
            raise

    def _clone(self, device: torch.device, early: Sequence[int]) -> bool:
        nbytes = sum(self._steps[number].end - self._steps[number].start for number in early)
        clones = cloned(device, nbytes, lambda: self._live(early))
        if clones is None:
            return False
        self._clones.update(zip(early, clones, strict=True))
        return True

    def _sources(self, numbers: Sequence[int]) -> Sequence[torch.Tensor]:
        if numbers[0] in self._clones:  # a group has clones alone, or none
            return [self._clones[number] for number in numbers]
        return self._live(numbers)

    def _begin(
        self,
        lane: DeviceLane,
        part: OnDevice,
        watch: FirstBytesWatch,
        at_once: bool,
        timeout_s: float,
    ) -> None:
        samples = self._samples[lane.device]
        lane.begin()
        early = self._grouped(lane, part.early)
        if at_once:
            with kind_of(lane.device).captures_ignored():
                CopyFeed(self._steps, early, lambda front: None).run(timeout_s)
            self.placed += part.early
            early = []

        def last() -> None:
            watch.look_again(lane)
            samples.fetch(lane)

        self.groups += early
        self.groups.append(CopyGroup(lane, (), lambda: samples.take(part.common_late)))
        self.groups += self._grouped(lane, part.late)
        self.groups.append(CopyGroup(lane, (), last))

    def _grouped(self, lane: DeviceLane, numbers: Sequence[int]) -> list[CopyGroup]:
        return list(grouped(lane, self._steps, numbers, CHUNK_BYTES, MOST_STEPS))

    def order(self) -> None:
        """Order later work on the current streams after everything that is pushed."""
        for lane in list(self._lanes.values()):  # the copying thread clears them when it ends
            lane.order()

    @contextmanager
    def devices(self) -> Iterator[None]:
        """Make this thread ask nothing of a device that the snapshot has nothing on.

        Nor may what it asks break a graph that another thread captures meanwhile.
        """
        with ExitStack() as stack:
            for device in self._lanes:
                stack.enter_context(kind_of(device).on(device))
                if not kind_of(device).ignore_captures():
                    _note_captures(device.type)
            yield

    def changed(self) -> list[str]:
        """Return what changed though torch did not count it, once everything is copied."""
        return [name for watch in self._watches for name in watch.changed()]

    def give(self, samples: Samples) -> None:
        """Add the digests of what ranks hold in common, once everything is copied."""
        for taken in self._samples.values():
            taken.give(samples)

    def release(self) -> None:
        """Release clones and the slot: nothing is under way any more."""
        self._shared.pins.use(self._slot, -1)
        self._clones.clear()
        self._lanes.clear()
        self.groups.clear()
        self._watches.clear()
        self._samples.clear()


@cache
def _note_captures(kind: str) -> None:
    """Log, once in a process, that captures of graphs and copies may not meet."""
    _log.warning(
        "the runtime of %s is not found in this process: a graph that is captured while a save is "
        "copied may fail to be captured; capture when handle.staged() has returned",
        kind,
    )
