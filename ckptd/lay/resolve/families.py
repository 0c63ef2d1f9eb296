"""Logical tensors of a space, and which one a short reference means; near names.

In it: limit of names compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ckptd.errors import UsageError
from ckptd.lay.resolve.conditions import numbers_of
from ckptd.lay.resolve.equation import Family, Tags
from ckptd.lay.resolve.lets import Lets, atoms_of
from ckptd.lay.syntax import show
from ckptd.lay.syntax.tree import Atom, Glob, Name, NameIndex, Space, Text


@dataclass(frozen=True)
class Component:
    """A part of a dotted name: its letters, and the axes of the indexes in it."""

    text: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text + "".join(f"{{{a}}}" for a in self.axes)


Components = tuple[Component, ...]

_MAX_COMPARED = 2_000_000


class Families:
    """All logical tensors, by name and by the ends of their names.

    Parameters
    ----------
    space
        Where they are declared.
    lets
        What refines their atoms.

    Raises
    ------
    UsageError
        ``lay-rule``: a tensor is declared twice, or has an axis twice.
    """

    def __init__(self, space: Space, lets: Lets) -> None:
        self.space = space.name
        self.by_name: dict[str, Family] = {}
        self.refined: set[str] = set()
        self._components: dict[str, Components] = {}
        self._by_last: dict[str, list[str]] = {}
        self._left = _MAX_COMPARED
        for declared in space.families:
            components = _components(declared.name)
            indexes = [a for c in components for a in c.axes]
            atoms: list[str] = []
            for atom in declared.atoms:
                atoms += self._parts(atom, lets)
            name = ".".join(map(str, components))
            axes = (*indexes, *atoms)
            if name in self.by_name or len(set(axes)) < len(axes):
                twice = "is declared twice" if name in self.by_name else "has an axis twice"
                raise UsageError(
                    f"{show(declared)} {twice}",
                    kind="lay-rule",
                    where=f"{declared.at.file}:{declared.at.line}  space {space.name}",
                    hint="use different names for the axes and give their sizes: let h2 = size h",
                )
            only = numbers_of(declared.only, lets)
            strange = [a for a in only if a not in indexes]
            if strange:
                raise UsageError(
                    f"{show(declared)} has no index {strange[0]} in its name",
                    kind="lay-rule",
                    where=f"{declared.at.file}:{declared.at.line}  space {space.name}",
                    hint="''for' selects numbers of an index in the name",
                )
            self.add(Family(name, axes, len(indexes), only), components)

    def add(self, family: Family, components: Components) -> None:
        """Add a tensor."""
        self.by_name[family.name] = family
        self._components[family.name] = components
        self._by_last.setdefault(components[-1].text, []).append(family.name)

    def derived(self, base: Family, suffix: str, axes: tuple[str, ...]) -> Family:
        """Return the tensor that is called like another one with a suffix; declare it if needed."""
        components = (*self._components[base.name], *map(Component, suffix.split(".")))
        name = ".".join(map(str, components))
        if name not in self.by_name:
            self.add(Family(name, axes, base.indexes, base.only), components)
        return self.by_name[name]

    def find(self, reference: Name, tags: Tags, near: Sequence[Name] = ()) -> Family:
        """Return the tensor that a reference and tags lead to.

        The whole name is best, then the end of the only name that ends so; of several, one that
        the overridden rule holds.

        Raises
        ------
        UsageError
            ``lay-rule``: there is none, or more than one.
        """
        wanted = (*_components(reference), *map(Component, tags))
        whole = self.by_name.get(".".join(map(str, wanted)))
        if whole is not None:
            return whole
        last = self._by_last.get(wanted[-1].text, ()) if wanted else ()
        self._left -= len(last)
        if self._left < 0:
            raise _wrong("too many tensors of the space have the same ending: write whole names")
        found = [n for n in last if _ends(self._components[n], wanted)]
        exact = [n for n in found if len(self._components[n]) == len(wanted)]
        close = [
            n for n in found if any(_begins(self._components[n], _components(r)) for r in near)
        ]
        for names in (exact, found, close):
            if len(names) == 1:
                return self.by_name[names[0]]
        shown = ".".join(map(str, wanted))
        if found:
            raise _wrong(f"{shown} may be {' or '.join(sorted(found))}: write the whole name")
        raise _wrong(f"space {self.space} has no {shown}{self._instead(wanted)}")

    def pinned(self, reference: Name, tags: Tags, family: Family) -> dict[str, int]:
        """Return the axes that a reference fixes at a number (``X{0}``).

        Raises
        ------
        UsageError
            ``lay-rule``: it has more indexes than the tensor.
        """
        wanted = _components(reference)
        have = self._components[family.name]
        start = len(have) - len(wanted) - len(tags)
        out: dict[str, int] = {}
        for component, mine in zip(have[start:], wanted, strict=False):
            if len(mine.axes) > len(component.axes):
                raise _wrong(f"{mine} has more indexes than {component} in {family.name}")
            out |= {
                axis: int(index)
                for axis, index in zip(component.axes, mine.axes, strict=False)
                if index.isdigit()
            }
        return out

    def _parts(self, atom: str, lets: Lets) -> tuple[str, ...]:
        """Return the parts of an atom, if a let refines it."""
        let = lets.dims.get(atom)
        if let is None:
            return (atom,)
        parts = atoms_of(lets.dim(Atom(atom)))
        if parts is None:
            raise UsageError(
                f"{atom} is an axis of space {self.space}, which only a product of axes can refine",
                kind="lay-rule",
                where=f"{let.at.file}:{let.at.line}  {show(let)}",
                wanted=f"let {atom} = (a b)",
            )
        self.refined.add(atom)
        return parts

    def _instead(self, wanted: Components) -> str:
        names = list(self.by_name)
        shown = ".".join(map(str, wanted))
        near = get_close_matches(shown, names, n=1, cutoff=0.5)
        last = wanted[-1].text
        ends = [n for n in names if self._components[n][-1].text == last]
        best = near or ends[:1]
        return f"; did you mean {best[0]}?" if best else f"; it has {', '.join(names[:8])}"


def _components(name: Name) -> Components:
    """Return the dotted parts of a name."""
    out = [Component("")]
    for part in name.parts:
        match part:
            case Text():
                first, *others = part.text.split(".")
                out[-1] = Component(out[-1].text + first, out[-1].axes)
                out += map(Component, others)
            case NameIndex():
                out[-1] = Component(out[-1].text, (*out[-1].axes, part.axis))
            case Glob():
                raise _wrong(f"{show(name)}: a reference cannot contain globs")
    found = tuple(c for c in out if c.text or c.axes)
    if not found:
        raise _wrong("a tensor's name must contain more than dots")
    return found


def _ends(have: Components, wanted: Components, only_begin: bool = False) -> bool:
    """Whether a name ends as wanted; indexes may be left out."""
    if not wanted or len(wanted) > len(have):
        return False
    part = have[: len(wanted)] if only_begin else have[len(have) - len(wanted) :]
    return all(
        h.text == w.text and all(a in h.axes or a.isdigit() for a in w.axes)
        for h, w in zip(part, wanted, strict=True)
    )


def _begins(have: Components, wanted: Components) -> bool:
    return _ends(have, wanted, True)


def _wrong(message: str) -> UsageError:
    return UsageError(message, kind="lay-rule")
