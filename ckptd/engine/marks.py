"""Marks on a data folder, or on the commit that it is of: somebody is about to delete it.

A clean-up puts a mark of its own into the folder first, looks second whether anybody relies on
what is in there, and then deletes the folder, or the commit record, or takes its mark away. Whoever
comes to rely on a folder says so first (by a commit record, a lease or a pin) and looks for marks
second. One of the two sees the other, however many there are of either, and wherever one dies.

A mark on a commit concerns that commit alone: others may refer to its folder, and live on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

from ckptd.errors import NotFoundError
from ckptd.format.names import MARKS
from ckptd.store.base import Store

__all__ = ["commit_marks", "put_mark", "unmarked"]

WAIT_S = 5.0
"""How long to wait for a clean-up to make up its mind, in seconds."""
VOID_S = 3600.0
"""Age at which a mark is that of a clean-up which died before it deleted anything, in seconds."""
_POLL_S = 0.05
_COMMIT = "commit-"
"""How the name of a mark on a commit begins."""


def put_mark(store: Store, folder: str, *, commit: bool = False) -> str:
    """Mark a data folder, or only the `commit` that it was written for; return the mark's key."""
    key = f"{folder}{MARKS}{_COMMIT if commit else ''}{uuid.uuid4().hex}"
    store.put(key, b"")
    return key


def commit_marks(store: Store, folder: str) -> list[str]:
    """Return the keys of the marks on the commit that a data folder was written for."""
    names = store.children(folder + MARKS)
    return [f"{folder}{MARKS}{name}" for name in names if name.startswith(_COMMIT)]


def unmarked(store: Store, folders: Iterable[str], own: str = "") -> bool:
    """Tell whether nobody is about to delete any of the folders; waits while that is open.

    Parameters
    ----------
    own
        The folder of the commit that is relied on: nobody is about to delete that commit either.
    """
    folders = list(folders)
    end = time.monotonic() + WAIT_S
    while any(_is_marked(store, folder, folder == own) for folder in folders):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def _is_marked(store: Store, folder: str, own: bool) -> bool:
    marks = [m for m in store.children(folder + MARKS) if own or not m.startswith(_COMMIT)]
    return any(_is_young(store, f"{folder}{MARKS}{mark}") for mark in marks)


def _is_young(store: Store, mark: str) -> bool:
    try:
        return store.stat(mark).modified + VOID_S > time.time()
    except NotFoundError:
        return False  # taken away since the listing
