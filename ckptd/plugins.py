"""What installed packages add to ckptd: entry points, looked up only when something needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["DUMPS", "SIMULATIONS", "VERBS", "Verb", "entries", "origin"]

DUMPS = "ckptd.dumps"
"""Group of the entry point that diagnoses a folder of dumps of PyTorch's flight recorder."""
SIMULATIONS = "ckptd.simulations"
"""Group of the entry point that feeds a daemon with a job that does not exist."""
VERBS = "ckptd.verbs"
"""Group of the entry points that add a verb: its name, and a `Verb`."""


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Attributes
    ----------
    target
        ``module:function``, imported when the verb runs. `ckptd.cli` has what it may print with.
    help
        Its first paragraph is what ``ckptd --help`` lists.
    verbatim
        Whether the function gets all words as they are, options included.
    """

    target: str
    help: str
    verbatim: bool = False


def entries(group: str) -> list[EntryPoint]:
    """Return all entry points of a group, sorted by their name and their distribution."""
    from importlib.metadata import entry_points  # 20 ms that a plain path need not pay

    return sorted(entry_points(group=group), key=lambda e: (e.name, origin(e)))


def origin(entry: EntryPoint) -> str:
    """Return which distribution announces an entry point."""
    dist = entry.dist
    return f"{dist.name} {dist.version} ({entry.value})" if dist else entry.value
