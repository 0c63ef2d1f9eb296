"""Objects in a real etcd, and in servers that answer nonsense."""

from __future__ import annotations

import http.server
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from ckptd.elastic.log import FOLDER, MembershipLog, entry_key
from ckptd.elastic.policy import Shape
from ckptd.errors import ConflictError, CorruptError, StoreError, TransientStoreError, UsageError
from ckptd.store import Store, StoreSpec, open_store
from ckptd.testing.store import StoreContract
from tests.elastic.test_membership import record
from tests.plugins.etcd.server import etcd as etcd
from tests.plugins.etcd.server import free_port


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
    ["a:1", "/x", "a:1/", "[::1/x", "a:b/x", "a:1,/x", "a:70000/x", "http://a:1/x", "u@a:1/x"],
)
def test_what_is_no_place_is_refused(rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(f"etcd://{rest}")
    assert caught.value.kind == "bad-url"


def test_options(etcd: str) -> None:
    with pytest.raises(TransientStoreError):
        open_store(f"etcd://{etcd}/x", tls=True).get("a")
    with pytest.raises(UsageError) as caught:
        open_store(f"etcd://{etcd}/x", tsl=True)
    assert caught.value.kind == "bad-option"


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


@contextmanager
def _answering(answer: str) -> Iterator[Store]:
    class Nonsense(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield open_store(f"etcd://127.0.0.1:{server.server_address[1]}/jobs/a")
        finally:
            server.shutdown()
            thread.join()
