"""Inside of a rank process of a test: torchrun's environment, gloo's interface, results, stacks.

In it: process group, redirected output, what kills it when the test is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError

__all__ = ["STACKS_SIGNAL", "RankFiles", "RankResult", "RankSpec", "main"]

STACKS_SIGNAL = signal.SIGQUIT
"""Makes a rank write its stacks. Not SIGUSR1: code under test may use that one."""

# The harness kills a rank at its deadline. Should the harness itself be stuck, the rank ends here.
_BACKSTOP_S = 30.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Order to a rank: its number, the job store's port, the function to call, its deadline.

    Attributes
    ----------
    group
        Whether it joins the process group first.
    """

    rank: int
    nproc: int
    port: int
    payload: bytes
    folder: str
    deadline_s: float
    cwd: str
    env: Mapping[str, str]
    group: bool = True


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of the function: `returned` with `value`, or raised `error` with traceback `trace`."""

    returned: bool = False
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class RankFiles:
    """The files through which a rank reports; they outlive it, however it ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.result = folder / f"{rank}.result"
        self.stacks = folder / f"{rank}.stacks"
        self.log = folder / f"{rank}.log"

    def write_result(self, result: RankResult) -> None:
        """Publish the result under its name in one step."""
        temporary = self.result.with_suffix(".partial")
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(self.result)

    def read_result(self) -> RankResult:
        """Return the result, or an empty one when the rank published none."""
        if not self.result.exists():
            return RankResult()
        result = pickle.loads(self.result.read_bytes())
        assert isinstance(result, RankResult)
        return result

    def read_stacks(self) -> str:
        """Return the stacks that the rank wrote, or an empty string."""
        return _read(self.stacks)

    def read_log(self) -> str:
        """Return what the rank printed."""
        return _read(self.log)


def main(spec: RankSpec) -> None:
    """Run one rank: join the world, call the function, report."""
    files = RankFiles(Path(spec.folder), spec.rank)
    os.setpgid(0, 0)
    _redirect_output(files.log)
    with files.stacks.open("w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        faulthandler.dump_traceback_later(spec.deadline_s + _BACKSTOP_S, file=stacks, exit=True)
        threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
        os.chdir(spec.cwd)
        os.environ.clear()
        os.environ.update(spec.env)
        os.environ.update(_torchrun_env(spec))
        _report(files, _call(spec))
        # A thread that keeps the process from ending must show up in the stacks, so they stay
        # available until the interpreter is done with its threads.
        threading._shutdown()  # type: ignore[attr-defined]


def _call(spec: RankSpec) -> RankResult:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    try:
        if spec.group:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=spec.deadline_s))
        function, args = pickle.loads(spec.payload)
        value = function(*args)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException as error:  # noqa: BLE001
        # SystemExit too: a rank that calls sys.exit() has not returned.
        return RankResult(error=error, trace=traceback.format_exc())
    return RankResult(returned=True, value=value)


def _report(files: RankFiles, result: RankResult) -> None:
    try:
        pickle.loads(pickle.dumps(result))
    except Exception as error:  # noqa: BLE001
        # Many exceptions, and some results, do not survive pickling; their text always does.
        what = "result" if result.returned else "error"
        result = RankResult(
            error=CkptdError(
                f"the {what} of a rank cannot be sent back",
                wanted="something that pickle can carry",
                found=f"{result.value if result.returned else result.error!r}: {error}",
            ),
            trace=result.trace,
        )
    files.write_result(result)


def _torchrun_env(spec: RankSpec) -> dict[str, str]:
    rank, nproc = str(spec.rank), str(spec.nproc)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "ROLE_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "ROLE_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.port),
        "OMP_NUM_THREADS": "1",
        # The host's own name need not resolve on a test machine.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # The job store is served outside the ranks, as by a torchrun agent.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ckptd-test",
    }


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _die_with_parent() -> None:
    """Kill the rank and what it started when the process that asked for it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
