"""Finds data sets that draw random numbers in a worker where no resume can draw the same again.

A worker's streams begin at the seed of its loader's iterator. A loader whose epoch is begun anew
and run to its position draws all that was drawn; one that goes straight to its position, or whose
workers outlive an epoch, does not.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

_log = logging.getLogger("ckptd")


def watch_workers(loader: Any, *, stateful: bool) -> None:
    """Have workers warn when samples draw from their global streams, where that cannot be resumed.

    Parameters
    ----------
    stateful
        Whether the loader goes to its position by itself.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not stateful and not loader.persistent_workers:
        return
    data = loader.dataset
    if isinstance(data, IterableDataset) and stateful and hasattr(data, "state_dict"):
        return  # it tells its own streams, or has none
    if not isinstance(loader.collate_fn, _Watching):
        loader.collate_fn = _Watching(loader.collate_fn)


class _Watching:
    """Collates as another function does, and looks whether samples have drawn."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self._before: Any = None
        self._told = False

    def __call__(self, samples: Any) -> Any:
        if not self._told and get_worker_info() is not None:
            now = _fingerprint()
            if self._before is not None and now != self._before:
                self._told = True
                _log.warning(
                    "samples draw from the random streams of a worker, and a resume within an "
                    "epoch cannot draw the same: draw from ckptd.elastic.keyed_generator(seed, "
                    "epoch, index) instead (docs/guide/exact-resume.md)"
                )
        batch = self._collate(samples)
        self._before = _fingerprint() if not self._told else None
        return batch


def _fingerprint() -> tuple[bytes, Any, Any]:
    state: Any = np.random.get_state(legacy=True)
    numpy = (state[0], state[1].tobytes(), *state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy, random.getstate()
