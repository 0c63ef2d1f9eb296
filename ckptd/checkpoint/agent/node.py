"""`NodeAgent`: takes trainers' connections, knows when it may end, status, signals.

In it: how long an agent without a trainer waits; what it awaits at TERM, INT and ``agent stop``;
memory that is kept for a job that died.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress

import msgspec

from ckptd import events
from ckptd.base.runtime.agentlink import AgentPlace, locked, peer_of
from ckptd.base.runtime.channel import SocketChannel
from ckptd.checkpoint.format.names import DATA, PARTS
from ckptd.checkpoint.save.commit import decode_plan, plan_key
from ckptd.checkpoint.save.messages import (
    AgentContents,
    AskEnd,
    AskStatus,
    EventMessage,
    KeptSnapshot,
    Request,
    WriterHello,
)
from ckptd.checkpoint.save.neartiers import NodeTiers
from ckptd.checkpoint.save.writer import SaveWriter
from ckptd.errors import CkptdError, DeadlineError, ProcessError
from ckptd.events.event import AnyEvent

_log = logging.getLogger("ckptd")
_POLL_S = 0.2
_FIRST_S = 60.0
"""An agent without any connection ends after so many seconds."""


class NodeAgent:
    """Serves the trainers of one job on one node.

    It ends when no trainer is connected, all sealed snapshots are on their tiers, and no trainer
    may come back for those in memory: the next life of a job that died is awaited for as long as
    its trainers had asked for.

    Parameters
    ----------
    listener
        The listening socket of `place`.
    place
        Where it is found; the socket is removed at the end.
    stay
        Serve until a signal, also with nothing to do.

    Attributes
    ----------
    ending
        Whether it was asked to end.
    """

    def __init__(self, listener: socket.socket, place: AgentPlace, *, stay: bool = False) -> None:
        self._listener = listener
        self._place = place
        self._stay = stay
        self._nears: dict[str, NodeTiers] = {}
        """By root: jobs of several, with one ``CKPTD_JOB``, count their steps each by itself."""
        self._lock = threading.Lock()
        self._sessions: dict[threading.Thread, socket.socket] = {}
        self._workers: dict[threading.Thread, SaveWriter] = {}
        self._until = time.monotonic() + _FIRST_S
        self._awaited: dict[int, tuple[float, float]] = {}
        """When the trainers of ranks came and were found dead whose next life is not over."""
        self._goodbyes: dict[int, float] = {}
        """When the last trainer of each rank came that has said goodbye."""
        self.ending = False
        self._at_once = False

    def end(self, *, now: bool = False) -> None:
        """Wait for no new trainer: end as soon as those here have ended. For a signal handler.

        Parameters
        ----------
        now
            Leave the trainers; what they have handed over is brought where it should be.
        """
        # No events: the lock of one is not for a handler that another signal may interrupt.
        self._at_once = self._at_once or now
        self.ending = True

    def run(self) -> None:
        """Serve; returns at the end."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._may_end():
                if selector.select(_POLL_S):
                    self._accept()
        self._leave()
        for near in self._nears.values():
            near.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(True)
        pid, uid = peer_of(sock)
        if uid not in (-1, os.geteuid()):
            _log.warning("rejected a process of user %d", uid)
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(sock, pid), name=f"ckptd-of-{pid}")
        with self._lock:
            self._sessions[thread] = sock
        thread.start()

    def _serve(self, sock: socket.socket, pid: int) -> None:
        channel = SocketChannel(sock, Request)
        try:
            first, _ = channel.receive(_FIRST_S) or (None, None)
            if isinstance(first, WriterHello):
                self._attend(channel, first, pid)
            elif isinstance(first, AskEnd | AskStatus):
                self._answer(channel, first)
        except EOFError:  # it only looked whether an agent listens
            _log.debug("process %d connected and sent nothing", pid)
        except msgspec.MsgspecError as error:
            _log.warning("cannot understand process %d, perhaps of another version: %s", pid, error)
        except CkptdError as error:
            _log.error("process %d cannot be served: %s", pid, error)
        finally:
            channel.close()
            with self._lock:
                self._sessions.pop(threading.current_thread(), None)

    def _attend(self, channel: SocketChannel, hello: WriterHello, pid: int) -> None:
        """Be the worker of a trainer."""
        worker = SaveWriter(channel, near=self._near_of(hello))
        with self._lock:
            self._workers[threading.current_thread()] = worker

        def relay(event: AnyEvent) -> None:
            if event.rank == worker.rank:
                worker.send(EventMessage(event))

        began = time.monotonic()
        subscription = events.subscribe(relay)
        try:
            worker.run(hello)
        except Exception:  # noqa: BLE001 - a bug with one trainer must not take the others' snapshots along
            _log.exception("the session of process %d ended badly", pid)
        finally:
            subscription.close()
            self._left(began, worker)

    def _near_of(self, hello: WriterHello) -> NodeTiers:
        with self._lock:
            near = self._nears.get(hello.store.url)
            if near is None:
                near = NodeTiers()
                count = len(self._nears)
                near.serve_here(str(self._place.socket.with_suffix(f".{count or ''}mem")))
                self._nears[hello.store.url] = near
            return near

    def _left(self, began: float, worker: SaveWriter) -> None:
        """Decide how long to wait for the next life, now that a trainer of this one is gone.

        One that died is awaited. The job is over when the life that came back has said goodbye; a
        trainer that could not even begin says nothing of that. What a dead one left may be worked
        on for longer than the next life lasts, which is then over all the same.
        """
        now, rank = time.monotonic(), worker.rank
        with self._lock:
            self._sessions.pop(threading.current_thread(), None)
            self._workers.pop(threading.current_thread(), None)
            last = not self._sessions
            if worker.stopped:
                self._goodbyes[rank] = max(began, self._goodbyes.get(rank, 0.0))
            elif worker.agent_ttl_s:
                self._awaited[rank] = (began, worker.died_at)
            self._awaited = {r: d for r, d in self._awaited.items() if not self._is_back(r, *d)}
            if not any(near.memory.folders() for near in self._nears.values()):
                self._until = now if last else self._until
            elif worker.agent_ttl_s and rank in self._awaited:
                self._until = max(self._until, now + worker.agent_ttl_s)
            elif last and self._goodbyes and not self._awaited:
                self._until = now

    def _is_back(self, rank: int, began: float, died_at: float) -> bool:
        """Tell whether a life after that of a dead trainer has said goodbye.

        An agent that was stopped meanwhile may hear of the death after the next life began: then
        the rank tells.
        """
        return any(b > died_at or (r == rank and b > began) for r, b in self._goodbyes.items())

    def _may_end(self) -> bool:
        with self._lock:
            busy = bool(self._sessions)
            over = self.ending or (not self._stay and time.monotonic() > self._until)
        if (busy and not self._at_once) or not over:
            return False
        try:
            with locked(self._place):
                return self._close_door()
        except DeadlineError as error:
            _log.warning("not yet: %s", error)  # the process with the lock may still come
            return False

    def _close_door(self) -> bool:
        # A process that looked for an agent before we had the lock is connected by now.
        self._accept()
        with self._lock:
            if self._sessions and not self._at_once:
                return False
        self._listener.close()
        self._place.socket.unlink(missing_ok=True)
        for near in self._nears.values():
            near.hide()
        return True

    def _leave(self) -> None:
        """Disconnect the remaining trainers, and finish the saves that they handed over."""
        with self._lock:
            left = dict(self._sessions)
        for thread, sock in left.items():
            with suppress(OSError):  # it went by itself
                sock.shutdown(socket.SHUT_RD)
            thread.join()

    # -- visitors ----------------------------------------------------------------------------------

    def _answer(self, channel: SocketChannel, asked: AskStatus | AskEnd) -> None:
        if isinstance(asked, AskEnd):
            self.end(now=asked.now)
        with suppress(ProcessError):  # the process that asked has gone
            channel.send(self._status())

    def _status(self) -> AgentContents:
        with self._lock:
            ranks = tuple(sorted(worker.rank for worker in self._workers.values()))
            left = max(0.0, self._until - time.monotonic())
            nears = list(self._nears.values())
        awaited = bool(ranks) or (self._stay and not self.ending)
        return AgentContents(
            job=self._place.job,
            node=self._place.node,
            socket=str(self._place.socket),
            pid=os.getpid(),
            ranks=ranks,
            snapshots=tuple(s for near in nears for s in _kept_snapshots(near)),
            folder=next((near.folder for near in nears if near.folder), None),
            ends_in_s=None if awaited else 0.0 if self.ending else left,
            ending=self.ending,
        )


def end_on_signals(agent: NodeAgent) -> None:
    """Make TERM and INT end an agent: the first awaits its trainers, a second one does not."""

    def end(*_: object) -> None:
        agent.end(now=agent.ending)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _kept_snapshots(near: NodeTiers) -> tuple[KeptSnapshot, ...]:
    """Return the snapshots of which shares lie in memory, oldest first."""
    own = {(held.save.folder, held.plan.rank) for held in near.memory.shares()}
    sizes: dict[str, int] = {}
    parts: dict[str, list[int]] = {}
    for info in near.memory.list(DATA):
        name, _, rest = info.key.removeprefix(DATA).partition("/")
        folder = f"{DATA}{name}/"
        sizes[folder] = sizes.get(folder, 0) + info.size
        rank = rest.removeprefix(f"{PARTS}r")
        if rest.startswith(f"{PARTS}r") and rank.isdecimal():
            parts.setdefault(folder, []).append(int(rank))
    found = []
    for folder, (commit, attempt) in near.memory.folders().items():
        here, world = parts.get(folder, []), _world(near, folder)
        found.append(
            KeptSnapshot(
                step=commit.step,
                generation=commit.generation,
                attempt=attempt,
                ranks=tuple(r for r in here if (folder, r) in own),
                guests=tuple(r for r in here if (folder, r) not in own),
                world=world,
                bytes=sizes.get(folder, 0),
                whole=0 < world == len(here),
                complete=near.complete_on(commit),
            )
        )
    return tuple(sorted(found, key=lambda s: (s.generation, s.step, s.attempt)))


def _world(near: NodeTiers, folder: str) -> int:
    """Return how many ranks saved an attempt; 0 while its plan is not here, or is none."""
    key = plan_key(folder)
    try:
        return decode_plan(near.memory.get(key), key).world
    except CkptdError:
        return 0
