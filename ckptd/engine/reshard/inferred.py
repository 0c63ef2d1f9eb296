"""A layout for a checkpoint that has no program: its tensors are their own logical tensors.

Names that differ in numbers only, and whose tensors are alike, become one rule; optimizer state
with the shape of its parameter follows it. So recipes such as ``fsdp`` and ``zero1``, and rules of
one's own, apply to any checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ckptd.engine.reshard.layouts import Program
from ckptd.layout.lay.dims import Atom
from ckptd.layout.lay.name import Index, Name, NamePart, Text, join
from ckptd.layout.lay.program import Family, File, Layout, Rule, Scalar, Space, State, Stored

__all__ = ["infer"]

NAME = "stored"
"""Of the layout and of its space."""

_PARAMS = "model."
_STATES = "optim."
_SHORT = {"exp_avg": "m", "exp_avg_sq": "s", "master": "w"}
"""Short names that recipes speak of."""
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole component of a dotted name
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Shape = tuple[int, ...]


def infer(shapes: Mapping[str, Shape], *, has_sections: bool = True) -> Program:
    """Return the layout of some stored tensors, on no mesh.

    Parameters
    ----------
    shapes
        Shape of each tensor by name.
    has_sections
        Whether a name that begins with ``model.`` is in a section of that name.
    """
    states, scalars, prefix = _states(shapes)
    if has_sections and not prefix and shapes and all(n.startswith(_PARAMS) for n in shapes):
        prefix = _PARAMS
    following = {f"{_STATES}{n.removeprefix(prefix)}." for n in shapes if n.startswith(prefix)}
    params = {
        n.removeprefix(prefix): s
        for n, s in shapes.items()
        if not ((states or scalars) and n.rpartition(".")[0] + "." in following)
    }
    families, rules = [], []
    for number, (name, shape) in enumerate(_grouped(params)):
        atoms = tuple(f"d{number}_{i}" for i in range(len(shape)))
        families.append(Family(name, atoms))
        rules.append(Rule(name, name, tuple(Atom(a) for a in atoms)))
    space = Space(
        NAME,
        tuple(families),
        tuple(State(_SHORT.get(s, s), s) for s in _with_known(states, scalars)),
        tuple(Scalar(s) for s in scalars),
    )
    stored = (Stored(f"{prefix}{{name}}"),) if prefix else ()
    return Program(File((space, Layout(NAME, NAME, (), (*stored, *rules)))), NAME)


def _states(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str], str]:
    """Return states and scalars that follow parameters, and what names of parameters begin with.

    None if there is anything else than parameters and what follows them.
    """
    for prefix in (_PARAMS, ""):
        found = _following(shapes, prefix)
        if found is not None:
            return (*found, prefix)
    return [], [], ""


def _with_known(states: Sequence[str], scalars: Sequence[str]) -> list[str]:
    """Add the states that recipes speak of: one that no tensor has costs nothing."""
    if not states:
        return []
    return [*states, *(s for s in _SHORT if s not in states and s not in scalars)]


def _following(shapes: Mapping[str, Shape], prefix: str) -> tuple[list[str], list[str]] | None:
    states: dict[str, None] = {}
    scalars: dict[str, None] = {}
    for name, shape in shapes.items():
        base, _, state = name.removeprefix(_STATES).rpartition(".")
        param = shapes.get(f"{prefix}{base}")
        if name.startswith(_STATES) and param is not None and _WORD.fullmatch(state):
            if shape not in (param, ()):
                return None
            (states if shape == param and shape else scalars)[state] = None
        elif not name.startswith(prefix):
            return None
    if not states or states.keys() & scalars.keys():
        return None
    return list(states), list(scalars)


def _grouped(params: Mapping[str, Shape]) -> Iterator[tuple[Name, Shape]]:
    """Yield a name pattern for each group of alike tensors."""
    groups: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in params.items():
        groups.setdefault((_NUMBER.sub("0", name), shape), []).append(name)
    kinds: dict[str, int] = {}
    for pattern, _ in groups:
        kinds[pattern] = kinds.get(pattern, 0) + 1
    first: dict[int, int] = {}
    for (pattern, shape), names in groups.items():
        extents = _extents(names) if kinds[pattern] == 1 and len(names) > 1 else None
        if extents is not None:
            yield _pattern(names[0], _axes(extents, first)), shape
        else:
            for name in names:
                yield Name((Text(name),)), shape


def _axes(extents: Sequence[int], first: dict[int, int]) -> list[str]:
    """Return an axis for each number in a name: one of another length is another axis.

    An encoder and a decoder may have different numbers of layers.
    """
    return [
        f"i{k}" if first.setdefault(k, extent) == extent else f"i{k}_{extent}"
        for k, extent in enumerate(extents)
    ]


def _extents(names: Sequence[str]) -> list[int] | None:
    """Return how many numbers there are at each place, if names have all combinations of them."""
    found = [tuple(_NUMBER.findall(n)) for n in names]
    if any(t != str(int(t)) for numbers in found for t in numbers):
        return None
    numbers = {tuple(map(int, f)) for f in found}
    extents = [max(column) + 1 for column in zip(*numbers, strict=True)]
    size = 1
    for n in extents:
        size *= n
    # The product is built only where it is as long as the list of names is.
    full = size == len(names) and numbers == set(product(*map(range, extents)))
    return extents if full else None


def _pattern(name: str, axes: Sequence[str]) -> Name:
    """Return a name with an index for each component that is a number."""
    parts: list[NamePart] = []
    at = 0
    for number, found in enumerate(_NUMBER.finditer(name)):
        parts += [Text(name[at : found.start()]), Index(axes[number])]
        at = found.end()
    return Name(join([*parts, Text(name[at:])]))
