"""A rank of the attacked job: it computes nothing and remembers much.

Every byte of its state says which step it is of, so any byte of another step, or of nobody, is
seen. What it finds wrong it writes to FOLDER/wrong and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptd

BYTES = 1 << 18
WORDS = b"weights of step %08d, "
LAYOUTS = """
space job { W[n] }
layout rollout of job on none { w = W[n] }
""" + "".join(
    f"mesh D{n} = dp:{n}\nlayout trainer{n} of job on D{n} {{ w = W[n] }}\n" for n in (1, 2, 3)
)


def filled(step: int) -> torch.Tensor:
    """Return the weights of a step: text that the whole capture can be searched for."""
    word = WORDS % step
    raw = bytearray((word * (BYTES // len(word) + 1))[:BYTES])
    return torch.frombuffer(raw, dtype=torch.uint8)


def wrong(folder: Path, what: str) -> None:
    """Say that bytes were not what they should have been."""
    with (folder / "wrong").open("a") as file:
        file.write(what + "\n")
    sys.exit(f"WRONG: {what}")


def main() -> None:
    """Train, save at each step to memory and peer, and publish each step."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    dist.init_process_group("gloo")
    rank, layout = dist.get_rank(), f"{folder}/job.lay:trainer{dist.get_world_size()}"
    weights = filled(0)
    state = {"w": weights}
    tiers: list[ckptd.Memory | ckptd.Peer] = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
    with (
        ckptd.Checkpointer(str(folder / "root"), every=5, keep=3, tiers=tiers, timeout_s=60) as ck,
        ckptd.Publisher(layout, folder / "place") as publisher,
    ):
        start = ck.load(state) if ck.latest() is not None else 0
        if not torch.equal(weights, filled(start)):
            wrong(folder, f"rank {rank} loaded step {start} with other bytes")
        with (folder / f"lives-{rank}").open("a") as file:
            file.write(f"{start} {os.getpid()}\n")
        for step in range(start + 1, job["steps"] + 1):
            agreed = torch.tensor([step])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            if agreed.item() != step:
                wrong(folder, f"rank {rank} is at step {step} and another at {agreed.item()}")
            publisher.before_mutation()
            ck.before_mutation()
            weights.copy_(filled(step))
            ck.save(step, state)
            publisher.publish(step, {"w": weights})
            if rank == 0:
                (folder / "step").write_text(str(step))
            if (folder / "finish").exists():
                break
            time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
