"""`WorkerPool`: processes of a node: zygote, forked workers, the host of the job's store.

In it: what happens when the zygote dies, and the pause before the next; when one that does not get
ready is given up.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from ckptd.base.net.address import LOCALHOST
from ckptd.base.runtime.accelerators import accelerators_here
from ckptd.decoding import converter
from ckptd.elastic.launchers.environ import of_seat, of_store
from ckptd.elastic.launchers.output import Output, Streams
from ckptd.elastic.launchers.slots import NodeSlots
from ckptd.elastic.launchers.spawn import Spawner
from ckptd.elastic.launchers.workers import Worker, Workers
from ckptd.elastic.launchers.zygotewire import Fork, Forked, FromZygote, NotForked, Ready, Reap
from ckptd.elastic.messages import Begin, Go, RankAssignment, StoreAt

_AGAIN_S = 1.0
_UNREADY_S = 60.0
_FAILED = 1


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program of the workers.

    Attributes
    ----------
    mode, argv
        See `ckptd.elastic.launchers.zygotewire.Fork`.
    environ
        What is the same for all workers.
    plain
        Whether each is to be started as a command, and nothing imported before.
    """

    mode: Literal["script", "module", "exec"]
    argv: tuple[str, ...]
    environ: dict[str, str]
    plain: bool = False


programs = converter(Program)
"""Makes a `Program` of plain values, and checks it."""


@dataclass
class _Host:
    """The process that serves the job store of a generation."""

    number: int
    generation: int
    address: str
    pipe: int
    pid: int = 0
    sent: bytes = b""


class WorkerPool:
    """All of them; used by one thread, which waits with `selector` and calls what it finds there.

    Parameters
    ----------
    program, output
        What workers run, and where they write.
    selector
        Data of its keys are functions without arguments.
    changed
        Is called with each worker that was forked, has died, or has told its code.
    hosting
        Is called with generation, host and port when a job store listens, and with port 0 when it
        has died.
    say
        Tells people.
    useless
        Is called with the reason if no worker can ever be started here.
    slots
        What devices workers are given.
    """

    def __init__(
        self,
        program: Program,
        output: Output,
        selector: selectors.BaseSelector,
        changed: Callable[[Worker], None],
        hosting: Callable[[int, str, int], None],
        say: Callable[[str], None],
        useless: Callable[[str], None],
        slots: NodeSlots,
    ) -> None:
        self.slots = slots
        self._useless = useless
        self.workers = Workers()
        self._program, self._output, self._selector = program, output, selector
        self._changed, self._hosting, self._say = changed, hosting, say
        self._bound = bool(accelerators_here())
        self._numbers = 0
        self._begin: Begin | None = None
        self._store: StoreAt | None = None
        self._early: StoreAt | None = None
        """Of a generation that is not started here yet: another node's store was faster."""
        self._going: list[Worker] = []
        """Workers that wait for nothing but the store."""
        self._host: _Host | None = None
        self._hosts: dict[int, _Host] = {}
        self._spawner: Spawner | None = None
        self._unready_since: float | None = None
        self._begin_spawner()

    @property
    def ready(self) -> bool:
        """Whether workers can be started, or run, without waiting for what the zygote imports.

        A minute is waited for it at most: then they are started however long it takes.
        """
        since = self._unready_since
        if since is None or self._spawner is None or self.workers.live():
            return True
        return time.monotonic() - since >= _UNREADY_S

    # --- a generation -----------------------------------------------------------------------------

    def start(self, begin: Begin, address: str) -> None:
        """Start a generation, as far as that goes without its job store.

        Local ranks are 0 to the number of seats, rising with ranks, as torchrun and Slurm promise,
        and name devices. Idle workers take seats first, each the one of its own local rank. Where
        there are accelerators it takes no other: a program that has chosen its device would share
        it with the process that comes to its former local rank.
        """
        early, self._early = self._early, None
        known = early is not None and early.generation == begin.generation
        self._begin, self._store, self._going = begin, early if known else None, []
        self._end_host()
        if begin.hosts_store:
            self._start_host(begin.generation, address)
        idle = self.workers.live(lambda w: w.idle and begin.level == 0)
        seats = sorted(begin.seats, key=lambda seat: seat.rank)
        for local_rank, seat in enumerate(seats):
            same = [w for w in idle if w.local_rank == local_rank]
            others = [w for w in idle if w.local_rank >= len(seats) and not self._bound]
            worker = next(iter(same + others), None)
            if worker is None:
                self._fork(begin, seat, local_rank)
            else:
                idle.remove(worker)
                self._reseat(worker, begin, seat, local_rank)

    def store_at(self, store: StoreAt) -> None:
        """Release the workers of the generation: their job store is there."""
        if self._begin is None or store.generation > self._begin.generation:
            self._early = store
        elif store.generation == self._begin.generation:
            self._store = store
            for worker in self._going:
                self._let_go(worker)
            self._going = []

    def _reseat(self, worker: Worker, begin: Begin, seat: RankAssignment, local_rank: int) -> None:
        worker.generation, worker.seat, worker.local_rank = begin.generation, seat, local_rank
        worker.slot = self.slots.of(local_rank)
        worker.out = worker.fresh = False
        self._ready(worker)

    def _fork(self, begin: Begin, seat: RankAssignment, local_rank: int) -> None:
        if self._spawner is None:
            self._begin_spawner()
        files = self._streams(begin.generation - 1, local_rank)
        environ = {**self._program.environ, **of_seat(begin, seat, local_rank)}
        environ |= self.slots.environ()
        worker = Worker(self._number(), begin.generation, seat, local_rank)
        worker.slot = self.slots.of(local_rank)
        worker.error_file = files.error_file
        order = Fork(
            number=worker.number,
            mode=self._program.mode,
            argv=self._program.argv,
            environ={**environ, **_error_file(files.error_file)},
            stdout=files.stdout,
            stderr=files.stderr,
        )
        self.workers.add(worker)
        if self._spawner is not None:
            worker.gate = self._spawner.fork(order)

    def _streams(self, attempt: int, local_rank: int) -> Streams:
        try:
            return self._output.streams(attempt, local_rank)
        except OSError as error:
            self._say(f"files of local rank {local_rank} cannot be made, it goes without: {error}")
            return Streams("", "", "")

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ready(self, worker: Worker) -> None:
        if self._store is None:
            self._going.append(worker)
        else:
            self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        begin, store = self._begin, self._store
        if begin is None or store is None or worker.generation != begin.generation:
            return
        if worker.gate >= 0:
            worker.open_gate(of_store(store.host, store.port))
        elif worker.end is not None and not worker.killed:
            environ = of_seat(begin, worker.seat, worker.local_rank)
            environ |= of_store(store.host, store.port)
            worker.end.send(Go(begin.generation, environ))

    # --- the zygote -------------------------------------------------------------------------------

    def _begin_spawner(self) -> None:
        program = self._program
        self._spawner = Spawner(program.environ, plain=program.plain, shown=program.argv)
        self._unready_since = self._unready_since or time.monotonic()
        self._selector.register(self._spawner, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        if self._spawner is None:
            return
        try:
            messages = self._spawner.take()
        except EOFError:
            self._lose_spawner(self._spawner)
            return
        for message in messages:
            self._take(message)

    def _take(self, message: FromZygote) -> None:
        if isinstance(message, Ready):
            self._unready_since = None
            if message.broken:
                self._useless(message.broken)
            elif message.unsafe and not self._program.plain:
                self._say(f"{message.unsafe}: workers are started as commands, which takes longer")
        elif isinstance(message, Forked):
            self._forked(message)
        elif isinstance(message, NotForked):
            self._say(f"no process can be started: {message.reason}")
            self._exited(message.number, _FAILED, reap=False)
        else:
            self._exited(message.number, message.code, reap=True)

    def _forked(self, said: Forked) -> None:
        host = self._hosts.get(said.number)
        if host is not None:
            host.pid = said.pid
            if host is not self._host:
                with suppress(ProcessLookupError):  # it has died with its zygote
                    os.kill(said.pid, signal.SIGKILL)
        worker = self.workers.get(said.number)
        if worker is None:
            return
        worker.forked(said.pid)
        if worker.pidfd >= 0:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._died, worker))
        if not worker.killed:
            self._ready(worker)
        self._changed(worker)

    def _died(self, worker: Worker) -> None:
        self._unregister(worker.pidfd)
        worker.dead = True
        if worker.orphan:
            self._gone(worker, -signal.SIGKILL)  # no process is left that could report its end
        else:
            self._changed(worker)

    def _exited(self, number: int, code: int, *, reap: bool) -> None:
        worker = self.workers.get(number)
        if worker is not None and (code or worker.killed) and worker.pid:
            worker.sweep()
        if reap and self._spawner is not None:
            self._spawner.order(Reap(number))
        host = self._hosts.pop(number, None)
        if host is not None:
            self._drop_pipe(host)
            if host is self._host:
                self._host = None
                self._hosting(host.generation, host.address, 0)
        if worker is not None:
            self._gone(worker, code)

    def _gone(self, worker: Worker, code: int) -> None:
        worker.dead, worker.code = True, code
        self._output.ended(worker.error_file)
        if worker.pidfd >= 0:
            self._unregister(worker.pidfd)
        self.workers.remove(worker)
        self._changed(worker)

    def _lose_spawner(self, spawner: Spawner) -> None:
        """Workers die with their mother; see to it, and to what they have started."""
        self._unregister(spawner)
        code = spawner.end()
        self._spawner = None
        self._say(f"the zygote has ended with {code}: its workers end with it")
        hosts, self._hosts, self._host = self._hosts, {}, None
        for host in hosts.values():
            self._drop_pipe(host)
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            worker.orphan = True
            if worker.pidfd < 0:
                self._gone(worker, -signal.SIGKILL)
        if time.monotonic() - spawner.began > _AGAIN_S:  # else only when it is needed
            self._begin_spawner()

    def _unregister(self, what: Any) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(what)

    # --- the job store ----------------------------------------------------------------------------

    def _start_host(self, generation: int, address: str) -> None:
        if self._spawner is None:
            self._begin_spawner()
        read, write = os.pipe()
        host = _Host(self._number(), generation, address, read)
        self._host = self._hosts[host.number] = host
        self._selector.register(read, selectors.EVENT_READ, partial(self._read_port, host))
        order = Fork(
            number=host.number, mode="store", argv=(address,), environ=self._program.environ
        )
        if self._spawner is not None:
            self._spawner.order(order, write)

    def _read_port(self, host: _Host) -> None:
        if host.pipe < 0:  # let go of since it was found readable
            return
        said = os.read(host.pipe, 64)
        host.sent += said
        if host.sent.endswith(b"\n"):
            # A name that a machine without IPv4 may resolve to the address it lacks.
            local = host.address in LOCALHOST and ":" not in host.address
            shown = "localhost" if local else host.address
            self._hosting(host.generation, shown, int(host.sent))
        if not said or host.sent.endswith(b"\n"):
            self._drop_pipe(host)

    def _drop_pipe(self, host: _Host) -> None:
        if host.pipe >= 0:
            self._unregister(host.pipe)
            os.close(host.pipe)
            host.pipe = -1

    def _end_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._drop_pipe(host)
            if host.pid:
                with suppress(ProcessLookupError):
                    os.kill(host.pid, signal.SIGKILL)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill what is left, with the zygote. Idempotent."""
        for worker in self.workers:
            worker.kill()
        self._end_host()
        spawner, self._spawner = self._spawner, None
        if spawner is not None:
            self._unregister(spawner)
            spawner.end()
        for worker in self.workers:
            if worker.pidfd >= 0:
                self._unregister(worker.pidfd)
            self.workers.remove(worker)


def _error_file(path: str) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": path} if path else {}
