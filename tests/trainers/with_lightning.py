"""A trainer of Lightning: a callback saves, and leads model, loops and data back.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptd  # ckptd
from tests.trainers.alone import alone
from tests.trainers.gpt import GPT
from tests.trainers.report import Report

STEPS = 12


class Module(lightning.LightningModule):
    """A GPT for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.gpt(batch[0][:, :-1], batch[0][:, 1:])[1]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Ckptd(lightning.Callback):  # ckptd
    """Saves and loads with ckptd."""

    def __init__(self, root: str, data: ckptd.Batches, report: Report) -> None:  # ckptd
        self.root, self.data, self.report = root, data, report  # ckptd
        self.last = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # ckptd
        self.state = {  # ckptd
            "model": pl_module,  # ckptd
            "optim": trainer.optimizers,  # ckptd
            "sched": [config.scheduler for config in trainer.lr_scheduler_configs],  # ckptd
            "loops": trainer.fit_loop,  # ckptd
            "data": self.data,  # ckptd
            "rng": ckptd.Rng(),  # ckptd
        }  # ckptd
        self.ck = ckptd.Checkpointer(self.root, every=3)  # ckptd
        self.last = self.ck.load(self.state) if self.ck.latest() is not None else 0  # ckptd
        self.report.started(self.last)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        if trainer.global_step > self.last:  # ckptd
            self.last = trainer.global_step  # ckptd
            self.ck.save(self.last, self.state)  # ckptd
            self.report.step(self.last, outputs["loss"], self.ck)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # ckptd
        self.ck.close()  # ckptd


def main(root: str, report: Report) -> None:
    alone()
    lightning.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(33, (40, 13))), batch_size=4, shuffle=True)
    batches = ckptd.Batches(data)  # ckptd
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[Ckptd(root, batches, report)],  # ckptd
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    report.ended(module.parameters())
