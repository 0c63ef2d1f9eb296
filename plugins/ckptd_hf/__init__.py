"""Hugging Face's Trainer saves to ckptd and goes on from there: `CkptdCallback`."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

import ckptd
from ckptd.errors import UsageError

__all__ = ["CkptdCallback"]

_log = logging.getLogger("ckptd")


class CkptdCallback(TrainerCallback):
    """Saves after each step that is due, and resumes where the newest checkpoint was.

    A step is saved when its log lines and its evaluation are over, and after the last one of an
    epoch those of the epoch: what follows from metrics (``ReduceLROnPlateau``, early stopping) is
    then in the checkpoint, and a resume does nothing of it again.

    The state is the model, the optimizer, the scheduler, the scaler, the Trainer's own state and
    the random streams. Batches that were trained on are skipped by the Trainer itself, by their
    number: exact, where making a batch draws nothing from the global random streams.

    ``train()`` may be called again: with `resume` it goes on from the newest checkpoint, without it
    begins a line of its own.

    Parameters
    ----------
    url
        The root.
    also
        What is saved besides, by name; see `ckptd.Checkpointer.save`.
    **options
        Of `ckptd.Checkpointer`: ``every``, ``keep``, ``tiers``, ``preemption``.

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
        self._over = self._saved = False
        self._trainer: Any = None
        self._resumed: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._unsaved = self._epoch_over = False
        self._streams: dict[str, Any] | None = None

    @property
    def checkpointer(self) -> ckptd.Checkpointer:
        """The checkpointer of this training; made at first use, after the process group.

        Closed when training has ended; another training has another one.
        """
        if self._checkpointer is None:
            self._checkpointer = ckptd.Checkpointer(self._url, **self._options)
        return self._checkpointer

    def _let_go(self) -> None:
        """Close what saved an earlier training: the next one gets another."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer, self._over = None, False

    def resume(self, trainer: Any) -> str | None:
        """Return what ``trainer.train(resume_from_checkpoint=...)`` wants; None starts over.

        That is a folder with the Trainer's own state, from which it knows the step and what to
        skip. Everything else is loaded as training begins.
        """
        if trainer.is_deepspeed_enabled:
            raise UsageError(
                "DeepSpeed's engine loads its own state",
                where="CkptdCallback",
                wanted="a Trainer without DeepSpeed",
            )
        if self._trainer is not trainer:
            # No event comes after a step's log lines and evaluation.
            trainer._maybe_log_save_evaluate = self._then_save(trainer._maybe_log_save_evaluate)
            self._trainer = trainer
        if self._over:
            self._let_go()
        self._resumed = self.checkpointer.latest()
        if self._resumed is None:
            return None
        kept = _Kept(trainer)
        self.checkpointer.load({"trainer": _of_rank(kept)}, self._resumed, only="trainer")
        self._folder = tempfile.TemporaryDirectory(prefix="ckptd-resume-")
        (Path(self._folder.name) / "trainer_state.json").write_text(kept.loaded)
        # It would look for weights in that folder.
        trainer._load_from_checkpoint = lambda *given, **named: None
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Load what `resume` found."""
        if self._trainer is None:
            raise UsageError(
                "the callback is not attached to a Trainer",
                where="CkptdCallback",
                wanted="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
            )
        rng = ckptd.Rng()
        self._state: dict[str, Any] = {
            "model": have["model"],
            "optim": have["optimizer"],
            "sched": have["lr_scheduler"],
            "trainer": _of_rank(_Kept(self._trainer)),
            "rng": rng,
            **self._also,
        }
        if self._trainer.accelerator.scaler is not None:
            self._state["scaler"] = self._trainer.accelerator.scaler
        if self._folder is None:
            self._begin_again()
            return
        self._folder.cleanup()
        self._folder = None
        del self._trainer._load_from_checkpoint
        self.checkpointer.load(self._state, self._resumed)
        self._saved = True
        # In the middle of an epoch the Trainer makes an iterator, which draws, before it goes on.
        self._streams = rng.state_dict() if state.epoch % 1 else None

    def _begin_again(self) -> None:
        """Save a training that begins at step 0 beside an earlier one of this callback."""
        if not self._over and not self._saved:
            return
        self._let_go()
        if self._saved and self._options.get("new_run") is None:
            _log.warning(
                "training restarts at step 0: its saves at %s start a new line, and earlier "
                "checkpoints stay; resume(trainer) continues from those instead",
                self._url,
            )
            options = {**self._options, "new_run": True}
            self._checkpointer = ckptd.Checkpointer(self._url, **options)
        self._saved = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Set the random streams to what they were, before the first step."""
        if self._streams is not None:
            ckptd.Rng().load_state_dict(self._streams)
            self._streams = None

    def on_step_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Note that there is a step to save."""
        self._unsaved, self._epoch_over = True, False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Note that the epoch is over."""
        self._epoch_over = True

    def _then_save(self, finish: Callable[..., None]) -> Callable[..., None]:
        """Return what calls `finish`, which logs and evaluates, and saves if it is due."""

        def finished(*given: Any, **named: Any) -> None:
            finish(*given, **named)
            # After the last step of an epoch it is called for the step, and for the epoch.
            if self._unsaved and (self._epoch_over or self._trainer.state.epoch % 1):
                self._save()

        return finished

    def _save(self) -> None:
        self._unsaved = False
        if self.checkpointer.save(self._trainer.state.global_step, self._state):
            self._saved = True
        if self.checkpointer.stop_requested:
            self._trainer.control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **have: Any) -> None:
        """Wait for what is being saved."""
        self.checkpointer.close()
        self._over = True


class _Kept:
    """The Trainer's own state, with that of its callbacks, as JSON: made when a save is due."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded = ""

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exported = TrainerState(
            stateful_callbacks=[c for c in callbacks if isinstance(c, ExportableState)]
        )
        now = dataclasses.replace(trainer.state, stateful_callbacks=exported.stateful_callbacks)
        return {"state": json.dumps(dataclasses.asdict(now))}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.loaded = state["state"]


def _of_rank(kept: _Kept) -> ckptd.PerRank:
    # Ranks log times of their own; with another number of them each takes rank 0's.
    return ckptd.PerRank(kept, on_change="reduce", reduce=lambda values: values[0])
