"""What S3 does to a writer that the contract does not show: lost answers, bad gateways, crashes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from ckptd.store import FaultRule, FaultSpec, RetrySpec, StoreSpec, open_store, s3_client
from ckptd.store.s3 import S3Store
from ckptd.store.s3_writer import MOST_PARTS, part_size
from ckptd.store.wrap import Retry
from ckptd.testing.store import pattern
from ckptd.types import ByteRange
from tests.checkpoint.crash.zygote import warm_up_s3
from tests.processes import PATIENCE_S
from tests.programs import zygote
from tests.servers import MOTO, RADOSGW, s3_url
from tests.store.proxy import Proxy, Request

MIB = 1 << 20
PART = 5 * MIB
BIG = pattern(3 * PART + 7)


@pytest.fixture(params=[MOTO, RADOSGW])
def server(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.getfixturevalue(request.param)
    return options


@pytest.fixture(params=[MOTO])
def moto(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.getfixturevalue(request.param)
    return options


@pytest.fixture
def proxy(server: dict[str, Any]) -> Iterator[Proxy]:
    with Proxy(server["endpoint_url"]) as proxy:
        yield proxy


@pytest.fixture
def store(server: dict[str, Any], proxy: Proxy) -> Iterator[S3Store]:
    options = {**server, "endpoint_url": proxy.endpoint, "part_bytes": PART}
    with open_store(s3_url(), **options) as store:
        assert isinstance(store, S3Store)
        store.exists("warm-up")
        proxy.requests.clear()
        yield store


def first(kind: str, action: str, times: int = 1) -> Callable[[Request], str]:
    left = itertools.count(1)
    return lambda r: action if r.kind == kind and next(left) <= times else "pass"


def write(store: S3Store | Retry, key: str, data: bytes) -> None:
    with store.writer(key, len(data)) as writer:
        writer.write(memoryview(data))
        writer.commit()


# -- the answer to a create-only put is lost -----------------------------------------------------


def test_a_lost_answer_is_our_own_success(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("put", "lose", times=9)
    store.put("commits/1", b"mine", create_only=True)
    assert store.get("commits/1") == b"mine"
    assert proxy.seen("put") >= 1
    proxy.rule = lambda request: "pass"
    with pytest.raises(ConflictError):
        store.put("commits/1", b"other", create_only=True)


def test_a_lost_answer_after_another_won_is_a_conflict(store: S3Store, proxy: Proxy) -> None:
    store.put("commits/1", b"other", create_only=True)
    proxy.rule = first("put", "lose", times=9)
    with pytest.raises(ConflictError) as caught:
        store.put("commits/1", b"mine", create_only=True)
    assert caught.value.kind == "exists"
    assert store.get("commits/1") == b"other"


def test_a_put_without_effect_is_told_and_can_be_repeated(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("put", "503 SlowDown")
    with pytest.raises(TransientStoreError):
        store.put("commits/1", b"mine", create_only=True)
    assert not store.exists("commits/1")
    proxy.rule = first("put", "503 SlowDown", times=3)
    Retry(store, RetrySpec(first_s=0.0)).put("commits/2", b"mine", create_only=True)
    assert store.get("commits/2") == b"mine"


def test_a_lost_answer_and_a_lost_look_are_repeated(store: S3Store, proxy: Proxy) -> None:
    """The first put has its effect, nobody hears of it, not even by looking; the second is 412."""
    puts, gets = first("put", "lose", 3), first("get", "503 SlowDown", 9)
    proxy.rule = lambda r: puts(r) if r.kind == "put" else gets(r)
    with pytest.raises(TransientStoreError):
        store.put("commits/1", b"mine", create_only=True)
    proxy.rule = lambda request: "pass"
    store.put("commits/1", b"mine", create_only=True)
    assert store.get("commits/1") == b"mine"


def test_a_conflict_that_vanished_can_be_tried_again(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("put", "412 PreconditionFailed")
    with pytest.raises(TransientStoreError):
        store.put("commits/1", b"mine", create_only=True)
    store.put("commits/1", b"mine", create_only=True)


def test_concurrent_conditional_request_is_resolved(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("put", "409 ConditionalRequestConflict")
    with pytest.raises(TransientStoreError):
        store.put("commits/1", b"mine", create_only=True)
    store.put("commits/1", b"other", create_only=True)
    proxy.rule = first("put", "409 ConditionalRequestConflict")
    with pytest.raises(ConflictError):
        store.put("commits/1", b"mine", create_only=True)


def test_a_store_without_conditions_is_refused(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("put", "501 NotImplemented")
    with pytest.raises(RefusedError) as caught:
        store.put("commits/1", b"mine", create_only=True)
    assert caught.value.kind == "no-create-only"


def test_only_single_puts_carry_a_condition(store: S3Store, proxy: Proxy) -> None:
    """Ceph ignores conditions on multipart completion, and compares ETags as they please it."""
    store.put("commits/1", b"mine", create_only=True)
    store.put("plain", b"mine")
    write(store, "data/big", BIG)
    conditions = {"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"}
    found = [(r.kind, r.headers[c]) for r in proxy.requests for c in conditions & set(r.headers)]
    assert found == [("put", "*")]
    assert not any("x-amz-copy-source" in r.headers for r in proxy.requests)


# -- large objects -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["part", "complete", "put"])
@pytest.mark.parametrize("action", ["lose", "503 SlowDown", "500 InternalError"])
def test_a_failing_upload_is_continued(
    store: S3Store, proxy: Proxy, kind: str, action: str
) -> None:
    data = BIG if kind != "put" else BIG[:1000]
    proxy.rule = first(kind, action)
    write(store, "data/big", data)
    assert store.get("data/big") == data
    assert proxy.seen(kind) > (4 if kind == "part" else 1)
    assert proxy.seen("create") == (kind != "put")


def test_a_failing_create_is_repeated_by_retry(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = first("create", "503 SlowDown")
    write(Retry(store, RetrySpec(first_s=0.0)), "data/big", BIG)
    assert store.get("data/big") == BIG


def test_parts_that_never_arrive_fail_the_upload(server: dict[str, Any]) -> None:
    with Proxy(server["endpoint_url"], first("part", "503 SlowDown", 99)) as proxy:
        options = {**server, "endpoint_url": proxy.endpoint, "part_bytes": PART, "tries": 2}
        with open_store(s3_url(), **options) as store:
            with pytest.raises(TransientStoreError), store.writer("big", len(BIG)) as writer:
                writer.write(memoryview(BIG))
                writer.commit()
            assert proxy.seen("abort") == 1
            proxy.rule = lambda request: "pass"
            assert not store.exists("big")
            assert store.sweep(older_than_s=0) == []


def test_an_upload_that_vanished_is_an_error(store: S3Store, proxy: Proxy) -> None:
    store.put("data/big", BIG)  # of the same size: it must not be taken for the new one
    with store.writer("data/big", len(BIG)) as writer:
        writer.write(memoryview(bytes(len(BIG))))
        assert store.sweep(older_than_s=0) == ["data/big"]
        with pytest.raises(CkptdError):
            writer.commit()


def test_abort_leaves_no_upload(store: S3Store, proxy: Proxy) -> None:
    writer = store.writer("data/big", len(BIG))
    writer.write(memoryview(BIG)[: 2 * PART])
    writer.abort()
    assert proxy.seen("abort") == 1
    assert store.sweep(older_than_s=0) == []


@pytest.mark.parametrize("name", [RADOSGW])  # moto gives every upload the same old date
def test_sweep_keeps_young_uploads(request: pytest.FixtureRequest, name: str) -> None:
    options = {**request.getfixturevalue(name), "part_bytes": PART}
    with open_store(s3_url(), **options) as store, store.writer("data/big", len(BIG)) as writer:
        writer.write(memoryview(BIG))
        assert store.sweep() == []
        writer.commit()
        assert store.get("data/big") == BIG


def test_sweep_keeps_to_its_prefix(store: S3Store) -> None:
    writer = store.writer("data/big", len(BIG))
    writer.write(memoryview(BIG)[:PART])
    assert store.sweep("elsewhere/", older_than_s=0) == []
    assert store.sweep(older_than_s=0, deep=False) == []
    assert store.sweep("data/", older_than_s=0) == ["data/big"]
    writer.abort()


def test_parts_go_in_parallel_and_bounded(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = lambda request: "slow" if request.kind == "part" else "pass"
    data = pattern(12 * PART)
    write(store, "data/big", data)
    assert proxy.seen("part") == 12
    assert 1 < proxy.at_once["part"] <= 4


def test_reads_go_in_parallel_and_bounded(server: dict[str, Any]) -> None:
    rule = lambda request: "slow" if request.kind == "get" else "pass"  # noqa: E731
    with Proxy(server["endpoint_url"], rule) as proxy:
        options = {**server, "endpoint_url": proxy.endpoint, "part_bytes": PART, "parallel": 3}
        with open_store(s3_url(), **options) as store:
            store.put("a", pattern(8 * PART + 1))
            buffer = bytearray(8 * PART + 1)
            store.read_into("a", 0, memoryview(buffer))
            assert buffer == pattern(8 * PART + 1)
            assert proxy.seen("get") == 9
            # One more: who has all bytes asks anew before the proxy has counted that one as over.
            assert 1 < proxy.at_once["get"] <= 4


@pytest.mark.parametrize("size", [0, 1, 100 * MIB, 50 << 30, 5 << 40])
def test_part_sizes(size: int) -> None:
    part = part_size(size, 16 * MIB)
    assert part >= 16 * MIB
    assert part % MIB == 0
    assert -(-size // part) <= MOST_PARTS


def test_no_object_is_beyond_what_s3_takes() -> None:
    with pytest.raises(UsageError):
        part_size(10_000 * (5 << 30) + 1, 16 * MIB)


# -- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["cut", "lose", "503 SlowDown"])
def test_a_broken_read_is_repeated(store: S3Store, proxy: Proxy, action: str) -> None:
    data = pattern(2 * PART + 100)
    store.put("a", data)
    proxy.rule = first("get", action, times=2)
    buffer = bytearray(len(data))
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == data
    proxy.rule = first("get", action)
    assert store.get("a") == data


def test_a_read_that_stays_broken_is_told(store: S3Store, proxy: Proxy) -> None:
    store.put("a", pattern(1000))
    proxy.rule = lambda request: "cut" if request.kind == "get" else "pass"
    for call in (
        lambda: store.get("a"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1000))),
    ):
        with pytest.raises(TransientStoreError):
            call()


def test_a_server_that_hangs_ends_in_an_error(server: dict[str, Any]) -> None:
    with Proxy(server["endpoint_url"], lambda request: "hang") as proxy:
        options = {**server, "endpoint_url": proxy.endpoint, "read_timeout_s": 0.2, "tries": 2}
        with open_store(s3_url(), **options) as store:
            for call in (
                lambda: store.get("a"),
                lambda: store.stat("a"),
                lambda: store.put("a", b"", create_only=True),
                lambda: [*store.list()],
                lambda: store.delete(["a"]),
            ):
                with pytest.raises(TransientStoreError):
                    call()


def test_a_drip_of_bytes_ends_in_an_error(moto: dict[str, Any]) -> None:
    """Each byte comes in time, all of them never do: the deadline is for the whole request."""
    with Proxy(moto["endpoint_url"], lambda request: "hang") as proxy:
        options = {**moto, "endpoint_url": proxy.endpoint, "request_timeout_s": 0.2, "tries": 1}
        with open_store(s3_url(), **options) as store, pytest.raises(TransientStoreError):
            store.get("a")


# -- what the server says ------------------------------------------------------------------------

ANSWERS: list[tuple[str, type[CkptdError], str]] = [
    ("403 AccessDenied", StoreError, "permission"),
    ("403 InvalidAccessKeyId", StoreError, "permission"),
    ("400 ExpiredToken", StoreError, "permission"),
    ("404 NoSuchKey", NotFoundError, "not-found"),
    ("404 NoSuchBucket", StoreError, "store"),
    ("416 InvalidRange", CorruptError, "truncated"),
    ("403 QuotaExceeded", StoreError, "no-space"),
    ("507 InsufficientStorage", StoreError, "no-space"),
    ("400 RequestTimeout", TransientStoreError, "store-transient"),
    ("429 TooManyRequests", TransientStoreError, "store-transient"),
    ("500 InternalError", TransientStoreError, "store-transient"),
    ("502 BadGateway", TransientStoreError, "store-transient"),
    ("503 SlowDown", TransientStoreError, "store-transient"),
    ("504 GatewayTimeout", TransientStoreError, "store-transient"),
    ("400 InvalidArgument", StoreError, "store"),
    ("405 MethodNotAllowed", StoreError, "store"),
]


@pytest.mark.parametrize(("answer", "kind_of_error", "kind"), ANSWERS)
def test_answers_become_our_errors(
    moto: dict[str, Any], answer: str, kind_of_error: type[CkptdError], kind: str
) -> None:
    with Proxy(moto["endpoint_url"], lambda request: answer) as proxy:
        options = {**moto, "endpoint_url": proxy.endpoint, "tries": 1}
        with open_store(s3_url(), **options) as store, pytest.raises(kind_of_error) as caught:
            store.get("a/b")
    assert type(caught.value) is kind_of_error
    assert caught.value.kind == kind
    assert caught.value.where is not None
    assert caught.value.where.endswith("/a/b")


@pytest.mark.parametrize(
    ("field", "act"),
    [
        ("Last-Modified", lambda store: store.stat("k")),
        ("LastModified", lambda store: [*store.list()]),
        ("Size", lambda store: [*store.list()]),
        ("ETag", lambda store: write(store, "big", BIG)),
    ],
    ids=["stat", "list", "size", "part"],
)
def test_a_field_that_the_store_leaves_out_is_named(
    store: S3Store, proxy: Proxy, field: str, act: Callable[[S3Store], object]
) -> None:
    store.put("k", b"data")
    proxy.rule = lambda request: f"without {field}"
    with pytest.raises(StoreError, match=f"has no {field.replace('-', '')}") as caught:
        act(store)
    assert caught.value.where is not None


@pytest.mark.parametrize("action", ["without Key", "garble LastModified"])
def test_an_answer_that_cannot_be_read_is_told(store: S3Store, proxy: Proxy, action: str) -> None:
    store.put("k", b"data")
    proxy.rule = lambda request: action
    with pytest.raises(StoreError, match="the answer cannot be read"):
        [*store.list()]


def test_what_a_store_says_at_length_is_cut(store: S3Store, proxy: Proxy) -> None:
    proxy.rule = lambda request: "400 " + "Long" * 100_000
    with pytest.raises(StoreError, match="LongLong") as caught:
        store.get("k")
    assert len(str(caught.value)) < 2000


def test_an_object_without_an_end_is_not_read_whole(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"x" * 5000)
    monkeypatch.setattr(s3_client, "MOST_WHOLE_BYTES", 4096)
    with pytest.raises(StoreError, match="too large") as caught:
        store.get("k")
    assert caught.value.where is not None
    assert store.get("k", ByteRange(0, 5000)) == b"x" * 5000  # as long as was asked for


def test_missing_buckets_and_wrong_keys(server: dict[str, Any]) -> None:
    with open_store("s3://there-is-no-such-bucket/x", **server) as store:
        for call in (lambda: store.get("a"), lambda: [*store.list()], lambda: store.put("a", b"")):
            with pytest.raises(StoreError) as caught:
                call()
            assert "the bucket does not exist" in caught.value.message


@pytest.mark.parametrize("name", [RADOSGW])
def test_wrong_keys(request: pytest.FixtureRequest, name: str) -> None:
    server = request.getfixturevalue(name)
    for wrong in ({"secret": "wrong"}, {"key": "nobody"}, {"anon": True}):
        with open_store(s3_url(), **{**server, **wrong}) as store:
            with pytest.raises(StoreError) as caught:
                store.put("a", b"")
            assert caught.value.kind == "permission"


def test_nobody_listens() -> None:
    with open_store(
        s3_url(), endpoint_url="http://127.0.0.1:9", key="k", secret="s", tries=1
    ) as store:
        with pytest.raises(TransientStoreError):
            store.get("a")


def test_a_prefix_leaves_room_for_keys() -> None:
    with pytest.raises(UsageError):
        open_store("s3://bucket/" + "p" * 600)


_ENVIRONMENT = """
import sys
from ckptd.store import open_store
with open_store(sys.argv[1]) as store:
    store.put("a", b"from the environment")
    print(store.get("a").decode(), store.describe().options)
"""


def test_endpoint_and_keys_from_the_environment(server: dict[str, Any]) -> None:
    environment = {
        "AWS_ENDPOINT_URL": server["endpoint_url"],
        "AWS_ACCESS_KEY_ID": server["key"],
        "AWS_SECRET_ACCESS_KEY": server["secret"],
        "AWS_DEFAULT_REGION": server["region"],
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", _ENVIRONMENT, s3_url()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.strip() == "from the environment {}", done.stderr


# -- SIGKILL before every request that changes something -----------------------------------------


def act_put_new(store: Any) -> None:
    store.put("key", BIG[:1000], create_only=True)


def act_writer(store: Any) -> None:
    write(store, "key", BIG)


ACTS: dict[str, Callable[[Any], None]] = {"put_new": act_put_new, "writer": act_writer}


def fork_acts(orders: Connection) -> None:
    """Act in a fork for each order, and tell how it ended: a client's modules are read once."""
    warm_up_s3()
    with suppress(EOFError):
        while True:
            act, spec = orders.recv()
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    ACTS[act](StoreSpec.from_json(spec).open())
                    code = 0
                finally:
                    os._exit(code)
            orders.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@pytest.fixture
def run_child() -> Iterator[Callable[[StoreSpec, str], int]]:
    ours, theirs = zygote().Pipe()
    process = zygote().Process(target=fork_acts, args=(theirs,))
    process.start()
    theirs.close()

    def run(spec: StoreSpec, act: str) -> int:
        ours.send((act, spec.to_json()))
        assert ours.poll(PATIENCE_S), f"{act} does not end"
        return int(ours.recv())

    yield run
    ours.close()
    process.join(PATIENCE_S)


@pytest.mark.parametrize("act", ACTS)
def test_sigkill_before_every_request(
    moto: dict[str, Any],
    tmp_path: Path,
    act: str,
    run_child: Callable[[StoreSpec, str], int],
    report: Callable[[str], None],
) -> None:
    options = {**moto, "part_bytes": PART}
    log = tmp_path / "log"
    dry = StoreSpec(s3_url(), options).wrapped(FaultSpec(inner=True, log=str(log)))
    assert run_child(dry, act) == 0
    steps = [json.loads(line)["op"] for line in log.read_text().splitlines()]
    wanted = BIG if act == "writer" else BIG[:1000]
    for number, step in enumerate(steps, 1):
        spec = StoreSpec(s3_url(), options)
        rule = FaultRule("kill", number=number)
        assert run_child(spec.wrapped(FaultSpec((rule,), inner=True)), act) == -signal.SIGKILL
        with spec.open() as store:
            found = [o.key for o in store.list()]
            assert found in ([], ["key"]), step
            if found:
                assert store.get("key") == wanted, step
                store.delete(["key"])
            ACTS[act](store)
            assert store.get("key") == wanted
            store.sweep(older_than_s=0)
            assert store.sweep(older_than_s=0) == []
    report(f"{act}: SIGKILL before each of {', '.join(steps)}")
