"""A trainer of Lightning: ckptd_lightning saves, and leads model, loops and data back.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptd  # ckptd
from ckptd_lightning import CkptdCallback  # ckptd
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


class Steps(lightning.Callback):
    """Reports losses, and is killed."""

    def __init__(self, saves: CkptdCallback, report: Report) -> None:
        self.saves, self.report = saves, report

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.last = self.saves.step
        self.report.started(self.last)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        if trainer.global_step > self.last:
            self.last = trainer.global_step
            self.report.step(self.last, outputs["loss"], self.saves.checkpointer)


def main(root: str, report: Report) -> None:
    alone()
    lightning.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(33, (40, 13))), batch_size=4, shuffle=True)
    batches = ckptd.Batches(data)  # ckptd
    saves = CkptdCallback(root, batches, every=3)  # ckptd
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[saves, Steps(saves, report)],  # ckptd
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)  # ckptd
    report.ended(module.parameters())
