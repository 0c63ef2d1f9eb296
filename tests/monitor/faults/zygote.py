"""A process that has imported PyTorch and forks ranks: a job starts in a tenth of a second.

It does what a launcher does: looks after its ranks ten times a second, and when one has ended with
an error it ends the others. It never starts a thread, so that its forks are clean.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tests.monitor.faults.case import Case

__all__ = ["Ask", "Zygote"]

REPO = Path(__file__).resolve().parents[3]
_LOOK_S = 0.1
_TERM_S = 3.0
_ANSWER_S = 120.0


class Ask(msgspec.Struct, frozen=True):
    """One request: start a job, tell how its ranks are, or end them."""

    what: str
    case: Case | None = None
    folder: str = ""
    environment: dict[str, str] = {}
    per_node: list[dict[str, str]] = []


_ask = msgspec.json.Decoder(Ask)
_told = msgspec.json.Decoder(dict[int, int | None])


class Zygote:
    """Runs one job at a time; close it, or leave its ``with`` block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.monitor.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def start(
        self,
        case: Case,
        folder: Path,
        environment: Mapping[str, str],
        per_node: list[dict[str, str]] | None = None,
    ) -> list[int]:
        """Start the ranks of `case`; return their process ids."""
        ask = Ask("start", case, str(folder), dict(environment), per_node or [{}] * case.nodes)
        told = self._request(ask)
        return [pid for _, pid in sorted(told.items()) if pid is not None]

    def look(self) -> dict[int, int | None]:
        """Return how each rank has ended (negative: a signal); None for those that run."""
        return self._request(Ask("look"))

    def end(self) -> None:
        """Kill what still runs."""
        self._request(Ask("end"))

    def _request(self, ask: Ask) -> dict[int, int | None]:
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            raise RuntimeError("the zygote has no pipes")
        sink.write(msgspec.json.encode(ask) + b"\n")
        sink.flush()
        if not select.select([source], [], [], _ANSWER_S)[0]:
            raise TimeoutError(f"the zygote does not answer to {ask.what}")
        line = source.readline()
        if not line:
            raise RuntimeError("the zygote is gone")
        return _told.decode(line)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Launcher:
    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        self.ends: dict[int, int | None] = {}
        self.failed_at = 0.0

    def start(self, ask: Ask) -> dict[int, int | None]:
        if ask.case is None:
            raise ValueError("nothing to start")
        self.end()
        self.ranks, self.ends, self.failed_at = {}, {}, 0.0
        for rank in range(ask.case.world):
            self.ranks[rank] = self._fork(ask, ask.case, rank)
            self.ends[rank] = None
        return dict(self.ranks)

    def _fork(self, ask: Ask, case: Case, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            code = _be_rank(ask, case, rank)
        except BaseException:  # noqa: BLE001 - the log tells it, and the exit status
            traceback.print_exc()
        finally:
            with suppress(ValueError):
                sys.stderr.flush()
            os._exit(code)

    def look(self) -> dict[int, int | None]:
        for rank, pid in self.ranks.items():
            if self.ends[rank] is None:
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    self.ends[rank] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if any(self.ends.values()):
            self.failed_at = self.failed_at or now
            late = now > self.failed_at + _TERM_S
            self._signal(signal.SIGKILL if late else signal.SIGTERM)
        return dict(self.ends)

    def _signal(self, number: int) -> None:
        for rank, pid in self.ranks.items():
            if self.ends[rank] is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end(self) -> dict[int, int | None]:
        self._signal(signal.SIGKILL)
        for rank, pid in self.ranks.items():
            if self.ends[rank] is None:
                self.ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return dict(self.ends)


def _be_rank(ask: Ask, case: Case, rank: int) -> int:
    """Be a rank in the forked process; return its exit code."""
    folder = Path(ask.folder)
    fd = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(fd, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(ask.environment)
    os.environ.update(ask.per_node[case.node(rank)])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.world), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    from tests.monitor.faults.trainer import train

    train(case, rank, folder)
    return 0


def main() -> None:
    """Serve until standard input ends."""
    import torch._dynamo  # noqa: F401 - forks have it then

    import tests.monitor.faults.trainer  # noqa: F401

    gc.collect()
    gc.freeze()  # see `ckptd.testing.frozen`
    launcher = _Launcher()
    source = sys.stdin.fileno()
    rest = b""
    try:
        while True:
            if select.select([source], [], [], _LOOK_S)[0]:
                more = os.read(source, 1 << 16)
                if not more:
                    return
                rest += more
            launcher.look()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                ask = _ask.decode(line)
                told = launcher.start(ask) if ask.what == "start" else getattr(launcher, ask.what)()
                sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
                sys.stdout.buffer.flush()
    finally:
        launcher.end()


if __name__ == "__main__":
    main()
