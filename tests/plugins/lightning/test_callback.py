"""A Lightning Trainer that a signal stops, one that fails, and one that resumes between epochs.

Kills in the middle of an epoch are in tests/trainers.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptd.testing.ranks import run_ranks

pytestmark = [pytest.mark.plugins, pytest.mark.dist]
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

    saves = CkptdCallback(root, data, also={"counts": counts}, every=3, preemption=True)
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
    (whole,) = run_ranks(1, fit, str(tmp_path / "a"), deadline_s=120.0)
    (first,) = run_ranks(1, fit, str(tmp_path / "b"), 5, deadline_s=120.0)
    (second,) = run_ranks(1, fit, str(tmp_path / "b"), deadline_s=120.0)
    assert len(whole[1]) == STEPS
    assert len(first[1]) == second[0] == 5  # no multiple of three: the signal saved it
    assert first[1] + second[1] == whole[1]
    assert second[2] == whole[2] == {"batches": STEPS}


def test_one_that_fails_leaves_what_it_saved(tmp_path: Any) -> None:
    run_ranks(1, fit, str(tmp_path / "root"), 0, 4, deadline_s=120.0)
    (again,) = run_ranks(1, fit, str(tmp_path / "root"), deadline_s=120.0)
    assert again[0] == 3


class Stopped(Exception):
    """A trainer is gone."""


def epochs(
    root: str, how: str, stop_at: int = 0, known: bool = True
) -> tuple[list[tuple[Any, ...]], dict[str, int], list[str]]:
    """Train epochs of five batches; return losses and rates by batch, counts, and warnings."""
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping

    import ckptd
    from ckptd_lightning import CkptdCallback
    from tests.trainers.alone import alone

    alone()
    torch.set_num_threads(1)
    lightning.seed_everything(5, verbose=False)
    logged: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("ckptd_lightning").addHandler(Keeps())
    seen: list[tuple[Any, ...]] = []
    counts = {"added": 0, "epochs": 0, "validations": 0, "module": 0}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            counts["module"] += 1
            return (self.net(batch[0]) ** 2).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", (self.net(batch[0]) ** 2).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if how == "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, patience=0, factor=0.5, threshold=0.5
                )
                scheduler = {"scheduler": plateau, "monitor": "val"}
            else:
                scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = {"batches": counts["module"]}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            counts["module"] = checkpoint["seen"]["batches"]

    class Counts(lightning.Callback):
        """Has state of its own, which changes in hooks that come after a step."""

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            counts["validations"] += not trainer.sanity_checking

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            counts["epochs"] += 1

        def state_dict(self) -> dict[str, Any]:
            return dict(counts)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            counts.update({k: state_dict[k] for k in ("epochs", "validations")})

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            checkpoint["added"] = torch.tensor(counts["epochs"] + 7)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            counts["added"] = int(checkpoint["added"])

    class Odd(lightning.Callback):
        """Cannot be saved."""

        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    class Ends(lightning.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if stop_at and trainer.global_step == stop_at:
                raise Stopped

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any
        ) -> None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            seen.append((trainer.global_step, float(outputs["loss"]).hex(), rate))

    class Data(lightning.LightningDataModule):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": counts["module"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            seen.append(("data module", state_dict["batches"]))

        def train_dataloader(self) -> Any:
            return data

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)

    data = ckptd.Batches(DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4, shuffle=True))
    saves = CkptdCallback(root, data, every=1)
    others = [Counts()] if known else []
    if how == "early":
        others.append(EarlyStopping("val", patience=1, min_delta=0.9))
    if how == "odd":
        others.append(Odd())
    trainer = lightning.Trainer(
        max_epochs=4,
        callbacks=[Ends(), saves, *others],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2 if how == "often" else None,
    )
    try:
        trainer.fit(Module(), datamodule=Data())
    except Stopped:
        assert stop_at
    return seen, counts, logged


@pytest.mark.parametrize("how", ["epoch", "plateau", "early", "often"])
@pytest.mark.timeout(400)
def test_nothing_is_lost_or_done_twice_wherever_it_resumes(how: str, tmp_path: Any) -> None:
    (whole,) = run_ranks(1, epochs, str(tmp_path / "a"), how, deadline_s=120.0)
    ended = whole[0][-1][0]
    assert ended == (10 if how == "early" else 20)
    for stop_at in (4, 7) if how == "often" else (5, 7):
        root = str(tmp_path / f"{stop_at}")
        (first,) = run_ranks(1, epochs, root, how, stop_at, deadline_s=120.0)
        (again,) = run_ranks(1, epochs, root, how, deadline_s=120.0)
        assert again[0].pop(0) == ("data module", stop_at)
        assert first[0] + again[0] == whole[0], stop_at
        begun = stop_at // 5
        assert again[1] == {**whole[1], "added": 7 + begun}, stop_at
        assert whole[1]["module"] == ended
        assert not again[2]


def test_what_cannot_be_saved_is_named(tmp_path: Any) -> None:
    (first,) = run_ranks(1, epochs, str(tmp_path), "odd", 5, deadline_s=120.0)
    assert len(first[2]) == 1
    assert "Odd" in first[2][0]
    (again,) = run_ranks(1, epochs, str(tmp_path), "epoch", 7, False, deadline_s=120.0)
    assert any("Counts" in line and "is missing now" in line for line in again[2])
