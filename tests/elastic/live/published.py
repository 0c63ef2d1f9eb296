"""The job of the campaign with a publisher: ``python -m`` this module, a folder.

``python -m tests.elastic.live.published FOLDER --follow`` is the worker that takes its versions,
and looks at each byte of them: all are of one step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import distributed

import ckptd
from ckptd.crashes import report_crashes
from ckptd.elastic import World, session
from ckptd.errors import CkptdError
from ckptd_demo import elasticjob
from ckptd_demo.elasticjob import FINISH, ElasticSpec

__all__ = ["TAKEN", "WRONG"]

TAKEN, WRONG = "taken", "wrong"
_WORDS = 1 << 16
_LAYOUTS = """
space job { W[n] }
layout rollout of job on none { w = W[n] }
""" + "".join(
    f"mesh D{n} = dp:{n}\nlayout trainer{n} of job on D{n} {{ w = W[n] }}\n" for n in range(1, 5)
)


def _train(world: World, folder: Path) -> None:
    """As `elasticjob.train`, and publish each step."""
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ElasticSpec)
    distributed.init_process_group("gloo")
    job = elasticjob._Job(spec)
    tiers: list[ckptd.Memory | ckptd.Peer] = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
    layout = f"{_layouts(folder)}:trainer{world.world_size}"
    weights = torch.zeros(_WORDS, dtype=torch.int64)
    with (
        ckptd.Checkpointer(spec.root, every=spec.every, keep=3, tiers=tiers) as checkpointer,
        ckptd.Publisher(layout, folder / "place") as publisher,
    ):
        resumed = 0
        if checkpointer.latest() is not None:
            resumed = checkpointer.load(job.state)
        elasticjob._tell(folder / "ranks.jsonl", elasticjob._row(world, resumed))
        finish = False
        while job.sampler.step < spec.steps and not finish:
            row, finish = job.step(world, (folder / FINISH).exists())
            if world.rank == 0:
                elasticjob._tell(folder / "steps.jsonl", row)
            checkpointer.save(row.step, job.state, force=finish)
            publisher.before_mutation()
            weights.fill_(row.step)
            publisher.publish(row.step, {"w": weights})
    distributed.destroy_process_group()


def _layouts(folder: Path) -> Path:
    path = folder / "job.lay"
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(_LAYOUTS)
    new.rename(path)
    return path


def _follow(folder: Path) -> None:
    """Take versions until the job is to finish, and start again after each error."""
    weights = torch.zeros(_WORDS, dtype=torch.int64)
    while not (folder / FINISH).exists():
        try:
            layout = f"{folder}/job.lay:rollout"
            with ckptd.Subscriber(layout, {"w": weights}, folder / "place") as follower:
                while not (folder / FINISH).exists():
                    update = follower.update(wait_s=2.0)
                    if update is not None:
                        _look(folder, weights, update.version.step)
        except (CkptdError, OSError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            time.sleep(0.5)


def _look(folder: Path, weights: torch.Tensor, step: int) -> None:
    if not bool((weights == step).all()):
        with (folder / WRONG).open("a") as file:
            file.write(f"version of step {step} has {weights.unique().tolist()[:9]}\n")
    with (folder / TAKEN).open("a") as file:
        file.write(f"{step}\n")


def main() -> None:
    """Train, or follow."""
    report_crashes()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if "--follow" in sys.argv[2:]:
        _follow(folder)
    else:
        session(_train, folder)


if __name__ == "__main__":
    main()
