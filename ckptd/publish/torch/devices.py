"""`DeviceCarrier`: versions in the memory of a device, which workers of the host read (CUDA IPC).

In it: which kinds of devices share memory, and how; sums that prove what is read; when a worker
reads the host's memory after all.

A rank of the publisher has a block on its device for each slot, filled on its own stream from the
tensors themselves. The slot's control page has the block's handle. A worker maps the slot as ever,
opens the block by the handle, and copies from device to device what arrives as it is. The slot has
the same bytes and decides: where a block cannot be opened, holds other bytes, or went while it was
read, the worker takes them from the slot.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.runtime.ranks import identity, liveness
from ckptd.base.torch.device import accelerator, kind_of
from ckptd.base.torch.tensors import torch_dtype
from ckptd.checkpoint.save.arena import CONTROL_BYTES, Slot
from ckptd.decoding import msgpack_decoder
from ckptd.errors import DeadlineError, UsageError
from ckptd.publish.blocks import BLOCK_BYTES
from ckptd.publish.carrier import LinkedReader, PartsReader, SlotReader
from ckptd.publish.link import (
    CARD_AT,
    HostVersion,
    MappedVersion,
    NearMemory,
    ServerLink,
    VersionMemory,
)
from ckptd.publish.messages import BlockRead, PublishedTensor
from ckptd.reshard.torch.relayout import TorchMemory
from ckptd.types import dtype_of

U8 = NDArray[np.uint8]
_log = logging.getLogger("ckptd")
_FILL_S = 300.0
_POLL_S = 0.0005
_MOST_OPEN = 4
"""Blocks of a rank that a worker keeps open: the slots of a publisher, and those before."""
_WORD = 8


class BlockSharing(Protocol):
    """How memory of a kind of device is shared with other processes of the host."""

    def make(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[Any]]:
        """Return new memory, as bytes, and its handle; raises `RuntimeError` where it cannot be."""

    def open(self, handle: list[Any]) -> torch.Tensor:
        """Return the memory of another process; raises `OSError` or `RuntimeError`."""

    def end(self, handle: list[Any]) -> None:
        """Release it once nothing in this process has it."""


class CudaSharing:
    """`BlockSharing` by CUDA's handles, as torch.multiprocessing has them."""

    def make(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[Any]]:
        """See `BlockSharing`. The handle is of the whole segment that torch has it in."""
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        index, *handle = block.untyped_storage()._share_cuda_()
        return block, [self._name(index), *handle]

    def open(self, handle: list[Any]) -> torch.Tensor:
        """See `BlockSharing`."""
        name, *rest = handle
        # Each process may count devices otherwise.
        found = [i for i in range(torch.cuda.device_count()) if self._name(i) == name]
        if not found:
            raise OSError(f"this process does not see device {name}")
        storage = torch.UntypedStorage._new_shared_cuda(found[0], *rest)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def end(self, handle: list[Any]) -> None:
        """See `BlockSharing`: torch keeps memory that it has shared until its count is zero."""
        _, _, _, _, counter, offset, *_ = handle
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)

    @staticmethod
    def _name(index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """Card of a block in the control page of its slot: owner, bytes of data, handle."""

    owner: tuple[int, str, str]
    nbytes: int
    handle: list[Any]


_cards = msgpack_decoder(_Card)


class _Block(NamedTuple):
    """Memory of a slot on a device: its data, and behind it a sum for each `BLOCK_BYTES` of it."""

    memory: torch.Tensor
    rows: int

    @staticmethod
    def rows_of(nbytes: int) -> int:
        return max(1, -(-nbytes // BLOCK_BYTES))

    @staticmethod
    def nbytes_of(nbytes: int) -> int:
        return _Block.rows_of(nbytes) * (BLOCK_BYTES + _WORD)

    @property
    def words(self) -> torch.Tensor:
        data = self.memory[: self.rows * BLOCK_BYTES]
        return data.view(torch.int64).view(self.rows, -1)

    @property
    def sums(self) -> torch.Tensor:
        start = self.rows * BLOCK_BYTES
        return self.memory[start : start + self.rows * _WORD].view(torch.int64)

    def part(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[start : start + nbytes].view(dtype)


class DeviceCarrier:
    """See `ckptd.publish.carrier.WeightCarrier`, and the module.

    Both sides make one, by themselves. A publisher needs memory on its device for each slot, as
    much as it publishes. What a worker casts or quantizes, and what workers of other hosts pull,
    goes as without it.

    Parameters
    ----------
    device
        Of this rank of the publisher: where its tensors are; the current one when None.
    sharing
        Of another kind of device than CUDA's.
    """

    def __init__(
        self, device: torch.device | str | None = None, sharing: BlockSharing | None = None
    ) -> None:
        self._device = device
        self._sharing: BlockSharing = CudaSharing() if sharing is None else sharing
        self._blocks: dict[int, tuple[_Block, list[Any]]] = {}
        self._opened: dict[tuple[int, bytes], tuple[_Block | None, Callable[[], bool]]] = {}
        self._lock = threading.Lock()

    # --- the publisher --------------------------------------------------------------------------

    def serve(self, read: PartsReader) -> None:
        """Do nothing: nobody is asked."""

    def expose(self, slot: Slot) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`.

        Raises
        ------
        UsageError
            The device has no such memory.
        """
        nbytes = _Block.nbytes_of(slot.nbytes)
        try:
            kind = accelerator()
            device = torch.device(
                self._device or ("cuda" if kind is None else kind.current_device())
            )
            memory, handle = self._sharing.make(nbytes, device)
            memory.zero_()
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                "a device has no memory that other processes can open",
                wanted=f"{nbytes} bytes for each slot",
                found=str(error).partition("\n")[0][:300],
                hint="free memory there; remove expandable_segments from PYTORCH_ALLOC_CONF and "
                "PYTORCH_CUDA_ALLOC_CONF; or create the Publisher without carrier=",
            ) from error
        self._blocks[id(slot)] = _Block(memory, _Block.rows_of(slot.nbytes)), handle
        raw = msgspec.msgpack.encode(_Card(identity(), slot.nbytes, handle))
        _write_card(slot, raw)

    def fill(self, slot: Slot, tensors: Iterable[tuple[int, Any]]) -> Callable[[], object]:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        block, _ = self._blocks[id(slot)]
        device, kind = block.memory.device, kind_of(block.memory.device)
        found = list(tensors)
        with torch.no_grad(), kind.on(device):
            stream = kind.current_stream(device)
            block.memory.record_stream(stream)
            if found:
                places = [block.part(at, t.nbytes, t.dtype).view(t.shape) for at, t in found]
                torch._foreach_copy_(places, [t for _, t in found])
            block.sums.copy_(block.words.sum(1))
            event = kind.make_event()
            event.record(stream)

        def finished() -> None:
            kind.ignore_captures(device)
            end = time.monotonic() + _FILL_S
            while not event.query():
                if time.monotonic() > end:
                    raise DeadlineError(
                        "a version was not copied on its device in time",
                        kind="board",
                        where=str(device),
                        wanted=f"within {_FILL_S:.0f} s",
                    )
                time.sleep(_POLL_S)

        return finished

    def withdraw(self, slot: Slot) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        found = self._blocks.pop(id(slot), None)
        if found is not None:
            _write_card(slot, b"")  # first: who reads the block looks at it behind that
            self._sharing.end(found[1])

    # --- a worker -------------------------------------------------------------------------------

    def reader(self, giver: int, link: ServerLink) -> SlotReader:
        """See `ckptd.publish.carrier.WeightCarrier`; of another host the link itself."""
        return _NearReader(self, giver, link) if link.local else link

    def near(self, giver: int, mapped: MappedVersion) -> VersionMemory:
        """Return a version with its block, where that can be opened."""
        raw = mapped.card
        if not raw:
            return mapped
        card = _cards.decode(raw)
        with self._lock:
            self._opened = {k: x for k, x in self._opened.items() if x[1]()}  # of who is alive
            if (giver, raw) not in self._opened:
                self._opened[giver, raw] = self._open(card)
            mine = [key for key in self._opened if key[0] == giver]
            for key in mine[:-_MOST_OPEN]:
                del self._opened[key]
            block, alive = self._opened[giver, raw]
        inside = card.nbytes >= len(mapped.data) and alive()
        return _NearVersion(mapped, block, alive) if block is not None and inside else mapped

    def _open(self, card: _Card) -> tuple[_Block | None, Callable[[], bool]]:
        """Open a block; None, and why in the log, where that fails."""
        alive, why = liveness(card.owner), ""
        if card.owner == identity():  # a driver opens none of its own process
            return None, lambda: True
        if alive is None:
            why = "its process has another namespace"
        else:
            try:
                memory = self._sharing.open(card.handle)
                if memory.numel() >= _Block.nbytes_of(card.nbytes):
                    return _Block(memory, _Block.rows_of(card.nbytes)), alive
                why = f"it has {memory.numel()} bytes only"
            except (OSError, RuntimeError) as error:
                why = str(error).partition("\n")[0][:300]
        _log.warning("weights come through the host: a publisher's device memory: %s", why)
        return None, alive or (lambda: True)

    def close(self) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`: workers close what they opened."""
        with self._lock:
            self._opened.clear()


def _write_card(slot: Slot, raw: bytes) -> None:
    """Put a card into the control page of a slot."""
    whole = len(raw).to_bytes(_WORD, "little") + raw
    if CARD_AT + len(whole) > CONTROL_BYTES:
        raise UsageError("the handle of a block is too long", found=f"{len(raw)} bytes")
    os.pwrite(slot.fd, whole, CARD_AT)


class _NearVersion(HostVersion):
    """A version in a slot, and in the block of a device as well."""

    def __init__(self, mapped: MappedVersion, block: _Block, alive: Callable[[], bool]) -> None:
        self.number, self.data = mapped.number, mapped.data
        self._mapped, self._card = mapped, mapped.card
        self._block, self._alive = block, alive

    @property
    def intact(self) -> bool:
        """See `ckptd.publish.link.VersionMemory`."""
        return self._mapped.intact

    @property
    def near_intact(self) -> bool:
        """See `ckptd.publish.link.VersionMemory`."""
        try:
            self._block.memory[:1].cpu()  # behind what was copied
        except RuntimeError as error:
            _log.warning("weights come through the host: a publisher's device memory: %s", error)
            return False
        return self._mapped.intact and self._mapped.card == self._card and self._alive()

    def near(self, place: PublishedTensor, spans: Iterable[tuple[int, int]]) -> NearMemory | None:
        """See `ckptd.publish.link.VersionMemory`."""
        dtype, block = dtype_of(place.dtype), self._block
        touched = np.zeros(block.rows + 1, np.int8)
        for first, end in spans:
            lo, hi = place.start + first, place.start + end
            touched[lo // BLOCK_BYTES : -(-hi // BLOCK_BYTES)] = 1
        edges = np.flatnonzero(np.diff(touched, prepend=0)).reshape(-1, 2).tolist()
        try:
            words, sums = block.words, block.sums
            good = all(torch.equal(words[a:b].sum(1), sums[a:b]) for a, b in edges)
            if good:
                data = block.part(
                    place.start, place.numel * dtype.itemsize, torch_dtype(place.dtype)
                )
                return TorchMemory(data, dtype)
            why = "it holds other bytes than were published"
        except RuntimeError as error:
            why = str(error).partition("\n")[0][:300]
        _log.warning("%s comes through the host: a publisher's device memory: %s", place.name, why)
        return None


class _NearReader(LinkedReader):
    """Maps what a server of the host has, with the block of its device."""

    local = True

    def __init__(self, carrier: DeviceCarrier, giver: int, link: ServerLink) -> None:
        super().__init__(link)
        self._carrier, self._giver = carrier, giver

    def map(self, number: int) -> VersionMemory:
        """See `ckptd.publish.carrier.SlotReader`."""
        return self._carrier.near(self._giver, self._link.map(number))

    def reads(
        self, number: int, requests: Iterable[tuple[tuple[BlockRead, ...], U8]]
    ) -> Iterator[U8]:
        """See `ckptd.publish.carrier.SlotReader`."""
        return self._link.reads(number, requests)
