"""Statements of a program: meshes, spaces, layouts and what they hold.

The tree is plain frozen data, whichever of the three spellings (Lay, TOML, Python) it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptd.layout.lay.dims import UNIT, Dim, How, Value
from ckptd.layout.lay.modifiers import For, Modifier
from ckptd.layout.lay.name import Name
from ckptd.layout.lay.node import Node

__all__ = [
    "Default",
    "Family",
    "File",
    "Files",
    "Flat",
    "FlatGroup",
    "Layout",
    "Let",
    "Mesh",
    "MeshAxis",
    "Object",
    "Order",
    "Pipe",
    "Reshard",
    "Rule",
    "Scalar",
    "Space",
    "State",
    "Statement",
    "Stored",
    "Use",
]


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """``tp:8=(tk:4 tr:2)``: an axis of a mesh, and the finer axes it may be seen as."""

    name: str
    extent: int
    parts: tuple[MeshAxis, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh(Node):
    """``mesh M = pp:2 dp:2 tp:4 local vpp:2``: rank axes outer first, then local axes."""

    name: str
    axes: tuple[MeshAxis, ...]
    local: tuple[MeshAxis, ...] = ()


@dataclass(frozen=True, slots=True)
class Let(Node):
    """``let hd = (two half)``, ``let kv = 8`` or ``let D = decoder.layers.{#l@pp}``.

    A dimension refines an atom; a value fixes a size; a name is put in where ``D`` begins a name.
    """

    name: str
    value: Dim | Value | Name


@dataclass(frozen=True, slots=True)
class Family(Node):
    """``L{l}.q[kv rep hd h]``: logical tensors, one for each value of the indexes in the name.

    `only` says which numbers there are, where not all are there: ``L{l}.g[f h] for l=0..2``.
    """

    name: Name
    atoms: tuple[str, ...]
    only: tuple[For, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """One state that follows each parameter: short name and name in checkpoints."""

    name: str
    stored: str


@dataclass(frozen=True, slots=True)
class Scalar(Node):
    """``scalar step(param)``: one number per parameter, per group, or for all."""

    name: str
    per: Literal["param", "group", "global"] = "param"


@dataclass(frozen=True, slots=True)
class Space(Node):
    """The logical tensors of a model."""

    name: str
    families: tuple[Family, ...] = ()
    states: tuple[State, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    lets: tuple[Let, ...] = ()


@dataclass(frozen=True, slots=True)
class Use(Node):
    """``use hf.llama``: names, references and dimensions of another layout."""

    name: str


@dataclass(frozen=True, slots=True)
class Rule(Node):
    """``name = reference[dims] modifiers``.

    `reference` is None in ``name = drop``. A reference that is only the end of an imported one
    (``q`` for ``L{l}.q``) stands for it.
    """

    name: Name
    reference: Name | None
    dims: tuple[Dim, ...]
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Default(Node):
    """``default [_@dp:ceil ...] modifiers``: wraps the dimensions of every imported rule left."""

    dims: tuple[Dim, ...]
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """What one buffer packs: ``each`` tensor alone, a ``group`` by name, or a ``bucket``.

    A bucket is closed once it holds `elements` or more. Names with the same index values that
    match `name` are one group.
    """

    kind: Literal["each", "group", "bucket"]
    name: Name | None = None
    elements: int = 0


Order: TypeAlias = Literal["module", "reverse", "robin"]
"""In which order a flat packs tensors."""


@dataclass(frozen=True, slots=True)
class Flat(Node):
    """``flat bucket 40e6 @dp of m,s,w order reverse start/64 end/lcm(dp,128)``.

    Attributes
    ----------
    split
        ``(mesh axis, how)``.
    states
        Short state names, ``params`` among them; ``*`` for all.
    order
        ``module`` (the order of the rules and indexes), ``reverse``, or ``robin``: dealt out in
        turn to as many hands as the mesh axis is long, hand after hand.
    start, end
        Each tensor starts at a multiple of `start` elements, a buffer ends at a multiple of `end`.
    """

    group: FlatGroup
    split: tuple[str, How]
    states: tuple[str, ...]
    order: Order = "module"
    start: Value = UNIT
    end: Value = UNIT
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipe(Node):
    """``pipe l@vpp@pp "Et*3|(tt|)*29,m|L"``: which layers lie on which stage."""

    axis: str
    splits: tuple[str, ...]
    stages: str


@dataclass(frozen=True, slots=True)
class Object(Node):
    """``obj rng[pp tp] on-change reseed``: a value per coordinate of mesh axes."""

    name: str
    axes: tuple[str, ...]
    on_change: Literal["error", "drop", "reseed", "reduce"]
    reduce: str = ""


@dataclass(frozen=True, slots=True)
class Files(Node):
    """``files "mp_rank_{tp}_{pp}.safetensors"``: which file holds which rank's tensors."""

    name: Name


@dataclass(frozen=True, slots=True)
class Stored(Node):
    """``stored "model.{name}" states "optim.{name}.{state}"``: names in checkpoints.

    ``{name}`` stands for a rule's name, ``{state}`` for the stored name of a state.
    """

    params: str = "{name}"
    states: str = "optim.{name}.{state}"


Statement: TypeAlias = Use | Rule | Default | Flat | Pipe | Object | Files | Stored


@dataclass(frozen=True, slots=True)
class Layout(Node):
    """``layout mg of llama on M { ... }``.

    Attributes
    ----------
    space
        The space whose logical tensors the rules name; empty: that of the layout it uses.
    meshes
        Names of meshes over the same ranks; empty for ``on none``: whole tensors, no ranks.
    """

    name: str
    space: str = ""
    meshes: tuple[str, ...] = ()
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshard(Node):
    """``reshard mg -> fs via disk budget 4GiB``."""

    source: str
    target: str
    via: Literal["disk", "memory", "peer"] = "disk"
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A whole program."""

    items: tuple[Mesh | Let | Space | Layout | Reshard | Use, ...]
