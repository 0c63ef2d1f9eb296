"""Retry, Throttle and Meter, each against a store that fails as `Fault` tells it to."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ckptd.errors import ConflictError, StoreError, TransientStoreError, UsageError
from ckptd.store import FaultRule, FaultSpec, MeterSpec, RetrySpec, StoreSpec, ThrottleSpec
from ckptd.store.base import Store, WrapperSpec
from ckptd.store.fault import Fault
from ckptd.store.memory import MemoryStore
from ckptd.store.wrap import Backoff, Meter, Retry, Throttle, TokenBucket
from ckptd.testing.store import pattern
from ckptd.types import ByteRange

QUICK = RetrySpec(first_s=0.0)
PERMANENT: dict[str, str | None] = {"class": "StoreError", "kind": "permission", "message": "no"}


def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def retried(*rules: FaultRule, spec: RetrySpec = QUICK) -> tuple[Retry, Fault]:
    fault = Fault(memory(), FaultSpec(rules))
    return Retry(fault, spec), fault


# -- Retry ---------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda s: s.get("a"),
    "read_into": lambda s: s.read_into("a", 0, memoryview(bytearray(3))),
    "put": lambda s: s.put("b", b"123"),
    "put-new": lambda s: s.put("b", b"123", create_only=True),
    "stat": lambda s: s.stat("a"),
    "list": lambda s: [o.key for o in s.list()],
    "children": lambda s: s.children(),
    "delete": lambda s: s.delete(["a"]),
    "sync": lambda s: s.sync(""),
    "sweep": lambda s: s.sweep(),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_is_tried_again(op: str) -> None:
    store, fault = retried(FaultRule("error", op=op, times=3))
    fault.inner.put("a", b"123")
    OPERATIONS[op](store)
    assert [o.op for o in fault.operations if o.op == op] == [op] * 4


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_lost_answer_is_no_failure(op: str) -> None:
    store, fault = retried(FaultRule("lost", op=op))
    fault.inner.put("a", b"123")
    OPERATIONS[op](store)
    assert len([o for o in fault.operations if o.op == op]) == 2


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_cannot_heal_is_raised_at_once(op: str) -> None:
    store, fault = retried(FaultRule("error", op=op, times=0, error=PERMANENT))
    fault.inner.put("a", b"123")
    with pytest.raises(StoreError) as caught:
        OPERATIONS[op](store)
    assert caught.value.kind == "permission"
    assert len(fault.operations) == 1


def test_the_deadline_ends_the_tries() -> None:
    store, fault = retried(
        FaultRule("error", op="get", times=0), spec=RetrySpec(deadline_s=0.1, first_s=0.01)
    )
    with pytest.raises(TransientStoreError) as caught:
        store.get("a")
    tries = len(fault.operations)
    assert tries > 1
    assert caught.value.__notes__ == [f"given up after {tries} tries in 0.1 s"]


def test_waits_grow_and_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[float] = []

    def uniform(low: float, high: float) -> float:
        longest.append(high)
        return low

    monkeypatch.setattr("random.uniform", uniform)
    backoff = Backoff(RetrySpec(first_s=0.5, factor=3.0, longest_s=5.0))
    for _ in range(5):
        backoff.wait(TransientStoreError("x"))
    assert longest == [0.5, 1.5, 4.5, 5.0, 5.0]


def test_a_create_only_put_that_lost_its_answer_and_then_the_race() -> None:
    """The first try had no effect, another writer won meanwhile: this is a conflict, not ours."""
    store, fault = retried(FaultRule("error", op="put-new"))
    fault.inner.put("a", b"other")
    with pytest.raises(ConflictError):
        store.put("a", b"mine", create_only=True)


def test_a_conflict_at_the_first_try_is_a_conflict() -> None:
    store, fault = retried()
    fault.inner.put("a", b"same")
    with pytest.raises(ConflictError):
        store.put("a", b"same", create_only=True)


def test_a_listing_goes_on_where_it_broke() -> None:
    class Breaking(MemoryStore):
        breaks = 3

        def list(self, prefix: str = "") -> object:  # type: ignore[override]
            for i, info in enumerate(super().list(prefix)):
                if self.breaks and i == 10 * self.breaks:
                    Breaking.breaks -= 1
                    raise TransientStoreError("connection lost in the middle")
                yield info

    inner = Breaking(uuid.uuid4().hex)
    keys = [f"{i:03}" for i in range(100)]
    for key in keys:
        inner.put(key, b"")
    assert [o.key for o in Retry(inner, QUICK).list()] == keys
    assert Breaking.breaks == 0


@pytest.mark.parametrize("action", ["error", "lost", "torn"])
@pytest.mark.parametrize("op", ["writer", "write", "commit"])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_writer_is_repeated_whole(action: str, op: str, skip: int) -> None:
    rule = msgspec.convert({"action": action, "op": op, "skip": skip}, FaultRule)
    store, _ = retried(rule)
    data = pattern(100_000)
    with store.writer("a", len(data)) as writer:
        for start in range(0, len(data), 30_000):
            writer.write(memoryview(data)[start : start + 30_000])
        writer.commit()
        with pytest.raises(UsageError):
            writer.commit()
    assert store.get("a") == data


def test_a_writer_that_cannot_heal_is_aborted() -> None:
    store, _ = retried(FaultRule("error", op="write", skip=1, error=PERMANENT))
    with store.writer("a", 6) as writer:
        writer.write(memoryview(b"123"))
        with pytest.raises(StoreError):
            writer.write(memoryview(b"456"))
        with pytest.raises(UsageError):
            writer.write(memoryview(b"456"))
    assert not store.exists("a")


# -- Throttle ------------------------------------------------------------------------------------


class Clock:
    """Time that passes only by sleeping, so that rates can be checked to the byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_average_rate_holds(clock: Clock) -> None:
    bucket = TokenBucket(1000.0)
    start = clock.now
    for _ in range(100):
        bucket.take(100)
    bucket.take(0)
    passed = clock.now - start
    assert 10_000 / passed == pytest.approx(1000.0, rel=0.05)


def test_idle_time_is_not_saved_up(clock: Clock) -> None:
    bucket = TokenBucket(1000.0)
    clock.now += 3600
    start = clock.now
    for _ in range(100):
        bucket.take(100)
    assert clock.now - start > 9


def test_writes_and_reads_are_bounded_each(clock: Clock) -> None:
    store = Throttle(memory(), ThrottleSpec(write_bytes_per_s=1e6, read_bytes_per_s=4e6))
    data = pattern(20_000_000)
    start = clock.now
    with store.writer("a", len(data)) as writer:
        writer.write(memoryview(data))
        writer.commit()
    store.put("b", b"")
    written = clock.now - start
    assert written == pytest.approx(20.0, rel=0.1)
    for begin in range(0, len(data), 1_000_000):
        store.get("a", ByteRange(begin, begin + 1_000_000))
    assert clock.now - start - written == pytest.approx(5.0, rel=0.1)


def test_no_rate_is_no_bound(clock: Clock) -> None:
    store = Throttle(memory(), ThrottleSpec())
    store.put("a", pattern(10_000_000))
    store.get("a")
    assert clock.now == 1000.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(UsageError):
        Throttle(memory(), ThrottleSpec(write_bytes_per_s=rate))


# -- Meter ---------------------------------------------------------------------------------------


def test_calls_bytes_and_errors_are_counted() -> None:
    store = Meter(Fault(memory(), FaultSpec((FaultRule("error", op="get", skip=2),))))
    store.put("a", b"12345")
    store.put("b", b"1", create_only=True)
    store.get("a")
    store.get("a", ByteRange(0, 2))
    with pytest.raises(TransientStoreError):
        store.get("a")
    store.read_into("a", 0, memoryview(bytearray(4)))
    with store.writer("c", 10) as writer:
        writer.write(memoryview(bytes(4)))
        writer.write(memoryview(bytes(6)))
        writer.commit()
    assert [o.key for o in store.list()] == ["a", "b", "c"]
    assert not store.exists("nothing")
    found = {op: (m.calls, m.errors, m.moved_bytes) for op, m in store.snapshot().items()}
    assert found == {
        "put": (2, 0, 6),
        "get": (3, 1, 7),
        "read_into": (1, 0, 4),
        "writer": (1, 0, 0),
        "write": (2, 0, 10),
        "commit": (1, 0, 0),
        "list": (1, 0, 0),
        "stat": (1, 0, 0),
    }
    assert all(m.seconds >= 0 for m in store.snapshot().values())
    assert msgspec.json.decode(msgspec.json.encode(store.snapshot()))["put"]["calls"] == 2


def test_a_snapshot_does_not_change() -> None:
    store = Meter(memory())
    store.put("a", b"")
    before = store.snapshot()
    store.put("a", b"")
    assert before["put"].calls == 1


def test_threads_lose_no_count() -> None:
    store = Meter(memory())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.put(str(i), b"123"), range(1000)))
    assert (store.snapshot()["put"].calls, store.snapshot()["put"].moved_bytes) == (1000, 3000)


# -- all of them together ------------------------------------------------------------------------


def test_every_order_of_wrappers_moves_the_same_bytes() -> None:
    wrappers: list[WrapperSpec] = [RetrySpec(), ThrottleSpec(1e10, 1e10), MeterSpec(), FaultSpec()]
    data = pattern(3_000_000)
    for order in itertools.permutations(wrappers):
        with StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(*order).open() as store:
            with store.writer("a", len(data)) as writer:
                writer.write(memoryview(data))
                writer.commit()
            assert store.get("a") == data
            assert store.describe().wrappers == order
