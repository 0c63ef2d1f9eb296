"""A batch job of a real Slurm that trains, and what it tells."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cli.running import COMMAND
from tests.plugins.slurm.cluster import Cluster
from tests.processes import PATIENCE_S, until

__all__ = ["Job"]

_SCRIPT = Path(__file__).parent / "slurm_train.py"


class Job:
    """A batch job that trains on all four nodes."""

    def __init__(
        self, cluster: Cluster, folder: Path, steps: int, *options: str, every: int = 10
    ) -> None:
        self.cluster, self.folder = cluster, folder
        command = [*COMMAND, "slurm", "--json", *options, str(_SCRIPT), str(folder), str(steps)]
        (folder / "job.sbatch").write_text(
            "#!/bin/bash\n"
            "#SBATCH --nodes=4 --ntasks-per-node=1 --no-kill --requeue --open-mode=append\n"
            f"#SBATCH --signal=B:USR1@120 --output={folder}/out --chdir={folder}\n"
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
            f"export EVERY={every}\n"
            f"exec {shlex.join([*command, '0.05'])}\n"
        )
        self.number = cluster.run("sbatch", "--parsable", str(folder / "job.sbatch")).strip()

    def lines(self) -> list[dict[str, Any]]:
        """Return what all ranks have told, by time."""
        texts = [path.read_text() for path in self.folder.glob("steps-*.jsonl")]
        whole = [line for text in texts for line in text.splitlines(keepends=True)]
        found = [json.loads(line) for line in whole if line.endswith("\n")]
        return sorted(found, key=lambda line: float(line["at"]))

    def newest(self) -> tuple[int, dict[str, int], int]:
        """Return the newest generation, its processes by node, and its newest step."""
        lines = self.lines()
        generation = max((line["generation"] for line in lines), default=0)
        mine = [line for line in lines if line["generation"] == generation]
        step = max((line["step"] for line in mine), default=0)
        return generation, {line["node"]: line["pid"] for line in mine}, step

    def until_on(self, nodes: set[str], *, after: int = 0, more: int = 5) -> int:
        """Wait until some later generation has trained on exactly these; return which."""
        first: dict[int, int] = {}

        def true() -> bool:
            generation, pids, step = self.newest()
            first.setdefault(generation, step)
            there = generation > after and set(pids) == nodes
            return there and step >= first[generation] + more

        self.until(true, f"trains on {sorted(nodes)} after generation {after}")
        return self.newest()[0]

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait; say what the job has printed if that was in vain."""
        until(true, lambda: f"{what}\n{self.newest()}\n{self.out()[-6000:]}", PATIENCE_S)

    def out(self) -> str:
        """Return all that the job has printed."""
        with suppress(FileNotFoundError):
            return (self.folder / "out").read_text(errors="replace")
        return ""

    def step_of(self, node: str) -> str:
        """Return the step of a node's launcher."""
        text = self.cluster.run("squeue", "-h", "-s", "-j", self.number, "-o", "%i %N %j")
        found = [line.split() for line in text.splitlines()]
        return next((one[0] for one in found if one[1] == node and one[2] != "batch"), "")
