from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.base.net.signing import MAC_HEADER, reader_token, sign_request
from ckptd.monitor.daemon import access
from ckptd.monitor.daemon.access import LOGIN_PATH, Access
from ckptd.monitor.daemon.acts import ActsLog
from ckptd.monitor.daemon.app import DaemonApi
from tests.monitor.daemon.daemons import SECRET, Running, running


def test_reading_needs_the_token(daemon: Running) -> None:
    refused = daemon.ask("GET", "/api/v1/job", token=False)
    assert (refused.status, refused.kind) == (401, "no-token")
    assert daemon.ask("GET", "/api/v1/job").status == 200
    wrong = daemon.ask("GET", "/api/v1/job", headers={"Authorization": "Bearer é"}, token=False)
    assert wrong.status == 401


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/", "/api/v1/challenge"])
def test_what_is_told_to_everybody(daemon: Running, path: str) -> None:
    assert daemon.ask("GET", path, token=False).status == 200


def test_url_with_the_token_logs_in_and_is_left_at_once(daemon: Running) -> None:
    answer = daemon.ask("GET", f"/?token={daemon.token}", token=False)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert daemon.token not in cookie
    pair = cookie.partition(";")[0]
    assert daemon.ask("GET", "/api/v1/job", headers={"Cookie": pair}, token=False).status == 200
    broken = {"Cookie": pair[:-1] + "x"}
    assert daemon.ask("GET", "/api/v1/job", headers=broken, token=False).status == 401
    assert "set-cookie" not in daemon.ask("GET", "/?token=wrong", token=False).headers


def login(daemon: Running, token: str = "") -> str:
    body = f'{{"token": "{token or daemon.token}"}}'.encode()
    answer = daemon.ask("POST", "/api/v1/login", body, token=False)
    assert answer.status == 200
    return answer.headers["set-cookie"].partition(";")[0]


def test_login_by_post(daemon: Running) -> None:
    assert login(daemon)
    for body in (b'{"token": "no"}', b'{"token": 1}', b"{}"):
        assert daemon.ask("POST", "/api/v1/login", body, token=False).status == 401
    assert daemon.ask("POST", "/api/v1/login", b"[", token=False).status == 400


def test_acting_by_cookie_needs_the_origin(daemon: Running) -> None:
    path, cookie = "/api/v1/incidents/none/ack", {"Cookie": login(daemon)}
    assert daemon.ask("POST", path, b"{}", cookie, token=False).status == 401
    mine = {**cookie, "Origin": daemon.url}
    assert "unknown incident" in daemon.ask("POST", path, b"{}", mine, token=False).message
    other = {**cookie, "Origin": "http://evil.example"}
    assert (
        "the request comes from a page of another site"
        in daemon.ask("POST", path, b"{}", other, token=False).message
    )


def acts_of(daemon: Running) -> list[dict[str, Any]]:
    """Return the acts that are written down, also those of other tests with this daemon."""
    path = ActsLog(daemon.service.setup.history).path
    login(daemon)
    assert path.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reader_reads_everything_and_acts_nowhere(daemon: Running) -> None:
    before, reader = len(acts_of(daemon)), reader_token(daemon.token)
    bearer = {"Authorization": f"Bearer {reader}"}
    cookie = {"Cookie": login(daemon, reader), "Origin": daemon.url}
    acts = [
        route
        for route in DaemonApi(daemon.service, Access("t")).routes()
        if "POST" in route.methods
    ]
    assert len(acts) > 5
    for shown in (bearer, cookie):
        for path in ("/api/v1/job", "/api/v1/ranks", "/api/v1/incidents", "/metrics"):
            assert daemon.ask("GET", path, headers=shown, token=False).status == 200
        for route in acts:
            path = re.sub("{.*?}", "1", route.path)
            if path in (LOGIN_PATH, "/api/v1/sheets", "/api/v1/found"):
                continue
            answer = daemon.ask("POST", path, b"{}", shown, token=False)
            assert (answer.status, "for reading" in answer.message) == (403, True), path
    found = acts_of(daemon)[before:-1]
    assert {act["who"].partition(" session ")[0] for act in found} == {"reader", "reading"}
    name, _, value = cookie["Cookie"].partition("=")
    end, _, mac = value.partition("-")
    more = {**cookie, "Cookie": f"{name}={end.removesuffix('r')}-{mac}"}
    assert daemon.ask("GET", "/api/v1/job", headers=more, token=False).status == 401
    assert reader_token(reader) != reader
    second = {"Authorization": f"Bearer {reader_token(reader)}"}
    assert daemon.ask("GET", "/api/v1/job", headers=second, token=False).status == 401


def test_a_line_says_who_did_what_from_where(daemon: Running) -> None:
    path, before = "/api/v1/incidents/none/ack", len(acts_of(daemon))
    daemon.ask("POST", path, b"{}", token=False)  # of nobody: refused, and not written down
    daemon.ask("POST", LOGIN_PATH, b'{"token": "wrong"}', token=False)
    daemon.ask("GET", "/api/v1/job")
    daemon.ask("GET", "/?token=wrong", token=False)
    daemon.post("sheet", b"x")
    cookie = {"Cookie": login(daemon), "Origin": daemon.url}
    note = b'{"note": "\\u001b[2J\\n of mine"}'
    daemon.ask("POST", path, note, cookie, token=False)
    daemon.ask("POST", path, b"{" + b" " * 5000)
    daemon.ask("GET", f"/?token={daemon.token}", token=False)
    found = acts_of(daemon)[before:-1]
    assert [(a["method"], a["path"], a["status"]) for a in found] == [
        ("POST", LOGIN_PATH, 200),
        ("POST", path, 404),
        ("POST", path, 400),
        ("GET", "/", 303),
    ]
    assert [a["host"] for a in found] == ["127.0.0.1"] * 4
    value = cookie["Cookie"].partition("=")[2]
    session = f"session {value.partition('-')[2][:8]}"
    assert [a["who"] for a in found] == ["token", session, "token", "token"]
    assert [len(a["body"]) for a in found] == [0, len(note), 1000, 0]
    everything = ActsLog(daemon.service.setup.history).path.read_text()
    assert daemon.token not in everything
    assert value not in everything
    assert all(abs(act["at"] - time.time()) < 1000 for act in found)


def test_a_file_of_acts_is_followed_by_another(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.acts._MOST_BYTES", 300)
    for _ in range(9):
        login(daemon)
    acts = ActsLog(daemon.service.setup.history).path
    assert acts.with_name(f"{acts.name}.1").exists()
    assert acts.with_name(f"{acts.name}.1").stat().st_size < 1000


def test_a_session_is_of_one_life_of_one_daemon_and_ends(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = {"Cookie": login(daemon)}
    assert daemon.ask("GET", "/api/v1/job", headers=cookie, token=False).status == 200
    with running(tmp_path / "another") as other:  # of the same job and secret, on the same host
        assert other.ask("GET", "/api/v1/job", headers=cookie, token=False).status == 401
        assert login(other).partition("=")[0] != cookie["Cookie"].partition("=")[0]
    name, _, value = cookie["Cookie"].partition("=")
    end, _, mac = value.partition("-")
    longer = {"Cookie": f"{name}={int(end) + 1}-{mac}"}
    assert daemon.ask("GET", "/api/v1/job", headers=longer, token=False).status == 401
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 12 * 3600 + 1)
    monkeypatch.setattr(access, "time", later)
    assert daemon.ask("GET", "/api/v1/job", headers=cookie, token=False).status == 401


def test_a_session_behind_tls_is_of_this_host_alone(daemon: Running) -> None:
    tls = {"X-Forwarded-Proto": "https"}  # of a proxy on this machine
    body = f'{{"token": "{daemon.token}"}}'.encode()
    answer = daemon.ask("POST", "/api/v1/login", body, tls, token=False)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-")
    assert {"Secure", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie
    pair = cookie.partition(";")[0]
    given = {"Cookie": pair, **tls}
    assert daemon.ask("GET", "/api/v1/job", headers=given, token=False).status == 200
    plain = {"Cookie": pair.removeprefix("__Host-"), **tls}
    assert daemon.ask("GET", "/api/v1/job", headers=plain, token=False).status == 401


@pytest.mark.parametrize("origin", ["null", "http://127.0.0.1:1", "http://[", "x"])
def test_other_sites_are_refused(daemon: Running, origin: str) -> None:
    assert daemon.ask("GET", "/api/v1/job", headers={"Origin": origin}).status in (403, 421)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "[", "a b"])
def test_names_of_strangers_are_refused(daemon: Running, host: str) -> None:
    answer = daemon.ask("GET", "/api/v1/job", headers={"Host": host})
    assert answer.status in (400, 421)


@pytest.mark.parametrize("host", ["head.example", "[", "a b"])
def test_agents_may_call_it_as_they_like_and_pages_cannot_sign(daemon: Running, host: str) -> None:
    headers = {"Host": host}
    for path in ("/api/v1/sheets", "/api/v1/found"):
        answer = daemon.ask("POST", path, b"x", headers, token=False)
        assert (answer.status, answer.kind) == (403, "bad-mac")
        challenge = daemon.service.ingest.challenge
        mac = sign_request(SECRET, "POST", path, challenge, b"x")
        answer = daemon.ask("POST", path, b"x", headers | {MAC_HEADER: mac}, token=False)
        assert "not a valid message between agent and daemon" in answer.message
        page = headers | {"Origin": "http://evil.example"}
        assert (
            "the request comes from a page of another site"
            in daemon.ask("POST", path, b"x", page, token=False).message
        )


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:80", "10.1.2.3:4"])
def test_names_that_cannot_be_a_strangers_are_taken(daemon: Running, host: str) -> None:
    assert daemon.ask("GET", "/api/v1/job", headers={"Host": host}).status == 200


def test_metrics_and_names_as_told(tmp_path: Path) -> None:
    given = Access(token="t", metrics_open=False, names=frozenset({"head.example"}))
    with running(tmp_path / "history", access=given) as daemon:
        assert daemon.ask("GET", "/metrics", token=False).status == 401
        shown = {"Authorization": "bearer t", "Host": "head.example:1"}
        assert daemon.ask("GET", "/metrics", headers=shown, token=False).status == 200


def test_page_may_load_nothing_from_elsewhere(daemon: Running) -> None:
    for path in ("/", "/index.html", "/nothing"):
        policy = daemon.ask("GET", path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)


@pytest.mark.parametrize("path", ["/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"])
def test_no_way_out_of_the_page(daemon: Running, path: str) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")
