"""Systems that start a job again, each as a few nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ckptd.base.net.signing import job_secret
from ckptd.elastic.leader import LeaderRecord
from ckptd.elastic.messages import Order, OrderKind
from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places

HERE = Path(__file__).parent
PLAIN = str(HERE / "elastic_worker.py")
SESSION = str(HERE / "elastic_session.py")
TORCHFT = str(HERE / "elastic_torchft.py")
PEERS = os.environ.get("BENCH_PEERS", "")
"""Folder with torchft and nvidia-resiliency-ext; see `bench/elastic.py`."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
CKPTD = [sys.executable, "-c", "from ckptd.cli.main import main; main()"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Run:
    """One job, until `end`.

    Attributes
    ----------
    system
        Which of `SYSTEMS`.
    least, most
        Nodes.
    environ
        For agents and workers.
    """

    system: str
    least: int
    most: int
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="ckptd-e-", dir=base))
        self.port = free_port()
        self.nodes: dict[int, psutil.Popen] = {}
        self.job = self.folder.name
        self.started = time.monotonic()

    # --- the job ----------------------------------------------------------------------------------

    def start(self, node: int) -> None:
        """Start the launcher of a node, and before torchft's first one its lighthouse."""
        if self.system == "torchft" and not self.nodes:
            self.light = self._beside("lighthouse", _lighthouse(self))
        log = (self.folder / f"node-{node}.log").open("ab")
        self.nodes[node] = psutil.Popen(
            SYSTEMS[self.system](self, node),
            env=self._environ(node),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def _beside(self, name: str, command: list[str]) -> psutil.Popen:
        with (self.folder / f"node-{name}.log").open("ab") as log:
            return psutil.Popen(command, env=self._environ(0), stdout=log, stderr=log)

    def kill_controller(self) -> None:
        """Kill what the nodes agree by, and nothing else: where it is a launcher, that alone."""
        if self.system == "torchft":
            self.light.kill()
            self.light.wait(10)
        elif self.system.startswith("ckptd"):
            for process in self._ours():
                if "controller" in process.cmdline():
                    process.kill()
        else:
            self.nodes[0].kill()

    def limit_memory(self, pid: int) -> None:
        """Give a process 64 MiB more than it has, by a control group of its own."""
        group = _MEMORY / self.job
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(
            str(psutil.Process(pid).memory_info().rss + (64 << 20))
        )
        (group / "cgroup.procs").write_text(str(pid))

    def _environ(self, node: int) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "BENCH_FOLDER": str(self.folder),
            "BENCH_NODE": str(node),
            "CKPTD_NODE": f"node{node}",
            "CKPTD_RUN_DIR": self._run_folder(),
            "PYTHONPATH": f"{HERE.parent}:{PEERS}" if PEERS else str(HERE.parent),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
            **({"BENCH_NVRX": "1"} if self.system == "nvrx" else {}),
            **self.environ,
        }

    def _run_folder(self) -> str:
        folder = self.folder / "run"
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder)

    def end(self) -> None:
        """Kill all of it, and remove its files."""
        for node in list(self.nodes):
            self.kill_node(node)
        for process in self._ours():
            process.kill()
        subprocess.run(["rm", "-rf", str(self.folder)], check=False)
        if (_MEMORY / self.job).exists():
            (_MEMORY / self.job).rmdir()

    def _ours(self) -> list[psutil.Process]:
        mark = str(self.folder)
        out = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BENCH_FOLDER") == mark:
                    out.append(process)
            except psutil.Error:
                continue
        return out

    # --- faults -----------------------------------------------------------------------------------

    def worker(self, node: int) -> int:
        """Return the process of a node's newest worker."""
        mine = [e for e in self.events() if e["what"] == "born" and e["node"] == str(node)]
        return int(mine[-1]["pid"])

    def kill_node(self, node: int) -> None:
        """Kill a launcher and all that it has started, at one blow."""
        process = self.nodes.pop(node)
        try:
            doomed = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            doomed = []
        # First none of them can react, then they die.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in doomed:
                try:
                    one.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
        process.wait(10)

    def order(self, *words: str) -> None:
        """Have the controller do something."""
        kind, *nodes = words
        answer = self.operator().order(Order(kind=OrderKind(kind), nodes=tuple(nodes)))
        if not answer.ok:
            raise SystemExit(f"{words}: {answer}")

    def operator(self) -> OperatorLink:
        """Return a link to the controller, wherever it is now."""
        seat = self._seat()

        def address() -> str:
            newest = seat.newest()
            return newest.address if newest is not None else f"127.0.0.1:{self.port}"

        return OperatorLink(address, self.job, job_secret(self.job, Path(self._run_folder())))

    def _seat(self) -> LeaderRecord:
        os.environ["CKPTD_RUN_DIR"] = self._run_folder()
        return open_places(self.job).leader

    def has_controller(self, within_s: float) -> bool:
        """Wait for the controller: node 0 hosts it then, whichever launcher is quicker."""
        end = time.monotonic() + within_s
        seat = self._seat()
        while seat.newest() is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    # --- what happened ----------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Return all rows that workers have written."""
        try:
            raw = (self.folder / "events").read_bytes()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in raw.split(b"\n")[:-1]]

    def wait(
        self, what: Callable[[dict[str, Any]], bool], within_s: float
    ) -> dict[str, Any] | None:
        """Return the first event for which `what` holds; None if none comes in time."""
        end = time.monotonic() + within_s
        while True:
            for event in self.events():
                if what(event):
                    return event
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of the launchers' logs; of paths, which are this machine's, the names."""
        paths = sorted(self.folder.glob("node-*.log"))
        ends = [
            (path.name, _FOLDERS.sub("", path.read_text(errors="replace")[-3000:]))
            for path in paths
        ]
        return "\n".join(f"== {name}\n{end}" for name, end in ends)


_MEMORY = Path("/sys/fs/cgroup/memory")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def _nnodes(run: Run) -> str:
    return f"--nnodes={run.least}:{run.most}"


def _c10d(run: Run, node: int, conf: str = "") -> list[str]:
    host = f"is_host={int(node == 0)}"
    return [
        *TORCHRUN,
        _nnodes(run),
        "--max-restarts=100",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{run.port}",
        f"--rdzv-id={run.job}",
        f"--rdzv-conf={host}{conf}",
        PLAIN,
    ]


def _tuned(run: Run, node: int) -> list[str]:
    run.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return _c10d(run, node, ",keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1")


def _nvrx(run: Run, node: int) -> list[str]:
    command = _c10d(run, node)
    at = command.index("torch.distributed.run")
    command[at] = "nvidia_resiliency_ext.fault_tolerance.launcher"
    flags = ["--ft-rank-heartbeat-timeout=5", "--ft-initial-rank-heartbeat-timeout=60"]
    return [*command[:-1], *flags, "--ft-workload-check-interval=1", PLAIN]


def _lighthouse(run: Run) -> list[str]:
    words = ["--bind", f"127.0.0.1:{run.port}", "--min_replicas", "1"]
    return [f"{PEERS}/bin/torchft_lighthouse", *words, "--join_timeout_ms", "1000"]


def _torchft(run: Run, node: int) -> list[str]:
    one = ["--nnodes=1", "--max-restarts=100", "--rdzv-backend=c10d"]
    return [*TORCHRUN, *one, "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={run.job}{node}", TORCHFT]


def _handler(run: Run, node: int) -> list[str]:
    return [
        *TORCHRUN,
        _nnodes(run),
        "--max-restarts=100",
        "--rdzv-backend=ckptd",
        f"--rdzv-endpoint=127.0.0.1:{run.port}",
        f"--rdzv-id={run.job}",
        "--rdzv-conf=controller.grow_s=0.2,controller.steady_s=1",
        PLAIN,
    ]


def _run(run: Run, script: str, *flags: str) -> list[str]:
    return [
        *CKPTD,
        "run",
        _nnodes(run),
        f"--rdzv-endpoint=127.0.0.1:{run.port}",
        f"--job={run.job}",
        "--set=grow_s=0.2",
        "--set=flaps=100",
        "--set=steady_s=1",
        *flags,
        script,
    ]


SYSTEMS: dict[str, Callable[[Run, int], list[str]]] = {
    "torchrun": _c10d,
    "torchrun-tuned": _tuned,
    "ckptd-torchrun": _handler,
    "ckptd-run": lambda run, _: _run(run, PLAIN, "--no-watch"),
    "ckptd-session": lambda run, _: _run(run, SESSION, "--no-watch"),
    "nvrx": _nvrx,
    "torchft": _torchft,
    "ckptd-run-watched": lambda run, _: _run(run, PLAIN, "--policy=slow-rank=act"),
}
