"""Slurm's own commands: nodes of an allocation, their states, steps, and requests.

No shell is involved, and no output is trusted: names have to look like names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.elastic.launchers import MachineState
from ckptd.errors import DeadlineError, StoreError

__all__ = ["NodeSaid", "Slurm", "parse_nodes"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_STATE = re.compile(r"(?:^|\s)State=(\S+)")
_ADDRESS = re.compile(r"\sNodeAddr=([A-Za-z0-9._:-]+)")
_REASON = re.compile(r"\sReason=(.*?)(?:\s\[[^\s\[\]]+@[^\[\]]+\])?\s*$")
_JOB = re.compile(r"[1-9][0-9]{0,18}")

# Words of a node's state, https://slurm.schedmd.com/sinfo.html (NODE STATE CODES).
_DOWN = frozenset(
    {
        "DOWN",
        "ERROR",
        "UNKNOWN",
        "FUTURE",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWERING_UP",
        "REBOOT_ISSUED",
        "INVAL",
        "INVALID_REG",
    }
)
_DRAINING = frozenset(
    {
        "DRAIN",
        "DRAINING",
        "DRAINED",
        "FAIL",
        "FAILING",
        "MAINT",
        "REBOOT",
        "REBOOT_REQUESTED",
        "POWER_DOWN",
    }
)


@dataclass(frozen=True)
class NodeSaid:
    """State of a node, by the scheduler.

    Attributes
    ----------
    name, state
        Name and state in ckptd's words.
    words, reason
        The state in the scheduler's words, and its reason.
    address
        A name or an address by which other nodes reach it.
    """

    name: str
    state: MachineState
    words: str
    reason: str
    address: str


def parse_nodes(text: str) -> dict[str, NodeSaid]:
    """Read ``scontrol --oneliner show node``.

    Raises
    ------
    StoreError
        A line is none of its lines.
    """
    found: dict[str, NodeSaid] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name = line.partition(" ")[0].removeprefix("NodeName=")
        state = _STATE.search(line)
        if not _NAME.fullmatch(name) or state is None:
            raise _refused("scontrol show node", line[:200])
        reason = _REASON.search(line)
        address = _ADDRESS.search(line)
        found[name] = NodeSaid(
            name=name,
            state=_state(state.group(1)),
            words=state.group(1),
            reason=reason.group(1).strip() if reason else "",
            address=address.group(1) if address else name,
        )
    return found


def _state(words: str) -> MachineState:
    # A star: it does not respond. Other signs are about power and reboots, told as words too.
    parts = {part.rstrip("~#!%$@^-") for part in words.upper().split("+")}
    if any(part.endswith("*") for part in parts) or parts & _DOWN:
        return MachineState.DOWN
    return MachineState.DRAINING if parts & _DRAINING else MachineState.UP


class Slurm:
    """Calls Slurm's commands, each with a deadline.

    Parameters
    ----------
    environ
        Environment of the commands; ``SLURM_CONF`` in it says which cluster.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    def hostnames(self, nodelist: str, timeout_s: float) -> list[str]:
        """Return the names in a list such as ``n[1-3],gpu07``."""
        if not nodelist or nodelist.startswith("-"):
            raise _refused("a list of nodes", nodelist)
        names = self._run(["scontrol", "show", "hostnames", nodelist], timeout_s).split()
        for name in names:
            if not _NAME.fullmatch(name):
                raise _refused("scontrol show hostnames", name)
        return names

    def nodes(self, names: Iterable[str], timeout_s: float) -> dict[str, NodeSaid]:
        """Return what is said of these nodes; those that nothing is said of are left out."""
        listed = ",".join(names)
        text = self._run(["scontrol", "--oneliner", "show", "node", listed], timeout_s)
        return parse_nodes(text)

    def allocated(self, job: str, timeout_s: float) -> list[str]:
        """Return the nodes that a job has now: those that failed are gone from the list."""
        said = self._run(["squeue", "--noheader", f"--jobs={_job(job)}", "--format=%N"], timeout_s)
        return self.hostnames(said.strip(), timeout_s) if said.strip() else []

    def binds(self, timeout_s: float) -> bool:
        """Return whether this cluster binds tasks to cores."""
        text = self._run(["scontrol", "show", "config"], timeout_s)
        plugin = re.search(r"^TaskPlugin\s*=\s*(\S+)", text, re.MULTILINE)
        return plugin is not None and plugin.group(1) not in ("task/none", "(null)")

    def steps(self, job: str, timeout_s: float) -> dict[str, str]:
        """Return the ids of a job's steps by their names."""
        text = self._run(
            ["squeue", "--noheader", "--steps", f"--jobs={_job(job)}", "--format=%i %j"], timeout_s
        )
        pairs = (line.split(None, 1) for line in text.splitlines() if line.strip())
        return {pair[1].strip(): pair[0] for pair in pairs if len(pair) == 2}

    def kill_step(self, step: str, timeout_s: float) -> None:
        """Have all processes of a step killed; one that is gone is no error."""
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?\.[0-9]+", step):
            raise _refused("a step", step)
        self._run(["scancel", "--quiet", "--signal=KILL", step], timeout_s, may_fail=True)

    def requeue(self, job: str, timeout_s: float) -> None:
        """Have a running job ended and submitted again."""
        self._run(["scontrol", "requeue", _job(job)], timeout_s)

    def may_requeue(self, job: str, timeout_s: float) -> bool:
        """Return whether a job was submitted so that it may be submitted again."""
        text = self._run(["scontrol", "--oneliner", "show", "job", _job(job)], timeout_s)
        return re.search(r"\sRequeue=1\s", text) is not None

    def _run(self, argv: Sequence[str], timeout_s: float, *, may_fail: bool = False) -> str:
        done = self._finished(argv, timeout_s)
        if done.returncode and not may_fail:
            raise _refused(" ".join(argv)[:200], (done.stderr or done.stdout).strip()[:300])
        return done.stdout

    def _finished(self, argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                argv,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(timeout_s, 0.01),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                "the scheduler did not answer in time",
                where=" ".join(argv)[:200],
                wanted=f"within {timeout_s:g} s",
            ) from error
        except OSError as error:
            raise StoreError(
                "a command of Slurm could not be run",
                where=argv[0],
                found=error,
                hint="is Slurm installed on this node, and in PATH?",
            ) from error


def _job(job: str) -> str:
    if not _JOB.fullmatch(job):
        raise _refused("a job's number", job)
    return job


def _refused(where: str, found: str) -> StoreError:
    return StoreError("Slurm rejected the request", where=where, found=found)
