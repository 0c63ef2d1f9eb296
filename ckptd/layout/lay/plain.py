"""Programs as plain data: tables of texts, as TOML (or JSON, or YAML) holds them.

::

    {
        "mesh": {"M": "pp:2 tp:4"},
        "layout": {"mg": {"of": "llama", "on": ["M"], "rules": {"a.weight": "E[v@tp h]"}}},
    }

A table has no order among its kinds and no key twice; a program may have both. What does not fit
into one table goes into several, one after the other, under the key ``part``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ckptd.errors import UsageError
from ckptd.layout.lay import parser
from ckptd.layout.lay.parser_item import Item
from ckptd.layout.lay.parser_name import DOTTED
from ckptd.layout.lay.printer import show, show_right
from ckptd.layout.lay.printer_dims import show_name
from ckptd.layout.lay.program import (
    Default,
    Family,
    File,
    Files,
    Flat,
    Layout,
    Let,
    Mesh,
    Object,
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

__all__ = ["Table", "from_plain", "to_plain"]

Table: TypeAlias = dict[str, object]

_ITEMS: dict[type, str] = {
    Mesh: "mesh",
    Let: "let",
    Use: "use",
    Space: "space",
    Layout: "layout",
    Reshard: "reshard",
}
_STATEMENTS: dict[type, str] = {
    Rule: "rules",
    Use: "use",
    Default: "default",
    Flat: "flat",
    Pipe: "pipe",
    Object: "obj",
    Files: "files",
    Stored: "stored",
}
_SPACE: dict[type, str] = {Family: "tensors", State: "follow", Scalar: "scalars", Let: "let"}

_ONLY = re.compile(r"(?:^|\s)for\s+\w+\s*=")

Entry: TypeAlias = tuple[str, str | None, object]
"""Kind, key in the kind's table (None in a list), and what stands there."""


# --- tree to data -------------------------------------------------------------------------------


def to_plain(file: File) -> Table:
    """Return a program as plain data."""
    return _tables(_item(i) for i in file.items)


def _tables(entries: Iterable[Entry], order: Sequence[str] = tuple(_ITEMS.values())) -> Table:
    """Return entries as one table, or as parts where their order or a key twice needs it."""
    parts: list[Table] = [{}]
    last = 0
    for kind, key, value in entries:
        number = order.index(kind)
        held = parts[-1].get(kind, {})
        if number < last or (key is not None and isinstance(held, dict) and key in held):
            parts.append({})
        last = number
        if key is None:
            found = parts[-1].setdefault(kind, [])
            if isinstance(found, list):
                found.append(value)
        else:
            table = parts[-1].setdefault(kind, {})
            if isinstance(table, dict):
                table[key] = value
    return parts[0] if len(parts) == 1 else {"part": parts}


def _item(item: Item) -> Entry:
    kind = _ITEMS[type(item)]
    match item:
        case Mesh() | Let():
            return kind, item.name, _right(show(item))
        case Use():
            return kind, None, item.name
        case Reshard():
            return kind, None, _behind(show(item))
        case Space():
            return kind, item.name, _space(item)
        case Layout():
            head: Table = {"of": item.space} if item.space else {}
            body = _tables(map(_statement, item.statements), tuple(_STATEMENTS.values()))
            return kind, item.name, head | {"on": list(item.meshes)} | body


def _space(space: Space) -> Table:
    return _tables(
        [
            *(("tensors", *_family(f)) for f in space.families),
            *(("follow", None, show(s)) for s in space.states),
            *(("scalars", None, _behind(show(s))) for s in space.scalars),
            *(("let", let.name, _right(show(let))) for let in space.lets),
        ],
        tuple(_SPACE.values()),
    )


def _family(family: Family) -> tuple[str, str]:
    """Return a tensor's name, and its axes with what stands behind them."""
    label = show(replace(family, atoms=(), only=())).removesuffix("[]")
    return label, " ".join((*family.atoms, *map(show, family.only)))


def _statement(statement: Statement) -> Entry:
    kind = _STATEMENTS[type(statement)]
    if isinstance(statement, Rule):
        return kind, show_name(statement.name), show_right(statement)
    return kind, None, _behind(show(statement))


def _right(text: str) -> str:
    """Return what stands right of the first ``=``: names of meshes and lets have none."""
    return text.partition(" = ")[2]


def _behind(text: str) -> str:
    """Return what stands behind the keyword."""
    return text.partition(" ")[2]


# --- data to tree -------------------------------------------------------------------------------


def from_plain(data: Mapping[str, object], file: str = "<data>") -> File:
    """Return the program that plain data holds.

    Parameters
    ----------
    data
        As `to_plain` makes it; untrusted. A text may stand for a list of one.
    file
        What to call it in messages.

    Raises
    ------
    UsageError
        ``lay-syntax``; `where` is the path of keys.
    """
    items: list[Item] = []
    for part, where in _parts(data, file, _ITEMS.values()):
        for kind in ("mesh", "let"):
            for name, text in _table(part, kind, where):
                place = f"{where}.{kind}"
                label = _name(name, place)
                items.append(parser.parse_item(f"{kind} {label} = {_text(text, place)}", place))
        items += _each(part, "use", where, lambda t, w: parser.parse_item(f"use {t}", w))
        items += [_read_space(n, t, f"{where}.space") for n, t in _table(part, "space", where)]
        items += [_read_layout(n, t, f"{where}.layout") for n, t in _table(part, "layout", where)]
        items += _each(part, "reshard", where, lambda t, w: parser.parse_item(f"reshard {t}", w))
    return File(tuple(items))


def _read_space(name: str, data: object, file: str) -> Space:
    where = f"{file}.{name}"
    found: list[Space] = []
    for part, place in _parts(data, where, _SPACE.values()):
        texts = [_tensor(n, _text(t, place)) for n, t in _table(part, "tensors", place)]
        texts += [f"follow {t}" for t in _texts(part.get("follow", []), f"{place}.follow")]
        texts += [f"scalar {t}" for t in _texts(part.get("scalars", []), f"{place}.scalars")]
        texts += [f"let {n} = {_text(t, place)}" for n, t in _table(part, "let", place)]
        found += [parser.parse_space(text, place) for text in texts]
    return Space(
        _name(name, where),
        tuple(x for s in found for x in s.families),
        tuple(x for s in found for x in s.states),
        tuple(x for s in found for x in s.scalars),
        tuple(x for s in found for x in s.lets),
    )


def _tensor(name: str, text: str) -> str:
    """Return a tensor of a space as a program has it: the axes in brackets."""
    only = _ONLY.search(text)
    axes = text[: only.start()] if only else text
    return f"{name}[{axes}]{text[len(axes) :]}"


def _read_layout(name: str, data: object, file: str) -> Layout:
    where = f"{file}.{name}"
    table = _as_table(data, where)
    space = _name(_text(table["of"], where), f"{where}.of") if "of" in table else ""
    meshes = tuple(_name(m, f"{where}.on") for m in _texts(table.get("on", []), f"{where}.on"))
    body = {k: v for k, v in table.items() if k not in ("of", "on")}
    out: list[Statement] = []
    for part, place in _parts(body, where, _STATEMENTS.values()):
        for left, right in _table(part, "rules", place):
            label = show_name(parser.parse_name(left, f"{place}.rules"))
            out.append(parser.parse_rule(f"{label} = {_text(right, place)}", f"{place}.rules"))
        for kind in list(_STATEMENTS.values())[1:]:
            here = f"{place}.{kind}"
            texts = _texts(part.get(kind, []), here)
            out += [parser.parse_statement(f"{kind} {text}", here) for text in texts]
    return Layout(_name(name, where), space, meshes, tuple(out))


def _each(
    part: Mapping[str, object], kind: str, where: str, read: Callable[[str, str], Item]
) -> list[Item]:
    return [read(t, f"{where}.{kind}") for t in _texts(part.get(kind, []), f"{where}.{kind}")]


def _parts(
    data: object, where: str, known: Iterable[str]
) -> Iterable[tuple[Mapping[str, object], str]]:
    """Yield a table, and the tables of its parts, with what to call them."""
    table = _as_table(data, where)
    parts = table.get("part", [])
    if not isinstance(parts, list):
        raise _wrong(f"{where}.part", "a list of tables", parts)
    own = {k: v for k, v in table.items() if k != "part"}
    for number, part in enumerate([own, *parts]):
        place = where if number == 0 else f"{where}.part[{number - 1}]"
        for key in _as_table(part, place):
            if key not in known:
                raise _wrong(place, " or ".join(known), repr(key))
        yield part, place


def _table(part: Mapping[str, object], kind: str, where: str) -> Iterable[tuple[str, object]]:
    return _as_table(part.get(kind, {}), f"{where}.{kind}").items()


def _as_table(data: object, where: str) -> Mapping[str, object]:
    if not isinstance(data, Mapping) or not all(isinstance(k, str) for k in data):
        raise _wrong(where, "a table", data)
    return data


def _texts(data: object, where: str) -> list[str]:
    found = [data] if isinstance(data, str) else data
    if not isinstance(found, list):
        raise _wrong(where, "a text or a list of texts", data)
    return [_text(t, where) for t in found]


def _text(data: object, where: str) -> str:
    if not isinstance(data, str):
        raise _wrong(where, "a text", data)
    return data


def _name(name: str, where: str) -> str:
    if not DOTTED.fullmatch(name):
        raise _wrong(where, "a name: words with dots between them", repr(name))
    return name


def _wrong(where: str, wanted: str, found: object) -> UsageError:
    shown = found if isinstance(found, str) else type(found).__name__
    message = "this is not Lay in tables"
    return UsageError(message, kind="lay-syntax", where=where, wanted=wanted, found=shown)
