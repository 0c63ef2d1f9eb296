"""What verbs print: documents for programs, tables for people, progress on a terminal.

Results go to standard output, everything else to standard error. rich is imported only where
a progress bar is drawn.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ckptd.errors import CkptdError

__all__ = [
    "Document",
    "Json",
    "Progress",
    "flag",
    "note",
    "print_document",
    "print_error",
    "print_table",
    "progress_bar",
    "shorten",
    "size_text",
    "time_text",
]


def flag(text: str) -> Parameter:
    """Return the parameter of a switch that is off unless it is given."""
    return Parameter(help=text, show_default=False)


Json = Annotated[bool, flag("Print one JSON document instead of text.")]
Progress = Callable[[int, int], None]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb"):
    """What ``--json`` prints: one JSON object, with the verb's name in ``verb``.

    Attributes
    ----------
    schema
        Counts incompatible changes. New fields do not change it: readers ignore fields that they
        do not know.
    """

    schema: int = 1


def print_document(document: Document) -> None:
    """Print a document to standard output."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    print(text.decode())


def print_error(error: CkptdError, as_json: bool) -> None:
    """Print an error to standard error, with its traceback when ``CKPTD_DEBUG`` is set."""
    if as_json:
        body = {"error": error.to_dict(), "exit_code": error.exit_code}
        print(msgspec.json.encode(body).decode(), file=sys.stderr)
    else:
        head, _, rest = str(error).partition("\n")
        mark = "\x1b[1;31merror:\x1b[0m" if _colors(sys.stderr) else "error:"
        notes = getattr(error, "__notes__", ())
        print(f"{mark} {head}", *filter(None, [rest]), *notes, sep="\n", file=sys.stderr)
    if os.environ.get("CKPTD_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)


def note(text: str) -> None:
    """Print a remark for people to standard error."""
    print(f"note: {text}", file=sys.stderr)


def _colors(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ


# -- words for numbers -----------------------------------------------------------------------------


def size_text(nbytes: float) -> str:
    """Return a number of bytes for people: ``1.5 GiB``."""
    unit = 0
    while nbytes >= 1023.5 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{nbytes:.3g} {_UNITS[unit]}"


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
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= width else text[: width - 3] + "..."


# -- tables ----------------------------------------------------------------------------------------


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; a name that begins with ">" is of a column aligned to the right.

    Nothing is wrapped or cut off, so that lines can be searched and copied. Drawn without rich,
    whose import would take longer than most verbs do.
    """
    right = [name.startswith(">") for name in columns]
    head = [name.removeprefix(">") for name in columns]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    if _colors(sys.stdout):
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    print(*lines, sep="\n")


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Give a function for ``(bytes done, bytes total)``; None where nobody sees a bar.

    The bar lives on standard error and is gone afterwards.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
