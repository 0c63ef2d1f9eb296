"""A job under ``ckptd watch``: one rank is slowed, one stopped, one leaves out a collective."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ckptd.errors import CkptdError, DeadlineError
from ckptd_demo.processes import environment, run_ckptd
from ckptd_demo.report import Check, Found, Watched
from ckptd_demo.watchedjob import PID, SKIP, SLOW, STEP

__all__ = ["checks_of_watch", "watch_a_job", "why_not"]

RANKS = 4
FLOOR_S = 2.0
WARM_STEPS = 80
"""A rank is slow beside its own past: some of that is needed first."""
_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"
_URL = re.compile(r"is watched: (\S+)")
_POLL_S = 0.1
_END_S = 30.0
_TAIL_LINES = 25


def why_not() -> str:
    """Return why jobs cannot be watched here, or an empty string."""
    absent = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    return f"not watched without {', '.join(absent)}: pip install 'ckptd[monitor]'" * bool(absent)


def checks_of_watch(watched: Watched) -> list[Check]:
    """Return what has to hold of a watched job."""
    return [
        Check(f"watched: rank {one.rank} {one.what}: {one.wanted}", one.right)
        for one in watched.found
    ]


def watch_a_job(folder: Path, deadline_s: float, say: Callable[[str], None]) -> Watched:
    """Run a job under ``ckptd watch``, plant three faults one after the other, and ask who it was.

    Parameters
    ----------
    folder
        New; the job's files go there.
    deadline_s
        Longest wait for each of its steps.
    say
        Told in a few words what happens, the address of the page among it.

    Raises
    ------
    DeadlineError
        Something did not happen in time; the notes show the log. No process is left.
    CkptdError
        The job ended.
    """
    folder.mkdir(parents=True)
    with _started(folder) as job:
        teller = _Teller(folder, job, deadline_s, say)
        login = teller.until("its page", teller.login)
        say(f"a job of {RANKS} ranks is watched; open {login}")
        teller.until("its first steps", lambda: teller.step() >= WARM_STEPS)
        found = [teller.slow(1), teller.stop(2), teller.skip(3)]
    return Watched(ranks=RANKS, floor_s=FLOOR_S, url=login.partition("?")[0], found=found)


class _Teller:
    def __init__(
        self, folder: Path, job: _Job, deadline_s: float, say: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._job = job
        self._deadline_s = deadline_s
        self._say = say

    def login(self) -> str:
        found = _URL.search(self._job.text())
        return found.group(1) if found else ""

    def step(self) -> int:
        path = self._folder / STEP
        return int(path.read_text()) if path.exists() else 0

    # --- faults ---------------------------------------------------------------------------------

    def slow(self, rank: int) -> Found:
        path = self._folder / SLOW.format(rank)
        path.touch()
        found = self._found("slowed", rank, "slow rank", 0.0)
        path.unlink()
        return found

    def stop(self, rank: int) -> Found:
        pid = int((self._folder / PID.format(rank)).read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            return self._found("stopped", rank, "non-communication hang", FLOOR_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    def skip(self, rank: int) -> Found:
        (self._folder / SKIP.format(rank)).touch()
        return self._found("leaves out a collective", rank, "mismatch", 0.0)

    def _found(self, what: str, rank: int, wanted: str, floor_s: float) -> Found:
        """Wait for the first incident after now, and compare it with what was done."""
        at = time.time()
        self._say(f"rank {rank} {what}")
        told = self.until(f"word of rank {rank}, {what}", lambda: self._first_since(at))
        named = [s["name"] for s in told["verdict"]["suspects"] if s["target"] == "rank"]
        found = Found(
            what=what,
            rank=rank,
            wanted=wanted,
            said=told["kind"],
            suspects=[f"{s['target']} {s['name']}" for s in told["verdict"]["suspects"]],
            evidence=told["verdict"]["evidence"][0],
            after_s=told["opened_at"] - at,
            floor_s=floor_s,
            right=_same(told["kind"], wanted) and named == [str(rank)],
        )
        self._say(f"{found.said}: {', '.join(found.suspects)}, after {found.after_s:.1f} s")
        return found

    def _first_since(self, at: float) -> dict[str, Any]:
        done = run_ckptd(["incidents", "--daemon", self.login(), "--json"], self._deadline_s)
        told = msgspec.json.decode(done.stdout)["incidents"]
        later = [i for i in told if i["opened_at"] >= at]
        return min(later, key=lambda i: float(i["opened_at"]), default={})

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """Return what `look` says once that is true."""
        end = time.monotonic() + self._deadline_s
        while not (found := look()):
            if time.monotonic() > end:
                raise self._job.failed(DeadlineError(f"the watched job: no sign of {what}"))
            if self._job.process.poll() is not None:
                raise self._job.failed(CkptdError("the watched job ended"))
            time.sleep(_POLL_S)
        return found


def _same(said: str, wanted: str) -> bool:
    # A call that is left out shows as another call, or as the same call of another step.
    return said == wanted or {said, wanted} == {"desync", "mismatch"}


class _Job:
    """The watched command, and what it says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.log = folder / "watch.log"
        command = ["watch", "--job", f"demo-{os.getpid()}", "--floor", f"train={FLOOR_S:g}"]
        command += ["--", sys.executable]
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        command += ["--local-addr=127.0.0.1", "--max-restarts=0"]
        command += ["--module", "ckptd_demo.watchedjob", str(folder)]
        # To a file that others may read, `ckptd watch` would not write the page's token.
        with os.fdopen(
            os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
        ) as log:
            self.process = psutil.Popen(
                [sys.executable, "-c", _CLI, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def failed(self, error: CkptdError) -> CkptdError:
        error.add_note("\n".join(self.text().splitlines()[-_TAIL_LINES:]))
        return error

    def end(self) -> None:
        """End it with all its processes."""
        ranks = list(self._ranks())
        self.process.terminate()  # it ends the launcher, which ends its ranks
        try:
            self.process.wait(_END_S)
        except psutil.TimeoutExpired:
            self.process.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()

    def _ranks(self) -> Iterator[psutil.Process]:
        for path in self._folder.glob(PID.format("*")):
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                process = psutil.Process(int(path.read_text()))
                if process.create_time() >= self.process.create_time():
                    yield process


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[_Job]:
    job = _Job(folder)
    try:
        yield job
    finally:
        job.end()
