"""Lightning's Trainer saves to ckptd and goes on from there: `CkptdCallback`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning

import ckptd

__all__ = ["CkptdCallback"]


class CkptdCallback(lightning.Callback):
    """Saves after each optimizer step that is due; a fit begins where the newest checkpoint was.

    Parameters
    ----------
    url
        The root.
    data
        What ``trainer.fit(module, data)`` gets: a loader whose position is saved.
    also
        What is saved besides, by name; see `ckptd.Checkpointer.save`.
    **options
        Of `ckptd.Checkpointer`: ``every``, ``keep``, ``tiers``, ``save_on``.

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
        self._state: dict[str, Any] = {
            "model": pl_module,
            "optim": trainer.optimizers,
            "sched": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": trainer.fit_loop,
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

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        """Save, if this batch ended an optimizer step and a save is due."""
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            self.checkpointer.save(self.step, self._state)
            trainer.should_stop |= self.checkpointer.stop_requested

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for what is being saved."""
        self.checkpointer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let saves that began end."""
        if hasattr(self, "checkpointer"):
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)
