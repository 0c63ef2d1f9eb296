"""Hugging Face hub cache: follows its links from ``snapshots`` into ``blobs``, and no others.

``models--NAME/snapshots/REVISION`` has a link for each file, into ``models--NAME/blobs``. A store
follows no link out of its folder, since the maker of a checkpoint could have anything read as a
part of it; these alone are followed, into that folder alone, and only to read.
"""

from __future__ import annotations

import os

from ckptd.store.base import ReadOnlyStore, Store, innermost
from ckptd.store.local import LocalStore

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class HubSnapshot(ReadOnlyStore, LocalStore):
    """A revision of a model in the cache, or a folder in one.

    Parameters
    ----------
    root
        The folder.
    blobs
        Where its files are.
    """

    def __init__(self, root: str, blobs: str) -> None:
        super().__init__(root)
        self._linked = os.path.realpath(blobs)


def follow_cache(store: Store) -> Store:
    """Return a store that follows the links of a model in the cache; any other store as it is."""
    inner = innermost(store)
    if not isinstance(inner, LocalStore) or isinstance(inner, HubSnapshot):
        return store
    folder = os.path.realpath(inner.url)
    while True:
        above, name = os.path.split(folder)
        if not name:
            return store
        if os.path.basename(above) == _SNAPSHOTS:
            blobs = os.path.join(os.path.dirname(above), _BLOBS)
            if os.path.isdir(blobs) and not os.path.islink(blobs):
                return HubSnapshot(inner.url, blobs)
        folder = above
