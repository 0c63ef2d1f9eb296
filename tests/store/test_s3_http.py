"""How requests to S3 travel: deadlines, ends, TLS, proxies, forks, and answers without an end."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ckptd.errors import StoreError, TransientStoreError
from ckptd.store import open_store, s3_client, s3_http
from ckptd.store.s3_http import S3Body
from ckptd.testing.store import pattern
from tests.base.runtime.test_ownership import in_a_child
from tests.processes import PATIENCE_S
from tests.servers import MOTO, s3_url
from tests.store.proxy import Proxy

MIB = 1 << 20
PART = 5 * MIB
KEYS: dict[str, Any] = {"key": "k", "secret": "s", "region": "us-east-1", "tries": 1}


@pytest.fixture(params=[MOTO])
def moto(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.getfixturevalue(request.param)
    return options


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve each connection in a thread; gives host and port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def one(peer: socket.socket) -> None:
            with peer, suppress(OSError):
                serve(peer)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)


def pump(a: socket.socket, b: socket.socket) -> None:
    """Carry bytes both ways until one end closes."""

    def way(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=way, args=(b, a), daemon=True)
    back.start()
    way(a, b)
    back.join()


def head_of(peer: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and (data := peer.recv(1 << 16)):
        head += data
    return head


def place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition("://")[2].partition(":")
    return host, int(port)


# -- TLS and proxies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate of 127.0.0.1 by itself."""
    import ipaddress

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.public_bytes(Encoding.PEM)
    )
    return file


@pytest.fixture
def tls(moto: dict[str, Any], certificate: Path) -> Iterator[dict[str, Any]]:
    """Options of a store on a server behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve(peer: socket.socket) -> None:
        with (
            context.wrap_socket(peer, server_side=True) as secure,
            socket.create_connection(place(moto["endpoint_url"])) as server,
        ):
            # One way after the other: Python's TLS takes no two threads at once.
            while head := head_of(secure):
                top, _, body = head.partition(b"\r\n\r\n")
                size = int(
                    next(
                        (
                            line.split(b":")[1]
                            for line in top.split(b"\r\n")
                            if line.lower().startswith(b"content-length:")
                        ),
                        b"0",
                    )
                )
                while len(body) < size:
                    body += secure.recv(1 << 16)
                server.sendall(top + b"\r\nConnection: close\r\n\r\n" + body)
                while data := server.recv(1 << 16):
                    secure.sendall(data)
                return

    with listening(serve) as at:
        yield {**moto, "endpoint_url": f"https://{at}", "tries": 1, "part_bytes": PART}


def test_the_authority_is_an_option_or_a_variable(
    tls: dict[str, Any], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pattern(PART + MIB)
    with open_store(s3_url(), **tls, verify=str(certificate)) as store:
        with store.writer("big", len(data)) as writer:
            writer.write(memoryview(data))
            writer.commit()
        found = bytearray(len(data))
        store.read_into("big", 0, memoryview(found))
        assert found == data
        url = store.url
    with open_store(url, **tls, verify=False) as store:
        assert store.stat("big").size == len(data)
    with open_store(url, **tls) as store:
        with pytest.raises(StoreError, match="no secure connection") as caught:
            store.stat("big")
        assert not isinstance(caught.value, TransientStoreError)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    s3_client._session.cache_clear()
    with open_store(url, **tls) as store:
        assert store.stat("big").size == len(data)
    s3_client._session.cache_clear()


@pytest.mark.parametrize("secure", [False, True])
def test_a_proxy_of_the_environment(
    moto: dict[str, Any],
    tls: dict[str, Any],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    secure: bool,
) -> None:
    """By CONNECT for TLS, by whole URLs else; with the password of the proxy's URL."""
    seen: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        head = head_of(peer)
        seen.append(head)
        with socket.create_connection(place((tls if secure else moto)["endpoint_url"])) as server:
            if secure:
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                server.sendall(head)
            pump(peer, server)

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    more = {"verify": str(certificate)} if secure else {"endpoint_url": "http://127.0.0.1:9"}
    with listening(serve) as at:
        monkeypatch.setenv("https_proxy" if secure else "http_proxy", f"http://me:p%40ss@{at}")
        with open_store(s3_url(), **{**(tls if secure else moto), **more}) as store:
            store.put("a", b"by a proxy")
            assert store.get("a") == b"by a proxy"
    wanted = b"CONNECT 127.0.0.1:" if secure else b"PUT http://127.0.0.1:9/"
    assert seen[0].startswith(wanted)
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==" in seen[0]


# -- deadlines and ends --------------------------------------------------------------------------


def answer(body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


@pytest.mark.parametrize("drip", ["X: ", "Content-Length: 100000\r\n\r\n"])
def test_bytes_that_come_one_by_one_end_one_try_only(drip: str) -> None:
    """Each comes in time; the head, or the body, never ends. The next try is answered."""
    data, tries = pattern(100_000), list[bytes]()

    def serve(peer: socket.socket) -> None:
        tries.append(head_of(peer))
        if len(tries) > 1:
            peer.sendall(answer(data))
            return
        peer.sendall(b"HTTP/1.1 200 OK\r\n" + drip.encode())
        while True:
            time.sleep(0.02)
            peer.sendall(b"x")

    with listening(serve) as at:
        options = {**KEYS, "endpoint_url": f"http://{at}", "request_timeout_s": 0.3, "tries": 2}
        found = bytearray(len(data))
        with open_store(s3_url(), **options) as store:
            store.read_into("a", 0, memoryview(found))
    assert found == data
    assert len(tries) == 2


def test_a_part_that_fails_ends_the_others_and_their_writing() -> None:
    """The second part is refused as the first is under way: its rest is not waited for."""
    begun, ended = threading.Event(), threading.Event()

    def serve(peer: socket.socket) -> None:
        head = head_of(peer)
        if b"bytes=0-" in head:
            peer.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\n" % PART + b"x" * 1000)
            begun.set()
            assert peer.recv(1) == b""
            ended.set()
        else:
            begun.wait(PATIENCE_S)
            peer.sendall(answer(b"", "Connection: close\r\n").replace(b"200 OK", b"403 No"))

    with listening(serve) as at:
        options = {**KEYS, "endpoint_url": f"http://{at}", "part_bytes": PART}
        options |= {"connect_timeout_s": 0.1, "read_timeout_s": 10 * PATIENCE_S}
        with open_store(s3_url(), **options) as store:
            with pytest.raises(StoreError, match="not permitted"):
                store.read_into("a", 0, memoryview(bytearray(2 * PART)))
            assert ended.wait(PATIENCE_S)


def test_a_refusal_amid_a_body_is_heard() -> None:
    """The store answers and closes without reading the body."""

    def serve(peer: socket.socket) -> None:
        head_of(peer)
        peer.sendall(answer(b"", "Connection: close\r\n").replace(b"200 OK", b"507 Full"))
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 10):
            return

    data = pattern(4 * MIB)
    with (
        listening(serve) as at,
        open_store(s3_url(), **KEYS, endpoint_url=f"http://{at}") as store,
        pytest.raises(StoreError, match="no space left"),
        store.writer("big", len(data)) as writer,
    ):
        writer.write(memoryview(data))
        writer.commit()


def test_an_answer_that_is_no_object_has_a_bound(
    moto: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(s3_url(), **moto) as store:
        store.put("k", b"x" * 5000)
        monkeypatch.setattr(s3_http, "_MOST_ANSWER_BYTES", 100)
        with pytest.raises(StoreError, match="the answer is too large"):
            [*store.list()]
        assert store.get("k") == b"x" * 5000


def test_half_a_head_is_no_answer() -> None:
    """Without its length an object seems to be empty, or to end where a connection does."""

    def serve(peer: socket.socket) -> None:
        head_of(peer)
        peer.sendall(b"HTTP/1.1 200 OK\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n")

    with listening(serve) as at, open_store(s3_url(), **KEYS, endpoint_url=f"http://{at}") as store:
        for call in (
            lambda: store.get("a"),
            lambda: store.read_into("a", 0, memoryview(bytearray(5))),
            lambda: store.put("a", b"data"),
            lambda: store.stat("a"),
        ):
            with pytest.raises(TransientStoreError):
                call()


# -- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("idle_s", [12.0, 0.0])
def test_a_connection_is_kept_for_the_next_request_and_not_long(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    monkeypatch.setattr(s3_http, "_IDLE_S", idle_s)
    opened: list[int] = []

    def serve(peer: socket.socket) -> None:
        opened.append(1)
        while head_of(peer):
            peer.sendall(answer(b"found"))

    with listening(serve) as at, open_store(s3_url(), **KEYS, endpoint_url=f"http://{at}") as store:
        for _ in range(3):
            assert store.get("a") == b"found"
    assert len(opened) == (1 if idle_s else 3)


def test_a_connection_that_the_store_closed_is_not_used() -> None:
    closed = threading.Semaphore(0)

    def serve(peer: socket.socket) -> None:
        head_of(peer)
        peer.sendall(answer(b"found"))
        peer.close()
        closed.release()

    with listening(serve) as at, open_store(s3_url(), **KEYS, endpoint_url=f"http://{at}") as store:
        for _ in range(3):
            assert store.get("a") == b"found"
            closed.acquire()


def test_an_object_in_chunks_is_read() -> None:
    def serve(peer: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        while head_of(peer):
            peer.sendall(head + b"3\r\nfou\r\n2\r\nnd\r\n0\r\n\r\n")

    with listening(serve) as at, open_store(s3_url(), **KEYS, endpoint_url=f"http://{at}") as store:
        assert store.get("a") == b"found"
        found = bytearray(5)
        store.read_into("a", 0, memoryview(found))
        assert found == b"found"


def test_a_forked_child_and_its_parent_do_not_share_connections(moto: dict[str, Any]) -> None:
    data = pattern(PART + MIB)
    with Proxy(moto["endpoint_url"]) as proxy:
        options = {**moto, "endpoint_url": proxy.endpoint, "part_bytes": PART}
        with open_store(s3_url(), **options) as store:
            store.put("a", data)

            def read() -> bool:
                found = bytearray(len(data))
                store.read_into("a", 0, memoryview(found))
                return found == data

            assert read()
            assert in_a_child(read) == "True"
            assert read()


def test_a_body_is_the_memory_of_the_caller() -> None:
    data = bytearray(pattern(2 * MIB + 5))
    body = S3Body([memoryview(data)[:7], memoryview(data)[7:]])
    pieces = [*iter(body.read, b"")]
    assert b"".join(pieces) == data
    assert all(isinstance(p, memoryview) and p.obj is data for p in pieces)
    assert max(map(len, pieces)) == MIB
    body.seek(0)
    assert bytes(body.read()) == data[:7]
    assert len(body) == len(data)
