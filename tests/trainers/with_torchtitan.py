"""torchtitan's checkpoint manager, optimizers, schedulers and loader, called as its Trainer does.

The Trainer itself wants an accelerator. Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from ckptd_torchtitan import CkptdManager  # ckptd
from tests.trainers.gpt import GPT
from tests.trainers.report import Report
from tests.trainers.titan_loop import Texts

STEPS = 12


class Trainer:
    """What the loop of torchtitan's Trainer does with its checkpointer."""

    def __init__(self, root: str) -> None:
        torch.manual_seed(7)
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        with torch.device("meta"):
            self.model = GPT(layers=3)
        for i, block in enumerate(self.model.blocks):
            self.model.blocks[i] = checkpoint_wrapper(block)
            fully_shard(self.model.blocks[i], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        config: Any = OptimizersContainer.Config(param_groups=[group], implementation="foreach")
        self.optimizers = config.build(model_parts=[self.model])
        config = LRSchedulersContainer.Config(warmup_steps=4)
        self.lr_schedulers = config.build(optimizers=self.optimizers, training_steps=STEPS)
        self.dataloader = ParallelAwareDataloader(Texts(rank, world), rank, world, batch_size=3)
        self.step = 0
        self.ntokens_seen = 0
        checkpoint = CkptdManager.Config(enable=True, interval=3, folder=root)  # ckptd
        self.checkpointer: Any = checkpoint.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder="",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def batches(self) -> Iterator[torch.Tensor]:
        for x in self.dataloader:
            self.ntokens_seen += x.numel() + dist.get_rank()
            yield x

    def train(self, report: Report) -> None:
        loaded = self.checkpointer.load(step=-1)
        assert loaded == (self.step > 0)
        report.started(self.step)
        data = self.batches()
        while self.step < STEPS:
            self.step += 1
            self.optimizers.zero_grad()
            x = next(data)
            _, loss = self.model(x[:, :-1], x[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            report.step(self.step, loss.detach(), self.checkpointer.checkpointer)
            report.line(f"tokens{self.step}", str(self.ntokens_seen))
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()
        report.ended(self.model.parameters())


def main(root: str, report: Report) -> None:
    Trainer(root).train(report)
