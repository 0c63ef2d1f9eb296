"""Workers pass on what they pulled to workers of the same layout (a tree), so a trainer sends once.

In it: when a worker that is late or stuck is passed over; most connections.

Workers of one layout that hold one version ask the trainer the same questions. So what is passed on
are answers, as they came: to whom asks the same, nothing is gathered, cast or compared again. The
server of each trainer's rank keeps a list of the workers that ask the same (`Sources`) and names to
each of them earlier ones, of its own host first. What those give is believed when the sum of it is
one that the server has sent itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, takewhile

import msgspec

from ckptd.base.net.address import Address, UnixAddress, listen_at
from ckptd.base.net.connection import Connection
from ckptd.base.net.door import Door
from ckptd.base.net.handed import Proof
from ckptd.base.runtime.agentlink import run_folder
from ckptd.base.runtime.host import host_id
from ckptd.base.runtime.spare import SPARE
from ckptd.errors import CkptdError, NotFoundError
from ckptd.publish.link import Arrived, ReadRequest, ServerLink, damaged
from ckptd.publish.messages import (
    MOST_BODY,
    MOST_FAILED,
    PASSED_QUESTION,
    PASSING,
    AskPart,
    AskPassed,
    AskProved,
    AskRead,
    AskSource,
    HoldAnswer,
    Passed,
    PublishRefusal,
    ReadBytes,
    ServerEntry,
    ServerList,
)

_MOST_CONNECTIONS = 256
_MOST_PROVED = 4096
_PLACES = 8
"""Workers that one worker sends to at a time; of the same answers to one of another host after the
other, so that the first of them, which has the most behind it, passes them on the earliest."""
_GREETING_S = 10.0
_CONNECT_S = 3.0
_TICK_S = 1.0
_LATE_S = 15.0
"""For an answer of a worker, or for one that takes no more: then it is gone round."""
_STUCK_S = 20.0
"""A worker that does not get on for so long is gone round, by those far from the trainer later."""

_log = logging.getLogger("ckptd")


def folded(before: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the sum of what has a sum already, and of more; no two contents have the same."""
    found = hashlib.sha256(before)
    for part in parts:
        found.update(part)
    return found.digest()


def asked_first(names: Sequence[str]) -> bytes:
    """Return the key of no question yet, about some tensors; `folded` with each question."""
    return folded(msgspec.msgpack.encode(tuple(names)))


def sum_of(answer: ReadBytes, parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the sum of an answer."""
    return folded(msgspec.msgpack.encode(answer), *parts)


class Sources:
    """The workers that ask a server the same, in the order in which they came. Thread-safe."""

    def __init__(self) -> None:
        self._asking: dict[bytes, dict[str, list[tuple[Hashable, ServerEntry]]]] = {}
        self._of: dict[Hashable, list[tuple[bytes, str]]] = {}
        self._proved: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def path(
        self, key: bytes, entry: ServerEntry, asker: Hashable, failed: Sequence[str] = ()
    ) -> tuple[tuple[ServerEntry, ...], int]:
        """Return earlier workers, each of which takes of those behind it; empty: of the server.

        With the place of the asker among those that take of the first one: lower ones have more
        behind them. Hosts are a binomial tree, since a host that has everything passes it on to one
        after the other; workers within a host are one, too. Those at addresses that `failed` are
        left out. A worker that asks again keeps its place: nobody waits for one that waits for it.
        """
        with self._lock:
            held = self._of.setdefault(asker, [])
            if (key, entry.host) not in held:
                if len(held) > 1:
                    self._leave(asker, *held.pop(0))
                held.append((key, entry.host))
                hosts = self._asking.setdefault(key, {})
                hosts.setdefault(entry.host, []).append((asker, entry))
            firsts: list[ServerEntry] = []
            for host, found in self._asking[key].items():
                before = takewhile(lambda one: one[0] != asker, found)
                good = (one for _, one in before if one.address not in failed)
                if host == entry.host:
                    break
                firsts += islice(good, 1)
            mates = list(good)
            path = [mates[at] for at in _line(len(mates))]
            path += [firsts[at] for at in _line(len(firsts))]
            return tuple(path), len(mates) or len(firsts)

    def leave(self, asker: Hashable) -> None:
        """Name a worker no more: its connection is gone."""
        with self._lock:
            for key, host in self._of.pop(asker, ()):
                self._leave(asker, key, host)

    def _leave(self, asker: Hashable, key: bytes, host: str) -> None:
        hosts = self._asking.get(key, {})
        mates = hosts.get(host, [])
        mates[:] = [one for one in mates if one[0] != asker]
        if not mates:
            hosts.pop(host, None)
        if not hosts:
            self._asking.pop(key, None)

    def prove(self, key: bytes, total: bytes) -> None:
        """Note the sum of answers that were given to some questions."""
        with self._lock:
            self._proved[key, total] = None
            if len(self._proved) > _MOST_PROVED:
                self._proved.popitem(last=False)

    def proved(self, key: bytes, total: bytes) -> bool:
        """Whether answers with that sum were given."""
        with self._lock:
            return (key, total) in self._proved


def _line(at: int) -> Iterator[int]:
    """Yield what a place of a binomial tree takes of: its parent, the parent of that, ..."""
    while at:
        at ^= 1 << at.bit_length() - 1
        yield at


@dataclass(eq=False)
class _Share:
    """Answers that one server gave to some questions.

    Attributes
    ----------
    whole
        Whether they are all there, and right; None while they come.
    users
        Workers that have asked for them and are connected.
    waiting
        Of workers that wait for their turn: whether they are on this host, and their places.
    busy
        Whether workers of this host, or of others, have their turn: one of each may.
    """

    whole: bool | None = None
    sums: list[bytes] = field(default_factory=list)
    answers: list[tuple[ReadBytes, memoryview]] = field(default_factory=list)
    progress: int = 0
    users: int = 0
    waiting: list[tuple[bool, int]] = field(default_factory=list)
    busy: set[bool] = field(default_factory=set)


@dataclass(eq=False)
class _Pulled:
    """The shares that one update brought, by their names, and the memory that they are in."""

    shares: dict[bytes, _Share] = field(default_factory=dict)
    memory: tuple[mmap.mmap, int] | None = None


class Passing:
    """Passes on what a worker pulls, and takes of other workers what they have.

    Parameters
    ----------
    proof
        Under the authority of all workers.
    host
        The address at which others reach this one.

    Attributes
    ----------
    entry
        Where it listens.
    """

    def __init__(self, proof: Proof, host: str) -> None:
        self._proof = proof
        self._change = threading.Condition()
        self._pulled = [_Pulled()]
        self._free = _PLACES
        self._ended = False
        tcp = listen_at(host, 0, "a worker")
        address = Address(host, tcp.getsockname()[1])
        unix, path = UnixAddress(f"{run_folder()}/sub-{secrets.token_hex(6)}.sock").listen()
        self.entry = ServerEntry(host_id(), str(address), str(path), "")
        self._doors = [
            Door(
                sock,
                lambda: proof,
                PASSING,
                self._serve,
                name="a worker",
                clients=_MOST_CONNECTIONS,
                greeting_s=_GREETING_S,
                send_s=_LATE_S,
                most_body=MOST_BODY,
            )
            for sock in (tcp, unix)
        ]

    # --- what is kept ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an update: what the one before brought stays only while workers want it."""
        with self._change:
            self._pulled.append(_Pulled())
            for old in self._pulled[:-1]:
                wanted = any(s.users for s in old.shares.values())
                if wanted and old is self._pulled[-2]:
                    continue
                self._pulled.remove(old)
                for share in old.shares.values():
                    share.whole = False
                if old.memory is not None and not wanted:
                    SPARE.give_back(*old.memory)
            self._change.notify_all()

    def keep(self, memory: tuple[mmap.mmap, int] | None) -> None:
        """Keep the memory of this update until the next ones."""
        self._pulled[-1].memory = memory

    def close(self) -> None:
        """Pass on nothing more. Idempotent."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        for door in self._doors:
            door.close(_TICK_S)
        with contextlib.suppress(OSError):
            os.unlink(self.entry.socket)

    # --- taking ---------------------------------------------------------------------------------

    def arrivals(
        self,
        link: ServerLink,
        number: int,
        asked: Iterable[ReadRequest],
        beat: Callable[[], object],
    ) -> Generator[Arrived]:
        """Yield each buffer once it is filled, as `ServerLink.arrivals`; of workers, if possible.

        Parameters
        ----------
        beat
            Called while others are waited for; what it raises ends that.
        """
        requests = list(asked)
        key = asked_first([p.name for p in link.places])
        for request in requests:
            key = folded(key, msgspec.msgpack.encode(AskRead(number, request.blocks)))
        # Of another publisher the same questions have other answers.
        name = folded(key, f"{link.entry.epoch} {link.entry.address}".encode())
        with self._change:
            share = self._pulled[-1].shares[name] = _Share()
        proved: tuple[bytes, ...] = ()
        try:
            failed: tuple[str, ...] = ()
            while requests and len(failed) < MOST_FAILED:
                said = link.ask(AskSource(key, self.entry, failed), ServerList)
                if not (path := said.entries):
                    break
                failed += (path[0].address,)
                try:
                    with contextlib.closing(self._open(path[0], link)) as other:
                        wanted = AskPassed(name, _TICK_S, said.place)
                        sums = self._offered(other, link, wanted, share, len(path), beat)
                        if not sums:
                            continue
                        total = reduce(folded, sums, b"")
                        good = link.ask(AskProved(key, total), HoldAnswer).good
                        if not good or len(sums) != len(requests):
                            raise damaged(path[0].address)
                        proved = sums
                        with contextlib.closing(self._taken(other, requests, share, sums)) as came:
                            for found in came:
                                self._note(share, found, sums[len(share.sums)])
                                yield found
                        break
                except CkptdError as error:
                    beat()
                    if link.lost:
                        raise
                    _log.warning("a worker passes on nothing: %s", error)
            with contextlib.closing(link.arrivals(number, requests[len(share.sums) :])) as came:
                for found in came:
                    self._note(share, found)
                    yield found
            if not proved or tuple(share.sums) == proved:
                self._settle(share, whole=share.whole is None)
        finally:
            if share.whole is None:
                self._settle(share, whole=False)

    def _open(self, entry: ServerEntry, link: ServerLink) -> ServerLink:
        other = ServerLink.to(
            entry, self._proof, wait_s=_LATE_S, connect_s=_CONNECT_S, purpose=PASSING
        )
        other.places = link.places
        return other

    def _offered(
        self,
        other: ServerLink,
        link: ServerLink,
        wanted: AskPassed,
        share: _Share,
        far: int,
        beat: Callable[[], object],
    ) -> tuple[bytes, ...]:
        """Wait for the turn to take answers of a worker; none where it does not have them.

        Nor where the server is gone, which could not say whether they are right.
        """
        end, last = time.monotonic() + _STUCK_S * far, -1
        while not link.lost:
            beat()
            found = other.ask(wanted, Passed, _TICK_S + _LATE_S)
            if found.sums or not found.there:
                return found.sums
            if found.progress != last:
                last, end = found.progress, time.monotonic() + _STUCK_S * far
                share.progress += 1
            elif time.monotonic() > end:
                break
        return ()

    def _taken(
        self,
        other: ServerLink,
        requests: Sequence[ReadRequest],
        share: _Share,
        sums: Sequence[bytes],
    ) -> Generator[Arrived]:
        first = len(share.sums)
        asks = ((AskPart(at), requests[at]) for at in range(first, len(requests)))
        with contextlib.closing(other.answers(asks)) as answers:
            for wanted, found in zip(sums[first:], answers, strict=True):
                if sum_of(found.answer, [found.sent]) != wanted:
                    raise damaged(other.entry.address)
                yield found._replace(passed=True)

    def _note(self, share: _Share, found: Arrived, known: bytes = b"") -> None:
        """Add an answer to what is passed on once all are there."""
        if not found.good and not found.answer.sizes:
            share.whole = False
        share.sums.append(known or sum_of(found.answer, [found.sent]))
        share.answers.append((found.answer, found.sent))
        share.progress += 1

    def _settle(self, share: _Share, *, whole: bool) -> None:
        with self._change:
            share.whole = whole
            self._change.notify_all()

    # --- giving ---------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        taker = _Taker(self, connection)
        try:
            taker.run()
        finally:
            taker.leave()


class _Taker:
    """One worker that takes of this one, and its turn."""

    def __init__(self, passing: Passing, connection: Connection) -> None:
        self._passing = passing
        self._connection = connection
        self._name = b""
        self._share: _Share | None = None
        self._waits: tuple[bool, int] | None = None
        self._turn = False

    def run(self) -> None:
        """Answer until the worker leaves."""
        heard = time.monotonic()
        while not self._passing._ended:
            if not self._connection.readable(_TICK_S):
                self._leave_line()
                if time.monotonic() > heard + _LATE_S:
                    self._end_turn()
                continue
            heard = time.monotonic()
            question, _ = self._connection.receive(PASSED_QUESTION, _GREETING_S)
            try:
                self._connection.permit(question, PASSING)
                if isinstance(question, AskPassed):
                    self._connection.send(self._offered(question))
                else:
                    self._give(question.at)
            except CkptdError as error:
                if self._connection.broken:
                    raise
                self._connection.send(PublishRefusal(error.to_dict()))

    def leave(self) -> None:
        """Want nothing more."""
        self._end_turn()
        self._leave_line()
        if self._share is not None:
            with self._passing._change:
                self._share.users -= 1
        self._share = None

    def _leave_line(self) -> None:
        """Give up the place among those that wait; between two questions it is kept for a while."""
        if self._waits is not None and self._share is not None:
            with self._passing._change:
                self._share.waiting.remove(self._waits)
                self._waits = None
                self._passing._change.notify_all()

    def _end_turn(self) -> None:
        if self._turn and self._share is not None:
            with self._passing._change:
                self._turn = False
                self._share.busy.discard(self._connection.local)
                self._passing._free += 1
                self._passing._change.notify_all()

    def _offered(self, asked: AskPassed) -> Passed:
        passing, name, here = self._passing, asked.name, self._connection.local
        self._end_turn()
        if name != self._name:
            self.leave()
        with passing._change:
            if self._share is None:
                shares = [p.shares[name] for p in passing._pulled if name in p.shares]
                if not shares:
                    return Passed(False)
                self._name, self._share = name, shares[-1]
                self._share.users += 1
            share, mine = self._share, (here, asked.place)
            if self._waits != mine:
                self._leave_line()
                share.waiting.append(mine)
                self._waits = mine

            def free() -> bool:
                first = mine == min(one for one in share.waiting if one[0] == here)
                return bool(share.whole and first and passing._free) and here not in share.busy

            passing._change.wait_for(
                lambda: passing._ended or share.whole is False or free(), asked.wait_s
            )
            self._turn = free()
            if not self._turn:
                return Passed(share.whole is not False, share.progress)
            self._leave_line()
            share.busy.add(here)
            passing._free -= 1
            return Passed(True, share.progress, tuple(share.sums))

    def _give(self, at: int) -> None:
        share = self._share
        if share is None or not self._turn or at >= len(share.answers):
            raise NotFoundError("nothing like that is passed on", kind="no-version")
        answer, data = share.answers[at]
        self._connection.send_parts(answer, [data])
        share.progress += 1
        if at == len(share.answers) - 1:
            self._end_turn()
