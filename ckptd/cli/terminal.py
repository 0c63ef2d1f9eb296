"""What reaches the terminal: characters that print, whatever a file or a message holds."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

UNPRINTABLE = re.compile(r"[^\n\x20-\x7e]")
"""What may not print: the cheap half of the question, asked of all text at once."""


class _Filtered:
    """A text stream that lets through what prints, line ends and tabs.

    What verbs show comes out of files and messages that others wrote: names of tensors, reasons,
    lines of programs. A terminal that got an escape sequence of theirs would change its title,
    hide lines, or type.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    @property
    def rich_proxied_file(self) -> TextIO:
        """Where the parser's help is drawn, which is text of ours with colours."""
        return self.unfiltered

    def write(self, text: str) -> int:
        """Write `text`; each character that does not print is U+FFFD. Returns its length."""
        self.unfiltered.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def printable(text: str) -> str:
    """Return `text` with U+FFFD for what does not print and is neither a line end nor a tab."""
    return UNPRINTABLE.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    character = found[0]
    return (
        character if character in "\n\t" or character.isprintable() else "\N{REPLACEMENT CHARACTER}"
    )


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream behind the filter of `printing`, for what is drawn here."""
    return stream.unfiltered if isinstance(stream, _Filtered) else stream


def drawing(stream: TextIO) -> Console:
    """Return rich's console on `stream`, whose escapes pass: filter what it is given to draw.

    rich takes the place of standard output and standard error while it draws, so that lines
    printed meanwhile stand above: within that, `printing` filters them.
    """
    from rich.console import Console

    return Console(file=unfiltered(stream), highlight=False)


@contextmanager
def printing() -> Iterator[None]:
    """Filter standard output and standard error within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast("TextIO", _Filtered(before[0])),
        cast("TextIO", _Filtered(before[1])),
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def one_line(text: str) -> str:
    """Return `text` in one line; see `printable`."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}").replace("\t", " ")
