"""A store and a root in it, in memory and in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store.base import Store
from ckptd.store.local import LocalStore
from tests.checkpoint.root.checkpoints import memory


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = memory() if request.param == "memory" else LocalStore(str(tmp_path / "root"))
    with made:
        yield made


@pytest.fixture
def catalogue(store: Store) -> Catalogue:
    made = Catalogue(store)
    made.create_or_open()
    return made
