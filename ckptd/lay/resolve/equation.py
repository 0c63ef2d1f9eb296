"""`Equation`, `Resolved`, `Bound`: a layout with everything looked up.

`ckptd.lay.resolve` makes it from a program. Nothing is left to expand: no ``let``, no
alternatives, no ``use``, no ``default``, no short references. Dimensions are made of `Atom`, `One`,
`Split`, `Product`, `Sum` and `Pad`, and every atom is an axis of the family that the tags lead to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ckptd.lay.resolve.numbers import Numbers
from ckptd.lay.resolve.pattern import found_regex
from ckptd.lay.syntax import tree

Tags = tuple[str, ...]
"""Tags on the way into nested sums, outermost first; ``()`` in a rule without a sum."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """All logical tensors of one name pattern, seen as one tensor.

    An index in a name is an axis like any other: ``L{l}.q[kv rep hd h]`` is one tensor with the
    axes ``l kv rep hd h``, of which a rule's tensor holds one ``l``, or several.

    Attributes
    ----------
    name
        As the space writes it, with ``{l}`` for indexes: ``L{l}.q``.
    axes
        Index axes in textual order, then atoms; refined atoms are replaced by their parts.
    indexes
        How many of `axes` stand in the name.
    only
        Which numbers there are, by axis, where not all are there: the first layers of a model may
        be of another kind.
    """

    name: str
    axes: Axes
    indexes: int
    only: Mapping[str, Numbers] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class MeshShape:
    """All mesh axes of a layout and how a rank's coordinates follow from its number.

    Several meshes may cover the same ranks, and an axis may be seen as finer ones: `strides` says
    for each axis ``coordinate = rank // stride % extent``. Local axes (virtual pipeline stages)
    have stride 0: every rank holds all of their coordinates.
    """

    world: int
    extents: Mapping[str, int]
    strides: Mapping[str, int]

    @cached_property
    def local(self) -> tuple[str, ...]:
        """Axes that are not rank axes."""
        return tuple(a for a, s in self.strides.items() if s == 0)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each rank axis."""
        return {a: rank // s % self.extents[a] for a, s in self.strides.items() if s}


@dataclass(frozen=True)
class Equation:
    """One rule: a pattern of rank-local tensors and the logical tensors in it.

    Attributes
    ----------
    name
        Name of the rank-local tensors; texts, globs and indexes.
    families
        Logical tensor by tags.
    dims
        One expression per dimension of the rank-local tensor.
    modifiers
        As written.
    pinned
        Axes of the families that stand at one index by the rule's reference (``X{0}``).
    only
        Which numbers its names have, by axis, where not all: as it says (``for l=3..``), and as
        its families say.
    at
        The rule, for messages.
    text
        The rule as it was written, for messages.
    globs
        Where globs of its name were replaced: number of the rule that had them, and what they
        matched.
    """

    name: tree.Name
    families: Mapping[Tags, Family]
    dims: tuple[tree.Dim, ...]
    modifiers: tuple[tree.Modifier, ...] = ()
    pinned: Mapping[str, int] = field(default_factory=dict)
    only: Mapping[str, Numbers] = field(default_factory=dict)
    at: tree.Position = tree.NOWHERE
    text: str = ""
    globs: tuple[int, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Resolved:
    """A layout, looked up.

    Attributes
    ----------
    name, space
        Its name and the name of its space.
    mesh
        None for ``on none``.
    equations
        First match wins.
    families
        All of the space, by name.
    sizes
        Sizes of axes that the program states; the others follow from observed shapes.
    refined
        Parts of atoms that ``let`` refines.
    states, scalars
        What follows each parameter.
    flats, pipes, objects
        As written.
    drops
        Name patterns left out on purpose.
    drop_places
        For each of `drops`: how many of `equations` come before it.
    relations
        Sizes that the program states by other sizes (``let h = kv*rep*hd``), by axis.
    params, state_names
        Name templates in checkpoints.
    other_states
        Patterns of names, and the template for the states of rules of these names; the first that
        matches counts.
    files
        Name template of the file of a rank, or None.
    """

    name: str
    space: str
    mesh: MeshShape | None
    equations: tuple[Equation, ...]
    families: Mapping[str, Family]
    sizes: Mapping[str, int]
    refined: Mapping[str, tree.Dim]
    states: tuple[tree.FollowedState, ...] = ()
    scalars: tuple[tree.Scalar, ...] = ()
    flats: tuple[tree.Flat, ...] = ()
    pipes: tuple[tree.Pipe, ...] = ()
    objects: tuple[tree.Object, ...] = ()
    drops: tuple[tree.Name, ...] = ()
    drop_places: tuple[int, ...] = ()
    relations: Mapping[str, tree.Value] = field(default_factory=dict)
    params: str = "{name}"
    state_names: str = "optim.{name}.{state}"
    other_states: tuple[tuple[tree.Name, str], ...] = ()
    files: tree.Name | None = None

    @property
    def state_templates(self) -> tuple[str, ...]:
        """All templates of names of states."""
        return (self.state_names, *(template for _, template in self.other_states))

    def state_name(self, name: str, state: str) -> str:
        """Return what a state of a parameter, or a number that follows it, is called.

        Parameters
        ----------
        name
            Of the parameter, by its rule.
        state
            Name of the state in checkpoints.
        """
        others = (t for n, t in self.other_states if found_regex(n).fullmatch(name))
        return next(others, self.state_names).replace("{state}", state).replace("{name}", name)


@dataclass(frozen=True)
class Bound:
    """A layout whose sizes are all known: what can be compiled.

    Attributes
    ----------
    layout
        The layout.
    sizes
        Length of every axis of every family that a rule holds, indexes in names included.

    The names of its layout's equations are free of globs: `ckptd.lay.bind` puts in the
    names that it found, an equation for each. Equations of which it found no tensor are left out.
    """

    layout: Resolved
    sizes: Mapping[str, int]
