"""Tokens of a program, syntax errors with line and caret, quotes; largest text, deepest nesting.

Names (``decoder.layers.{#l@pp}.*``) are no tokens: which characters belong together depends on
where they stand, so the grammar asks for them where it wants one (`expressions`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptd.errors import UsageError
from ckptd.lay.syntax.tree import Name, Position

MAX_TEXT = 8 << 20
"""Longest program that is read, in characters."""

MAX_DEPTH = 64
"""How deep dimensions, values and meshes may nest."""

_SHOWN = 90  # characters of a line around the caret

Kind: TypeAlias = Literal["word", "number", "string", "mark", "newline", "end", "other"]

_TOKEN = re.compile(
    r"""(?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?[A-Za-z]*)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*")
      | (?P<mark>\.\.\.?|->|//|[{}\[\]()@:|,=/*+\-;.])
      | (?P<newline>\n)
      | (?P<other>.)""",
    re.VERBOSE,
)
_BLANK = re.compile(r"[ \t\r\f]+|(?P<comment>\#[^\n]*)")
_BLANK_OR_LINE = re.compile(r"[ \t\r\f\n]+|(?P<comment>\#[^\n]*)")
_NAME_END = re.compile(r"[A-Za-z0-9_.*{}#@]+$")
_NAME_START = re.compile(r"[A-Za-z0-9_.*{}#@\-]+")
_WORDS = re.compile(
    r"(?:^|[;{\n])\s*(?:use|layout|space|mesh|reshard|default|pipe)\s(?:(?!\{\s)[^;\n])*$"
)
"""Begins what has words for names, which no quotes may stand around."""
_ESCAPE = re.compile(r'[\\"\x00-\x1f\x7f\x85\u2028\u2029]')
_SHORT = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text: ``text[start:end]``."""

    kind: Kind
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where one line of the program's normal form comes from, for the formatter.

    Attributes
    ----------
    start, end
        Offsets in the text.
    kind
        A statement of its own, or a line that opens or closes a block.
    show
        Returns the line in normal form.
    """

    start: int
    end: int
    kind: Literal["statement", "open", "close"]
    show: Callable[[], str]


def tokens(text: str) -> tuple[str, ...]:
    """Return the words and marks of a text without names."""
    return tuple(m[0] for m in _TOKEN.finditer(text) if m[0] != " ")


def quote(text: str) -> str:
    r"""Return `text` in quotes, as `Scanner.string` reads it: ``\n \t \" \\`` and ``\uXXXX``."""
    return '"' + _ESCAPE.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


class Scanner:
    """The text of a program and a place in it.

    Attributes
    ----------
    text, file
        The program, and what to call it in messages.
    pos
        Offset behind the last token taken.
    brackets
        Where the brackets stand that are open: inside them a line end is a blank.
    comments
        Comments by offset, as far as the text has been read.
    lines
        Lines of the normal form, as far as the text has been read.
    family
        Name of the tensor of a space that was read last: what ``.k`` goes on from.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.pos = 1 if text.startswith("\ufeff") else 0
        self.brackets: list[int] = []
        self.comments: dict[int, str] = {}
        self.lines: list[SourceLine] = []
        self.family: Name | None = None
        self._lines = [0, *(m.end() for m in re.finditer(r"\n", text))]
        self._ahead: tuple[int, bool, Token] | None = None
        if len(text) > MAX_TEXT:
            raise UsageError(
                "this program is too long",
                kind="lay-syntax",
                where=file,
                wanted=f"at most {MAX_TEXT} characters",
                found=len(text),
            )

    # --- tokens ---------------------------------------------------------------------------------

    def peek(self) -> Token:
        """Return the next token and stay before it."""
        free = bool(self.brackets)
        if self._ahead is None or self._ahead[:2] != (self.pos, free):
            self._ahead = (self.pos, free, self._read(self.blanks(self.pos, free)))
        return self._ahead[2]

    def take(self) -> Token:
        """Return the next token and go behind it."""
        token = self.peek()
        self.pos = token.end
        return token

    def blanks(self, pos: int, lines: bool = False) -> int:
        """Return where blanks and comments (and with `lines` line ends) that start at `pos` end."""
        blank = _BLANK_OR_LINE if lines else _BLANK
        while match := blank.match(self.text, pos):
            if match["comment"]:
                self.comments[pos] = match["comment"]
            pos = match.end()
        return pos

    def _read(self, pos: int) -> Token:
        match = _TOKEN.match(self.text, pos)
        if match is None:
            return Token("end", "", pos, pos)
        kind: Kind = match.lastgroup  # type: ignore[assignment]
        return Token(kind, match[0], pos, match.end())

    # --- what the grammar asks for --------------------------------------------------------------

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these words or marks."""
        token = self.peek()
        return token.kind in ("word", "mark") and token.text in texts

    def accept(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these words or marks."""
        return self.take() if self.at(*texts) else None

    def expect(self, text: str, what: str = "") -> Token:
        """Take this word or mark.

        Raises
        ------
        UsageError
            ``lay-syntax``: something else stands here.
        """
        if not self.at(text):
            raise self.fail(f"'{text}'" + (f" {what}" if what else ""))
        return self.take()

    def open(self, bracket: str, what: str = "") -> Token:
        """Take an opening bracket; line ends are blanks until `close`."""
        token = self.expect(bracket, what)
        self.brackets.append(token.start)
        return token

    def close(self, bracket: str, what: str = "") -> Token:
        """Take the closing bracket that belongs to `open`."""
        token = self.expect(bracket, what)
        self.brackets.pop()
        return token

    def check_depth(self) -> None:
        """Refuse what nests too deeply to be read by recursion."""
        if len(self.brackets) > MAX_DEPTH:
            raise self.fail(f"at most {MAX_DEPTH} levels of nesting")

    def skip_lines(self) -> None:
        """Go behind line ends and ``;``."""
        while self.peek().kind == "newline" or self.at(";"):
            self.take()

    def end_line(self, closing: str = "") -> None:
        """Go behind the end of a statement: a line end, ``;``, or before `closing`."""
        if self.peek().kind not in ("newline", "end") and not self.at(";", *closing):
            raise self.fail("the end of the line or ';'")
        self.skip_lines()

    def word(self, what: str) -> str:
        """Take a word: a letter or ``_``, then letters, digits and ``_``."""
        if self.peek().kind != "word":
            raise self.fail(what)
        return self.take().text

    def string(self, what: str) -> str:
        """Take a quoted text and return what it represents."""
        if self.peek().kind != "string":
            raise self.fail(what)
        token = self.take()
        pos, end, out = token.start + 1, token.end - 1, []
        while pos < end:
            text, pos = self.character(pos)
            out.append(text)
        return "".join(out)

    def character(self, pos: int) -> tuple[str, int]:
        r"""Return one character of a quoted text, escapes undone, and the offset behind it."""
        if self.text[pos] != "\\":
            return self.text[pos], pos + 1
        letter = self.text[pos + 1]
        if letter in "nt":
            return {"n": "\n", "t": "\t"}[letter], pos + 2
        if letter == "u":
            digits = self.text[pos + 2 : pos + 6]
            if re.fullmatch("[0-9a-fA-F]{4}", digits) and not 0xD800 <= int(digits, 16) < 0xE000:
                return chr(int(digits, 16)), pos + 6
        elif letter in '\\"{},*':
            return letter, pos + 2
        raise self.fail(
            r"one of the escapes \\ \" \n \t \{ \} \, \* \uXXXX",
            start=pos,
            end=pos + 2,
        )

    # --- positions and errors -------------------------------------------------------------------

    def position(self, start: int, end: int | None = None) -> Position:
        """Return where ``text[start:end]`` stands; `end` is behind the last token by default."""
        line = bisect_right(self._lines, start)
        column = start - self._lines[line - 1] + 1
        return Position(self.file, line, column, max((self.pos if end is None else end) - start, 1))

    def line_of(self, offset: int) -> int:
        """Return the line, from 1, that an offset lies on."""
        return bisect_right(self._lines, offset)

    def fail(
        self,
        wanted: str,
        *,
        start: int | None = None,
        end: int | None = None,
        hint: str | None = None,
    ) -> UsageError:
        """Return the error that `wanted` does not stand at the next token (or at `start`).

        Returns
        -------
        UsageError
            Kind ``lay-syntax``; `where` is ``file:line:column``; the message shows the line.
        """
        if start is None:
            token = self.peek()
            start, found = token.start, _described(token)
            hint = self._unquoted(token.start) or hint or self._hint(token, found)
        else:
            found = f"'{_cut(self.text[start:end])}'" if start < len(self.text) else _END
        where = self.position(start, start + 1)
        return UsageError(
            "Lay syntax error:\n" + self._line(where),
            kind="lay-syntax",
            where=f"{where.file}:{where.line}:{where.column}",
            wanted=wanted,
            found=found,
            hint=hint,
        )

    def _unquoted(self, at: int) -> str | None:
        """Return that a name needs quotes, where a hyphen stands in one."""
        if self.text[at : at + 1] != "-" or self.text[at : at + 2] == "->":
            return None
        before = _NAME_END.search(self.text, max(0, at - _SHOWN), at)
        after = _NAME_START.match(self.text, at)
        if before is None or after is None or _WORDS.search(self.text, max(0, at - _SHOWN), at):
            return None
        return f'a name with a hyphen stands in quotes: "{_cut(before[0] + after[0])}"'

    def _hint(self, token: Token, found: str) -> str | None:
        if found == _UNCLOSED:
            return "a text ends at a second '\"' on the same line"
        line = self.line_of(self.brackets[-1]) if self.brackets else 0
        if line and (token.kind == "end" or line != self.line_of(token.start)):
            return f"'{self.text[self.brackets[-1]]}' in line {line} is not closed"
        return None

    def _line(self, at: Position) -> str:
        """Return the line with a caret below it; of a long one only what is near the caret."""
        start = self._lines[at.line - 1]
        end = self._lines[at.line] - 1 if at.line < len(self._lines) else len(self.text)
        first = max(0, at.column - 1 - _SHOWN // 2)
        part = self.text[start + first : min(end, start + first + _SHOWN)]
        shown = "".join(c if c.isprintable() else " " for c in part)
        number = str(at.line)
        return f"  {number} | {shown}\n  {' ' * len(number)} | {' ' * (at.column - 1 - first)}^"


_END = "the end of the text"
_UNCLOSED = "a quote that is not closed"


def _described(token: Token) -> str:
    if token.kind == "end":
        return _END
    if token.kind == "newline":
        return "the end of the line"
    if token.text == '"':
        return _UNCLOSED
    return f"'{_cut(token.text)}'"


def _cut(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text[:40])
    return shown + ("..." if len(text) > 40 else "")
