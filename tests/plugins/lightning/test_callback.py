"""A Lightning Trainer that a signal stops, and one that fails; kills are in tests/trainers."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptd.testing.ranks import run_ranks
from tests.trainers.packages import needs

pytestmark = [pytest.mark.long, pytest.mark.dist]
STEPS = 8


def fit(root: str, signal_at: int = 0, fail_at: int = 0) -> tuple[int, list[str], dict[str, int]]:
    """Return where the fit began, the losses of its steps, and what is saved besides."""
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    import ckptd
    from ckptd_lightning import CkptdCallback
    from tests.trainers.alone import alone
    from tests.trainers.with_lightning import Module

    alone()
    torch.set_num_threads(1)
    lightning.seed_everything(5, verbose=False)
    data = ckptd.Batches(
        DataLoader(TensorDataset(torch.randint(33, (24, 13))), batch_size=4, shuffle=True)
    )
    counts = {"batches": 0}
    losses: list[str] = []
    begun: list[int] = []

    class Steps(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(saves.step)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any
        ) -> None:
            losses.append(float(outputs["loss"]).hex())
            counts["batches"] += 1
            if trainer.global_step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if trainer.global_step == fail_at:
                raise ValueError("the data is bad")

    saves = CkptdCallback(root, data, also={"counts": counts}, every=3, save_on=signal.SIGTERM)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[Steps(), saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Module(), data)
    except (ValueError, SIGTERMException):  # Lightning's own, after the step
        assert fail_at or signal_at
    return begun[0], losses, counts


def test_a_signal_saves_and_stops(tmp_path: Any) -> None:
    needs("lightning")
    (whole,) = run_ranks(1, fit, str(tmp_path / "a"), deadline_s=120.0)
    (first,) = run_ranks(1, fit, str(tmp_path / "b"), 5, deadline_s=120.0)
    (second,) = run_ranks(1, fit, str(tmp_path / "b"), deadline_s=120.0)
    assert len(whole[1]) == STEPS
    assert len(first[1]) == second[0] == 5  # no multiple of three: the signal saved it
    assert first[1] + second[1] == whole[1]
    assert second[2] == whole[2] == {"batches": STEPS}


def test_one_that_fails_leaves_what_it_saved(tmp_path: Any) -> None:
    needs("lightning")
    run_ranks(1, fit, str(tmp_path / "root"), 0, 4, deadline_s=120.0)
    (again,) = run_ranks(1, fit, str(tmp_path / "root"), deadline_s=120.0)
    assert again[0] == 3
