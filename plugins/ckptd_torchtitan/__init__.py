"""torchtitan's Trainer saves to ckptd: `CkptdManager`, a checkpoint manager of torchtitan 0.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.tools import filesystem

import ckptd
from ckptd.errors import UsageError

__all__ = ["CkptdManager"]


class CkptdManager(BaseCheckpointManager):
    """Saves and loads for a torchtitan Trainer, whose ``checkpoint`` is this class's ``Config``.

    The checkpoint folder, local or remote, is a root of ckptd. The state is that of torchtitan's
    own manager, by its names, and the random streams. Saves are copied while training goes on, and
    are written by another process. A load resumes any mesh; a data loader's position, which
    torchtitan does not convert, goes back to as many ranks as saved it.

    Of torchtitan's settings ``last_save_model_only`` and ``export_dtype`` have no effect, since the
    last checkpoint is whole, so that a run can be prolonged: ``ckptd export`` makes a model of it.
    ``initial_load_path`` is a root, or with ``initial_load_in_hf`` a Hugging Face folder.

    Examples
    --------
    >>> config.checkpoint = CkptdManager.Config(enable=True, interval=100, keep_latest_k=3)

    Attributes
    ----------
    checkpointer
        What saves.
    """

    checkpointer: ckptd.Checkpointer

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings of a checkpoint manager, and those of the root."""

        compress: int | None = None
        """Level of zstd at which data files are stored, 1 to 22; None stores them plain."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf:
            raise UsageError(
                "a checkpoint of ckptd is not a Hugging Face model",
                where="checkpoint.last_save_in_hf",
                wanted=False,
                hint="ckptd export makes one of any checkpoint",
            )
        self.save_future: Any = None
        self._config = config
        self._parts = model_parts
        self._adapter = sd_adapter
        # Ranks count what each of them has seen; with another number of ranks each gets rank 0's.
        self._state: dict[str, Any] = {
            name: ckptd.PerRank(value, on_change="reduce", reduce=lambda values: values[0])
            for name, value in states.items()
        }
        self._state |= {
            MODEL: _one(model_parts),
            OPTIMIZER: _one(optimizers.optimizers),
            LR_SCHEDULER: lr_schedulers,
            "rng": ckptd.Rng(),
        }
        if dataloader is not None:
            if getattr(dataloader, "generator", self) is None:
                # Making an iterator draws a seed, which after a load would shift the streams.
                dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
            self._state[DATALOADER] = ckptd.PerRank(dataloader, on_change="error")
        self.checkpointer = ckptd.Checkpointer(
            filesystem.join(base_folder, config.folder),
            keep=config.keep_latest_k or None,
            storage=ckptd.Storage(compress=config.compress),
        )

    def _load(self, step: int = -1) -> bool:
        """Load a step, the newest one for -1; of an initial checkpoint where there is none."""
        config = self._config
        found = self.checkpointer.latest() if step == -1 else step
        if found is not None:
            # Step 0 is a seed: weights, and nothing that has trained.
            self._fill(self.checkpointer, found, weights_only=found == 0)
            return True
        if config.initial_load_in_hf:
            self._fill_from_hf(config.initial_load_path or self._adapter.hf_assets_path)
        elif config.initial_load_path:
            with ckptd.Checkpointer(config.initial_load_path) as initial:
                self._fill(initial, None, weights_only=config.initial_load_model_only)
        return bool(config.initial_load_in_hf or config.initial_load_path)

    def _fill(self, source: ckptd.Checkpointer, step: int | None, *, weights_only: bool) -> None:
        excluded = self._config.exclude_from_loading
        unknown = sorted(set(excluded) - set(self._state))
        if unknown:
            raise UsageError(
                "unknown name of a part to load",
                where="checkpoint.exclude_from_loading",
                wanted=", ".join(self._state),
                found=", ".join(unknown),
            )
        state = {name: value for name, value in self._state.items() if name not in excluded}
        # A partial load claims nothing: from another run's root this job only reads.
        partly = excluded or source is not self.checkpointer
        only = (lambda name: name.split(".")[0] in state) if partly else None
        source.load(state, step, weights_only=weights_only, only=only)

    def _fill_from_hf(self, folder: str) -> None:
        wrapper = ModelWrapper(self._parts)
        state = self._adapter.to_hf(wrapper.state_dict())
        quantized = self._config.initial_load_in_hf_quantized
        dcp.load(state, storage_reader=self._adapter.get_hf_storage_reader(folder, quantized))
        wrapper.load_state_dict(self._adapter.from_hf(state))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save, if the step is due by torchtitan's settings."""
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        self.save_future = self.checkpointer.save(curr_step, self._state)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Wait until the last save is copied; the optimizers wait by themselves besides."""
        self.checkpointer.before_mutation()

    def _wait_for_saving(self) -> None:
        """Wait until the last save is durable."""
        self.checkpointer.wait()
        self.save_future = None

    def _close(self) -> None:
        """Wait for every save, and end the writing process."""
        if hasattr(self, "checkpointer"):
            self.checkpointer.close()


def _one(parts: list[Any]) -> Any:
    """Return the only one itself: without pipeline stages names have no number of one."""
    return parts[0] if len(parts) == 1 else list(parts)
