"""Opens what a user names: a root, a new root, a foreign checkpoint; errors for an empty one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptd.checkpoint.format.names import ROOT_MARKER
from ckptd.checkpoint.format.records import RootMarker
from ckptd.checkpoint.load.foreign import ForeignStore, foreign_formats, split_file
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.opening import Trust, is_trusting, root_spec, trusting
from ckptd.errors import CkptdError, NotFoundError, RefusedError
from ckptd.store.base import Store, StoreSpec, scheme_of

_log = logging.getLogger("ckptd")


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
        The file in it that the user named (`split_file`); empty for none.
    step
        Of a foreign checkpoint that does not say its own.
    foreign
        Whether there may be a foreign checkpoint.

    Raises
    ------
    NotFoundError
        There is neither.
    MismatchError, CorruptError, RefusedError
        As `ckptd.checkpoint.load.foreign.ForeignFormats`.
    """
    catalogue = Catalogue(store)
    try:
        if file:
            raise NotFoundError("no root", kind="no-root", where=url)
        catalogue.open()
    except NotFoundError as error:
        if not foreign or is_trusting(store.describe()):  # others' checkpoints are not signed
            raise
        formats = foreign_formats()
        found = formats.find(store, file, step)
        if found is None:
            wanted = f"{ROOT_MARKER}, or a checkpoint of {', '.join(formats.names())}"
            raise CkptdError.from_dict({**error.to_dict(), "wanted": wanted}) from None
        return Catalogue(found)
    return catalogue


def _opened_or_format(catalogue: Catalogue) -> RootMarker | str:
    """Open a root; where there is none, return the format of the foreign checkpoint, if any."""
    try:
        return catalogue.open()
    except NotFoundError:
        # What a new folder holds is nothing: no reader is brought in to look at it. Links, as in
        # the cache of the Hugging Face hub, are no children of a store, and are a checkpoint.
        store = catalogue.store
        found = store.children() or (os.path.isdir(store.url) and os.listdir(store.url))
        return foreign_formats().format_of(store) if found else ""


def begin_beside(catalogue: Catalogue) -> RootMarker:
    """Open a root that a job writes into; make it, and log what it hides, where there is none.

    Everything that reads takes a root, where there is one: no job that trains is stopped for that.
    An existing root hides nothing more.

    Raises
    ------
    CkptdError
        As of `ckptd.checkpoint.root.index.Index.create_or_open`.
    """
    try:
        found = _opened_or_format(catalogue)
    except CkptdError as error:
        _log.warning("cannot tell whether the root hides another checkpoint: %s", error)
        return catalogue.create_or_open()
    if isinstance(found, RootMarker):
        return found
    if found:
        _log.warning(
            "%s holds a checkpoint of the format %s. The root that begins there hides it:"
            " ckptd reads the root from now on, and the other one only by the names of its"
            " files. Another folder for the root keeps both readable.",
            catalogue.store.url,
            found,
        )
    return catalogue.create_or_open()


def begin_root(catalogue: Catalogue) -> RootMarker:
    """Open a root that a verb writes into; make it where the folder holds no other checkpoint.

    Raises
    ------
    RefusedError
        kind ``exists``: a foreign checkpoint is there.
    CkptdError
        As of `ckptd.checkpoint.root.index.Index.create_or_open`.
    """
    found = _opened_or_format(catalogue)
    if isinstance(found, RootMarker):
        return found
    if found:
        raise RefusedError(
            "this folder holds a checkpoint of another format, which a root would hide",
            kind="exists",
            where=catalogue.store.url,
            wanted="a root, or a folder without a checkpoint",
            found=f"a checkpoint of the format {found}",
            hint="name another folder",
        )
    return catalogue.create_or_open()


@contextmanager
def opened(
    url: str, step: int = 0, *, like: StoreSpec, trust: Trust | None = None
) -> Iterator[Catalogue]:
    """Open what a job reads besides its root.

    Parameters
    ----------
    url, step
        As for `open_catalogue`; `url` may name a file.
    like
        The job's root: its options serve for a store of the same kind.
    trust
        As for `ckptd.checkpoint.root.opening.trusting`.

    Raises
    ------
    CkptdError
        As of `open_catalogue`.
    """
    folder, file = split_file(url)
    same = scheme_of(folder) == scheme_of(like.url)
    spec = root_spec(folder, like.options if same else None)
    with trusting(spec, trust).open() as store:
        yield open_catalogue(store, url, file, step)


def foreign_format(catalogue: Catalogue) -> str:
    """Return the name of the reader of a foreign checkpoint; empty for a root of ckptd's own."""
    return catalogue.store.format if isinstance(catalogue.store, ForeignStore) else ""


def foreign_loss(catalogue: Catalogue) -> tuple[int, Sequence[str], str]:
    """Return what a reader found in a foreign checkpoint and does not convert.

    Returns
    -------
    tuple[int, Sequence[str], str]
        The number of values that are neither tensors nor plain, names of the first ones, and, in
        words, the tensors of kinds that are not read.
    """
    store = catalogue.store
    return (*store.left_out, store.unread) if isinstance(store, ForeignStore) else (0, (), "")


def nothing_counts(url: str) -> NotFoundError:
    """Return the error of a root without a checkpoint on its line."""
    hint = f"ckptd ls {url} --all shows abandoned lines"
    return NotFoundError("no checkpoint counts here", where=url, hint=hint)
