"""The store over a connection keeps the contract, and what is its own."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptd.errors import (
    NotFoundError,
    RefusedError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.store.base import ObjectInfo, OpenFile, StoreSpec, Writer, open_store
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.net import Limits, NetOptions, NetStore, StoreServer, new_secret
from ckptd.testing.store import StoreContract, pattern
from ckptd.types import ByteRange
from tests.store.netserver import server_process


def patient(spec: StoreSpec) -> StoreSpec:
    """The same store, for a machine that is busy with other tests."""
    return StoreSpec(spec.url, spec.options | {"retry_s": 60.0, "connect_s": 60.0})


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket's name."""
    with tempfile.TemporaryDirectory(prefix="ckptd-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


class TestTcpToMemory(StoreContract):
    @pytest.fixture
    def spec(self, memory: MemoryStore) -> Iterator[StoreSpec]:
        with StoreServer(memory, secret=new_secret()) as server:
            yield patient(server.describe())


class _ToLocal(StoreContract):
    """The server in a process of its own, which serves all tests of a class one after another."""

    url = ""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
        root = StoreSpec(str(tmp_path_factory.mktemp("root")))
        with tempfile.TemporaryDirectory(prefix="ckptd-", dir="/tmp") as folder:
            with server_process(root, cls.url.format(folder=folder)) as server:
                yield patient(server.spec)

    @pytest.fixture
    def spec(self, served: StoreSpec) -> Iterator[StoreSpec]:
        yield served
        with served.open() as store:
            store.delete([o.key for o in store.list()])


class TestUnixToLocal(_ToLocal):
    url = "ckptd+unix://{folder}/sock"


@pytest.mark.long
class TestTcpToLocal(_ToLocal):
    url = "ckptd://127.0.0.1:0"


# --- descriptors ----------------------------------------------------------------------------------


def test_a_descriptor_over_a_unix_socket_is_the_file_itself(tmp_path: Path, short: Path) -> None:
    with LocalStore(tmp_path) as local:
        local.put("a/b", pattern(10_000))
        with (
            StoreServer(local, f"ckptd+unix://{short}/sock") as server,
            patient(server.describe()).open() as store,
        ):
            opened = store.open_file("a/b")
            assert opened is not None
            try:
                assert not os.get_inheritable(opened.fd)
                assert os.fstat(opened.fd).st_ino == (tmp_path / "a/b").stat().st_ino
                with mmap.mmap(opened.fd, 0, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == pattern(10_000)
                with pytest.raises(OSError):
                    os.write(opened.fd, b"x")
            finally:
                os.close(opened.fd)
            for _ in range(3):  # the connection is fit for use after an error
                with pytest.raises(NotFoundError):
                    store.open_file("a/c")
            assert store.get("a/b", ByteRange(0, 4)) == pattern(4)


def test_no_descriptor_over_tcp_and_from_memory(
    tmp_path: Path, short: Path, memory: MemoryStore
) -> None:
    with LocalStore(tmp_path) as local:
        local.put("a", b"1")
        with (
            StoreServer(local, secret=new_secret()) as server,
            patient(server.describe()).open() as store,
        ):
            assert store.open_file("a") is None
            assert store.local_path("a") is None
    memory.put("a", b"1")
    with (
        StoreServer(memory, f"ckptd+unix://{short}/sock") as server,
        patient(server.describe()).open() as store,
    ):
        assert store.open_file("a") is None
        assert store.get("a") == b"1"


class _Shifted(MemoryStore):
    """Keeps objects one after another in one file, the first bytes of the first elsewhere."""

    header = 100

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path
        self.opened = 0

    def open_file(self, key: str) -> OpenFile | None:
        self.stat(key)
        self.opened += 1
        shift = int(key) * self.stat(key).size - self.header
        return OpenFile(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), shift)


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_objects_that_share_a_file_with_others(tmp_path: Path, short: Path, way: str) -> None:
    path = tmp_path / "segment"
    store = _Shifted(uuid.uuid4().hex, path)
    objects = [pattern(_Shifted.header + (3 << 20), seed) for seed in range(3)]
    path.write_bytes(b"".join(objects)[_Shifted.header :])
    for i, data in enumerate(objects):
        store.put(str(i), data)
    url = f"ckptd+unix://{short}/sock" if way == "unix" else "ckptd://127.0.0.1:0"
    with (
        StoreServer(store, url, secret=new_secret()) as server,
        patient(server.describe()).open() as client,
    ):
        for i, data in enumerate(objects):
            for start, end in [(0, len(data)), (100, len(data)), (99, 2 << 20), (4099, 3 << 20)]:
                buffer = bytearray(end - start)
                client.read_into(str(i), start, memoryview(buffer))
                assert buffer == data[start:end]
        with pytest.raises(Exception, match="shorter"):  # and never the next object's bytes
            client.read_into("1", 200, memoryview(bytearray(3 << 20)))
        assert store.opened


# --- large and many -------------------------------------------------------------------------------


def test_many_clients_at_once(memory: MemoryStore) -> None:
    with StoreServer(memory, secret=new_secret()) as server:
        stores = [patient(server.describe()).open() for _ in range(6)]

        def work(i: int) -> bool:
            store = stores[i % len(stores)]
            data = pattern(200_000 + i, i)
            with store.writer(f"w/{i}", len(data)) as writer:
                for at in range(0, len(data), 70_001):
                    writer.write(memoryview(data)[at : at + 70_001])
                writer.commit()
            store.put(f"p/{i}", data[:1000])
            buffer = bytearray(len(data))
            store.read_into(f"w/{i}", 0, memoryview(buffer))
            return buffer == data and store.get(f"p/{i}") == data[:1000]

        with ThreadPoolExecutor(24) as pool:
            assert all(pool.map(work, range(96)))
        assert len([*stores[0].list()]) == 192
        for store in stores:
            store.close()


def test_a_large_get_is_whole(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.store.net import session

    monkeypatch.setattr(session, "_WHOLE_BYTES", 1000)
    data = pattern((9 << 20) + 17)
    memory.put("a", data)
    with (
        StoreServer(memory, secret=new_secret()) as server,
        patient(server.describe()).open() as store,
    ):
        assert store.get("a") == data
        assert store.get("a", ByteRange(11, 8 << 20)) == data[11 : 8 << 20]
        for key, wanted in (("b", NotFoundError), ("a", Exception)):
            with pytest.raises(wanted):
                store.get(key, ByteRange(0, 10 << 20))


@pytest.mark.long
@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_large_object_streams_in_bounded_memory(tmp_path: Path, short: Path, way: str) -> None:
    url = f"ckptd+unix://{short}/sock" if way == "unix" else "ckptd://127.0.0.1:0"
    block = pattern(8 << 20)
    count = 25  # 200 MiB
    with (
        server_process(StoreSpec(str(tmp_path / "root")), url) as server,
        patient(server.spec).open() as store,
    ):
        store.put("warm", b"")
        before = _peak_kib(server.process.pid)
        with store.writer("big", count * len(block)) as writer:
            for _ in range(count):
                writer.write(memoryview(block))
            writer.commit()
        buffer = bytearray(8 << 20)
        for i in range(count):
            store.read_into("big", i * len(block), memoryview(buffer))
            assert buffer == block
        # Blocks in flight of the writer, twice over; the object has 200 MiB.
        assert _peak_kib(server.process.pid) - before < 100 << 10


def _peak_kib(pid: int) -> int:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(r for r in rows if r.startswith("VmHWM")).split()[1])


# --- what a server allows ------------------------------------------------------------------------


def test_read_only(memory: MemoryStore) -> None:
    memory.put("a", b"1")
    with (
        StoreServer(memory, secret=new_secret(), read_only=True) as server,
        patient(server.describe()).open() as store,
    ):
        calls: list[Callable[[], object]] = [
            lambda: store.put("b", b"2"),
            lambda: store.writer("b", 1),
            lambda: store.delete(["a"]),
            lambda: store.sweep(),
        ]
        for call in calls:
            with pytest.raises(RefusedError) as caught:
                call()
            assert "the server offers this store read-only" in caught.value.message
        store.sync("")
        assert store.get("a") == b"1"
        assert [o.key for o in store.list()] == ["a"]


def test_only_what_is_allowed(memory: MemoryStore) -> None:
    asked = []

    def allow(operation: str, name: str) -> bool:
        asked.append((operation, name))
        return name.startswith("mine/")

    for key in ("mine/a", "theirs/a"):
        memory.put(key, b"1")
    with (
        StoreServer(memory, secret=new_secret(), allow=allow) as server,
        patient(server.describe()).open() as store,
    ):
        assert store.get("mine/a") == b"1"
        assert [o.key for o in store.list("mine/")] == ["mine/a"]
        calls: list[Callable[[], object]] = [
            lambda: store.get("theirs/a"),
            lambda: store.read_into("theirs/a", 0, memoryview(bytearray(1))),
            lambda: store.put("theirs/b", b"2"),
            lambda: store.writer("theirs/b", 2),
            lambda: store.stat("theirs/a"),
            lambda: store.exists("theirs/a"),
            lambda: [*store.list()],
            lambda: store.children(),
            lambda: store.sync("theirs/"),
            lambda: store.sweep("theirs/"),
            lambda: store.delete(["mine/a", "theirs/a"]),
        ]
        for call in calls:
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.kind == "permission"
        assert memory.exists("mine/a")
    assert {operation for operation, _ in asked} == {
        "get", "read", "put", "begin", "stat", "list", "children", "sync", "sweep", "delete"
    }  # fmt: skip


# --- errors of the server's store -----------------------------------------------------------------


class _Failing(MemoryStore):
    def writer(self, key: str, size: int) -> Writer:
        return _FailingWriter(super().writer(key, 0))

    def stat(self, key: str) -> ObjectInfo:
        raise ValueError("a bug")


class _FailingWriter(Writer):
    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, data: memoryview) -> None:
        raise StoreError("no space left", kind="no-space")

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


def test_a_failed_writer_is_told_before_all_is_sent() -> None:
    store = _Failing(uuid.uuid4().hex)
    with (
        StoreServer(store, secret=new_secret()) as server,
        patient(server.describe()).open() as client,
    ):
        data = memoryview(bytes(1 << 20))
        sent = 0
        with client.writer("a", 1 << 40) as writer, pytest.raises(StoreError) as caught:
            while True:  # until the failure is told: nobody waits for a tebibyte
                writer.write(data)
                sent += len(data)
        assert caught.value.kind == "no-space"
        with client.writer("a", 10) as writer:
            writer.write(memoryview(bytes(10)))
            with pytest.raises(StoreError) as caught:
                writer.commit()
        assert caught.value.kind == "no-space"
        with pytest.raises(NotFoundError):
            client.get("a", ByteRange(0, 1))
        client.put("b", b"the connection is fit for use")
        assert client.get("b", ByteRange(4, 14)) == b"connection"


class _SlowlyAborted(_FailingWriter):
    def abort(self) -> None:
        time.sleep(0.5)
        super().abort()


def test_the_answer_to_an_abort_is_not_taken_for_that_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _Failing(uuid.uuid4().hex)
    monkeypatch.setattr(store, "writer", lambda *of: _SlowlyAborted(MemoryStore.writer(store, *of)))
    with (
        StoreServer(store, secret=new_secret()) as server,
        patient(server.describe()).open() as client,
    ):
        with client.writer("a", 10) as writer:
            writer.write(memoryview(bytes(5)))  # that this failed is answered before the abort
        client.put("b", b"1")
        assert store.get("b") == b"1"


class _Slow(MemoryStore):
    asked = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.asked += 1
        time.sleep(1.0)
        return super().get(key, byte_range)


def test_a_server_that_did_not_answer_in_time_is_not_asked_again() -> None:
    store = _Slow(uuid.uuid4().hex)
    store.put("a", b"1")
    with StoreServer(store, secret=new_secret()) as server:
        options = server.describe().options | {"answer_s": 0.3, "retry_s": 3.0}
        with (
            StoreSpec(server.url, options).open() as client,
            pytest.raises(TransientStoreError) as caught,
        ):
            client.get("a")
        assert caught.value.kind == "link-late"
        assert store.asked == 1


def test_a_writer_that_is_refused_keeps_no_connection() -> None:
    with (
        MemoryStore(uuid.uuid4().hex) as store,
        StoreServer(store, secret=new_secret(), read_only=True) as server,
        patient(server.describe()).open() as client,
    ):
        for _ in range(5):
            with pytest.raises(RefusedError):
                client.writer("a", 1)
        assert server.counts().served == 1


class _Short(MemoryStore):
    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return super().get(key, byte_range)[:-1]


def test_fewer_bytes_than_a_range_has_are_no_answer() -> None:
    store = _Short(uuid.uuid4().hex)
    store.put("a", b"12345")
    with (
        StoreServer(store, secret=new_secret()) as server,
        StoreSpec(server.url, server.describe().options | {"retry_s": 0.0}).open() as client,
        pytest.raises(TransientStoreError, match="other bytes than requested"),
    ):
        client.get("a", ByteRange(1, 4))


def test_a_bug_of_a_store_is_told_to_its_client_alone() -> None:
    store = _Failing(uuid.uuid4().hex)
    with (
        StoreServer(store, secret=new_secret()) as server,
        patient(server.describe()).open() as client,
    ):
        with pytest.raises(StoreError, match="ValueError: a bug"):
            client.stat("a")
        client.put("a", b"1")
        assert client.get("a", ByteRange(0, 1)) == b"1"
        assert server.counts().served == 1


# --- names and options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ckptd://",
        "ckptd://host",
        "ckptd://host:port",
        "ckptd://host:1/path",
        "ckptd://user@host:1",
        "ckptd://host:1?x=1",
        "ckptd://host:99999",
        "ckptd+unix://relative",
        "ckptd+unix://",
        "ckptd+unix:///" + "x" * 107,
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, secret=new_secret())
    assert caught.value.message in ("invalid URL of a Unix socket", "invalid URL of a store server")


def test_a_secret_is_needed_and_never_shown(memory: MemoryStore) -> None:
    for secret in (None, "", "no digits", "ab" * 15):
        with pytest.raises(UsageError) as caught:
            NetStore("ckptd://127.0.0.1:1", NetOptions(secret=secret))
        assert "a server on the network needs a secret" in caught.value.message
        with pytest.raises(UsageError):
            StoreServer(memory, secret=secret)
    secret = new_secret()
    spec = open_store("ckptd://127.0.0.1:1", secret=secret).describe()
    assert spec.options["secret"] == secret
    assert secret not in repr(spec)


def test_opening_contacts_nobody_and_a_closed_store_says_so() -> None:
    store = open_store("ckptd://[::1]:1", secret=new_secret())
    assert store.url == "ckptd://[::1]:1"
    store.close()
    with pytest.raises(UsageError) as caught:
        store.get("a")
    assert caught.value.kind == "closed"


def test_a_put_that_is_too_large_is_refused_here(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd.store.net import messages

    monkeypatch.setattr(messages, "MOST_PUT_BYTES", 10)
    with (
        StoreServer(memory, secret=new_secret()) as server,
        patient(server.describe()).open() as store,
    ):
        store.put("a", bytes(10))
        with pytest.raises(UsageError) as caught:
            store.put("a", bytes(11))
        assert caught.value.kind == "size"


def test_close_of_the_server_ends_its_threads(memory: MemoryStore) -> None:
    before = threading.active_count()
    server = StoreServer(memory, secret=new_secret(), limits=Limits(idle_s=1000))
    stores = [patient(server.describe()).open() for _ in range(4)]
    for store in stores:
        store.put("a", b"1")
    writer = stores[0].writer("b", 10)
    assert threading.active_count() > before
    server.close()
    server.close()
    assert threading.active_count() == before
    writer.abort()
    for store in stores:
        store.close()
    assert not memory.exists("b")
