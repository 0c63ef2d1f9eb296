"""The job of the campaign without any fault: ``python -m`` this module, a folder, the steps."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from torch import distributed

from ckptd.elastic import World
from ckptd_demo import elasticjob
from ckptd_demo.elasticjob import ElasticSpec, TrainedRow
from ckptd_demo.processes import free_port, read_rows

__all__ = ["reference"]


def reference(spec: ElasticSpec, steps: int) -> dict[int, TrainedRow]:
    """Return so many steps of one rank that nobody disturbs."""
    with tempfile.TemporaryDirectory(prefix="ckptd-campaign-") as name:
        folder = Path(name)
        (folder / "spec.json").write_bytes(
            msgspec.json.encode(msgspec.structs.replace(spec, pause_s=0.0))
        )
        world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        subprocess.run(
            [sys.executable, "-m", "tests.elastic.live.reference", name, str(steps)],
            env={**os.environ, **world, "MASTER_PORT": str(free_port())},
            check=True,
            timeout=600 + 2 * steps,
        )
        return {row.step: row for row in read_rows(folder / "steps.jsonl", TrainedRow)}


def main() -> None:
    """Train alone, and keep nothing but the rows."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ElasticSpec)
    distributed.init_process_group("gloo")
    job = elasticjob._Job(spec)
    with (folder / "steps.jsonl").open("wb") as file:
        for _ in range(steps):
            row, _ = job.step(World(generation=1), finish=False)
            file.write(msgspec.json.encode(row) + b"\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
