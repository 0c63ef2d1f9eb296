"""From what a user names to the catalogue of its checkpoints: a root's, or a foreign folder's."""

from __future__ import annotations

from ckptd.errors import NotFoundError
from ckptd.readers.find import find_foreign
from ckptd.readers.twin import ForeignRoot
from ckptd.root.catalogue import Catalogue
from ckptd.store.base import Store

__all__ = ["foreign_format", "open_catalogue"]


def open_catalogue(
    store: Store, url: str, file: str = "", step: int = 0, *, foreign: bool = True
) -> Catalogue:
    """Open an existing root, or a foreign checkpoint as a root that is only read.

    Parameters
    ----------
    store
        The folder.
    url
        What the user gave, for errors.
    file
        The file in it that the user named (`ckptd.readers.find.split_file`); empty for none.
    step
        Of a foreign checkpoint that does not say its own.
    foreign
        Whether there may be a foreign checkpoint.

    Raises
    ------
    NotFoundError
        There is neither.
    MismatchError, CorruptError, RefusedError
        As `ckptd.readers.find.find_foreign`.
    """
    catalogue = Catalogue(store)
    try:
        if file:
            raise NotFoundError("no root", kind="not-a-root", where=url)
        catalogue.open()
    except NotFoundError:
        found = find_foreign(store, file, step) if foreign else None
        if found is None:
            raise
        return Catalogue(found)
    return catalogue


def foreign_format(catalogue: Catalogue) -> str:
    """Return the name of the reader of a foreign checkpoint; empty for a root of ckptd's own."""
    return catalogue.store.format if isinstance(catalogue.store, ForeignRoot) else ""
