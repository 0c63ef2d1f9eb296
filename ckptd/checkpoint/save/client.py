"""Trainer's side of the writing process: starts, sends, replaces a dead one; waits, deaths.

In it: how long a process may take to start and end; how often a save is handed over again; deaths
in a row.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ckptd import events
from ckptd.base.runtime.agentlink import AgentPlace, connect_agent
from ckptd.base.runtime.channel import Channel, SocketChannel, queue_pair
from ckptd.base.runtime.host import pid_space
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.base.runtime.ranks import Board
from ckptd.checkpoint.save import messages
from ckptd.checkpoint.save.arena import KEEPING, Slot, Slots
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.checkpoint.save.tiers import LINGER_S, ROOT, TierSpec
from ckptd.decoding import json_decoder
from ckptd.errors import CkptdError, ProcessError, SaveError
from ckptd.store import StoreSpec
from ckptd.store.base import Store

EARLY_BYTES = 16 << 20
"""A first save of so much gets its memory ahead, where its size is known."""
START_S = 60.0
"""For a worker or an agent to be ready, in seconds."""
_AGAIN_S = 0.1


class AgentSpec(msgspec.Struct, frozen=True):
    """The agent of this node, and what it is to keep.

    Attributes
    ----------
    place
        Where it is found, or started.
    tiers, agent_ttl_s, bind, key
        See `WriterHello`.
    """

    place: AgentPlace
    tiers: tuple[TierSpec, ...] = ()
    agent_ttl_s: float = LINGER_S
    bind: str = ""
    key: str = ""


def join_agent(
    agent: AgentSpec, hello: messages.WriterHello, wanted: Callable[[], bool]
) -> tuple[Channel, messages.Response | None]:
    """Return a connection to the node's agent, and its first message.

    An agent that was killed may still accept a connection while its memory is given back: so
    connecting is tried again, for `START_S` and while it is `wanted`.

    Raises
    ------
    ProcessError
        No agent answers.
    """
    hello = msgspec.structs.replace(
        hello, tiers=agent.tiers, agent_ttl_s=agent.agent_ttl_s, bind=agent.bind, key=agent.key
    )
    end = time.monotonic() + START_S
    found = "no answer"
    while wanted() and time.monotonic() < end:
        channel = None
        try:
            channel = SocketChannel(connect_agent(agent.place), messages.Response)
            channel.send(hello)
            item = channel.receive(max(0.1, end - time.monotonic()))
        except (CkptdError, EOFError, OSError, msgspec.MsgspecError) as error:
            if channel is not None:
                channel.close()
            found = str(error)
            time.sleep(_AGAIN_S)
            continue
        return channel, None if item is None else item[0]
    raise ProcessError("the agent does not answer", where=str(agent.place.socket), found=found)


_outcomes = json_decoder(dict[str, str | None])

_log = logging.getLogger("ckptd")
_BUSY_POLL_S = 0.01
_IDLE_POLL_S = 0.25
_MOST_TRIES = 3
"""So often is a save handed over; one whose every writing process dies is perhaps why they do."""
_MOST_DEATHS = 5
"""So many writing processes may die one after another that have ended nothing."""
_COUNTED = 256
"""Counters of shares that stay on the board after their saves: other ranks may read them late."""
_END_S = 5.0
"""For a worker to end that has closed its channel, in seconds."""
_LEAVE_S = 0.2
"""For this client's thread, which may wait for a store that is gone."""
GRACE_S = 30.0
"""The worker keeps deadlines and explains them; this is for one that sends nothing any more."""


class _Job(msgspec.Struct, dict=True):
    handle: SaveTracker
    outcome_key: str
    save: messages.SaveRequest
    plan: SavePlan
    slot: Slot
    deadline: float = msgspec.field(default=float("inf"))
    aborted: bool = False
    reason: CkptdError | None = None
    """Why it was given up; the worker, which is asked to, reports less."""
    freed: bool = False
    answered: bool = False
    """The worker has sent its last message on it, whatever phase the handle is in."""
    sealed: messages.Sealed | None = None
    given_up: bool = False
    """The trainer could not finish it."""
    counted: set[str] = msgspec.field(default_factory=set)
    """Near tiers on which this rank's share has been counted, once for all workers."""
    tries: int = 1
    """So many workers have had it."""

    @property
    def holds(self) -> bool:
        """Whether its slot must stay as it is.

        All ranks count a share as soon as it is on a near tier. The slot is kept until they know
        how the snapshot ended: overwritten earlier, the share would be missing from a snapshot that
        they take for complete.
        """
        return not self.freed or any(self.handle.tiers.get(t) == "pending" for t in KEEPING)


def post_failure(
    board: Board, outcome_key: str, error: CkptdError, near: Sequence[str] = ()
) -> None:
    """Post why this rank's part of a save will not come; rank 0's failure is the save's outcome.

    Parameters
    ----------
    near
        Near tiers on which the share will not be either.
    """
    if board.world == 1:
        return
    text = f"rank {board.rank} failed: {error.message}"
    for tier in near:
        board.set(f"{near_key(outcome_key, tier)}/failed", text.encode())
    if board.rank == 0:
        board.set(outcome_key, msgspec.json.encode(error.to_dict()))
    else:
        posted = error.to_dict() | {"class": SaveError.__name__, "message": text}
        board.set(f"{outcome_key}/failed", msgspec.json.encode(posted))


def _posted(raw: bytes) -> CkptdError:
    try:
        return CkptdError.from_dict(_outcomes.decode(raw))
    except msgspec.MsgspecError:
        return SaveError(raw.decode(errors="replace")[:500], kind="aborted")


class WriterClient(OfOneProcess):
    """Starts a `SaveWriter` and talks to it.

    Rank 0's worker commits. Its client publishes the outcome on the board; the other ranks'
    clients read it there, and post a failure of their own, so that no rank waits for one that
    gave up.

    Parameters
    ----------
    spec
        The store that the worker opens.
    board
        Used only by this client's monitor thread.
    store
        Given for stores that no other process can see: the worker is then a thread.
    slots
        Snapshots that may be under way at a time; None leaves it to the memory there is.
    agent
        Talk to the node's agent instead of a process of its own.
    """

    inert = frozenset({"close", "leave"})

    def __init__(
        self,
        spec: StoreSpec,
        board: Board,
        store: Store | None = None,
        slots: int | None = 1,
        agent: AgentSpec | None = None,
    ) -> None:
        self._board = board
        self._jobs: dict[int, _Job] = {}
        self._segments: dict[int, Slot] = {}
        """Slots that the worker has received, by number: its replacement gets them again."""
        self._peers_sent: dict[type, messages.Partner | messages.Neighbours] = {}
        self._deaths = 0
        self.life = 1
        """Rises by one with each worker that comes in the place of one that died."""
        self._slots = Slots(slots, self._announce, self._withdraw)
        self._counted: deque[str] = deque()
        self.dead: CkptdError | None = None
        """Why the worker is no more."""
        self._near_errors: dict[str, str] = {}
        self._closing = self._ended = False
        self._left = False
        self._plan = ""
        self.next_job = itertools.count(1).__next__
        """Returns a fresh job number."""
        self._last_message_at = time.monotonic()
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._agent = agent
        self._hello = messages.WriterHello(
            spec, board.rank, board.world, protocol=messages.PROTOCOL
        )
        self._answer: messages.WriterReady | None = None
        self._ready = threading.Event()
        self._connected = threading.Event()
        self._channel: Channel
        if agent is None:
            self._channel = self._start_thread(store) if store else self._start_process()
            self._connected.set()
            self._send(self._hello)
        self._monitor = threading.Thread(target=self._watch, name="ckptd-monitor", daemon=True)
        self._monitor.start()

    @property
    def pid(self) -> int:
        """Process id of the worker; an agent's is -1 until it has answered."""
        if self._agent is not None:
            return self._answer.pid if self._answer else -1
        return self._process.pid if self._process else os.getpid()

    def answer(self, timeout_s: float = START_S) -> messages.WriterReady:
        """Return what the worker sent when it was ready.

        Raises
        ------
        ProcessError
            It is dead, or did not answer within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not self._ready.wait(_BUSY_POLL_S) and self.dead is None:
            if time.monotonic() > end:
                break
        if self.dead is not None:
            raise self.dead
        if self._answer is None:
            raise ProcessError(
                "the writing process is not ready", wanted=f"within {timeout_s:.0f} s"
            )
        return self._answer

    def set_peers(self, message: messages.Partner | messages.Neighbours) -> None:
        """Send whose memory the peer tier is, or what nodes the agent is to name later."""
        self._send(message, note=lambda: self._peers_sent.update({type(message): message}))

    def _start_process(self) -> Channel:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ckptd.checkpoint.save.writer", str(theirs.fileno())]
        # A session of its own: a Ctrl-C or a launcher's signal to the trainer's group must not
        # end the writing of what the trainer handed over.
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        return SocketChannel(ours, messages.Response)

    def _start_thread(self, store: Store) -> Channel:
        from ckptd.checkpoint.save.writer import (  # which most programs have in another process
            SaveWriter,
        )

        ours, theirs = queue_pair()
        worker = SaveWriter(theirs, store)
        threading.Thread(target=worker.run, name="ckptd-worker", daemon=True).start()
        return ours

    def _send(
        self,
        message: messages.Request,
        fd: int | None = None,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        """Send from the trainer's thread or the monitor's: a channel takes one at a time.

        Parameters
        ----------
        note
            Records what is sent, for a worker that comes in the place of a dead one. What it sends
            itself goes to the same worker.

        Raises
        ------
        ProcessError
            The worker takes nothing, or is dead and no other will come.
        """
        if not self._connected.is_set():
            self.answer()
        with self._sending:
            try:
                note()
                self._channel.send(message, fd)
            except ProcessError as error:
                if self.dead is not None:
                    raise self.dead from error
                # One that only takes nothing is not dead: the monitor ends it (see `_check_jobs`).
                if isinstance(error.__cause__, TimeoutError):
                    raise
                # The monitor notices it now, and sends the next one what is recorded.
                self._channel.shut()

    # -- the trainer's thread --------------------------------------------------------------------

    def acquire(self, nbytes: int, timeout_s: float) -> Slot:
        """Wait until a slot is free and return it, at least `nbytes` large.

        Raises
        ------
        SaveError
            Earlier saves did not leave a slot within `timeout_s`, or the worker died.
        """
        return self._slots.acquire(nbytes, timeout_s)

    def prepare(self, nbytes: int) -> None:
        """Allocate memory for a first save of `nbytes` bytes before a save waits for it.

        A save of another size gets a slot of its own; `Slots.prepare` says what a lack of memory
        does.
        """
        if nbytes >= EARLY_BYTES and self._connected.is_set():
            with contextlib.suppress(CkptdError):
                self._slots.prepare(nbytes)

    @property
    def busy(self) -> bool:
        """Whether a save that began now would wait for a slot."""
        return self._slots.full

    def _announce(self, slot: Slot) -> None:
        in_thread = self._agent is None and self._process is None
        fd = os.dup(slot.fd) if in_thread else slot.fd
        segment = messages.NewSlot(slot.number, slot.nbytes)
        self._send(segment, fd, lambda: self._segments.update({slot.number: slot}))

    def _withdraw(self, slot: Slot) -> None:
        with self._sending:
            self._segments.pop(slot.number, None)

    def begin(
        self,
        save: messages.SaveRequest,
        plan: SavePlan,
        handle: SaveTracker,
        outcome_key: str,
        slot: Slot,
    ) -> None:
        """Hand a save over; the worker starts writing while the caller still copies."""
        slot.begin(save.job)
        self._slots.take(slot, save.job)
        save = msgspec.structs.replace(save, slot=slot.number)
        job = _Job(handle, outcome_key, save, plan, slot, _deadline(save))

        def note() -> None:
            self._jobs[save.job] = job
            self._set_plan(plan)

        try:
            self._send(save, note=note)
        except BaseException as error:
            if not isinstance(error, CkptdError):  # interrupted: the worker has it, or never will
                self._jobs.pop(save.job, None)
            raise

    def _set_plan(self, plan: SavePlan) -> None:
        if self._plan != plan.digest:
            self._channel.send(messages.SetPlan(plan))
            self._plan = plan.digest

    def seal(
        self,
        job: int,
        slot: Slot,
        replicas: tuple[tuple[str, str], ...] = (),
        blobs: tuple[messages.Blob, ...] = (),
    ) -> None:
        """Seal the slot and send that all of a job is copied; see `Sealed`."""
        slot.seal()
        sealed, mine = messages.Sealed(job, replicas, blobs), self._jobs[job]
        # The worker first: a program that finds the snapshot staged may be killed at that moment,
        # and a worker without a seal would throw it away.
        self._send(sealed, note=lambda: setattr(mine, "sealed", sealed))
        mine.handle.copied()

    def snapshot(self, step: int, generation: int, attempt: str) -> memoryview | None:
        """Return this rank's whole snapshot of an attempt, if a slot still holds it.

        It is what lies there, unchecked: compare it with the digests that were committed. The next
        save overwrites it.
        """
        wanted = (step, generation, attempt)
        for number, job in list(self._jobs.items()):
            if (job.save.step, job.save.generation, job.save.attempt) == wanted:
                whole = job.slot.fd >= 0 and job.slot.sealed == number
                return job.slot.data[: job.slot.staged] if whole else None
        return None

    def abandon(self, job: int, reason: str, cause: CkptdError | None = None) -> None:
        """The caller cannot finish staging: end the job everywhere.

        The slot stays taken until the worker has freed it: bytes of the next save must
        never be written under this one's name.
        """
        # First: the worker's answer, "aborted", must not overtake the reason.
        self._fail_all(job, cause or SaveError(reason, kind="aborted"))
        if (mine := self._jobs.get(job)) is not None:
            mine.given_up = True
        else:  # left before it was handed over: no answer frees its slot
            self._slots.release(job)
        with contextlib.suppress(CkptdError):  # a worker that is gone must not hide why we stop
            self._send(messages.AbortSave(job, reason))

    def close(self, timeout_s: float) -> None:
        """End the worker once it has finished the staged saves. Idempotent; never raises.

        A worker that has not ended after `timeout_s` is killed: what it did not commit is lost.
        """
        if self._ended:
            return
        self._closing = True
        end = time.monotonic() + timeout_s
        with contextlib.suppress(CkptdError):  # it may be gone already
            self._send(messages.Stop())
        # Also where the worker is dead: this process may end now, and what the other ranks would
        # wait for has to be posted first.
        self._monitor.join(timeout_s)
        if self._process is not None:
            try:
                self._process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._connected.is_set():
            self._channel.close()
        self._slots.close()
        self._ended = True

    def leave(self) -> None:
        """Leave the worker as a process that dies does. Idempotent; never raises.

        It finishes what is staged, as far as that can be without this rank. Handles of saves that
        are under way change no more.
        """
        if self._ended:
            return
        self._closing = self._left = True
        if self._connected.is_set():
            with contextlib.suppress(CkptdError):  # it may be gone already
                self._send(messages.Leave(time.monotonic()))
            self._channel.shut()
        self._monitor.join(_LEAVE_S)
        if self._process is not None:
            # A child that has ended must be waited for, and this one may take its time.
            threading.Thread(target=self._process.wait, name="ckptd-left", daemon=True).start()
        self._slots.close()
        self._ended = True

    # -- the monitor thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            if self._agent is not None and not self._join_agent(self._agent):
                return
            while (found := self._listen()) is not None and self._replace(found):
                pass
        except Exception as error:  # noqa: BLE001 - a bug must reach the handles, not hang them
            self._end_worker(f"this process no longer listens to it: {error!r}")

    def _join_agent(self, agent: AgentSpec) -> bool:
        """Connect to the node's agent and wait until it is ready."""
        try:
            self._channel, first = join_agent(agent, self._hello, lambda: not self._closing)
        except ProcessError as error:
            self._worker_gone(error.found or "", error)
            return False
        self._connected.set()
        if first is not None:
            self._handle(first)
        return self.dead is None

    def _listen(self) -> str | None:
        """Receive until the worker is not wanted any more; return how it died, if it did."""
        pause = _IDLE_POLL_S
        start = time.monotonic()
        # An agent goes on by itself after `Stop`; wait for the end of a writing process.
        while self._agent is None or not self._closing:
            try:
                item = self._channel.receive(pause)
            except (EOFError, msgspec.MsgspecError) as error:
                if not self._left:
                    return str(error)
                break
            if item is not None:
                self._handle(item[0])
            elif not self._ready.is_set() and time.monotonic() - start > START_S:
                self._end_worker(f"it did not start within {START_S:.0f} s")
                return None
            pause = self._check_jobs(pause if item is None else _BUSY_POLL_S)
        if self._left:
            self._channel.close()
        return None

    # -- a worker that died ------------------------------------------------------------------------

    def _replace(self, found: str) -> bool:
        """Have another worker in the place of one that died, and hand everything over to it.

        What was copied lies in the arena, which this process has as well: neither a save that is
        under way nor a snapshot in memory is lost with the process that was to keep it.
        """
        in_thread = self._agent is None and self._process is None
        self._deaths += 1
        if in_thread or self._closing or self.dead is not None or self._deaths > _MOST_DEATHS:
            self._worker_gone(found)
            return False
        try:
            code = _ended(self._process)
        except ProcessError as error:
            self._worker_gone(f"{found}; {error.message} ({error.where})")
            return False
        how = found if code is None else f"exit status {code}; {found}"
        _log.warning("the writing process died (%s): another one takes over", how)
        old = self._channel
        try:
            if self._agent is not None:
                channel, first = join_agent(self._agent, self._hello, lambda: not self._closing)
            else:
                channel, first = self._start_process(), None
        except (OSError, ProcessError) as error:
            self._worker_gone(f"{how}; no other one can be started: {error}")
            return False
        kept = self._slots.kept
        with self._sending:
            old.close()
            self._channel = channel
            try:
                self._hand_over(kept)
            except ProcessError as error:  # the monitor is about to notice that, too
                _log.warning("the next writing process died as well: %s", error)
        if first is not None:
            self._handle(first)
        self.life += 1
        for number, job in list(self._jobs.items()):
            if job.freed and not job.handle.done and job.tries > _MOST_TRIES:
                why = "the writing process died repeatedly during this save"
                self._fail_all(number, ProcessError(why, hint=self._hint()))
            self._release(number, job)
        return self.dead is None

    def _hand_over(self, kept: Mapping[str, int]) -> None:
        """Send a worker everything that the one before it knew, or still had to do."""
        send = self._channel.send
        if self._agent is None:  # an agent has received it already
            send(self._hello)
        for message in self._peers_sent.values():
            send(message)
        for slot in self._segments.values():
            send(messages.NewSlot(slot.number, slot.nbytes), slot.fd)
        self._plan = ""
        for number, job in list(self._jobs.items()):
            near = self._wanted_near(number, job, kept)
            root = job.handle.root and not job.handle.root_ended
            job.tries += not job.handle.done
            wanted = (near or root) and not job.given_up and job.tries <= _MOST_TRIES
            job.freed = job.answered = not wanted
            if not wanted:
                continue
            job.deadline = _deadline(job.save)
            self._set_plan(job.plan)
            # Refer to nothing: what was agreed upon for that died with the other one.
            more = {"near": near, "root": root, "refer": False, "again": True}
            send(msgspec.structs.replace(job.save, **more))
            if job.sealed is not None:
                send(job.sealed)
            if self._agent is not None:
                for tier, state in job.handle.tiers.items():
                    if state == "complete":
                        send(messages.Settled(tier, job.handle.step, job.handle.generation))
        if self._closing:
            send(messages.Stop())

    def _wanted_near(self, number: int, job: _Job, kept: Mapping[str, int]) -> tuple[str, ...]:
        """Return the near tiers that a share has not reached, or that lost it with the worker."""
        near = {t for t, state in job.handle.tiers.items() if state == "pending"}
        if number in kept.values() and job.slot.sealed == number:
            near.add(next(tier for tier in KEEPING if tier in job.save.near))
        return tuple(tier for tier in job.save.near if tier in near)

    def _handle(self, message: messages.Response) -> None:
        self._last_message_at = time.monotonic()
        if isinstance(message, messages.WriterReady):
            try:
                messages.check_protocol(message.protocol, "the process that writes")
                if message.error is not None:
                    raise CkptdError.from_dict(message.error)
            except CkptdError as error:
                self._worker_gone(error.found or error.message, error)
                return
            self._answer = message
            self._ready.set()
            return
        if isinstance(message, messages.EventMessage):
            events.relay(message.event)
            return
        job = self._jobs.get(message.job)
        if job is None:
            return
        # The last message on a job to the root is its commit, of which rank 0's worker alone knows.
        last = isinstance(message, messages.SaveCommitted if job.handle.root else messages.Freed)
        if job.handle.root and isinstance(message, messages.ShardStored) and message.tier == ROOT:
            last = message.error is not None or self._board.rank > 0
        job.answered = job.answered or last
        self._deaths = 0 if job.answered else self._deaths
        if isinstance(message, messages.Freed):
            job.freed = True
            self._release(message.job, job)
        elif isinstance(message, messages.ShardStored):
            failed = None if message.error is None else CkptdError.from_dict(message.error)
            if message.tier != ROOT and failed is None:
                self._count_share(message.job, job, message.tier)
            elif message.tier != ROOT and failed is not None:
                self._fail_near(message.job, job, message.tier, failed)
            elif failed is None:
                job.handle.advance("committing")
            else:
                self._fail(message.job, (failed.kind == "aborted" and job.reason) or failed)
        elif isinstance(message, messages.WriteProgress):
            job.handle.wrote(message.done)
        elif isinstance(message, messages.SaveCommitted):
            self._finish(message.job)
        elif isinstance(message, messages.Warned):
            _log.warning("after step %d: %s", job.handle.step, message.error.get("message"))

    def _check_jobs(self, pause: float) -> float:
        """Look on the board for jobs that wait for other ranks; return the next pause."""
        busy = False
        now = time.monotonic()
        for number, job in list(self._jobs.items()):
            if job.handle.done:
                continue
            busy = True
            if self._board.world > 1:
                if job.handle.root:
                    self._check_outcome(number, job)
                self._check_near(number, job)
            if now > job.deadline:
                self._fail_all(number, SaveError("the save did not finish in time"))
        late = any(now > j.deadline and not j.answered for j in list(self._jobs.values()))
        silent_s = now - self._last_message_at
        if late and self.dead is None and silent_s > GRACE_S:
            # It would keep its slot for ever, and every later save would fail for it.
            self._end_worker(f"it has sent nothing for {silent_s:.0f} s")
        # All ranks ask one board: the more there are, the less often each of them does.
        longest = _IDLE_POLL_S * max(1.0, self._board.world / 512)
        return min(longest, max(_BUSY_POLL_S, pause * 1.3)) if busy else _IDLE_POLL_S

    def _check_outcome(self, number: int, job: _Job) -> None:
        try:
            if self._board.rank == 0:
                raw = self._board.peek(job.outcome_key + "/failed")
                if raw is not None and not job.aborted:
                    job.aborted, job.reason = True, _posted(raw)
                    self._send(messages.AbortSave(number, job.reason.message))
            elif (raw := self._board.peek(job.outcome_key)) is not None:
                outcome = _outcomes.decode(raw)
                if outcome:
                    job.reason = error = CkptdError.from_dict(outcome)
                    self._send(messages.AbortSave(number, error.message))
                    self._fail(number, error)
                else:
                    self._finish(number)
        except CkptdError as error:
            if job.handle.progress.phase == "committing" or self._board.rank != 0:
                self._fail(number, error)

    # -- near tiers ------------------------------------------------------------------------------

    def _count_share(self, number: int, job: _Job, tier: str) -> None:
        """Count this rank's share, which is there, for all."""
        if self._board.world == 1:
            self._complete(number, job, tier)
            return
        if tier in job.counted:  # by a worker that died since
            return
        job.counted.add(tier)
        try:
            self._board.add(near_key(job.outcome_key, tier))
        except CkptdError as error:
            self._fail_near(number, job, tier, error)

    def _fail_near(self, number: int, job: _Job, tier: str, error: CkptdError) -> None:
        """Settle a near tier of this rank, and post that its share will not be there."""
        if job.handle.settle(tier, error):
            why = f"{error.message} ({error.where})" if error.where else error.message
            level = logging.DEBUG if self._near_errors.get(tier) == error.kind else logging.WARNING
            # Logged once, until the tier works again or fails otherwise.
            self._near_errors[tier] = error.kind
            _log.log(level, "step %d is not kept on the tier %s: %s", job.handle.step, tier, why)
            if self._board.world > 1:
                text = f"rank {self._board.rank}: {error.message}"
                with contextlib.suppress(CkptdError):  # then they wait for their deadline
                    self._board.set(near_key(job.outcome_key, tier) + "/failed", text.encode())
            self._notify_agent(job, tier, complete=False)
        self._release(number, job)

    def _check_near(self, number: int, job: _Job) -> None:
        for tier in [t for t, state in job.handle.tiers.items() if state == "pending"]:
            key = near_key(job.outcome_key, tier)
            try:
                if self._board.count(key) == self._board.world:
                    self._complete(number, job, tier)
                elif (raw := self._board.peek(key + "/failed")) is not None:
                    error = SaveError(raw.decode(), kind="aborted", where=tier)
                    job.handle.settle(tier, error)
                    self._notify_agent(job, tier, complete=False)
                    self._release(number, job)
            except CkptdError as error:  # the job's store is gone with its ranks
                job.handle.settle(tier, error)
                self._release(number, job)

    def _complete(self, number: int, job: _Job, tier: str) -> None:
        """Every rank's share is on a tier: what was there before may go, and this must stay."""
        handle = job.handle
        if handle.tiers.get(tier) != "pending":  # a worker that came later reports it again
            return
        self._slots.keep(tier, number)
        self._near_errors.pop(tier, None)
        # The agent first: a trainer that waits for the handle may close at once, and an agent that
        # does not know of this snapshot then keeps none that the root cannot take.
        self._notify_agent(job, tier, complete=True)
        handle.settle(tier)
        self._release(number, job)
        self._forget_old()

    def _notify_agent(self, job: _Job, tier: str, *, complete: bool) -> None:
        if self._agent is not None and self._connected.is_set():
            with contextlib.suppress(CkptdError):  # a dead agent has nothing to clear
                self._send(messages.Settled(tier, job.handle.step, job.handle.generation, complete))

    # -- ends ------------------------------------------------------------------------------------

    def _finish(self, number: int) -> None:
        job = self._jobs[number]
        self._publish(job)
        job.handle.advance("durable", job.handle.progress.total_bytes)
        self._notify_agent(job, ROOT, complete=True)
        self._forget_old()

    def _fail(self, number: int, error: CkptdError) -> None:
        job = self._jobs.get(number)
        if job is not None and job.handle.root and not job.handle.root_ended:
            self._publish(job, error)
            job.handle.fail(error)

    def _fail_all(self, number: int, error: CkptdError) -> None:
        """Fail a save on every tier that it has not reached."""
        job = self._jobs.get(number)
        if job is not None:
            for tier in job.handle.near:
                self._fail_near(number, job, tier, error)
        self._fail(number, error)

    def _publish(self, job: _Job, error: CkptdError | None = None) -> None:
        """Post the end of a save to the root: a commit by rank 0, a failure by every rank."""
        if self._board.world == 1 or (self._board.rank != 0 and error is None):
            return
        try:
            if error is None:
                self._board.set(job.outcome_key, msgspec.json.encode({}))
            else:
                post_failure(self._board, job.outcome_key, error)
        except CkptdError as lost:
            _log.warning("the other ranks were not notified: %s", lost.message)

    def _release(self, number: int, job: _Job) -> None:
        if not job.holds:
            self._slots.release(number)

    def _forget_old(self) -> None:
        kept = set(self._slots.kept.values())
        jobs = list(self._jobs.items())
        done = [n for n, j in jobs if j.handle.done and j.freed and n not in kept]
        for number in done[:-8]:
            job = self._jobs.pop(number)
            if self._board.world > 1 and self._board.rank == 0:
                self._counted += [near_key(job.outcome_key, tier) for tier in job.handle.near]
        while len(self._counted) > _COUNTED:
            with contextlib.suppress(CkptdError):  # the job's store is gone with its ranks
                self._board.delete(self._counted.popleft())

    def _end_worker(self, found: str) -> None:
        if self._process is not None:
            self._process.kill()
        elif self._agent and self._answer and self._answer.pid_space == pid_space():
            # Never by a number that another container's agent gave: here it is another process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._answer.pid, signal.SIGKILL)
        self._worker_gone(
            found, ProcessError("the writing process does not answer", where=f"process {self.pid}")
        )

    def _hint(self) -> str:
        where = f"in {self._agent.place.log}" if self._agent else "on stderr"
        return f"see its messages {where}; the next save starts another"

    def _worker_gone(self, found: str, cause: CkptdError | None = None) -> None:
        code = self._process.poll() if self._process else None
        found = f"exit status {code}; {found}" if code is not None else found
        cause = cause or ProcessError(
            "the writing process died", where=f"process {self.pid}", hint=self._hint()
        )
        error = ProcessError.from_dict({**cause.to_dict(), "class": "ProcessError", "found": found})
        self.dead = self.dead or error
        self._slots.fail(error)
        for number in list(self._jobs):
            self._fail_all(number, error)


def _deadline(save: messages.SaveRequest) -> float:
    return time.monotonic() + 2 * save.timeout_s + GRACE_S


def _ended(process: subprocess.Popen[bytes] | None) -> int | None:
    """Return the exit code of a worker that has closed its channel; it must not write any more.

    Raises
    ------
    ProcessError
        It does not end, killed or not: it is held by the kernel, and may still write.
    """
    if process is None:
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_END_S)
    process.kill()
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        raise ProcessError(
            "the writing process does not end",
            where=f"process {process.pid}",
            found="killed, but still in the kernel: does the store hang?",
        ) from None


def near_key(outcome_key: str, tier: str) -> str:
    """Return where the ranks count the shares of a save that are on a near tier."""
    return f"{outcome_key}/near/{tier}"
