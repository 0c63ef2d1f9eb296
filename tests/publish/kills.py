"""A trainer of two ranks and a rollout of two, one of whose processes is killed at a named point.

Points are calls of the code itself, in a trainer's rank or in a worker: at the n-th of them, in the
second version, one process is killed with SIGKILL: the caller itself, or any other of the six. Each
version has other values in every element, so that a mixture of two is none of both.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckptd
from ckptd.errors import CkptdError
from ckptd.publish import client, pull
from ckptd.publish.client import PublishClient
from ckptd.testing.ranks import RankOutcome, rank_outcomes
from tests.processes import kill, lives, until
from tests.publish.jobs import TRAINER, WORKER, worker_part
from tests.publish.killpoints import FIRST_POINTS, PARTIES, POINTS, Kill, put_pid
from tests.reshard.torch.layout.jobs import Tree, chunks, differing, whole

__all__ = ["KillWorld", "WorkerEnd", "slots_of"]

TIMEOUT_S = 10.0
"""Of each wait of trainer and workers."""
LINGER_S = 3.0
_SERVER = "tests.publish.killserver"
_VERSIONS = 4
"""The first step from here on that is not skipped is the last; a store gets so many versions."""
_MOST_STEPS = 60
_QUIET = 5
"""After so many updates without a newer version a worker leaves; each waits a second."""
_DEADLINE_S = 150.0


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended.

    Attributes
    ----------
    step
        Of the version that its subscriber says it holds; None for none.
    is_step
        Which step's values all of its tensors really are; None: of none, as a whole.
    error
        Kind of what `update` raised; empty for nothing.
    state_corrupted
        Whether that error said that the tensors are of no version.
    seen
        Steps that it had.
    slowest_s
        The longest call of `update`.
    """

    step: int | None
    is_step: int | None
    error: str
    state_corrupted: bool
    seen: tuple[int, ...]
    slowest_s: float


def _there(path: Path, within_s: float) -> bool:
    with suppress(TimeoutError):
        return until(path.exists, str(path), within_s=within_s)
    return False


def trainer(place: str, spec: Kill) -> list[int]:
    """Publish some versions; the second one when the workers have the first."""
    folder, rank = Path(place), dist.get_rank()
    mine: Kill | None = spec if POINTS[spec.point][0] == "trainer" else None
    if mine is not None and mine.rank != rank:
        mine = None
    put_pid(folder, f"trainer-{rank}", os.getpid())
    module = Tree(chunks(whole(1), rank, 2))
    inner = PublishClient.ready

    def ready(mine: PublishClient) -> Any:
        put_pid(folder, f"server-{rank}", mine.pid)
        return inner(mine)

    setattr(PublishClient, "ready", ready)  # noqa: B010
    start = subprocess.Popen

    def started(command: list[str], **more: Any) -> Any:
        return start([c.replace("ckptd.publish.server", _SERVER) for c in command], **more)

    if spec.to:
        (folder / f"kill-{rank}").write_bytes(pickle.dumps(spec))
        os.replace(folder / f"kill-{rank}", folder / "kill")
        os.environ["CKPTD_TEST_KILL"] = f"{folder}:{rank}"
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        setattr(client.subprocess, "Popen", started)  # noqa: B010
    if mine is not None and mine.point in FIRST_POINTS:
        mine.arm(folder)
    done: list[int] = []
    publisher = ckptd.Publisher(
        TRAINER,
        None if spec.to else folder / "at",
        to=spec.to or None,
        anchor_every=2,
        timeout_s=TIMEOUT_S,
        lease_s=30.0,
        linger_s=LINGER_S,
    )
    with publisher:
        for step in range(1, _MOST_STEPS):
            if step == 2:
                for worker in (0, 1):
                    _there(folder / f"first-{worker}", TIMEOUT_S)
                if mine is not None and mine.point not in FIRST_POINTS:
                    mine.arm(folder)
            for name, tensor in chunks(whole(step), rank, 2).items():
                module.get_parameter(name).data.copy_(tensor)
            publication = publisher.publish(step, {"model": module})
            if publication.wait(TIMEOUT_S):
                done.append(step)
                if (len(done) if spec.to else step) >= _VERSIONS:
                    break
                _paced(folder, spec, step)
            else:
                time.sleep(0.2)  # workers hold what they pull
        (folder / f"published-{rank}").touch()
        _there(folder / "looked", 60.0)
    return done


def _paced(folder: Path, spec: Kill, step: int) -> None:
    """Wait until the workers have a version of a store, or somebody was killed.

    They would leave versions out where they are slow, and might not come to their point.
    """
    files = [folder / f"had-{step}-{worker}" for worker in (0, 1)]
    if spec.to:
        with suppress(TimeoutError):
            until(
                lambda: (folder / "killed").exists() or all(f.exists() for f in files),
                "a version that workers have",
                within_s=TIMEOUT_S,
            )


def slots_of(pid: int) -> set[int]:
    """Return the memory files of slots that a process has."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if "ckptd-slot" in os.readlink(entry):
                found.add(entry.stat().st_ino)
    return found


def _is_step(module: Tree, rank: int) -> int | None:
    found = dict(module.state_dict())
    for step in (99, *range(1, _MOST_STEPS)):
        if not differing(found, worker_part(whole(step), rank)):
            return step
    return None


def worker(place: str, spec: Kill) -> WorkerEnd:
    """Update until the last version is there, or nobody publishes any more."""
    folder, rank = Path(place), dist.get_rank()
    mine: Kill | None = spec if POINTS[spec.point][0] == "worker" else None
    if mine is not None and mine.rank != rank:
        mine = None
    pull._MESSAGE_BYTES = 1 << 10  # so that a version comes in several messages
    put_pid(folder, f"worker-{rank}", os.getpid())
    with suppress(TimeoutError):  # who dies before that does not matter here
        until(lambda: all((folder / p).exists() for p in PARTIES), "all", within_s=TIMEOUT_S)
    module = Tree(worker_part(whole(99), rank))
    seen: list[int] = []
    error, state_corrupted, slowest = "", False, 0.0
    subscriber = ckptd.Subscriber(
        WORKER, module, spec.to or folder / "at", group=dist.group.WORLD, timeout_s=TIMEOUT_S
    )
    subscriber._far = spec.far
    if mine is not None and mine.point in FIRST_POINTS:
        mine.arm(folder)
    quiet = 0  # the same on both ranks, as what `update` returns: they leave together
    while quiet < (_QUIET if seen else 3 * _QUIET):
        if (len(seen) if spec.to else max(seen, default=0)) >= _VERSIONS:
            break
        begun = time.monotonic()
        try:
            report = subscriber.update(wait_s=1.0)
        except CkptdError as raised:
            error, state_corrupted = raised.kind, raised.state_corrupted
            break
        finally:
            slowest = max(slowest, time.monotonic() - begun)
        quiet = quiet + 1 if report is None else 0
        if report is not None:
            seen.append(report.version.step)
            if _is_step(module, rank) != report.version.step:
                break
            if len(seen) == 1:
                if mine is not None and mine.point not in FIRST_POINTS:
                    mine.arm(folder)
                (folder / f"first-{rank}").touch()
            (folder / f"had-{report.version.step}-{rank}").touch()
    version = subscriber.version
    held = _is_step(module, rank)
    with suppress(CkptdError):
        subscriber.close()
    return WorkerEnd(
        None if version is None else version.step,
        held,
        error,
        state_corrupted,
        tuple(seen),
        slowest,
    )


@dataclass
class KillWorld:
    """Runs one life of the six processes, and looks at what is left.

    Attributes
    ----------
    trainers, workers
        How the ranks ended.
    late
        The step that a worker had which came afterwards; None: there was no publisher.
    """

    folder: Path
    spec: Kill
    env: dict[str, str] = field(default_factory=dict)
    trainers: list[RankOutcome[list[int]]] = field(default_factory=list)
    workers: list[RankOutcome[WorkerEnd]] = field(default_factory=list)
    late: int | None = None

    def run(self) -> None:
        """Run it: no process is left afterwards."""
        place = str(self.folder)
        worlds: list[Any] = [None, None]

        def world(number: int, function: Callable[..., Any]) -> None:
            worlds[number] = rank_outcomes(
                2,
                function,
                place,
                self.spec,
                deadline_s=_DEADLINE_S,
                grace_s=3 * TIMEOUT_S,
                env={"CKPTD_RUN_DIR": str(self.folder / "run"), **self.env},
            )

        threads = [
            threading.Thread(target=world, args=(i, f)) for i, f in enumerate((trainer, worker))
        ]
        for thread in threads:
            thread.start()
        threads[1].join()
        try:
            self.late = self._late()
            self._memory_is_back()
        finally:
            (self.folder / "looked").touch()
        threads[0].join()
        self.trainers, self.workers = worlds

    def _late(self) -> int | None:
        """Return what a worker gets that is made now, of one process and another rollout."""
        if self._alive("trainer-0") and self._alive("trainer-1"):
            _there(self.folder / "published-0", 6 * TIMEOUT_S)
        module = Tree(worker_part(whole(99), 0, 1))
        layout = WORKER.replace("mesh T = tp:2", "mesh T = tp:1")
        at = self.spec.to or self.folder / "at"
        with ckptd.Subscriber(layout, module, at, timeout_s=TIMEOUT_S) as late:
            report = late.update()
            while self.spec.to and (newer := late.update(2.0)) is not None:
                report = newer
            if report is None:
                assert not differing(dict(module.state_dict()), worker_part(whole(99), 0, 1))
                return None
            wanted = worker_part(whole(report.version.step), 0, 1)
            assert not differing(dict(module.state_dict()), wanted)
            return report.version.step

    def _memory_is_back(self) -> None:
        """Wait until a trainer that lives, and its servers, have no more memory than two slots."""
        for party in ("trainer-0", "trainer-1", "server-0", "server-1"):
            if self._alive(party):
                pid = int((self.folder / party).read_text())
                until(lambda: len(slots_of(pid)) <= 2, f"slots of {party}", within_s=50.0)  # noqa: B023

    def _alive(self, party: str) -> bool:
        return (self.folder / party).exists() and lives(int((self.folder / party).read_text()))

    def servers_end(self) -> None:
        """Return when the servers are gone; else kill them and raise."""
        pids = [int(p.read_text()) for p in self.folder.glob("server-?")]
        try:
            until(lambda: not any(map(lives, pids)), f"servers {pids} end", within_s=30.0)
        finally:
            for pid in pids:
                kill(pid)

    def judge(self) -> None:
        """Assert what holds whatever was killed."""
        spec = self.spec
        told = f"{spec}: trainers {self.trainers}, workers {self.workers}"
        outcomes: list[RankOutcome[Any]] = [*self.trainers, *self.workers]
        for outcome in outcomes:
            assert not outcome.ended_by_harness, f"it hung: {told}"
        ends = [w.value for w in self.workers if w.value is not None]
        for end in ends:
            if end.state_corrupted or (end.error and end.step is None and end.is_step is None):
                assert end.step is None, told
                # Only a rank of its rollout that dies while it writes may leave this.
                assert spec.victim.startswith("worker"), told
            else:
                assert end.is_step is not None, f"a mixture: {told}"
                assert end.is_step == (end.step or 99), told
            assert end.slowest_s < 4 * TIMEOUT_S, told
        victim = spec.victim
        if not victim.startswith("worker"):
            assert len(ends) == 2, told
            assert {e.step for e in ends} == {ends[0].step}, told
            assert not any(e.error for e in ends), told
        if victim.startswith("worker"):
            # The trainer goes on as if nothing were; who comes now gets the newest.
            done = self.trainers[0].value or []
            assert self.trainers[1].value == done, told
            assert done[:1] == [1], told
            assert done[-1] >= _VERSIONS, told
            assert self.late == done[-1], told
        self.servers_end()
        left = list((self.folder / "run").rglob("pub-*.sock"))
        if not victim.startswith("server"):
            assert not left, told
