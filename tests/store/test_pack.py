from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import ConflictError, CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.store import FaultRule, FaultSpec, MeterSpec, PackSpec, RetrySpec, Store, StoreSpec
from ckptd.store.base import Writer
from ckptd.store.pack import Pack
from ckptd.store.wrap import Meter
from ckptd.testing.store import StoreContract, pattern
from ckptd.types import ByteRange
from tests.processes import PATIENCE_S
from tests.servers import MOTO, s3_url

EVERYTHING = PackSpec(suffix="")
KEY = "data/a/r00000.safetensors"
MIB = 1 << 20


class TestPackedMemory(StoreContract):
    @pytest.fixture
    def spec(self) -> StoreSpec:
        return StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(EVERYTHING)


class TestPackedLocal(StoreContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(str(tmp_path / "root")).wrapped(EVERYTHING, RetrySpec())


@pytest.mark.parametrize("server", [MOTO], indirect=True)
class TestPackedS3(StoreContract):
    long_listing: ClassVar[int] = 60
    race_processes: ClassVar[int] = 2

    @pytest.fixture
    def server(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        options: dict[str, Any] = request.getfixturevalue(request.param)
        return options

    @pytest.fixture
    def spec(self, server: dict[str, Any]) -> StoreSpec:
        plain = StoreSpec(s3_url(), {**server, "part_bytes": 5 << 20})
        return plain.wrapped(EVERYTHING, RetrySpec())


def memory(*wrappers: Any) -> StoreSpec:
    return StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(*wrappers)


def weights(count: int, dtype: str = "<f4") -> bytes:
    values = np.random.default_rng(0).normal(0, 0.02, count).astype(dtype)
    return values.tobytes()


def safetensors(data: bytes, header: int = 4096) -> bytes:
    """Bytes as of a data file: a header of `header` bytes with its length, then `data`."""
    return (header - 8).to_bytes(8, "little") + b" " * (header - 8) + data


def write(store: Store, key: str, data: bytes, step: int = 300_007) -> None:
    with store.writer(key, len(data)) as writer:
        for start in range(0, len(data), step):
            writer.write(memoryview(data)[start : start + step])
        writer.commit()


@pytest.fixture
def store() -> Iterator[Store]:
    with memory(PackSpec()).open() as store:
        yield store


def test_weights_take_less_room(store: Store) -> None:
    data = safetensors(weights(MIB))
    write(store, KEY, data)
    assert isinstance(store, Pack)
    assert [o.key for o in store.inner.list()] == [KEY + ".zp"]
    assert store.inner.stat(KEY + ".zp").size < 0.9 * len(data)
    assert store.get(KEY) == data
    assert store.stat(KEY).size == len(data)
    assert [(o.key, o.size) for o in store.list()] == [(KEY, len(data))]
    assert store.children("data/a/") == ["r00000.safetensors"]


def test_what_does_not_shrink_costs_next_to_nothing(store: Store) -> None:
    data = np.random.default_rng(1).bytes(3 * MIB + 5)
    write(store, KEY, data)
    assert isinstance(store, Pack)
    assert store.inner.stat(KEY + ".zp").size < len(data) + 200
    assert store.get(KEY) == data


def test_other_names_pass_through(store: Store) -> None:
    write(store, "data/a/r00000.digests", b"x" * 5000)
    store.put(KEY, b"small")
    assert isinstance(store, Pack)
    assert store.inner.get("data/a/r00000.digests") == b"x" * 5000
    assert store.inner.get(KEY) == b"small"


def test_a_block_of_the_digests_is_one_frame() -> None:
    with memory(MeterSpec(), PackSpec()).open() as store:
        write(store, KEY, safetensors(weights(MIB)))
        assert isinstance(store, Pack)
        meter = store.inner
        assert isinstance(meter, Meter)
        store.stat(KEY)
        before = meter.snapshot()["get"]
        store.read_into(KEY, 4096 + 2 * MIB, memoryview(bytearray(MIB)))
        after = meter.snapshot()["get"]
        assert after.calls - before.calls == 1
        assert after.moved_bytes - before.moved_bytes < MIB


def test_a_plain_root_pays_nothing() -> None:
    """Reading, listing and asking cost the same requests with the wrapper and without."""
    found = []
    for wrappers in [(), (PackSpec(level=None),)]:
        with memory(MeterSpec(), *wrappers).open() as store:
            meter = store.inner if isinstance(store, Pack) else store
            assert isinstance(meter, Meter)
            write(store, KEY, b"12345")
            store.get(KEY)
            store.get(KEY, ByteRange(1, 2))
            store.read_into(KEY, 0, memoryview(bytearray(5)))
            store.stat(KEY)
            store.exists(KEY)
            list(store.list())
            store.children()
            found.append({op: m.calls for op, m in meter.snapshot().items()})
    assert found[0] == found[1]


def test_a_table_is_read_once() -> None:
    with memory(MeterSpec(), PackSpec()).open() as store:
        write(store, KEY, weights(1000))
        assert isinstance(store, Pack)
        meter = store.inner
        assert isinstance(meter, Meter)
        for _ in range(5):
            assert [o.size for o in store.list()] == [4000]
        assert meter.snapshot()["get"].calls == 1


def test_either_form_takes_the_place_of_the_other() -> None:
    spec = memory()
    with spec.wrapped(PackSpec()).open() as packing, spec.wrapped(PackSpec(None)).open() as plain:
        for number, store in enumerate([packing, plain, packing, packing, plain, plain]):
            data = weights(1000 + number)
            write(store, KEY, data)
            with spec.wrapped(PackSpec(None)).open() as fresh:
                assert fresh.get(KEY) == data
                assert [(o.key, o.size) for o in fresh.list()] == [(KEY, len(data))]
        plain.delete([KEY])
        with spec.open() as bare:
            assert [*bare.list()] == []


def test_an_object_that_another_process_replaced_is_noticed() -> None:
    spec = memory(PackSpec())
    with spec.open() as one, spec.open() as other:
        write(one, KEY, weights(MIB))
        assert one.get(KEY, ByteRange(0, 4)) == weights(1)
        data = b"\1" * (2 * MIB + 9)
        write(other, KEY, data)
        assert one.get(KEY) == data
        other.delete([KEY])
        with pytest.raises(NotFoundError):
            one.get(KEY)
        other.put(KEY, b"plain")
        assert one.get(KEY) == b"plain"


def test_create_only_respects_what_is_packed(store: Store) -> None:
    write(store, KEY, weights(10))
    with pytest.raises(ConflictError):
        store.put(KEY, b"new", create_only=True)
    assert store.get(KEY) == weights(10)


def test_names_of_packed_objects_are_taken(store: Store) -> None:
    for call in (lambda: store.put(KEY + ".zp", b""), lambda: store.writer(KEY + ".zp", 1)):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.kind == "bad-key"


@pytest.mark.parametrize("level", [0, 23, -1, True])
def test_levels_are_those_of_zstd(level: int) -> None:
    with pytest.raises(UsageError) as caught:
        memory(PackSpec(level)).open()
    assert "invalid level of zstd" in caught.value.message


def test_what_is_packed_is_no_local_file(tmp_path: Path) -> None:
    with StoreSpec(str(tmp_path)).wrapped(PackSpec()).open() as store:
        write(store, KEY, weights(10))
        assert not store.capabilities.local_files
        assert store.local_path(KEY) is None
    with StoreSpec(str(tmp_path)).wrapped(PackSpec(level=None)).open() as store:
        store.put("data/a/b.safetensors", b"plain")
        assert store.capabilities.local_files
        assert store.local_path(KEY) is None
        assert store.open_file(KEY) is None
        path = store.local_path("data/a/b.safetensors")
        assert path is not None
        assert path.read_bytes() == b"plain"
        assert store.local_path("data/a/nowhere.safetensors") is not None


def test_a_closed_store_says_so(store: Store) -> None:
    writer = store.writer(KEY, 4)
    store.close()
    writer.write(memoryview(b"123"))
    with pytest.raises(UsageError):
        writer.write(memoryview(b"4567")[:1]), writer.commit()
    writer.abort()
    with pytest.raises(UsageError) as caught:
        store.writer(KEY, 4)
    assert caught.value.kind == "closed"


@pytest.mark.parametrize("act", ["commit", "abort"])
def test_a_store_that_is_closed_in_mid_write_ends_it(store: Store, act: str) -> None:
    writer = store.writer(KEY, 64 * MIB)
    writer.write(memoryview(weights(MIB)))
    store.close()
    if act == "commit":
        with pytest.raises(UsageError):
            writer.write(memoryview(bytes(60 * MIB)))
    writer.abort()
    assert [*store.list()] == []


@settings(deadline=None)
@given(data=st.data())
def test_any_writes_and_ranges_give_what_a_plain_store_gives(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(0, 100), st.integers(0, 5 * MIB)))
    lead = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2 * MIB)))
    width = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    period = data.draw(st.integers(1, 5000))
    body = (np.arange(size, dtype=np.uint64) // width * 2654435761 % period).astype(np.uint8)
    raw = (lead.to_bytes(8, "little") + body.tobytes())[:size]
    pieces = data.draw(st.lists(st.integers(1, 2 * MIB), max_size=6))
    with memory(PackSpec()).open() as store:
        with store.writer(KEY, size) as writer:
            at = 0
            for piece in [*pieces, size]:
                writer.write(memoryview(raw)[at : at + piece])
                at = min(size, at + piece)
            writer.commit()
        assert store.get(KEY) == raw
        for _ in range(4):
            start = data.draw(st.integers(0, size))
            end = data.draw(st.integers(start, size))
            assert store.get(KEY, ByteRange(start, end)) == raw[start:end]
        with pytest.raises(CorruptError) as caught:
            store.get(KEY, ByteRange(size, size + 1))
        assert caught.value.kind == "truncated"


def test_a_writer_that_fails_is_repeated_whole() -> None:
    rules = tuple(FaultRule("error", op=op) for op in ("writer", "write", "commit"))
    data = weights(MIB)
    with memory(FaultSpec(rules), PackSpec(), RetrySpec(first_s=0.01)).open() as store:
        write(store, KEY, data)
        assert store.get(KEY) == data


def test_a_write_that_fails_leaves_nothing() -> None:
    rules = (FaultRule("error", op="write", skip=2, times=0),)
    with memory(FaultSpec(rules), PackSpec()).open() as store:
        with pytest.raises(TransientStoreError):
            write(store, KEY, np.random.default_rng(0).bytes(40 * MIB), 8 * MIB)
        assert [*store.list()] == []


@pytest.mark.parametrize("size", [5, 3 * MIB])
def test_memory_is_bounded(size: int) -> None:
    """No more frames are under way than threads need, however fast the caller is."""
    held: list[int] = []
    writers: list[Any] = []

    class Slow(Writer):
        def write(self, data: memoryview) -> None:
            held.append(len(writers[0]._flying) if writers else 0)

        def cut(self) -> None: ...
        def commit(self) -> None: ...
        def abort(self) -> None: ...

    with memory(PackSpec()).open() as store:
        assert isinstance(store, Pack)
        store.inner.writer = lambda key, size: Slow()  # type: ignore[method-assign]
        writers.append(store.writer(KEY, 32 * size))
        [writer] = writers
        for _ in range(32):
            writer.write(memoryview(bytes(size)))
        writer.commit()
        assert max(held[1:]) < 2 * store._threads


_KILLED = """
import os, signal, sys
from ckptd.store import PackSpec, StoreSpec
store = StoreSpec(sys.argv[1]).wrapped(PackSpec()).open()
writer = store.writer("data/a/r00000.safetensors", 64 << 20)
writer.write(memoryview(bytes(40 << 20)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_what_can_be_deleted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path], timeout=PATIENCE_S, check=False
    )
    assert done.returncode == -9
    with StoreSpec(str(tmp_path)).wrapped(PackSpec()).open() as store:
        with pytest.raises(CorruptError) as caught:
            store.get(KEY)
        assert "a packed object" in caught.value.message
        assert [o.key for o in store.list()] == [KEY]
        store.delete([KEY])
        assert [*tmp_path.iterdir()] == []


# -- Writer.cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrappers", [(), (FaultSpec(), MeterSpec(), RetrySpec())])
@pytest.mark.parametrize("size", [0, 1, 4096, 9 * MIB + 1])
def test_an_object_may_end_early(tmp_path: Path, wrappers: Any, size: int) -> None:
    for url in (str(tmp_path), f"memory://{uuid.uuid4().hex}"):
        with StoreSpec(url).wrapped(*wrappers).open() as store, store.writer("a", 20 * MIB) as w:
            w.write(memoryview(pattern(size)))
            w.cut()
            w.commit()
            assert store.get("a") == pattern(size)


@pytest.mark.parametrize("server", [MOTO])
@pytest.mark.parametrize("size", [1, 6 * MIB])
def test_an_upload_may_end_early(request: pytest.FixtureRequest, server: str, size: int) -> None:
    options = {**request.getfixturevalue(server), "part_bytes": 5 << 20}
    with StoreSpec(s3_url(), options).open() as store, store.writer("a", 20 * MIB) as w:
        w.write(memoryview(pattern(size)))
        w.cut()
        w.commit()
        assert store.get("a") == pattern(size)


def test_a_cut_is_repeated_with_the_writer() -> None:
    rules = (FaultRule("error", op="commit"),)
    with memory(FaultSpec(rules), RetrySpec(first_s=0.01)).open() as store:
        with store.writer("a", 100) as writer:
            writer.write(memoryview(b"123"))
            writer.cut()
            writer.commit()
        assert store.get("a") == b"123"
