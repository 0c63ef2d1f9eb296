"""Helps: groups that only ``--help-all`` shows, defaults as a help shows them."""

from __future__ import annotations

from typing import ClassVar

from cyclopts import Group


class Rare(Group):
    """Left out by ``--help``, shown by ``--help-all``."""

    shown: ClassVar[bool] = False

    @property
    def show(self) -> bool:
        """Whether a help has it."""
        return Rare.shown


def shown_default(value: object) -> str | None:
    """Return a default as a help shows it; one that says nothing is left out."""
    return None if value in ("", (), None) or value is False else str(value)
