"""Nodes of the syntax tree: dimensions, names, modifiers, statements, positions.

What each form of a dimension means is fixed in ``docs/design/lay.md``; how each node is written,
in `grammar`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# --- where something was written ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Position:
    """Where something was written: file (or ``<text>``), line and column from 1, length."""

    file: str = "<text>"
    line: int = 1
    column: int = 1
    length: int = 1


NOWHERE = Position("", 0, 0, 0)
"""Of what was built by a program and never written."""


@dataclass(frozen=True, slots=True)
class SyntaxNode:
    """A part of a program.

    Attributes
    ----------
    at
        Never counts in comparisons, so that a printed and parsed tree equals the printed one.
    """

    at: Position = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


# --- values and dimensions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number(SyntaxNode):
    """A whole number."""

    value: int


@dataclass(frozen=True, slots=True)
class Size(SyntaxNode):
    """The extent of a mesh axis, or the size of an atom or a ``let``, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Arithmetic(SyntaxNode):
    """``a*b``, ``a+b``, ``a-b``, ``a//b``, ``lcm(a, b)``, ``min(a, b)`` or ``max(a, b)``."""

    operator: Literal["*", "+", "-", "//", "lcm", "min", "max"]
    left: Value
    right: Value


Value: TypeAlias = Number | Size | Arithmetic

UNIT = Number(1)


@dataclass(frozen=True, slots=True)
class Even:
    """A split by formula, in units of `grain` elements.

    ``even``: equal parts, the number of units must divide. ``ceil``: parts of ceil(n / m), the
    last ones smaller or empty, as torch cuts. ``bal``: the first ``n mod m`` parts are one unit
    longer.
    """

    rule: Literal["even", "ceil", "bal"] = "even"
    grain: Value = UNIT


@dataclass(frozen=True, slots=True)
class Widths:
    """A split with recorded widths, in elements; as many as the mesh axis is long."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """A split that says of each element at which coordinate it lies; a part keeps their order."""

    coordinates: tuple[int, ...]


Contiguous: TypeAlias = Even | Widths
How: TypeAlias = Contiguous | Assigned

EVEN = Even()


@dataclass(frozen=True, slots=True)
class Atom(SyntaxNode):
    """A named axis."""

    name: str


@dataclass(frozen=True, slots=True)
class One(SyntaxNode):
    """A dimension of length one that no axis represents."""


@dataclass(frozen=True, slots=True)
class Wild(SyntaxNode):
    """``_``: in a ``default``, the dimension of the imported rule at this place."""


@dataclass(frozen=True, slots=True)
class Rest(SyntaxNode):
    """``...``: in a ``default``, all further dimensions of the imported rule as they are."""


@dataclass(frozen=True, slots=True)
class Split(SyntaxNode):
    """``inner@axis``: the part of `inner` that a coordinate of a mesh axis holds."""

    inner: Dim
    axis: str
    how: How = EVEN


@dataclass(frozen=True, slots=True)
class Product(SyntaxNode):
    """``(a b)``: all combinations, the first part outermost."""

    parts: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Branch(SyntaxNode):
    """One part of a sum; `tag` is appended to the rule's reference."""

    tag: str
    dim: Dim


@dataclass(frozen=True, slots=True)
class Sum(SyntaxNode):
    """``(q:a|k:b)``: one after the other; the tags name the logical tensors."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Pad(SyntaxNode):
    """``pad(inner, multiple, fill)``: filled up to a multiple."""

    inner: Dim
    multiple: Value
    fill: float = 0.0


Dim: TypeAlias = Atom | One | Wild | Rest | Split | Product | Sum | Pad


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters of a name."""

    text: str


@dataclass(frozen=True, slots=True)
class Glob:
    """``*`` (within one component of a dotted name) or ``**`` (any number of components)."""

    deep: bool


@dataclass(frozen=True, slots=True)
class NameIndex(SyntaxNode):
    """``{l}``, ``{l@pp}`` or ``{#l@vpp@pp}``: an axis in a name.

    Attributes
    ----------
    axis
        The atom (or, in object names and file names, the mesh axis); in a reference also a whole
        number (``X{0}``), in a template the word it represents (``{name}``).
    splits
        ``(mesh axis, how)``, in textual order, outermost first.
    local
        ``#``: the number within the part that a rank holds, not within the whole.
    width
        Fewest digits, zeros in front: ``{tp:02}`` in the names of files.
    """

    axis: str
    splits: tuple[tuple[str, How], ...] = ()
    local: bool = False
    width: int = 0


@dataclass(frozen=True, slots=True)
class Alternatives:
    """``{k,v}``: one rule for each; the reference's alternatives go in step with the name's."""

    texts: tuple[str, ...]


NamePart: TypeAlias = Text | Glob | NameIndex | Alternatives


@dataclass(frozen=True, slots=True)
class Name(SyntaxNode):
    """A name pattern: parts without separators, the dots are in the texts."""

    parts: tuple[NamePart, ...]


def join(parts: Iterable[NamePart]) -> tuple[NamePart, ...]:
    """Return the parts with neighbouring texts made one and empty ones left out.

    A `Name` is always made of joined parts, so that equal patterns are equal trees.
    """
    out: list[NamePart] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + part.text)
        elif part != Text(""):
            out.append(part)
    return tuple(out)


# --- modifiers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replicas(SyntaxNode):
    """``same`` (must be equal, checked) or ``any`` (take one)."""

    kind: Literal["same", "any"]


@dataclass(frozen=True, slots=True)
class Average(SyntaxNode):
    """``avg(tp)`` or ``sum(dp)``: what the ranks along a mesh axis hold is combined."""

    kind: Literal["avg", "sum"]
    axis: str


@dataclass(frozen=True, slots=True)
class Cast(SyntaxNode):
    """``cast(bfloat16)``: held in another type."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Quantized(SyntaxNode):
    """``q(float8_e4m3fn, [128 128], scale={name}_scale_inv)``: blocks with a scale each.

    `scale` is the name of the tensor of scales; ``{name}`` represents this tensor's name. `kind` is
    their type, empty for float32; `overall` is the name of one number that multiplies all of them.
    """

    dtype: str
    block: tuple[int, ...]
    scale: Name
    kind: str = ""
    overall: Name | None = None


@dataclass(frozen=True, slots=True)
class Affine(SyntaxNode):
    """``affine(a, b)``: physical = a * logical + b."""

    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class On(SyntaxNode):
    """``on pp=0`` or ``on pp=last``: only ranks with this coordinate hold the tensor."""

    axis: str
    coordinate: int | Literal["last"]


@dataclass(frozen=True, slots=True)
class Range:
    """``3..7``: from the first number to the last, or for ever (``3..``); ``1../2`` every other.

    An end may be a value of sizes that a ``let`` says: ``0..(dense - 1)``.
    """

    first: int | Value
    last: int | Value | None = None
    step: int = 1


@dataclass(frozen=True, slots=True)
class For(SyntaxNode):
    """``for l=3..``: the rule, or the tensor of a space, is there for these numbers only."""

    axis: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class FollowRows(SyntaxNode):
    """``follow rows(name)``: the first dimension is cut and ordered like that tensor's."""

    name: Name


@dataclass(frozen=True, slots=True)
class Alias(SyntaxNode):
    """``alias E``: another copy of a logical tensor that a different rule holds already."""


@dataclass(frozen=True, slots=True)
class Drop(SyntaxNode):
    """``drop``: left out on purpose."""


Modifier: TypeAlias = (
    Replicas | Average | Cast | Quantized | Affine | On | For | FollowRows | Alias | Drop
)


# --- statements and programs ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """``tp:8=(tk:4 tr:2)``: an axis of a mesh, and the finer axes it may be seen as."""

    name: str
    extent: int
    parts: tuple[MeshAxis, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh(SyntaxNode):
    """``mesh M = pp:2 dp:2 tp:4 local vpp:2``: rank axes outer first, then local axes."""

    name: str
    axes: tuple[MeshAxis, ...]
    local: tuple[MeshAxis, ...] = ()


@dataclass(frozen=True, slots=True)
class Let(SyntaxNode):
    """``let hd = (two half)``, ``let kv = 8`` or ``let D = decoder.layers.{#l@pp}``.

    A dimension refines an atom; a value fixes a size; a name is put in where ``D`` begins a name.
    """

    name: str
    value: Dim | Value | Name


@dataclass(frozen=True, slots=True)
class SpaceTensor(SyntaxNode):
    """``L{l}.q[kv rep hd h]``: logical tensors, one for each value of the indexes in the name.

    `only` says which numbers there are, where not all are there: ``L{l}.g[f h] for l=0..2``.
    """

    name: Name
    atoms: tuple[str, ...]
    only: tuple[For, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowedState:
    """One state that follows each parameter: short name and name in checkpoints."""

    name: str
    stored: str


@dataclass(frozen=True, slots=True)
class Scalar(SyntaxNode):
    """``scalar step(param)``: one number per parameter, per group, or for all."""

    name: str
    per: Literal["param", "group", "global"] = "param"


@dataclass(frozen=True, slots=True)
class Space(SyntaxNode):
    """The logical tensors of a model."""

    name: str
    families: tuple[SpaceTensor, ...] = ()
    states: tuple[FollowedState, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    lets: tuple[Let, ...] = ()


@dataclass(frozen=True, slots=True)
class Use(SyntaxNode):
    """``use hf.llama``: names, references and dimensions of another layout."""

    name: str


@dataclass(frozen=True, slots=True)
class Rule(SyntaxNode):
    """``name = reference[dims] modifiers``.

    `reference` is None in ``name = drop``. A reference that is only the end of an imported one
    (``q`` for ``L{l}.q``) represents it.
    """

    name: Name
    reference: Name | None
    dims: tuple[Dim, ...]
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Default(SyntaxNode):
    """``default [_@dp:ceil ...] modifiers``: wraps the dimensions of every imported rule left."""

    dims: tuple[Dim, ...]
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Tensors in one buffer: ``each`` tensor alone, a ``group`` by name, a ``bucket``, ``parts``.

    A bucket is closed once it holds `elements` or more. Names with the same index values that
    match `name` are one group. Of ``parts`` each rank has its part of each tensor, end to end; with
    `elements` a buffer is closed once that of the first rank holds so many.
    """

    kind: Literal["each", "group", "bucket", "parts"]
    name: Name | None = None
    elements: int = 0


Order: TypeAlias = Literal["module", "reverse", "robin"]
"""In which order a flat packs tensors."""


@dataclass(frozen=True, slots=True)
class Flat(SyntaxNode):
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
    called
        What buffers are called on ranks; None for ``flat.<number>.<state>``. The indexes of the
        group represent its numbers, ``{buffer}`` the number of the buffer on the rank.
    """

    group: FlatGroup
    split: tuple[str, Contiguous]
    states: tuple[str, ...]
    order: Order = "module"
    start: Value = UNIT
    end: Value = UNIT
    modifiers: tuple[Modifier, ...] = ()
    called: Name | None = None


@dataclass(frozen=True, slots=True)
class Pipe(SyntaxNode):
    """``pipe l@vpp@pp "Et*3|(tt|)*29,m|L"``: which layers lie on which stage."""

    axis: str
    splits: tuple[str, ...]
    stages: str


@dataclass(frozen=True, slots=True)
class Object(SyntaxNode):
    """``obj rng[pp tp] on-change reseed``: a value per coordinate of mesh axes."""

    name: str
    axes: tuple[str, ...]
    on_change: Literal["error", "drop", "reseed", "reduce"]
    reduce: str = ""


@dataclass(frozen=True, slots=True)
class Files(SyntaxNode):
    """``files "mp_rank_{tp}_{pp}.safetensors"``: which file holds which rank's tensors."""

    name: Name


@dataclass(frozen=True, slots=True)
class Stored(SyntaxNode):
    """``stored "model.{name}" states "optim.{name}.{state}"``: names in checkpoints.

    ``{name}`` represents a rule's name, ``{state}`` the stored name of a state: that of the
    space, or another one behind ``with``. With ``of NAME`` it says so of the states of some rules.
    """

    params: str = "{name}"
    states: str = "optim.{name}.{state}"
    renamed: tuple[FollowedState, ...] = ()
    names: Name | None = None


Statement: TypeAlias = Use | Rule | Default | Flat | Pipe | Object | Files | Stored


@dataclass(frozen=True, slots=True)
class Layout(SyntaxNode):
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
class Reshard(SyntaxNode):
    """``reshard mg -> fs via disk budget 4GiB``."""

    source: str
    target: str
    via: Literal["disk", "memory", "peer"] = "disk"
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A whole program."""

    items: tuple[Mesh | Let | Space | Layout | Reshard | Use, ...]
