"""`PublishServer`: process that serves a rank's versions and stores them; lingers after it.

In it: time limits of greeting, sends and orders; most connections.

It shares the slots with its rank, so no version is copied and no lock of the trainer's interpreter
is taken. On the same host it passes the memory itself to a worker; to other hosts it sends the
parts that a worker asks for. It outlives its rank for a while: a worker that pulls a version when
the trainer is killed gets the rest of it.

Rank 0's server is the leader: it keeps the `VersionTable`, and answers which version is the newest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import digest
from ckptd.base.net.address import Address, UnixAddress, listen_at
from ckptd.base.net.connection import Connection
from ckptd.base.net.door import Door
from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.host import host_id, many_files
from ckptd.base.runtime.priority import LAST, LATER, step_back
from ckptd.checkpoint.save.arena import Slot
from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError, NotFoundError, ProcessError, StoreError, UsageError
from ckptd.publish.blocks import BLOCK_BYTES, BlockDigests, outgoing, read_bytes
from ckptd.publish.chains import KEPT_VERSIONS, DeltaBook, VersionDeltas
from ckptd.publish.deltas import NOTHING
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    MOST_BODY,
    ORDER,
    PURPOSE,
    QUESTION,
    AskAbout,
    AskChanged,
    AskCommit,
    AskDrop,
    AskHold,
    AskMap,
    AskNewest,
    AskProved,
    AskRead,
    AskRelease,
    AskSlot,
    AskSource,
    AskStore,
    AskStored,
    AskTensors,
    AskWhere,
    ChangedBlocks,
    HoldAnswer,
    Mapped,
    Newest,
    Opening,
    PlaceLost,
    PublishedAbout,
    PublishedTensor,
    PublishRefusal,
    ReadBytes,
    ServerEntry,
    ServerList,
    ServerReady,
    ServerStop,
    SetDirectory,
    SetLeader,
    SetTensors,
    SlotAnswer,
    SlotMemory,
    StoredShare,
    StoreOrder,
    TensorPlaces,
    VersionDropped,
    VersionKnown,
    VersionSealed,
    VersionSettled,
    VersionWhole,
    most_listen_s,
)
from ckptd.publish.passing import Sources, asked_first, folded, sum_of
from ckptd.publish.stored import (
    GONE_S,
    ShareWriter,
    StoreDesk,
    StoredRank,
    open_place,
)
from ckptd.publish.versions import VersionTable
from ckptd.store.base import Store

U8 = NDArray[np.uint8]

_TICK_S = 0.5
_GREETING_S = 10.0
_SEND_S = 60.0
_MOST_CONNECTIONS = 4096
_ORDER_S = 5.0
"""A rank's server asks for so long which version it is to store, in seconds."""

_log = logging.getLogger("ckptd")


class _Shared:
    """A slot that threads read; its memory goes when it is retired and none does any more.

    All of it under the server's lock: a descriptor that two threads close is another one's.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.readers = 0
        self._retired = False

    def retire(self) -> None:
        """Release the memory as soon as it can be."""
        self._retired = True
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """Close a retired slot that is not read."""
        if self._retired and not self.readers:
            self.slot.close()


class PublishServer:
    """Serves the slots of one rank.

    Parameters
    ----------
    channel
        To the rank.
    """

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._replying = threading.Lock()
        self._slots: dict[int, _Shared] = {}
        self._versions: dict[int, _Shared] = {}
        self._tensors: dict[str, PublishedTensor] = {}
        self._digests: OrderedDict[int, dict[str, list[bytes]]] = OrderedDict()
        self._digested = threading.Condition(self._lock)
        self._blocks: dict[int, BlockDigests] = {}
        self._pending: set[int] = set()
        self._deltas = DeltaBook()
        self._about: PublishedAbout | None = None
        self._entries: tuple[ServerEntry, ...] = ()
        self._leader: ServerEntry | None = None
        self._up: ServerLink | None = None
        self._active = time.monotonic()
        self._hold_until = math.inf
        self._busy = 0
        self._ended = threading.Event()
        self._doors: list[Door] = []
        self._unix = ""
        self._opening: Opening | None = None
        self._book = VersionTable(2, 1.0)
        self._desk: StoreDesk | None = None
        self._writer: ShareWriter | None = None
        self._taker: ServerLink | None = None
        self._sources = Sources()

    # --- the rank -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the publisher is closed or dead, and no worker needs the versions."""
        stopped = False
        try:
            while not stopped:
                item = self._channel.receive(_TICK_S)
                if item is None:
                    continue
                message, fd = item
                stopped = isinstance(message, ServerStop)
                self._do(message, fd)
        except EOFError:
            pass  # the trainer is dead: what is whole is served for a while
        try:
            self._linger(closed=stopped)
        finally:
            self._end()

    def _linger(self, *, closed: bool) -> None:
        """Serve for a while what is asked for, then what is held alone.

        Only the leader knows what is held: the other servers stay as long as it does.
        """
        linger_s = 0.0 if self._opening is None else self._opening.linger_s
        if closed:
            linger_s = min(linger_s, 1.0)
        self._active = time.monotonic()
        self._hold_until = self._active + linger_s
        if not self._leads:
            with contextlib.suppress(CkptdError):  # it has ended, and so nothing is held
                self._connect_up()
        while self._needed(linger_s):
            time.sleep(min(_TICK_S, max(0.02, self._hold_until - time.monotonic())))

    def _needed(self, linger_s: float) -> bool:
        """Whether a worker may still come, or pulls a version."""
        now = time.monotonic()
        if self._leads:
            return now < self._hold_until or bool(self._busy or self._book.held)
        if self._up is not None and not self._up.lost:
            return True
        return now < self._active + linger_s or bool(self._busy)

    def may_hold(self) -> bool:
        """Whether a worker may begin to pull: else workers that try for ever would keep this."""
        return time.monotonic() < self._hold_until

    def _end(self) -> None:
        self._ended.set()
        for door in self._doors:
            door.close(_TICK_S)
        if self._unix:
            with contextlib.suppress(OSError):
                os.unlink(self._unix)
        if self._up is not None:
            self._up.close()
        self._channel.close()

    def _do(self, message: Any, fd: int | None) -> None:
        match message:
            case Opening():
                self._open(message)
            case SetLeader(entry):
                self._leader = entry
            case SetDirectory(layout, sizes, globs, entries):
                self._entries = entries
                if self._opening is not None:
                    self._about = PublishedAbout(
                        self._opening.epoch, self._opening.world, layout, sizes, globs
                    )
            case SetTensors(tensors, delta_bytes):
                self._deltas.budget_bytes = delta_bytes
                self._tensors = {t.name: t for t in tensors}
            case SlotMemory(number, nbytes) if fd is not None:
                self._put_slot(number, _Shared(Slot(number, nbytes, fd)))
            case AskSlot(number, step):
                choice = self._book.place(number, step)
                self._reply(SlotAnswer(number, *choice))
            case VersionSealed(number, slot):
                self._seal(number, self._slots[slot])
            case VersionWhole(number):
                self._reply(VersionKnown(number, self._tell(AskCommit(number))))
            case VersionDropped(number):
                self._tell(AskDrop(number))
            case ServerStop():
                pass

    def _reply(self, message: msgspec.Struct) -> None:
        """Answer the rank; what a rank that is dead has sent before is done all the same."""
        with contextlib.suppress(ProcessError), self._replying:
            self._channel.send(message)

    def _open(self, opening: Opening) -> None:
        self._opening = opening
        self._book = VersionTable(opening.slots, opening.lease_s)
        try:
            entry = self._listen(opening)
            if opening.to:
                self._begin_storing(opening, open_place(opening.to))
        except CkptdError as error:
            self._reply(ServerReady(None, error.to_dict()))
            return
        self._reply(ServerReady(entry))

    # --- a store --------------------------------------------------------------------------------

    def _begin_storing(self, opening: Opening, store: Store) -> None:
        if not store.capabilities.shared:  # by the servers of all ranks
            raise UsageError(
                "a publisher's store has to be seen by other processes", where=store.url
            )
        if self._leads:
            self._desk = desk = StoreDesk(
                store,
                opening.epoch,
                opening.world,
                self._book,
                lambda: self._about,
                *opening.anchors,
            )
            desk.claim(most_listen_s(opening) + GONE_S)
            threading.Thread(target=self._decide, args=(desk,), daemon=True).start()
        threading.Thread(target=self._store_all, args=(opening, store), daemon=True).start()

    def _decide(self, desk: StoreDesk) -> None:
        """Have versions stored, until the trainer is gone or another publisher has the place."""
        try:
            desk.run(
                lambda: math.isfinite(self._hold_until),
                lambda: time.monotonic() >= self._hold_until,
            )
        except Exception as error:  # noqa: BLE001 (the trainer learns of any)
            known = error if isinstance(error, CkptdError) else ProcessError(repr(error))
            _log.warning("nothing more is stored: %s", known.message)
            self._reply(PlaceLost(known.to_dict()))

    def _store_all(self, opening: Opening, store: Store) -> None:
        """Write the share of this rank in each version that the leader says."""
        step_back(LATER)
        number = 0
        while not self._ended.is_set():
            share: StoredShare | None = None
            try:
                order = self._ordered(number)
                if not order.number:
                    continue
                number = order.number
                try:
                    share = self._share(opening.rank, order, store)
                finally:  # whatever it is: the leader waits for this share
                    self._stored(opening.rank, number, share)
            except Exception as error:  # noqa: BLE001 (the next version may do)
                _log.warning("a version is not stored: %s", error)
                self._ended.wait(_TICK_S)

    def _ordered(self, than: int) -> StoreOrder:
        if self._desk is not None:
            return self._desk.next(than, _TICK_S, self)
        if self._leader is None:
            self._ended.wait(_TICK_S)
            return StoreOrder(0)
        if self._taker is None or self._taker.lost:
            proof = b"" if self._opening is None else self._opening.proof
            self._taker = ServerLink.to(self._leader, proof, wait_s=_GREETING_S, role="rank")
        return self._taker.ask(AskStore(than, _ORDER_S), StoreOrder, _ORDER_S + _GREETING_S)

    def _stored(self, rank: int, number: int, share: StoredShare | None) -> None:
        if self._desk is not None:
            self._desk.done(rank, number, share)
        elif self._taker is not None:
            self._taker.ask(AskStored(rank, number, share), HoldAnswer)

    def _share(self, rank: int, order: StoreOrder, store: Store) -> StoredShare:
        """Write this rank's objects of a version, which the leader holds."""
        number, base = order.number, order.base
        with self._digested:
            # Another rank's word that it is whole may be here before this rank's own share.
            self._digested.wait_for(lambda: max(self._versions, default=0) >= number, _GREETING_S)
            self._digested.wait_for(lambda: number not in self._pending)
            digests = self._digests.get(number)
            tensors = tuple(self._tensors.values())
        with self.reading(number) as slot, self._lent(base) as old:
            if digests is None:
                raise _not_there(f"version {number}")
            if self._writer is None:
                described = StoredRank(slot.nbytes, tensors)
                self._writer = ShareWriter(store, order.generation, rank, described)
            since = None if old is None or old.sealed != base else old
            share = self._writer.write(
                order, slot.data, digests, None if since is None else since.data
            )
            if since is not None and since.sealed != base:
                raise _not_there(f"version {base} was overwritten")
        return share

    def _listen(self, opening: Opening) -> ServerEntry:
        sock = self._bound(opening)
        address = Address(opening.bind, sock.getsockname()[1])
        self._serve_on(sock, opening)
        if opening.folder:
            path = f"{opening.folder}/pub-{secrets.token_hex(6)}.sock"
            unix, _ = UnixAddress(path).listen()
            self._unix = path
            self._serve_on(unix, opening)
        return ServerEntry(host_id(), str(address), self._unix, opening.epoch)

    def _bound(self, opening: Opening) -> socket.socket:
        """Return the socket for other hosts; wait for a server of a trainer before this one."""
        what = "a publisher"
        try:
            return listen_at(opening.bind, opening.port, what)
        except StoreError:
            end = time.monotonic() + most_listen_s(opening)
            while time.monotonic() < end and _is_ending(opening):
                time.sleep(_TICK_S)
            return listen_at(opening.bind, opening.port, what)

    def _serve_on(self, sock: socket.socket, opening: Opening) -> None:
        def about() -> dict[str, str | int | bool]:
            ending = math.isfinite(self._hold_until)
            return {"epoch": opening.epoch, "rank": opening.rank, "ending": ending}

        self._doors.append(
            Door(
                sock,
                lambda: opening.proof,
                PURPOSE,
                self._serve,
                name="a worker",
                clients=_MOST_CONNECTIONS,
                greeting_s=_GREETING_S,
                send_s=_SEND_S,
                most_body=MOST_BODY,
                about=about,
            )
        )

    def _put_slot(self, number: int, slot: _Shared) -> None:
        with self._lock:
            old = self._slots.get(number)
            self._slots[number] = slot
            self._versions = {n: s for n, s in self._versions.items() if s is not old}
            if old is not None:
                old.retire()

    def _seal(self, number: int, slot: _Shared) -> None:
        with self._lock:
            self._versions = {n: s for n, s in self._versions.items() if s is not slot}
            before = max((n for n in self._versions if n < number), default=0)
            if before:
                self._deltas.begin(before, number)
            self._versions[number] = slot
            kept = {n: b for n, b in self._blocks.items() if n in self._versions}
            self._blocks = kept | {number: BlockDigests(self._tensors.values())}
            self._pending.add(number)
            self._digested.notify_all()
        threading.Thread(target=self._digest, args=(number,), daemon=True).start()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Note that something is being answered: the server does not end meanwhile."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                self._active = time.monotonic()

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[Slot]:
        """Give the slot of a version while something reads it; check it, again, afterwards.

        Raises
        ------
        NotFoundError
            kind ``no-version``: it is not there, or not any more.
        """
        with self._lent(number) as slot:
            if slot is None or slot.sealed != number:
                raise _not_there(f"version {number}")
            yield slot
            if slot.sealed != number:  # no hold
                raise _not_there(f"version {number} was overwritten")

    @contextlib.contextmanager
    def _lent(self, number: int) -> Iterator[Slot | None]:
        """Give the slot that a version was in, if there is one, whatever is in it by now."""
        with self._lock:
            found = self._versions.get(number)
            if found is not None:
                found.readers += 1
        try:
            yield None if found is None else found.slot
        finally:
            if found is not None:
                with self._lock:
                    found.readers -= 1
                    found.close_if_unused()

    @contextlib.contextmanager
    def changes(self, since: int, number: int, slot: Slot) -> Iterator[VersionDeltas | None]:
        """Give what changed from one version to another one, which is in `slot`; None: unknown."""
        steps = self._deltas.between(since, number)
        with self._lent(steps[-1].base if steps else 0) as old:
            yield VersionDeltas(self._deltas, steps, slot, old) if steps else None

    def _digest(self, number: int) -> None:
        """Digest a version block by block, for workers that hold another one."""
        step_back(LATER)  # workers that hold a version wait for it
        whole: dict[str, list[bytes]] | None = None
        try:
            with contextlib.suppress(NotFoundError):
                with self.reading(number) as slot:
                    found = self._digested_beside(number, slot)
                whole = found  # nothing was written meanwhile: else these are of two versions
        except Exception as error:  # noqa: BLE001 (threads wait for it)
            _log.warning("version %d is not digested: %r", number, error)
        with self._digested:
            self._pending.discard(number)
            if whole is not None:
                self._digests[number] = whole
            while len(self._digests) > KEPT_VERSIONS:
                self._digests.popitem(last=False)
            self._digested.notify_all()

    def _digested_beside(self, number: int, slot: Slot) -> dict[str, list[bytes]]:
        """Digest all blocks, and find what changed in those that workers ask deltas of."""
        casts, before = self._deltas.wanted(number), self._deltas.before(number)
        with self._lock:
            known = self._digests.get(before, {})
        resting = True  # the block before is as it was: the older slot may not have to be read
        with self.changes(before, number, slot) as changes:

            def beside(name: str, block: int, data: U8) -> bytes:
                nonlocal resting
                same, made = False, b""
                if changes is None or changes.full or name not in casts:
                    return made
                if resting and name in known:
                    made = digest(data.data)
                    same = made == known[name][block]
                for cast in casts[name]:
                    delta, also = changes.found(self._tensors[name], cast, block, rests=same)
                    made = made or also
                    resting = delta == NOTHING
                return made

            return self.digests(number).complete(slot, self._tensors, beside)

    def digests(self, number: int) -> BlockDigests:
        """Return the digests of a version, as far as they are known."""
        with self._lock:
            return self._blocks.get(number) or BlockDigests(self._tensors.values())

    # --- versions -------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self._opening is not None and self._opening.rank == 0

    def _tell(self, question: AskCommit | AskDrop) -> bool:
        """Have the leader note something of a version; False: it does not answer."""
        if self._leads:
            self._note(question)
            return True
        for attempt in range(2):
            try:
                if (up := self._connect_up()) is not None:
                    return up.ask(question, HoldAnswer).good
            except CkptdError as error:
                self._up = None
                if attempt:
                    _log.warning("rank 0's server does not answer: %s", error.message)
        return False

    def _connect_up(self) -> ServerLink | None:
        """Return the connection to the leader."""
        if self._up is None and self._opening is not None and self._leader is not None:
            self._up = ServerLink.to(
                self._leader, self._opening.proof, wait_s=_GREETING_S, role="rank"
            )
        return self._up

    def _note(self, question: AskCommit | AskDrop) -> None:
        if isinstance(question, AskCommit):
            settled = self._book.commit(question.number)
        else:
            settled = self._book.drop(question.number)
        if settled:
            self._reply(VersionSettled(question.number, isinstance(question, AskCommit)))

    # --- workers --------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            _Session(self, connection).run()
        finally:
            self._book.lose(connection)
            self._sources.leave(connection)
            if self._desk is not None:
                self._desk.gone(connection)


class _Session:
    """One worker's questions."""

    def __init__(self, server: PublishServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._names: tuple[str, ...] = ()
        self._buffer = np.empty(0, np.uint8)
        self._wanted = self._asked = self._total = b""

    def run(self) -> None:
        """Answer until the worker leaves."""
        if not self._connection.local:
            step_back(LAST)  # it gathers and sends what others map
        while not self._server._ended.is_set():
            if not self._connection.readable(_TICK_S):
                continue
            question, _ = self._connection.receive(QUESTION, _GREETING_S)
            # One that only waits for a newer version does not keep the server of a dead trainer.
            waits = isinstance(question, AskNewest | AskStore)
            with contextlib.nullcontext() if waits else self._server.active():
                try:
                    self._connection.permit(question, PURPOSE)
                    self._answer(question)
                except CkptdError as error:
                    if self._connection.broken:
                        raise
                    self._connection.send(PublishRefusal(error.to_dict()))

    def _answer(self, question: Any) -> None:
        server, send = self._server, self._connection.send
        match question:
            case AskAbout():
                if server._about is None:
                    raise _not_there("nothing is published yet")
                send(server._about)
            case AskWhere(ranks):
                entries = server._entries
                if any(r >= len(entries) for r in ranks):
                    raise _not_there(f"a publisher of {len(entries)} ranks")
                send(ServerList(tuple(entries[r] for r in ranks)))
            case AskNewest(than, wait_s):
                self._newest(than, wait_s)
            case AskHold(number):
                held = server._book.renew(number, self._connection) or (
                    server.may_hold() and server._book.hold(number, self._connection)
                )
                send(HoldAnswer(held, server._book.lease_s))
            case AskRelease():
                server._book.release(self._connection)
                send(HoldAnswer(True))
            case AskCommit() | AskDrop():
                server._note(question)
                send(HoldAnswer(True))
            case AskStore(than, wait_s) if server._desk is not None:
                send(server._desk.next(than, wait_s, self._connection))
            case AskStored(rank, number, share) if server._desk is not None:
                server._desk.done(rank, number, share)
                send(HoldAnswer(True))
            case AskTensors(names):
                self._names = names
                send(TensorPlaces(tuple(server._tensors.get(n, _ABSENT) for n in names)))
            case AskMap(number):
                with server.reading(number) as slot:
                    self._connection.send_descriptor(Mapped(slot.nbytes), slot.fd)
            case AskChanged(since, number, wait_s):
                send(self._changed(since, number, wait_s))
            case AskRead():
                self._read(question)
            case AskSource(key, entry, failed):
                path = server._sources.path(key, entry, self._connection, failed)
                self._wanted, self._asked, self._total = key, asked_first(self._names), b""
                send(ServerList(*path))
            case AskProved(key, total):
                send(HoldAnswer(server._sources.proved(key, total)))

    def _newest(self, than: int, wait_s: float) -> None:
        """Wait for a newer version, and notice meanwhile that the worker is gone."""
        end = time.monotonic() + wait_s
        while True:
            left = end - time.monotonic()
            found = self._server._book.newer(than, max(0.0, min(left, _TICK_S)))
            if found is not None or left <= 0 or self._server._ended.is_set():
                number, step = found or (0, -1)
                self._connection.send(Newest(number, step, self._server._book.age_s(number)))
                return
            if self._connection.readable():
                raise self._connection.fail("the worker disconnected")

    def _changed(self, since: int, number: int, wait_s: float) -> ChangedBlocks:
        server = self._server
        with server._digested:
            server._digested.wait_for(lambda: number not in server._pending, wait_s)
            old, new = server._digests.get(since), server._digests.get(number)
        if old is None or new is None:
            return ChangedBlocks(False, BLOCK_BYTES, ())
        bits = []
        for name in self._names:
            differ = [x != y for x, y in zip(old.get(name, []), new.get(name, []), strict=True)]
            bits.append(np.packbits(np.array(differ, dtype=np.bool_)).tobytes())
        return ChangedBlocks(True, BLOCK_BYTES, tuple(bits))

    def _prove(self, question: AskRead, total: bytes) -> None:
        """Note the sum of an answer, and that of all once this is the last one."""
        self._total = folded(self._total, total)
        self._asked = folded(self._asked, msgspec.msgpack.encode(question))
        if self._asked == self._wanted:
            self._server._sources.prove(self._wanted, self._total)
            self._wanted = b""

    def _read(self, question: AskRead) -> None:
        """Send parts."""
        number, blocks = question.number, question.blocks
        known = [self._server._tensors.get(n, _ABSENT) for n in self._names]
        for block in blocks:
            if block.tensor < len(known) and not known[block.tensor].dtype:
                raise _not_there(self._names[block.tensor])
        read_bytes(known, blocks)
        server, since = self._server, max((b.since for b in blocks), default=0)
        with server._lent(number) as slot:
            if slot is None or slot.sealed != number:
                raise _not_there(f"version {number}")
            with server.changes(since, number, slot) as changes:
                digests = server.digests(number)
                found = outgoing(slot, known, blocks, digests, self._scratch, changes)
            parts, all_of_it, sizes = found
            if sizes:  # they are few bytes, and need no slot from here on
                parts = [memoryview(b"".join(parts))]
            answer = ReadBytes(all_of_it, sizes)
            total = sum_of(answer, parts) if self._wanted else b""
            if slot.sealed != number:  # no hold
                raise _not_there(f"version {number} was overwritten")
            if self._wanted:  # before it is sent: a worker that has all passes it on at once
                self._prove(question, total)
            # What is written to the slot from here on the digest shows.
            if not sizes:
                self._connection.send_parts(answer, parts)
        if sizes:
            self._connection.send_parts(answer, parts)

    def _scratch(self, nbytes: int) -> U8:
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


def _is_ending(opening: Opening) -> bool:
    """Whether the server of a trainer that is gone has the address still."""
    there = ServerEntry("", str(Address(opening.bind, opening.port)), "", "")
    try:
        link = ServerLink.to(there, opening.proof, wait_s=_GREETING_S, role="rank")
    except CkptdError:
        return False
    link.close()
    return link.ending


_ABSENT = PublishedTensor("", "", 0, 0)


def _not_there(what: str) -> CkptdError:
    return NotFoundError("version not available from the publisher", kind="no-version", where=what)


def main() -> None:
    """Serve the rank at the other end of the socket whose descriptor is the only argument."""
    report_crashes()
    many_files()
    sock = socket.socket(fileno=int(sys.argv[1]))
    PublishServer(SocketChannel(sock, ORDER)).run()


if __name__ == "__main__":
    main()
