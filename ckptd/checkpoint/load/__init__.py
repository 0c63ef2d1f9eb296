"""Reading a checkpoint into live state: verify everything first, then write. No torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.checkpoint.load.direct import open_direct

__all__ = ["open_direct"]


def __getattr__(name: str) -> object:
    """Import on first use what plugins read with, so that no import pays for the rest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ckptd.checkpoint.load.direct"), name)
