from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ckptd.errors import StoreError, TransientStoreError
from ckptd.store import FaultRule, FaultSpec, StoreSpec
from ckptd.store.fault import Fault, FaultPoint
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.testing.store import pattern
from tests.processes import PATIENCE_S


def faulty(*rules: FaultRule) -> Fault:
    return Fault(MemoryStore(uuid.uuid4().hex), FaultSpec(rules))


def test_operations_are_counted_in_order() -> None:
    store = faulty()
    store.put("a/b", b"12")
    store.put("a/c", b"1", create_only=True)
    with store.writer("d", 3) as writer:
        writer.write(memoryview(b"123"))
        writer.commit()
    store.get("d")
    store.exists("x")
    store.delete(["a/b", "a/c"])
    assert store.operations == [
        FaultPoint(1, "put", "a/b", 2),
        FaultPoint(2, "put-new", "a/c", 1),
        FaultPoint(3, "writer", "d", 3),
        FaultPoint(4, "write", "d", 3),
        FaultPoint(5, "commit", "d", 3),
        FaultPoint(6, "abort", "d", 0),
        FaultPoint(7, "get", "d", 0),
        FaultPoint(8, "stat", "x", 0),
        FaultPoint(9, "delete", "a/b", 0),
    ]


def test_error_has_no_effect_and_lost_has() -> None:
    store = faulty(FaultRule("error", number=1), FaultRule("lost", number=2))
    with pytest.raises(TransientStoreError) as caught:
        store.put("a", b"1")
    assert caught.value.kind == "injected"
    assert caught.value.where == "put a"
    assert not store.inner.exists("a")
    with pytest.raises(TransientStoreError):
        store.put("b", b"1")
    assert store.inner.exists("b")


def test_patterns_skip_and_times() -> None:
    store = faulty(FaultRule("error", op="put*", key="data/*.bin", skip=1, times=2))
    outcomes = []
    for key in ["x", "data/1.bin", "data/2.bin", "other/3.bin", "data/4.bin", "data/5.bin"]:
        try:
            store.put(key, b"", create_only=key.startswith("data/4"))
        except TransientStoreError:
            outcomes.append(key)
    assert outcomes == ["data/2.bin", "data/4.bin"]


def test_an_error_of_any_kind() -> None:
    full: dict[str, str | None] = {"class": "StoreError", "kind": "no-space", "message": "full"}
    store = faulty(FaultRule("error", error=full))
    with pytest.raises(StoreError) as caught:
        store.get("a")
    assert (type(caught.value), caught.value.kind) == (StoreError, "no-space")


def test_a_torn_write_leaves_half() -> None:
    class Keeping(MemoryStore):
        """Keeps what an aborted writer wrote, as a killed process does."""

    store = Fault(Keeping(uuid.uuid4().hex), FaultSpec((FaultRule("torn", op="write"),)))
    writer = store.writer("a", 10)
    with pytest.raises(TransientStoreError):
        writer.write(memoryview(b"0123456789"))
    assert writer._inner.written == 5  # type: ignore[attr-defined]
    writer.abort()
    assert not store.exists("a")


def test_short_and_flipped_reads() -> None:
    store = faulty(
        FaultRule("short", number=2),
        FaultRule("flip", number=3),
        FaultRule("short", number=4),
        FaultRule("flip", number=5),
    )
    store.put("a", b"01234567")
    assert store.get("a") == b"0123"
    assert store.get("a") == b"01235567"
    buffer = bytearray(b"########")
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == b"0123####"
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == b"01235567"
    assert store.get("a") == b"01234567"


def test_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    store = faulty(FaultRule("delay", delay_s=7.5))
    store.put("a", b"1")
    assert slept == [7.5]
    assert store.get("a") == b"1"


@pytest.mark.parametrize(("action", "effect"), [("die", False), ("die-after", True)])
def test_a_dead_store_stays_dead(action: str, effect: bool) -> None:
    rule = FaultRule("die" if action == "die" else "die-after", op="commit")
    store = faulty(rule)
    writer = store.writer("a", 1)
    writer.write(memoryview(b"1"))
    with pytest.raises(StoreError) as caught:
        writer.commit()
    assert "the process is dead, by schedule" in caught.value.message
    writer.abort()  # a dead process cleans nothing up
    for call in (lambda: store.get("a"), lambda: store.put("b", b""), lambda: [*store.list()]):
        with pytest.raises(StoreError):
            call()
    assert store.inner.exists("a") == effect
    assert not store.inner.exists("b")


_CHILD = """
import sys
from ckptd.store import StoreSpec
store = StoreSpec.from_json(sys.stdin.read()).open()
store.put("a", b"1")
store.put("b", b"2")
"""


@pytest.mark.parametrize(("action", "there"), [("kill", False), ("kill-after", True)])
def test_kill_and_the_log(tmp_path: Path, action: str, there: bool) -> None:
    rule = FaultRule("kill" if action == "kill" else "kill-after", op="put", key="b")
    log = tmp_path / "log"
    spec = StoreSpec(str(tmp_path / "root")).wrapped(FaultSpec((rule,), log=str(log)))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=spec.to_json(), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path / "root")
    assert (store.exists("a"), store.exists("b")) == (True, there)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["number"], line["op"], line["key"]) for line in lines] == [
        (1, "put", "a"),
        (2, "put", "b"),
    ]


def test_inner_steps_can_fail_by_errno(tmp_path: Path) -> None:
    rule = FaultRule("error", op="os.fsync", errno=errno.EDQUOT)
    store = Fault(LocalStore(tmp_path), FaultSpec((rule,), inner=True))
    with pytest.raises(StoreError) as caught:
        store.put("a", b"1")
    assert caught.value.kind == "no-space"
    assert "EDQUOT" in str(caught.value.found)
    store.put("a", b"1")
    assert "os.fsync" in {o.op for o in store.operations}


def test_inner_steps_are_not_counted_unless_asked(tmp_path: Path) -> None:
    store = Fault(LocalStore(tmp_path), FaultSpec())
    store.put("a", b"1")
    assert [o.op for o in store.operations] == ["put"]


def test_two_dry_runs_count_the_same(tmp_path: Path) -> None:
    """A campaign strikes by number, so the numbers must not depend on the run."""

    def run(name: str) -> list[str]:
        store = Fault(LocalStore(tmp_path / name), FaultSpec(inner=True))
        data = pattern(40 << 20)
        with store.writer("a/b", len(data)) as writer:
            writer.write(memoryview(data))
            writer.commit()
        store.put("c", b"1", create_only=True)
        return sorted(o.op for o in store.operations)

    assert run("first") == run("second")
