"""Naming the save, and its tier, around the code that works for it: see `ckptd.events.about`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from ckptd import events
from ckptd.checkpoint.format.names import CommitName
from ckptd.store.base import Store
from ckptd.store.wrap import innermost

__all__ = ["root_tier", "saving", "tier_of"]


def tier_of(store: Store) -> str:
    """Return the tier that a checkpointer's root is: ``local``, ``remote``, or ``memory``."""
    if not store.capabilities.shared:
        return "memory"
    # Of the store itself: one that packs gives no local files, wherever it is.
    return "local" if innermost(store).capabilities.local_files else "remote"


def root_tier(store: Store, near: Iterable[str]) -> str:
    """Return the tier that a root is beside near tiers: ``local`` is then a folder a node."""
    return "remote" if "local" in near else tier_of(store)


def saving(store: Store, name: CommitName, attempt: str, rank: int) -> AbstractContextManager[None]:
    """Say whose share of which save is worked on; a tier that was named already stays."""
    save = events.SaveId(name.step, name.generation, attempt, rank)
    return events.about(save, tier=events.current().tier or tier_of(store))
