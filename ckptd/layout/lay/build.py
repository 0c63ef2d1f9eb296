"""Builds programs in Python: the same tree that parsing makes.

Where a dimension, name or value is wanted, its text will do as well. What is built is written and
read back, so that nothing is built that no text could say::

    rule(
        "decoder.layers.{#l@pp}.self_attention.linear_qkv.weight",
        "L{l}",
        prod(split("kv", "tp"), cat(q="rep", k=1, v=1), "hd"),
        "h",
        same(),
    )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from ckptd.errors import UsageError
from ckptd.layout.lay import modifiers as m
from ckptd.layout.lay.dims import (
    EVEN,
    Branch,
    Dim,
    Even,
    How,
    Number,
    Pad,
    Product,
    Rest,
    Split,
    Sum,
    Value,
    Widths,
    Wild,
)
from ckptd.layout.lay.expressions import DIM, FILE_NAME, FORMS
from ckptd.layout.lay.grammar import SPACE, Shown, show
from ckptd.layout.lay.modifiers import Modifier
from ckptd.layout.lay.name import Name
from ckptd.layout.lay.parser import parse_dim, parse_name, parse_value, read
from ckptd.layout.lay.program import (
    Default,
    Family,
    File,
    Files,
    Flat,
    FlatGroup,
    Layout,
    Let,
    Mesh,
    MeshAxis,
    Object,
    Order,
    Pipe,
    Reshard,
    Rule,
    Scalar,
    Space,
    State,
    Statement,
    Stored,
    Use,
)

__all__ = [
    "affine",
    "alias",
    "any_of",
    "average",
    "axis",
    "cast",
    "cat",
    "default",
    "drop",
    "even",
    "file",
    "files",
    "flat",
    "follow_rows",
    "layout",
    "let",
    "mesh",
    "obj",
    "on",
    "only",
    "pad",
    "pipe",
    "prod",
    "quantized",
    "reshard",
    "rest",
    "rule",
    "same",
    "scalar",
    "space",
    "split",
    "state",
    "stored",
    "tensor",
    "total",
    "use",
    "widths",
    "wild",
]

DimLike: TypeAlias = Dim | str | int
ValueLike: TypeAlias = Value | str | int
NameLike: TypeAlias = Name | str

N = TypeVar("N", bound=Shown)


# --- what stands in for nodes -------------------------------------------------------------------


def _dim(given: DimLike) -> Dim:
    return parse_dim(str(given)) if isinstance(given, int | str) else given


def _value(given: ValueLike) -> Value:
    return parse_value(str(given)) if isinstance(given, int | str) else given


def _name(given: NameLike) -> Name:
    return parse_name(given) if isinstance(given, str) else given


def _how(given: How | Literal["even", "ceil", "bal"]) -> How:
    return Even(given) if isinstance(given, str) else given


def _checked(node: N) -> N:
    """Return a node that its text stands for.

    Raises
    ------
    UsageError
        ``lay-syntax``: its text is no program, or means something else.
    """
    text = show(node)
    # The form of a split by itself would leave no dimension to cut.
    found = read(DIM if isinstance(node, Dim) else FORMS[type(node)], text, "<built>")
    if found != node:
        raise _wrong("a part of a program", "words and numbers that read back as given", node)
    return node


def _wrong(what: str, wanted: str, found: object) -> UsageError:
    return UsageError(f"this is not {what}", kind="lay-syntax", wanted=wanted, found=repr(found))


# --- dimensions ---------------------------------------------------------------------------------


def even(rule: Literal["even", "ceil", "bal"] = "even", grain: ValueLike = 1) -> Even:
    """Return how to split by formula, in units of `grain` elements."""
    return Even(rule, _value(grain))


def widths(*sizes: int) -> Widths:
    """Return how to split into parts of recorded widths."""
    return Widths(sizes)


def split(inner: DimLike, axis: str, how: How | Literal["even", "ceil", "bal"] = EVEN) -> Split:
    """Return ``inner@axis``."""
    return _checked(Split(_dim(inner), axis, _how(how)))


def prod(*parts: DimLike) -> Product:
    """Return ``(a b)``: all combinations, the first part outermost."""
    return _checked(Product(tuple(map(_dim, parts))))


def cat(**branches: DimLike) -> Sum:
    """Return ``(q:a|k:b)``: one after the other, by tag."""
    return _checked(Sum(tuple(Branch(tag, _dim(inner)) for tag, inner in branches.items())))


def pad(inner: DimLike, multiple: ValueLike, fill: float = 0.0) -> Pad:
    """Return ``pad(inner, multiple, fill)``."""
    return _checked(Pad(_dim(inner), _value(multiple), fill))


def wild() -> Wild:
    """Return ``_``: the dimension of the imported rule."""
    return Wild()


def rest() -> Rest:
    """Return ``...``: all further dimensions of the imported rule."""
    return Rest()


# --- modifiers ----------------------------------------------------------------------------------


def same() -> m.Replicas:
    """Return ``same``: replicas must be equal."""
    return m.Replicas("same")


def any_of() -> m.Replicas:
    """Return ``any``: take one of the replicas."""
    return m.Replicas("any")


def average(axis: str) -> m.Average:
    """Return ``avg(axis)``: the mean over a mesh axis."""
    return _checked(m.Average("avg", axis))


def total(axis: str) -> m.Average:
    """Return ``sum(axis)``: the sum over a mesh axis."""
    return _checked(m.Average("sum", axis))


def cast(dtype: str) -> m.Cast:
    """Return ``cast(dtype)``."""
    return _checked(m.Cast(dtype))


def quantized(dtype: str, block: Iterable[int], scale: NameLike) -> m.Quantized:
    """Return ``q(dtype, [block], scale=name)``."""
    return _checked(m.Quantized(dtype, tuple(block), _name(scale)))


def affine(scale: float, shift: float) -> m.Affine:
    """Return ``affine(scale, shift)``: physical = scale * logical + shift."""
    return _checked(m.Affine(float(scale), float(shift)))


def on(axis: str, coordinate: int | Literal["last"]) -> m.On:
    """Return ``on axis=coordinate``: only these ranks hold the tensor."""
    return _checked(m.On(axis, coordinate))


def only(axis: str, *numbers: int | slice) -> m.For:
    """Return ``for axis=numbers``; ``slice(3, None)`` is ``3..``, ``slice(0, 3)`` is ``0..2``."""
    return _checked(m.For(axis, tuple(map(_range, numbers))))


def _range(given: int | slice) -> m.Range:
    if isinstance(given, int):
        given = slice(given, given + 1)
    last = None if given.stop is None else given.stop - 1
    return m.Range(given.start or 0, last, given.step or 1)


def follow_rows(name: NameLike) -> m.FollowRows:
    """Return ``follow rows(name)``: the first dimension is cut like that tensor's."""
    return _checked(m.FollowRows(_name(name)))


def alias() -> m.Alias:
    """Return ``alias``: another copy of what a different rule holds."""
    return m.Alias()


def drop() -> m.Drop:
    """Return ``drop``: left out on purpose."""
    return m.Drop()


# --- statements ---------------------------------------------------------------------------------


def rule(name: NameLike, reference: NameLike | None, *rest: DimLike | Modifier) -> Rule:
    """Return ``name = reference[dimensions] modifiers``.

    Parameters
    ----------
    name
        Pattern of rank-local tensors.
    reference
        The logical tensor; None for what is dropped.
    *rest
        Dimensions (nodes, texts, or 1), then modifiers.

    Raises
    ------
    UsageError
        ``lay-syntax``: a text is not what it stands for, or a dimension follows a modifier.
    """
    dims, modifiers = _parted(rest)
    found = None if reference is None else _name(reference)
    return _checked(Rule(_name(name), found, dims, modifiers))


def default(*rest: DimLike | Modifier) -> Default:
    """Return ``default [dimensions] modifiers``."""
    return _checked(Default(*_parted(rest)))


def _parted(given: Iterable[DimLike | Modifier]) -> tuple[tuple[Dim, ...], tuple[Modifier, ...]]:
    dims: list[Dim] = []
    modifiers: list[Modifier] = []
    for one in given:
        if isinstance(one, Modifier):
            modifiers.append(one)
        elif modifiers:
            raise _wrong("a modifier", "dimensions first, then modifiers", one)
        else:
            dims.append(_dim(one))
    return tuple(dims), tuple(modifiers)


def flat(
    axis: str,
    *modifiers: Modifier,
    states: Iterable[str] = ("*",),
    how: How | Literal["even", "ceil", "bal"] = EVEN,
    group: NameLike | None = None,
    bucket: int | None = None,
    order: Order = "module",
    start: ValueLike = 1,
    end: ValueLike = 1,
) -> Flat:
    """Return ``flat each @axis of states``, or with `group` or `bucket` a buffer of several."""
    kind = FlatGroup("each")
    if bucket is not None:
        kind = FlatGroup("bucket", elements=bucket)
    elif group is not None:
        kind = FlatGroup("group", _name(group))
    cut = (axis, _how(how))
    return _checked(Flat(kind, cut, tuple(states), order, _value(start), _value(end), modifiers))


def use(name: str) -> Use:
    """Return ``use name``."""
    return _checked(Use(name))


def pipe(axis: str, splits: Iterable[str], stages: str) -> Pipe:
    """Return ``pipe axis@split "stages"``."""
    return _checked(Pipe(axis, tuple(splits), stages))


def obj(
    name: str,
    *axes: str,
    on_change: Literal["error", "drop", "reseed", "reduce"],
    reduce: str = "",
) -> Object:
    """Return ``obj name[axes] on-change ...``; `reduce` names the reduction of ``reduce``."""
    return _checked(Object(name, axes, on_change, reduce))


def files(name: NameLike) -> Files:
    """Return ``files "name"``; a text is read as it would be within the quotes."""
    return _checked(Files(read(FILE_NAME, f'"{name}"') if isinstance(name, str) else name))


def stored(params: str = "{name}", states: str = "optim.{name}.{state}") -> Stored:
    """Return ``stored "params" states "states"``."""
    return _checked(Stored(params, states))


# --- programs -----------------------------------------------------------------------------------


def axis(name: str, extent: int, *parts: MeshAxis) -> MeshAxis:
    """Return ``name:extent=(parts)``."""
    return _checked(MeshAxis(name, extent, parts))


def mesh(
    name: str, axes: Mapping[str, int] | Iterable[MeshAxis], local: Mapping[str, int] | None = None
) -> Mesh:
    """Return ``mesh name = axes local axes``; axes outer first, as a mapping to their lengths."""
    return _checked(Mesh(name, _axes(axes), _axes(local or {})))


def _axes(given: Mapping[str, int] | Iterable[MeshAxis]) -> tuple[MeshAxis, ...]:
    if isinstance(given, Mapping):
        return tuple(axis(name, extent) for name, extent in given.items())
    return tuple(given)


def let(name: str, value: Dim | Value | Name | int) -> Let:
    """Return ``let name = value``; wrap a text in the parser that says what it is."""
    return _checked(Let(name, Number(value) if isinstance(value, int) else value))


def tensor(name: NameLike, *atoms: str | m.For) -> Family:
    """Return ``name[atoms]``, a tensor of a space; `only` behind the axes says which there are."""
    axes = tuple(a for a in atoms if isinstance(a, str))
    only = tuple(a for a in atoms if isinstance(a, m.For))
    return _checked(Family(_name(name), axes, only))


def state(name: str, stored: str | None = None) -> State:
    """Return a state that follows each parameter; `stored` is its name in checkpoints."""
    return _checked(State(name, name if stored is None else stored))


def scalar(name: str, per: Literal["param", "group", "global"] = "param") -> Scalar:
    """Return ``scalar name(per)``."""
    return _checked(Scalar(name, per))


def space(name: str, *items: Family | State | Scalar | Let) -> Space:
    """Return ``space name { ... }``."""
    # Its items are checked already.
    return SPACE.put(_checked(Space(name)), items)


def layout(name: str, *statements: Statement, of: str = "", on: str | Iterable[str] = ()) -> Layout:
    """Return ``layout name of space on meshes { ... }``; without `on`, whole tensors."""
    meshes = (on,) if isinstance(on, str) else on
    return replace(_checked(Layout(name, of, tuple(meshes))), statements=statements)


def reshard(
    source: str,
    target: str,
    via: Literal["disk", "memory", "peer"] = "disk",
    budget: int | None = None,
) -> Reshard:
    """Return ``reshard source -> target via disk``; `budget` is in bytes."""
    return _checked(Reshard(source, target, via, budget))


def file(*items: Mesh | Let | Space | Layout | Reshard | Use) -> File:
    """Return a whole program."""
    return File(items)
