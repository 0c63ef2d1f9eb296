"""The command line, and what verbs of other packages use of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.cli.main import app
    from ckptd.cli.output import (
        Document,
        Json,
        flag,
        json_text,
        note,
        print_document,
        print_table,
        shorten,
    )

__all__ = [
    "Document",
    "Json",
    "app",
    "flag",
    "json_text",
    "note",
    "print_document",
    "print_table",
    "shorten",
]

_MODULES = {
    "main": ("app",),
    "output": (
        "Document",
        "Json",
        "flag",
        "json_text",
        "note",
        "print_document",
        "print_table",
        "shorten",
    ),
}


__getattr__ = front(__name__, {n: f"ckptd.cli.{m}" for m, names in _MODULES.items() for n in names})
