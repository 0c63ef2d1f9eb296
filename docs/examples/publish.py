"""A trainer of two ranks publishes its weights at every step; a rollout of two ranks uses them.

    torchrun --nproc-per-node 2 --master-port 29501 docs/examples/publish.py sample
    torchrun --nproc-per-node 2 --master-port 29500 docs/examples/publish.py train

On CPUs, in two terminals; the trainer takes a few seconds and waits for nobody. The guide is
docs/guide/publish.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptd

WORDS, WIDTH, HIDDEN, LAYERS, STEPS = 64, 32, 48, 2, 20
PLACE = "publish-example"  # a folder that all see
LAYOUTS = Path(__file__).with_suffix(".lay")  # how each side holds the model


class Layer(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.up = nn.Linear(WIDTH, HIDDEN // parts, bias=False)
        self.down = nn.Linear(HIDDEN // parts, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        if self.parts > 1:
            dist.all_reduce(y)
        return x + y


class Model(nn.Module):
    """Whole, or a rank's part of it."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(parts) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS // parts, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train() -> None:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ckptd.Publisher(f"{LAYOUTS}:trainer", PLACE) as publisher:
        for step in range(1, STEPS + 1):
            words = torch.randint(WORDS, (4, 16))
            nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step, {"model": model, "optimizer": optimizer})
            time.sleep(0.2)


def sample() -> None:
    model = Model(parts=2)
    words = torch.arange(8)
    layout, group = f"{LAYOUTS}:rollout", dist.group.WORLD
    with ckptd.Subscriber(layout, model, PLACE, group=group) as subscriber:
        if dist.get_rank() == 0:
            print("waiting for a trainer", flush=True)
        while (update := subscriber.update(wait_s=120)) is not None:
            with torch.no_grad():
                logits = model(words)
            if dist.get_rank() == 0:
                moved = update.bytes_received + update.bytes_mapped
                print(f"step {update.version.step:2}: {moved} bytes, {logits.abs().mean():.4f}")
            if update.version.step == STEPS:
                break
        else:
            if dist.get_rank() == 0:
                print(f"no newer weights: {subscriber.last_error or 'is the trainer up?'}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"train": train, "sample": sample}[sys.argv[1]]()
    dist.destroy_process_group()
