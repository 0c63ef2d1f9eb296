"""The state of a program that accelerate prepared, for `ckptd.Checkpointer`: `state_of`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

import ckptd

__all__ = ["state_of"]


def state_of(accelerator: Accelerator, **also: Any) -> dict[str, Any]:
    """Return what a checkpointer saves and loads: everything prepared, and the random streams.

    Those are the models, optimizers and schedulers that ``prepare`` returned, the gradient scaler,
    and what ``register_for_checkpointing`` was given. Loaders are not among them: a prepared loader
    has no position; give ``data=ckptd.Batches(loader)``, and iterate over that.

    Parameters
    ----------
    **also
        What is saved besides, by name.

    Examples
    --------
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> data = ckptd.Batches(loader)
    >>> state = state_of(accelerator, data=data)
    >>> ck = ckptd.Checkpointer("s3://bucket/run", every=100, keep=3)
    >>> step = ck.load(state) if ck.latest() is not None else 0
    """
    state: dict[str, Any] = {
        "model": _one(accelerator._models),
        "optim": _one(accelerator._optimizers),
        "sched": _one(accelerator._schedulers),
        "custom": list(accelerator._custom_objects),
        "scaler": accelerator.scaler,
    }
    # What is not there, such as a scaler without mixed precision, has no name.
    return {k: v for k, v in state.items() if v not in (None, [])} | {"rng": ckptd.Rng()} | also


def _one(prepared: list[Any]) -> Any:
    """Return the only one of a kind itself: its names are those of a program without accelerate."""
    return prepared[0] if len(prepared) == 1 else list(prepared)
