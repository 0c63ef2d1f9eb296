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
from ckptd.lay.syntax import (
    DIM,
    FILE_NAME,
    FORMS,
    SPACE,
    Shown,
    parse_dim,
    parse_name,
    parse_value,
    read,
    show,
    tree,
)

__all__ = [
    "affine",
    "alias",
    "any_of",
    "assigned",
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

DimLike: TypeAlias = tree.Dim | str | int
ValueLike: TypeAlias = tree.Value | str | int
NameLike: TypeAlias = tree.Name | str

N = TypeVar("N", bound=Shown)


# --- what stands in for nodes -------------------------------------------------------------------


def _dim(given: DimLike) -> tree.Dim:
    return parse_dim(str(given)) if isinstance(given, int | str) else given


def _value(given: ValueLike) -> tree.Value:
    return parse_value(str(given)) if isinstance(given, int | str) else given


def _name(given: NameLike) -> tree.Name:
    return parse_name(given) if isinstance(given, str) else given


def _how(given: tree.How | Literal["even", "ceil", "bal"]) -> tree.How:
    return tree.Even(given) if isinstance(given, str) else given


def _checked(node: N) -> N:
    """Return a node that its text stands for.

    Raises
    ------
    UsageError
        ``lay-syntax``: its text is no program, or means something else.
    """
    text = show(node)
    # The form of a split by itself would leave no dimension to cut.
    found = read(DIM if isinstance(node, tree.Dim) else FORMS[type(node)], text, "<built>")
    if found != node:
        raise _wrong("a part of a program", "words and numbers that read back as given", node)
    return node


def _wrong(what: str, wanted: str, found: object) -> UsageError:
    return UsageError(f"this is not {what}", kind="lay-syntax", wanted=wanted, found=repr(found))


# --- dimensions ---------------------------------------------------------------------------------


def even(rule: Literal["even", "ceil", "bal"] = "even", grain: ValueLike = 1) -> tree.Even:
    """Return how to split by formula, in units of `grain` elements."""
    return tree.Even(rule, _value(grain))


def widths(*sizes: int) -> tree.Widths:
    """Return how to split into parts of recorded widths."""
    return tree.Widths(sizes)


def assigned(*coordinates: int) -> tree.Assigned:
    """Return how to split by a table: the coordinate of each element."""
    return tree.Assigned(coordinates)


def split(
    inner: DimLike, axis: str, how: tree.How | Literal["even", "ceil", "bal"] = tree.EVEN
) -> tree.Split:
    """Return ``inner@axis``."""
    return _checked(tree.Split(_dim(inner), axis, _how(how)))


def prod(*parts: DimLike) -> tree.Product:
    """Return ``(a b)``: all combinations, the first part outermost."""
    return _checked(tree.Product(tuple(map(_dim, parts))))


def cat(**branches: DimLike) -> tree.Sum:
    """Return ``(q:a|k:b)``: one after the other, by tag."""
    return _checked(
        tree.Sum(tuple(tree.Branch(tag, _dim(inner)) for tag, inner in branches.items()))
    )


def pad(inner: DimLike, multiple: ValueLike, fill: float = 0.0) -> tree.Pad:
    """Return ``pad(inner, multiple, fill)``."""
    return _checked(tree.Pad(_dim(inner), _value(multiple), fill))


def wild() -> tree.Wild:
    """Return ``_``: the dimension of the imported rule."""
    return tree.Wild()


def rest() -> tree.Rest:
    """Return ``...``: all further dimensions of the imported rule."""
    return tree.Rest()


# --- modifiers ----------------------------------------------------------------------------------


def same() -> tree.Replicas:
    """Return ``same``: replicas must be equal."""
    return tree.Replicas("same")


def any_of() -> tree.Replicas:
    """Return ``any``: take one of the replicas."""
    return tree.Replicas("any")


def average(axis: str) -> tree.Average:
    """Return ``avg(axis)``: the mean over a mesh axis."""
    return _checked(tree.Average("avg", axis))


def total(axis: str) -> tree.Average:
    """Return ``sum(axis)``: the sum over a mesh axis."""
    return _checked(tree.Average("sum", axis))


def cast(dtype: str) -> tree.Cast:
    """Return ``cast(dtype)``."""
    return _checked(tree.Cast(dtype))


def quantized(dtype: str, block: Iterable[int], scale: NameLike) -> tree.Quantized:
    """Return ``q(dtype, [block], scale=name)``."""
    return _checked(tree.Quantized(dtype, tuple(block), _name(scale)))


def affine(scale: float, shift: float) -> tree.Affine:
    """Return ``affine(scale, shift)``: physical = scale * logical + shift."""
    return _checked(tree.Affine(float(scale), float(shift)))


def on(axis: str, coordinate: int | Literal["last"]) -> tree.On:
    """Return ``on axis=coordinate``: only these ranks hold the tensor."""
    return _checked(tree.On(axis, coordinate))


def only(axis: str, *numbers: int | slice) -> tree.For:
    """Return ``for axis=numbers``; ``slice(3, None)`` is ``3..``, ``slice(0, 3)`` is ``0..2``.

    The ends of a slice may be values: ``slice(0, "dense")`` is ``0..(dense - 1)``.
    """
    return _checked(tree.For(axis, tuple(map(_range, numbers))))


def _range(given: int | slice) -> tree.Range:
    if isinstance(given, int):
        return tree.Range(given, given)
    first = _value(given.start) if isinstance(given.start, str) else given.start or 0
    last = given.stop if given.stop is None or isinstance(given.stop, str) else given.stop - 1
    if isinstance(last, str):
        last = tree.Arithmetic("-", _value(last), tree.Number(1))
    return tree.Range(first, last, given.step or 1)


def follow_rows(name: NameLike) -> tree.FollowRows:
    """Return ``follow rows(name)``: the first dimension is cut like that tensor's."""
    return _checked(tree.FollowRows(_name(name)))


def alias() -> tree.Alias:
    """Return ``alias``: another copy of what a different rule holds."""
    return tree.Alias()


def drop() -> tree.Drop:
    """Return ``drop``: left out on purpose."""
    return tree.Drop()


# --- statements ---------------------------------------------------------------------------------


def rule(name: NameLike, reference: NameLike | None, *rest: DimLike | tree.Modifier) -> tree.Rule:
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
    return _checked(tree.Rule(_name(name), found, dims, modifiers))


def default(*rest: DimLike | tree.Modifier) -> tree.Default:
    """Return ``default [dimensions] modifiers``."""
    return _checked(tree.Default(*_parted(rest)))


def _parted(
    given: Iterable[DimLike | tree.Modifier],
) -> tuple[tuple[tree.Dim, ...], tuple[tree.Modifier, ...]]:
    dims: list[tree.Dim] = []
    modifiers: list[tree.Modifier] = []
    for one in given:
        if isinstance(one, tree.Modifier):
            modifiers.append(one)
        elif modifiers:
            raise _wrong("a modifier", "dimensions first, then modifiers", one)
        else:
            dims.append(_dim(one))
    return tuple(dims), tuple(modifiers)


def flat(
    axis: str,
    *modifiers: tree.Modifier,
    states: Iterable[str] = ("*",),
    how: tree.Contiguous | Literal["even", "ceil", "bal"] = tree.EVEN,
    group: NameLike | None = None,
    bucket: int | None = None,
    parts: int | None = None,
    order: tree.Order = "module",
    start: ValueLike = 1,
    end: ValueLike = 1,
    called: NameLike | None = None,
) -> tree.Flat:
    """Return ``flat each @axis of states``, or with `group` or `bucket` a buffer of several.

    With `parts`, perhaps of a `group`, each rank has its parts of several end to end; 0: of all.
    """
    kind = tree.FlatGroup("each")
    if parts is not None:
        kind = tree.FlatGroup("parts", None if group is None else _name(group), parts)
    elif bucket is not None:
        kind = tree.FlatGroup("bucket", elements=bucket)
    elif group is not None:
        kind = tree.FlatGroup("group", _name(group))
    cut = (axis, tree.Even(how) if isinstance(how, str) else how)
    name = None if called is None else _name(called)
    return _checked(
        tree.Flat(kind, cut, tuple(states), order, _value(start), _value(end), modifiers, name)
    )


def use(name: str) -> tree.Use:
    """Return ``use name``."""
    return _checked(tree.Use(name))


def pipe(axis: str, splits: Iterable[str], stages: str) -> tree.Pipe:
    """Return ``pipe axis@split "stages"``."""
    return _checked(tree.Pipe(axis, tuple(splits), stages))


def obj(
    name: str,
    *axes: str,
    on_change: Literal["error", "drop", "reseed", "reduce"],
    reduce: str = "",
) -> tree.Object:
    """Return ``obj name[axes] on-change ...``; `reduce` names the reduction of ``reduce``."""
    return _checked(tree.Object(name, axes, on_change, reduce))


def files(name: NameLike) -> tree.Files:
    """Return ``files "name"``; a text is read as it would be within the quotes."""
    return _checked(tree.Files(read(FILE_NAME, f'"{name}"') if isinstance(name, str) else name))


def stored(
    params: str = "{name}",
    states: str = "optim.{name}.{state}",
    names: NameLike | None = None,
    **renamed: str,
) -> tree.Stored:
    """Return ``stored "params" states "states"``.

    `names` is what stands behind ``of``, `renamed` what stands behind ``with``.
    """
    others = tuple(tree.FollowedState(short, name) for short, name in renamed.items())
    pattern = None if names is None else _name(names)
    return _checked(tree.Stored(params, states, others, pattern))


# --- programs -----------------------------------------------------------------------------------


def axis(name: str, extent: int, *parts: tree.MeshAxis) -> tree.MeshAxis:
    """Return ``name:extent=(parts)``."""
    return _checked(tree.MeshAxis(name, extent, parts))


def mesh(
    name: str,
    axes: Mapping[str, int] | Iterable[tree.MeshAxis],
    local: Mapping[str, int] | None = None,
) -> tree.Mesh:
    """Return ``mesh name = axes local axes``; axes outer first, as a mapping to their lengths."""
    return _checked(tree.Mesh(name, _axes(axes), _axes(local or {})))


def _axes(given: Mapping[str, int] | Iterable[tree.MeshAxis]) -> tuple[tree.MeshAxis, ...]:
    if isinstance(given, Mapping):
        return tuple(axis(name, extent) for name, extent in given.items())
    return tuple(given)


def let(name: str, value: tree.Dim | tree.Value | tree.Name | int) -> tree.Let:
    """Return ``let name = value``; wrap a text in the parser that says what it is."""
    return _checked(tree.Let(name, tree.Number(value) if isinstance(value, int) else value))


def tensor(name: NameLike, *atoms: str | tree.For) -> tree.SpaceTensor:
    """Return ``name[atoms]``, a tensor of a space; `only` behind the axes says which there are."""
    axes = tuple(a for a in atoms if isinstance(a, str))
    only = tuple(a for a in atoms if isinstance(a, tree.For))
    return _checked(tree.SpaceTensor(_name(name), axes, only))


def state(name: str, stored: str | None = None) -> tree.FollowedState:
    """Return a state that follows each parameter; `stored` is its name in checkpoints."""
    return _checked(tree.FollowedState(name, name if stored is None else stored))


def scalar(name: str, per: Literal["param", "group", "global"] = "param") -> tree.Scalar:
    """Return ``scalar name(per)``."""
    return _checked(tree.Scalar(name, per))


def space(
    name: str, *items: tree.SpaceTensor | tree.FollowedState | tree.Scalar | tree.Let
) -> tree.Space:
    """Return ``space name { ... }``."""
    # Its items are checked already.
    return SPACE.put(_checked(tree.Space(name)), items)


def layout(
    name: str, *statements: tree.Statement, of: str = "", on: str | Iterable[str] = ()
) -> tree.Layout:
    """Return ``layout name of space on meshes { ... }``; without `on`, whole tensors."""
    meshes = (on,) if isinstance(on, str) else on
    return replace(_checked(tree.Layout(name, of, tuple(meshes))), statements=statements)


def reshard(
    source: str,
    target: str,
    via: Literal["disk", "memory", "peer"] = "disk",
    budget: int | None = None,
) -> tree.Reshard:
    """Return ``reshard source -> target via disk``; `budget` is in bytes."""
    return _checked(tree.Reshard(source, target, via, budget))


def file(
    *items: tree.Mesh | tree.Let | tree.Space | tree.Layout | tree.Reshard | tree.Use,
) -> tree.File:
    """Return a whole program."""
    return tree.File(items)
