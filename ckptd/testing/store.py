"""`StoreContract`: the tests that every store passes.

In it: keys that must be refused or taken; sizes of objects, of the long listing, of races, which a
subclass may set.

A store's author subclasses it with one fixture::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def spec(self) -> StoreSpec:
            return StoreSpec("my://server/" + uuid.uuid4().hex)

The fixture describes a place that is new and empty; the tests open it, some of them several times
and from other processes. ``docs/guide/store-authors.md`` walks through an example.
"""

from __future__ import annotations

import itertools
import os
import string
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from ckptd.store.base import Store, StoreSpec
from ckptd.testing.racing import race_processes, race_threads
from ckptd.types import ByteRange

__all__ = ["BAD_KEYS", "GOOD_KEYS", "StoreContract", "pattern"]

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    "a b",
    "a\x00b",
    "a\nb",
    "a\n",
    "a~b",
    "a\\b",
    "a:b",
    "ä",
    "s" * 256,
    "/".join(["s" * 255] * 3),
]
"""Names that no store takes."""

GOOD_KEYS = [
    "x",
    string.ascii_letters + string.digits + "._=+@,%-",
    ".hidden",
    "..double",
    "...",
    "-rf",
    "%2e%2e/%2Fetc",
    "a%20b+c",
    "=@,/+,=",
    "s" * 255,
    "/".join(["s" * 63] * 8),
]
"""Names that every store takes, each on its own."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Return `size` bytes in which any misplaced block shows: no two 8-byte words are alike."""
    words = np.arange((size + 7) // 8, dtype=">u8") * 256 + seed
    return words.tobytes()[:size]


def _refuses_name(call: Callable[[str], object], name: str, number: int) -> None:
    __tracebackhide__ = True
    try:
        call(name)
    except UsageError as error:
        if error.kind == "bad-key":
            return
        pytest.fail(f"call {number} of {name!r} raised kind {error.kind}")
    pytest.fail(f"call {number} took {name!r}")


class StoreContract:
    """Every promise of `ckptd.store.base`, as tests. Subclasses give the fixture `spec`.

    Attributes
    ----------
    big_bytes
        Size of the object in the test of large writers; more than two parts of an upload.
    long_listing
        Number of objects in the test of a long listing; more than one page of S3.
    racers, race_rounds, race_processes
        Creators of one key at a time, how often, and over how many processes.
    """

    big_bytes: ClassVar[int] = (40 << 20) + 4099
    long_listing: ClassVar[int] = 1100
    racers: ClassVar[int] = 16
    race_rounds: ClassVar[int] = 5
    race_processes: ClassVar[int] = 4

    @pytest.fixture
    def spec(self) -> StoreSpec:
        """Describe a new, empty place. Subclasses override this."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, spec: StoreSpec) -> Iterator[Store]:
        """Open the store under test."""
        with spec.open() as store:
            yield store

    @pytest.fixture
    def creating(self, store: Store) -> Store:
        """Give a store that decides races; skip where it honestly says that it cannot."""
        if not store.capabilities.create_only:
            pytest.skip("capabilities.create_only is False")
        return store

    # -- what a store says of itself ------------------------------------------------------------

    def test_capabilities_are_plausible(self, store: Store) -> None:
        assert store.capabilities.parallel >= 1
        assert store.capabilities.block_bytes >= 4096

    def test_opens_again_from_its_description(self, store: Store) -> None:
        store.put("a/b", b"content")
        spec = StoreSpec.from_json(store.describe().to_json())
        assert spec == store.describe()
        with spec.open() as again:
            assert again.get("a/b") == b"content"
            assert again.capabilities == store.capabilities
            again.put("a/c", b"more")
        assert store.get("a/c") == b"more"

    def test_close_is_idempotent(self, spec: StoreSpec) -> None:
        store = spec.open()
        store.put("a", b"1")
        store.close()
        store.close()

    def test_nothing_is_made_by_opening(self, store: Store) -> None:
        assert [*store.list()] == []
        assert store.children() == []
        assert not store.exists("a")

    # -- put and get ----------------------------------------------------------------------------

    def test_get_gives_what_was_put(self, store: Store) -> None:
        store.put("folder/object", b"content")
        assert store.get("folder/object") == b"content"
        assert store.exists("folder/object")
        assert not store.exists("folder")
        assert not store.exists("folder/other")

    def test_put_replaces(self, store: Store) -> None:
        store.put("a/b", b"a long first content")
        store.put("a/b", b"second")
        assert store.get("a/b") == b"second"
        assert store.stat("a/b").size == 6

    def test_put_together(self, store: Store) -> None:
        store.put("a/new/m", b"an older content")
        objects = {"a/new/x.safetensors": pattern(5000), "a/new/empty": b"", "a/new/m": b"second"}
        for _ in range(2):
            store.put_together(objects)
            assert {o.key: store.get(o.key) for o in store.list()} == objects

    def test_empty_object(self, store: Store) -> None:
        store.put("a/empty", b"")
        assert store.get("a/empty") == b""
        assert store.get("a/empty", ByteRange(0, 0)) == b""
        assert store.stat("a/empty").size == 0
        assert [o.key for o in store.list()] == ["a/empty"]

    def test_every_legal_key(self, store: Store) -> None:
        for key in GOOD_KEYS:
            store.put(key, b"content")
            assert store.get(key) == b"content"
            assert [(o.key, o.size) for o in store.list()] == [(key, 7)]
            with store.writer(key, 3) as writer:
                writer.write(memoryview(b"new"))
                writer.commit()
            assert store.get(key) == b"new"
            store.delete([key])
            assert not store.exists(key)

    def test_no_illegal_key(self, store: Store) -> None:
        calls: list[Callable[[str], object]] = [
            store.get,
            lambda key: store.get(key, ByteRange(0, 1)),
            lambda key: store.read_into(key, 0, memoryview(bytearray(1))),
            lambda key: store.put(key, b"x"),
            lambda key: store.put(key, b"x", create_only=True),
            lambda key: store.writer(key, 1),
            store.stat,
            store.exists,
            store.local_path,
            store.open_file,
            lambda key: store.delete([key]),
        ]
        for key, (number, call) in itertools.product(BAD_KEYS, enumerate(calls)):
            _refuses_name(call, key, number)
        assert [*store.list()] == []

    def test_no_illegal_prefix(self, store: Store) -> None:
        calls: list[Callable[[str], object]] = [
            lambda prefix: [*store.list(prefix)],
            store.children,
            store.sync,
            store.sweep,
        ]
        prefixes = ["a", "/", "../", "a//", "/a/", "a/../", "a b/"]
        for prefix, (number, call) in itertools.product(prefixes, enumerate(calls)):
            _refuses_name(call, prefix, number)

    def test_missing_objects(self, store: Store) -> None:
        store.put("there/is", b"one")
        calls: list[Callable[[str], object]] = [
            store.get,
            lambda key: store.get(key, ByteRange(0, 1)),
            lambda key: store.get(key, ByteRange(0, 0)),
            lambda key: store.read_into(key, 0, memoryview(bytearray(1))),
            store.stat,
        ]
        for call, key in itertools.product(calls, ["there", "there/isnt", "not/even/a/folder"]):
            with pytest.raises(NotFoundError):
                call(key)

    # -- ranges ---------------------------------------------------------------------------------

    def test_ranges(self, store: Store) -> None:
        data = pattern(100)
        store.put("a", data)
        ranges = [(0, 0), (0, 1), (3, 7), (0, 100), (99, 100), (100, 100), (50, 50)]
        for start, end in ranges:
            assert store.get("a", ByteRange(start, end)) == data[start:end]
            buffer = bytearray(b"#" * (end - start + 2))
            store.read_into("a", start, memoryview(buffer)[1:-1])
            assert buffer == b"#" + data[start:end] + b"#"

    def test_ranges_past_the_end_are_errors(self, store: Store) -> None:
        store.put("a", pattern(100))
        for start, end in [(0, 101), (99, 101), (100, 101), (101, 101), (200, 300)]:
            buffer = memoryview(bytearray(end - start))
            with pytest.raises(CorruptError) as caught:
                store.get("a", ByteRange(start, end))
            assert caught.value.kind == "truncated"
            with pytest.raises(CorruptError) as caught:
                store.read_into("a", start, buffer)
            assert caught.value.kind == "truncated"

    def test_read_into_takes_any_contiguous_buffer(self, store: Store) -> None:
        data = pattern(96)
        store.put("a", data)
        buffer = bytearray(96)
        store.read_into("a", 0, memoryview(buffer).cast("I", (4, 6)))
        assert buffer == data

    def test_many_threads_read_at_once(self, store: Store) -> None:
        data = pattern(1 << 20)
        store.put("a/b", data)

        def read(i: int) -> bool:
            start = i * 7919 % len(data)
            end = min(len(data), start + 100_000)
            buffer = bytearray(end - start)
            store.read_into("a/b", start, memoryview(buffer))
            wanted = data[start:end]
            return buffer == wanted and store.get("a/b", ByteRange(start, end)) == wanted

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, range(64)))

    # -- create-only ----------------------------------------------------------------------------

    def test_create_only_has_one_winner(self, creating: Store) -> None:
        creating.put("a/b", b"first", create_only=True)
        for _ in range(2):
            with pytest.raises(ConflictError) as caught:
                creating.put("a/b", b"second", create_only=True)
            assert caught.value.kind == "exists"
        assert creating.get("a/b") == b"first"
        creating.delete(["a/b"])
        creating.put("a/b", b"third", create_only=True)
        assert creating.get("a/b") == b"third"

    def test_create_only_respects_other_writes(self, creating: Store) -> None:
        creating.put("put", b"old")
        with creating.writer("written", 3) as writer:
            writer.write(memoryview(b"old"))
            writer.commit()
        for key in ("put", "written"):
            with pytest.raises(ConflictError):
                creating.put(key, b"new", create_only=True)
            assert creating.get(key) == b"old"

    def test_a_store_that_cannot_decide_says_so(self, store: Store) -> None:
        if store.capabilities.create_only:
            pytest.skip("capabilities.create_only is True")
        store.put("a", b"first")
        with pytest.raises((RefusedError, ConflictError)) as caught:
            store.put("a", b"second", create_only=True)
        assert caught.value.kind in ("no-create-only", "exists")
        assert store.get("a") == b"first"

    def test_racing_threads_have_one_winner(self, creating: Store) -> None:
        for i in range(self.race_rounds):
            key = f"race/{i}"
            winners = race_threads(creating, key, [f"t{t}" for t in range(self.racers)])
            assert len(winners) == 1
            assert creating.get(key).decode() == winners[0]

    def test_racing_processes_have_one_winner(self, creating: Store, spec: StoreSpec) -> None:
        if not creating.capabilities.shared:
            pytest.skip("capabilities.shared is False")
        keys = [f"race/{i}" for i in range(self.race_rounds)]
        threads = self.racers // self.race_processes
        results = race_processes(spec, keys, self.race_processes, threads)
        for key, winners in zip(keys, results, strict=True):
            assert len(winners) == 1
            assert creating.get(key).decode() == winners[0]

    def test_readers_see_the_old_or_the_new(self, store: Store) -> None:
        versions = [bytes([c]) * 100_003 for c in b"ab"]
        store.put("a/b", versions[0])
        done = threading.Event()

        def replace() -> None:
            for i in range(20):
                store.put("a/b", versions[i % 2])

        def look() -> int:
            seen = 0
            while not done.is_set():
                assert store.get("a/b") in versions
                seen += 1
            return seen

        with ThreadPoolExecutor(3) as pool:
            looking = [pool.submit(look) for _ in range(2)]
            try:
                replace()
            finally:
                done.set()
            assert all(f.result() for f in looking)

    # -- writers --------------------------------------------------------------------------------

    def test_big_object_in_odd_pieces(self, store: Store) -> None:
        data = memoryview(pattern(self.big_bytes))
        sizes = itertools.cycle([1, 4095, 4096, 70_001, 1 << 20, 0, 5_000_003, 8 << 20])
        with store.writer("data/big", len(data)) as writer:
            start = 0
            while start < len(data):
                end = min(len(data), start + next(sizes))
                writer.write(data[start:end])
                start = end
            writer.commit()
        store.sync("data/")
        assert store.stat("data/big").size == len(data)
        buffer = bytearray(len(data))
        store.read_into("data/big", 0, memoryview(buffer))
        assert buffer == data

    def test_big_object_in_one_piece(self, store: Store) -> None:
        data = bytearray(pattern(self.big_bytes, seed=1))
        with store.writer("data/big", len(data)) as writer:
            writer.write(memoryview(data))
            writer.commit()
        assert store.get("data/big") == data

    def test_writers_side_by_side(self, store: Store) -> None:
        def write(seed: int) -> bool:
            data = pattern((1 << 20) + seed, seed)
            with store.writer(f"data/{seed}", len(data)) as writer:
                for start in range(0, len(data), 100_000):
                    writer.write(memoryview(data)[start : start + 100_000])
                writer.commit()
            return store.get(f"data/{seed}") == data

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(write, range(8)))

    def test_empty_writer(self, store: Store) -> None:
        with store.writer("data/empty", 0) as writer:
            writer.commit()
        assert store.get("data/empty") == b""

    def test_writer_replaces(self, store: Store) -> None:
        store.put("a/b", b"a longer content than the new one")
        with store.writer("a/b", 3) as writer:
            writer.write(memoryview(b"new"))
            writer.commit()
        assert store.get("a/b") == b"new"

    @pytest.mark.parametrize("size", [10, 20 << 20])
    def test_abort_leaves_nothing(self, store: Store, size: int) -> None:
        writer = store.writer("data/aborted", size)
        writer.write(memoryview(pattern(size - 1)))
        writer.abort()
        writer.abort()
        assert not store.exists("data/aborted")
        assert [*store.list()] == []

    def test_leaving_the_block_aborts(self, store: Store) -> None:
        with store.writer("data/left", 10) as writer:
            writer.write(memoryview(b"0123456789"))
        assert not store.exists("data/left")

        class Interruption(Exception):
            pass

        with pytest.raises(Interruption), store.writer("data/left", 10) as writer:
            writer.write(memoryview(b"0123456789"))
            raise Interruption
        assert not store.exists("data/left")

    def test_abort_after_commit_keeps_the_object(self, store: Store) -> None:
        with store.writer("a", 3) as writer:
            writer.write(memoryview(b"yes"))
            writer.commit()
            writer.abort()
        assert store.get("a") == b"yes"

    def test_writer_takes_exactly_its_size(self, store: Store) -> None:
        with store.writer("a", 3) as writer:
            writer.write(memoryview(b"12"))
            with pytest.raises(UsageError) as caught:
                writer.commit()
            assert caught.value.kind == "size"
        with store.writer("b", 3) as writer:
            with pytest.raises(UsageError) as caught:
                writer.write(memoryview(b"1234"))
            assert caught.value.kind == "size"
        assert [*store.list()] == []

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_a_done_writer_says_so(self, store: Store, end: str) -> None:
        writer = store.writer("a", 1)
        writer.write(memoryview(b"1"))
        getattr(writer, end)()
        calls: list[Callable[[], object]] = [lambda: writer.write(memoryview(b"")), writer.commit]
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.kind == "closed"

    # -- stat and list --------------------------------------------------------------------------

    def test_stat(self, store: Store) -> None:
        store.put("a/b", b"12345")
        info = store.stat("a/b")
        assert (info.key, info.size) == ("a/b", 5)
        assert info.modified >= 0
        store.put("a/b", b"54321")
        assert store.stat("a/b").tag != info.tag or not info.tag

    def test_list_is_in_key_order(self, store: Store) -> None:
        keys = [
            "a",
            "a-b",
            "a.b",
            "a0/x",
            "b/a",
            "b/a.c",
            "b/a=/d",
            "b/b/c/d",
            "b/b0",
            "c/B",
            "c/b",
        ]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert [o.key for o in store.list()] == sorted(keys)
        assert all(o.size == len(o.key) for o in store.list())
        assert [o.key for o in store.list("b/")] == [k for k in sorted(keys) if k[:2] == "b/"]
        assert [o.key for o in store.list("b/b/")] == ["b/b/c/d"]
        assert [*store.list("nowhere/")] == []
        assert [*store.list("a/")] == []

    def test_all_are_read_and_the_last_is_found(self, store: Store) -> None:
        assert store.last() is None
        assert [*store.read_all(most_bytes=9)] == []
        for i in (3, 70, 5, 41, *range(40)):
            store.put(f"a/{i:02}", bytes(i))
        store.put("b", b"")
        found = [(info.key, info.size, raw) for info, raw in store.read_all("a/", most_bytes=40)]
        sizes = [*range(40), 41, 70]
        assert found == [(f"a/{i:02}", i, bytes(i) if i <= 40 else None) for i in sizes]
        for prefix, key in (("", "b"), ("a/", "a/70")):
            last = store.last(prefix)
            assert last is not None
            assert last.key == key
        assert store.last("nowhere/") is None

    def test_children(self, store: Store) -> None:
        for key in ["z", "b/x", "b/y/z", "a.txt", "a/1"]:
            store.put(key, b"")
        assert store.children() == ["a.txt", "a/", "b/", "z"]
        assert store.children("b/") == ["x", "y/"]
        assert store.children("b/y/") == ["z"]
        assert store.children("nowhere/") == []
        assert store.children("z/") == []

    def test_a_listing_shows_every_put(self, store: Store, spec: StoreSpec) -> None:
        if not store.capabilities.consistent_list:
            pytest.skip("capabilities.consistent_list is False")
        with spec.open() as other:
            for i in range(20):
                store.put(f"a/{i:02}", b"")
                assert [o.key for o in other.list("a/")] == [f"a/{n:02}" for n in range(i + 1)]
                assert len(other.children("a/")) == i + 1

    def test_a_long_listing_is_whole(self, store: Store) -> None:
        keys = [f"many/{i:04}" for i in range(self.long_listing)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert [o.key for o in store.list()] == keys
        assert store.children("many/") == [k.removeprefix("many/") for k in keys]
        store.delete(keys)
        assert [*store.list()] == []

    # -- delete ---------------------------------------------------------------------------------

    def test_delete(self, store: Store) -> None:
        for key in ["a/b", "a/c", "d"]:
            store.put(key, b"content")
        store.delete(["a/b", "a/never-was", "no/such/folder/x"])
        store.delete(["a/b"])
        store.delete([])
        assert [o.key for o in store.list()] == ["a/c", "d"]

    def test_empty_folders_vanish(self, store: Store) -> None:
        store.put("a/b/c", b"")
        store.put("a/x", b"")
        store.delete(["a/b/c"])
        assert store.children("a/") == ["x"]
        store.delete(iter(["a/x"]))
        assert store.children() == []
        store.put("a/b/c", b"again")
        assert store.get("a/b/c") == b"again"

    def test_puts_and_deletes_in_one_folder(self, store: Store) -> None:
        def churn(name: int) -> None:
            for i in range(15):
                key = f"deep/folder/{name}-{i}"
                store.put(key, b"x")
                store.delete([key])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert [*store.list()] == []

    # -- the rest -------------------------------------------------------------------------------

    def test_sync_and_sweep_do_no_harm(self, store: Store) -> None:
        store.sync("")
        store.sync("nowhere/")
        store.put("a/b/c", b"content")
        for prefix in ("", "a/", "a/b/"):
            store.sync(prefix)
            assert store.sweep(prefix, older_than_s=0) == []
            assert store.sweep(prefix, older_than_s=0, deep=False) == []
        assert store.get("a/b/c") == b"content"

    def test_local_path(self, store: Store) -> None:
        store.put("a/b", b"content")
        path = store.local_path("a/b")
        if store.capabilities.local_files:
            assert path is not None
            assert path.read_bytes() == b"content"
        else:
            assert path is None

    def test_open_file(self, store: Store) -> None:
        with store.writer("a/b", 100_003) as writer:
            writer.write(memoryview(pattern(100_003)))
            writer.commit()
        opened = store.open_file("a/b")
        if opened is None:
            assert not store.capabilities.local_files
            return
        try:
            store.delete(["a/b"])
            assert (
                os.pread(opened.fd, 70_000, 30_001 + opened.shift)
                == pattern(100_003)[30_001:][:70_000]
            )
        finally:
            os.close(opened.fd)
        for key in ["a/b", "a", "never/was"]:
            with pytest.raises(NotFoundError):
                store.open_file(key)

    def test_errors_travel_between_processes(self, store: Store) -> None:
        with pytest.raises(NotFoundError) as caught:
            store.get("not/here")
        again = CkptdError.from_dict(caught.value.to_dict())
        assert type(again) is NotFoundError
        assert again.where is not None
        assert "not/here" in again.where
