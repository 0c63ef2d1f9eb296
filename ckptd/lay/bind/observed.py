"""Observed tensors sorted by rules; names that no rule matches, and names that are near.

In it: how many names are compared and shown; tensors of one rule with several shapes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from ckptd.base.grouping import by_key
from ckptd.lay.held import split_axes
from ckptd.lay.indexes import IndexCut
from ckptd.lay.matching import BufferNames, Match, Matcher, NameTemplates, holds, stored_name
from ckptd.lay.resolve import Equation, Finding, MeshShape, Resolved
from ckptd.lay.scales import held_shape
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import NameIndex

Shape: TypeAlias = tuple[int, ...]
Coordinates: TypeAlias = tuple[tuple[str, int], ...]
"""Sorted coordinates on the mesh axes that a rule uses; empty for stored tensors."""

Numbers: TypeAlias = tuple[tuple[str, int], ...]

_DIGITS = re.compile("[0-9]+")

_MAX_KINDS = 20
_MAX_COMPARED = 200
"""Longest name that is compared with patterns, which takes the square of its length."""


@dataclass(frozen=True)
class SeenTensor:
    """A shape, and the first tensor that had it."""

    shape: Shape
    name: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name} [{','.join(map(str, self.shape))}]{where}"


@dataclass
class Instance:
    """The tensors of one rule, or of one that its globs represent.

    Attributes
    ----------
    equation, texts
        Number of the rule, and what its globs matched.
    first
        Name of the first tensor.
    shapes
        All shapes at the coordinates that the rule uses.
    numbers
        Numbers in names, at the coordinates that the rule uses.
    ranks
        Ranks that have one.
    """

    equation: int
    texts: tuple[str, ...]
    first: str
    shapes: dict[Coordinates, dict[Shape, SeenTensor]] = field(default_factory=dict)
    numbers: dict[Coordinates, set[Numbers]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


@dataclass
class Observed:
    """Everything that was observed.

    Attributes
    ----------
    stored
        Whether these are tensors of a checkpoint, or of ranks.
    instances
        By rule and texts of globs.
    ranks
        Ranks of which the tensors are known.
    unmatched
        Tensors without a rule.
    cuts
        How indexes are dealt to ranks, as far as it was known.
    buffers
        Lengths of the buffers of flats, by rank and name.
    """

    stored: bool
    instances: dict[tuple[int, tuple[str, ...]], Instance] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    unmatched: list[SeenTensor] = field(default_factory=list)
    cuts: Mapping[NameIndex, IndexCut] = field(default_factory=dict)
    buffers: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(
        self,
        match: Match,
        at: Coordinates,
        numbers: Numbers,
        seen: SeenTensor,
        *,
        packed: bool = False,
    ) -> None:
        """Add a tensor; the shape of one that is packed says nothing about its rule."""
        key = (match.equation, match.texts)
        instance = self.instances.get(key)
        if instance is None:
            instance = self.instances[key] = Instance(*key, seen.name)
        instance.numbers.setdefault(at, set()).add(numbers)
        if seen.rank is not None:
            instance.ranks.add(seen.rank)
        if not packed:
            instance.shapes.setdefault(at, {}).setdefault(seen.shape, seen)

    def first_shapes(self) -> dict[int, dict[Coordinates, SeenTensor]]:
        """Return the shape of each rule at coordinates, the first of several."""
        out: dict[int, dict[Coordinates, SeenTensor]] = {}
        for instance in self.instances.values():
            mine = out.setdefault(instance.equation, {})
            for at, shapes in instance.shapes.items():
                mine.setdefault(at, next(iter(shapes.values())))
        return out


def from_stored(resolved: Resolved, shapes: Mapping[str, Shape]) -> Observed:
    """Sort the tensors of a checkpoint."""
    out = Observed(stored=True)
    matcher = Matcher(resolved, stored=True)
    templates = NameTemplates(resolved)
    for name, shape in shapes.items():
        seen = SeenTensor(tuple(shape), name)
        match = _matched(matcher, templates, name, None)
        if match is None:
            out.unmatched.append(seen)
        elif match.equation >= 0:
            undressed = templates.take(name)
            if undressed is None or not undressed.state:
                seen = SeenTensor(held_shape(resolved.equations[match.equation], seen.shape), name)
            out.add(match, (), match.numbers, seen)
    return out


def from_ranks(
    resolved: Resolved,
    ranks: Mapping[int, Mapping[str, Shape]],
    cuts: Mapping[NameIndex, IndexCut] | None = None,
) -> Observed:
    """Sort the tensors of some ranks; `cuts`: how indexes are dealt to them, as far as known."""
    out = Observed(stored=False, ranks=tuple(sorted(ranks)), cuts=cuts or {})
    matcher = Matcher(resolved, stored=False, cuts=cuts)
    templates = NameTemplates(resolved)
    mesh = resolved.mesh or MeshShape(1, {}, {})
    packed = {s for flat in resolved.flats for s in flat.states}
    buffers = BufferNames(resolved)
    axes = [axes_of(e) for e in resolved.equations]
    for rank in out.ranks:
        coordinates = mesh.coordinates(rank)
        for name, shape in ranks[rank].items():
            if name in buffers:
                out.buffers.setdefault(rank, {})[name] = math.prod(shape)
                continue
            seen = SeenTensor(tuple(shape), name, rank)
            match = _matched(matcher, templates, name, coordinates)
            if match is None:
                out.unmatched.append(seen)
            elif match.equation >= 0:
                numbers, at = _placed(match, coordinates, mesh, axes[match.equation])
                undressed = templates.take(name)
                state = (undressed.state if undressed else "") or "params"
                out.add(match, at, numbers, seen, packed=bool({state, "*"} & packed))
    _add_empty(out, resolved, mesh, axes)
    return out


def axes_of(equation: Equation) -> frozenset[str]:
    """Return the mesh axes that a rule's tensors differ on."""
    out: frozenset[str] = frozenset().union(*map(split_axes, equation.dims))
    for part in equation.name.parts:
        if isinstance(part, NameIndex):
            out |= {axis for axis, _ in part.splits}
    return out


def _matched(
    matcher: Matcher, templates: NameTemplates, name: str, coordinates: Mapping[str, int] | None
) -> Match | None:
    """Return the rule of a name, as a parameter's or a state's; -1 for scalars."""
    undressed = templates.take(name)
    if undressed is None:
        # Neither a parameter nor a state: only a rule that leaves it out can be meant.
        found = matcher.match(name, coordinates)
        return found if found is not None and found.equation < 0 else None
    if undressed.scalar:
        return Match(-1, (), ())
    found = matcher.match(undressed.name, coordinates)
    if found is None and undressed.state:
        found = matcher.match(name, coordinates)
    return found


def _placed(
    match: Match, coordinates: Mapping[str, int], mesh: MeshShape, axes: frozenset[str]
) -> tuple[Numbers, Coordinates]:
    """Tell the numbers of a name from its coordinates on local mesh axes."""
    local = {a: n for a, n in match.numbers if a in mesh.local}
    numbers = tuple((a, n) for a, n in match.numbers if a not in local)
    at = {**coordinates, **local}
    return numbers, tuple(sorted((a, at[a]) for a in axes if a in at))


def _add_empty(
    out: Observed, resolved: Resolved, mesh: MeshShape, axes: list[frozenset[str]]
) -> None:
    """Note where a rule's tensors could be and none is: a stage without layers."""
    for instance in out.instances.values():
        equation = resolved.equations[instance.equation]
        mine = axes[instance.equation]
        # A name that does not say the virtual stage has the numbers of all of them.
        said = {p.axis for p in equation.name.parts if isinstance(p, NameIndex)}
        local = sorted(mine & said & set(mesh.local))
        for rank in out.ranks:
            coordinates = mesh.coordinates(rank)
            if not holds(equation, coordinates, mesh.extents):
                continue
            for combination in itertools.product(*(range(mesh.extents[a]) for a in local)):
                at = {**coordinates, **dict(zip(local, combination, strict=True))}
                key = tuple(sorted((a, at[a]) for a in mine if a in at))
                instance.numbers.setdefault(key, set())


# --- findings about it --------------------------------------------------------------------------


def unmatched(observed: Observed, resolved: Resolved) -> Iterator[Finding]:
    """Yield a finding for each group of alike names that no rule has."""
    local = resolved.mesh.local if resolved.mesh else ()
    patterns = {
        show(stored_name(e.name, local) if observed.stored else e.name): e
        for e in resolved.equations
    }
    groups = by_key((_DIGITS.sub("0", seen.name), seen) for seen in observed.unmatched)
    layout = f"layout {resolved.name}"
    packs = any(flat.group.kind != "each" for flat in resolved.flats)
    for group in itertools.islice(groups.values(), _MAX_KINDS):
        above = _section(group[0].name, patterns) if observed.stored else ""
        yield _unmatched(group, patterns, layout, above, packs=packs and not observed.stored)
    if len(groups) > _MAX_KINDS:
        message = f"no rule matches {len(groups) - _MAX_KINDS} more kinds of names"
        yield Finding("unmatched", message, rule=layout, fit=True)


def _section(name: str, patterns: Iterable[str]) -> str:
    """Return what stands before a name that would have a rule without it; "" for none."""
    bare = {_bare(p) for p in patterns}
    *above, _ = name.split(".")
    for count in range(1, len(above) + 1):
        top = ".".join(above[:count])
        if _DIGITS.sub("0", name.removeprefix(f"{top}.")) in bare:
            return top
    return ""


def _unmatched(
    group: list[SeenTensor],
    patterns: Mapping[str, Equation],
    layout: str,
    above: str,
    *,
    packs: bool,
) -> Finding:
    first = group[0]
    names = {s.name for s in group}
    more = f" (nor {len(names) - 1} more names like it)" if len(names) > 1 else ""
    notes = []
    drop = _pattern(first.name)
    near: list[str] = []
    if len(first.name) <= _MAX_COMPARED:
        near = get_close_matches(first.name, patterns, n=1, cutoff=0.4)
    if near:
        equation = patterns[near[0]]
        notes.append(f"closest is {equation.at.file}:{equation.at.line}  {near[0]}")
        on = [show(m) for m in equation.modifiers if show(m).startswith("on ")]
        if on and _like(near[0], first.name):
            notes.append(f"which is only for ranks {' '.join(on)}")
        if equation.only and _like(near[0], first.name):
            axes = " and ".join(equation.only)
            notes.append(f"which has names for some numbers of {axes} only: see for {axes}=...")
        if _like(near[0], first.name):
            drop = first.name  # with stars it would take from the rule what is the rule's
    if packs and len(first.shape) == 1:
        notes.append(
            "a buffer of a flat is flat.NUMBER.params or flat.NUMBER.STATE, by the state's short"
            " name, unless the flat says another name: as"
        )
    if above:
        notes.append(
            f"the layout has such names without {above!r}: use reshard --section {above}; to keep"
            f' the rest too, add a line: stored "{above}.{{name}}"'
        )
    else:
        notes.append(f"to leave it out, write: {drop} = drop")
    message = f"no rule matches {first}{more}"
    return Finding("unmatched", message, rule=layout, notes=tuple(notes), fit=True)


def _like(pattern: str, name: str) -> bool:
    return _bare(pattern) == _DIGITS.sub("0", name)


def _bare(pattern: str) -> str:
    return _DIGITS.sub("0", re.sub(r"\{[^}]*\}", "0", pattern))


def _pattern(name: str) -> str:
    """Return a name with stars where it has numbers for components."""
    return ".".join("*" if c.isdigit() else c for c in name.split("."))


def several_shapes(observed: Observed, equations: Iterable[Equation]) -> Iterator[Finding]:
    """Yield a finding for each rule whose tensors differ where they must not, or in their rank."""
    by_number = list(equations)
    for instance in observed.instances.values():
        equation = by_number[instance.equation]
        for shapes in instance.shapes.values():
            first, *others = shapes.values()
            wrong = next((s for s in shapes.values() if len(s.shape) != len(equation.dims)), None)
            if wrong is not None:
                dims = len(equation.dims)
                message = f"{wrong} has {len(wrong.shape)} dimensions, and this rule has {dims}"
                yield Finding("dimensions", message, equation.at, equation.text, fit=True)
                break
            if others:
                message = f"tensors of this rule differ in shape: {first} and {others[0]}"
                yield Finding("shapes", message, equation.at, equation.text, fit=True)
                break
