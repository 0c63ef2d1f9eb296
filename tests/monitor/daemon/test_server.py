from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest

from ckptd.base.net.address import listen_at
from ckptd.base.net.tls import https
from ckptd.errors import StoreError, TransientStoreError, UsageError
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.daemon import server
from ckptd.monitor.daemon.client import DaemonClient
from ckptd.monitor.daemon.server import url_of
from ckptd.monitor.report import unpack_report
from tests.authority import Authority, files
from tests.monitor.daemon.daemons import SECRET, Answer, Running, running, sheets
from tests.processes import until

__all__ = ["files"]


def test_address_that_is_taken() -> None:
    with listen_at("127.0.0.1", 0, "the daemon") as sock, pytest.raises(StoreError) as caught:
        listen_at("127.0.0.1", sock.getsockname()[1], "the daemon")
    assert caught.value.kind == "listen"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(StoreError) as caught:
        listen_at(host, 0, "the daemon")
    assert caught.value.kind == "listen"


def test_urls() -> None:
    with listen_at("127.0.0.1", 0, "the daemon") as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        assert url_of(sock, "::1") == f"http://[::1]:{port}"


@pytest.mark.parametrize("start", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
def test_who_does_not_finish_a_head_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(server, "_HEAD_S", 0.2)
    with running(tmp_path / "history") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
            sock.sendall(start)
            assert sock.recv(1) == b""
            assert daemon.ask("GET", "/healthz").status == 200


def test_second_head_is_to_be_finished_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HEAD_S", 0.2)
    with running(tmp_path / "history") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200")


OPERATOR = "spiffe://example.org/ckptd/operator/me"


def asked(daemon: Running, files: Path, method: str, path: str, **headers: str) -> Answer:
    """Return the answer that a client gets which believes the authority and checks the host."""
    context = ssl.create_default_context(cafile=files / "operator" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", daemon.port, context=context)
    try:
        connection.request(method, path, None, headers)
        got = connection.getresponse()
        return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
    finally:
        connection.close()


def test_with_certificates_from_files_it_speaks_tls(tmp_path: Path, files: Path) -> None:
    authority = Authority()
    authority.put(files / "operator", OPERATOR)
    authority.put(files / "agent", "spiffe://example.org/ckptd/agent/n1")
    with running(tmp_path / "history") as daemon:
        assert daemon.url == f"https://127.0.0.1:{daemon.port}"
        said = asked(daemon, files, "GET", f"/?token={daemon.token}")
        cookie = said.headers["set-cookie"]
        assert cookie.startswith("__Host-ckptd_")
        assert "; Secure" in cookie
        assert asked(daemon, files, "GET", "/api/v1/job").status == 401
        its = {"Cookie": cookie.partition(";")[0]}
        assert asked(daemon, files, "GET", "/api/v1/job", **its).status == 200
        assert daemon.client.get("/job")
        uplink = Uplink(daemon.url, SECRET)
        uplink.offer(unpack_report(sheets()[0]))
        until(lambda: uplink.sent)
        uplink.close()
        # In the clear there is nothing, and nobody else's certificate is the daemon's.
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in b"".join(iter(lambda: sock.recv(4096), b""))


@pytest.mark.parametrize(
    ("uri", "words"),
    [("spiffe://example.org/ckptd/rank/me", "of role rank"), (OPERATOR, "verify failed")],
)
def test_who_is_not_the_daemon_hears_no_token(files: Path, uri: str, words: str) -> None:
    ours = Authority()
    ours.put(files / "operator", OPERATOR)
    (ours if words == "of role rank" else Authority()).put(files / "other", uri)
    context, heard = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[bytes]()
    context.load_cert_chain(files / "other" / "tls.crt", files / "other" / "tls.key")

    def pretend() -> None:
        conn, _ = sock.accept()
        with conn, contextlib.suppress(OSError):
            with context.wrap_socket(conn, server_side=True) as sealed:
                heard.append(sealed.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=pretend)
        thread.start()
        client = DaemonClient(f"https://127.0.0.1:{sock.getsockname()[1]}", "a token")
        with pytest.raises(TransientStoreError, match="does not answer") as caught:
            client.get("/job")
        thread.join()
    assert words in str(caught.value)
    assert not any(heard)


def test_a_renewed_certificate_serves_and_half_of_one_does_not(files: Path) -> None:
    authority = Authority()
    authority.put(files / "operator", OPERATOR)
    authority.put(files / "next", OPERATOR)
    context = https()
    assert context is not None
    shutil.copy(files / "next" / "tls.key", files / "operator")
    with pytest.raises(UsageError, match="cannot be used"):
        https(context)
    before = shown_by(context, authority)
    shutil.copy(files / "next" / "tls.crt", files / "operator")
    assert https(context) is context
    assert shown_by(context, authority) != before


def shown_by(context: ssl.SSLContext, authority: Authority) -> object:
    """Return the number of the certificate that a server shows."""
    client = ssl.create_default_context(cadata=authority.pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        context.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in ends * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return (ends[0].getpeercert() or {})["serialNumber"]


@pytest.mark.parametrize("late", [True, False])
def test_silent_strangers_before_tls_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path, late: bool
) -> None:
    monkeypatch.setattr(server, "_HEAD_S" if late else "_MOST_STRANGERS", 0.2 if late else 2)
    Authority().put(files / "operator", OPERATOR)
    with running(tmp_path / "history") as daemon, contextlib.ExitStack() as stack:
        where = ("127.0.0.1", daemon.port)
        socks = [stack.enter_context(socket.create_connection(where, 60)) for _ in range(3)]
        assert socks[0].recv(1) == b""
        assert daemon.client.get("/job")


def test_head_that_is_too_large_is_refused(daemon: Running) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 17))
        answer = b""
        try:
            while part := sock.recv(4096):
                answer += part
        except ConnectionError:
            pass  # it hung up with the rest unread
    assert b"200 OK" not in answer
