"""Agents and trainers as processes of their own, for tests; none outlives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.base.runtime.agentlink import reach
from ckptd.checkpoint.save.messages import AgentContents, AskStatus, visit
from ckptd.errors import ProcessError
from tests.cli.running import COMMAND
from tests.processes import PATIENCE_S, wait_for_end

TRAINER = """
import os, sys
import torch
import ckptd

root, near = sys.argv[1:]
tiers = [ckptd.Memory(every=1, agent_ttl_s=60)] + ([ckptd.Local(near, every=2)] if near else [])
ck = ckptd.Checkpointer(root, every=10, tiers=tiers)
state = {"w": torch.full((1000,), -1.0)}
start = ck.load(state) if ck.latest() is not None else 9
held = float(state["w"][0]) if start != 9 else 9.0
print("start", start, held, sorted(ck.last_load.sources) if ck.last_load else [], flush=True)
for line in sys.stdin:
    if line == "die\\n":
        os.kill(os.getpid(), 9)
    step = int(line)
    state["w"].fill_(step)
    ck.save(step, state).durable()
    print("saved", step, ck.writer_pid, flush=True)
ck.close()
"""
"""Saves the steps that it is ordered to, and dies when it is ordered to."""


class Trainer:
    """One rank, told what to do by lines."""

    def __init__(self, root: str, near: str, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, root, near],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> list[str]:
        """Return the next line, in words."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the trainer ended: {self.process.wait()}"
        return line.split(maxsplit=3)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def save(self, step: int) -> int:
        """Save a step, on all tiers where it is due; return its agent's process."""
        self.tell(str(step))
        said = self.hear()
        assert said[:2] == ["saved", str(step)]
        return int(said[2])

    def die(self) -> None:
        self.tell("die")
        assert self.process.wait(PATIENCE_S) == -9

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0


@dataclass
class Place:
    """A root, a folder, a run folder, and what runs there."""

    folder: Path
    run: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def root(self) -> str:
        return str(self.folder / "root")

    @property
    def near(self) -> str:
        return str(self.folder / "near")

    @property
    def env(self) -> dict[str, str]:
        left_out = ("CKPTD_JOB", "CKPTD_NODE", "CKPTD_AGENT_METRICS")
        env = {k: v for k, v in os.environ.items() if k not in left_out}
        return env | {"CKPTD_RUN_DIR": str(self.run), "OMP_NUM_THREADS": "1"}

    def trainer(self, near: str | None = None) -> Trainer:
        trainer = Trainer(self.root, self.near if near is None else near, self.env)
        self.started.append(trainer.process)
        return trainer

    def agent(self, *args: str) -> tuple[subprocess.Popen[str], Any]:
        """Start ``ckptd agent run``; return it and the document that it prints once it listens."""
        process = subprocess.Popen(
            [*COMMAND, "agent", "run", *args, "--json"],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        assert process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, f"no agent: {text}, exit code {process.wait()}"
            text += line
        return process, json.loads(text)

    def statuses(self) -> list[AgentContents]:
        """Return what the agents that there are say; one may end meanwhile."""
        found = []
        for sock in [reach(path) for path in sorted(self.run.glob("*.sock"))]:
            if sock is not None:
                with suppress(ProcessError):
                    found.append(visit(sock, AskStatus(), PATIENCE_S))
        return found

    def end(self) -> None:
        """End everything, agents that checkpointers started included."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        for status in self.statuses():
            os.kill(status.pid, signal.SIGKILL)  # one that finishes may wait for ranks for a minute
            wait_for_end(status.pid)


@contextmanager
def make_place(folder: Path) -> Iterator[Place]:
    """Give a place; its run folder has a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="ckptd-") as run:
        os.chmod(run, 0o700)
        place = Place(folder, Path(run))
        try:
            yield place
        finally:
            place.end()
