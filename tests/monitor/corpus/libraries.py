"""Programs that use a public library itself, where it is installed."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch

from tests.monitor.corpus.base import (
    SECONDS_VARIABLE,
    WIDTH,
    batch,
    net,
    pause,
    program,
    rest,
)


def _end() -> float:
    return time.monotonic() + float(os.environ.get(SECONDS_VARIABLE, "3"))


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % 4 == 0:
            rest()
        return {"x": torch.full((WIDTH,), index / 61)}


@program(needs="accelerate")
def accelerate_trains_and_evaluates() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.utils.data.DataLoader(_Rows(), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    end, more = _end(), True
    while more:
        with accelerator.main_process_first():
            pause(0.2 if accelerator.is_main_process else 0.01)
        for rows in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows["x"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        for rows in data:
            accelerator.gather_for_metrics(rows["x"].sum(1))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            pause(0.5)
        accelerator.wait_for_everyone()
        left = torch.tensor([float(time.monotonic() < end)])
        more = bool(accelerator.reduce(left, "sum").item() > 0)
    accelerator.end_training()


@program(needs="transformers")
def transformers_trainer() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": out.square().mean(), "logits": out}

    end = _end()

    class Stop(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            left = torch.tensor([float(time.monotonic() < end)])
            torch.distributed.all_reduce(left)
            control.should_training_stop = not left.item()
            return control

    with tempfile.TemporaryDirectory(prefix="ckptd-corpus-") as folder:
        given = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=10_000,
            per_device_train_batch_size=4,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=40,
            save_total_limit=1,
            logging_steps=10,
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        with given.main_process_first():
            batch()
        Trainer(
            model=Model(),
            args=given,
            train_dataset=_Rows(),
            eval_dataset=_Rows(),
            callbacks=[Stop()],
        ).train()
        torch.distributed.barrier()


@program(needs="lightning")
def lightning_trainer() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(rows["x"]).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, rows: Any, index: int) -> None:
            self.log("val", self.net(rows["x"]).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    with tempfile.TemporaryDirectory(prefix="ckptd-corpus-") as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            default_root_dir=folder,
            max_time={"seconds": int(float(os.environ.get(SECONDS_VARIABLE, "3"))) + 1},
            max_epochs=-1,
            enable_progress_bar=False,
            log_every_n_steps=5,
        )
        data = torch.utils.data.DataLoader(_Rows(), batch_size=4)
        trainer.fit(Module(), data, data)
