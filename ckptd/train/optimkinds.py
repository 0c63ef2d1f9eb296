"""Which optimizer a checkpoint's state is of, and whether a live one can take it.

Names of parameters and of hyperparameters do not tell: AdamW's groups have a ``lr`` that SGD would
take, and SGD keeps ``exp_avg`` in its state without a look at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from ckptd.format.manifest import OPTIMIZER_CLASS

__all__ = ["misfit", "record"]

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
    return {_CLASSES: _classes(type(optimizer)), _DEFAULTS: sorted(map(str, optimizer.defaults))}


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
    known = _STATE.get(type(optimizer).__name__) if own[_CLASSES][0].startswith(_BASE) else None
    kept = {*keys} - {"step"}
    if known is not None and kept and kept.isdisjoint(known):
        return _text(own[_CLASSES], []) + f" ({', '.join(sorted(kept))[:200]})"
    return None


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
