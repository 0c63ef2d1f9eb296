"""A real job of launchers, and the hands that hurt it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from ckptd.elastic.log import MembershipLog
from ckptd.elastic.messages import Order, OrderKind, Status
from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places
from ckptd.errors import CkptdError
from ckptd.store import open_store
from ckptd_demo.elasticjob import FINISH, ElasticSpec, RankRow, TrainedRow
from ckptd_demo.processes import Nodes, free_port, read_rows
from ckptd_demo.spec import GptShape
from tests.elastic.live.machines import Machines
from tests.elastic.live.proxy import Line
from tests.elastic.live.published import TAKEN, WRONG

__all__ = ["MODES", "SETTINGS", "SOAK", "STEPS", "LiveJob", "send", "spec_in"]

STEPS = 500
_ROOT = Path(__file__).parents[3]
_CALL_S = 8.0
MODES = ("session", "two-slots", "cut", "once", "watched")
"""``session``: one rank a node, which goes on in its process. ``two-slots``: two. ``cut``: as the
first, and lines to the controller are cut. ``once``: a script without session. ``watched``: a
daemon notices stopped ranks by itself."""
SOAK = "soak"
"""Four nodes on machines of their own, with a daemon, a publisher and a worker that follows it."""
SETTINGS = {
    "silent_s": 3,
    "lease_s": 8,
    "settle_s": 2,
    "grow_s": 2,
    "nodes_s": 120,
    "gather_s": 20,
}
_THROUGH_LINE = f"""
import os, sys
sys.path.insert(0, {str(_ROOT)!r})
from ckptd.elastic import link
lines = dict(pair.split('=') for pair in os.environ['LIVE_LINES'].split(','))
port, dial = lines[sys.argv[sys.argv.index('--node') + 1]], link.dial
link.dial = lambda address, **rest: dial('127.0.0.1:' + port, **rest)
from ckptd.cli.main import main
main(sys.argv[1:])
"""
"""A launcher whose connections to the controller, and nothing else, go through its line."""


def spec_in(folder: Path, mode: str) -> ElasticSpec:
    """Return the job whose files are there: small steps, so that the faults are what it does.

    All ranks have the same number of micro-batches, whichever nodes are there.
    """
    return ElasticSpec(
        root=str(folder / ("disk/root" if mode == SOAK else "root")),
        steps=100 * STEPS if mode == SOAK else STEPS,
        every=20,
        shape=GptShape(layers=1, heads=2, width=32, seq=16),
        microbatches={"two-slots": 4, SOAK: 12}.get(mode, 6),
        pause_s=0.3,
    )


class LiveJob:
    """One job; it plays faults of a generator of random numbers.

    Parameters
    ----------
    folder
        New; everything goes there.
    seed
        Of its nodes and of what is not part of a schedule.
    mode
        One of `MODES`.
    """

    def __init__(self, folder: Path, seed: int, mode: str) -> None:
        rng = random.Random(f"job {seed}")
        self.rng = random.Random(seed)
        self.folder, self.mode = folder, mode
        slots = 2 if mode == "two-slots" else 1
        self.planned = 4 if mode == SOAK else 2 if slots == 2 else rng.choice([2, 3])
        spares = 0 if mode == SOAK or slots == 2 else rng.choice([0, 1])
        self.names = [f"n{k}" for k in range(self.planned + spares)]
        self.name = f"live-{seed}-{secrets.token_hex(3)}"
        self.port = free_port()
        self.faults: list[str] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.away: list[tuple[float, float, str]] = []
        """From when to when nodes could not be reached, and which; if they died, one moment."""
        self.cut: set[str] = set()
        self.begun = time.monotonic()
        run = folder / "run"
        run.mkdir(mode=0o700)
        self.env = {"CKPTD_RUN_DIR": str(run), "CKPTD_SECRET": secrets.token_hex(16)}
        self.log_url = str(folder / "log")
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec_in(folder, mode)))
        self.lines = {name: Line(self.port) for name in self.names} if mode == "cut" else {}
        self.env["LIVE_LINES"] = ",".join(f"{n}={line.port}" for n, line in self.lines.items())
        self.machines = Machines(folder, self.names) if mode == SOAK else None
        self.nodes = Nodes(folder, self._flags(slots), self._command(), self.env)
        if self.machines is not None:
            self.nodes.under = {name: self.machines.under(name) for name in self.names}
        if self.lines:
            self.nodes.cli = _THROUGH_LINE
        self.operator = OperatorLink(
            self._address,
            self.name,
            self.env["CKPTD_SECRET"].encode(),
            timeout_s=_CALL_S,
        )

    def _address(self) -> str:
        if self.machines is None:
            return f"127.0.0.1:{self.port}"
        newest = open_places(self.name, self.log_url).leader.newest()
        return newest.address if newest is not None else ""

    def _flags(self, slots: int) -> list[str]:
        where = f"127.0.0.1:{self.port}"
        if self.machines is not None:
            where = f"{self.machines.address(self.names[0])}:29400"
        flags = ["--job", self.name, "--nnodes", f"1:{self.planned}"]
        flags += ["--nproc-per-node", str(slots), "--rdzv-endpoint", where, "--log", self.log_url]
        for key, value in SETTINGS.items():
            flags += ["--set", f"{key}={value}"]
        return flags

    def _command(self) -> list[str]:
        if self.mode == SOAK:
            return ["-m", "tests.elastic.live.published", str(self.folder)]
        once = ["--once"] if self.mode == "once" else []
        return ["-m", "ckptd_demo.elasticjob", str(self.folder), *once]

    def start(self) -> None:
        """Start all launchers, and the daemon where there is one."""
        if self.mode == SOAK:
            # The launcher with the controller starts a daemon.
            self.nodes.flags += ["--floor", "train=5"]
            self.follow()
        elif self.mode == "watched":
            where = f"127.0.0.1:{self.port}"
            serve = ["serve", "--json", "--job", self.name, "--controller", where]
            self.nodes.beside(serve, ["--floor", "train=3"])
            log = self.nodes.log("serve")
            self.until(lambda: log.read_text().endswith("\n"), 60.0)
            login: str = msgspec.json.decode(log.read_bytes())["login"]
            self.nodes.flags += ["--daemon", login.partition("/?")[0]]
        else:
            self.nodes.flags.append("--no-watch")
        for name in self.names:
            self.nodes.start(name)

    def follow(self) -> None:
        """Start the worker that takes what is published."""
        assert self.machines is not None
        script = ["-m", "tests.elastic.live.published", str(self.folder), "--follow"]
        command = [*self.machines.under("beside"), sys.executable, *script]
        with self.nodes.log("follower").open("ab") as log:
            self.follower = subprocess.Popen(
                command, env={**os.environ, **self.env}, stdout=log, stderr=log
            )

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        if self.machines is not None:
            self.follower.kill()
            self.follower.wait()
            self.machines.close()

    # --- what is seen -----------------------------------------------------------------------------

    @property
    def rows(self) -> list[TrainedRow]:
        return read_rows(self.folder / "steps.jsonl", TrainedRow)

    @property
    def ranks(self) -> list[RankRow]:
        return read_rows(self.folder / "ranks.jsonl", RankRow)

    def step(self) -> int:
        return max((row.step for row in self.rows), default=0)

    def newest(self) -> list[RankRow]:
        rows = self.ranks
        newest = max((row.generation for row in rows), default=0)
        return [row for row in rows if row.generation == newest]

    def node_of(self, pid: int) -> str:
        """Return the node of a rank that trains, or has trained."""
        return next((row.node for row in reversed(self.ranks) if row.pid == pid), "")

    def workers(self, node: str = "") -> list[psutil.Process]:
        """Return the ranks of the newest generation that live, of one node or of all."""
        return list(_living(row.pid for row in self.newest() if node in ("", row.node)))

    def processes(self, words: str) -> list[psutil.Process]:
        """Return processes of this job whose command line has these words."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            line = " ".join(process.info["cmdline"] or ())
            run = (process.info["environ"] or {}).get("CKPTD_RUN_DIR", "")
            if run.startswith(self.env["CKPTD_RUN_DIR"]) and words in line:
                found.append(process)
        return found

    def held(self) -> dict[str, tuple[int, int, int]]:
        """Return MiB, descriptors and threads of the processes that outlive generations."""
        found = [(n, psutil.Process(self.nodes.processes[n].pid)) for n in self.nodes.alive()]
        for role in (
            "controller",
            "serve",
            "ckptd.checkpoint.agent",
            "ckptd.monitor.agent.watched",
        ):
            found += [(role, process) for process in self.processes(f" {role} ")]
        out = {}
        for role, process in found:
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                memory = process.memory_info().rss >> 20
                numbers = (memory, process.num_fds(), process.num_threads())
                out[f"{role} {process.pid}"] = numbers
        return out

    def promised(self) -> dict[int, int]:
        """Return the last committed step before each generation, by the membership log."""
        with open_store(self.log_url) as store:
            return {r.generation: r.step for r in MembershipLog(store).read()}

    def status(self) -> Status | None:
        with contextlib.suppress(CkptdError):
            return self.operator.status()
        return None

    def taken(self) -> int:
        """Return the newest step that the worker has taken."""
        path = self.folder / TAKEN
        return int([0, *path.read_text().split()][-1]) if path.exists() else 0

    def mixed(self) -> list[str]:
        """Return the versions that were not of one step."""
        path = self.folder / WRONG
        return path.read_text().splitlines() if path.exists() else []

    def over(self) -> bool:
        """Whether the job has ended: who was not killed has gone in good order, or refused."""
        return any(code is not None and code >= 0 for code in self.nodes.codes().values())

    def words(self) -> str:
        """Return what the launchers said last."""
        texts = []
        for name in self.names:
            if self.nodes.log(name).exists():
                lines = self.nodes.log(name).read_text(errors="replace").splitlines()
                texts += [f"{name}: {line}" for line in lines[-12:]]
        return "\n".join(texts)

    # --- what is done -----------------------------------------------------------------------------

    def order(self, kind: OrderKind, *names: str) -> bool:
        """Order something; return whether it was heard: what was not is no fault of ours."""
        with contextlib.suppress(CkptdError):
            self.operator.order(Order(kind=kind, nodes=names))
            return True
        return False

    def finish(self) -> None:
        (self.folder / FINISH).touch()

    def gone(self, name: str, seconds: float = 0.0) -> None:
        """Note that a node cannot be reached for so long, or has lost what its agent kept."""
        now = time.monotonic()
        self.away.append((now, now + seconds, name))

    def mend(self, name: str) -> None:
        """Let a node that was cut off reach the others again."""
        assert self.machines is not None
        if name in self.cut:
            self.cut.remove(name)
            self.machines.network.mend(self.names.index(name))

    def then(self, seconds: float, what: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, what))

    def turn(self) -> None:
        """Do what is due."""
        self.nodes.look()
        now = time.monotonic()
        due = [what for at, what in self.later if at <= now]
        self.later = [(at, what) for at, what in self.later if at > now]
        for what in due:
            what()

    def until(self, look: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not look():
            if time.monotonic() > end:
                return False
            self.turn()
            time.sleep(0.05)
        return True

    def rest(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def heal(self) -> None:
        """Undo all that lasts."""
        for line in self.lines.values():
            line.cut = False
        if self.machines is not None:
            self.machines.heal()
            for name in sorted(self.cut):
                self.mend(name)
            if self.follower.poll() is not None:
                self.follow()
        for process in [*self.workers(), *self.nodes.processes.values()]:
            send(process, signal.SIGCONT)
        for name in self.names:
            self.back(name)
        if not self.over():
            self.until(lambda: self.order(OrderKind.ADD, *self.names) or self.over(), 30.0)
            self.until(lambda: self.order(OrderKind.RESUME) or self.over(), 30.0)

    def take_back(self) -> None:
        """Order nodes back that are left out.

        A daemon may have told a fault when it was healed already, and no controller may have been
        there to take the order of `heal`.
        """
        with open_store(self.log_url) as store:
            last = MembershipLog(store).read()[-1]
        if left_out := (*last.out, *(name for name, _ in last.resting)):
            self.order(OrderKind.ADD, *left_out)

    def back(self, name: str) -> None:
        """Start a node again that is gone."""
        if self.nodes.processes[name].poll() is not None and not self.over():
            self.nodes.start(name)


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to who is there still."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _living(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
