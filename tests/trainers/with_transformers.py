"""Hugging Face's Trainer: ckptd_hf saves, and resumes.

Lines that end in ``# ckptd`` are those that ckptd took.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

from ckptd_hf import CkptdCallback  # ckptd
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


class Steps(transformers.TrainerCallback):
    """Reports losses, and is killed."""

    def __init__(self, saves: CkptdCallback, report: Report) -> None:
        self.saves, self.report = saves, report
        self.last = torch.tensor(0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        self.report.started(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        self.report.step(state.global_step, self.last, self.saves.checkpointer)


class Trainer(transformers.Trainer):
    """Keeps the last loss."""

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        self.steps.last = super().training_step(*given, **named)
        return self.steps.last


def main(root: str, report: Report) -> None:
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
    saves = CkptdCallback(root, every=3)  # ckptd
    steps = Steps(saves, report)
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
        trainer = Trainer(model, args, train_dataset=Texts(), callbacks=[saves, steps])  # ckptd
        trainer.steps = steps
        trainer.train(resume_from_checkpoint=saves.resume(trainer))  # ckptd
    report.ended(model.parameters())
