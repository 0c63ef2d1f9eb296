"""Optimizers: state by parameter name, groups as sets of names with hyperparameters.

The integers by which `Optimizer.state_dict()` knows parameters never reach the format: they
depend on the order of groups, and on which parameters a rank happens to hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckptd.checkpoint.format.manifest import OPTIMIZER_CLASS
from ckptd.checkpoint.format.names import escape_key
from ckptd.checkpoint.torch.state.hosted import HostedOptimizer
from ckptd.checkpoint.torch.state.leaves import PendingState, SavedNames, Sink, StatePlace
from ckptd.checkpoint.torch.state.modules import module_tensors, reshard, target_device
from ckptd.checkpoint.torch.state.tensors import torch_dtype
from ckptd.checkpoint.torch.state.values import add_value
from ckptd.checkpoint.torch.state.walk import Site, unseen_state
from ckptd.errors import MismatchError, UsageError

__all__ = ["ParameterOwners", "add_groups", "add_optimizer", "misfit", "record"]


_CLASSES, _DEFAULTS = "classes", "defaults"
_BASE = "torch.optim."
# What torch's own optimizers keep of a parameter, whatever their options; "step" tells nothing.
_STATE = {
    "ASGD": {"eta", "mu", "ax"},
    "Adadelta": {"square_avg", "acc_delta"},
    "Adafactor": {"row_var", "col_var", "variance"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "Rprop": {"prev", "step_size"},
    "SGD": {"momentum_buffer"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}


def record(optimizer: Optimizer) -> dict[str, list[str]]:
    """Return what says in a checkpoint which optimizer this is.

    Its classes, nearest first, without torch's base; and the names of its hyperparameters.
    """
    return {_CLASSES: _classes(_kind(optimizer)), _DEFAULTS: sorted(map(str, optimizer.defaults))}


def misfit(
    optimizer: Optimizer, groups: object, params: Collection[str], keys: Iterable[str]
) -> str | None:
    """Say why saved state is not of such an optimizer; None where it is, as far as one can tell.

    Parameters
    ----------
    groups
        The saved groups as they stand in the checkpoint.
    params
        The live parameters' names: groups of others are another stage's, and another's concern.
    keys
        What was saved of these parameters.
    """
    own = record(optimizer)
    whole = [g for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else []
    mine = [g for g in whole if not set(params).isdisjoint(_names(g.get("params")))]
    for group in mine or whole:
        saved = _parsed(group.get(OPTIMIZER_CLASS))
        if saved is not None and not _fits(own, saved):
            return _text(own[_CLASSES], saved[_CLASSES])
        flag = "decoupled_weight_decay"
        if flag in group and group[flag] != optimizer.defaults.get(flag, group[flag]):
            # Adam and AdamW differ in nothing else, and a load would turn the one into the other.
            named = saved[_CLASSES] if saved is not None else [_BASE + _adam(group[flag])]
            return _text(own[_CLASSES], named)
    known = _STATE.get(_kind(optimizer).__name__) if own[_CLASSES][0].startswith(_BASE) else None
    kept = {*keys} - {"step"}
    if known is not None and kept and kept.isdisjoint(known):
        return _text(own[_CLASSES], []) + f" ({', '.join(sorted(kept))[:200]})"
    return None


def _kind(optimizer: Optimizer) -> type[Optimizer]:
    return optimizer.kind if isinstance(optimizer, HostedOptimizer) else type(optimizer)


def _fits(own: Mapping[str, list[str]], saved: Mapping[str, list[str]]) -> bool:
    live, then = own[_CLASSES], saved[_CLASSES]
    if _torchs(live) != _torchs(then):
        return False
    # A class may have moved to another module; what it is called does not change with that.
    names, others = [_bare(c) for c in live], [_bare(c) for c in then]
    if names[0] in others or others[0] in names:
        return True
    # Renamed, or a sibling: then it must have the same hyperparameters.
    return own[_DEFAULTS] == saved[_DEFAULTS]


def _torchs(classes: Iterable[str]) -> str | None:
    """Return the nearest of torch's own optimizers."""
    return next((c for c in classes if c.startswith(_BASE)), None)


def _classes(kind: type) -> list[str]:
    out = []
    for base in kind.__mro__:
        if base is Optimizer or not issubclass(base, Optimizer):
            continue
        ours = base.__module__.startswith(_BASE) and base.__name__ in _STATE.keys() | {"LBFGS"}
        out.append(
            f"{_BASE}{base.__name__}" if ours else f"{base.__module__}.{base.__qualname__}"[:300]
        )
    return out or [f"{kind.__module__}.{kind.__qualname__}"[:300]]


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def _adam(decoupled: object) -> str:
    return "AdamW" if decoupled else "Adam"


def _names(params: object) -> list[str]:
    return params if isinstance(params, list) else []


def _parsed(raw: object) -> dict[str, list[str]] | None:
    """Return a record from a checkpoint, whoever wrote it; None where it is none."""
    if not isinstance(raw, Mapping):
        return None
    out: dict[str, list[str]] = {}
    for key in (_CLASSES, _DEFAULTS):
        items: Any = raw.get(key)
        if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
            return None
        out[key] = items
    return out if out[_CLASSES] else None


def _text(live: list[str], saved: list[str]) -> str:
    there = f"of {saved[0]}" if saved else "of another optimizer"
    return f"the live optimizer is {live[0]}, and the saved state is {there}"


_NOT_HYPER = ("params", "param_names", OPTIMIZER_CLASS)


class ParameterOwners:
    """Who of the state owns a parameter, and what it is called there.

    A parameter's name in an optimizer is its FQN in the one module of the state that owns all
    parameters of that optimizer; where there is no such module, the FQN with the module's name
    before it. Tensors that stand in the state by themselves own themselves.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._by_owner: dict[str, dict[int, str]] = {}
        self._full: dict[int, str] = {}
        self._names: dict[str, dict[int, str]] = {}
        for site in sites:
            self._note(site)

    def _note(self, site: Site) -> None:
        name = site.place.name
        if isinstance(site.value, nn.Module):
            reshard(site.value)
            own = self._by_owner.setdefault(name, {})
            for entry in module_tensors(site.value, site.place):
                own.setdefault(id(entry.tensor), entry.fqn)
                self._full.setdefault(id(entry.tensor), f"{name}.{entry.fqn}")
        else:
            for at, tensor in _tensors_in(name, site.value):
                self._full.setdefault(id(tensor), at)

    def names(self, optimizer: Optimizer, place: StatePlace) -> dict[int, str]:
        """Return the parameters' names by ``id(parameter)``; looked up once for each place.

        Raises
        ------
        UsageError
            kind ``unowned-parameter``: the state has no module that owns it.
        """
        if place.name not in self._names:
            self._names[place.name] = self._find(optimizer, place)
        return self._names[place.name]

    def _find(self, optimizer: Optimizer, place: StatePlace) -> dict[int, str]:
        # What the user's module owns by what the groups hold.
        ids = {
            id(p): id(optimizer.owned(p) if isinstance(optimizer, HostedOptimizer) else p)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for own in self._by_owner.values():
            if all(i in own for i in ids.values()):
                return {held: own[i] for held, i in ids.items()}
        if missing := sum(i not in self._full for i in ids.values()):
            raise UsageError(
                "an optimizer holds parameters that no module of the state owns",
                kind="unowned-parameter",
                where=place.name,
                found=f"{missing} of {len(ids)} parameters, in {place.path}",
                hint="put the module into the same state; build the optimizer after fully_shard, "
                "parallelize_module and .to(), which replace parameters",
            )
        return {held: self._full[i] for held, i in ids.items()}

    def full_name(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter in the state, with its module's."""
        return self._full.get(id(parameter))


def add_optimizer(
    sink: Sink, place: StatePlace, optimizer: Optimizer, owners: ParameterOwners
) -> None:
    """Add the leaves of `optimizer`: ``<place>.<fqn>.<state>`` and ``<place>.groups``.

    In a load, state that the checkpoint has and the optimizer has not (it has not stepped) is
    made and becomes pending; state that the checkpoint knows to be absent is removed likewise.
    Of an optimizer that cannot take the saved state nothing is added but why not, in
    `Leaves.misfits`.

    Raises
    ------
    UsageError
        An unowned parameter, a state that belongs to no parameter, a container of optimizers.
    """
    _check_optimizer(optimizer, place)
    names = owners.names(optimizer, place)
    saved = _saved_state(sink.saved, place.name, set(names.values()))
    at = _groups_at(place)
    known = sink.saved is not None and at.name in sink.saved.objects
    if sink.saved is not None and known:
        keys = {key for entries in saved.values() for key in entries}
        groups = sink.saved.groups.get(at.name)
        if (why := misfit(optimizer, groups, set(names.values()), keys)) is not None:
            # Nothing of it has a place here: what is taken is all of a state, or nothing.
            sink.leaves.misfits[place.name] = why
            return
    add_groups(sink, place, optimizer, names)
    if sink.saved is not None and isinstance(optimizer, HostedOptimizer):
        _take_masters(sink, optimizer, owners, at.name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = names[id(parameter)]
            entries = saved.get(fqn, {})
            if known and not entries:
                forget = partial(optimizer.state.pop, parameter, None)
                sink.leaves.pending.append(PendingState((at.name,), forget, at.name))
                continue
            param = _Parameter(
                sink, place.child(fqn, f".state[{fqn}]"), optimizer, group, parameter, at.name
            )
            live = optimizer.state.get(parameter) or {}
            # Sorted: a restored optimizer holds its state in another order than a stepped one.
            for key in sorted({*live, *entries}, key=str):
                param.add(key, entries.get(key))


def _take_masters(
    sink: Sink, optimizer: HostedOptimizer, owners: ParameterOwners, groups: str
) -> None:
    """Let masters on the host follow the parameters that a load changes."""
    for group in optimizer.param_groups:
        for master in group["params"]:
            full = owners.full_name(optimizer.owned(master))
            names = (groups,) if full is None else (full, groups)
            sink.leaves.pending.append(PendingState(names, partial(optimizer.take, master)))


def add_groups(
    sink: Sink, place: StatePlace, optimizer: Optimizer, names: Mapping[int, str]
) -> StatePlace:
    """Add the hyperparameters of an optimizer; return where. `ParameterOwners` has the `names`."""
    at = _groups_at(place)
    put = partial(_put_groups, optimizer, names)

    def check(value: Any) -> None:
        _match_groups(optimizer, names, at.name, value)

    sink.add_object(at, _groups(optimizer, names), put, kind="groups", check=check)
    return at


def _groups_at(place: StatePlace) -> StatePlace:
    return place.child("groups", ".param_groups")


class _Parameter:
    """Adds the optimizer state of one parameter."""

    def __init__(
        self,
        sink: Sink,
        place: StatePlace,
        optimizer: Optimizer,
        group: dict[str, Any],
        parameter: torch.Tensor,
        unit: str,
    ) -> None:
        self._unit = unit
        self._sink = sink
        self._place = place
        self._optimizer = optimizer
        self._group = group
        self._parameter = parameter

    def add(self, key: str, saved: str | None) -> None:
        """Add the state called `key`; `saved` tells what the checkpoint has (tensor, object)."""
        place = self._place.child(escape_key(key), f"[{key!r}]")
        live = (self._optimizer.state.get(self._parameter) or {}).get(key)
        if saved == "object" or (saved is None and not isinstance(live, torch.Tensor)):
            add_value(self._sink, place, live, partial(self._put, key), kind="optim")
        elif isinstance(live, torch.Tensor):
            self._sink.add_tensor(place, live, "optim", partial(self._put, key))
        else:
            new = self._make(key, place.name)
            self._sink.add_tensor(place, new, "optim")
            self._sink.leaves.pending.append(
                PendingState((place.name,), partial(self._put, key, new), self._unit)
            )

    def _put(self, key: str, value: Any) -> None:
        self._optimizer.state[self._parameter][key] = value

    def _make(self, key: str, name: str) -> torch.Tensor:
        """Return a tensor as the optimizer would have made it in its first step."""
        entry = self._sink.saved.tensor(name) if self._sink.saved else None
        if entry is None:
            raise MismatchError("no such optimizer state in the checkpoint", where=name)
        dtype, shape = torch_dtype(entry[0], name), entry[1]
        like = self._parameter.detach()
        device = target_device(like, self._sink.device)
        if key == "step":
            # torch keeps step counters on the host, unless the kernels read them.
            on_device = self._group.get("capturable") or self._group.get("fused")
            return torch.zeros(shape, dtype=dtype, device=device if on_device else "cpu")
        if shape == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, device=device)
        if shape == ():
            return torch.zeros((), dtype=dtype, device=device)
        return torch.empty_like(like.new_zeros(shape, dtype=dtype), device=device)


def _tensors_in(name: str, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors_in(f"{name}.{i}", item)


def _check_optimizer(optimizer: Optimizer, place: StatePlace) -> None:
    if hidden := unseen_state(optimizer):
        raise UsageError(
            "an optimizer's state is not where optimizers have theirs",
            kind="optimizer-container",
            where=place.name,
            wanted="what its state_dict() has, in its attribute `state`",
            found=f"{type(optimizer).__name__}: state of {hidden} parameters in state_dict() alone",
            hint="put the optimizers that have the state into the state of the checkpoint",
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    loose = [k for k in optimizer.state if id(k) not in held and optimizer.state[k]]
    if loose:
        raise UsageError(
            "an optimizer has state that belongs to none of its parameters",
            kind="optimizer-state",
            where=place.name,
            found=f"{len(loose)} entries, the first for {_short(loose[0])}",
            hint="state must be keyed by parameters of the optimizer's groups",
        )


def _short(key: Any) -> str:
    return f"a tensor {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)[:80]


def _saved_state(saved: SavedNames | None, name: str, fqns: set[str]) -> dict[str, dict[str, str]]:
    """Return what the checkpoint has, by FQN and state name: ``tensor`` or ``object``."""
    out: dict[str, dict[str, str]] = {}
    if saved is None:
        return out
    prefix = name + "."
    found = [(n, "tensor") for n in saved.tensors_below(name)]
    found += [(n, "object") for n in saved.objects if n.startswith(prefix)]
    for full, what in found:
        fqn, _, key = full[len(prefix) :].rpartition(".")
        if fqn in fqns:
            out.setdefault(fqn, {})[key] = what
    return out


# --- groups ---------------------------------------------------------------------------------------


def _groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    said = record(optimizer)
    return [
        {
            "params": sorted(names[id(p)] for p in group["params"]),
            **{k: v for k, v in group.items() if k not in _NOT_HYPER},
            OPTIMIZER_CLASS: said,
        }
        for group in optimizer.param_groups
    ]


def _match_groups(
    optimizer: Optimizer, names: Mapping[int, str], where: str, saved: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair live groups with saved ones by their sets of parameters.

    A pipeline stage's groups are parts of the job's: when every live group lies inside one saved
    group, each takes that group's hyperparameters.
    """
    live = [
        (tuple(sorted(names[id(p)] for p in group["params"])), group)
        for group in optimizer.param_groups
    ]
    try:
        left = [(tuple(sorted(group["params"])), group) for group in saved]
    except (KeyError, TypeError) as error:
        raise MismatchError(
            "not optimizer groups", kind="groups", where=where, found=repr(error)
        ) from error
    wanted, found = Counter(k for k, _ in live), Counter(k for k, _ in left)
    if wanted != found:
        around = [_around(set(key), left) for key, _ in live]
        if all(group is not None for group in around):
            return [(own, g) for (_, own), g in zip(live, around, strict=True) if g is not None]
        raise MismatchError(
            "the optimizer's groups and the checkpoint's hold different parameters",
            kind="groups",
            where=where,
            wanted=_listing((wanted - found).elements(), "only in the live optimizer"),
            found=_listing((found - wanted).elements(), "only in the checkpoint"),
            hint="build the groups as they were when the checkpoint was saved",
        )
    pairs = []
    for key, group in live:
        i = next(i for i, (k, _) in enumerate(left) if k == key)
        pairs.append((group, left.pop(i)[1]))
    return pairs


def _around(
    params: set[str], saved: Sequence[tuple[tuple[str, ...], dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the one saved group that `params` is a proper or improper part of."""
    found = [group for key, group in saved if params and params <= set(key)]
    return found[0] if len(found) == 1 else None


def _listing(groups: Iterable[tuple[str, ...]], where: str) -> str:
    shown = [
        f"{{{', '.join(g[:6])}{f', ... {len(g)} in all' if len(g) > 6 else ''}}}" for g in groups
    ]
    return f"{len(shown)} groups {where}: {'; '.join(shown[:8])}"


@torch.no_grad()
def _put_groups(optimizer: Optimizer, names: Mapping[int, str], saved: Any) -> None:
    for live, group in _match_groups(optimizer, names, "groups", saved):
        for key, value in group.items():
            if key not in _NOT_HYPER:
                live[key] = _fit(live.get(key), value)


def _fit(live: Any, new: Any) -> Any:
    """Return `new` in the form of `live`: a tensor hyperparameter keeps its identity."""
    if isinstance(live, torch.Tensor):
        # A captured graph, or a scheduler, may hold this very tensor.
        return live.copy_(torch.as_tensor(new, dtype=live.dtype))
    if isinstance(live, list | tuple) and isinstance(new, list | tuple) and len(live) == len(new):
        return type(new)(_fit(a, b) for a, b in zip(live, new, strict=True))
    if isinstance(new, torch.Tensor) and live is not None and new.ndim == 0:
        return new.item()
    return new
