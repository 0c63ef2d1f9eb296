"""Plugins: groups of entry points, `Verb`, how one is found and loaded, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "DUMPS",
    "HEALTH",
    "READERS",
    "SIMULATIONS",
    "VERBS",
    "Verb",
    "entries",
    "load_entry",
    "load_plugin",
    "origin",
]

DUMPS = "ckptd.dumps"
"""Group of the entry points of PyTorch's flight recorder: ``flightrecorder`` diagnoses a folder of
dumps, ``lines`` tells the last calls of one."""
HEALTH = "ckptd.health"
"""Group of the entry points that look at a node's hardware: a `ckptd.monitor.HealthSource` each."""
READERS = "ckptd.readers"
"""Group of the entry points that read a foreign format: a `ckptd.readers.base.FormatReader`."""
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
    """Return all entry points of a group, sorted by their name and what they represent.

    Their distributions are not asked, for that parses a file of each.
    """
    from importlib.metadata import entry_points  # 20 ms that a plain path need not pay

    return sorted(entry_points(group=group), key=lambda e: (e.name, e.value))


def load_entry(group: str, package: str, where: str) -> Any:
    """Return the object of the first entry point of a group.

    Parameters
    ----------
    package
        The package of ckptd that has one, for the error.
    where
        The option that needs it.

    Raises
    ------
    UsageError
        kind ``missing-package``: no installed package has one, or it does not load.
    """
    found = entries(group)
    if not found:
        raise UsageError(
            f"{where} needs {package}, which is not installed",
            kind="missing-package",
            where=where,
            hint="install ckptd from its wheel or its source tree: both hold it",
        )
    return load_plugin(found[0], f"{where} uses the first of the group {group}")


def load_plugin(entry: EntryPoint, why: str) -> Any:
    """Return what an entry point represents; `UsageError`, for none.

    Parameters
    ----------
    why
        What needs it, for the error.
    """
    try:
        return entry.load()
    except Exception as error:
        raise UsageError(
            "an installed plugin fails to load",
            where=origin(entry),
            found=repr(error),
            hint=f"reinstall or uninstall it: {why}",
        ) from error


def origin(entry: EntryPoint) -> str:
    """Return which distribution announces an entry point."""
    dist = entry.dist
    return f"{dist.name} {dist.version} ({entry.value})" if dist else entry.value
