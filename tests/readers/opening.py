"""Opening foreign checkpoints in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import CkptdError, NotFoundError
from ckptd.load.reader import CkptdReader
from ckptd.readers.find import find_foreign
from ckptd.reshard.source import Stock, open_own
from ckptd.root.index import Index
from ckptd.store import Store, open_store


def open_reader(folder: Path, only: str = "") -> CkptdReader:
    return reader_in(open_store(folder), only)


def reader_in(store: Store, only: str = "", step: int = 0) -> CkptdReader:
    root = find_foreign(store, only, step)
    if root is None:
        raise NotFoundError("nothing is recognised here")
    index = Index(root)
    index.open()
    latest = index.latest()
    assert latest == root.name
    return CkptdReader(index, latest)


def foreign_stock(store: Store, step: int = 0) -> Stock:
    return open_own(reader_in(store, step=step))


def fails(folder: Path) -> CkptdError:
    """Read everything, which must fail."""
    with pytest.raises(CkptdError) as caught:
        reader = open_reader(folder)
        reader.tensors(reader.names)
    return caught.value
