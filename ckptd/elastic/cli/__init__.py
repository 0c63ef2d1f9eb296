"""Verbs `run`, `controller` and `ctl`; the names that plugins use of them.

The names below are what plugins use of them, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.elastic.cli.run import controller_settings, separated, slots_of

__all__ = ["controller_settings", "separated", "slots_of"]


__getattr__ = front(__name__, dict.fromkeys(__all__, "ckptd.elastic.cli.run"))
