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

_HOMES = dict.fromkeys(__all__, "ckptd.cli.output") | {"app": "ckptd.cli.main"}

__getattr__ = front(__name__, _HOMES)
