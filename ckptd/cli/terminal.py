"""Terminal: colours, and the filter that lets printable characters pass alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ckptd.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


GOOD, PLAIN, WARN, BAD = "color(28)", "color(31)", "color(166)", "color(160)"
"""Green, blue, orange and red that are read on a light background as on a dark one."""
_THEME = {
    "cyclopts.name": PLAIN,
    "progress.download": GOOD,
    "progress.remaining": PLAIN,
}


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
        """The unfiltered stream, for the parser's help: fixed text of ckptd with colours."""
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


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream behind the filter of `printing`, for what is drawn here."""
    return stream.unfiltered if isinstance(stream, _Filtered) else stream


def drawing(stream: TextIO) -> Console:
    """Return rich's console on `stream`, whose escapes pass: filter what it is given to draw.

    rich takes the place of standard output and standard error while it draws, so that lines
    printed meanwhile stand above: within that, `printing` filters them.
    """
    from rich.console import Console
    from rich.theme import Theme

    return Console(file=unfiltered(stream), highlight=False, theme=Theme(_THEME))


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
