"""Matches found names with rules: the first that matches, parameters, states, scales, buffers.

In it: limit of comparisons.

Matching is by one expression a rule. Rules without globs are looked up by the text between their
numbers; which of the others can match at all is decided once for all names that differ in their
numbers only. So a model of many layers and experts costs one match a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckptd.errors import UsageError
from ckptd.lay.indexes import IndexCut
from ckptd.lay.resolve import Equation, Lookup, Numbers, Resolved, found_regex
from ckptd.lay.syntax.tree import Flat, Glob, Name, NameIndex, NamePart, On, Quantized, Text, join

_NUMBERS = re.compile("[0-9]+")
_MAX_COMPARED = 20_000_000


@dataclass(frozen=True)
class Match:
    """A name, and what its rule's pattern found in it.

    Attributes
    ----------
    equation
        Number of the rule.
    numbers
        By axis of the name's indexes.
    texts
        What its globs matched.
    """

    equation: int
    numbers: tuple[tuple[str, int], ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class _Pattern:
    """A rule's expression, and what its groups are."""

    number: int
    name: Name
    on: tuple[On, ...]
    only: Mapping[str, Numbers] = field(default_factory=dict)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return found_regex(self.name)

    @cached_property
    def text(self) -> str | None:
        """The name, if it represents no other."""
        if all(isinstance(p, Text) for p in self.name.parts):
            return "".join(p.text for p in self.name.parts if isinstance(p, Text))
        return None

    @cached_property
    def alike(self) -> re.Pattern[str]:
        return _alike(self.name)

    @cached_property
    def groups(self) -> tuple[str | None, ...]:
        """Axis of each group; None for globs."""
        parts = (p for p in self.name.parts if isinstance(p, NameIndex | Glob))
        return tuple(p.axis if isinstance(p, NameIndex) else None for p in parts)

    def match(self, name: str) -> Match | None:
        if self.text is not None:
            return Match(self.number, (), ()) if name == self.text else None
        found = self.regex.fullmatch(name)
        if found is None:
            return None
        groups = list(zip(self.groups, found.groups(), strict=True))
        numbers = tuple((axis, int(text)) for axis, text in groups if axis is not None)
        return Match(self.number, numbers, tuple(text for axis, text in groups if axis is None))


class Matcher:
    """Finds the rule of a name: the first that matches.

    Parameters
    ----------
    resolved
        The layout.
    stored
        Whether names are those of checkpoints, with global numbers, or those of ranks.
    cuts
        How indexes are dealt to ranks, as far as it is known: which layers those are that have
        local numbers. Of what is not known it is taken that a rule has it.
    """

    def __init__(
        self, resolved: Resolved, stored: bool, cuts: Mapping[NameIndex, IndexCut] | None = None
    ) -> None:
        local = resolved.mesh.local if resolved.mesh else ()
        drops: dict[int, list[Name]] = {k: [] for k in range(len(resolved.equations) + 1)}
        for name, place in zip(resolved.drops, resolved.drop_places, strict=True):
            drops[place].append(name)
        self._patterns: list[_Pattern] = []
        for number, equation in enumerate(resolved.equations):
            self._patterns += [_Pattern(-1, d, ()) for d in drops[number]]
            name = stored_name(equation.name, local) if stored else equation.name
            on = () if stored else _on(equation)
            only = equation.only
            self._patterns.append(_Pattern(number, name, on, only))
            self._patterns += [_Pattern(-1, scale, on, only) for scale in _scales(equation, name)]
        self._patterns += [_Pattern(-1, d, ()) for d in drops[len(resolved.equations)]]
        self._stored = stored
        self._cuts = cuts or {}
        self._extents = resolved.mesh.extents if resolved.mesh else {}
        self._candidates: dict[str, list[int]] = {}
        self._globs: list[int] = []
        self._left = _MAX_COMPARED
        self._lookup = Lookup()
        for k, pattern in enumerate(self._patterns):
            if any(isinstance(p, Glob) for p in pattern.name.parts):
                self._globs.append(k)
            else:
                self._lookup.add(k, pattern.name)

    def match(self, name: str, coordinates: Mapping[str, int] | None = None) -> Match | None:
        """Return what a name matches; None if no rule has it.

        A name that is left out on purpose (``drop``), and that of the scales of a quantized tensor,
        matches the rule number -1.

        Parameters
        ----------
        name
            The name.
        coordinates
            Of the rank that has it: rules for other ranks (``on``) are passed over.
        """
        for pattern in self._candidates_of(name):
            if coordinates is not None and not _is_on(pattern.on, coordinates, self._extents):
                continue
            found = pattern.match(name)
            # Coordinates on local axes stand in the name.
            if found is None or not _is_on(pattern.on, dict(found.numbers), self._extents):
                continue
            if not pattern.only or self._has(pattern, dict(found.numbers), coordinates or {}):
                return found
        return None

    def _has(
        self, pattern: _Pattern, numbers: Mapping[str, int], coordinates: Mapping[str, int]
    ) -> bool:
        """Whether a rule has the numbers of a name, as far as it is known."""
        for part in pattern.name.parts:
            if not isinstance(part, NameIndex) or part.axis not in pattern.only:
                continue
            number = numbers[part.axis]
            if part.local and not self._stored:
                cut = self._cuts.get(part)
                at = {**coordinates, **numbers}
                if cut is None or not all(a in at for a in cut.axes):
                    continue
                number = cut.number(number, at)
            if not pattern.only[part.axis].has(number):
                return False
        return True

    def _candidates_of(self, name: str) -> Iterator[_Pattern]:
        """Return the rules that can match a name: by its text, or whatever its numbers are."""
        shape = _NUMBERS.sub("0", name)
        found = self._candidates.get(shape)
        if found is None:
            self._left -= len(self._globs)
            if self._left < 0:
                raise UsageError(
                    f"more than {_MAX_COMPARED} names and rules to compare", kind="lay-rule"
                )
            found = [k for k in self._globs if self._patterns[k].alike.fullmatch(shape)]
            self._candidates[shape] = found
        return (self._patterns[k] for k in sorted((*self._lookup.find(name), *found)))


def _alike(name: Name) -> re.Pattern[str]:
    """Return an expression like the name's in which all numbers are 0."""
    parts = (Text(_NUMBERS.sub("0", p.text)) if isinstance(p, Text) else p for p in name.parts)
    return found_regex(Name(join(parts), at=name.at))


def alike(pattern: Name, name: Name) -> bool:
    """Whether a pattern matches some of a name's, if all numbers are taken for the same."""
    parts = (Text("0") if isinstance(p, NameIndex) else p for p in name.parts)
    texts = [p.text for p in parts if isinstance(p, Text)]
    return _alike(pattern).fullmatch(_NUMBERS.sub("0", "".join(texts))) is not None


def stored_name(name: Name, local: Iterable[str]) -> Name:
    """Return a name as checkpoints have it: without the indexes of local mesh axes."""
    gone = set(local)
    parts: Iterator[NamePart] = (
        p for p in name.parts if not (isinstance(p, NameIndex) and p.axis in gone)
    )
    return Name(join(parts), at=name.at)


def _on(equation: Equation) -> tuple[On, ...]:
    return tuple(m for m in equation.modifiers if isinstance(m, On))


def holds(equation: Equation, coordinates: Mapping[str, int], extents: Mapping[str, int]) -> bool:
    """Whether a rule is for the rank at some coordinates."""
    return _is_on(_on(equation), coordinates, extents)


def _is_on(on: Sequence[On], coordinates: Mapping[str, int], extents: Mapping[str, int]) -> bool:
    for modifier in on:
        wanted = modifier.coordinate
        if wanted == "last":
            wanted = extents.get(modifier.axis, 1) - 1
        if coordinates.get(modifier.axis, wanted) != wanted:
            return False
    return True


def _scales(equation: Equation, name: Name) -> Iterator[Name]:
    """Yield the names of a rule's scales."""
    for modifier in equation.modifiers:
        if not isinstance(modifier, Quantized):
            continue
        for scale in filter(None, (modifier.scale, modifier.overall)):
            parts: list[NamePart] = []
            for part in scale.parts:
                mine = isinstance(part, NameIndex) and part.axis == "name"
                parts += name.parts if mine else (part,)
            yield Name(join(parts), at=modifier.at)


# --- states -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParsedName:
    """A name in a checkpoint, taken apart.

    Attributes
    ----------
    name
        As the rules have it.
    state
        Short name of the state; empty for the parameter itself.
    scalar
        Whether it is a number that follows a parameter, and no tensor of its shape.
    """

    name: str
    state: str = ""
    scalar: bool = False


class NameTemplates:
    """Takes the names of parameters, states and scalars apart."""

    def __init__(self, resolved: Resolved) -> None:
        states = [(s.stored, s.name, False) for s in resolved.states]
        scalars = [(s.name, s.name, True) for s in resolved.scalars]
        found = [
            (*_around(template.replace("{state}", stored)), name, scalar, stored)
            for stored, name, scalar in (*states, *scalars)
            for template in resolved.state_templates
        ]
        self._layout = resolved
        self._any_state = [state_pattern(t) for t in resolved.state_templates]
        # The longest end first: a state's name may be the end of another's.
        self._states = sorted(found, key=lambda t: len(t[0]) + len(t[1]), reverse=True)
        self._params = _around(resolved.params)

    def take(self, name: str) -> ParsedName | None:
        """Return the parts of a name; None if it is neither a parameter's nor a state's."""
        for before, after, state, scalar, stored in self._states:
            if name.startswith(before) and name.endswith(after):
                inner = name[len(before) : len(name) - len(after)]
                whole = len(before) + len(after) < len(name)
                if whole and self._layout.state_name(inner, stored) == name:
                    return ParsedName(inner, state, scalar)
        before, after = self._params
        if not (name.startswith(before) and name.endswith(after)):
            return None
        return ParsedName(name[len(before) : len(name) - len(after)])

    def take_any(self, name: str) -> ParsedName | None:
        """Return the parts of a name that is spelled as a state's, also one that is not declared.

        The state has the name that it has in checkpoints.
        """
        for pattern in self._any_state:
            found = pattern.fullmatch(name)
            if found and self._layout.state_name(found["name"], found["state"]) == name:
                return ParsedName(found["name"], found["state"])
        return None


def state_pattern(template: str) -> re.Pattern[str]:
    """Return what matches names of states: groups ``name`` and ``state``, whatever they are."""
    text = re.escape(template).replace(re.escape("{name}"), "(?P<name>.+)")
    return re.compile(text.replace(re.escape("{state}"), "(?P<state>[A-Za-z_][A-Za-z0-9_]*)"))


def _around(template: str) -> tuple[str, str]:
    """Return what stands before and after the name in a template."""
    before, _, after = template.partition("{name}")
    return before, after


class BufferNames:
    """The names that buffers of a layout's flats have on ranks."""

    def __init__(self, resolved: Resolved) -> None:
        texts = {_BUFFER} if any(f.called is None for f in resolved.flats) else set()
        for flat in resolved.flats:
            if flat.called is not None:
                texts |= set(_called(flat.called, flat, resolved))
        self._any = re.compile("|".join(sorted(texts))) if texts else None

    def __contains__(self, name: str) -> bool:
        return self._any is not None and self._any.fullmatch(name) is not None


_BUFFER = r"flat\.[0-9]+\.[^.]+"


def _called(name: Name, flat: Flat, resolved: Resolved) -> Iterator[str]:
    """Yield an expression for the buffers of each state, for each way to spell it."""
    inner = "".join(re.escape(p.text) if isinstance(p, Text) else "[0-9]+" for p in name.parts)
    for state, stored in {"": "", **{s.name: s.stored for s in resolved.states}}.items():
        if "*" not in flat.states and (state or "params") not in flat.states:
            continue
        for template in resolved.state_templates if state else (resolved.params,):
            before, after = _around(template.replace("{state}", stored))
            yield re.escape(before) + inner + re.escape(after)
