"""Rules to equations: references, ``alias``, followers (LoRA, ``follow rows``); limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ckptd.errors import UsageError
from ckptd.lay.resolve.conditions import numbers_of
from ckptd.lay.resolve.drafts import Draft, has_globs, is_drop, wrapped
from ckptd.lay.resolve.equation import Equation, Family, Tags
from ckptd.lay.resolve.families import Families
from ckptd.lay.resolve.finding import Finding
from ckptd.lay.resolve.lets import Lets
from ckptd.lay.resolve.numbers import ALL, Numbers
from ckptd.lay.resolve.path import paths
from ckptd.lay.resolve.pattern import covers, encoded
from ckptd.lay.syntax import show, tree

FOLLOWER = "lora_B"
"""End of the names of a follower's tensors, after the name of the tensor that they follow."""

_WEIGHT = ".weight"
_MAX_PAIRS = 10_000_000
_MAX_EQUATIONS = 65_536
_MAX_HOLDERS = 64


class RuleTable:
    """Equations in the making.

    Attributes
    ----------
    equations, drops
        In order; each drop with the number of equations before it.
    findings
        Rules that are wrong, and left out.
    """

    def __init__(self, families: Families, lets: Lets) -> None:
        self.equations: list[Equation] = []
        self.drops: list[tuple[tree.Name, int]] = []
        self.findings: list[Finding] = []
        self._some: list[Equation] = []
        self._families = families
        self._lets = lets

    def add(self, drafts: Sequence[Draft]) -> None:
        """Look rules up, in order.

        Raises
        ------
        UsageError
            ``lay-rule``: aliases, followers or numbers ask each rule for too many others.
        """
        asking = sum(_waits(d) or any(isinstance(m, tree.For) for m in d.modifiers) for d in drafts)
        if asking * len(drafts) > _MAX_PAIRS:
            raise _wrong(
                f"aliases, followers and 'for' compare more than {_MAX_PAIRS} pairs of rules"
            )
        found: list[list[Equation] | None] = [
            None if _waits(d) else self._tried(d, ()) for d in drafts
        ]
        self._give_way(drafts, found)
        ready = [e for group in found if group for e in group]
        for k, rule in enumerate(drafts):
            group = found[k]
            if group is None:
                group = self._tried(rule, ready)
            if is_drop(rule):
                self.drops.append((rule.name, len(self.equations)))
            for equation in group:
                if len(self.equations) == _MAX_EQUATIONS:
                    raise _wrong(f"the rules become more than {_MAX_EQUATIONS}")
                self.equations.append(self._less(equation))
                if equation.only:
                    self._some.append(equation)

    def _give_way(self, drafts: Sequence[Draft], found: list[list[Equation] | None]) -> None:
        """Leave out imported rules for tensors that the importing layout has rules for.

        It may hold them under other names, or fused: two rules for a tensor would contradict each
        other, and it is the layout's own that is meant.
        """
        own: dict[str, list[tuple[int, Equation]]] = {}
        for rule, group in zip(drafts, found, strict=True):
            for equation in group or ():
                if not any(_is_another(m) for m in equation.modifiers):
                    for family in equation.families.values():
                        own.setdefault(family.name, []).append((rule.level, equation))
        for k, rule in enumerate(drafts):
            group = found[k]
            if not rule.level or not group:
                continue
            found[k] = [
                e
                for e in group
                if any(_is_another(m) for m in e.modifiers)
                or not all(
                    any(
                        level < rule.level and _in_place(o, e)
                        for level, o in own[f.name][:_MAX_HOLDERS]
                    )
                    for f in e.families.values()
                )
            ]

    def _tried(self, rule: Draft, ready: Sequence[Equation]) -> list[Equation]:
        """Return the equations of a rule; none if it is wrong, which is noted."""
        try:
            if is_drop(rule):
                if any(isinstance(m, tree.For) for m in rule.modifiers):
                    raise _wrong("drop leaves out all tensors of a name: it has no 'for'")
                return []
            if any(isinstance(m, tree.FollowRows) for m in rule.modifiers):
                return list(self._followers(rule, ready))
            if _waits(rule):
                rule = self._alias(rule, ready)
            return [self._equation(rule)]
        except UsageError as error:
            note = (error.hint,) if error.hint else ()
            self.findings.append(Finding("rule", error.message, rule.at, rule.text, note))
            return []

    def _equation(self, rule: Draft) -> Equation:
        if rule.reference is None:
            raise _wrong("a rule names a logical tensor, or is drop")
        dims = tuple(self._lets.dim(rule.lets.dim(d)) for d in rule.dims)
        _check_dims(dims)
        families: dict[Tags, Family] = {}
        pinned: dict[str, int] = {}
        for path in paths(dims):
            if path.tags in families:
                raise _wrong(f"the tag {'.'.join(path.tags)} comes twice")
            family = self._families.find(rule.reference, path.tags, rule.near)
            families[path.tags] = family
            pinned |= self._families.pinned(rule.reference, path.tags, family)
        only = _only(rule, families.values(), pinned, self._lets)
        return Equation(rule.name, families, dims, rule.modifiers, pinned, only, rule.at, rule.text)

    def _less(self, equation: Equation) -> Equation:
        """Return a rule without the numbers of earlier ones that have some of its names."""
        only = dict(equation.only)
        for earlier in self._some:
            if not _has_names(earlier, equation):
                continue
            mine = {a: only.get(a, ALL) for a in earlier.only}
            more = [a for a, n in earlier.only.items() if not n.covers(mine[a])]
            if len(more) == 1 and all(n & mine[a] for a, n in earlier.only.items()):
                # A check reports a rule without any number left as never used.
                only[more[0]] = mine[more[0]] - earlier.only[more[0]]
        return equation if only == equation.only else replace(equation, only=only)

    # --- rules that take something from another rule --------------------------------------------

    def _alias(self, rule: Draft, ready: Sequence[Equation]) -> Draft:
        """Return an alias with the dimensions of the rule that holds the tensor."""
        if rule.reference is None:
            raise _wrong("alias needs the logical tensor that it is another copy of: alias E")
        family = self._families.find(rule.reference, (), rule.near)
        for other in ready:
            aliases = any(isinstance(m, tree.Alias) for m in other.modifiers)
            if list(other.families.values()) == [family] and not aliases:
                return replace(rule, dims=other.dims)
        raise _wrong(f"no rule holds {family.name} alone: write the dimensions of this copy")

    def _followers(self, rule: Draft, ready: Sequence[Equation]) -> Iterator[Equation]:
        follow = next(m for m in rule.modifiers if isinstance(m, tree.FollowRows))
        followed = _followed(follow.name, ready)
        if not followed:
            raise _wrong(f"follow rows({show(follow.name)}): no rule has such a name")
        beginning = rule.name.parts[:1] == (tree.Glob(deep=True),)
        if len(followed) > 1 and not beginning:
            names = ", ".join(show(e.name) for e in followed[:4])
            raise _wrong(f"follow rows({show(follow.name)}) may be {names}: write more of the name")
        for other in followed:
            yield self._follower(rule, other, beginning)

    def _follower(self, rule: Draft, other: Equation, beginning: bool) -> Equation:
        """Return the equation of a tensor whose first dimension is that of another one."""
        if not other.dims:
            raise _wrong(f"{show(other.name)} has no rows to follow")
        pattern = rule.dims or (tree.Wild(), tree.Atom("r"))
        if not isinstance(pattern[0], tree.Wild) or any(
            isinstance(d, tree.Wild) for d in pattern[1:]
        ):
            raise _wrong("a follower's first dimension is '_', the one that it follows")
        dims = wrapped(pattern, (other.dims[0], *pattern[1:])) or ()
        dims = (dims[0], *(self._lets.dim(rule.lets.dim(d)) for d in dims[1:]))
        _check_dims(dims)
        suffix = _suffix(rule)
        families = dict(_derived(self._families, other, dims, suffix))
        modifiers = tuple(m for m in rule.modifiers if not isinstance(m, tree.FollowRows))
        name = _beside(rule.name, other.name) if beginning else rule.name
        only = _only(replace(rule, name=name), families.values(), other.pinned, self._lets)
        only = _both(only, other.only)
        return Equation(name, families, dims, modifiers, other.pinned, only, rule.at, rule.text)


def _only(
    rule: Draft, families: Iterable[Family], pinned: Mapping[str, int], lets: Lets
) -> dict[str, Numbers]:
    """Return the numbers that a rule's names have: its own, and those of all its tensors."""
    out = numbers_of(rule.modifiers, lets)
    indexes = {p.axis for p in rule.name.parts if isinstance(p, tree.NameIndex)}
    for axis in out:
        if axis not in indexes:
            raise _wrong(f"'for {axis}' leaves out names, and the name has no index {{{axis}}}")
    for family in families:
        for axis, numbers in family.only.items():
            if axis in pinned and not numbers.has(pinned[axis]):
                raise _wrong(
                    f"{family.name} with {axis}={pinned[axis]} does not exist: see its space"
                )
            if axis not in indexes and axis not in pinned:
                raise _wrong(
                    f"{family.name} does not exist for every {axis}, so {axis} must be an index of "
                    f"the name: {{{axis}}}"
                )
        out = _both(out, {a: n for a, n in family.only.items() if a in indexes})
    return out


def _both(one: Mapping[str, Numbers], two: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return the numbers that two sets of conditions leave."""
    return {a: one.get(a, ALL) & two.get(a, ALL) for a in {**one, **two}}


def _has_names(earlier: Equation, later: Equation) -> bool:
    """Whether an earlier rule has all names of a later one, but for numbers that it lacks."""
    on = {(m.axis, m.coordinate) for m in earlier.modifiers if isinstance(m, tree.On)}
    if not on <= {(m.axis, m.coordinate) for m in later.modifiers if isinstance(m, tree.On)}:
        return False
    indexes = {p.axis for p in later.name.parts if isinstance(p, tree.NameIndex)}
    return set(earlier.only) <= indexes and covers(earlier.name, later.name)


def _waits(rule: Draft) -> bool:
    """Whether a rule takes its dimensions from one that is looked up first."""
    alias = any(isinstance(m, tree.Alias) for m in rule.modifiers) and not rule.dims
    return alias or any(isinstance(m, tree.FollowRows) for m in rule.modifiers)


def _suffix(rule: Draft) -> str:
    """Return what the logical tensors of a follower are called."""
    match rule.reference:
        case None:
            return FOLLOWER
        case tree.Name(parts=(tree.Text(text=text),)) if "." not in text:
            return text
    raise _wrong("the reference of a follower must be one word: the name of its tensors")


def _derived(
    families: Families, other: Equation, dims: Sequence[tree.Dim], suffix: str
) -> Iterator[tuple[Tags, Family]]:
    """Yield the logical tensors that the rows of another rule lead to."""
    rows = len(paths(dims[:1])[0].tags)
    found = paths(dims)
    for tags, group in groupby(found, key=lambda p: p.tags[:rows]):
        base = next((f for t, f in other.families.items() if t[:rows] == tags), None)
        if base is None:
            continue
        for path in group:
            indexes = base.axes[: base.indexes]
            first = [leaf.atom for leaf in path.leaves if leaf.dim == 0]
            ordered = [a for a in base.axes if a in first and a not in indexes]
            rest = [leaf.atom for leaf in path.leaves if leaf.dim and leaf.atom not in indexes]
            name = ".".join((suffix, *path.tags[rows:]))
            yield path.tags, families.derived(base, name, (*indexes, *ordered, *rest))


def _followed(wanted: tree.Name, equations: Sequence[Equation]) -> list[Equation]:
    """Return the equations whose name is meant: all of it, its end, or components of it."""
    text = encoded(wanted)
    names = [(encoded(e.name), e) for e in equations]
    for meant in (
        [e for name, e in names if name == text],
        [e for name, e in names if f".{name}".endswith((f".{text}", f".{text}{_WEIGHT}"))],
        [e for e in equations if has_globs(wanted) and covers(wanted, e.name)],
        [e for name, e in names if f".{text}." in f".{name}."],
    ):
        if meant:
            return meant
    return []


def _beside(name: tree.Name, followed: tree.Name) -> tree.Name:
    """Return a follower's name with ``**`` standing for the followed name."""
    parts = list(followed.parts)
    last = parts[-1]
    if isinstance(last, tree.Text) and last.text.endswith(_WEIGHT):
        parts[-1] = tree.Text(last.text.removesuffix(_WEIGHT))
    mine = {p.axis: p for p in name.parts if isinstance(p, tree.NameIndex)}
    parts = [mine.get(p.axis, p) if isinstance(p, tree.NameIndex) else p for p in parts]
    return tree.Name(tree.join((*parts, *name.parts[1:])), at=name.at)


def _is_another(modifier: tree.Modifier) -> bool:
    """Whether a rule with this holds what another one holds as well."""
    is_any = isinstance(modifier, tree.Replicas) and modifier.kind == "any"
    return is_any or isinstance(modifier, tree.Alias)


def _in_place(own: Equation, other: Equation) -> bool:
    """Whether a rule can represent another one: on all of its ranks, for all of its numbers."""
    ranks = {m for m in own.modifiers if isinstance(m, tree.On)}
    if ranks and ranks != {m for m in other.modifiers if isinstance(m, tree.On)}:
        return False
    return own.pinned == other.pinned and all(
        n.covers(other.only.get(a, ALL)) for a, n in own.only.items()
    )


def _check_dims(dims: Sequence[tree.Dim]) -> None:
    for dim in dims:
        if _unfilled(dim):
            raise _wrong("''_' and '...' repeat dimensions of a rule that this layout uses")


def _unfilled(dim: tree.Dim) -> bool:
    match dim:
        case tree.Wild() | tree.Rest():
            return True
        case tree.Split() | tree.Pad():
            return _unfilled(dim.inner)
        case tree.Product():
            return any(map(_unfilled, dim.parts))
        case tree.Sum():
            return any(_unfilled(b.dim) for b in dim.branches)
    return False


def _wrong(message: str) -> UsageError:
    return UsageError(message, kind="lay-rule")
