"""Parses names: ``decoder.layers.{#l@pp}.**``, bare or in quotes."""

from __future__ import annotations

import re

from ckptd.layout.lay.lexer import Scanner
from ckptd.layout.lay.name import Alternatives, Glob, Index, Name, NamePart, Text, join
from ckptd.layout.lay.parser_dims import splits

__all__ = ["DOTTED", "PLAIN", "dotted", "name"]

PLAIN = re.compile(r"[A-Za-z0-9_.]+")
"""What may stand in a name without quotes, besides ``*`` and braces."""

_PADDED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*):0([1-9])d?\}")
"""An index in the name of a file."""
_INDEX = re.compile(r"\{(#?)([A-Za-z_][A-Za-z0-9_]*|0|[1-9][0-9]*)(?=[@}])")
DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_MAX_PARTS = 256


def dotted(s: Scanner, what: str) -> str:
    """Take words with dots between them: ``hf.llama``."""
    token = s.peek()
    match = DOTTED.match(s.text, token.start) if token.kind == "word" else None
    if match is None:
        raise s.fail(what)
    s.pos = match.end()
    return match[0]


def name(s: Scanner, what: str = "a name", *, padded: bool = False) -> Name:
    """Take a name; `padded`: indexes may say how many digits they have, ``{tp:02}``.

    Raises
    ------
    UsageError
        ``lay-syntax``.
    """
    token = s.peek()
    quoted = token.kind == "string"
    s.pos = token.start + quoted
    end = token.end - 1 if quoted else len(s.text)
    parts: list[NamePart] = []
    while s.pos < end:
        part = _part(s, quoted, padded)
        if part is None:
            break
        parts.append(part)
        if len(parts) > _MAX_PARTS:
            raise s.fail(f"a name of at most {_MAX_PARTS} parts", start=token.start, end=s.pos)
    s.pos += quoted
    if not parts:
        s.pos = token.start
        raise s.fail(what)
    return Name(join(parts), at=s.position(token.start))


def _part(s: Scanner, quoted: bool, padded: bool) -> NamePart | None:
    letter = s.text[s.pos]
    if letter == "*":
        return _glob(s)
    if letter == "{":
        match = _PADDED.match(s.text, s.pos) if padded else None
        if match is not None:
            start, s.pos = s.pos, match.end()
            return Index(match[1], width=int(match[2]), at=s.position(start))
        return _braces(s, quoted)
    if quoted:
        if letter == "}":
            raise s.fail(r"'\}'", start=s.pos, end=s.pos + 1, hint="no brace is open here")
        return _quoted_text(s, "{}*")
    match = PLAIN.match(s.text, s.pos)
    if match is None:
        return None
    s.pos = match.end()
    return Text(match[0])


def _quoted_text(s: Scanner, stop: str) -> Text:
    out = []
    while s.text[s.pos] not in stop + '"':
        text, s.pos = s.character(s.pos)
        out.append(text)
    return Text("".join(out))


def _glob(s: Scanner) -> Glob:
    start = s.pos
    while s.text[s.pos : s.pos + 1] == "*":
        s.pos += 1
    if s.pos - start > 2:
        raise s.fail("'*' or '**'", start=start, end=s.pos)
    return Glob(deep=s.pos - start == 2)


def _braces(s: Scanner, quoted: bool) -> NamePart:
    start = s.pos
    match = _INDEX.match(s.text, start)
    if match is None:
        return _alternatives(s, quoted)
    s.pos = match.end()
    cuts = splits(s)
    if (cuts or match[1]) and match[2][0].isdigit():
        raise s.fail("an axis: a number stands alone in its braces", start=start, end=s.pos)
    if s.peek().text != "}":
        raise s.fail("'}' or '@' in the index of a name")
    s.take()
    return Index(match[2], cuts, bool(match[1]), at=s.position(start))


def _alternatives(s: Scanner, quoted: bool) -> Alternatives:
    start = s.pos
    texts: list[str] = []
    while not texts or s.text[s.pos : s.pos + 1] == ",":
        s.pos += 1
        texts.append(_alternative(s, quoted))
    if s.text[s.pos : s.pos + 1] != "}" or len(texts) < 2:
        raise s.fail(
            "an index such as {l}, {#l@pp} or alternatives such as {k,v}",
            start=start,
            end=s.pos + 1,
            hint="no blanks between the braces; other letters need quotes around the whole name",
        )
    s.pos += 1
    return Alternatives(tuple(texts))


def _alternative(s: Scanner, quoted: bool) -> str:
    if quoted:
        return _quoted_text(s, "{},").text
    match = PLAIN.match(s.text, s.pos)
    s.pos = match.end() if match else s.pos
    return match[0] if match else ""
