"""Connections that break, hang and come back."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.net import address, connection
from ckptd.errors import ConflictError, StoreError, TransientStoreError
from ckptd.store.base import Store, StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.net import NetStore, StoreServer, new_secret
from ckptd.store.net.messages import Complete
from ckptd.store.net.session import Session
from ckptd.testing.store import pattern
from tests.processes import PATIENCE_S, free_port, stop
from tests.store.netserver import ServerProcess, server_process

BIG = 32 << 20


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket's name."""
    with tempfile.TemporaryDirectory(prefix="ckptd-", dir="/tmp") as path:
        yield Path(path)


def place(way: str, folder: Path) -> str:
    return f"ckptd+unix://{folder}/sock" if way == "unix" else "ckptd://127.0.0.1:0"


def tuned(spec: StoreSpec, **options: Any) -> StoreSpec:
    return StoreSpec(spec.url, spec.options | {"connect_s": 60.0, "retry_s": 0.0} | options)


def lost(act: Callable[[], object], spec: StoreSpec) -> TransientStoreError:
    with pytest.raises(TransientStoreError) as caught:
        act()
    assert caught.value.where == spec.url  # it says which server
    return caught.value


# --- servers that die -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_server_killed_in_mid_transfer(tmp_path: Path, folder: Path, way: str) -> None:
    root = StoreSpec(str(tmp_path / "root"))
    data = pattern(BIG)
    secret = new_secret()
    with server_process(root, place(way, folder), secret) as server:
        spec = tuned(server.spec)
        with spec.open() as store:
            with store.writer("whole", BIG) as writer:
                writer.write(memoryview(data))
                writer.commit()
            writer = store.writer("part", BIG)
            writer.write(memoryview(data)[: BIG // 2])
            buffer = bytearray(BIG)
            kill_while(server, lambda: store.read_into("whole", 0, memoryview(buffer)), spec)
            lost(lambda: write_all(writer, data[BIG // 2 :]), spec)
            writer.abort()
            assert lost(lambda: store.get("whole"), spec).kind == "link-lost"
            # It comes back, under the same address.
            with server_process(root, server.spec.url, secret):
                assert store.get("whole") == data


def write_all(writer: Any, data: bytes) -> None:
    writer.write(memoryview(data))
    writer.commit()


def kill_while(server: ServerProcess, act: Callable[[], object], spec: StoreSpec) -> None:
    """Read again and again until the server is killed in the middle of it."""
    started = threading.Event()

    def repeat() -> None:
        while True:
            act()
            started.set()

    def kill() -> None:
        assert started.wait(PATIENCE_S)
        server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert lost(repeat, spec).kind == "link-lost"
    killer.join(PATIENCE_S)


def test_a_server_that_was_never_there(folder: Path) -> None:
    for url, options in [
        (f"ckptd://127.0.0.1:{free_port()}", {"secret": new_secret()}),
        (f"ckptd+unix://{folder}/nobody", {}),
    ]:
        spec = tuned(StoreSpec(url, options))
        with spec.open() as store:
            assert lost(lambda s=store: s.stat("a"), spec).kind == "link-lost"  # type: ignore[misc]


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_calls_find_a_server_that_came_back(memory: MemoryStore, folder: Path, way: str) -> None:
    secret = new_secret()
    with StoreServer(memory, place(way, folder), secret=secret) as first:
        spec = tuned(first.describe(), retry_s=60.0)
        store = spec.open()
        store.put("a", b"1")
        writer = store.writer("b", 1)
    with StoreServer(memory, spec.url, secret=secret) as second:
        assert store.get("a") == b"1"
        with pytest.raises(TransientStoreError):
            write_all(writer, b"x")
        writer.abort()
        assert not store.exists("b")
        with store.writer("b", 1) as writer:
            write_all(writer, b"y")
        assert second.counts().accepted >= 1
    store.close()


# --- servers that hang ----------------------------------------------------------------------------


def test_a_server_that_stops_answering() -> None:
    root = StoreSpec(f"memory://{uuid.uuid4().hex}")
    with (
        server_process(root) as server,
        tuned(server.spec).open() as store,
        tuned(server.spec, connect_s=0.5).open() as fresh,
    ):
        store.put("a", b"1")
        assert isinstance(store, NetStore)
        store._pool._idle[0]._answer_s = 0.5  # only now: a busy machine may need longer for a put
        stop(server.process.pid)
        # The connection stands, and nobody is there; then the kernel accepts, and nobody greets.
        assert lost(lambda: store.get("a"), server.spec).kind == "link-late"
        assert lost(lambda: fresh.get("a"), server.spec).kind == "link-late"
        os.kill(server.process.pid, signal.SIGCONT)
        with tuned(server.spec).open() as third:
            assert third.get("a") == b"1"


def test_a_listener_that_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"ckptd://127.0.0.1:{listener.getsockname()[1]}"
        spec = tuned(StoreSpec(url, {"secret": new_secret()}), connect_s=30.0)

        def speak() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        other = threading.Thread(target=speak)
        other.start()
        with spec.open() as store:
            with pytest.raises(StoreError, match="another version of the protocol"):
                store.get("a")
        other.join(PATIENCE_S)


def test_close_wakes_a_call_that_waits(memory: MemoryStore) -> None:
    class Slow(MemoryStore):
        def sync(self, prefix: str) -> None:
            begun.set()
            assert release.wait(PATIENCE_S)

    begun, release = threading.Event(), threading.Event()
    found: list[Exception] = []
    with StoreServer(Slow("slow"), secret=new_secret()) as server:
        store = tuned(server.describe()).open()

        def wait() -> None:
            try:
                store.sync("")
            except Exception as error:  # noqa: BLE001 - looked at below
                found.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert begun.wait(PATIENCE_S)
        store.close()
        waiter.join(PATIENCE_S)
        release.set()
    assert isinstance(found[0], TransientStoreError)


# --- answers that are lost ------------------------------------------------------------------------


def lose_answers(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let the server cut the connection, `count` times, in place of telling that a put is done."""
    plain = Session._answer
    cut: list[str] = []

    def answer(self: Session, request: Any, body: bytes) -> Any:
        result = plain(self, request, body)
        if type(request).__name__ == "Put" and isinstance(result, Complete) and len(cut) < count:
            cut.append(request.key)
            raise self._wire.fail("by schedule")
        return result

    monkeypatch.setattr(Session, "_answer", answer)
    return cut


def test_a_create_only_put_knows_its_own(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreServer(memory, secret=new_secret()) as server:
        cut = lose_answers(monkeypatch, 1)
        with tuned(server.describe(), retry_s=60.0).open() as store:
            store.put("a", b"mine", create_only=True)
            assert cut == ["a"]
            for data in (b"theirs", b"mine"):  # without a lost answer, equal bytes are no excuse
                with pytest.raises(ConflictError):
                    store.put("a", data, create_only=True)
        assert memory.get("a") == b"mine"


def test_a_create_only_put_knows_that_of_another(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreServer(memory, secret=new_secret()) as server:
        plain = memory.put

        def put(key: str, data: bytes, *, create_only: bool = False) -> None:
            monkeypatch.setattr(memory, "put", plain)
            plain(key, b"theirs")  # another one is first, and we do not hear of it

        monkeypatch.setattr(memory, "put", put)
        lose_answers(monkeypatch, 1)
        with tuned(server.describe(), retry_s=60.0).open() as store:
            with pytest.raises(ConflictError):
                store.put("a", b"mine", create_only=True)
        assert memory.get("a") == b"theirs"


def test_other_puts_are_repeated(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreServer(memory, secret=new_secret()) as server:
        cut = lose_answers(monkeypatch, 2)
        with tuned(server.describe(), retry_s=60.0).open() as store:
            store.put("a", b"new")
        assert len(cut) == 2
        assert memory.get("a") == b"new"


# --- who is at the other end of a Unix socket -----------------------------------------------------


def another_user(sock: socket.socket) -> bool:
    return False


def test_a_server_of_another_user_is_not_believed(
    memory: MemoryStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreServer(memory, place("unix", folder)) as server:
        with tuned(server.describe()).open() as store:
            store.put("a", b"1")
        monkeypatch.setattr(connection, "same_user", another_user)
        with tuned(server.describe()).open() as store:
            with pytest.raises(StoreError) as caught:
                store.get("a")
            assert caught.value.kind == "permission"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_client_of_another_user_is_sent_away(folder: Path) -> None:
    """Where this process may become another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.chmod(folder, 0o755)
    with StoreServer(MemoryStore("mine"), place("unix", folder)) as server:
        os.chmod(folder / "sock", 0o777)
        child = os.fork()
        if child == 0:
            os._exit(_as_nobody(folder / "sock"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert server.counts().accepted == 0
        end = time.monotonic() + 60
        while server.counts().refused == 0:
            assert time.monotonic() < end
            time.sleep(0.01)


def _as_nobody(path: Path) -> int:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        try:
            return len(sock.recv(1))  # not even the challenge
        except ConnectionError:
            return 0


def test_same_user_asks_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    with left, right:
        assert address.same_user(left)
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert not address.same_user(left)


# --- sockets in the file system -------------------------------------------------------------------


def test_a_socket_that_was_left_behind_is_replaced(memory: MemoryStore, folder: Path) -> None:
    with server_process(StoreSpec("memory://x"), place("unix", folder)) as server:
        server.kill()
        assert (folder / "sock").is_socket()
        with StoreServer(memory, place("unix", folder)) as again:
            assert serves(again)
            with pytest.raises(StoreError):  # this one is alive
                StoreServer(memory, place("unix", folder))
            assert serves(again)
    assert not (folder / "sock").exists()


def test_what_is_no_socket_is_left_alone(memory: MemoryStore, folder: Path) -> None:
    (folder / "sock").write_text("a file of somebody")
    with pytest.raises(StoreError):
        StoreServer(memory, place("unix", folder))
    assert (folder / "sock").read_text() == "a file of somebody"


def serves(server: StoreServer) -> bool:
    with tuned(server.describe()).open() as store:
        store.put("a", b"1")
        return store.get("a") == b"1"


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(folder: Path) -> None:
    with (
        server_process(StoreSpec(f"memory://{uuid.uuid4().hex}")) as server,
        tuned(server.spec).open() as store,
    ):
        store.put("a", b"parent")
        child = os.fork()
        if child == 0:
            os._exit(_child(store))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.get("a") == b"parent"
        assert store.get("b") == b"child"


def _child(store: Store) -> int:
    try:
        store.put("b", b"child")
        return 0 if store.get("a") == b"parent" else 2
    except BaseException:  # noqa: BLE001 - only the exit code leaves this process
        return 1
