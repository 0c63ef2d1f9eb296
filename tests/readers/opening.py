"""Opening foreign checkpoints in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import CkptdError
from ckptd.load.reader import CkptdReader
from ckptd.readers.find import find_foreign
from ckptd.root.index import Index
from ckptd.store import open_store


def open_reader(folder: Path, only: str = "") -> CkptdReader:
    root = find_foreign(open_store(folder), only)
    assert root is not None
    index = Index(root)
    index.open()
    latest = index.latest()
    assert latest is not None
    return CkptdReader(index, latest)


def fails(folder: Path) -> CkptdError:
    """Read everything, which must fail."""
    with pytest.raises(CkptdError) as caught:
        reader = open_reader(folder)
        reader.tensors(reader.names)
    return caught.value
