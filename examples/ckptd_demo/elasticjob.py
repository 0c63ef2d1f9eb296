"""A rank of the job whose nodes come and go: the loop is what a user of ckptd would write.

`session` calls `train` again in each generation, in the same process where that survives. Nothing
in it asks how many ranks there were before.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed
from torch.optim import AdamW

import ckptd
from ckptd.crashes import report_crashes
from ckptd.decoding import json_decoder
from ckptd.elastic import ElasticSampler, Schedule, World, scale_gradients, session
from ckptd_demo.data import read_corpus
from ckptd_demo.model import build, cut_model
from ckptd_demo.spec import Cut, GptShape

__all__ = ["FINISH", "ElasticSpec", "RankRow", "TrainedRow", "main", "train"]

FINISH = "finish"


class ElasticSpec(msgspec.Struct, frozen=True):
    """Description of the job; it lies in its folder as ``spec.json``.

    Attributes
    ----------
    root
        Where checkpoints go.
    steps
        Last step; or earlier, after ``finish`` has appeared in the folder.
    every
        Steps from one checkpoint on the root to the next; each step goes to near tiers.
    pause_s
        Least duration of a step, in seconds.
    """

    root: str
    steps: int
    every: int = 25
    shape: GptShape = GptShape(layers=2, width=80, seq=64)
    microbatches: int = 12
    seed: int = 1
    learning_rate: float = 1e-3
    pause_s: float = 0.0


_specs = json_decoder(ElasticSpec)


class TrainedRow(msgspec.Struct, frozen=True):
    """A step that rank 0 has trained; ``steps.jsonl`` has a line for each.

    Attributes
    ----------
    step, generation, ranks
        Which one, by whom.
    loss
        Mean over all tokens of the step.
    ids
        Of its samples, by micro-batch.
    at
        When the optimizer had stepped, seconds of ``CLOCK_MONOTONIC``.
    """

    step: int
    generation: int
    ranks: int
    loss: float
    ids: list[int]
    at: float


class RankRow(msgspec.Struct, frozen=True):
    """A rank that begins a generation; ``ranks.jsonl`` has a line for each.

    Attributes
    ----------
    resumed
        Step of the state that it loaded; 0 without any.
    """

    generation: int
    rank: int
    ranks: int
    node: str
    pid: int
    resumed: int
    at: float


def train(world: World, folder: Path) -> None:
    """Train in one generation, up to the last step."""
    spec = _specs.decode((folder / "spec.json").read_bytes())
    distributed.init_process_group("gloo")
    job = _Job(spec)
    with ckptd.Checkpointer(
        spec.root,
        every=spec.every,
        tiers=[ckptd.Memory(every=1), ckptd.Peer(every=1)],
    ) as checkpointer:
        resumed = 0
        if checkpointer.latest() is not None:
            resumed = checkpointer.load(job.state)
        _tell(folder / "ranks.jsonl", _row(world, resumed))
        finish = False
        while job.sampler.step < spec.steps and not finish:
            row, finish = job.step(world, (folder / FINISH).exists())
            if world.rank == 0:
                _tell(folder / "steps.jsonl", row)
            checkpointer.save(job.sampler.step, job.state, force=finish)
    distributed.destroy_process_group()


class _Job:
    def __init__(self, spec: ElasticSpec) -> None:
        self._spec = spec
        self._corpus = read_corpus(limit_bytes=1 << 20)
        self.model = build(spec.shape, spec.seed)
        cut_model(self.model, Cut(dp=distributed.get_world_size()))
        self.optimizer = AdamW(self.model.parameters(), spec.learning_rate, foreach=False)
        self.sampler = ElasticSampler(
            Schedule(
                size=self._corpus.windows(spec.shape.seq),
                microbatch=1,
                microbatches=spec.microbatches,
                seed=spec.seed,
            )
        )
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "data": self.sampler,
        }

    def step(self, world: World, finish: bool) -> tuple[TrainedRow, bool]:
        """Train on the next global batch, each rank on its share of the micro-batches.

        Returns
        -------
        tuple
            What was trained, and whether any rank wants to `finish`.
        """
        begun = time.monotonic()
        spec, sampler = self._spec, self.sampler
        total = torch.tensor([0.0, float(finish)], dtype=torch.float64)
        loader = iter(sampler)
        for _ in sampler.indices:
            loss = self._loss_sum(next(loader))
            loss.backward()
            total[0] += loss.detach().double()
        tokens = spec.microbatches * spec.shape.seq
        scale_gradients(self.model.parameters(), tokens, averaged=True)
        self.optimizer.step()
        at = time.monotonic()
        self.optimizer.zero_grad()
        distributed.all_reduce(total)
        ids = sampler.schedule.samples(sampler.consumed, sampler.schedule.batch).tolist()
        sampler.advance()
        time.sleep(max(0.0, spec.pause_s - (time.monotonic() - begun)))
        row = TrainedRow(
            step=sampler.step,
            generation=world.generation,
            ranks=world.world_size,
            loss=float(total[0]) / tokens,
            ids=ids,
            at=at,
        )
        return row, bool(total[1])

    def _loss_sum(self, ids: list[int]) -> Tensor:
        seq = self._spec.shape.seq
        samples = torch.stack([torch.from_numpy(self._corpus.sample(i, seq)) for i in ids])
        loss: Tensor = self.model(samples)
        return loss


def _row(world: World, resumed: int) -> RankRow:
    return RankRow(
        generation=world.generation,
        rank=world.rank,
        ranks=world.world_size,
        node=os.environ.get("CKPTD_NODE", ""),
        pid=os.getpid(),
        resumed=resumed,
        at=time.monotonic(),
    )


def _tell(path: Path, row: msgspec.Struct) -> None:
    """Append a line whole: a killed rank leaves no half of one."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.encode(row) + b"\n")
    finally:
        os.close(fd)


def main() -> None:
    """Train in whatever generations there are: ``elasticjob FOLDER [--once]``.

    With ``--once`` as a script without a session does: each generation takes new processes.
    """
    report_crashes()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if "--once" in sys.argv[2:]:
        train(World.of(os.environ), folder)
    else:
        session(train, folder)


if __name__ == "__main__":
    main()
