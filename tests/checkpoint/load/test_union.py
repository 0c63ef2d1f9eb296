"""Stores read as one: the nearest that has a key, what is passed over, and what it costs."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.load.union import UnionSource, UnionStore
from ckptd.errors import (
    CkptdError,
    CorruptError,
    NotFoundError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.store.base import FaultSpec, ObjectInfo, OpenFile, Store, Wrapper
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.types import ByteRange
from tests.processes import PATIENCE_S

_numbers = itertools.count()


class Node(Wrapper):
    """A store that can be gone, and counts how often somebody came."""

    def __init__(self, inner: Store, error: type[CkptdError] | None = None) -> None:
        super().__init__(inner, FaultSpec())
        self.error = error
        self.calls = 0

    def _come(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error("the node is gone", where=self.url)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._come()
        return self.inner.get(key, byte_range)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._come()
        self.inner.read_into(key, offset, buffer)

    def stat(self, key: str) -> ObjectInfo:
        self._come()
        return self.inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._come()
        return self.inner.list(prefix)

    def children(self, prefix: str = "") -> list[str]:
        self._come()
        return self.inner.children(prefix)

    def open_file(self, key: str) -> OpenFile | None:
        self._come()
        return self.inner.open_file(key)


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    names: list[str] = []

    def node(error: type[CkptdError] | None = None, **objects: bytes) -> Node:
        names.append(f"union{next(_numbers)}")
        store = MemoryStore(names[-1])
        for key, data in objects.items():
            store.put(key, data)
        return Node(store, error)

    yield node
    for name in names:
        forget_memory(name)


Make = Callable[..., Node]


def test_the_nearest_that_has_it(make: Make) -> None:
    near, far = make(a=b"near"), make(a=b"far", b=b"far b")
    union = UnionStore([UnionSource(near, "memory"), UnionSource(far, "remote")])
    assert union.get("a") == b"near"
    assert union.get("b") == b"far b"
    assert union.get("b", ByteRange(1, 3)) == b"ar"
    assert union.stat("b").size == 5
    assert [i.key for i in union.list()] == ["a", "b"]
    assert [i.size for i in union.list()] == [4, 5]
    assert union.children() == ["a", "b"]
    assert union.exists("a")
    assert not union.exists("c")
    assert union.read_bytes() == {"memory": 4, "remote": 7}
    view = memoryview(bytearray(3))
    union.read_into("a", 1, view)
    assert bytes(view) == b"ear"
    assert union.read_bytes() == {"memory": 7, "remote": 7}
    with pytest.raises(NotFoundError) as caught:
        union.get("c")
    assert caught.value.key == "c"


@pytest.mark.parametrize("error", [StoreError, TransientStoreError])
def test_a_node_that_is_gone_is_asked_once(make: Make, error: type[CkptdError]) -> None:
    objects = {f"k{i}": b"value" for i in range(50)}
    gone, far = make(error, **objects), make(**objects)
    union = UnionStore([gone, far])
    for key in objects:
        assert union.get(key) == b"value"
        assert union.stat(key).size == 5
        assert union.open_file(key) is None
    assert [*union.list()] == [*far.list()]
    assert union.children() == [*objects] or union.children() == sorted(objects)
    assert gone.calls == 1


def test_a_node_that_came_back_is_asked_again(make: Make) -> None:
    near, far = make(TransientStoreError, a=b"near"), make(a=b"far", b=b"far")
    union = UnionStore([near, far], aside_s=0.0)
    assert union.get("a") == b"far"
    near.error = None
    assert union.get("b") == b"far"
    assert union.get("a") == b"far"  # what served a key goes on with it
    near.inner.put("c", b"near")
    assert union.get("c") == b"near"


def test_what_is_raised_when_nobody_has_it(make: Make) -> None:
    gone = make(TransientStoreError)
    with pytest.raises(NotFoundError) as missing:
        UnionStore([gone, make()]).get("a")
    assert any("the node is gone" in note for note in missing.value.__notes__)
    union = UnionStore([make(), gone])
    for _ in range(3):  # the farthest is the one that ought to have it
        with pytest.raises(TransientStoreError, match="the node is gone"):
            union.get("a")
    assert gone.calls == 2
    with pytest.raises(TransientStoreError):
        UnionStore([make(TransientStoreError), make(TransientStoreError)]).children()


def test_what_is_known_to_be_empty_is_not_asked(make: Make) -> None:
    dead, full = make(TransientStoreError), make(a=b"1")
    known = UnionSource(dead, "peer", "dead", frozenset())
    union = UnionStore([known, UnionSource(full, "memory", "full", frozenset({"a"}))])
    assert [info.key for info in union.list()] == union.children() == ["a"]
    assert union.get("a") == b"1"
    with pytest.raises(NotFoundError):
        union.get("b")
    assert dead.calls == 0
    assert [*UnionStore([known, known]).list()] == []


def test_a_single_source_is_passed_through(make: Make) -> None:
    only = make(TransientStoreError, a=b"1")
    union = UnionStore([only])
    for _ in range(3):
        with pytest.raises(TransientStoreError):
            union.get("a")
    assert only.calls == 3
    only.error = None
    assert union.get("a") == b"1"
    assert union.url == only.url
    assert union.capabilities.parallel == only.capabilities.parallel


def test_a_short_object_is_passed_over(make: Make) -> None:
    union = UnionStore([make(a=b"123"), make(a=b"123456")])
    view = memoryview(bytearray(6))
    union.read_into("a", 0, view)
    assert bytes(view) == b"123456"
    union = UnionStore([make(a=b"123"), make()])
    with pytest.raises(CorruptError) as caught:
        union.read_into("a", 0, view)
    assert (caught.value.kind, caught.value.key) == ("truncated", "a")


def test_distrust(make: Make) -> None:
    gone = make(TransientStoreError)
    union = UnionStore([make(a=b"1", z=b"1"), gone, make(a=b"2"), make(a=b"3")])
    assert not union.distrust("a")  # nobody read it yet
    assert union.get("a") == b"1"
    assert union.distrust("a")
    assert union.get("a") == b"2"
    assert union.stat("a").size == 1
    assert union.distrust("a")
    assert union.get("a") == b"3"
    assert not union.distrust("a")
    assert union.get("a") == b"3"
    assert union.get("z") == b"1"
    assert not union.distrust("z")
    assert union.get("z") == b"1"
    assert gone.calls == 1


def test_threads_that_met_one_wrong_copy_distrust_it_once(make: Make) -> None:
    """Else the second takes the good copy, which it has not read, for wrong as well."""
    union = UnionStore([make(a=b"1"), make(a=b"2")])
    assert union.get("a") == b"1"
    served = union.serving("a")
    assert union.distrust("a", served)
    assert union.distrust("a", served)
    assert union.get("a") == b"2"
    assert not union.distrust("a", union.serving("a"))


def test_what_is_known_to_be_elsewhere_is_also_asked_of_stores_with_unknown_keys(
    make: Make,
) -> None:
    """A node that named its keys, and has lost one of them, hides no copy at the root."""
    near, root = make(), make(a=b"root")
    union = UnionStore([UnionSource(near, "peer", keys=frozenset("a")), root])
    assert union.get("a") == b"root"


def test_a_source_that_was_wrong_twice_comes_last(make: Make) -> None:
    objects = {f"k{i}": b"1" for i in range(9)}
    union = UnionStore([make(**objects), make(**dict.fromkeys(objects, b"2"))])
    assert {union.get(k) for k in objects} == {b"1"}
    assert union.distrust("k0")
    assert union.get("k5") == b"1"
    assert union.distrust("k1")
    assert union.distrust("k2")  # read before, from the same
    assert {union.get(k) for k in objects} == {b"2"}


def test_descriptors(tmp_path: Path, make: Make) -> None:
    local = LocalStore(tmp_path)
    local.put("data/a", b"local")
    union = UnionStore([make(b=b"memory"), local])
    opened = union.open_file("data/a")
    assert opened is not None
    assert os.pread(opened.fd, 5, opened.shift) == b"local"
    os.close(opened.fd)
    assert union.local_path("data/a") == tmp_path / "data/a"
    union.count("data/a", 5)
    assert union.open_file("b") is None
    assert union.local_path("b") is None
    with pytest.raises(NotFoundError):
        union.open_file("c")
    assert union.read_bytes() == {"local": 5}
    assert not union.capabilities.local_files
    assert UnionStore([local]).capabilities.local_files


def test_only_for_reading(make: Make) -> None:
    union = UnionStore([make()])
    for act in (
        lambda: union.put("a", b""),
        lambda: union.writer("a", 1),
        lambda: union.delete(["a"]),
        lambda: union.sync(""),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        assert "this view of a store is read-only" in caught.value.message
    with pytest.raises(UsageError):
        UnionStore([])
    with pytest.raises(UsageError):
        union.get("../a")


def test_from_many_threads(make: Make) -> None:
    """While a node goes in the middle every read is right."""
    objects = {f"k{i}": f"v{i}".encode() for i in range(200)}
    near, far = make(**objects), make(**objects)
    union = UnionStore([near, far])
    wrong: list[str] = []
    started = threading.Barrier(5)

    def work() -> None:
        started.wait(PATIENCE_S)
        wrong.extend(k for k, v in objects.items() if union.get(k) != v)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    started.wait(PATIENCE_S)
    near.error = TransientStoreError
    for t in threads:
        t.join(PATIENCE_S)
    assert wrong == []
    assert union.get("k0") == b"v0"
    assert sum(union.read_bytes().values()) == 4 * sum(map(len, objects.values())) + 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["fine", "gone", "transient"]),
            st.dictionaries(st.sampled_from("abcd"), st.binary(min_size=1, max_size=3)),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.sampled_from(["get", "distrust"]), st.sampled_from("abcd")), max_size=20),
)
def test_reads_are_what_some_trusted_source_has(
    sources: list[tuple[str, dict[str, bytes]]], steps: list[tuple[str, str]]
) -> None:
    kinds = {"fine": None, "gone": StoreError, "transient": TransientStoreError}
    stores = []
    for state, objects in sources:
        name = f"union{next(_numbers)}"
        store = MemoryStore(name)
        for key, data in objects.items():
            store.put(key, data)
        stores.append(Node(store, kinds[state]))
        forget_memory(name)
    union = UnionStore(stores)
    left = {
        key: [objects[key] for state, objects in sources if state == "fine" and key in objects]
        for key in "abcd"
    }
    last: dict[str, bytes] = {}
    for step, key in steps:
        if step == "get":
            if left[key]:
                last[key] = union.get(key)
                assert last[key] in left[key]
            else:
                with pytest.raises((NotFoundError, StoreError)):
                    union.get(key)
        elif key in last:
            more = len(left[key]) > 1
            assert union.distrust(key) == more
            if more:
                left[key].remove(last[key])
                last[key] = union.get(key)
                assert last[key] in left[key]
        else:
            assert not union.distrust(key)
