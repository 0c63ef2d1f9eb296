"""The store over a connection keeps the contract, and what is peculiar to it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer, new_secret
from ckptd.store.spec import StoreSpec
from ckptd.testing.store import StoreContract


class TestTcpToMemory(StoreContract):
    @pytest.fixture
    def spec(self) -> Iterator[StoreSpec]:
        store = MemoryStore(uuid.uuid4().hex)
        with StoreServer(store, secret=new_secret()) as server:
            yield server.describe()
