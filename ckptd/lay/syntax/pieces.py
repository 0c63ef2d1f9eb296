"""Pieces of the grammar: words, numbers, sizes in bytes and their units, strings, lists, options.

In it: reserved words; largest number.

A `Syntax` is a pair of inverse functions: reading what it writes gives an equal thing. A `Form` is
the piece of a node of the syntax tree: marks and words with the pieces of its fields between them,
in the order in which they stand in the text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar, final

from ckptd.lay.syntax.lexer import Scanner, Token, quote, tokens
from ckptd.lay.syntax.tree import SyntaxNode

T = TypeVar("T")

MAX_NUMBER = (1 << 63) - 1

RESERVED = frozenset({"pad", "lcm", "min", "max", "_"})
"""Words that are no axis and no size, as they begin something else."""

DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")

_UNITS = {"B": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("iB", 1024), ("B", 1000))
}
"""Units of sizes in bytes; lengths are never in bytes."""


class Syntax(ABC, Generic[T]):
    """How one kind of thing is read, and written so that reading gives an equal one."""

    @abstractmethod
    def take(self, s: Scanner) -> T:
        """Take what stands next.

        Raises
        ------
        UsageError
            ``lay-syntax``: something else stands there.
        """

    @abstractmethod
    def show(self, value: T) -> str:
        """Return the text of a value."""


@final
class Pair(Syntax[T]):
    """A piece made of two functions."""

    def __init__(self, take: Callable[[Scanner], T], show: Callable[[T], str]) -> None:
        self._take, self._show = take, show

    def take(self, s: Scanner) -> T:
        """Take what stands next."""
        return self._take(s)

    def show(self, value: T) -> str:
        """Return the text of a value."""
        return self._show(value)


# --- what forms are made of ---------------------------------------------------------------------


class Marks:
    """Words and marks that stand in the text as they are, blanks where they are written.

    Parameters
    ----------
    text
        As it is written; without blanks, what is read.
    why
        What an error says behind what was wanted.
    """

    def __init__(self, text: str, why: str = "") -> None:
        self._text, self._why = text, why
        self.tokens = tokens(text)

    def take(self, s: Scanner, found: dict[str, object]) -> None:
        """Take the words and marks; brackets are opened and closed."""
        for token in self.tokens:
            act = s.open if token in "([" else s.close if token in ")]" else s.expect
            act(token, self._why)

    def show(self, node: object) -> str:
        """Return the text."""
        return self._text


class Field:
    """A field of the node, or several whose values one piece reads together."""

    def __init__(self, names: str, piece: Syntax[Any]) -> None:
        self.names, self.piece = tuple(names.split()), piece

    def take(self, s: Scanner, found: dict[str, object]) -> None:
        """Take the value and keep it by its name."""
        value = self.piece.take(s)
        found.update(zip(self.names, value if len(self.names) > 1 else (value,), strict=True))

    def show(self, node: object) -> str:
        """Return the text of the node's value."""
        values = tuple(getattr(node, name) for name in self.names)
        return self.piece.show(values if len(values) > 1 else values[0])


class OptionalParts:
    """Parts that may be left out: begins with a mark; not written if all fields have defaults."""

    def __init__(self, lead: Marks | str, *parts: Field | Marks, always: bool = False) -> None:
        first = Marks(lead) if isinstance(lead, str) else lead
        self._lead, self._parts, self._always = first.tokens[0], (first, *parts), always

    def is_ahead(self, s: Scanner) -> bool:
        """Whether its first word or mark stands next."""
        return s.at(self._lead)

    def take(self, s: Scanner, found: dict[str, object]) -> None:
        """Take the parts if their first mark stands next."""
        if self.is_ahead(s):
            for part in self._parts:
                part.take(s, found)

    def show(self, node: object) -> str:
        """Return the text of the parts, or nothing."""
        names = {name for p in self._parts if isinstance(p, Field) for name in p.names}
        given = any(
            getattr(node, f.name) != f.default
            for f in fields(node)  # type: ignore[arg-type]
            if f.name in names
        )
        return "".join(p.show(node) for p in self._parts) if given or self._always else ""


class AnyOrder:
    """Options that stand in any order."""

    def __init__(self, *options: OptionalParts) -> None:
        self._options = options

    def take(self, s: Scanner, found: dict[str, object]) -> None:
        """Take those that are there; the last one counts if one is there twice."""
        while (option := next((o for o in self._options if o.is_ahead(s)), None)) is not None:
            option.take(s, found)

    def show(self, node: object) -> str:
        """Return the text of those that are there."""
        return "".join(o.show(node) for o in self._options)


class Form(Syntax[T]):
    """A node of the syntax tree: its fields, with what stands between them.

    Parameters
    ----------
    node
        The class of the node.
    *parts
        In the order of the text.
    """

    def __init__(
        self, node: type[T], *parts: Marks | Field | OptionalParts | AnyOrder | str
    ) -> None:
        self.node = node
        self.parts = tuple(Marks(p) if isinstance(p, str) else p for p in parts)
        self._make: Callable[..., T] = node
        self._placed = issubclass(node, SyntaxNode)

    @property
    def keyword(self) -> str:
        """The word that it begins with."""
        first = self.parts[0]
        return first.tokens[0] if isinstance(first, Marks) else ""

    def take(self, s: Scanner) -> T:
        """Take the node."""
        return self.go_on(s, s.peek().start)

    def go_on(self, s: Scanner, start: int, **found: object) -> T:
        """Take the node behind those of its first fields that were taken already."""
        for part in self.parts[len(found) :]:
            part.take(s, found)
        if self._placed:
            found["at"] = s.position(start)
        return self._make(**found)

    def show(self, value: T) -> str:
        """Return the text of the node."""
        return "".join(part.show(value) for part in self.parts)


class FormChoice(Syntax[T]):
    """One of several forms, by the word that they begin with."""

    def __init__(self, *forms: Syntax[Any], what: str = "", **words: Syntax[Any]) -> None:
        named = {f.keyword: f for f in forms if isinstance(f, Form)}
        self.forms: dict[str, Syntax[Any]] = {**named, **words}
        self._what = what
        self._by_node = {f.node: f for f in self.forms.values() if isinstance(f, Form)}

    def is_ahead(self, s: Scanner) -> bool:
        """Whether one of the words stands next."""
        token = s.peek()
        return token.kind == "word" and token.text in self.forms

    def take(self, s: Scanner) -> T:
        """Take the form that the next word begins."""
        if not self.is_ahead(s):
            raise s.fail(self._what)
        found: T = self.forms[s.peek().text].take(s)
        return found

    def show(self, value: T) -> str:
        """Return the text of the node, by its class."""
        return self._by_node[type(value)].show(value)


# --- several of a kind --------------------------------------------------------------------------


def separated(piece: Syntax[T], mark: str, shown: str = "") -> Syntax[tuple[T, ...]]:
    """Return one or more with a mark between them, which is written as `shown`."""

    def take(s: Scanner) -> tuple[T, ...]:
        out = [piece.take(s)]
        while s.accept(mark):
            out.append(piece.take(s))
        return tuple(out)

    return Pair(take, lambda values: (shown or mark).join(map(piece.show, values)))


def several(
    piece: Syntax[T], more: Callable[[Scanner], bool], least: int = 0, lead: str = ""
) -> Syntax[tuple[T, ...]]:
    """Return those that follow each other while there are more; `lead`: a blank before each."""

    def take(s: Scanner) -> tuple[T, ...]:
        out: list[T] = []
        while len(out) < least or more(s):
            out.append(piece.take(s))
        return tuple(out)

    return Pair(take, lambda values: lead + " ".join(map(piece.show, values)) if values else "")


# --- words and texts ----------------------------------------------------------------------------


def word(what: str, but: str = "", hint: str | None = None) -> Syntax[str]:
    """Return a word; `but`: another one than this."""

    def take(s: Scanner) -> str:
        if but and s.at(but):
            raise s.fail(hint or what)
        return s.word(what)

    return Pair(take, str)


def dotted(what: str) -> Syntax[str]:
    """Return words with dots between them: ``hf.llama``."""
    return Pair(lambda s: _take_dotted(s, what), str)


def _take_dotted(s: Scanner, what: str) -> str:
    token = s.peek()
    match = DOTTED.match(s.text, token.start) if token.kind == "word" else None
    if match is None:
        raise s.fail(what)
    s.pos = match.end()
    return match[0]


def string(what: str) -> Syntax[str]:
    """Return a text in quotes."""
    return Pair(lambda s: s.string(what), quote)


def label(what: str) -> Syntax[str]:
    """Return words with dots between them, or any text in quotes."""
    return Pair(
        lambda s: s.string(what) if s.peek().kind == "string" else _take_dotted(s, what),
        lambda text: text if DOTTED.fullmatch(text) else quote(text),
    )


def one_of(*options: str, wanted: str = "", behind: str = "") -> Syntax[Any]:
    """Return one of some words.

    Parameters
    ----------
    *options
        The words.
    wanted
        What an error says was wanted; by default the words.
    behind
        What it says behind the words.
    """
    first, *others, last = options
    said = wanted or ", ".join([f"'{first}'", *others]) + f" or {last}"

    def take(s: Scanner) -> str:
        token = s.accept(*options)
        if token is None:
            raise s.fail(said + behind)
        return token.text

    return Pair(take, str)


def words(what: str) -> Syntax[tuple[str, ...]]:
    """Return words up to a closing bracket, which stays; commas between them are optional."""

    def take(s: Scanner) -> tuple[str, ...]:
        out: list[str] = []
        while not s.at("]"):
            if s.at(*RESERVED):
                raise s.fail(what, hint="pad, lcm, min, max and _ cannot name an axis")
            out.append(s.word(what))
            s.accept(",")
        return tuple(out)

    return Pair(take, " ".join)


# --- numbers ------------------------------------------------------------------------------------


def whole(s: Scanner, token: Token, what: str, units: dict[str, int] | None = None) -> int:
    """Return the whole number that a token represents: ``128``, ``40e6``, with `units` ``4GiB``."""
    text = token.text.replace("_", "")
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text[len(digits) :]
    mantissa, _, exponent = digits.lower().partition("e")
    before, _, after = mantissa.partition(".")
    factor = 1 if not unit else (units or {}).get(unit)
    # Compared before it is computed: 1e999999999 is a short text and a huge number.
    power = int(exponent[:12] or 0) - len(after)
    found = -1
    if factor is not None and len(before + after) <= 40 and abs(power) <= 40:
        top = int(before + after) * factor * 10 ** max(power, 0)
        rest = 10 ** max(-power, 0)
        found = top // rest if top % rest == 0 else -1
    if not 0 <= found <= MAX_NUMBER:
        hint = None
        if unit and units is None:
            hint = f"'{unit}' cannot follow a number here: lengths count elements, not bytes"
        raise s.fail(what, start=token.start, end=token.end, hint=hint)
    return found


def _take_whole(s: Scanner, what: str, units: dict[str, int] | None = None) -> int:
    if s.peek().kind != "number":
        raise s.fail(what)
    return whole(s, s.take(), what, units)


def integer(what: str) -> Syntax[int]:
    """Return a whole number, written with all its digits."""
    return Pair(lambda s: _take_whole(s, what), str)


def count(what: str) -> Syntax[int]:
    """Return a whole number, written as `show_count` does."""
    return Pair(lambda s: _take_whole(s, what), show_count)


def show_count(value: int) -> str:
    """Return a whole number: millions as ``40e6``, so that no zeros must be counted."""
    for power in (9, 6):
        if value >= 10**power and value % 10**power == 0:
            return f"{value // 10**power}e{power}"
    return str(value)


def byte_size() -> Syntax[int]:
    """Return a size in bytes: ``4GiB``, ``512MB``, ``1000``."""
    return Pair(lambda s: _take_whole(s, "a size in bytes: 4GiB, 512MB", _UNITS), _show_bytes)


def _show_bytes(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


def decimal(what: str) -> Syntax[float]:
    """Return a number with a sign: ``-1.5``, ``1e-3``, ``-inf``."""

    def take(s: Scanner) -> float:
        start = s.peek().start
        sign = -1.0 if s.accept("-") else 1.0
        if not s.at("inf") and s.peek().kind != "number":
            raise s.fail(what)
        token = s.take()
        try:
            return sign * float(token.text)
        except ValueError:
            raise s.fail(what, start=start, end=token.end) from None

    def show(value: float) -> str:
        return str(int(value)) if value.is_integer() and abs(value) < 1e6 else repr(value)

    return Pair(take, show)


def integers(what: str, one: Callable[[int], str] = str) -> Syntax[tuple[int, ...]]:
    """Return one or more whole numbers in square brackets."""

    def take(s: Scanner) -> tuple[int, ...]:
        s.open("[")
        out: list[int] = []
        while not s.at("]") or not out:
            out.append(_take_whole(s, what))
            s.accept(",")
        s.close("]")
        return tuple(out)

    return Pair(take, lambda values: f"[{' '.join(map(one, values))}]")
