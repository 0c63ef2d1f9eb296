"""The command line: one file a verb; and what verbs of other packages may use of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"ckptd.cli.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
