"""Rank processes for tests: starts them (fork server, modules preloaded), deadline, errors.

In it: how many lines of a rank's log an error has; how long stacks and kills are awaited; the order
in which failed ranks are named.

`run_ranks` calls one function in `nproc` processes that form a gloo process group over loopback,
as torchrun would start them, and returns what each rank returned. `rank_outcomes` does the same and
tells how each rank ended, for tests that kill ranks on purpose.

No call waits for ever: when the deadline passes, or when one rank failed and the others do not end
soon, every rank still running writes the stacks of all its threads and is killed, with whatever it
started in its process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from ckptd.errors import CkptdError, DeadlineError, UsageError
from ckptd.testing.rank_main import STACKS_SIGNAL, RankFiles, RankSpec, main

__all__ = ["RANK_IMPORTS", "RankOutcome", "play_world", "rank_outcomes", "result_of", "run_ranks"]

T = TypeVar("T")
RANK_IMPORTS = [
    "torch",
    "torch.distributed",
    # Optimizers and wrappers import these on first use: a second of each rank.
    "torch._dynamo",
    "torch.distributed.tensor",
    "ckptd.testing.rank_main",
]
"""Modules that every rank finds imported; what is appended before the first call counts."""
FROZEN = "ckptd.testing.frozen"
"""Is imported after them."""

_STACKS_WAIT_S = 3.0
_KILL_WAIT_S = 20.0
_LOG_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class RankOutcome(Generic[T]):
    """How one rank ended.

    Attributes
    ----------
    rank
        Which one.
    value
        What the function returned; None when it did not return.
    returned
        Whether it did.
    error
        What the function raised; None when it returned, or when the process died.
    trace
        Traceback of `error`, as text.
    exit_code
        0 after a return or a raise, else the code the process exited with; ``-N`` for signal N.
    stacks
        Stacks of all threads, written when the rank was still running at the deadline.
    log
        Everything the rank wrote to standard output and standard error.
    ended_by_harness
        The rank was still running when its time was up, and was killed.
    end_order
        0 for the rank that ended first. The first failure is usually the cause of the others.
    """

    rank: int
    value: T | None
    returned: bool
    error: BaseException | None
    trace: str
    exit_code: int
    stacks: str
    log: str
    ended_by_harness: bool
    end_order: int

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended by itself."""
        return self.returned and self.exit_code == 0


def run_ranks(
    nproc: int,
    function: Callable[..., T],
    *args: object,
    deadline_s: float = 240.0,
    grace_s: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call ``function(*args)`` in `nproc` gloo ranks and return their results in rank order.

    Parameters
    ----------
    nproc
        Number of processes, at least 1.
    function
        A function of a module (processes import it by name). The default process group exists when
        it is called; ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so on are set as by torchrun.
    args
        Arguments, the same for every rank; pickled.
    deadline_s
        Seconds for everything, start included.
    grace_s
        Seconds that the other ranks get once one has failed.
    env
        Further environment variables of the ranks.

    Raises
    ------
    BaseException
        What the first failing rank raised, with its traceback as a note.
    CkptdError
        Kind ``rank-died``: a rank exited or was killed by a signal before the function returned.
    DeadlineError
        Ranks were still running; their stacks are notes.
    """
    outcomes = rank_outcomes(
        nproc, function, *args, deadline_s=deadline_s, grace_s=grace_s, env=env
    )
    return result_of(outcomes, deadline_s)


def result_of(outcomes: Sequence[RankOutcome[T]], deadline_s: float) -> list[T]:
    """Return what ranks returned; raises as `run_ranks` does."""
    failed = sorted((o for o in outcomes if not o.ok), key=_cause_first)
    if failed:
        raise _explain(failed, len(outcomes), deadline_s)
    return [cast("T", o.value) for o in outcomes]


def rank_outcomes(
    nproc: int,
    function: Callable[..., T],
    *args: object,
    deadline_s: float = 240.0,
    grace_s: float = 10.0,
    env: Mapping[str, str] | None = None,
    group: bool = True,
    play: Play | None = None,
) -> list[RankOutcome[T]]:
    """Call ``function(*args)`` in `nproc` gloo ranks and tell how each ended, in rank order.

    Parameters are those of `run_ranks`, and the following. A rank that raises, dies or hangs is an
    outcome here and not an error.

    Parameters
    ----------
    group
        Whether ranks join a process group before the function is called.
    play
        Starts the ranks elsewhere, as `play_world` does.

    Raises
    ------
    UsageError
        `nproc` is not positive, or the function cannot be imported by the ranks.
    """
    deadline = time.monotonic() + deadline_s
    payload = _payload(nproc, function, args)
    with tempfile.TemporaryDirectory(prefix="ckptd-ranks-") as folder, _job_store(nproc) as port:
        specs = [
            RankSpec(
                rank=rank,
                nproc=nproc,
                port=port,
                payload=payload,
                folder=folder,
                deadline_s=deadline_s,
                cwd=os.getcwd(),
                env={**os.environ, **(env or {})},
                group=group,
            )
            for rank in range(nproc)
        ]
        if play is not None:
            return play(specs, deadline, grace_s)
        return play_world(specs, deadline, grace_s, _start_server())


Play = Callable[[Sequence[RankSpec], float, float], "list[RankOutcome[Any]]"]


def play_world(
    specs: Sequence[RankSpec], deadline: float, grace_s: float, context: BaseContext
) -> list[RankOutcome[Any]]:
    """Start ranks by `context`, wait for them until `deadline` (monotonic), tell how each ended."""
    world = _World(specs, deadline, grace_s, context)
    try:
        world.start()
        world.wait()
    finally:
        world.end()
    return [world.outcome(spec.rank) for spec in specs]


class _World:
    """The processes of one call."""

    def __init__(
        self, specs: Sequence[RankSpec], deadline: float, grace_s: float, context: BaseContext
    ) -> None:
        self._specs = specs
        self._context = context
        self._files = [RankFiles(Path(s.folder), s.rank) for s in specs]
        self._deadline = deadline
        self._grace_s = grace_s
        self._processes: list[BaseProcess] = []
        self._order: list[int] = []
        self._ended_by_harness: set[int] = set()

    def start(self) -> None:
        for spec in self._specs:
            # Not daemonic: those may not start processes, and a checkpointer does.
            process = _process(self._context, spec)
            process.start()
            self._processes.append(process)

    def wait(self) -> None:
        """Return when all ranks ended, or their time is up."""
        until = self._deadline
        running = dict(enumerate(self._processes))
        while running and (left := until - time.monotonic()) > 0:
            connection.wait([p.sentinel for p in running.values()], timeout=left)
            for rank in [r for r, p in running.items() if p.exitcode is not None]:
                del running[rank]
                self._order.append(rank)
                if not self.outcome(rank).ok:
                    until = min(until, time.monotonic() + self._grace_s)

    def end(self) -> None:
        """Take the stacks of each rank that still runs, then kill it. Leaves no process behind."""
        running = [r for r, p in enumerate(self._processes) if p.exitcode is None]
        for rank in running:
            self._signal(rank, STACKS_SIGNAL)
        self._wait_for_stacks(running)
        for rank in running:
            self._ended_by_harness.add(rank)
            self._order.append(rank)
            self._signal(rank, signal.SIGKILL, group=True)
        for process in self._processes:
            process.join(_KILL_WAIT_S)

    def _wait_for_stacks(self, ranks: list[int]) -> None:
        """Return when the dumps are complete: they have no end mark, so when they stop growing."""
        until = time.monotonic() + _STACKS_WAIT_S
        before: list[int] = []
        while ranks and time.monotonic() < until:
            sizes = [len(self._files[r].read_stacks()) for r in ranks]
            if all(sizes) and sizes == before:
                return
            before = sizes
            time.sleep(0.2)

    def outcome(self, rank: int) -> RankOutcome[Any]:
        files = self._files[rank]
        result = files.read_result()
        exit_code = self._processes[rank].exitcode
        return RankOutcome(
            rank=rank,
            value=result.value,
            returned=result.returned,
            error=result.error,
            trace=result.trace,
            exit_code=-1 if exit_code is None else exit_code,
            stacks=files.read_stacks(),
            log=files.read_log(),
            ended_by_harness=rank in self._ended_by_harness,
            end_order=self._order.index(rank),
        )

    def _signal(self, rank: int, number: int, *, group: bool = False) -> None:
        process = self._processes[rank]
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
            if group:
                # Ranks lead their own group; what they started dies with them.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


def _process(context: Any, spec: RankSpec) -> BaseProcess:
    made: BaseProcess = context.Process(target=main, args=(spec,), name=f"rank{spec.rank}")
    return made


def _payload(nproc: int, function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    if nproc < 1:
        raise UsageError("nproc must be at least 1", wanted="nproc >= 1", found=nproc)
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "the function or its arguments cannot be sent to the ranks",
            where=getattr(function, "__qualname__", repr(function)),
            wanted="a function of a module, with picklable arguments",
            found=str(error),
        ) from error


@contextlib.contextmanager
def _job_store(nproc: int) -> Iterator[int]:
    """Serve the job store here, as a torchrun agent does: no rank's death takes it along."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, nproc, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


def _start_server() -> BaseContext:
    """Return the forkserver context, its server started with torch already imported.

    Four ranks that each import torch cost seconds a test; forks of a server that has it and has no
    threads cost milliseconds. The thread limits must be set before numpy and torch are imported.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*RANK_IMPORTS, FROZEN])
    limits = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(limits)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _cause_first(outcome: RankOutcome[Any]) -> tuple[bool, int]:
    return (outcome.ended_by_harness, outcome.end_order)


def _explain(failed: list[RankOutcome[Any]], nproc: int, deadline_s: float) -> BaseException:
    """Return the error of the first failure, with a note for each."""
    first = failed[0]
    if first.ended_by_harness:
        error: BaseException = DeadlineError(
            f"{len(failed)} of {nproc} ranks were still running",
            where=", ".join(f"rank {o.rank}" for o in failed),
            wanted=f"all ranks ended within {deadline_s:g} s",
        )
    elif first.error is not None:
        error = first.error
    else:
        error = CkptdError(
            f"rank {first.rank} of {nproc} died",
            kind="rank-died",
            wanted="a return from its function",
            found=_death(first.exit_code),
        )
    for outcome in failed:
        error.add_note(_note(outcome))
    return error


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _note(outcome: RankOutcome[Any]) -> str:
    if outcome.ended_by_harness:
        head = f"rank {outcome.rank} was still running and was killed; its stacks:"
        body = outcome.stacks or "(none written: the process did not react to a signal)"
    elif outcome.error is not None:
        head = f"rank {outcome.rank} raised:"
        body = outcome.trace
    else:
        head = f"rank {outcome.rank}: {_death(outcome.exit_code)}"
        body = outcome.stacks
    tail = "\n".join(outcome.log.splitlines()[-_LOG_TAIL_LINES:])
    return "\n".join(part for part in (head, body, tail and f"its output:\n{tail}") if part)
