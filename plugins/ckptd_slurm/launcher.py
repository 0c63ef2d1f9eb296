"""`SlurmLauncher`: launchers as steps of a Slurm allocation, one on each of its nodes.

The allocation is kept: what is lost or stuck is restarted as another step, which takes tens of
milliseconds, and nothing waits for Slurm to find out that a node is dead.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ckptd.elastic.launchers import Command, Hint, Launcher, Machine, MachineState
from ckptd.errors import DeadlineError, RefusedError, StoreError, UsageError
from ckptd_slurm.tools import NodeSaid, Slurm

__all__ = ["IN_BATCH", "SRUN", "SlurmLauncher"]

IN_BATCH = "call ckptd slurm in a batch script, and submit it with sbatch"

SRUN = (
    "srun",
    # A lost node or a failed task ends neither the step nor the others.
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    # Beside the step of a launcher that may not be quite gone, and with all that the job has.
    "--overlap",
    "--mem=0",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--input=none",
    "--quiet",
)
"""How a launcher's step is started, but for its node and its name."""

# Inherited from the batch step they would bind, shrink or contradict the step's own options.
_NOT_INHERITED = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_HINT",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_TRES_PER_TASK",
)
_POLL_S = 0.05
_ASK_S = 0.5
_UNREACHABLE_S = 10.0
_FEW_S = 30.0


class SlurmLauncher(Launcher):
    """Starts launchers in the allocation that this process runs in.

    Parameters
    ----------
    command
        Makes a launcher's command line from a node's name.
    environ
        Of the batch step: ``SLURM_JOB_ID`` and ``SLURM_JOB_NODELIST`` name the allocation.
    drain_s
        Slurm does not say when a node that is drained will be taken: what hints say, in seconds.
    timeout_s
        For the first question to Slurm.

    Attributes
    ----------
    job, names
        Number of the job, and the names of its nodes.
    environ
        Of the launchers.

    Raises
    ------
    UsageError
        This process runs in no allocation.
    RefusedError
        A job of several components.
    """

    def __init__(
        self,
        command: Command,
        *,
        environ: Mapping[str, str] | None = None,
        drain_s: float = 60.0,
        timeout_s: float = 30.0,
    ) -> None:
        env = dict(os.environ if environ is None else environ)
        self.job, nodelist = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
        if not self.job or not nodelist:
            raise UsageError(
                "not in a Slurm allocation",
                where="SLURM_JOB_ID, SLURM_JOB_NODELIST",
                hint=IN_BATCH,
            )
        if env.get("SLURM_HET_SIZE"):
            raise RefusedError(
                "heterogeneous jobs (several components) are not supported",
                where="SLURM_HET_SIZE",
                hint="submit a job of one component; its nodes may differ",
            )
        self._command, self._drain_s = command, drain_s
        self.environ = {k: v for k, v in env.items() if not _is_dropped(k)}
        self._slurm = Slurm(env)
        if self._slurm.binds(timeout_s):
            # A step of one task would be bound to one core, and its workers with it.
            self.environ["SLURM_CPU_BIND"] = "quiet,none"
        self.names = self._slurm.hostnames(nodelist, timeout_s)
        self._steps: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._codes: dict[str, int] = {}
        self._hinted: set[str] = set()
        self._numbers = itertools.count(1)

    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self._known(nodes)
        for node in nodes:
            if self._runs(node):
                continue
            if time.monotonic() >= end:
                raise _late(f"start {node}", timeout_s)
            self._steps[node] = self._spawn(node)

    def stop(self, nodes: Sequence[str] | None, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        names = list(self.names) if nodes is None else list(nodes)
        self._known(names)
        left = {name for name in names if self._runs(name)}
        for name in left:
            # It may not have a step yet: then this ends it.
            self._steps[name][1].terminate()
        self._kill(left, end, timeout_s)
        for name in names:
            self._steps.pop(name, None)
            self._codes.pop(name, None)

    def address(self, node: str, timeout_s: float) -> str:
        """Return the name or the address by which others reach a node of the cluster."""
        return self._slurm.nodes([node], timeout_s)[node].address

    def may_requeue(self, timeout_s: float) -> bool:
        """Return whether the job was submitted so that it may start again."""
        return self._slurm.may_requeue(self.job, timeout_s)

    def running(self) -> list[str]:
        """Return the nodes on which launchers run, without a question to Slurm."""
        return [name for name in self.names if self._runs(name)]

    def codes(self) -> dict[str, int]:
        """Return with what launchers have ended, by node."""
        return {name: self._codes[name] for name in self.names if name in self._codes}

    def machines(self, timeout_s: float) -> tuple[Machine, ...]:
        end = time.monotonic() + timeout_s
        allocated = set(self._slurm.allocated(self.job, timeout_s))
        said = self._slurm.nodes(self.names, max(end - time.monotonic(), 0.0))
        return tuple(self._machine(n, said.get(n), n in allocated) for n in sorted(self.names))

    def hints(self, timeout_s: float) -> tuple[Hint, ...]:
        draining = {
            said.name: said
            for said in self._slurm.nodes(self.names, timeout_s).values()
            if said.state is MachineState.DRAINING
        }
        new = sorted(draining.keys() - self._hinted)
        self._hinted = set(draining)
        return tuple(
            Hint(node=name, seconds=self._drain_s, reason=_reason(draining[name])) for name in new
        )

    def requeue(self, reason: str, timeout_s: float) -> bool:
        """Have the job ended and submitted again. Slurm kills the batch step some seconds later.

        It starts again after two minutes at the earliest: Slurm lets nodes settle. That is set when
        the last process is gone, so only an order from outside of the job can take it back.
        """
        self._slurm.requeue(self.job, timeout_s)
        return True

    def close(self) -> None:
        self.stop(None, _FEW_S)

    # --- inside -----------------------------------------------------------------------------------

    def _known(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            if node not in self.names:
                raise UsageError(
                    "unknown node of this job",
                    kind="unknown-node",
                    where=node,
                    wanted=", ".join(self.names[:20]),
                )

    def _runs(self, node: str) -> bool:
        step = self._steps.get(node)
        if step is None:
            return False
        code = step[1].poll()
        if code is not None:
            self._codes[node] = code
            del self._steps[node]
        return code is None

    def _spawn(self, node: str) -> tuple[str, subprocess.Popen[bytes]]:
        name = f"ckptd-{node}-{next(self._numbers)}-{os.getpid()}"
        argv = [*SRUN, f"--nodelist={node}", f"--job-name={name}", *self._command(node)]
        try:
            # Its own group: a Ctrl-C is for the batch step, which says goodbye.
            process = subprocess.Popen(argv, env=self.environ, start_new_session=True)
        except OSError as error:
            raise StoreError("srun could not be started", where=node, found=error) from error
        self._codes.pop(node, None)
        return name, process

    def _kill(self, left: set[str], end: float, timeout_s: float) -> None:
        given_up = min(end, time.monotonic() + _UNREACHABLE_S)
        asked: dict[str, float] = {}
        try:
            while left := {name for name in left if self._runs(name)}:
                now = time.monotonic()
                if now >= given_up:
                    break
                if any(now - asked.get(name, -math.inf) >= _ASK_S for name in left):
                    steps = self._slurm.steps(self.job, max(end - now, 0.0))
                    for name in left:
                        asked[name] = now
                        if (step := steps.get(self._steps[name][0])) is not None:
                            self._slurm.kill_step(step, max(end - now, 0.0))
                time.sleep(_POLL_S)
        finally:
            # The node, or Slurm, does not answer: Slurm kills the step there once it does.
            for name in left:
                with suppress(ProcessLookupError):
                    os.killpg(self._steps[name][1].pid, signal.SIGKILL)
        for name in left:
            try:
                self._steps[name][1].wait(max(end - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                raise _late(f"stop {name}", timeout_s) from None

    def _machine(self, name: str, said: NodeSaid | None, allocated: bool) -> Machine:
        running = self._runs(name)
        state = said.state if said is not None and allocated else MachineState.DOWN
        reason = _reason(said) if said is not None and state is not MachineState.UP else ""
        if not allocated:
            reason = f"the allocation has lost it: {reason}" if reason else "the allocation lost it"
        return Machine(
            name=name, state=state, running=running, reason=reason, code=self._codes.get(name)
        )


def _reason(said: NodeSaid) -> str:
    return f"{said.words}: {said.reason}" if said.reason else said.words


def _is_dropped(name: str) -> bool:
    return name in _NOT_INHERITED or name.startswith(("SRUN_", "SLURM_CPU_BIND"))


def _late(what: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(
        "steps were not started or stopped in time", where=what, wanted=f"within {timeout_s:g} s"
    )
