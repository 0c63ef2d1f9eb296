"""`OneSidedCarrier`: published weights as RDMA brings them, played between processes of one host.

A stand-in for an adapter, and a pattern for a carrier of one: a rank of the publisher registers its
slots, each under a key, and takes no further part. A worker posts reads of remote memory by key and
address, and finds in a completion queue what became of each. What an adapter does here is
``process_vm_readv``: it reads another process's memory without that process, and fails when that
process is gone. What this cannot show: a network, and its rates and errors.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.checkpoint.save.arena import CONTROL_BYTES, Slot
from ckptd.errors import TransientStoreError, UsageError
from ckptd.publish.blocks import gather_blocks
from ckptd.publish.carrier import LinkedReader, PartsReader, SlotReader
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import BlockRead, PublishedTensor
from ckptd.types import dtype_of

__all__ = ["Completion", "OneSidedCarrier", "QueuePair", "RegionTable", "RemoteRead"]

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

_MOST_REGIONS = 64
_MOST_RUNS = 1024
"""Of one call, as IOV_MAX has it."""
_DENSE = 2
"""A part is read with the gaps in it if they are not more than what is wanted."""
_ROW = np.dtype([("key", "<u8"), ("address", "<u8"), ("nbytes", "<u8")])


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_read_memory = _libc.process_vm_readv
_read_memory.restype = ctypes.c_ssize_t
_PR_SET_PTRACER = 0x59616D61


def _read(pid: int, addresses: Sequence[int], nbytes: int, into: U8) -> None:
    """Read runs of `nbytes` bytes each of another process's memory, one behind the other.

    Raises
    ------
    OSError
        The process is gone, or has no memory there.
    """
    start = int(into.__array_interface__["data"][0])
    for at in range(0, len(addresses), _MOST_RUNS):
        some = addresses[at : at + _MOST_RUNS]
        here = _Span(start + at * nbytes, len(some) * nbytes)
        there = (_Span * len(some))(*[_Span(a, nbytes) for a in some])
        done = _read_memory(pid, ctypes.byref(here), 1, there, len(some), 0)
        if done != len(some) * nbytes:
            number = ctypes.get_errno() if done < 0 else 14  # EFAULT: some of it is not mapped
            raise OSError(number, os.strerror(number))


class RegionTable:
    """The memory of this process that others may read, by key: what an adapter keeps of it."""

    def __init__(self) -> None:
        # Where Yama restricts it, a process is read by its ancestors alone unless it allows others.
        # Elsewhere the kernel does not know the option, and needs no leave.
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
        self._rows = np.zeros(_MOST_REGIONS, _ROW)
        self._rows[0] = (secrets.randbits(63) + 1, 0, 0)
        self._keys: dict[int, int] = {}

    @property
    def card(self) -> tuple[int, int, int]:
        """What others need: process, address of the table, and a number that proves it."""
        return os.getpid(), int(self._rows.ctypes.data), int(self._rows[0]["key"])

    def register(self, address: int, nbytes: int) -> int:
        """Let others read some memory; return the key."""
        free = np.flatnonzero(self._rows["key"] == 0)
        if not len(free):
            raise UsageError("too many regions are registered")
        key = secrets.randbits(63) + 1
        row = int(free[0])
        self._rows[row] = (0, address, nbytes)
        self._rows["key"][row] = key  # last: a row without a key is none
        self._keys[key] = row
        return key

    def withdraw(self, key: int) -> None:
        """Let nobody read it any more."""
        self._rows["key"][self._keys.pop(key)] = 0


class RemoteRead(NamedTuple):
    """A read of a registered region: runs of `nbytes` bytes each, at `offsets`, into `into`."""

    number: int
    key: int
    offsets: Sequence[int]
    nbytes: int
    into: U8


class Completion(NamedTuple):
    """What became of a read: `error` is empty where it was done."""

    number: int
    error: str


class QueuePair:
    """Reads of one other process's regions, in the order in which they are posted.

    Parameters
    ----------
    card
        Of the process; see `RegionTable.card`.
    """

    def __init__(self, card: tuple[int, int, int]) -> None:
        self._pid, self._table, self._proof = card
        self._posted: queue.SimpleQueue[RemoteRead | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ckptd-onesided", daemon=True).start()

    def regions(self) -> dict[int, tuple[int, int]]:
        """Return address and length of each registered region, by key.

        Raises
        ------
        OSError
            The process is gone.
        """
        raw = np.zeros(_MOST_REGIONS * _ROW.itemsize, np.uint8)
        _read(self._pid, [self._table], len(raw), raw)
        rows = raw.view(_ROW)
        if int(rows[0]["key"]) != self._proof:
            raise OSError(3, "another process has its number")
        return {int(k): (int(a), int(n)) for k, a, n in rows[1:].tolist() if k}

    def post(self, read: RemoteRead) -> None:
        """Begin a read."""
        self._posted.put(read)

    def poll(self, timeout_s: float) -> Completion:
        """Return the next completion.

        Raises
        ------
        queue.Empty
            There is none in this time.
        """
        return self._done.get(timeout=max(0.0, timeout_s))

    def _run(self) -> None:
        while (read := self._posted.get()) is not None:
            try:
                error = self._one(read)
            except OSError as problem:
                error = str(problem)
            self._done.put(Completion(read.number, error))

    def _one(self, read: RemoteRead) -> str:
        address, nbytes = self.regions().get(read.key, (0, 0))
        if not address:
            return "no region has this key"
        if min(read.offsets) < 0 or max(read.offsets) + read.nbytes > nbytes:
            return "not inside the region"
        _read(self._pid, [address + at for at in read.offsets], read.nbytes, read.into)
        # A region that went meanwhile may have been other memory already.
        return "" if read.key in self.regions() else "the region was withdrawn"

    def close(self) -> None:
        """End it. Idempotent."""
        self._posted.put(None)


class OneSidedCarrier:
    """See `ckptd.publish.carrier.WeightCarrier`, and the module.

    All ranks of `process_group` make one at the same time.

    Parameters
    ----------
    process_group
        The ranks of the publisher and of its workers, on one host; the default group when None.
    publishers
        Its ranks that publish, by rank of the publisher.
    timeout_s
        Longest wait for one completion, in seconds.
    """

    def __init__(
        self, process_group: Any, publishers: Sequence[int], timeout_s: float = 60.0
    ) -> None:
        import torch.distributed as dist

        self._table = RegionTable()
        self._slots: dict[int, int] = {}
        cards: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(cards, self._table.card, group=process_group)
        self._cards = [cards[rank] for rank in publishers]
        self._pairs: dict[int, QueuePair] = {}
        self._timeout_s = timeout_s

    def expose(self, slot: Slot) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        data = np.frombuffer(slot.data, np.uint8)
        start = int(data.__array_interface__["data"][0]) - CONTROL_BYTES
        self._slots[id(slot)] = self._table.register(start, CONTROL_BYTES + slot.nbytes)

    def fill(self, slot: Slot, tensors: Iterable[tuple[int, Any]]) -> Callable[[], object]:
        """Do nothing: what is read is the slot."""
        return lambda: None

    def withdraw(self, slot: Slot) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        if (key := self._slots.pop(id(slot), None)) is not None:
            self._table.withdraw(key)

    def serve(self, read: PartsReader) -> None:
        """Do nothing: nobody is asked."""

    def reader(self, giver: int, link: ServerLink) -> SlotReader:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        if giver not in self._pairs:
            self._pairs[giver] = QueuePair(self._cards[giver])
        return _OneSidedReader(self._pairs[giver], giver, link, self._timeout_s)

    def close(self) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        while self._pairs:
            self._pairs.popitem()[1].close()


class _Part(NamedTuple):
    """A part of a tensor as it is read, and as what it is then taken out of what was read."""

    offsets: Sequence[int]
    nbytes: int
    at: int
    block: BlockRead
    tensor: PublishedTensor

    @property
    def total(self) -> int:
        return len(self.offsets) * self.nbytes


def _part(block: BlockRead, tensor: PublishedTensor, number: int, at: int) -> _Part:
    """Plan the read of a part; what is read lies at byte `at` of a buffer."""
    size = dtype_of(tensor.dtype).itemsize
    pairs = list(zip(block.shape, block.strides, strict=True))
    span, numel = 1 + sum((n - 1) * s for n, s in pairs), math.prod(block.shape)
    run, inner = 1, set()
    for d in sorted(range(len(pairs)), key=lambda d: pairs[d][1]):
        if pairs[d][1] != run:
            break
        run *= pairs[d][0]
        inner.add(d)
    strides = list(block.strides)
    offsets: I64 = np.full(1, block.start, np.int64)
    length = span
    if span > _DENSE * numel:
        length, step = run, numel
        for d, (n, s) in enumerate(pairs):
            if d not in inner:
                offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * s).reshape(-1)
                step //= n
                strides[d] = step
    own = msgspec.structs.replace(block, tensor=number, start=0, strides=tuple(strides))
    place = PublishedTensor(tensor.name, tensor.dtype, at, len(offsets) * length)
    starts = (tensor.start + offsets * size + CONTROL_BYTES).tolist()
    return _Part(starts, length * size, at, own, place)


class _Read(NamedTuple):
    """What was read, as `ckptd.publish.blocks.gather_blocks` takes it."""

    nbytes: int
    data: memoryview


class _OneSidedReader(LinkedReader):
    """Reads from one rank, and asks its server what is to be known of tensors."""

    def __init__(self, pair: QueuePair, giver: int, link: ServerLink, timeout_s: float) -> None:
        self._pair = pair
        self._where = f"rank {giver}"
        super().__init__(link)
        self._timeout_s = timeout_s

    def reads(
        self, number: int, requests: Iterable[tuple[tuple[BlockRead, ...], U8]]
    ) -> Iterator[U8]:
        for blocks, into in requests:
            self._fill(number, blocks, into)
            yield into

    def _fill(self, number: int, blocks: Sequence[BlockRead], into: U8) -> None:
        parts: list[_Part] = []
        at = 0
        for k, block in enumerate(blocks):
            parts.append(_part(block, self._link.places[block.tensor], k, at))
            at += -(-parts[-1].total // 16) * 16
        data = np.empty(at, np.uint8)
        key = self._key(number)
        for k, part in enumerate(parts):
            room = data[part.at : part.at + part.total]
            self._pair.post(RemoteRead(k, key, part.offsets, part.nbytes, room))
        self._completed(len(parts))
        if self._version(key) != number:
            raise self._gone(number)
        read = _Read(len(data), data.data)
        gather_blocks(read, [p.tensor for p in parts], [p.block for p in parts], into)

    def _key(self, number: int) -> int:
        """Return the key of the slot that has a version."""
        try:
            keys = list(self._pair.regions())
        except OSError as error:
            raise self._lost(str(error)) from error
        found = next((k for k in keys if self._version(k) == number), None)
        if found is None:
            raise self._gone(number)
        return found

    def _version(self, key: int) -> int:
        """Return which version is whole in a slot; 0: none."""
        words = np.zeros(3, "<u8")
        self._pair.post(RemoteRead(0, key, [0], words.nbytes, words.view(np.uint8)))
        self._completed(1)
        job, _, seal = words.tolist()
        return int(seal) if seal == job else 0

    def _completed(self, count: int) -> None:
        end = time.monotonic() + self._timeout_s
        errors = set()
        for _ in range(count):
            try:
                errors.add(self._pair.poll(end - time.monotonic()).error)
            except queue.Empty:
                raise self._lost("no completion in time") from None
        if errors := errors - {""}:
            raise self._lost("; ".join(sorted(errors)))

    def _lost(self, why: str) -> TransientStoreError:
        return TransientStoreError(
            "the memory of a rank of the publisher cannot be read",
            kind="link-lost",
            where=self._where,
            found=why,
        )

    def _gone(self, number: int) -> TransientStoreError:
        return TransientStoreError(
            "version not available from the publisher",
            kind="no-version",
            where=f"version {number} on {self._where}",
        )
