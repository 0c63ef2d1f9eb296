"""`NodeLauncher`: fences, starts and ends workers of one node as the controller orders; lease.

In it: heartbeat interval, time to end at a signal (grace), when it gives the controller up, silence
after which it looks for another; what is reported of workers that ended.

All state is of one thread. Others, which receive from the controller and the workers, put each
message into its inbox.
"""

from __future__ import annotations

import math
import os
import queue
import selectors
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ckptd.base.net.handed import AskProof, HandedProof
from ckptd.elastic import messages
from ckptd.elastic.exitreport import FOLDER, ExitReport, last_words_of
from ckptd.elastic.launchers.memory import MemoryWatch
from ckptd.elastic.launchers.nodestate import NodeState
from ckptd.elastic.launchers.output import Output, error_of
from ckptd.elastic.launchers.progress import NodeProgress
from ckptd.elastic.launchers.slots import NodeSlots, is_device_error
from ckptd.elastic.launchers.workerpool import Program, WorkerPool
from ckptd.elastic.launchers.workers import Worker, is_stopped
from ckptd.elastic.lease import LeaseFile
from ckptd.elastic.link import NodeLink
from ckptd.elastic.workerend import LauncherEnd, WorkerEnd

_TURN_S = 0.1
_SILENT_S = 3.0
_FIRST_SILENT_S = 5.0
"""While none ever answered: this launcher, or another one, may be about to start it."""
_ENDING_S = 0.2
"""For so long after a worker failed others may be about to end successfully: it is waited for
them, unless another one fails."""
_LOOK_S = 1.0
"""Between two looks at the memory of workers."""
_DEAD_S = 5.0
_MOST_TEXT = 1000
_FORGET_S = 2.0


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a node's launcher.

    Attributes
    ----------
    job, node
        Names.
    slots
        Ranks that it can run.
    address
        Of this machine, for the job store; empty: the one by which the controller is reached.
    lease_s, beat_s
        See `NodeLink`.
    interrupt_s
        After which a session that does not leave its generation is killed.
    grace_s
        After which workers are killed that were ordered to end.
    give_up_s
        After which a launcher without workers ends to which no controller answers.
    """

    job: str
    node: str
    slots: int
    address: str = ""
    lease_s: float = 120.0
    beat_s: float = 0.5
    interrupt_s: float = messages.INTERRUPT_S
    grace_s: float = 30.0
    give_up_s: float = 900.0


class LauncherEnding(msgspec.Struct, frozen=True):
    """How a launcher ended, words for people, and its exit code.

    The kind is that of `Shutdown`, ``left`` or ``no-controller``.
    """

    kind: str
    text: str
    code: int


class NodeLauncher:
    """The launcher of one node; made and run by the main thread.

    Parameters
    ----------
    settings, program, output
        What to do, and how.
    folder
        Its own, for its socket and the lease.
    addresses, secret
        See `NodeLink`.
    say
        Tells people a sentence.
    turn
        Is called about ten times a second, with the seconds for which no controller answered
        and the rank of this node in the last generation; returns whether one is to be tried at
        once.
    seated
        See `NodeLink`.
    daemon_at
        Receives the URL of the job's daemon, on each connection to a controller that knows it.
    hand
        See `ckptd.elastic.workerend.LauncherEnd`.

    Attributes
    ----------
    greet
        See `NodeLink.greet`.

    Raises
    ------
    ProcessError
        The zygote cannot be started, or there is no place for the socket.
    """

    def __init__(
        self,
        settings: NodeSettings,
        program: Program,
        output: Output,
        folder: Path,
        addresses: Callable[[], str],
        secret: bytes,
        say: Callable[[str], None],
        turn: Callable[[float, int], bool] = lambda _, __: False,
        seated: Callable[[str], bool] | None = None,
        daemon_at: Callable[[str], None] = lambda _: None,
        hand: Callable[[AskProof], HandedProof] = lambda _: HandedProof(),
    ) -> None:
        self._daemon_at = daemon_at
        self._s, self._say, self._turn_of_others, self._output = settings, say, turn, output
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._node = NodeState(settings.node, self._tell)
        self._progress = NodeProgress(settings.node, self._tell, self._are_all)
        self._sessions = False
        self._interrupted_until = 0.0
        self._ends: list[_End] = []
        """Of workers of the running generation that have ended by themselves."""
        self._said_end = False
        self._ends_folder = folder / FOLDER
        self._ends_folder.mkdir(mode=0o700, exist_ok=True)
        self._memory = MemoryWatch()
        self._looked = 0.0
        self._lease_until = 0.0
        self._silent, self._say_at_s = False, 0.0
        self._ending: LauncherEnding | None = None
        self._leaving: signal.Signals | None = None
        self._leave_by = 0.0
        self._lease = LeaseFile(folder / "lease")
        self._slots = NodeSlots(settings.slots, program.environ)
        self._pool = WorkerPool(
            program,
            output,
            self._selector,
            self._worker_changed,
            self._hosting,
            say,
            self._cannot_start,
            self._slots,
        )
        self._end_of_workers = LauncherEnd(
            folder / "launcher.sock", self._received, self._known, hand
        )
        self._up = self._state()
        self._link = NodeLink(
            addresses,
            settings.job,
            secret,
            lambda: self._up,
            lambda order: self._post(partial(self._ordered, order)),
            beat_s=settings.beat_s,
            lease_s=settings.lease_s,
            leased=lambda until: self._post(partial(self._leased, until)),
            seated=seated,
        )
        self.greet = self._link.greet

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> LauncherEnding:
        """Do what the controller orders until it ends the job, or a signal comes; clean up."""
        try:
            self._link.start()
            while self._ending is None:
                self._once(_TURN_S)
            return self._ending
        finally:
            self._close()

    def leave(self, number: signal.Signals) -> None:
        """Leave the job in order; the second time, at once. Safe in a signal handler."""
        self._post(partial(self._leave, number))

    def _once(self, timeout_s: float) -> None:
        ready = self._selector.select(timeout_s)
        # Before all else: this process may have been stopped for a long time.
        self._look_at_lease()
        for key, _ in ready:
            key.data()
        self._look_at_time()
        if self._turn_of_others(self._link.absent_s, self._node.rank):
            self._link.hurry()

    def _post(self, what: Callable[[], None]) -> None:
        self._inbox.put(what)
        with suppress(OSError, ValueError):  # it is awake, or it has ended
            os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            try:
                what = self._inbox.get_nowait()
            except queue.Empty:
                return
            what()

    def _state(self) -> messages.NodeUp:
        mine = self._pool.workers.live(self._is_current)
        if mine:  # a dead one is restarted, and costs the others nothing
            self._sessions = all(w.session for w in mine)
        # Others train on meanwhile: they are stopped once these can really join.
        slots = len(self._slots.in_use) if self._pool.ready else 0
        sick = self._slots.sick
        return self._node.up(slots, self._s.address, sessions=self._sessions, sick=sick)

    def _tell(self, event: messages.SaidEvent | messages.Timed) -> None:
        # The beat that goes with it must not contradict it.
        self._up = self._state()
        self._link.tell(event)

    def _refresh(self) -> None:
        now = self._state()
        if now != self._up:
            self._up = now
            self._link.hurry()

    def _look_at_time(self) -> None:
        now = time.monotonic()
        if self._interrupted_until and now >= self._interrupted_until:
            self._interrupted_until = 0.0
            for worker in self._unfenced():
                worker.kill()
        if self._leaving and (now >= self._leave_by or not self._pool.workers.live()):
            self._left()
        self._tell_ends(now)
        if now - self._looked >= _LOOK_S:
            self._looked = now
            for worker in self._pool.workers.live(lambda w: w.pid > 0):
                self._memory.look(worker.pid)
        if refusal := self._link.new_refusal():
            self._say(refusal)
        self._look_at_silence(self._link.silent_s, now)
        self._refresh()
        # Its last order may lie in the inbox still: it ends as soon as it has put that there.
        if not self._link.alive and self._inbox.empty() and self._ending is None:
            self._ending = LauncherEnding("defect", "the link to the controller has failed", 1)

    def _look_at_silence(self, silent_s: float, now: float) -> None:
        """Say that no controller answers, and say it again whenever the silence has doubled."""
        quiet_s = _SILENT_S if self._link.answered else _FIRST_SILENT_S
        problem = self._link.problem
        why = f": {problem}" if problem else ""
        if silent_s <= quiet_s:
            if self._silent:
                self._say("the controller answers")
            self._silent, self._say_at_s = False, quiet_s
        elif silent_s > self._s.give_up_s and not self._pool.workers.live() and not self._ending:
            text = f"no controller has answered for {silent_s:.0f} s: this launcher gives up{why}"
            self._ending = LauncherEnding("no-controller", text, 1)
        elif silent_s > self._say_at_s:
            left = max(0.0, self._lease_until - now)
            text = f"the controller cannot be reached: training goes on, for {left:.0f} s at most"
            if not self._node.running:
                limit = self._s.give_up_s
                text = f"waiting for the controller, {silent_s:.0f} s of {limit:.0f}{why}"
                if not self._silent:
                    text += f"\n  next:   on its machine, ckptd ctl status --job {self._s.job}"
            self._silent, self._say_at_s = True, 2 * silent_s
            self._say(text)

    # --- the lease --------------------------------------------------------------------------------

    def _leased(self, until: float) -> None:
        self._lease_until = max(self._lease_until, until)
        self._lease.extend(self._lease_until)
        if self._node.waiting is not None:
            self._settle()

    @property
    def _lease_over(self) -> bool:
        return 0.0 < self._lease_until <= time.monotonic()

    def _look_at_lease(self) -> None:
        # Those as well that were only ordered to end: they may step meanwhile.
        live = self._pool.workers.live()
        if not live or not self._lease_over:
            return
        known = all(worker.killed for worker in live)
        for worker in live:
            worker.kill()
        if known:
            return
        self._say("the lease has expired without an answer from the controller: killing workers")
        running = self._node.running
        if running and self._node.ended is None:
            ended = messages.Ended(
                node=self._s.node, generation=running, code=messages.LEASE_EXIT_CODE
            )
            self._node.tell_ended(ended)
        self._settle()

    # --- what the controller orders ---------------------------------------------------------------

    def _ordered(self, order: messages.ToNode) -> None:
        if self._ending is not None:
            return
        if isinstance(order, messages.FenceNow):
            self._fence(order)
        elif isinstance(order, messages.Begin):
            self._take_begin(order)
        elif isinstance(order, messages.StoreAt):
            self._pool.store_at(order)
        elif isinstance(order, messages.SaveNow):
            self._save(order)
        elif isinstance(order, messages.DaemonAt):
            self._daemon_at(order.url)
        elif isinstance(order, messages.Tell):
            command = f"\n  next:   {order.command} --job {self._s.job}" if order.command else ""
            self._say(order.text + command)
        elif isinstance(order, messages.Shutdown):
            self._ending = LauncherEnding(order.kind, order.text, order.code)

    def _fence(self, order: messages.FenceNow) -> None:
        self._tell_ends(math.inf)  # what waits to be told may be the cause
        if not self._node.order_fence(order.generation):
            return
        for worker in self._unfenced():
            leaves = order.level == 0 and worker.session and not is_stopped(worker.pid)
            end = worker.end
            if worker.killed or (leaves and end is not None and end.send(order)):
                continue
            worker.kill()
        if order.level == 0:
            # A node that is late already does not get more time because it is ordered once more.
            by = self._interrupted_until or time.monotonic() + self._s.interrupt_s
            self._interrupted_until = by
        else:
            for worker in self._pool.workers.live(lambda w: w.generation < self._node.fence):
                worker.kill()
        self._settle()

    def _unfenced(self) -> list[Worker]:
        return self._pool.workers.live(lambda w: w.generation < self._node.fence and not w.out)

    def _take_begin(self, begin: messages.Begin) -> None:
        if self._leaving or not self._node.order_begin(begin):
            return
        for worker in self._pool.workers.live(lambda w: begin.level > 0 or not w.idle):
            worker.kill()
        self._settle()

    def _settle(self) -> None:
        """Report what is so now that workers have changed; begin what waited for that."""
        node = self._node
        if node.fence > node.fenced and not self._unfenced():
            self._interrupted_until = 0.0
            node.keep_fence(node.fence)
            if self._leaving:
                self._left()
        begin = node.waiting
        if begin is not None and self._may_start(begin):
            self._start(begin)
        if node.running and not any(map(self._is_current, self._pool.workers)):
            node.running = 0
        self._refresh()

    def _may_start(self, begin: messages.Begin) -> bool:
        old = self._pool.workers.live(lambda w: w.generation < begin.generation and not w.idle)
        # A Begin may come before the echo that renews a lease which was over.
        may = self._ending is None and not self._lease_over
        return may and not old

    def _start(self, begin: messages.Begin) -> None:
        self._node.start(begin)
        self._progress.begin(begin.generation, self._node.begun_at)
        self._ends, self._said_end = [], False
        where = f"{_count(begin.world, 'rank')} on {_count(begin.nodes, 'node')} ({begin.shape})"
        step = f" from step {begin.step} or later" if begin.step else ""
        self._say(f"generation {begin.generation}: {where}{step}; {begin.reason}")
        self._pool.start(begin, self._s.address or self._link.here or "127.0.0.1")
        self._settle_marks()

    def _is_current(self, worker: Worker) -> bool:
        return worker.generation == self._node.running

    def _hosting(self, generation: int, host: str, port: int) -> None:
        if port:
            self._link.tell(messages.Hosting(generation, host, port))
        elif generation == self._node.running:
            reason = "the process of its job store has died"
            self._link.tell(
                messages.Broken(node=self._s.node, generation=generation, reason=reason)
            )

    def _save(self, order: messages.SaveNow) -> None:
        for worker in self._pool.workers.live(lambda w: w.generation == order.generation):
            if worker.end is not None:
                worker.end.send(order)

    # --- what workers do --------------------------------------------------------------------------

    def _worker_changed(self, worker: Worker) -> None:
        if worker.code is not None:
            self._gone(worker, worker.code)
        self._settle_marks()
        self._settle()

    def _gone(self, worker: Worker, code: int) -> None:
        """A worker has ended, perhaps by itself."""
        words, stepped = last_words_of(self._ends_folder, worker.pid, forget=True)
        by_itself = not worker.killed and not worker.out
        memory = ""
        if by_itself and code == -signal.SIGKILL:
            memory = self._memory.killed(worker.pid)
        self._memory.forget(worker.pid)
        if not by_itself or worker.generation != self._node.started or self._ended_by_lease:
            return
        stepped = stepped or self._progress.has("stepped", worker.seat.rank)
        # An earlier exit report does not explain this end: another process has ended it since.
        words = words if words is not None and words.code == code else None
        end = _End(worker, code, stepped, words, memory)
        if code > 0 and is_device_error(end.text):
            self._device_failed(worker, end.text, stepped)
        self._ends.append(end)
        self._tell_ends(time.monotonic())

    @property
    def _ended_by_lease(self) -> bool:
        ended = self._node.ended
        return ended is not None and ended.code == messages.LEASE_EXIT_CODE

    def _tell_ends(self, now: float) -> None:
        """Tell how workers of the generation have ended, once it is known whether others follow."""
        begin = self._node.begin
        generation = self._node.started
        # The end of no other worker has SIGKILL for its consequence.
        failed = sorted(
            (end for end in self._ends if end.code), key=lambda end: end.code != -signal.SIGKILL
        )
        first = failed[0] if failed else None
        # It may run none any more: the last report is how the last of them has ended.
        over = self._ended_by_lease or self._node.fenced >= generation
        if not self._ends or begin is None or over:
            self._say_end(first)
            return
        going = [w for w in self._pool.workers if w.generation == generation and w.code is None]
        ending = sum(self._is_ending(w) for w in going)
        well = len(self._ends) - len(failed) + ending
        if len(failed) == 1 and not well:
            all_here = len(begin.seats) == begin.world and not going
            if not all_here and now - failed[0].at < _ENDING_S:
                return
        self._say_end(first)
        self._node.tell_ended(
            messages.Ended(
                node=self._s.node,
                generation=generation,
                code=first.code if first is not None else 0,
                left=len(going),
                well=well,
                bad=len(failed),
                program=first is not None and first.worker.pid > 0,
                stepped=any(end.stepped for end in self._ends),
                place=first.place if first is not None else "",
                text=first.text if first is not None else "",
            )
        )

    def _say_end(self, first: _End | None) -> None:
        """Tell people, once, how the first worker has failed."""
        if first is not None and not self._said_end:
            self._said_end = True
            self._say(first.sentence)

    def _is_ending(self, worker: Worker) -> bool:
        words, _ = last_words_of(self._ends_folder, worker.pid)
        return words is not None and words.code == 0

    def _cannot_start(self, reason: str) -> None:
        """No rank can ever run here."""
        self._ending = LauncherEnding("missing-package", reason, 2)

    def _known(self, pid: int) -> bool:
        return self._pool.workers.of_session(pid) is not None

    def _received(self, end: WorkerEnd, message: messages.FromWorker | None) -> None:
        self._post(partial(self._handle, end, message))

    def _handle(self, end: WorkerEnd, message: messages.FromWorker | None) -> None:
        worker = self._pool.workers.of_session(end.pid)
        if worker is None or (worker.dead and not isinstance(message, messages.Progress)):
            return  # a step that it reported before it died counts
        if message is None:
            worker.end = None if worker.end is end else worker.end
        elif isinstance(message, messages.Attach):
            self._attached(worker, end, message)
        elif worker.end is not end:
            return  # sent by another program than the worker; see `_attached`
        elif isinstance(message, messages.Out) and message.unfit:
            if message.device:
                self._device_failed(worker, message.unfit, self._has_stepped(worker))
            self._not_again(worker, message.unfit)
            if message.generation < worker.generation == self._node.running:
                # It had said that it was out, and has a seat since: nobody will take that now.
                text = f"rank {worker.seat.rank} cannot go on: {message.unfit}"
                self._link.tell(
                    messages.Broken(node=self._s.node, generation=worker.generation, reason=text)
                )
        elif isinstance(message, messages.Out):
            worker.out = worker.out or message.generation >= worker.generation
        elif message.generation == worker.generation == self._node.running:
            self._take(worker, message)
        self._settle_marks()
        self._settle()

    def _not_again(self, worker: Worker, why: str) -> None:
        """Kill a worker that can go on in no generation; another one takes its seat."""
        if not worker.killed:
            rank = f"rank {worker.seat.rank} (process {worker.pid})"
            self._say(f"{rank} is replaced by a new process: {why}")
            worker.kill()

    def _has_stepped(self, worker: Worker) -> bool:
        return last_words_of(self._ends_folder, worker.pid)[1]

    def _device_failed(self, worker: Worker, why: str, stepped: bool) -> None:
        """Take a slot out of use whose device fails one process after the other.

        `stepped`: an optimizer of the process has made a step, also where nothing was loaded yet
        and nothing is committed.
        """
        if worker.killed or worker.failed:
            return
        worker.failed = True
        current = worker.generation == self._node.started
        worked = stepped or (current and self._progress.works(worker.seat.rank))
        slot = worker.slot
        if slot is None or not self._slots.failed(slot, why, fresh=worker.fresh, worked=worked):
            return
        self._say(f"slot {slot} is disabled, its device failed in every process: {why}")
        # The local rank of those behind it names another device from now on.
        for other in self._pool.workers.live(lambda w: w.slot is None or w.slot > slot):
            other.kill()
        self._refresh()

    def _attached(self, worker: Worker, end: WorkerEnd, message: messages.Attach) -> None:
        if worker.end is not None and end.pid not in (worker.end.pid, worker.pid):
            return  # a program that the worker has started, with its environment
        worker.end, worker.session = end, message.session
        begin = self._node.begin
        if begin is not None:
            end.send(messages.Welcome(worker.generation, begin.mttr_s, begin.mtbf_s))

    def _take(self, worker: Worker, message: messages.FromWorker) -> None:
        """Take what a worker of the running generation reports."""
        if isinstance(message, messages.Broken):
            if is_device_error(message.reason):  # it may be killed before it can look itself
                self._device_failed(worker, message.reason, self._has_stepped(worker))
            self._link.tell(msgspec.structs.replace(message, node=self._s.node))
            return
        self._progress.take(worker.seat.rank, message)
        if self._leaving and isinstance(message, messages.Saved):
            # Where others go on without this node, it is fenced now; else its workers have the
            # rest of their time.
            self._tell_to_end(signal.SIGTERM)

    def _settle_marks(self) -> None:
        """Report how far the slowest worker is."""
        live = self._pool.workers.live(self._is_current)
        self._progress.mark("spawned", [w.seat.rank for w in live if w.pid])
        self._progress.settle()

    def _are_all(self, ranks: Collection[int]) -> bool:
        live = self._pool.workers.live(self._is_current)
        return bool(live) and all(w.seat.rank in ranks for w in live)

    # --- the end ----------------------------------------------------------------------------------

    def _leave(self, number: signal.Signals) -> None:
        live = self._pool.workers.live()
        if self._leaving or not live:
            self._leaving = self._leaving or number
            self._left()
            return
        self._leaving = number
        self._leave_by = time.monotonic() + self._s.grace_s
        ordered = number is not signal.SIGINT  # with Ctrl-C a person speaks to the program itself
        if ordered and any(w.end is not None for w in live) and not self._silent:
            # They save first, and the others go on without this node.
            self._say(f"{number.name}: this node leaves the job; send it again to end at once")
            notice = messages.Notice(node=self._s.node, seconds=self._s.grace_s, reason=number.name)
            self._link.tell(notice)
        else:
            self._say(f"{number.name}: stopping workers; send it again to kill them at once")
            self._tell_to_end(signal.SIGTERM if ordered else number)

    def _tell_to_end(self, number: signal.Signals) -> None:
        for worker in self._pool.workers.live(lambda w: not w.killed):
            worker.tell_to_end(number)

    def _left(self) -> None:
        number = self._leaving or signal.SIGTERM
        words = f"this node has left the job: {number.name}"
        self._ending = LauncherEnding("left", words, 128 + number)

    def _close(self) -> None:
        """End all that is left of the generation, and leave."""
        ending = self._ending
        self._tell_ends(math.inf)
        # From now on nothing is begun, also where it ends by an error.
        self._ending = ending or LauncherEnding("defect", "", 1)
        for worker in self._pool.workers:
            worker.kill()
        end = time.monotonic() + _DEAD_S
        while self._pool.workers.live() and time.monotonic() < end:
            for key, _ in self._selector.select(_TURN_S):
                key.data()
        if ending is None or ending.kind in ("left", "defect"):
            self._link.tell(messages.Left(node=self._s.node))
        self._link.close(_FORGET_S if ending is not None else 0.0)
        self._pool.close()
        self._end_of_workers.close()
        self._lease.close()
        self._output.finish()
        self._selector.close()
        # A signal, or a worker's thread, may still come: its number is another file's soon.
        wake, self._wake = self._wake, -1
        os.close(wake)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _End:
    """How a worker has ended by itself.

    Attributes
    ----------
    worker, code, stepped
        Whose, with what, and whether it had made a step.
    at
        When, in seconds of ``time.monotonic``.
    place, text
        See `Ended`.
    sentence
        The same in a sentence.
    """

    def __init__(
        self, worker: Worker, code: int, stepped: bool, words: ExitReport | None, memory: str
    ) -> None:
        self.worker, self.code, self.stepped = worker, code, stepped
        self.at = time.monotonic()
        self.place = words.place if words is not None else ""
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        said = memory or error_of(worker.error_file) or (words.text if words is not None else "")
        rank = f"rank {worker.seat.rank}"
        self.text = f"{rank}: {said}"[:_MOST_TEXT] if said else rank
        self.sentence = f"{rank} (process {worker.pid}) has ended: {how}{said and ': '}{said}"
