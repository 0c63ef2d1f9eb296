"""State dict of a target: nested keys of tensors, objects and optimizer groups as values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import about_foreign
from ckptd.checkpoint.format.names import unescape_fqn, unescape_key
from ckptd.errors import CorruptError, UsageError
from ckptd.lay.resolve import Resolved
from ckptd.reshard.groups import keys_above
from ckptd.reshard.target import Assembled, decoded_object
from ckptd.reshard.writers.pickling import as_plain, is_plain

KeyPath = tuple[str | int, ...]
"""Keys of nested dicts, and numbers in lists, from the outside in."""

_GROUPS, _PARAMS = "param_groups", "params"
_TITAN = "optimizer.state.{name}.{state}"


class StateKeys:
    """Where tensors of a layout are in a nested state dict.

    ``stored "model.{name}" states "optim.state.{name}.{state}"`` puts a parameter below the key
    ``model``, under its whole name, and a state below ``optim``, ``state`` and that name.
    """

    def __init__(self, layout: Resolved) -> None:
        ends = [s.stored for s in layout.states] + [s.name for s in layout.scalars]
        states = [t.replace("{state}", end) for t in layout.state_templates for end in ends]
        # The longest first, as the name of a state may be the end of another's.
        self._templates = [
            *sorted(map(_around, states), key=lambda t: -len(t[0]) - len(t[1])),
            _around(layout.params),
        ]

    def path(self, name: str) -> KeyPath:
        """Return the keys of a tensor."""
        for before, after in self._templates:
            inner = len(name) - len(before) - len(after)
            if inner > 0 and name.startswith(before) and name.endswith(after):
                above = before[:-1].split(".") if before.endswith(".") else []
                below = after[1:].split(".") if after.startswith(".") else []
                whole = name[len(before) if above else 0 : len(name) - (len(after) if below else 0)]
                return (*above, whole, *below)
        return (name,)


def _around(template: str) -> tuple[str, str]:
    before, _, after = template.partition("{name}")
    return before, after


def plain_names(assembled: Assembled) -> Callable[[str], str]:
    """Return what gives the name of a tensor or an object as other programs have it.

    ckptd escapes what keys of a state dict hold besides letters, digits and the like (``a%2Fb``);
    names of a foreign checkpoint stay as they are.
    """
    if about_foreign(assembled.composed.stock.source.manifest):
        return str
    return lambda name: ".".join(map(_plain_key, name.split("."))) if "%" in name else name


def _plain_key(segment: str) -> str:
    """Return a key of a state dict; what is not escaped as ckptd does it stays as it is."""
    for unescape in (unescape_fqn, unescape_key):
        try:
            return str(unescape(segment))
        except CorruptError:
            continue
    return segment


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return a nested dict of values by their keys; numbers are keys of lists.

    Raises
    ------
    UsageError
        Something would be both a value and a dict.
    """
    out: dict[str, Any] = {}
    for path, value in values.items():
        here: Any = out
        for key in path[:-1]:
            here = here.setdefault(key, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict) or path[-1] in here:
            name = ".".join(map(str, path))
            raise UsageError(
                "a name is both a value and a prefix of another name", where=repr(name)
            )
        here[path[-1]] = value
    return {k: _listed(v) for k, v in out.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return value
    if all(type(k) is int for k in value):
        return [_listed(value[k]) for k in sorted(value)]
    return {k: _listed(v) for k, v in value.items()}


@dataclass(frozen=True, slots=True)
class StateObjects:
    """The objects of a target.

    Attributes
    ----------
    values
        Plain values by their keys.
    left_out
        Names of those that are no plain values.
    simplified
        Names of those that are values of other types in the source, such as sets.
    """

    values: Mapping[KeyPath, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    simplified: Sequence[str] = ()


def objects_of(assembled: Assembled, states: str) -> StateObjects:
    """Return the objects of a target as plain values.

    Groups of an optimizer are as torch has them, ``param_groups`` beside ``state``; where states
    are named as torchtitan's, which flattens groups, each parameter has settings of its own. A
    value of each rank is a list of them.

    Parameters
    ----------
    states
        How the target's layout names states.

    Raises
    ------
    CorruptError
        An encoded value of the source is damaged.
    UsageError
        Two objects would have one name.
    """
    values: dict[KeyPath, Any] = {}
    left_out: list[str] = []
    simplified: list[str] = []
    plain = plain_names(assembled)
    raws = _raws(assembled)
    for entry in assembled.target.objects:
        try:
            stored = codec.decode(raws[entry.name])
            value = as_plain(stored)
        except UsageError:
            left_out.append(entry.name)
            continue
        if not is_plain(stored):
            simplified.append(entry.name)
        if entry.kind == "groups" and isinstance(value, list):
            for group in value:
                if isinstance(group.get(_PARAMS), list):
                    group[_PARAMS] = [plain(p) if type(p) is str else p for p in group[_PARAMS]]
            found = _groups(entry.name, value, flat=states == _TITAN)
        else:
            found = {_keys(entry.name): value}
        found = {tuple(plain(k) if type(k) is str else k for k in p): v for p, v in found.items()}
        for path in found.keys() & values.keys():
            raise _twice(path)
        values |= found
    return StateObjects(_with_tuples(values), left_out, simplified)


def _twice(path: KeyPath) -> UsageError:
    return UsageError("two objects would have one name", where=".".join(map(str, path)))


def _with_tuples(values: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Put settings of a group together that a reader found one by one: ``betas.0``, ``betas.1``."""
    out: dict[KeyPath, Any] = {}
    parts: dict[KeyPath, dict[int, Any]] = {}
    for path, value in values.items():
        found = re.fullmatch(r"(.+)\.([0-9]{1,6})", str(path[-1]), re.ASCII)
        if found is None or len(path) < 3 or path[-3] != _GROUPS:
            out[path] = value
        else:
            parts.setdefault((*path[:-1], found[1]), {})[int(found[2])] = value
    for path, items in parts.items():
        if path in out:
            raise _twice(path)
        out[path] = tuple(items[n] for n in sorted(items))
    return out


def _groups(name: str, groups: Sequence[dict[str, Any]], *, flat: bool) -> dict[KeyPath, Any]:
    """Return the settings of an optimizer's groups by their keys.

    Parameters
    ----------
    name
        Of the groups object: there are as many as there are optimizers.
    flat
        Give each parameter settings of its own.
    """
    keys = keys_above(name)
    if not flat:
        return {
            (*keys, _GROUPS, number, str(key)): value
            for number, group in enumerate(groups)
            for key, value in group.items()
        }
    return {
        (*keys, f"{_GROUPS}.{param}.{key}"): value
        for group in groups
        for param in group[_PARAMS]
        for key, value in group.items()
        if key != _PARAMS
    }


def split_groups(
    values: Mapping[KeyPath, Any],
) -> tuple[list[dict[str, Any]], dict[KeyPath, Any]]:
    """Return the groups of an optimizer, in order, and the other values."""
    groups: dict[int, dict[str, Any]] = {}
    others: dict[KeyPath, Any] = {}
    for path, value in values.items():
        number = path[-2] if len(path) > 2 and path[-3] == _GROUPS else None
        if isinstance(number, int):
            groups.setdefault(number, {})[str(path[-1])] = value
        else:
            others[path] = value
    return [groups[n] for n in sorted(groups)], others


def _keys(name: str) -> KeyPath:
    """Return the keys of an object; numbers only where torch has a list."""
    found = re.fullmatch(rf"(.*\.)?{_GROUPS}\.([0-9]+)\.(.+)", name, re.ASCII)
    if found is None:
        return tuple(name.split("."))
    above = found[1][:-1].split(".") if found[1] else []
    return (*above, _GROUPS, int(found[2]), found[3])


def _raws(assembled: Assembled) -> dict[str, Any]:
    """Return the values of all objects, not decoded, by name; of one a rank, a list."""
    target, stock = assembled.target, assembled.composed.stock
    numbers = {t.name: number for number, t in enumerate(target.tensors)}
    raws: dict[str, list[bytes]] = {}
    for entry in target.objects:
        if not entry.tensor:
            continue
        number = numbers[entry.tensor]
        grid = target.grids[target.tensors[number].grid].grid
        made = [target.feeds[number](piece).literal for piece in range(grid.npieces)]
        if all(made):
            raws[entry.name] = [literal() for literal in made if literal is not None]
        else:
            found = stock.encoded(entry.name)
            raws[entry.name] = [found[rank] for rank in sorted(found)]
    out = {e.name: e.value for e in target.objects if not e.tensor}
    for entry in target.objects:
        if entry.tensor:
            parts = [decoded_object(raw, entry.name) for raw in raws[entry.name]]
            out[entry.name] = parts if entry.per_rank else parts[0]
    return out
