"""Hugging Face's Trainer: a callback saves, and leads model and data back.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

import ckptd  # ckptd
from tests.trainers.alone import alone
from tests.trainers.report import Report

STEPS = 12


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Tokens that are their own labels."""

    def __init__(self) -> None:
        self.tokens = torch.randint(33, (40, 12))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class Ckptd(transformers.TrainerCallback):  # ckptd
    """Saves and loads with ckptd."""

    def __init__(self, root: str, report: Report) -> None:  # ckptd
        self.ck, self.report = ckptd.Checkpointer(root, every=3), report  # ckptd

    def on_train_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:  # ckptd
        self.state = {  # ckptd
            "model": have["model"],  # ckptd
            "optim": have["optimizer"],  # ckptd
            "sched": have["lr_scheduler"],  # ckptd
            "data": have["train_dataloader"],  # ckptd
            "rng": ckptd.Rng(),  # ckptd
        }  # ckptd
        if self.ck.latest() is not None:  # ckptd
            state.global_step = self.ck.load(self.state)  # ckptd
        self.report.started(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:  # ckptd
        self.ck.save(state.global_step, self.state)  # ckptd
        self.report.step(state.global_step, self.trainer.last, self.ck)

    def on_train_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:  # ckptd
        self.ck.close()  # ckptd


class Trainer(transformers.Trainer):
    """Takes its batches from where they were."""

    def get_train_dataloader(self) -> Any:  # ckptd
        return ckptd.Batches(super().get_train_dataloader())  # ckptd

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        self.last = super().training_step(*given, **named)
        return self.last


def main(root: str, report: Report) -> None:
    alone()
    transformers.set_seed(5)
    config = transformers.GPT2Config(
        vocab_size=33,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    own = Ckptd(root, report)  # ckptd
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        own.trainer = Trainer(model, args, train_dataset=Texts(), callbacks=[own])
        own.trainer.train()
    report.ended(model.parameters())
