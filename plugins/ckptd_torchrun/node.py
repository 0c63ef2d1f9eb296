"""A node whose workers are torchrun's: what its agent waits for, and what it reports.

Two threads meet here. The agent's own comes to `join` for each generation, leaves it to start
workers, and looks at `changed` while they run; only between the two can workers come into being.
The other one, of this module, sees to it at once that a fence holds and that the lease is kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptd.elastic.launchers import (
    AskProof,
    Begin,
    Ended,
    FenceNow,
    HandedProof,
    Hosting,
    Left,
    NodeState,
    NodeUp,
    SaidEvent,
    Saved,
    SaveNow,
    Shutdown,
    StoreAt,
    Tell,
    Timed,
    ToNode,
)
from ckptd.errors import CkptdError, NotFoundError
from ckptd_torchrun.reports import Reports
from ckptd_torchrun.workers import UNKNOWN_CODE, Workers

__all__ = ["JobOver", "Joined", "Link", "TorchrunNode"]

_LOG = logging.getLogger(__name__)
_MIND_S = 0.1
_GRACE_S = 1.0
"""For which frozen workers wait for the agent to look: it then does not count their death."""
_KILL_S = 5.0
_WAIT_S = 0.5


class Link(Protocol):
    """A node's link to the controller, as the node needs it."""

    @property
    def lease_until(self) -> float:
        """Until when workers may step: a moment of `time.monotonic`."""

    @property
    def silent_s(self) -> float:
        """Seconds since the controller last answered."""

    def tell(self, event: SaidEvent | Hosting | Timed) -> None:
        """Send it, also if there is no connection now."""


@dataclass(frozen=True)
class Joined:
    """A node's part of a generation, and where the store is."""

    begin: Begin
    host: str
    port: int


class JobOver(Exception):
    """The job has ended, or goes on without this node.

    Attributes
    ----------
    kind, text, code
        See `ckptd.elastic.messages.Shutdown`.
    """

    def __init__(self, bye: Shutdown) -> None:
        super().__init__(bye.text)
        self.kind, self.text, self.code = bye.kind, bye.text, bye.code


class TorchrunNode:
    """One node, its agent and its workers.

    Parameters
    ----------
    name, host
        See `ckptd.elastic.messages.NodeUp`.
    socket, hand
        Where workers connect to their launcher; see `ckptd.elastic.workerend.LauncherEnd`.

    Attributes
    ----------
    workers, reports
        See `Workers` and `Reports`.
    """

    def __init__(
        self,
        name: str,
        host: str,
        socket: Path,
        hand: Callable[[AskProof], HandedProof] | None = None,
    ) -> None:
        self.name, self.host = name, host
        self._link: Link | None = None
        self.workers = Workers(self.ended)
        self.reports = Reports(name, socket, self._tell, hand)
        self._news = threading.Condition()
        self._state = NodeState(name, self._tell)
        """Used with the lock of `_news`."""
        self._inside = True
        """The agent's thread is here: nothing can be started, and nothing runs."""
        self._complete = False
        """All workers of the joined generation have been started."""
        self._joined = 0
        """The generation that the agent believes to run."""
        self._fence_at = -math.inf
        self._lapsed = False
        self._store: StoreAt | None = None
        self._bye: Shutdown | None = None
        self._save: SaveNow | None = None
        self._closed = False
        self._minder = threading.Thread(target=self._mind, name="ckptd-node", daemon=True)

    def start(self, link: Link) -> None:
        """Begin to mind workers and lease."""
        self._link = link
        self._minder.start()

    @property
    def code(self) -> int | None:
        """How the workers of the last generation ended; None while they run."""
        ended = self._state.ended
        return ended.code if ended is not None else None

    @property
    def job_over(self) -> bool:
        """Whether the controller has ended the job, or this node's part in it."""
        return self._bye is not None

    @property
    def node_rank(self) -> int:
        """In the newest generation; a large one outside of it."""
        return self._state.rank

    # --- the controller -------------------------------------------------------------------------

    def up(self) -> NodeUp:
        """Return what the controller gets with every beat."""
        with self._news:
            return self._state.up(1, self.host)

    def take(self, order: ToNode) -> None:
        """Take an order of the controller; called by the link's thread."""
        with self._news:
            match order:
                case FenceNow():
                    before = self._state.fence
                    self._state.order_fence(order.generation)
                    if self._state.fence > before:
                        self._fence_at = time.monotonic()
                case Begin():
                    self._state.order_begin(order)
                case StoreAt():
                    self._store = order
                case SaveNow():
                    self._save = order
                case Tell():
                    _LOG.warning("%s\n  next:   %s", order.text, order.command)
                case Shutdown():
                    self._bye, self._fence_at = order, time.monotonic()
            if self._inside:
                self._say_fenced()
            self._news.notify_all()

    # --- the agent ------------------------------------------------------------------------------

    def join(
        self,
        host_store: Callable[[int], tuple[str, int]],
        connect: Callable[[str, int], None],
        within_s: float,
    ) -> Joined:
        """Wait until this node takes part in a generation, and return its part.

        Parameters
        ----------
        host_store
            Opens the store of a generation in this process; returns its address.
        connect
            Connects to it.
        within_s
            For how long no controller may answer.

        Raises
        ------
        JobOver
            There is nothing to do any more.
        NotFoundError
            None answers for `within_s`.
        """
        self._come_in()
        while True:
            begin = self._next_begin(within_s)
            address = self._store_of(begin, host_store, within_s)
            if address is None:
                continue
            try:
                connect(*address)
            except CkptdError as error:
                _LOG.warning("%s", error)
                self._tell(Ended(node=self.name, generation=begin.generation, code=1))
                continue
            if self._go_out(begin):
                return Joined(begin, *address)

    def changed(self) -> bool:
        """Return whether the agent has to come to `join`; its workers are dead then."""
        if not self._complete:
            self._all_started()
        if not self._is_over():
            return False
        self._kill()
        return True

    def over(self) -> bool:
        """Return whether the generation that the agent believes to run is over."""
        with self._news:
            return self._is_over()

    def succeeded(self) -> None:
        """All workers of this node have ended successfully."""
        with self._news:
            if not self._is_over():
                self._tell_ended(0)

    def leave(self, within_s: float) -> None:
        """Say goodbye; if the workers have ended successfully, wait for the job's end before."""
        dead = self.workers.kill(_KILL_S)
        end = time.monotonic() + within_s
        with self._news:
            if self._joined and not self._is_over():
                self._tell_ended(1)
            while self._waits_for_end() and time.monotonic() < end:
                self._news.wait(_WAIT_S)
            if self._bye is None and dead:
                self._tell(Left(node=self.name))
            self._closed = True
            self._news.notify_all()
        if self._minder.is_alive():
            self._minder.join()
        self.workers.close()
        self.reports.close()

    def _waits_for_end(self) -> bool:
        return self.code == 0 and self._bye is None and not self._is_over()

    # --- coming and going -----------------------------------------------------------------------

    def _come_in(self) -> None:
        """Note that the agent is here, once its workers are gone for good."""
        while not self.workers.kill(_KILL_S):
            _LOG.warning("workers %s do not end after SIGKILL", sorted(self.workers.look()))
        with self._news:
            if self._joined and not self._is_over():
                self._tell_ended(1)
            self._inside, self._joined, self._state.running, self._lapsed = True, 0, 0, False
            self._say_fenced()

    def _next_begin(self, within_s: float) -> Begin:
        since = time.monotonic()
        with self._news:
            while True:
                if self._bye is not None:
                    raise JobOver(self._bye)
                begin = self._state.waiting
                if begin is not None:
                    self._state.start(begin)
                    return begin
                self._check_contact(since, within_s)
                self._news.wait(_WAIT_S)

    def _check_contact(self, since: float, within_s: float) -> None:
        silent_s = self._link.silent_s if self._link is not None else math.inf
        if min(time.monotonic() - since, silent_s) > within_s:
            raise NotFoundError(
                "no controller answers",
                wanted=f"within {within_s:.0f} s",
                hint="is --rdzv-endpoint the machine on which an agent or `ckptd controller` runs?",
            )

    def _store_of(
        self, begin: Begin, host_store: Callable[[int], tuple[str, int]], within_s: float
    ) -> tuple[str, int] | None:
        """Return where the store of a generation is; None when the generation is over."""
        if begin.hosts_store:
            host, port = host_store(begin.generation)
            self._tell(Hosting(generation=begin.generation, host=host, port=port))
            return host, port
        since = time.monotonic()
        with self._news:
            while True:
                if self._state.fence > begin.generation or self._bye is not None:
                    return None
                at = self._store
                if at is not None and at.generation == begin.generation:
                    return at.host, at.port
                self._check_contact(since, within_s)
                self._news.wait(_WAIT_S)

    def _go_out(self, begin: Begin) -> bool:
        """Admit the agent to a generation; False where that is over already."""
        with self._news:
            if self._state.fence > begin.generation or self._bye is not None:
                return False
            self._joined, self._inside, self._complete = begin.generation, False, False
            self.reports.begin(begin, self._state.begun_at)
            self.workers.expect()
            return True

    def _all_started(self) -> None:
        started = self.workers.complete()
        with self._news:
            self._complete = True
        self.reports.spawned(max(started, 1))
        self._perhaps_done()

    # --- workers --------------------------------------------------------------------------------

    def ended(self, code: int) -> None:
        """A worker has ended; called by a thread of `Workers`."""
        if code == 0:
            self._perhaps_done()
            return
        with self._news:
            if code == UNKNOWN_CODE or self._inside or self._is_over():
                return
            self._tell_ended(code, program=True)
        # The agent will end the others, but with a patience of 30 s.
        self.workers.kill(0.0)

    def _perhaps_done(self) -> None:
        if not self._complete or self.workers.look() or self.workers.failed:
            return
        with self._news:
            if not self._inside and not self._is_over():
                self._tell_ended(0)

    def _tell_ended(self, code: int, *, program: bool = False) -> None:
        """Report how the workers of the joined generation have ended, unless that was done."""
        if self._state.ended is None:
            self._state.tell_ended(
                Ended(
                    node=self.name,
                    generation=self._joined,
                    code=code,
                    program=program,
                    stepped=self.reports.stepped,
                )
            )

    def _is_over(self) -> bool:
        stopped = self._bye is not None and self._bye.kind != "done"
        return self._lapsed or stopped or self._state.fence > self._joined

    def _kill(self) -> None:
        if self.workers.kill(_KILL_S):
            with self._news:
                self._say_fenced()

    def _say_fenced(self) -> None:
        """No worker of a generation before the fence runs here, nor can one be started."""
        state = self._state
        if self._lapsed:
            state.running = 0
        state.keep_fence(max(state.fence, state.started) if self._lapsed else state.fence)

    def _tell(self, event: SaidEvent | Hosting | Timed) -> None:
        if self._link is not None:
            self._link.tell(event)

    # --- fence and lease ------------------------------------------------------------------------

    def _mind(self) -> None:
        while not self._closed:
            with self._news:
                self._news.wait(_MIND_S)
                self._keep_lease()
                outside = not self._inside and self._is_over()
                save, self._save = self._save, None
            if save is not None and not self.reports.save_soon(save.generation):
                # No worker to wait for: the script saves when it does.
                self._tell(Saved(generation=save.generation, step=0))
            if outside:
                self._enforce()

    def _keep_lease(self) -> None:
        until = self._link.lease_until if self._link is not None else 0.0
        if not self._inside and not self._lapsed and 0.0 < until <= time.monotonic():
            _LOG.warning("the lease has expired: no controller answered")
            self._lapsed, self._fence_at = True, time.monotonic()

    def _enforce(self) -> None:
        """See to it that the workers of a generation that is over do nothing any more."""
        patient = time.monotonic() - self._fence_at < _GRACE_S
        if not self._complete:
            # The agent may be about to start more. And a process that is stopped before its
            # program is loaded holds up the thread that starts it, for ever.
            if not patient:
                self.workers.kill(0.0)
            return
        self.workers.freeze()
        if not patient or not self.workers.look():
            self._kill()
