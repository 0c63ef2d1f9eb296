"""``ckptd lay fmt``: normal form: indents, blank lines, comments and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.lay.syntax.lexer import Scanner
from ckptd.lay.syntax.parser import scan

INDENT = "  "


@dataclass(slots=True)
class _Placed:
    """A line of the result: where it comes from, how deep it stands, whether it stands apart."""

    start: int
    end: int
    text: str
    depth: int
    apart: bool = False


def format_text(text: str, file: str = "<text>") -> str:
    """Return a program in its normal form: one statement a line, comments kept.

    A comment on a line of its own stays before what followed it, one behind a statement stays
    behind it, one inside a statement goes before it. One blank line stays where there were some.

    Raises
    ------
    UsageError
        ``lay-syntax``: the text is no program.
    """
    _, scanner = scan(text, file)
    comments = sorted(scanner.comments.items())
    lines: list[_Placed] = []
    depth, taken, block = 0, 0, False
    for span in scanner.lines:
        closing = span.kind == "close"
        before = taken
        while taken < len(comments) and comments[taken][0] < span.end:
            taken += 1
        own = _behind(scanner, lines, comments[before:taken])
        # Comments before a closing brace belong to the block that it closes.
        new = [_Placed(at, at + len(c), c, depth) for at, c in own]
        depth -= closing
        new.append(_Placed(span.start, span.end, span.show(), depth))
        new[0].apart = bool(lines) and depth == 0 and not closing and (block or span.kind == "open")
        lines += new
        depth += span.kind == "open"
        block = closing
    own = _behind(scanner, lines, comments[taken:])
    lines += [_Placed(at, at + len(c), c, 0) for at, c in own]
    return _joined(scanner, lines)


def _behind(
    s: Scanner, lines: list[_Placed], comments: list[tuple[int, str]]
) -> list[tuple[int, str]]:
    """Put a comment that stands behind the last line there; return those that have own lines."""
    rest = [(at, text.rstrip()) for at, text in comments]
    if rest and lines and s.line_of(rest[0][0]) == s.line_of(lines[-1].end - 1):
        at, text = rest.pop(0)
        lines[-1].text += "  " + text
        lines[-1].end = at + len(text)
    return rest


def _joined(s: Scanner, lines: list[_Placed]) -> str:
    out: list[str] = []
    before: _Placed | None = None
    for line in lines:
        if before is not None:
            blank = s.text.count("\n", before.end, max(before.end, line.start)) > 1
            if line.apart or (blank and before.depth == line.depth):
                out.append("")
        out.append(INDENT * line.depth + line.text)
        before = line
    return "\n".join([*out, ""]) if out else ""
