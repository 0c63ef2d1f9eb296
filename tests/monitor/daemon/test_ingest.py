from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.base.net.signing import check_answer, sign_request
from ckptd.errors import RefusedError
from ckptd.monitor.report import AgentOrders, EvidenceReport, NodeReport, pack, unpack_orders
from tests.monitor.daemon.daemons import JOB, SECRET, Running, running, sheets
from tests.processes import PATIENCE_S, until

PATH = "/api/v1/sheets"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "history") as it:
        yield it


def refused(daemon: Running, kind: str) -> int:
    return daemon.service.ingest.counts.refused[kind]


def test_sheet_is_taken_and_its_answer_is_signed(fresh: Running) -> None:
    body = sheets()[0]
    mac = sign_request(SECRET, "POST", PATH, fresh.service.ingest.challenge, body)
    answer = fresh.ask("POST", PATH, body, {"Ckptd-Mac": mac}, token=False)
    assert answer.status == 200
    check_answer(answer.headers["ckptd-mac"], SECRET, mac, answer.body)
    assert isinstance(unpack_orders(answer.body), AgentOrders)
    until(lambda: len(fresh.service.rounds.last.job.ranks) == 4)
    assert fresh.service.ingest.counts.bytes["sheet"] == len(body)


def test_a_message_counts_once(fresh: Running) -> None:
    body = sheets()[0]
    assert fresh.post("sheet", body).status == 200
    again = fresh.post("sheet", body)
    assert (again.status, again.message) == (409, "this message was already received")
    found = pack(EvidenceReport(job=JOB, source="a", number=3))
    assert [fresh.post("found", found).status for _ in range(2)] == [200, 409]
    assert refused(fresh, "conflict") == 2


def test_other_jobs_secrets_and_lives_are_refused(fresh: Running) -> None:
    body = sheets()[0]
    assert (
        "this message belongs to another job"
        in fresh.post("sheet", sheets(job="another")[0]).message
    )
    assert fresh.post("sheet", body, secret=b"another secret, also long").kind == "bad-mac"
    assert fresh.ask("POST", PATH, body).kind == "bad-mac"  # a token is not a MAC
    old = sign_request(SECRET, "POST", PATH, "0" * 32, body)
    stale = fresh.ask("POST", PATH, body, {"Ckptd-Mac": old}, token=False)
    assert (stale.status, stale.kind) == (401, "stale-mac")
    assert stale.document["challenge"] == fresh.service.ingest.challenge
    moved = sign_request(SECRET, "POST", PATH, fresh.service.ingest.challenge, body)
    wrong = fresh.ask("POST", "/api/v1/found", body, {"Ckptd-Mac": moved}, token=False)
    assert wrong.kind == "bad-mac"
    assert not fresh.service.ingest.counts.taken


def test_secret_of_a_wrong_job_is_no_way_in(fresh: Running) -> None:
    with pytest.raises(RefusedError):
        fresh.service.ingest.hand_in("sheet", sheets(job="another")[0]).result(PATIENCE_S)


def test_too_large_a_body_is_refused_before_it_is_read(fresh: Running) -> None:
    limit = 8 << 20
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nCkptd-Mac: %s\r\nContent-Length: %d\r\n\r\n"
    mac = sign_request(SECRET, "POST", PATH, fresh.service.ingest.challenge, b"")
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=60) as sock:
        sock.sendall((head % (mac, limit + 1)).encode())  # and not a byte of the body
        assert sock.recv(64).startswith(b"HTTP/1.1 413")
    assert refused(fresh, "too-large") == 1


def held_back(daemon: Running, size: int) -> socket.socket:
    """Return a connection on which the body of an unsigned message stops before its end."""
    challenge = daemon.service.ingest.challenge
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nCkptd-Mac: v1 {challenge} 0\r\n"
    sock = socket.create_connection(("127.0.0.1", daemon.port), timeout=60)
    sock.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + bytes(size - 1))
    return sock


def test_unsigned_bodies_that_stop_keep_nobody_out(fresh: Running) -> None:
    size = 8 << 20
    with ExitStack() as crowd:
        for _ in range(12):
            crowd.enter_context(held_back(fresh, size))
        until(lambda: refused(fresh, "busy") >= 3)  # the oldest ones make room
        for number in range(3):
            answer = fresh.post("found", pack(EvidenceReport(job=JOB, source="a", number=number)))
            assert answer.status == 200
        assert fresh.service.ingest._hold.bytes <= 8 * size
    until(lambda: fresh.service.ingest._hold.bytes == 0)


def test_silent_connections_make_room_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.server._MOST_STRANGERS", 8)
    body = pack(EvidenceReport(job=JOB, source="a", number=1))
    with running(tmp_path / "history") as daemon, ExitStack() as crowd:
        silent = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", daemon.port), timeout=60))
            for _ in range(20)
        ]
        assert silent[0].recv(1) == b""
        assert daemon.post("found", body).status == 200


def test_chunks_without_end_are_refused(fresh: Running) -> None:
    mac = sign_request(SECRET, "POST", PATH, fresh.service.ingest.challenge, b"")
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nCkptd-Mac: {mac}\r\n"
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=60) as sock:
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(64):
                sock.sendall(chunk)
        except OSError:
            pass  # it has hung up, which is the point
    until(lambda: refused(fresh, "too-large") == 1)
    assert fresh.ask("GET", "/healthz").status == 200


def test_body_that_ends_early_is_refused(fresh: Running) -> None:
    body = sheets()[0]
    mac = sign_request(SECRET, "POST", PATH, fresh.service.ingest.challenge, body)
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=60) as sock:
        sock.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nCkptd-Mac: {mac}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[:-1]
        )
    until(lambda: refused(fresh, "bad-argument") == 1)
    assert not fresh.service.ingest.counts.taken


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300))
def test_garbage_that_is_signed_is_refused(daemon: Running, body: bytes) -> None:
    for kind in ("sheet", "found"):
        assert "not a valid message between agent and daemon" in daemon.post(kind, body).message


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_sheets_never_make_an_incident(daemon: Running, place: int, byte: int) -> None:
    body = bytearray(b"\x00" + msgspec.msgpack.encode(NodeReport(job=JOB, source="x", number=1)))
    body[place % len(body)] = byte
    answer = daemon.post("sheet", bytes(body))
    assert answer.status in (200, 400, 403, 409)
    assert not daemon.service.rounds.last.incidents
    assert daemon.service.rounds.alive
    assert not daemon.service.rounds.defects


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(min_size=1, max_size=400))
def test_raw_bytes_do_not_harm(daemon: Running, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as sock:
        try:
            sock.sendall(data + b"\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except OSError:
            pass  # reset: it was refused
    assert daemon.ask("GET", "/healthz", token=False).status == 200


def test_sources_that_are_remembered_are_bounded(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.monitor.daemon.ingest._MOST_SOURCES", 10)
    for k in range(40):
        fresh.service.ingest.hand_in(
            "found", pack(EvidenceReport(job=JOB, source=f"s{k}", number=1))
        )
    last = fresh.service.ingest.hand_in(
        "found", pack(EvidenceReport(job=JOB, source="last", number=1))
    )
    last.result(PATIENCE_S)
    assert len(fresh.service.ingest._newest) <= 10
