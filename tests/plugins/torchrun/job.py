"""A job under real torchrun: its agents, its workers, its controller, and what they did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from ckptd.base.net.signing import job_secret
from ckptd.elastic.messages import Order, OrderKind, Status
from ckptd.elastic.operator import OperatorLink
from tests.processes import LEASE_S, PATIENCE_S, free_port, until

__all__ = ["TorchrunJob"]

_SCRIPT = """
import json, os, signal, time
from ckptd.base.net.handed import ranks_key
from ckptd.elastic.worker import WorkerLink

def tell(what, **more):
    row = {"what": what, "pid": os.getpid(), "t": time.monotonic(), **me, **more}
    fd = os.open(os.environ["T_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, json.dumps(row).encode() + b"\\n")
    os.close(fd)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ["CKPTD_GENERATION"])
me = {"rank": rank, "world": world, "generation": generation, "node": os.environ["CKPTD_NODE"]}
tell("born", handed=len(ranks_key() or b""))
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
link = WorkerLink.current()
steps = os.environ["T_EVENTS"] + ".step"
step = int(open(steps).read()) if os.path.exists(steps) else 0
link.loaded(generation, step)
while True:
    time.sleep(0.02)
    enough = float(os.path.exists(os.environ["T_EVENTS"] + ".enough"))
    seen = torch.tensor([float(step), enough])
    dist.all_reduce(seen)
    assert seen[0].item() == step * world, (seen, step)
    if seen[1].item():
        break
    step += 1
    if rank == 0:
        with open(steps + ".new", "w") as file:
            file.write(str(step))
        os.rename(steps + ".new", steps)
    dist.barrier()
    if link.save_asked:
        link.serves(step)
    link.committed(generation, step)
    tell("step", step=step)
# Who leaves first would break the others' last step.
dist.barrier()
os._exit(int(os.environ.get("T_CODE", "0")))
"""


class TorchrunJob:
    """One job; a context manager that leaves nothing behind.

    Parameters
    ----------
    folder
        Of its files.
    most, least
        Nodes.
    conf
        More of ``--rdzv-conf``.
    restarts
        ``--max-restarts``.
    """

    def __init__(
        self, folder: Path, most: int, least: int = 1, *, conf: str = "", restarts: int = 20
    ) -> None:
        self.folder, self.most, self.least = folder, most, least
        self.job = f"job-{folder.name}"
        self._restarts = restarts
        # Nodes may be at fault as often as tests want them to.
        self._conf = "controller.flaps=100,controller.gather_s=60,controller.grow_s=0.2"
        self._conf += f",controller.lease_s={LEASE_S:g}{conf}"
        self.script = folder / "script.py"
        self.script.write_text(_SCRIPT)
        self.runs = folder / "run"
        self.runs.mkdir(mode=0o700)
        self.port = free_port()
        self.agents: dict[int, psutil.Popen] = {}
        self.operator = OperatorLink(
            lambda: f"127.0.0.1:{self.port}", self.job, job_secret(self.job, self.runs)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.operator.close()
        for process in self.mine():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents.values():
            agent.wait(30)
        for path in sorted(self.folder.glob("*.log")):
            print(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        for path in sorted(self.runs.rglob("controller*.log")):
            print(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}")

    def start(self, *nodes: int, **environ: str) -> None:
        """Start an agent for each of these nodes."""
        for node in nodes:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
            command += [f"--nnodes={self.least}:{self.most}", f"--max-restarts={self._restarts}"]
            command += ["--rdzv-backend=ckptd", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
            command += [f"--rdzv-id={self.job}", f"--rdzv-conf={self._conf}", str(self.script)]
            with (self.folder / f"node{node}.log").open("ab") as log:
                self.agents[node] = psutil.Popen(
                    command,
                    env=self._environ() | {"CKPTD_NODE": f"node{node}"} | environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def _environ(self) -> dict[str, str]:
        return os.environ | {
            "T_EVENTS": str(self.folder / "events"),
            "CKPTD_RUN_DIR": str(self.runs),
            "TMPDIR": str(self.folder),  # torchrun leaves a folder of logs
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    # --- what happened ----------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Return what workers have written."""
        with contextlib.suppress(FileNotFoundError):
            raw = (self.folder / "events").read_bytes()
            return [json.loads(line) for line in raw.split(b"\n")[:-1]]
        return []

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """Return what is true in the end; fail if it never is."""
        return until(what, why, PATIENCE_S)

    def steps(self, world: int, after: int = 0, *, nodes: set[str] | None = None) -> int:
        """Wait until `world` ranks make steps in a generation later than `after`; return it."""

        def found() -> int:
            for e in self.events():
                wanted = e["what"] == "step" and e["world"] == world and e["generation"] > after
                if wanted and (nodes is None or self.nodes_of(e["generation"]) == nodes):
                    return int(e["generation"])
            return 0

        return int(self.until(found, f"steps of {world} ranks after generation {after}"))

    def nodes_of(self, generation: int) -> set[str]:
        """Return the nodes that had a worker in a generation."""
        return {e["node"] for e in self.events() if e["generation"] == generation}

    def worker(self, node: int) -> psutil.Process:
        """Return the newest worker of a node."""
        born = [e for e in self.events() if e["what"] == "born" and e["node"] == f"node{node}"]
        return psutil.Process(born[-1]["pid"])

    def status(self) -> Status:
        """Return the controller's status."""
        return self.operator.status()

    def mine(self) -> list[psutil.Process]:
        """Return all processes of the job."""
        mark = str(self.runs)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CKPTD_RUN_DIR") == mark and process.pid != os.getpid():
                    found.append(process)
        return found

    def processes(self, word: str) -> list[psutil.Process]:
        """Return those whose command line has `word`."""
        found = []
        for process in self.mine():
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
        return found

    # --- what is done to it -----------------------------------------------------------------------

    def order(self, kind: OrderKind, *nodes: int) -> None:
        """Order something, and have it taken in."""
        named = tuple(f"node{node}" for node in nodes)
        answer = self.operator.order(Order(kind=kind, nodes=named, reason=f"the test: {kind}"))
        assert answer.ok, answer

    def kill_node(self, node: int) -> None:
        """Kill an agent and its workers, and nothing else, at one blow."""
        worker, agent = self.worker(node), self.agents.pop(node)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in (agent, worker):
                process.send_signal(number)
        agent.wait(30)

    def kill_agent(self, node: int) -> None:
        """Kill an agent, and nothing else."""
        agent = self.agents.pop(node)
        agent.kill()
        agent.wait(30)

    def enough(self) -> None:
        """Have the script end."""
        (self.folder / "events.enough").touch()

    def codes(self) -> dict[int, int]:
        """Wait for the end of all agents; return their codes."""
        end = time.monotonic() + PATIENCE_S
        return {k: a.wait(max(1.0, end - time.monotonic())) for k, a in self.agents.items()}

    def nothing_left(self) -> None:
        """Wait until no process of the job is left."""
        self.until(lambda: not self.mine(), f"the end of {self.mine()}")
