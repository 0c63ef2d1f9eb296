"""The trainer's side of the writing process: start it, feed it, hear from it, notice its death."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec

from ckptd import events
from ckptd.engine.arena import MOST_SLOTS, Slot, slots_for
from ckptd.engine.board import Board
from ckptd.engine.channel import Channel, SocketChannel, queue_pair
from ckptd.engine.handle import SaveHandle
from ckptd.engine.job import (
    Abort,
    Blob,
    Committed,
    Failed,
    Freed,
    Happened,
    Hello,
    Progress,
    Ready,
    Request,
    Response,
    Save,
    Sealed,
    Segment,
    SetPlan,
    Stop,
    Warned,
    Written,
)
from ckptd.engine.memory import available_bytes
from ckptd.engine.structure import SavePlan
from ckptd.engine.worker import Worker
from ckptd.errors import CkptdError, SaveError, WorkerError
from ckptd.store import StoreSpec
from ckptd.store.base import Store

__all__ = ["WriterClient"]

_log = logging.getLogger("ckptd")
_BUSY_POLL_S = 0.01
_IDLE_POLL_S = 0.25
START_S = 60.0
GRACE_S = 30.0
"""The worker keeps deadlines and explains them; this is for one that no longer answers."""


@dataclass
class _Job:
    handle: SaveHandle
    outcome_key: str
    deadline: float = field(default=float("inf"))
    aborted: bool = False
    answered: bool = False
    """The worker has said its last word on it, whatever the handle says."""


class WriterClient:
    """Starts a `Worker` and talks to it.

    Rank 0's worker commits. Its client publishes the outcome on the board; the other ranks'
    clients read it there, and post a failure of their own, so that nobody waits for a rank that
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
    """

    def __init__(
        self,
        spec: StoreSpec,
        board: Board,
        store: Store | None = None,
        slots: int | None = 1,
    ) -> None:
        self._board = board
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._slots = slots
        self._taken: dict[int, int] = {}
        """The job that each slot of the arena is taken by."""
        self._dead: WorkerError | None = None
        self._closing = False
        self._plan = ""
        self._counter = 0
        self._heard = time.monotonic()
        self._sending = threading.Lock()
        self._arena: dict[int, Slot] = {}
        self._most_slots = 1
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = self._start_thread(store) if store else self._start_process()
        self._send(Hello(spec, board.rank, board.world))
        self._ready = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="ckptd-monitor", daemon=True)
        self._monitor.start()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid if self._process else os.getpid()

    @property
    def dead(self) -> WorkerError | None:
        """Why the worker is no more, or None."""
        return self._dead

    def _start_process(self) -> Channel:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ckptd.engine.worker", str(theirs.fileno())]
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
        return SocketChannel(ours, Response)

    def _start_thread(self, store: Store) -> Channel:
        ours, theirs = queue_pair()
        worker = Worker(theirs, store)
        threading.Thread(target=worker.run, name="ckptd-worker", daemon=True).start()
        return ours

    def _send(self, message: Request, fd: int | None = None) -> None:
        """Send from the trainer's thread or the monitor's: a channel takes one at a time."""
        with self._sending:
            self._channel.send(message, fd)

    # -- the trainer's thread --------------------------------------------------------------------

    def acquire(self, nbytes: int, timeout_s: float) -> Slot:
        """Wait until a slot is free and return it, at least `nbytes` large.

        Raises
        ------
        SaveError
            Earlier saves did not leave a slot within `timeout_s`, or the worker died.
        """
        with self._free:
            free = self._free.wait_for(lambda: not self._is_full() or self._dead, timeout_s)
            if self._dead is not None:
                raise self._dead
            if not free:
                raise SaveError(
                    "earlier saves still occupy the arena",
                    kind="draining",
                    wanted=f"a free slot within {timeout_s:.0f} s",
                    found=f"{len(self._taken)} saves under way",
                    hint="save less often, or give the store more bandwidth",
                )
            idle = [s for s in self._arena.values() if s.number not in self._taken]
            # Never one that is taken: numbers have gaps where a larger slot could not be had.
            fresh = (n for n in range(MOST_SLOTS + 1) if n not in self._arena)
            number = max(idle, key=lambda s: s.nbytes).number if idle else next(fresh)
        slot = self._arena.get(number)
        if slot is not None and slot.nbytes >= nbytes:
            return slot
        try:
            return self._make_slot(number, nbytes)
        except SaveError:
            if not self._taken or slot is not None:
                raise
        _log.info("no memory for another slot: saves wait for the %d that there are", number)
        self._most_slots = self._slots = len(self._arena)
        return self.acquire(nbytes, timeout_s)

    def _is_full(self) -> bool:
        return bool(self._arena) and len(self._taken) == max(len(self._arena), self._most_slots)

    @property
    def busy(self) -> bool:
        """Whether a save that began now would wait for a slot."""
        with self._lock:
            return self._is_full()

    def _make_slot(self, number: int, nbytes: int) -> Slot:
        old = self._arena.pop(number, None)
        if old is not None:  # first, so that both need not fit
            old.close()
        slot = self._arena[number] = Slot(number, nbytes)
        self._most_slots = slots_for(nbytes, self._slots, available_bytes() + nbytes)
        fd = os.dup(slot.fd) if self._process is None else slot.fd
        self._send(Segment(number, nbytes), fd)
        return slot

    def begin(
        self, save: Save, plan: SavePlan, handle: SaveHandle, outcome_key: str, slot: Slot
    ) -> None:
        """Hand a save over; the worker starts writing while the caller still copies."""
        if self._plan != plan.digest:
            self._send(SetPlan(plan))
            self._plan = plan.digest
        slot.begin(save.job)
        with self._lock:
            self._taken[slot.number] = save.job
            deadline = time.monotonic() + 2 * save.timeout_s + GRACE_S
            self._jobs[save.job] = _Job(handle, outcome_key, deadline)
        self._send(msgspec.structs.replace(save, slot=slot.number))

    def seal(
        self,
        job: int,
        slot: Slot,
        replicas: tuple[tuple[str, str], ...] = (),
        blobs: tuple[Blob, ...] = (),
    ) -> None:
        """Say that all of a job is copied; see `Sealed`."""
        slot.seal()
        # The worker first: who was told that the snapshot is staged may be killed at that moment,
        # and a worker that heard of no seal would throw it away.
        self._send(Sealed(job, replicas, blobs))
        self._jobs[job].handle._sealed()

    def next_job(self) -> int:
        """Return a fresh job number."""
        self._counter += 1
        return self._counter

    def abandon(self, job: int, reason: str, cause: CkptdError | None = None) -> None:
        """The caller cannot finish staging: end the job everywhere.

        The slot stays taken until the worker has let go of it: bytes of the next save must
        never be written under this one's name.
        """
        with contextlib.suppress(CkptdError):  # a worker that is gone must not hide why we stop
            self._send(Abort(job, reason))
        self._fail(job, cause or SaveError(reason, kind="aborted"))

    def close(self, timeout_s: float) -> None:
        """Let the worker finish what is staged, and end it. Idempotent; never raises.

        A worker that has not ended after `timeout_s` is killed: what it did not commit is lost.
        """
        if self._closing:
            return
        self._closing = True
        end = time.monotonic() + timeout_s
        with contextlib.suppress(CkptdError):  # it may be gone already
            self._send(Stop())
        self._monitor.join(timeout_s)
        if self._process is not None:
            try:
                self._process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._channel.close()
        for held in self._arena.values():
            held.close()
        self._arena.clear()

    # -- the monitor thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001 - a bug must reach the handles, not hang them
            self._end_worker(f"this process no longer listens to it: {error!r}")

    def _listen(self) -> None:
        pause = _IDLE_POLL_S
        start = time.monotonic()
        while True:
            try:
                item = self._channel.receive(pause)
            except (EOFError, msgspec.MsgspecError) as error:
                self._worker_gone(str(error))
                return
            if item is not None:
                self._hear(item[0])
            elif not self._ready.is_set() and time.monotonic() - start > START_S:
                self._end_worker(f"it did not start within {START_S:.0f} s")
                return
            pause = self._look_around(pause if item is None else _BUSY_POLL_S)

    def _hear(self, message: Response) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Ready):
            self._ready.set()
            return
        if isinstance(message, Happened):
            events.relay(message.event)
            return
        job = self._jobs.get(message.job)
        if job is not None:
            # Only rank 0's worker has more to say than that the bytes are written.
            last = Written if self._board.rank else Committed
            job.answered = job.answered or isinstance(message, Failed | Committed | last)
        if isinstance(message, Failed):
            error = CkptdError.from_dict(message.error)
            if message.job < 0:
                self._worker_gone(error.message, error)
            else:
                self._fail(message.job, error)
        elif isinstance(message, Freed):
            self._release(message.job)
        elif job is None:
            return
        elif isinstance(message, Progress):
            job.handle._progress(message.done)
        elif isinstance(message, Written):
            job.handle._advance("committing")
        elif isinstance(message, Committed):
            self._finish(message.job)
        elif isinstance(message, Warned):
            _log.warning("after step %d: %s", job.handle.step, message.error.get("message"))

    def _look_around(self, pause: float) -> float:
        """Ask the board about jobs that wait for other ranks; return the next pause."""
        busy = False
        now = time.monotonic()
        for number, job in list(self._jobs.items()):
            if job.handle.done:
                continue
            busy = True
            if self._board.world > 1:
                self._ask_board(number, job)
            if now > job.deadline:
                error = SaveError("the save did not finish in time", kind="overdue")
                self._fail(number, error)
        if self._hangs(now):
            # It would keep its slot for ever, and every later save would fail for it.
            self._end_worker(f"it has said nothing for {now - self._heard:.0f} s")
        return min(_IDLE_POLL_S, max(_BUSY_POLL_S, pause * 1.3)) if busy else _IDLE_POLL_S

    def _hangs(self, now: float) -> bool:
        """Tell whether the worker owes an answer past every deadline, and shows no life."""
        late = any(now > j.deadline and not j.answered for j in list(self._jobs.values()))
        return late and self._dead is None and now - self._heard > GRACE_S

    def _ask_board(self, number: int, job: _Job) -> None:
        try:
            if self._board.rank == 0:
                raw = self._board.peek(job.outcome_key + "/failed")
                if raw is not None and not job.aborted:
                    job.aborted = True
                    self._send(Abort(number, raw.decode()))
            elif (raw := self._board.peek(job.outcome_key)) is not None:
                outcome = msgspec.json.decode(raw, type=dict[str, str | None])
                if outcome:
                    error = CkptdError.from_dict(outcome)
                    self._send(Abort(number, error.message))
                    self._fail(number, error)
                else:
                    self._finish(number)
        except CkptdError as error:
            if job.handle.progress.phase == "committing" or self._board.rank != 0:
                self._fail(number, error)

    def _finish(self, number: int) -> None:
        job = self._jobs[number]
        self._tell(job, {})
        job.handle._advance("durable", job.handle.progress.total_bytes)
        self._forget_old()

    def _fail(self, number: int, error: CkptdError) -> None:
        job = self._jobs.get(number)
        if job is not None and not job.handle.done:
            self._tell(job, error.to_dict())
            job.handle._fail(error)

    def _tell(self, job: _Job, outcome: dict[str, str | None]) -> None:
        if self._board.world == 1 or (self._board.rank != 0 and not outcome):
            return
        try:
            if self._board.rank == 0:
                self._board.set(job.outcome_key, msgspec.json.encode(outcome))
            else:
                where = f" ({outcome['where']})" if outcome.get("where") else ""
                text = f"rank {self._board.rank} failed: {outcome.get('message')}{where}"
                self._board.set(job.outcome_key + "/failed", text.encode())
        except CkptdError as error:
            _log.warning("the other ranks were not told: %s", error.message)

    def _release(self, number: int) -> None:
        with self._free:
            for slot in [s for s, job in self._taken.items() if job == number]:
                del self._taken[slot]
            self._free.notify_all()

    def _forget_old(self) -> None:
        done = [n for n, j in list(self._jobs.items()) if j.handle.done]
        for number in done[:-8]:
            del self._jobs[number]

    def _end_worker(self, found: str) -> None:
        if self._process is not None:
            self._process.kill()
        self._worker_gone(
            found, WorkerError("the writing process does not answer", where=f"process {self.pid}")
        )

    def _worker_gone(self, found: str, cause: CkptdError | None = None) -> None:
        code = self._process.poll() if self._process else None
        error = WorkerError(
            cause.message if cause else "the writing process died",
            kind=cause.kind if cause else None,
            where=cause.where if cause else f"process {self.pid}",
            found=f"exit status {code}; {found}" if code is not None else found,
            hint=cause.hint
            if cause
            else "see its messages on stderr; the next save starts another",
        )
        with self._free:
            self._dead = self._dead or error
            self._free.notify_all()
        for number in list(self._jobs):
            self._fail(number, error)
