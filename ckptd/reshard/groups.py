"""Optimizer groups (``param_groups``) through a reshard: names; several optimizers told apart.

In it: which hyperparameters tell an optimizer; errors where groups of several would be mixed.

A group names its parameters, and names change with the layout. A checkpoint of ckptd holds the
groups of an optimizer as one object; state dicts of torch have ``param_groups`` beside ``state``,
and a foreign checkpoint holds them value by value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptd.checkpoint.format.manifest import OPTIMIZER_CLASS, ObjectEntry
from ckptd.errors import MismatchError

Renames = Mapping[str, Sequence[str]]
"""The new names of each parameter."""

_STATE, _OBJECT = "state", "groups"
_GROUPS = "param_groups."
_PARAMS = "params"
_DECOUPLED = "decoupled_weight_decay"
_TORCHS = frozenset(
    [
        "alpha",
        "amsgrad",
        "beta2_decay",
        "capturable",
        "centered",
        "dampening",
        "decoupled_weight_decay",
        "differentiable",
        "etas",
        "foreach",
        "fused",
        "history_size",
        "initial_accumulator_value",
        "lambd",
        "lr_decay",
        "momentum_decay",
        "ns_coefficients",
        "rho",
        "step_sizes",
    ]
)
"""Hyperparameters by which torch's optimizers differ, and which no group has for itself alone."""
_NUMBERED = re.compile(
    rf"([0-9]{{1,6}})\.({re.escape(OPTIMIZER_CLASS)}|[^.]+)(?:\.([0-9]{{1,6}}))?", re.ASCII
)


def groups_name(states: str) -> str:
    """Return the name of the groups object, by the names that a layout gives states."""
    return re.split(r"\{name\}|\{state\}", states, maxsplit=1)[0] + _OBJECT


def are_torchs(name: str) -> bool:
    """Whether groups stand beside states as torch has them: ``optim.state``, ``param_groups``."""
    return name.split(".")[-2:] == [_STATE, _OBJECT]


def keys_above(groups: str) -> tuple[str, ...]:
    """Return the keys of an optimizer in a state dict, by the name of the groups object.

    Those of ``optim.state.groups`` and ``optim.groups`` are ``optim``.
    """
    *keys, last = groups.split(".")
    if keys[-1:] == [_STATE]:
        del keys[-1]
    rest = last.removesuffix(_OBJECT)
    return (*keys, rest) if rest else tuple(keys)


def params_of(
    objects: Sequence[ObjectEntry], groups: str, params: Collection[str] | None
) -> Sequence[str]:
    """Return the parameters that the groups of an optimizer name, as groups call them.

    Parameters
    ----------
    objects
        Those of a checkpoint, where groups are one object, or values as torch has them.
    groups
        The name of the groups object, as `groups_name` gives it.
    params
        Parameters that there are; None: whatever a value names may be one.
    """
    found: dict[str, None] = {}
    above = settings_above(groups)
    for entry in objects:
        if entry.kind == "groups" and entry.name == groups and isinstance(entry.value, list):
            found |= dict.fromkeys(p for g in entry.value for p in g.get(_PARAMS, ()))
        elif entry.name.startswith(above):
            param, _, key = entry.name.removeprefix(above).rpartition(".")
            if key == _PARAMS and isinstance(entry.value, list):
                found |= dict.fromkeys(p for p in entry.value if isinstance(p, str))
            elif param in params if params is not None else not param.isdigit():
                found[param] = None
    return list(found)


def settings_above(groups: str) -> str:
    """Return what the names of torch's values begin with, by the name of the groups object."""
    return "".join(f"{key}." for key in keys_above(groups)) + _GROUPS


def gathered(
    objects: Sequence[ObjectEntry], groups: str, params: Sequence[str]
) -> Sequence[ObjectEntry]:
    """Put the values of torch's ``param_groups`` together to the groups of an optimizer.

    They are numbered (``optim.param_groups.0.lr``, with names of parameters in ``params``); in a
    state dict that was flattened each parameter has its own (``optim.param_groups.NAME.lr``).

    Parameters
    ----------
    objects
        Those of the source.
    groups
        The name of the groups object, as `groups_name` gives it for the source.
    params
        The names of its parameters, as groups call them.

    Returns
    -------
    objects
        All others, and the groups object; as they were where values do not say whose they are.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: they are groups of several optimizers, each of which wants its own.
    """
    above = settings_above(groups)
    mine = {o.name.removeprefix(above): o for o in objects if o.name.startswith(above)}
    if not mine or any(o.tensor for o in mine.values()):
        return objects
    values = _numbered(mine) or _flattened(mine, params)
    if not values:
        return objects
    _check_one(values, above)
    others = [o for o in objects if not o.name.startswith(above)]
    return [*others, ObjectEntry(groups, values, kind="groups")]


def _check_one(groups: Sequence[Mapping[str, Any]], above: str) -> None:
    """Refuse groups of several optimizers, which torch's state dict holds as one list."""
    kinds = {_kind(group): number for number, group in enumerate(groups)}
    if len(kinds) < 2:
        return
    (first, one), (second, other), *_ = kinds.items()
    raise MismatchError(
        "parameter groups of several optimizers cannot be written as those of one",
        kind="lay-fit",
        where=f"{above}{one} and {above}{other}",
        wanted="groups of one optimizer: all of them have the same hyperparameters",
        found=f"{', '.join(sorted(first ^ second))[:200]} in one of them only",
        hint="load it with torch.distributed.checkpoint; or go on with the weights alone:"
        " ckptd export, or ckptd reshard of what dcp.save({'model': ...}) holds",
    )


def _kind(group: Mapping[str, Any]) -> frozenset[str]:
    """Return what tells the optimizer of a group: torch gives each group all hyperparameters."""
    decoupled = {f"{_DECOUPLED}=True"} if group.get(_DECOUPLED) else set()
    return _TORCHS.intersection(group) | decoupled


def _numbered(values: Mapping[str, ObjectEntry]) -> list[dict[str, Any]] | None:
    """Return the groups that numbers tell apart; None unless each names its parameters."""
    groups: dict[int, dict[str, Any]] = {}
    for name, entry in values.items():
        found = _NUMBERED.fullmatch(name)
        if found is None or found[3]:
            return None
        groups.setdefault(int(found[1]), {})[found[2]] = entry.value
    out = [groups[n] for n in sorted(groups)]
    named = all(isinstance(g.get(_PARAMS), list) for g in out)
    return out if named and all(isinstance(p, str) for g in out for p in g[_PARAMS]) else None


def _flattened(
    values: Mapping[str, ObjectEntry], params: Sequence[str]
) -> list[dict[str, Any]] | None:
    """Return groups of the parameters that have the same values; None if one is in no group."""
    by_param: dict[str, dict[str, Any]] = {}
    known = set(params)
    for name, entry in values.items():
        param, _, key = name.rpartition(".")
        if param not in known:
            return None
        by_param.setdefault(param, {})[key] = entry.value
    groups: dict[str, dict[str, Any]] = {}
    for param, found in by_param.items():
        group = groups.setdefault(repr(sorted(found.items())), {**found, _PARAMS: []})
        group[_PARAMS].append(param)
    return list(groups.values())


def renamed(entry: ObjectEntry, renames: Renames) -> list[dict[str, Any]]:
    """Return optimizer groups with the target's names; a name belongs to one group.

    Raises
    ------
    MismatchError
        kind ``lay-fit``: parameters of different groups become one tensor.
    """
    out: list[dict[str, Any]] = []
    home: dict[str, int] = {}
    for number, group in enumerate(entry.value):
        names: dict[str, None] = {}
        for old in group[_PARAMS]:
            # What is no tensor of the checkpoint keeps its name.
            for new in renames.get(old, (old,)):
                names[new] = None
                if home.setdefault(new, number) != number:
                    raise MismatchError(
                        "parameters of different optimizer groups become one tensor",
                        kind="lay-fit",
                        where=f"{entry.name}: {new}",
                        found=f"{old} is in group {number}, another part in group {home[new]}",
                    )
        out.append({**group, _PARAMS: sorted(names)})
    return out
