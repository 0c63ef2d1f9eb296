"""`ServerLink`: a worker's connection to a server: questions, answers, digests, mapped slots.

In it: times of connecting; lease of a held version and how often it is renewed; errors of a lost
server and of damaged parts.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.net.address import Address, UnixAddress, parse_address
from ckptd.base.net.connection import Connection, greet_server
from ckptd.base.net.handed import Proof
from ckptd.base.net.roles import Role
from ckptd.base.runtime.host import host_id
from ckptd.checkpoint.save.arena import CONTROL_BYTES
from ckptd.errors import CkptdError, CorruptError, TransientStoreError
from ckptd.publish.blocks import incoming, incoming_digest
from ckptd.publish.messages import (
    ANSWER,
    MOST_BODY,
    MOST_READ_BYTES,
    PURPOSE,
    AskHold,
    AskMap,
    AskNewest,
    AskRead,
    BlockRead,
    HoldAnswer,
    Mapped,
    Newest,
    PublishedTensor,
    PublishRefusal,
    ReadBytes,
    ServerEntry,
    TensorPlaces,
)
from ckptd.reshard.live.memory import ArrayMemory, TensorMemory
from ckptd.types import dtype_of

U8 = NDArray[np.uint8]
T = TypeVar("T")

_CONNECT_S = 10.0
_LEAST_S = 0.05
_RENEWALS = 4
"""In the time of a lease."""
_RENEW_S = 5.0
_SEALED = slice(0, 24)
CARD_AT = 64
"""In the control page: a carrier's card for workers that map the slot."""
_AHEAD = 1
_AHEAD_BYTES = 32 << 10
"""Largest question that is asked ahead: it fits the buffers of a socket whose other end sends."""


def damaged(where: str) -> CorruptError:
    """Return the error of parts whose digest is another one than their server said."""
    return CorruptError(
        "bytes from a publisher were corrupted in transit",
        where=where,
        hint="nothing was written to the tensors; update() again",
    )


class ReadRequest(NamedTuple):
    """Parts of tensors that are asked for.

    Attributes
    ----------
    blocks
        The parts.
    into
        Where their values go, one after the other.
    held
        Fills `into` with what the worker holds, before deltas are applied to it.
    """

    blocks: tuple[BlockRead, ...]
    into: U8
    held: Callable[[], object] = lambda: None


class Arrived(NamedTuple):
    """An answer to a `ReadRequest`.

    Attributes
    ----------
    data
        The buffer of the request.
    nbytes
        So many bytes came.
    good
        Whether `data` are the values. If not, the worker held other ones than it said, or the slot
        was filled again while they were sent.
    answer
        What came before the bytes.
    sent
        The bytes as they came.
    passed
        Whether it came of another worker.
    """

    data: U8
    nbytes: int
    good: bool
    answer: ReadBytes = ReadBytes(b"")
    sent: memoryview = memoryview(b"")
    passed: bool = False


class ServerLink:
    """A connection to the server of a rank; make it with `to`. Thread-safe, one question at a time.

    Attributes
    ----------
    local
        Whether it is a Unix socket: memory can be mapped.
    ending
        Whether the rank of the server was gone already.
    places
        Of the tensors that were asked after last.
    """

    ending = False

    def __init__(self, connection: Connection, entry: ServerEntry, wait_s: float) -> None:
        self.entry = entry
        self.local = connection.local
        self._connection = connection
        self._wait_s = wait_s
        self.places: tuple[PublishedTensor, ...] = ()
        self._lock = threading.Lock()

    @staticmethod
    def to(
        entry: ServerEntry,
        proof: Proof,
        *,
        wait_s: float = 60.0,
        connect_s: float = _CONNECT_S,
        far: bool = False,
        role: Role = "worker",
        purpose: str = PURPOSE,
    ) -> ServerLink:
        """Connect: on the same host through the Unix socket, else over TCP.

        Parameters
        ----------
        wait_s
            For one answer, in seconds.
        connect_s
            For all of it: both ways, and the greeting.
        far
            Take no Unix socket: as if the server were on another host.
        role
            Of this process.
        purpose
            What the server is for, one of `ckptd.base.net.roles.DOORS`.

        Raises
        ------
        CkptdError
            The server is not reached, has another secret, or is of another publisher.
        """
        end = time.monotonic() + connect_s
        addresses: list[UnixAddress | Address] = []
        if entry.socket and entry.host == host_id() and not far:
            addresses.append(UnixAddress(entry.socket))
        addresses.append(parse_address(entry.address, "a publisher's address"))
        while True:
            address = addresses.pop(0)
            try:
                sock = address.connect(max(_LEAST_S, end - time.monotonic()))
                connection = Connection(sock, str(address), wait_s, MOST_BODY)
                return ServerLink._greeted(connection, entry, proof, role, purpose, wait_s, end)
            except TransientStoreError as error:
                # Another container of this host, say: its files are not seen here. But a server
                # that lets a connection wait lets the other one wait, too.
                if not addresses or error.kind == "link-late":
                    raise

    @staticmethod
    def _greeted(
        connection: Connection,
        entry: ServerEntry,
        proof: Proof,
        role: Role,
        purpose: str,
        wait_s: float,
        end: float,
    ) -> ServerLink:
        try:
            left = max(_LEAST_S, end - time.monotonic())
            about = greet_server(connection, proof, purpose, role=role, wait_s=left)
            if entry.epoch and about.get("epoch") != entry.epoch:
                raise connection.fail("another publisher listens there")
        except BaseException:
            connection.release()
            raise
        link = ServerLink(connection, entry, wait_s)
        link.entry = msgspec.structs.replace(entry, epoch=str(about.get("epoch", "")))
        link.ending = about.get("ending") is True
        return link

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """Return the answer to a question.

        Raises
        ------
        CkptdError
            What the server answered; or the connection is lost, and this link with it.
        """
        found = self._asked(question, kind, self._wait_s if wait_s is None else wait_s)
        if isinstance(found, TensorPlaces):
            self.places = found.places
        return found

    def _asked(
        self, question: msgspec.Struct, kind: type[T], wait_s: float, fds: list[int] | None = None
    ) -> T:
        with self._lock:
            try:
                self._connection.send(question)
                answer, _ = self._connection.receive(ANSWER, wait_s, fds=fds)
            except BaseException:  # its answer would be taken for that to another question
                self._connection.close()
                raise
            return self._checked(answer, kind)

    def newest(self, than: int, wait_s: float, answer_s: float | None = None) -> Newest:
        """Return the newest version above `than`; wait for one so long.

        After `answer_s` more a server does not answer any more.
        """
        answer_s = self._wait_s if answer_s is None else answer_s
        return self.ask(AskNewest(than, wait_s), Newest, wait_s + answer_s)

    def map(self, number: int) -> MappedVersion:
        """Return the memory of a version, as this process sees it now."""
        fds: list[int] = []
        try:
            found = self._asked(AskMap(number), Mapped, self._wait_s, fds)
            if len(fds) != 1:
                raise self._connection.fail(
                    "the answer lacks its memory descriptor", kind="link-protocol"
                )
            return MappedVersion(fds[0], found.nbytes, number)
        finally:
            for fd in fds:
                os.close(fd)

    def reads(
        self, number: int, requests: Iterable[tuple[tuple[BlockRead, ...], U8]]
    ) -> Iterator[U8]:
        """Yield each buffer once it is filled with its blocks; see `arrivals`."""
        for found in self.arrivals(number, (ReadRequest(*r) for r in requests)):
            if not found.good:
                raise damaged(self._connection.peer)
            yield found.data

    def arrivals(self, number: int, requests: Iterable[ReadRequest]) -> Generator[Arrived]:
        """Yield each buffer once it is filled with its blocks, which come with a digest.

        See `answers`.
        """
        return self.answers((AskRead(number, r.blocks), r) for r in requests)

    def answers(self, asked: Iterable[tuple[msgspec.Struct, ReadRequest]]) -> Generator[Arrived]:
        """Yield the answers to questions.

        Tensors are those that were asked after last. The next parts are asked for already: the
        server looks at its digests while this end takes what it sent. A long question waits for
        the answers before it, else both ends might send and neither receive.
        After an error, or where the caller stops early, this link is lost. Close what this returns:
        until its end it keeps others from this link, and from closing it.
        """
        waiting: deque[ReadRequest] = deque()
        with self._lock:
            try:
                for ask, request in asked:
                    question = msgspec.msgpack.encode(ask)
                    while waiting and len(question) > _AHEAD_BYTES:
                        yield self.read(waiting.popleft())
                    self._connection.send(question)
                    waiting.append(request)
                    if len(waiting) > _AHEAD:
                        yield self.read(waiting.popleft())
                while waiting:
                    yield self.read(waiting.popleft())
            except BaseException:  # answers to what was asked ahead would be taken for others
                self._connection.close()
                raise

    def read(self, request: ReadRequest) -> Arrived:
        """Fill a buffer with the next answer to `AskRead`, which asked for these parts."""
        blocks, into, held = request
        answer, nbytes = self._connection.receive(ANSWER, self._wait_s, most_bulk=MOST_READ_BYTES)
        found = self._checked(answer, ReadBytes)
        if (nbytes != len(into)) if not found.sizes else nbytes > len(into) + len(found.sizes):
            raise self._connection.fail(
                "the answer holds other bytes than requested", kind="link-protocol", found=nbytes
            )
        deltas = memoryview(bytearray(nbytes)) if found.sizes else into.data
        self._connection.fill(deltas, self._wait_s)
        good = True
        if found.sizes:
            held()
            try:
                incoming(self.places, blocks, deltas, found.sizes, into)
            except CorruptError:
                good = False
        good = good and incoming_digest(self.places, blocks, into) == found.digest
        return Arrived(into, nbytes, good, found, memoryview(deltas))

    def _checked(self, answer: Any, kind: type[T]) -> T:
        if isinstance(answer, PublishRefusal):
            raise CkptdError.from_dict(answer.error)
        if not isinstance(answer, kind):
            raise self._connection.fail("unexpected reply", kind="link-protocol")
        return answer

    @property
    def lost(self) -> bool:
        """Whether the other end is gone."""
        if self._connection.broken:
            return True
        return self._connection.readable()  # nothing comes unasked but the end

    def close(self) -> None:
        """End it. Idempotent."""
        self._connection.close()
        with self._lock:
            self._connection.release()


class VersionLeader(Protocol):
    """Answers for a publisher: rank 0's server, or a store."""

    @property
    def lost(self) -> bool:
        """Whether it is gone."""

    def ask(self, question: msgspec.Struct, kind: type[T], wait_s: float | None = None) -> T:
        """Return the answer to a question."""


class VersionHold:
    """A version that the leader keeps for a worker while it pulls.

    Parameters
    ----------
    leader
        To rank 0's server; the hold ends with it, or with its `AskRelease`.
    number
        Of the version.

    Attributes
    ----------
    good
        Whether it was there.
    """

    def __init__(self, leader: VersionLeader, number: int) -> None:
        self._leader = leader
        self._number = number
        self._lock = threading.Lock()
        answer = leader.ask(AskHold(number), HoldAnswer)
        self.good = answer.good
        self._every_s = answer.lease_s / _RENEWALS
        self._next = time.monotonic() + self._every_s

    def keep(self) -> None:
        """Renew the lease if it is time to; called at each step forward of the pull, by any thread.

        A worker that stops does not call it: its slot is filled again. A lease that cannot be
        renewed ends nothing by itself, since what is read shows whether the version is there still.
        """
        if time.monotonic() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = time.monotonic() + self._every_s
            if not self._leader.lost:
                self._leader.ask(AskHold(self._number), HoldAnswer, _RENEW_S)
        except CkptdError:
            self._next = math.inf  # the leader is gone, or does not answer
        finally:
            self._lock.release()


class NearMemory(Protocol):
    """A published tensor where it need not go through the memory of this host."""

    def copy_to(self, target: TensorMemory, block: Block) -> bool:
        """Enqueue the copy of a part into an own tensor; False: not into one there."""


class VersionMemory(Protocol):
    """Memory that a version is in, to be read only.

    Attributes
    ----------
    near_intact
        Whether what was copied of `near` so far is of the version; waits for these copies.
    """

    number: int
    data: U8

    @property
    def intact(self) -> bool:
        """Whether the version is still there, whole."""

    @property
    def near_intact(self) -> bool:
        """See the class."""

    def tensor(self, place: PublishedTensor) -> ArrayMemory:
        """Return a tensor; raises `CkptdError` where it is not inside."""

    def near(self, place: PublishedTensor, spans: Iterable[tuple[int, int]]) -> NearMemory | None:
        """Return it on a device, if it is there as well and `spans` of its bytes are proved."""


class HostVersion:
    """A `VersionMemory` of which nothing is near."""

    data: U8

    @property
    def near_intact(self) -> bool:
        """See `VersionMemory`."""
        return True

    def tensor(self, place: PublishedTensor) -> ArrayMemory:
        """See `VersionMemory`."""
        dtype = dtype_of(place.dtype)
        end = place.start + place.numel * dtype.itemsize
        if end > len(self.data):
            raise CkptdError("a tensor exceeds its slot")
        return ArrayMemory(self.data[place.start : end], dtype)

    def near(self, place: PublishedTensor, spans: Iterable[tuple[int, int]]) -> NearMemory | None:
        """See `VersionMemory`."""
        return None


class MappedVersion(HostVersion):
    """The slot of a version in this process's memory, to be read only.

    What is mapped stays as it is however the trainer and its server end, as long as the version is
    held; `intact` tells whether it was.

    Parameters
    ----------
    fd
        Of the slot; it may be closed afterwards.
    nbytes
        Of its data.
    number
        Of the version.
    """

    def __init__(self, fd: int, nbytes: int, number: int) -> None:
        self.number = number
        size = os.fstat(fd).st_size
        if size < CONTROL_BYTES + nbytes:
            raise CorruptError(
                "a slot is smaller than its server says",
                wanted=f"{CONTROL_BYTES + nbytes} bytes",
                found=f"{size} bytes",
            )
        self._map = mmap.mmap(fd, CONTROL_BYTES + max(nbytes, 1), prot=mmap.PROT_READ)
        whole = np.frombuffer(self._map, np.uint8)
        self._control = whole[_SEALED].view(np.uint64)
        self._card = whole[CARD_AT:CONTROL_BYTES]
        self.data: U8 = whole[CONTROL_BYTES : CONTROL_BYTES + nbytes]

    @property
    def intact(self) -> bool:
        """Whether the version is still in the slot, whole."""
        job, _, seal = self._control.tolist()
        return bool(job == seal == self.number)

    @property
    def card(self) -> bytes:
        """The card that the publisher's carrier has in the control page now; empty: none."""
        length = int.from_bytes(self._card[:8].tobytes(), "little")
        return self._card[8 : 8 + length].tobytes()
