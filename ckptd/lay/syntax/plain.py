"""Programs as plain data: tables of texts, as TOML (or JSON, or YAML) holds them.

::

    {
        "mesh": {"M": "pp:2 tp:4"},
        "layout": {"mg": {"of": "llama", "on": ["M"], "rules": {"a.weight": "E[v@tp h]"}}},
    }

A text is what the statement has behind its keyword, or right of its ``=``. A table has no order
among its kinds and no key twice; a program may have both. What does not fit into one table goes
into several, one after the other, under the key ``part``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ckptd.errors import UsageError
from ckptd.lay.syntax.expressions import NAME
from ckptd.lay.syntax.grammar import (
    FAMILY,
    ITEMS,
    RULE,
    SCALAR,
    SPACE,
    STATEMENTS,
    STATES,
    BlockForm,
    show,
)
from ckptd.lay.syntax.parser import read
from ckptd.lay.syntax.pieces import DOTTED, Form
from ckptd.lay.syntax.tree import File, FollowedState, Layout, Space, SpaceTensor

__all__ = ["Table", "from_plain", "to_plain", "wrong"]

Table: TypeAlias = dict[str, object]

_ONLY = re.compile(r"(?:^|\s)for\s+\w+\s*=")


class _Kind(ABC):
    """One kind of node in a table: how it is written there, and read."""

    def __init__(self, node: type) -> None:
        self.node = node

    @abstractmethod
    def write(self, node: Any) -> tuple[str | None, object]:
        """Return the node's key in the kind's table, None if the kind is a list, and its value."""

    @abstractmethod
    def read(self, data: object, where: str) -> Iterator[Any]:
        """Yield the nodes of the kind's table or list."""


class _Listed(_Kind):
    """A list of texts: what stands behind the keyword of a form."""

    def __init__(self, form: Form[Any] | BlockForm[Any]) -> None:
        super().__init__(form.node)
        self._form, self._lead = form, f"{form.keyword} "

    def write(self, node: Any) -> tuple[str | None, object]:
        return None, self._form.show(node).removeprefix(self._lead)

    def read(self, data: object, where: str) -> Iterator[Any]:
        return (read(self._form, self._lead + text, where) for text in _texts(data, where))


class _States(_Kind):
    """A list of states; a text may have several."""

    def write(self, node: FollowedState) -> tuple[str | None, object]:
        return None, show(node)

    def read(self, data: object, where: str) -> Iterator[FollowedState]:
        return (state for text in _texts(data, where) for state in read(STATES, text, where))


class _Named(_Kind):
    """A table of texts by name: what stands right of the ``=`` of a form."""

    def __init__(self, form: Form[Any] | BlockForm[Any]) -> None:
        super().__init__(form.node)
        self._form, self._lead = form, f"{form.keyword} " if form.keyword else ""

    def write(self, node: Any) -> tuple[str | None, object]:
        label = node.name if self._lead else show(node.name)
        return label, self._form.show(node).removeprefix(f"{self._lead}{label} = ")

    def read(self, data: object, where: str) -> Iterator[Any]:
        for key, value in _as_table(data, where).items():
            # A key is read by itself: with its text it could be something else.
            label = _name(key, where) if self._lead else show(read(NAME, key, where))
            yield read(self._form, f"{self._lead}{label} = {_text(value, where)}", where)


class _Tensors(_Kind):
    """A table of axes by tensor, with what stands behind them."""

    def write(self, node: SpaceTensor) -> tuple[str | None, object]:
        label = show(SpaceTensor(node.name, ())).removesuffix("[]")
        return label, " ".join((*node.atoms, *map(show, node.only)))

    def read(self, data: object, where: str) -> Iterator[SpaceTensor]:
        for key, value in _as_table(data, where).items():
            text = _text(value, where)
            only = _ONLY.search(text)
            axes = text[: only.start()] if only else text
            yield read(FAMILY, f"{key}[{axes}]{text[len(axes) :]}", where)


class _Spaces(_Kind):
    """A table of spaces."""

    def write(self, node: Space) -> tuple[str | None, object]:
        lines = (*node.families, *node.states, *node.scalars, *node.lets)
        return node.name, _tables(lines, _IN_SPACES)

    def read(self, data: object, where: str) -> Iterator[Space]:
        for name, table in _as_table(data, where).items():
            place = f"{where}.{name}"
            lines = _nodes(table, place, _IN_SPACES)
            yield SPACE.put(Space(_name(name, place)), lines)


class _Layouts(_Kind):
    """A table of layouts."""

    def write(self, node: Layout) -> tuple[str | None, object]:
        head: Table = {"of": node.space} if node.space else {}
        return node.name, head | {"on": list(node.meshes)} | _tables(node.statements, _IN_LAYOUTS)

    def read(self, data: object, where: str) -> Iterator[Layout]:
        for name, found in _as_table(data, where).items():
            place = f"{where}.{name}"
            table = _as_table(found, place)
            space = _name(_text(table["of"], place), f"{place}.of") if "of" in table else ""
            on = f"{place}.on"
            meshes = tuple(_name(m, on) for m in _texts(table.get("on", []), on))
            body = {k: v for k, v in table.items() if k not in ("of", "on")}
            statements = _nodes(body, place, _IN_LAYOUTS)
            yield Layout(_name(name, place), space, meshes, tuple(statements))


_Kinds: TypeAlias = dict[str, _Kind]

_IN_FILES: _Kinds = {
    "mesh": _Named(ITEMS["mesh"]),
    "let": _Named(ITEMS["let"]),
    "use": _Listed(ITEMS["use"]),
    "space": _Spaces(Space),
    "layout": _Layouts(Layout),
    "reshard": _Listed(ITEMS["reshard"]),
}
_IN_LAYOUTS: _Kinds = {"rules": _Named(RULE), **{k: _Listed(f) for k, f in STATEMENTS.items()}}
_IN_SPACES: _Kinds = {
    "tensors": _Tensors(SpaceTensor),
    "follow": _States(FollowedState),
    "scalars": _Listed(SCALAR),
    "let": _Named(ITEMS["let"]),
}
"""In which order the kinds of a table are read."""


def to_plain(file: File) -> Table:
    """Return a program as plain data."""
    return _tables(file.items, _IN_FILES)


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
    return File(tuple(_nodes(data, file, _IN_FILES)))


def _tables(nodes: Iterable[Any], kinds: _Kinds) -> Table:
    """Return nodes as one table, or as parts where their order or a key twice needs it."""
    order = {kind.node: number for number, kind in enumerate(kinds.values())}
    keys = list(kinds)
    parts: list[Table] = [{}]
    last = 0
    for node in nodes:
        number = order[type(node)]
        key, value = kinds[keys[number]].write(node)
        held = parts[-1].get(keys[number], {})
        if number < last or (key is not None and isinstance(held, dict) and key in held):
            parts.append({})
        last = number
        if key is None:
            found = parts[-1].setdefault(keys[number], [])
            if isinstance(found, list):
                found.append(value)
        else:
            table = parts[-1].setdefault(keys[number], {})
            if isinstance(table, dict):
                table[key] = value
    return parts[0] if len(parts) == 1 else {"part": parts}


def _nodes(data: object, where: str, kinds: _Kinds) -> list[Any]:
    """Return the nodes of a table, then those of the tables of its parts."""
    table = _as_table(data, where)
    parts = table.get("part", [])
    if not isinstance(parts, list):
        raise wrong(f"{where}.part", "a list of tables", parts)
    own = {k: v for k, v in table.items() if k != "part"}
    out: list[Any] = []
    for number, part in enumerate([own, *parts]):
        place = where if number == 0 else f"{where}.part[{number - 1}]"
        for key in _as_table(part, place):
            if key not in kinds:
                raise wrong(place, " or ".join(kinds), repr(key))
        for key, kind in kinds.items():
            if key in part:
                out += kind.read(part[key], f"{place}.{key}")
    return out


def _as_table(data: object, where: str) -> Mapping[str, object]:
    if not isinstance(data, Mapping) or not all(isinstance(k, str) for k in data):
        raise wrong(where, "a table", data)
    return data


def _texts(data: object, where: str) -> list[str]:
    found = [data] if isinstance(data, str) else data
    if not isinstance(found, list):
        raise wrong(where, "a text or a list of texts", data)
    return [_text(t, where) for t in found]


def _text(data: object, where: str) -> str:
    if not isinstance(data, str):
        raise wrong(where, "a text", data)
    return data


def _name(name: str, where: str) -> str:
    if not DOTTED.fullmatch(name):
        raise wrong(where, "a name: words with dots between them", repr(name))
    return name


def wrong(where: str, wanted: str, found: object) -> UsageError:
    """Return the error that something in a table is not what was wanted there."""
    shown = found if isinstance(found, str) else type(found).__name__
    message = "this is not Lay in tables"
    return UsageError(message, kind="lay-syntax", where=where, wanted=wanted, found=shown)
