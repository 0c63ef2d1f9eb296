"""Carrier of published weights over torch.distributed process groups (gloo); largest request."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import digest
from ckptd.base.runtime.ranks import error_fields
from ckptd.checkpoint.save.arena import Slot
from ckptd.decoding import msgpack_decoder
from ckptd.errors import CkptdError, CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.publish.carrier import LinkedReader, PartsReader, SlotReader
from ckptd.publish.link import ServerLink, damaged
from ckptd.publish.messages import (
    MOST_READ_BYTES,
    BlockRead,
    PublishedTensor,
)
from ckptd.reshard.live.transport import PendingMessage
from ckptd.reshard.torch.transport import TorchTransport

U8 = NDArray[np.uint8]

_MOST_REQUEST_BYTES = 16 << 20
_HEAD_BYTES = 17
"""A sign, and a digest of what follows or the length of an error."""
_MOST_ERROR_BYTES = 64 << 10
_LOOK_S = 0.2


class _GroupRead(msgspec.Struct, frozen=True, array_like=True):
    """A worker's request to a rank: parts of tensors in the slot of a version."""

    number: int
    tensors: tuple[PublishedTensor, ...]
    blocks: tuple[BlockRead, ...]


_reads = msgpack_decoder(_GroupRead)


def _explained(error: Exception) -> bytes:
    """Return what a worker raises for an error here."""
    if not isinstance(error, CkptdError):
        error = UsageError("malformed request", found=repr(error)[:500])
    raw = msgspec.json.encode(error.to_dict())
    if len(raw) <= _MOST_ERROR_BYTES:
        return raw
    return msgspec.json.encode(UsageError(error.message[:1000], kind=error.kind).to_dict())


def _error_bytes(head: U8) -> int:
    size = int(head[1:9].view("<u8")[0])
    if not 0 < size <= _MOST_ERROR_BYTES:
        raise TransientStoreError("malformed reply", kind="link-lost", found=size)
    return size


class GroupCarrier:
    """See `ckptd.publish.carrier.WeightCarrier`; over torch.distributed, with gloo.

    All ranks of `process_group` make one at the same time: it has connections of its own. A rank of
    the publisher answers in threads of its process, so unlike a server it takes some of the
    trainer's interpreter, and what is not pulled when it dies is lost.

    Parameters
    ----------
    process_group
        The ranks of the publisher and of its workers; the default group when None.
    publishers
        Its ranks that publish, by rank of the publisher.
    timeout_s
        Longest wait for one message, in seconds.
    """

    def __init__(
        self, process_group: Any, publishers: Sequence[int], timeout_s: float = 60.0
    ) -> None:
        self._transport = TorchTransport(process_group, timeout_s)
        self._transport.begin(MOST_READ_BYTES)
        self._publishers = tuple(publishers)
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._asking = {peer: threading.Lock() for peer in self._publishers}
        self._given_up: set[int] = set()

    def serve(self, read: PartsReader) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        for peer in range(self._transport.world):
            if peer not in self._publishers:
                name = f"ckptd-carry-{peer}"
                threading.Thread(
                    target=self._answer_all, args=(peer, read), name=name, daemon=True
                ).start()

    def expose(self, slot: Slot) -> None:
        """Do nothing: what workers ask for is read for them."""

    def fill(self, slot: Slot, tensors: Iterable[tuple[int, Any]]) -> Callable[[], object]:
        """Do nothing."""
        return lambda: None

    def withdraw(self, slot: Slot) -> None:
        """Do nothing."""

    def _answer_all(self, peer: int, read: PartsReader) -> None:
        try:
            while not self._closed.is_set():
                self._answer(peer, read)
        except CkptdError:
            return  # the worker is gone, or the carrier is closed

    def _answer(self, peer: int, read: PartsReader) -> None:
        length = np.zeros(1, np.int64)
        # Hours may lie between two versions, or between two workers that ask.
        request = self._transport.receive(peer, length.view(np.uint8), patient=True)
        self._through(request, patient=True)
        if not 0 < length[0] <= _MOST_REQUEST_BYTES:
            raise CkptdError("a request is too long", found=int(length[0]))
        raw = np.empty(int(length[0]), np.uint8)
        self._through(self._transport.receive(peer, raw))
        try:
            asked = _reads.decode(raw.tobytes())
            data = read(asked.number, asked.tensors, asked.blocks)
            head = np.frombuffer(b"+" + digest(data.data), np.uint8)
        except NotFoundError:  # it is overwritten, and the worker asks for the next one
            data, head = np.empty(0, np.uint8), np.zeros(_HEAD_BYTES, np.uint8)
        except (CkptdError, msgspec.MsgspecError) as error:
            data = np.frombuffer(_explained(error), np.uint8)
            head = np.zeros(_HEAD_BYTES, np.uint8)
            head[0], head[1:9] = ord("-"), np.array([len(data)], "<u8").view(np.uint8)
        if head[0] == ord("+"):
            self._give(peer, head, data)
        else:
            self._send(peer, head, data)

    def _give(self, peer: int, head: U8, data: U8) -> None:
        """Give a worker what it has asked for."""
        self._send(peer, head, data)

    def _send(self, peer: int, *parts: U8) -> None:
        for part in parts:
            if len(part):
                whole = part if part.flags.writeable else part.copy()
                self._through(self._transport.send(peer, whole))

    def _take(self, peer: int, into: U8) -> None:
        """Take what a rank of the publisher gives."""
        self._through(self._transport.receive(peer, into))

    def _through(self, pending: PendingMessage, *, patient: bool = False) -> None:
        """Wait for a message; raises when the carrier is closed, or when it is late."""
        end = math.inf if patient else time.monotonic() + self._timeout_s
        while not pending.wait(_LOOK_S):
            if self._closed.is_set():
                raise UsageError("the carrier was closed", kind="closed")
            if time.monotonic() > end:
                raise TransientStoreError("no message arrived in time", kind="link-late")

    def reader(self, giver: int, link: ServerLink) -> SlotReader:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        return _GroupReader(self, self._publishers[giver], link)

    def ask(self, peer: int, asked: _GroupRead, into: U8) -> None:
        """Fill `into` with what a rank of the publisher answers.

        Raises
        ------
        TransientStoreError
            The rank is gone, is late, or has not the version any more. One that was late once is
            asked nothing more: its answer may come yet, and would be taken for another one.
        CorruptError
            Other bytes came than it sent.
        """
        try:
            self._ask(peer, asked, into)
        except (TransientStoreError, CorruptError, UsageError):
            raise
        except CkptdError as error:  # of the transport: that rank is gone
            raise TransientStoreError(
                "a rank of the publisher has ended",
                kind="link-lost",
                where=f"rank {peer}",
                found=error.found or error.message,
            ) from error

    def _ask(self, peer: int, asked: _GroupRead, into: U8) -> None:
        raw = np.frombuffer(msgspec.msgpack.encode(asked), np.uint8).copy()
        head = np.zeros(_HEAD_BYTES, np.uint8)
        failed: U8 | None = None
        with self._asking[peer]:
            if peer in self._given_up:
                raise TransientStoreError(
                    "a rank of the publisher missed a deadline earlier; this carrier cannot be "
                    "used again",
                    kind="link-lost",
                    where=f"rank {peer}",
                    hint="create new carriers on all ranks of the publisher and of its workers",
                )
            self._given_up.add(peer)
            for part in (np.array([len(raw)], np.int64).view(np.uint8), raw):
                self._through(self._transport.send(peer, part))
            self._through(self._transport.receive(peer, head))
            has = head[0] == ord("+")
            if has:
                self._take(peer, into)
            elif head[0] == ord("-"):
                failed = np.empty(_error_bytes(head), np.uint8)
                self._through(self._transport.receive(peer, failed))
            self._given_up.remove(peer)
        if failed is not None:
            try:
                fields = error_fields.decode(failed.tobytes())
            except msgspec.MsgspecError as e:
                raise TransientStoreError("malformed reply", kind="link-lost", found=e) from None
            raise CkptdError.from_dict(fields)
        if not has:
            raise TransientStoreError(
                "version not available from the publisher", kind="no-version", where=f"rank {peer}"
            )
        if digest(into.data) != head[1:].tobytes():
            raise damaged(f"rank {peer}")

    def close(self) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        self._closed.set()
        self._transport.close()


class _GroupReader(LinkedReader):
    """Reads from one rank over the group, and asks its server everything else."""

    def __init__(self, carrier: GroupCarrier, peer: int, link: ServerLink) -> None:
        self._carrier = carrier
        self._peer = peer
        super().__init__(link)

    def reads(
        self, number: int, requests: Iterable[tuple[tuple[BlockRead, ...], U8]]
    ) -> Iterator[U8]:
        for blocks, into in requests:
            used = {n: i for i, n in enumerate(dict.fromkeys(b.tensor for b in blocks))}
            asked = _GroupRead(
                number,
                tuple(self._link.places[n] for n in used),
                tuple(msgspec.structs.replace(b, tensor=used[b.tensor]) for b in blocks),
            )
            self._carrier.ask(self._peer, asked, into)
            yield into
