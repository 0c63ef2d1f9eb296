"""Hugging Face's Trainer saves to ckptd and goes on from there: `CkptdCallback`."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

import ckptd
from ckptd.errors import UsageError

__all__ = ["CkptdCallback"]


class CkptdCallback(TrainerCallback):
    """Saves after each step that is due, and resumes where the newest checkpoint was.

    The state is the model, the optimizer, the scheduler, the scaler, the Trainer's own state and
    the random streams. Batches that were trained on are skipped by the Trainer itself, by their
    number: exact, where making a batch draws nothing from the global random streams.

    Parameters
    ----------
    url
        The root.
    also
        What is saved besides, by name; see `ckptd.Checkpointer.save`.
    **options
        Of `ckptd.Checkpointer`: ``every``, ``keep``, ``tiers``, ``save_on``.

    Examples
    --------
    >>> saves = CkptdCallback("s3://bucket/run", every=100, keep=3)
    >>> trainer = Trainer(model, TrainingArguments(save_strategy="no"), ..., callbacks=[saves])
    >>> trainer.train(resume_from_checkpoint=saves.resume(trainer))
    """

    def __init__(self, url: str, *, also: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._url = url
        self._also = dict(also or {})
        self._options = options
        self._checkpointer: ckptd.Checkpointer | None = None
        self._trainer: Any = None
        self._resumed: int | None = None
        self._noted = {"state": ""}
        self._streams: dict[str, Any] | None = None

    @property
    def checkpointer(self) -> ckptd.Checkpointer:
        """What saves; made when it is first used, after the process group."""
        if self._checkpointer is None:
            self._checkpointer = ckptd.Checkpointer(self._url, **self._options)
        return self._checkpointer

    def resume(self, trainer: Any) -> str | None:
        """Return what ``trainer.train(resume_from_checkpoint=...)`` wants; None begins anew.

        That is a folder with the Trainer's own state, from which it knows the step and what to
        skip. Everything else is loaded as training begins.
        """
        self._trainer = trainer
        if trainer.is_deepspeed_enabled:
            raise UsageError(
                "DeepSpeed's engine loads its own state",
                kind="bad-argument",
                where="CkptdCallback",
                wanted="a Trainer without DeepSpeed",
            )
        self._resumed = self.checkpointer.latest()
        if self._resumed is None:
            return None
        self.checkpointer.load({"trainer": self._state_of_trainer()}, self._resumed, only="trainer")
        folder = tempfile.mkdtemp(prefix="ckptd-resume-")
        (Path(folder) / "trainer_state.json").write_text(self._noted["state"])
        # It would look for weights in that folder.
        trainer._load_from_checkpoint = lambda *given, **named: None
        return folder

    def _state_of_trainer(self) -> ckptd.PerRank:
        # Ranks log times of their own; with another number of them each takes rank 0's.
        return ckptd.PerRank(self._noted, on_change="reduce", reduce=lambda values: values[0])

    def on_train_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Load what `resume` found."""
        if self._trainer is None:
            raise UsageError(
                "the callback does not know its trainer",
                kind="bad-argument",
                where="CkptdCallback",
                wanted="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
            )
        rng = ckptd.Rng()
        self._state: dict[str, Any] = {
            "model": have["model"],
            "optim": have["optimizer"],
            "sched": have["lr_scheduler"],
            "trainer": self._state_of_trainer(),
            "rng": rng,
            **self._also,
        }
        if self._trainer.accelerator.scaler is not None:
            self._state["scaler"] = self._trainer.accelerator.scaler
        if self._resumed is None:
            return
        del self._trainer._load_from_checkpoint
        self.checkpointer.load(self._state, self._resumed)
        # In the middle of an epoch the Trainer makes an iterator, which draws, before it goes on.
        self._streams = rng.state_dict() if state.epoch % 1 else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Set the random streams to what they were, before the first step."""
        if self._streams is not None:
            ckptd.Rng().load_state_dict(self._streams)
            self._streams = None

    def on_step_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Save, if it is due."""
        callbacks = [*self._trainer.callback_handler.callbacks, control]
        exported = TrainerState(
            stateful_callbacks=[c for c in callbacks if isinstance(c, ExportableState)]
        )
        now = dataclasses.replace(state, stateful_callbacks=exported.stateful_callbacks)
        self._noted["state"] = json.dumps(dataclasses.asdict(now))
        self.checkpointer.save(state.global_step, self._state)
        if self.checkpointer.stop_requested:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Wait for what is being saved."""
        self.checkpointer.close()
