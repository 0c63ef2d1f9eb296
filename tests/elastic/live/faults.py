"""What can go wrong in a real job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil

from ckptd.elastic.messages import OrderKind
from tests.elastic.live.job import SETTINGS, SOAK, LiveJob, send
from tests.elastic.live.machines import Machines

__all__ = ["kinds", "play_fault"]


def kinds(job: LiveJob) -> dict[str, Callable[[], str]]:
    """Return the faults that this job can have, by name."""
    faults = _Faults(job)
    found = {n: getattr(faults, n) for n in dir(_Faults) if not n.startswith("_")}
    if not job.lines:
        del found["cut_line"], found["cut_members"]
    if job.mode != SOAK:
        for name in OF_MACHINES:
            del found[name]
    return found


OF_MACHINES = (
    "cut_node",
    "full_disk",
    "jump_clock",
    "kill_daemon",
    "kill_follower",
    "slow_disk",
)


def play_fault(job: LiveJob) -> None:
    """Let one thing go wrong; those that are most common outside, most often."""
    all_kinds = kinds(job)
    often = ["kill_worker", "stop_worker", "kill_node"]
    often += ["cut_line", "cut_members"] * 2 if job.lines else []
    often += ["stop_worker"] * 3 if job.mode == "watched" else []
    often += OF_MACHINES if job.mode == SOAK else []
    name = job.rng.choice([*all_kinds, *often])
    at = time.monotonic() - job.begun
    what = all_kinds[name]()
    job.faults.append(f"{at:.1f} s: {name.replace('_', ' ')} {what}".strip())


class _Faults:
    def __init__(self, job: LiveJob) -> None:
        self._job, self._rng = job, job.rng

    def _one(self) -> str:
        alive = self._job.nodes.alive()
        return self._rng.choice(alive) if alive else self._job.names[0]

    def _launcher(self, name: str) -> psutil.Process:
        return self._job.nodes.processes[name]

    # --- processes --------------------------------------------------------------------------------

    def kill_worker(self) -> str:
        workers = self._job.workers()
        if not workers:
            return ""
        victim = self._rng.choice(workers)
        send(victim, signal.SIGKILL)
        return self._job.node_of(victim.pid)

    def stop_worker(self) -> str:
        """Stop a rank; somebody notices after a while, the daemon where there is one."""
        job, workers = self._job, self._job.workers()
        if not workers:
            return ""
        victim = self._rng.choice(workers)
        send(victim, signal.SIGSTOP)
        if job.mode not in ("watched", SOAK):
            job.then(self._rng.uniform(0.5, 3), lambda: job.order(OrderKind.RESTART))
        job.then(self._rng.uniform(3, 15), lambda: send(victim, signal.SIGCONT))
        return job.node_of(victim.pid)

    def zombies(self) -> str:
        """Freeze a node with its ranks for longer than its lease; the ranks wake up first."""
        job, name = self._job, self._one()
        launcher, workers = self._launcher(name), self._job.workers(name)
        for process in [launcher, *workers]:
            send(process, signal.SIGSTOP)
        seconds = SETTINGS["lease_s"] + self._rng.uniform(1, 5)
        job.gone(name, seconds + 2.0)
        for worker in workers:
            job.then(seconds, lambda worker=worker: send(worker, signal.SIGCONT))
        job.then(seconds + self._rng.uniform(0.2, 2), lambda: send(launcher, signal.SIGCONT))
        return name

    def kill_node(self) -> str:
        job, name = self._job, self._one()
        if self._launcher(name).poll() is None:
            job.gone(name)
            job.nodes.kill(name)
            if self._rng.random() < 0.85:
                job.then(self._rng.uniform(0.2, 8), lambda: job.back(name))
        return name

    def stop_node(self) -> str:
        """Freeze a launcher alone: its workers train on until their lease is over."""
        name = self._one()
        launcher = self._launcher(name)
        send(launcher, signal.SIGSTOP)
        seconds = self._rng.uniform(0.5, 14)
        self._job.gone(name, seconds)
        self._job.then(seconds, lambda: send(launcher, signal.SIGCONT))
        return name

    def kill_controller(self) -> str:
        for process in self._job.processes(" controller "):
            send(process, signal.SIGKILL)
        return ""

    def kill_zygote(self) -> str:
        found = self._job.processes("ckptd.elastic.torch.session.zygote")
        if found:
            send(self._rng.choice(found), signal.SIGKILL)
        return ""

    def kill_agent(self) -> str:
        found = self._job.processes("-m ckptd.checkpoint.agent ")
        if not found:
            return ""
        victim = self._rng.choice(found)
        words = victim.info["cmdline"]
        name: str = words[words.index("--node") + 1]
        self._job.gone(name)
        send(victim, signal.SIGKILL)
        return name

    # --- lines ------------------------------------------------------------------------------------

    def cut_line(self) -> str:
        """Cut one node off from the controller, which goes on."""
        name = self._rng.choice(self._job.names)
        self._cut(name, self._rng.uniform(0.5, 2.5 * SETTINGS["lease_s"]))
        return name

    def cut_members(self) -> str:
        """Cut off all nodes that train: who is left must not begin before their lease is over."""
        members = sorted({row.node for row in self._job.newest()})
        seconds = self._rng.uniform(0.5, 2.5 * SETTINGS["lease_s"])
        for name in members:
            self._cut(name, seconds)
        return " ".join(members)

    def _cut(self, name: str, seconds: float) -> None:
        line = self._job.lines[name]
        line.cut = True
        self._job.gone(name, seconds)
        self._job.then(seconds, lambda: setattr(line, "cut", False))

    # --- machines ---------------------------------------------------------------------------------

    @property
    def _machines(self) -> Machines:
        assert self._job.machines is not None
        return self._job.machines

    def cut_node(self) -> str:
        """Cut one node off from all others, without a word to any process."""
        job, name = self._job, self._rng.choice(self._job.names)
        node, seconds = job.names.index(name), self._rng.uniform(0.5, 2.5 * SETTINGS["lease_s"])
        if name not in job.cut:
            job.cut.add(name)
            self._machines.network.cut(node)
            job.gone(name, seconds)
            job.then(seconds, lambda: job.mend(name))
        return f"{name} for {seconds:.1f} s"

    def slow_disk(self) -> str:
        """Let each flush of a node take long."""
        name, late = self._one(), self._rng.choice([0.05, 0.5, 3.0])
        self._machines.slow_disk(name, late)
        self._job.then(self._rng.uniform(2, 15), lambda: self._machines.slow_disk(name, 0.0))
        return f"{name} by {late} s"

    def full_disk(self) -> str:
        """Leave the root no room."""
        self._machines.fill_disk()
        self._job.then(self._rng.uniform(2, 15), self._machines.empty_disk)
        return ""

    def jump_clock(self) -> str:
        """Let a node's clock jump; it stays so until all heals, when it jumps back."""
        name = self._rng.choice(self._job.names)
        seconds = self._rng.choice([-86400.0, -3600.0, -5.0, 5.0, 3600.0, 50_000.0])
        self._machines.set_clock(name, seconds)
        return f"{name} by {seconds:g} s"

    def kill_daemon(self) -> str:
        for process in self._job.processes(" serve "):
            send(process, signal.SIGKILL)
        return ""

    def kill_follower(self) -> str:
        self._job.follower.kill()
        self._job.follower.wait()
        return ""

    # --- orders -----------------------------------------------------------------------------------

    def restart(self) -> str:
        self._job.order(OrderKind.RESTART)
        return ""

    def exclude(self) -> str:
        return self._without(OrderKind.EXCLUDE)

    def drain(self) -> str:
        return self._without(OrderKind.DRAIN)

    def _without(self, kind: OrderKind) -> str:
        job, name = self._job, self._one()
        job.order(kind, name)
        seconds = self._rng.uniform(1, 8)
        job.gone(name, seconds)
        job.then(seconds, lambda: job.order(OrderKind.ADD, name))
        return name

    def pause(self) -> str:
        job = self._job
        job.order(OrderKind.PAUSE)
        for seconds in (2.0, 6.0):
            job.then(seconds, lambda: job.order(OrderKind.RESUME))
        return ""
