"""Programs in TOML: a table of ``name = "reference[dimensions] modifiers"`` for each layout."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping

from ckptd.lay.syntax.lexer import MAX_TEXT
from ckptd.lay.syntax.plain import Table, from_plain, to_plain, wrong
from ckptd.lay.syntax.tree import File

__all__ = ["read_toml", "write_toml"]

_BARE = re.compile("[A-Za-z0-9_-]+")
_LITERAL = re.compile(r"[^'\x00-\x1f\x7f]*")
_SPECIAL = re.compile(r'[\\"\x00-\x1f\x7f]')


def read_toml(text: str, file: str = "<text>") -> File:
    """Read a program in TOML.

    Parameters
    ----------
    text
        The tables; untrusted. What they may hold: ``docs/reference/lay.md``.
    file
        What to call it in messages.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    if len(text) > MAX_TEXT:
        raise wrong(file, f"at most {MAX_TEXT} characters", str(len(text)))
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(file, "TOML", str(error)) from error
    return from_plain(data, file)


def write_toml(file: File) -> str:
    """Return a program in TOML; `read_toml` gives the same tree."""
    return "\n\n".join(_sections(to_plain(file), ())) + "\n"


def _sections(table: Mapping[str, object], path: tuple[str, ...], header: str = "") -> list[str]:
    """Return a table and the tables in it, each with its header."""
    lines = [header] if header else []
    inner: list[str] = []
    for key, value in table.items():
        below = (*path, key)
        if isinstance(value, Mapping):
            inner += _sections(value, below, f"[{_path(below)}]")
        elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
            inner += _parts(value, below)
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    # A header of its own for a table that holds nothing but tables would say nothing.
    keep = len(lines) > 1 or not inner or not header
    return (["\n".join(lines)] if lines and keep else []) + inner


def _parts(tables: Iterable[Table], path: tuple[str, ...]) -> list[str]:
    out = []
    for table in tables:
        found = _sections(table, path)
        header = f"[[{_path(path)}]]"
        plain = any(not isinstance(v, Mapping) for v in table.values())
        out += [f"{header}\n{found[0]}", *found[1:]] if plain else [header, *found]
    return out


def _path(keys: tuple[str, ...]) -> str:
    return ".".join(map(_key, keys))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return _text(str(value))


def _text(text: str) -> str:
    """Return a text in quotes: in single ones, without escapes, if it has double ones."""
    if ('"' in text or "\\" in text) and _LITERAL.fullmatch(text):
        return f"'{text}'"
    return '"' + _SPECIAL.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    return f"\\{match[0]}" if match[0] in '"\\' else f"\\u{ord(match[0]):04x}"
