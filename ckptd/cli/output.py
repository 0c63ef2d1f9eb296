"""Output of verbs: JSON documents, tables, times, sizes, warnings, errors, progress bars.

A verb returns a `Reply`, and `ckptd.cli.main` prints it as ``--json`` says. Results go to standard
output, everything else to standard error. rich is imported only where a progress bar is drawn.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import msgspec
from cyclopts import Parameter

from ckptd.cli.terminal import drawing, printing, unfiltered
from ckptd.errors import UNPRINTABLE, CkptdError, one_line, size_text

if TYPE_CHECKING:
    from rich.progress import Task

D = TypeVar("D", bound="Document")
R = TypeVar("R")


def option(text: str, *names: str) -> Parameter:
    """Return the parameter of an option whose help shows no default.

    Parameters
    ----------
    names
        How it is written, where that is not the name of the argument.
    """
    return Parameter(help=text, name=names or None, show_default=False)


flag = option
"""The parameter of a switch that is off unless it is given."""

Json = Annotated[bool, flag("Print one JSON document instead of text.")]
"""Declared by every verb, for its help and for completion; `ckptd.cli.main` acts on it."""
Progress = Callable[[int, int], None]

_INDENT = 4
_LEAST = 20
"""Letters that the last column of a table has at least, if words of it go on below."""


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb"):
    """The document that ``--json`` prints: one JSON object, with the verb's name in ``verb``.

    Attributes
    ----------
    schema
        Counts incompatible changes. New fields do not change it: readers ignore fields that they
        do not know.
    """

    schema: int = 1


class Reply:
    """The result of a verb.

    Parameters
    ----------
    document
        The whole outcome, which ``--json`` prints.
    show
        Prints the document for people.
    code
        The exit code.
    """

    def __init__(self, document: D, show: Callable[[D], object], code: int = 0) -> None:
        self.document = document
        self.code = code
        self._show: Callable[[], object] = partial(show, document)

    def print(self, *, as_json: bool) -> None:
        """Print the document, as JSON or for people."""
        if as_json:
            print_document(self.document)
        else:
            self._show()
        _warnings.clear()
        _left_out.clear()


_warnings: list[str] = []
"""Texts of `warn` in this command."""
_left_out: dict[str, tuple[int, list[str]]] = {}
"""Values of `left_out`, by source."""
_MOST_SHOWN = 4


class LeftOut(msgspec.Struct, frozen=True):
    """Values of a source that ckptd does not read: how many, and names of the first ones."""

    source: str
    count: int
    names: list[str]


def print_document(document: Document) -> None:
    """Print a document to standard output, with what `warn` and `left_out` have said."""
    body: Any = document
    if _warnings:
        body = msgspec.to_builtins(document) | {"warnings": list(_warnings)}
    if _left_out:
        values = [LeftOut(source, *found) for source, found in _left_out.items()]
        body = msgspec.to_builtins(body) | {"values_left_out": msgspec.to_builtins(values)}
    _warnings.clear()
    _left_out.clear()
    print(json_text(body, indent=1))


def print_error(error: CkptdError, as_json: bool) -> None:
    """Print an error to standard error, with its traceback when ``CKPTD_DEBUG`` is set."""
    _warnings.clear()
    _left_out.clear()
    if as_json:
        body = {"error": error.to_dict(), "exit_code": error.exit_code}
        print(json_text(body), file=sys.stderr)
    else:
        head, _, rest = str(error).partition("\n")
        _print_styled("error:", "1;31", sys.stderr, end=" ")
        print(head, file=sys.stderr)
        for line in "\n".join([rest, *getattr(error, "__notes__", ())]).splitlines():
            label = len(line) - len(line.lstrip()) + len("wanted: ")
            print_text(line, label, sys.stderr)
    if os.environ.get("CKPTD_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning to standard error, and add it to the document of ``--json``."""
    _warnings.append(text)
    note(text)


def left_out(source: str, count: int, names: Sequence[str]) -> None:
    """Print how many values of a source are not read; the field ``values_left_out`` of ``--json``.

    Parameters
    ----------
    source
        What the user named.
    count, names
        How many, and the first of them; nothing is said of none.
    """
    if count:
        _left_out[source] = count, list(names)
        more = f" and {count - _MOST_SHOWN} more" if count > _MOST_SHOWN else ""
        shown = ", ".join(names[:_MOST_SHOWN]) + more
        note(f"{source}: left out, neither tensors nor plain values: {count}: {shown}")


def note(text: str) -> None:
    """Print a remark for people to standard error."""
    print(f"note: {text}", file=sys.stderr)


def _print_styled(text: str, style: str, stream: TextIO, end: str = "\n") -> None:
    """Print a line, on a terminal in the style of an SGR sequence, without filtering the style."""
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        print("\x1b[" + style + "m", end="", file=unfiltered(stream))
        print(text, end="", file=stream)
        print("\x1b[0m", end=end, file=unfiltered(stream))
    else:
        print(text, end=end, file=stream)


def json_text(body: Any, indent: int | None = None) -> str:
    """Return JSON in which every character that a terminal may act on is written as an escape."""
    data = msgspec.json.encode(body)
    text = (data if indent is None else msgspec.json.format(data, indent=indent)).decode()
    return UNPRINTABLE.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    if character in "\n\t" or character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


# -- words for numbers -----------------------------------------------------------------------------


def counted(count: int, what: str) -> str:
    """Return a number of things for people: ``1 file``, ``2 files``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def seconds_text(value: float) -> str:
    """Return a time for people, in three digits: ``1.24 s``, ``340 ms``, ``52 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 0.9995:
            return f"{value * scale:.3g} {unit}" if value * scale < 999.5 else f"{value:.0f} s"
    return f"{value * 1e6:.0f} us"


def time_text(created: str | float) -> str:
    """Return a record's time, or seconds since 1970, in the zone of this machine."""
    try:
        if isinstance(created, str):
            moment = datetime.fromisoformat(created).astimezone()
        else:
            moment = datetime.fromtimestamp(created).astimezone()
    except (ValueError, OverflowError, OSError):
        return str(created)[:19]
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def shorten(text: str, width: int) -> str:
    """Return at most `width` characters of `text`, in one line."""
    text = one_line(text)
    return text if len(text) <= width else text[: width - 3] + "..."


# -- tables ----------------------------------------------------------------------------------------


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; a name that begins with ">" is of a column aligned to the right.

    Nothing is wrapped or cut off where lines go into a file or a pipe, to be searched and copied.
    On a terminal that is too narrow, words of the last column go on below; else the longest column
    gives up three fifths of its letters at most, in the middle; else a row takes several lines, all
    but the first indented. Drawn without rich, whose import would take longer than most verbs do.
    """
    right = [name.startswith(">") for name in columns]
    head = [name.removeprefix(">") for name in columns]
    table = [head, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    excess = sum(widths) + 2 * (len(widths) - 1) - room
    longest = widths.index(max(widths[:-1], default=widths[-1]))
    last, words = widths[-1] - excess, (word for row in table for word in row[-1].split())
    if excess > 0 and not right[-1] and last >= max(_LEAST, *map(len, words)):
        for row in table:
            row[-1] = _below(row[-1], last, room - last)
        widths[-1] = last
    elif 0 < excess <= widths[longest] * 3 // 5 and not right[longest]:
        widths[longest] -= excess
        for row in table:
            row[longest] = _without_middle(row[longest], widths[longest])
    folds = list(_folds(widths, room))
    lines = [
        "\n".join(
            (
                indent * " "
                + "  ".join(
                    row[n].rjust(widths[n]) if right[n] else row[n].ljust(widths[n]) for n in fold
                )
            ).rstrip()
            for indent, fold in folds
        )
        for row in table
    ]
    _print_styled(lines[0], "1", sys.stdout)
    if rows:
        print(*lines[1:], sep="\n")


def _without_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[half + 1 - width :]}"


def _below(text: str, width: int, indent: int) -> str:
    """Return `text` in lines of `width` characters, all but the first indented."""
    import textwrap

    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return ("\n" + indent * " ").join(lines)


def print_text(text: str, indent: int = 0, stream: TextIO | None = None) -> None:
    """Print prose; on a terminal it is folded between words, all lines but the first indented."""
    stream = stream or sys.stdout
    room = shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize
    if len(text) > room:
        text = text[:indent] + _below(text[indent:], room - indent, indent)
    print(text, file=stream)


def _folds(widths: Sequence[int], room: int) -> Iterator[tuple[int, list[int]]]:
    """Cut columns into lines of at most `room` characters; yield indent and columns of each."""
    indent, used, fold = 0, 0, list[int]()
    for number, width in enumerate(widths):
        if fold and used + 2 + width > room:
            yield indent, fold
            indent, used, fold = _INDENT, _INDENT - 2, []
        used += width + (2 if fold or indent else 0)
        fold.append(number)
    yield indent, fold


def print_rows(rows: Iterable[R], columns: Mapping[str, Callable[[R], object]]) -> None:
    """Print a table of records; a column is a head and what it shows of a record, None for nothing.

    Heads and alignment are as in `print_table`.
    """
    cells = [
        ["" if (c := get(row)) is None else str(c) for get in columns.values()] for row in rows
    ]
    print_table(list(columns), cells)


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Give a function for ``(bytes done, bytes total)``; None where no terminal shows a bar.

    The bar lives on standard error and is gone afterwards.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{size_text(task.speed)}/s" if task.speed else "")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        Speed(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=drawing(sys.stderr), transient=True) as bar, printing():
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
