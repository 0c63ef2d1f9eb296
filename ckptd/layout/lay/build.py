"""Builds programs in Python: the same tree that parsing makes.

Where a dimension, name or value is wanted, its text will do as well::

    rule(
        "decoder.layers.{#l@pp}.self_attention.linear_qkv.weight",
        "L{l}",
        prod(split("kv", "tp"), cat(q="rep", k=1, v=1), "hd"),
        "h",
        same(),
    )
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from ckptd.errors import UsageError
from ckptd.layout.lay import modifiers as m
from ckptd.layout.lay.dims import (
    EVEN,
    Branch,
    Dim,
    Even,
    How,
    Number,
    One,
    Pad,
    Product,
    Rest,
    Split,
    Sum,
    Value,
    Widths,
    Wild,
)
from ckptd.layout.lay.modifiers import Modifier
from ckptd.layout.lay.name import Name
from ckptd.layout.lay.parser import parse_dim, parse_file_name, parse_name, parse_value
from ckptd.layout.lay.parser_name import DOTTED
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

_WORD = re.compile("[A-Za-z_][A-Za-z0-9_]*")


# --- what stands in for nodes -------------------------------------------------------------------


def _dim(given: DimLike) -> Dim:
    if isinstance(given, int):
        if given != 1:
            raise _wrong("a dimension", "an axis, its text, or 1", given)
        return One()
    return parse_dim(given) if isinstance(given, str) else given


def _value(given: ValueLike) -> Value:
    if isinstance(given, int):
        if given < 0:
            raise _wrong("a value", "a whole number that is not negative", given)
        return Number(given)
    return parse_value(given) if isinstance(given, str) else given


def _name(given: NameLike) -> Name:
    return parse_name(given) if isinstance(given, str) else given


def _how(given: How | Literal["even", "ceil", "bal"]) -> How:
    return Even(given) if isinstance(given, str) else given


def _word(given: str, what: str) -> str:
    if not _WORD.fullmatch(given):
        raise _wrong(what, "a word: a letter or '_', then letters, digits and '_'", given)
    return given


def _words(given: Iterable[str], what: str) -> tuple[str, ...]:
    return tuple(_word(w, what) for w in given)


def _dotted(given: str, what: str) -> str:
    if not DOTTED.fullmatch(given):
        raise _wrong(what, "words with dots between them", given)
    return given


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
    return Split(
        _dim(inner), _word(axis, "a mesh axis"), Even(how) if isinstance(how, str) else how
    )


def prod(*parts: DimLike) -> Product:
    """Return ``(a b)``: all combinations, the first part outermost."""
    return Product(tuple(map(_dim, parts)))


def cat(**branches: DimLike) -> Sum:
    """Return ``(q:a|k:b)``: one after the other, by tag."""
    return Sum(tuple(Branch(tag, _dim(inner)) for tag, inner in branches.items()))


def pad(inner: DimLike, multiple: ValueLike, fill: float = 0.0) -> Pad:
    """Return ``pad(inner, multiple, fill)``."""
    return Pad(_dim(inner), _value(multiple), fill)


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
    return m.Average("avg", _word(axis, "a mesh axis"))


def total(axis: str) -> m.Average:
    """Return ``sum(axis)``: the sum over a mesh axis."""
    return m.Average("sum", _word(axis, "a mesh axis"))


def cast(dtype: str) -> m.Cast:
    """Return ``cast(dtype)``."""
    return m.Cast(_word(dtype, "a type"))


def quantized(dtype: str, block: Iterable[int], scale: NameLike) -> m.Quantized:
    """Return ``q(dtype, [block], scale=name)``."""
    return m.Quantized(_word(dtype, "a type"), tuple(block), _name(scale))


def affine(scale: float, shift: float) -> m.Affine:
    """Return ``affine(scale, shift)``: physical = scale * logical + shift."""
    return m.Affine(float(scale), float(shift))


def on(axis: str, coordinate: int | Literal["last"]) -> m.On:
    """Return ``on axis=coordinate``: only these ranks hold the tensor."""
    return m.On(_word(axis, "a mesh axis"), coordinate)


def only(axis: str, *numbers: int | slice) -> m.For:
    """Return ``for axis=numbers``; ``slice(3, None)`` is ``3..``, ``slice(0, 3)`` is ``0..2``."""
    return m.For(_word(axis, "an index of the name"), tuple(map(_range, numbers)))


def _range(given: int | slice) -> m.Range:
    if isinstance(given, int):
        given = slice(given, given + 1)
    first, step = given.start or 0, given.step or 1
    last = None if given.stop is None else given.stop - 1
    if first < 0 or step < 1 or (last is not None and last < first):
        raise _wrong("numbers", "rising numbers that are not negative", given)
    return m.Range(first, last, step)


def follow_rows(name: NameLike) -> m.FollowRows:
    """Return ``follow rows(name)``: the first dimension is cut like that tensor's."""
    return m.FollowRows(_name(name))


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
    return Rule(_name(name), None if reference is None else _name(reference), dims, modifiers)


def default(*rest: DimLike | Modifier) -> Default:
    """Return ``default [dimensions] modifiers``."""
    return Default(*_parted(rest))


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
    found = tuple(states)
    cut = (_word(axis, "a mesh axis"), _how(how))
    names = found if found == ("*",) else _words(found, "a state")
    return Flat(kind, cut, names, order, _value(start), _value(end), modifiers)


def use(name: str) -> Use:
    """Return ``use name``."""
    return Use(_dotted(name, "the name of a layout"))


def pipe(axis: str, splits: Iterable[str], stages: str) -> Pipe:
    """Return ``pipe axis@split "stages"``."""
    return Pipe(_word(axis, "an axis"), _words(splits, "a mesh axis"), stages)


def obj(
    name: str,
    *axes: str,
    on_change: Literal["error", "drop", "reseed", "reduce"],
    reduce: str = "",
) -> Object:
    """Return ``obj name[axes] on-change ...``; `reduce` names the reduction of ``reduce``."""
    if (on_change == "reduce") != bool(reduce):
        raise _wrong("a change", "a reduction with on_change='reduce', and only there", reduce)
    word = _word(reduce, "a reduction") if reduce else ""
    return Object(name, _words(axes, "a mesh axis"), on_change, word)


def files(name: NameLike) -> Files:
    """Return ``files "name"``; a text is read as it would be within the quotes."""
    return Files(parse_file_name(f'"{name}"') if isinstance(name, str) else name)


def stored(params: str = "{name}", states: str = "optim.{name}.{state}") -> Stored:
    """Return ``stored "params" states "states"``."""
    return Stored(params, states)


# --- programs -----------------------------------------------------------------------------------


def axis(name: str, extent: int, *parts: MeshAxis) -> MeshAxis:
    """Return ``name:extent=(parts)``."""
    return MeshAxis(_word(name, "a mesh axis"), extent, parts)


def mesh(
    name: str, axes: Mapping[str, int] | Iterable[MeshAxis], local: Mapping[str, int] | None = None
) -> Mesh:
    """Return ``mesh name = axes local axes``; axes outer first, as a mapping to their lengths."""
    return Mesh(_word(name, "a mesh"), _axes(axes), _axes(local or {}))


def _axes(given: Mapping[str, int] | Iterable[MeshAxis]) -> tuple[MeshAxis, ...]:
    if isinstance(given, Mapping):
        return tuple(axis(name, extent) for name, extent in given.items())
    return tuple(given)


def let(name: str, value: Dim | Value | Name | int) -> Let:
    """Return ``let name = value``; wrap a text in the parser that says what it is."""
    return Let(_word(name, "a name"), Number(value) if isinstance(value, int) else value)


def tensor(name: NameLike, *atoms: str | m.For) -> Family:
    """Return ``name[atoms]``, a tensor of a space; `only` behind the axes says which there are."""
    axes = [a for a in atoms if isinstance(a, str)]
    only = tuple(a for a in atoms if isinstance(a, m.For))
    return Family(_name(name), _words(axes, "an axis"), only)


def state(name: str, stored: str | None = None) -> State:
    """Return a state that follows each parameter; `stored` is its name in checkpoints."""
    return State(_word(name, "a state"), name if stored is None else stored)


def scalar(name: str, per: Literal["param", "group", "global"] = "param") -> Scalar:
    """Return ``scalar name(per)``."""
    return Scalar(_word(name, "a scalar"), per)


def space(name: str, *items: Family | State | Scalar | Let) -> Space:
    """Return ``space name { ... }``."""
    return Space(
        _dotted(name, "the name of a space"),
        tuple(i for i in items if isinstance(i, Family)),
        tuple(i for i in items if isinstance(i, State)),
        tuple(i for i in items if isinstance(i, Scalar)),
        tuple(i for i in items if isinstance(i, Let)),
    )


def layout(name: str, *statements: Statement, of: str = "", on: str | Iterable[str] = ()) -> Layout:
    """Return ``layout name of space on meshes { ... }``; without `on`, whole tensors."""
    meshes = (on,) if isinstance(on, str) else on
    label = _dotted(name, "the name of a layout")
    space = _dotted(of, "the name of a space") if of else ""
    return Layout(label, space, _words(meshes, "a mesh"), statements)


def reshard(
    source: str,
    target: str,
    via: Literal["disk", "memory", "peer"] = "disk",
    budget: int | None = None,
) -> Reshard:
    """Return ``reshard source -> target via disk``; `budget` is in bytes."""
    return Reshard(_dotted(source, "a layout"), _dotted(target, "a layout"), via, budget)


def file(*items: Mesh | Let | Space | Layout | Reshard | Use) -> File:
    """Return a whole program."""
    return File(items)
