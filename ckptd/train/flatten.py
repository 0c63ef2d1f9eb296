"""`flatten`: a live training state as named leaves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptd.errors import CkptdError, UsageError
from ckptd.train.arrays import add_array
from ckptd.train.batches import Batches
from ckptd.train.leaves import Leaves, Place
from ckptd.train.modules import add_module
from ckptd.train.objects import call_with, replace_in_place
from ckptd.train.optimizers import Owners, add_groups, add_optimizer
from ckptd.train.perrank import PerRank, can_reseed
from ckptd.train.recall import Recall, is_heavy
from ckptd.train.rng import Rng
from ckptd.train.sink import Sink
from ckptd.train.values import add_value
from ckptd.train.walk import Site, is_stateful, walk

__all__ = ["Flattener", "collect", "flatten"]

_log = logging.getLogger("ckptd")


class Flattener:
    """Flattens one state again and again; see `flatten`.

    A state of which nothing has another place, memory or form is not looked through again.
    """

    def __init__(self) -> None:
        self._recall = Recall()
        self._owners = Owners(())

    def flatten(self, state: Mapping[str, Any]) -> Leaves:
        """Return the leaves of `state`."""
        sites = walk(state)
        again = self._recall.leaves(sites)
        if again is not None:
            sink = Sink.again(*again)
            known = len(sink.leaves.tensors)
            # What cannot be added, or brings tensors of its own, is looked at with all the rest.
            with contextlib.suppress(CkptdError):
                self._reread(sink, sites)
                if len(sink.leaves.tensors) == known:
                    return sink.leaves
        sink = Sink()
        self._owners = collect(sink, sites)
        self._recall.keep(sites, sink.leaves, sink.live, sink.path)
        return sink.leaves

    def _reread(self, sink: Sink, sites: list[Site]) -> None:
        """Add what may have changed unseen."""
        for site in sites:
            if isinstance(site.value, torch.optim.Optimizer):
                names = self._owners.names(site.value, site.place)
                add_groups(sink, site.place, site.value, names)
            elif not is_heavy(site):
                _add(sink, site, self._owners)


def flatten(state: Mapping[str, Any]) -> Leaves:
    """Return the leaves of `state` for a save.

    Tensors are the live memory, detached; values are encoded, and so copied, before this
    returns. Modules, optimizers and random streams stay as they are.

    Parameters
    ----------
    state
        Any nesting of dicts and lists that holds tensors, DTensors, numpy arrays, modules,
        optimizers, objects with ``state_dict`` and ``load_state_dict``, ``torch.Generator``,
        `Rng`, `PerRank` and plain values.

    Raises
    ------
    UsageError
        The state cannot be saved as it is; kinds ``bad-state``, ``bad-name``, ``duplicate-name``,
        ``cycle``, ``unsavable``, ``dtype``, ``unowned-parameter``, ``optimizer-ids``,
        ``optimizer-state``, ``optimizer-container``, ``module-state``, ``fsdp1``.
    """
    return Flattener().flatten(state)


def collect(sink: Sink, sites: list[Site]) -> Owners:
    """Add the leaves of all sites to `sink`; return who owns which parameter."""
    owners = Owners(sites)
    for site in sites:
        _add(sink, site, owners)
    return owners


def _add(sink: Sink, site: Site, owners: Owners) -> None:
    place, value = site.place, site.value
    if isinstance(value, PerRank):
        _add_per_rank(sink, site, value)
    elif isinstance(value, Rng | torch.Generator):
        _add_per_rank(sink, site, PerRank(value, on_change="reseed"))
    elif isinstance(value, Batches):
        _add_per_rank(sink, site, PerRank(value, on_change="reduce", reduce=value.shared_out))
    elif isinstance(value, nn.Module):
        add_module(sink, place, value)
    elif isinstance(value, torch.optim.Optimizer):
        add_optimizer(sink, place, value, owners)
        sink.leaves.optimizers.append(value)
    elif isinstance(value, torch.Tensor):
        sink.add_tensor(place, value, "tensor", site.put)
    elif isinstance(value, np.ndarray):
        add_array(sink, place, value, site.put)
    elif is_stateful(value):
        put = partial(_give_state, value, place.name)
        add_value(sink, place, value.state_dict(), put)
    elif isinstance(value, DataLoader):
        raise _no_position(place)
    else:
        add_value(sink, place, value, site.put)


def _add_per_rank(sink: Sink, site: Site, declared: PerRank) -> None:
    place, value = site.place, declared.value
    if isinstance(value, nn.Module | torch.optim.Optimizer | PerRank):
        raise UsageError(
            "modules and optimizers are not per-rank values",
            kind="per-rank",
            where=place.name,
            found=f"PerRank of {type(value).__name__} at {place.path}",
            hint="put it into the state as it is; shards are found from its DTensors",
        )
    if isinstance(value, DataLoader) and not is_stateful(value):
        raise _no_position(place)
    if isinstance(value, torch.Generator):
        read, put = value.get_state, partial(call_with, value.set_state, place.name)
    elif is_stateful(value):
        read, put = value.state_dict, partial(_give_state, value, place.name)
    else:
        read, put = lambda: value, partial(_set_value, declared)
    sink.add_per_rank(
        place,
        read,
        put,
        on_change=declared.on_change,
        reduce=declared.reduce,
        reseed=partial(_reseed, declared) if can_reseed(value) else None,
        random=isinstance(value, Rng | torch.Generator),
        follower=value if isinstance(value, Batches) else None,
    )


def _no_position(place: Place) -> UsageError:
    return UsageError(
        "a DataLoader does not tell where in the data it is",
        kind="unsavable",
        where=place.name,
        found=place.path,
        hint="put ckptd.Batches(loader) into the state and take the batches from it",
    )


def _give_state(value: Any, name: str, saved: Any) -> None:
    """Give an object its saved state; warn of a loader's iterator, which it does not reach."""
    if isinstance(value, DataLoader) and getattr(value, "_iterator", None) is not None:
        _log.warning(
            "an iterator of the loader %s was made before the load, and goes on where it was: make "
            "a new one, or put ckptd.Batches(loader) into the state (docs/guide/exact-resume.md)",
            name,
        )
    call_with(value.load_state_dict, name, saved)


def _set_value(declared: PerRank, saved: Any) -> None:
    live = declared.value
    if replace_in_place(live, saved):
        return
    same = isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)
    if same and live.shape == saved.shape and live.dtype == saved.dtype:
        live.detach().copy_(saved)
    else:
        declared.value = saved


def _reseed(declared: PerRank, seed: int) -> None:
    value = declared.value
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif isinstance(value, int):
        declared.value = seed
    else:
        value.reseed(seed)
