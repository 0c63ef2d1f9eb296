"""Objects in a real etcd, and in servers that answer nonsense."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec
import pytest

from ckptd.elastic.leader import FOLDER as SEATS
from ckptd.elastic.leader import SIGNS, Heartbeat, Leader, LeaderRecord
from ckptd.elastic.log import FOLDER, MembershipLog, entry_key
from ckptd.elastic.membership import encode_record
from ckptd.elastic.policy import Shape
from ckptd.errors import ConflictError, CorruptError, StoreError, TransientStoreError, UsageError
from ckptd.store import Store, StoreSpec, open_store
from ckptd.testing.store import StoreContract
from tests.elastic.test_membership import record
from tests.httpserver import HttpServer
from tests.plugins.etcd.server import etcd as etcd
from tests.processes import free_port


class TestEtcd(StoreContract):
    big_bytes: ClassVar[int] = (1 << 20) + 4099

    @pytest.fixture
    def spec(self, etcd: str) -> StoreSpec:
        return StoreSpec(f"etcd://{etcd}/contract/{uuid.uuid4().hex}")


def test_too_large_an_object_is_refused(etcd: str) -> None:
    store = open_store(f"etcd://{etcd}/large")
    with pytest.raises(StoreError, match="too large"):
        store.put("a", bytes(2 << 20))
    assert not store.exists("a")


def test_stores_of_one_etcd_do_not_see_each_other(etcd: str) -> None:
    one, other = (open_store(f"etcd://{etcd}/{name}") for name in ("apart", "apart2"))
    one.put("a", b"1")
    assert [*other.list()] == []
    assert [info.key for info in one.list()] == ["a"]


def test_keys_are_those_of_earlier_versions(etcd: str) -> None:
    """A job that goes on with another version of ckptd finds its log."""
    MembershipLog(open_store(f"etcd://{etcd}/jobs/j")).append(record(Shape(), 1), 0)
    above = open_store(f"etcd://{etcd}/jobs")
    assert [info.key for info in above.list()] == [f"j/{FOLDER}{entry_key(0)}"]


def test_an_etcd_that_is_away_is_told(etcd: str) -> None:
    away = f"127.0.0.1:{free_port()}"
    with pytest.raises(TransientStoreError, match="no member"):
        open_store(f"etcd://{away}/jobs/a").get("a")
    store = open_store(f"etcd://{away},{etcd}/jobs/away")
    store.put("a", b"1", create_only=True)
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    "rest",
    [
        "a:1",
        "/x",
        "a:1/",
        "[::1/x",
        "a:b/x",
        "a:1,/x",
        "a:70000/x",
        "http://a:1/x",
        "u@a:1/x",
        "\u00e4:1/x",
    ],
)
def test_what_is_no_place_is_refused(rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(f"etcd://{rest}")
    assert "invalid etcd URL" in caught.value.message


def test_options(etcd: str) -> None:
    with pytest.raises(TransientStoreError):
        open_store(f"etcd://{etcd}/x", tls=True).get("a")
    with pytest.raises(UsageError) as caught:
        open_store(f"etcd://{etcd}/x", tsl=True)
    assert "the store does not take these options" in caught.value.message


@pytest.mark.parametrize(
    "answer", ["[]", "{", '{"kvs":[{"value":"YQ=="}]}', '{"kvs":7}', "[" * 9999]
)
def test_an_etcd_that_answers_nonsense_is_told(answer: str) -> None:
    with _answering(answer) as store, pytest.raises(TransientStoreError, match="no member"):
        MembershipLog(store).read()


def test_an_etcd_that_repeats_itself_is_told() -> None:
    pair = '{"key":"am9icy9hLzAwMDAwMDAwMDAwMC5qc29u","value":""}'
    with _answering(f'{{"kvs":[{pair}],"more":true}}') as store, pytest.raises(CorruptError):
        MembershipLog(store).read()


def test_a_transaction_that_says_nothing_has_not_created() -> None:
    with _answering("{}") as store, pytest.raises(ConflictError):
        MembershipLog(store).append(record(Shape(), 1), 0)


def test_what_a_page_of_etcd_has_is_not_asked_for_again() -> None:
    """Launchers that hear no controller read the signs of all others twice a second."""
    with _ranges() as (store, asked, pairs):
        leader = LeaderRecord(store)
        for k in range(100):
            sign = msgspec.json.encode(Heartbeat(by="x", beat=k))
            pairs[f"/jobs/a/{SIGNS}silent-{k:03}"] = sign
            seat = Leader(number=k, address="h:1", by=f"c{k}", at=0.0)
            pairs[f"/jobs/a/{SEATS}{entry_key(k)}"] = msgspec.json.encode(seat)
            pairs[f"/jobs/a/{FOLDER}{entry_key(k)}"] = encode_record(record(Shape(), k + 1))
        assert {sign.beat for sign in leader.signs().values()} == {*range(100)}
        assert len(asked) <= 5
        asked.clear()
        assert leader.still("c99")
        assert len(asked) <= 2
        asked.clear()
        assert len(MembershipLog(store).read()) == 100
        assert len(asked) <= 5
        pairs[f"/jobs/a/{SEATS}notes"] = b""
        assert leader.still("c99")


@contextmanager
def _ranges() -> Iterator[tuple[Store, list[str], dict[str, bytes]]]:
    """Give a store in what answers ranges as etcd does, what is asked, and what it has."""
    asked, pairs = list[str](), dict[str, bytes]()

    def encoded(raw: bytes) -> str:
        return base64.b64encode(raw).decode()

    def answer(raw: bytes) -> str:
        asked.append(raw.decode())
        request = json.loads(raw)
        begin = base64.b64decode(request["key"])
        end = base64.b64decode(request.get("range_end", "")) or begin + b"\0"
        keys = sorted(k for k in pairs if begin <= k.encode() < end)
        keys = keys[::-1] if request.get("sort_order") == "DESCEND" else keys
        limit = request.get("limit", len(keys))
        kvs = [{"key": encoded(k.encode()), "value": encoded(pairs[k])} for k in keys[:limit]]
        return json.dumps({"kvs": kvs, "more": len(keys) > limit})

    with _answering(answer) as store:
        yield store, asked, pairs


@contextmanager
def _answering(answer: str | Callable[[bytes], str]) -> Iterator[Store]:
    class Nonsense(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            said = answer if isinstance(answer, str) else answer(asked)
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HttpServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield open_store(f"etcd://127.0.0.1:{server.server_address[1]}/jobs/a")
        finally:
            server.shutdown()
            thread.join()
