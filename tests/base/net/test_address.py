"""Texts of addresses, what is this machine, and sockets that listen."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.net.address import (
    Address,
    UnixAddress,
    bound,
    is_here,
    is_loopback,
    listen_at,
    loopback_of,
    parse_address,
    parse_http,
    parse_server,
)
from ckptd.errors import StoreError, TransientStoreError, UsageError

NO_NAME = "a..b"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("head:29400", ("head", 29400)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_texts_of_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "head", "head:", ":1", "head:0", "head:65536", "head:x", "head:-1", "a b:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert caught.value.message == "not an address of a controller"
    assert caught.value.found == text


def test_ports_that_an_option_may_leave_out() -> None:
    assert parse_address(" head ", default_port=7) == ("head", 7)
    assert parse_address("[::1]", default_port=7) == ("::1", 7)
    assert parse_address("head:0", any_port=True) == ("head", 0)


def test_urls_of_stores() -> None:
    assert parse_server("ckptd://head:9/") == Address("head", 9)
    assert parse_server("ckptd://[::1]:9").url == "ckptd://[::1]:9"
    assert parse_server("ckptd+unix:///run/x") == UnixAddress("/run/x")
    for url in ("ckptd://head", "ckptd://u@head:1", "ckptd://head:x", "ckptd+unix://x"):
        with pytest.raises(UsageError):
            parse_server(url)


@pytest.mark.parametrize(
    "url", ["", "head:1", "ftp://head", "http://", "http://head:x", "http://head:0", "http://a b/"]
)
def test_what_is_no_url_of_a_daemon(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_http(url, "a daemon", where="--daemon")
    assert (caught.value.message, caught.value.where) == ("invalid URL of a daemon", "--daemon")


def test_a_server_and_nothing_on_it() -> None:
    assert parse_http("https://head:1/x?token=t", "a daemon").query == "token=t"
    assert parse_http("http://head:1/", "a daemon", bare=True).port == 1
    for url in ("http://head:1/x", "http://me@head:1"):
        with pytest.raises(UsageError):
            parse_http(url, "a daemon", bare=True)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "head.example")))


def test_no_host_has_such_a_name() -> None:
    assert is_here("localhost")
    assert not is_here(NO_NAME)
    with pytest.raises(StoreError, match="cannot listen"):
        listen_at(NO_NAME, 0, "the daemon")
    with pytest.raises(TransientStoreError, match="cannot be reached"):
        Address(NO_NAME, 9).connect(1.0)


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def two(host: str, *args: Any, **more: Any) -> Any:
        hosts = ("192.0.2.1", "127.0.0.1") if host == "mine" else (host,)
        return [found for h in hosts for found in resolve(h, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    assert not is_here("192.0.2.1")
    assert is_here("mine")
    with listen_at("mine", 0, "it") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with listen_at("127.0.0.1", 0, "it") as taken:

        def both(*args: Any, **more: Any) -> Any:
            port = taken.getsockname()[1]
            return [*resolve("127.0.0.1", port), *resolve("127.0.0.2", port)]

        # Another address in place of one that is taken would not be found.
        monkeypatch.setattr(socket, "getaddrinfo", both)
        with pytest.raises(OSError, match="in use"):
            bound("mine", 1)


def test_a_machine_whose_own_name_is_the_loopback_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def debian(host: str, *args: Any, **more: Any) -> Any:
        return resolve({"mine": "127.0.1.1", "other": "10.0.0.1"}.get(host, host), *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    hosts = ["mine", "other", "localhost", "127.0.0.1", NO_NAME]
    assert [loopback_of(host) for host in hosts] == ["127.0.1.1", "", "", "", ""]


def test_a_free_port_is_not_connected_to_itself() -> None:
    with bound("127.0.0.1", 0) as free:  # nothing listens
        with pytest.raises(TransientStoreError) as caught:
            Address("127.0.0.1", free.getsockname()[1]).connect(1.0)
    assert caught.value.kind == "link-lost"


def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    place = UnixAddress(f"/tmp/ckptd-{tmp_path.name}-{id(tmp_path)}")
    try:
        place.listen()[0].close()
        sock, found = place.listen()
        with sock:
            assert found == place
            with pytest.raises(StoreError, match="cannot listen"):
                place.listen()
    finally:
        Path(place.path).unlink(missing_ok=True)
