"""Lightning's Trainer saves to ckptd and goes on from there: `CkptdCallback`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils import _pytree as pytree

import ckptd
from ckptd.checkpoint.format import codec
from ckptd.errors import UsageError

_log = logging.getLogger(__name__)

__all__ = ["CkptdCallback"]


class CkptdCallback(lightning.Callback):
    """Saves after each optimizer step that is due; a fit begins where the newest checkpoint was.

    A step is saved when all that belongs to it is over: the hooks of its batch, a validation that
    follows upon it, and after the last batch of an epoch the end of the epoch. Nothing of that is
    done again after a resume.

    Parameters
    ----------
    url
        The root.
    data
        What ``trainer.fit(module, data)`` gets: a loader whose position is saved.
    also
        What is saved besides, by name; see `ckptd.Checkpointer.save`.
    **options
        Of `ckptd.Checkpointer`: ``every``, ``keep``, ``tiers``, ``preemption``.

    Attributes
    ----------
    step
        The optimizer step that was loaded or done last.

    Examples
    --------
    >>> data = ckptd.Batches(loader)
    >>> saves = CkptdCallback("s3://bucket/run", data, every=100, keep=3)
    >>> trainer = lightning.Trainer(callbacks=[saves], enable_checkpointing=False)
    >>> trainer.fit(module, data)
    """

    checkpointer: ckptd.Checkpointer

    def __init__(
        self,
        url: str,
        data: ckptd.Batches,
        *,
        also: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._url = url
        self._data = data
        self._also = dict(also or {})
        self._options = options
        self.step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest checkpoint, if there is one."""
        loop = trainer.fit_loop
        kept = _Kept(trainer, self)
        self._state: dict[str, Any] = {
            "model": pl_module,
            "optim": trainer.optimizers,
            "sched": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": loop,
            # Ranks measure times of their own; with another number of them each takes rank 0's.
            "kept": ckptd.PerRank(kept, on_change="reduce", reduce=lambda values: values[0]),
            "data": self._data,
            "rng": ckptd.Rng(),
            **self._also,
        }
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self._state["scaler"] = scaler
        self.checkpointer = ckptd.Checkpointer(self._url, **self._options)
        begun = self.checkpointer.latest() is not None
        self.step = self.checkpointer.load(self._state) if begun else 0
        kept.restore()
        # No hook comes after a validation and the schedulers that wait for it.
        loop.epoch_loop.on_advance_end = self._then_save(
            loop.epoch_loop.on_advance_end, trainer, between_epochs=False
        )
        loop.on_advance_end = self._then_save(loop.on_advance_end, trainer, between_epochs=True)
        if begun:
            loop.epoch_loop.advance = _begin(loop, loop.epoch_loop.advance)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch as ever, where a load did not lead into the middle of one."""
        loop = trainer.fit_loop
        if loop.restarting and not loop.restarted_mid_epoch:
            loop.restarting = False

    def _then_save(
        self, end: Callable[..., None], trainer: Any, *, between_epochs: bool
    ) -> Callable[..., None]:
        """Return what calls `end`, the end of a batch or of an epoch, and saves if it is due."""

        def ended(*given: Any) -> None:
            try:
                end(*given)
            except SIGTERMException:  # Lightning raises it at the very end
                self._save(trainer, between_epochs)
                raise
            self._save(trainer, between_epochs)

        return ended

    def _save(self, trainer: Any, between_epochs: bool) -> None:
        if trainer.global_step <= self.step or (trainer.is_last_batch and not between_epochs):
            return
        if trainer.is_last_batch:
            self._data.end_epoch()
        self.step = trainer.global_step
        self.checkpointer.save(self.step, self._state)
        trainer.should_stop |= self.checkpointer.stop_requested

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for what is being saved."""
        _unwrap(trainer)
        self.checkpointer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the checkpointer, after saves that have begun."""
        _unwrap(trainer)
        if hasattr(self, "checkpointer"):
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)


def _begin(loop: Any, advance: Callable[..., None]) -> Callable[..., None]:
    """Return what does the first batch after a load.

    A loop that restarts looks for a validation that was not over, and does not step
    ``ReduceLROnPlateau`` at the end of the epoch. A checkpoint is of a time when all was over.
    """

    def first(*given: Any) -> None:
        loop.restarting = False
        del loop.epoch_loop.advance
        advance(*given)

    return first


def _unwrap(trainer: Any) -> None:
    loop = trainer.fit_loop
    for wrapped, name in (
        (loop, "on_advance_end"),
        (loop.epoch_loop, "on_advance_end"),
        (loop.epoch_loop, "advance"),
    ):
        vars(wrapped).pop(name, None)


class _Kept:
    """State of other callbacks, the module and the data module, as Lightning saves it.

    This is the ``state_dict`` of callbacks and data module, and the values that callbacks and
    module add in ``on_save_checkpoint``.
    """

    def __init__(self, trainer: Any, own: lightning.Callback) -> None:
        self._trainer = trainer
        self._callbacks = {c.state_key: c for c in trainer.callbacks if c is not own}
        self._saving = {k: c for k, c in self._callbacks.items() if _has_hook(c, "save")}
        if _has_hook(trainer.lightning_module, "save"):
            self._saving["module"] = trainer.lightning_module
        self._warned: set[str] = set()
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        states = {key: c.state_dict() for key, c in self._callbacks.items()}
        if self._trainer.datamodule is not None:
            states["datamodule"] = self._trainer.datamodule.state_dict()
        states = {k: v for k, v in states.items() if v and self._is_plain(k, "state_dict", v)}
        return {"states": states, "added": {k: self._added(k, c) for k, c in self._saving.items()}}

    def _added(self, key: str, owner: Any) -> dict[str, Any]:
        """Return what ``on_save_checkpoint`` adds to a checkpoint of Lightning."""
        empty = self._checkpoint()
        full = {**empty, "state_dict": dict(empty["state_dict"])}
        if key == "module":
            owner.on_save_checkpoint(full)
        else:
            owner.on_save_checkpoint(self._trainer, self._trainer.lightning_module, full)
        if any(name not in full or not _same(full[name], empty[name]) for name in empty):
            self._warn(key, "on_save_checkpoint changes the state_dict, or another of its entries")
            return {}
        added = {name: value for name, value in full.items() if name not in empty}
        return added if self._is_plain(key, "on_save_checkpoint", added) else {}

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "epoch": self._trainer.current_epoch,
            "global_step": self._trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": self._trainer.lightning_module.state_dict(),
        }

    def _is_plain(self, key: str, where: str, value: Any) -> bool:
        """Warn of what no checkpoint can hold; nothing is pickled."""
        plain = pytree.tree_map_only(torch.Tensor, lambda tensor: None, value)
        try:
            codec.encode(plain, f"{where} of {key}")
        except UsageError as error:
            self._warn(key, str(error))
            return False
        return True

    def _warn(self, key: str, found: str) -> None:
        if key not in self._warned:
            what = "the state of %s is not saved, and a resume starts it from scratch: %s"
            _log.warning(what, key, found)
        self._warned.add(key)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def restore(self) -> None:
        """Give everything back, once model and loops are what they were."""
        if self._loaded is None:
            return
        states, added = self._loaded["states"], self._loaded["added"]
        if gone := sorted((states.keys() | added.keys()) - self._names()):
            _log.warning("%s had a state when it was saved, but is missing now", ", ".join(gone))
        module = self._trainer.lightning_module
        checkpoint: dict[str, Any] = {}
        if any(_has_hook(owner, "load") for owner in (module, *self._callbacks.values())):
            checkpoint = {**self._checkpoint(), "callbacks": states}
        for value in added.values():
            checkpoint |= value
        if _has_hook(module, "load"):
            module.on_load_checkpoint(checkpoint)
        for key, callback in self._callbacks.items():
            if _has_hook(callback, "load"):
                callback.on_load_checkpoint(self._trainer, module, checkpoint)
            if key in states:
                callback.load_state_dict(states[key])
        if self._trainer.datamodule is not None and "datamodule" in states:
            self._trainer.datamodule.load_state_dict(states["datamodule"])

    def _names(self) -> set[str]:
        here = {*self._callbacks, "module"}
        return here if self._trainer.datamodule is None else here | {"datamodule"}


def _has_hook(thing: Any, kind: str) -> bool:
    """Return whether a module or callback has an ``on_save_checkpoint`` of its own, or a load."""
    name = f"on_{kind}_checkpoint"
    module = isinstance(thing, lightning.LightningModule)
    base = lightning.LightningModule if module else lightning.Callback
    return getattr(type(thing), name) is not getattr(base, name)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(other, dict):
        return bool(one == other)
    return one.keys() == other.keys() and all(
        one[k].data_ptr() == other[k].data_ptr() if isinstance(other[k], torch.Tensor) else True
        for k in other
    )
