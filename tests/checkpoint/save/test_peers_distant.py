"""Another node's store: connected to when something is wanted that it holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.checkpoint.load.union import UnionSource, UnionStore
from ckptd.checkpoint.save.peers import Distant
from ckptd.errors import NotFoundError, UsageError
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory


@pytest.fixture
def inner() -> Iterator[MemoryStore]:
    store = MemoryStore("distant")
    store.put("data/a", b"abc")
    store.put("data/b", b"def")
    yield store
    forget_memory("distant")


def test_it_is_opened_once_and_late(inner: MemoryStore) -> None:
    opened: list[Store] = []

    def connect() -> Store:
        opened.append(inner)
        return inner

    distant = Distant("ckptd://there:1", connect)
    assert opened == []
    buffer = bytearray(2)
    distant.read_into("data/a", 1, memoryview(buffer))
    assert (distant.get("data/a"), bytes(buffer), distant.stat("data/a").size) == (b"abc", b"bc", 3)
    assert distant.open_file("data/a") is None
    assert distant.local_path("data/a") is None
    assert [i.key for i in distant.list("data/")] == ["data/a", "data/b"]
    assert distant.children("data/") == ["a", "b"]
    assert len(opened) == 1
    distant.close()
    distant.close()


def test_nobody_is_asked_for_what_is_not_there(inner: MemoryStore) -> None:
    def refuse() -> Store:
        raise AssertionError("asked")

    near = [
        UnionSource(Distant("ckptd://a:1", refuse), "peer", keys=frozenset(["data/c"])),
        UnionSource(Distant("ckptd://b:1", lambda: inner), "peer", keys=frozenset(["data/a"])),
    ]
    union = UnionStore(near)
    assert union.get("data/a") == b"abc"
    for key in ("data/b", "data/d"):
        with pytest.raises(NotFoundError):
            union.get(key)


def test_it_is_only_read(inner: MemoryStore) -> None:
    distant = Distant("ckptd://there:1", lambda: inner)
    for act in (
        lambda: distant.put("data/a", b""),
        lambda: distant.writer("data/a", 1),
        lambda: distant.delete(["data/a"]),
        lambda: distant.sync("data/"),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        assert "this view of a store is read-only" in caught.value.message
    assert inner.get("data/a") == b"abc"
