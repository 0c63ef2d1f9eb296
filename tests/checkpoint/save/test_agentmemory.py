"""The memory of a node as a store: own shares, guests, and what must never be read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.checkpoint.save import agentmemory
from ckptd.checkpoint.save.agentmemory import AgentMemoryStore
from ckptd.checkpoint.save.arena import CONTROL_BYTES
from ckptd.checkpoint.save.neartiers import age
from ckptd.errors import NotFoundError, StoreError
from ckptd.store import StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer
from ckptd.testing.store import StoreContract
from tests.checkpoint.save import snapshotting
from tests.checkpoint.save.saving import plan_of, values
from tests.checkpoint.save.shares import content, save_for, shard_in, slot_for


class TestServedShelf(StoreContract):
    """As other processes see it."""

    race_rounds = 2
    long_listing = 300

    @pytest.fixture
    def spec(self) -> Iterator[StoreSpec]:
        shelf = AgentMemoryStore()
        path = Path(os.environ["CKPTD_RUN_DIR"])
        path.mkdir(mode=0o700)
        with StoreServer(shelf, f"ckptd+unix://{path}/s") as server:
            yield server.describe()
        shelf.close()


@pytest.fixture
def shelf() -> Iterator[AgentMemoryStore]:
    with AgentMemoryStore() as shelf:
        yield shelf


def put(shelf: AgentMemoryStore, key: str, body: bytes) -> None:
    with shelf.writer(key, len(body)) as writer:
        writer.write(memoryview(body))
        writer.commit()


def test_own_shares_read_as_what_a_folder_holds(shelf: AgentMemoryStore) -> None:
    plan = plan_of(world=2)
    folder = MemoryStore("shelf-folder")
    save = save_for(plan, 3)
    slots = [slot_for(plan, rank) for rank in range(2)]
    for rank, slot in enumerate(slots):
        shelf.keep(shard_in(slot, save, plan, rank))
        snapshotting.put_share(folder, plan, rank, values(3), save.name, save.attempt)
    expected = content(folder)
    assert content(shelf) == expected
    for key, body in expected.items():
        assert shelf.stat(key).size == len(body)
        middle = bytearray(len(body) // 2)
        shelf.read_into(key, len(body) // 3, memoryview(middle))
        assert middle == body[len(body) // 3 :][: len(middle)]
        opened = shelf.open_file(key)
        if opened is not None:
            start = max(0, -opened.shift, CONTROL_BYTES - opened.shift)
            assert (
                os.pread(opened.fd, 1 << 20, start + opened.shift)[: len(body) - start]
                == (body[start:])
            )
            os.close(opened.fd)
    shelf.close()
    for slot in slots:
        slot.close()


def test_a_share_whose_slot_is_taken_vanishes_whole(shelf: AgentMemoryStore) -> None:
    plan = plan_of(world=2)
    save = save_for(plan, 3)
    slots = [slot_for(plan, rank) for rank in range(2)]
    for rank, slot in enumerate(slots):
        shelf.keep(shard_in(slot, save, plan, rank))
    keys = [i.key for i in shelf.list()]
    slots[1].begin(4)
    left = [i.key for i in shelf.list()]
    assert [k for k in keys if "r00001" in k]
    assert left == [k for k in keys if "r00001" not in k]
    for key in set(keys) - set(left):
        with pytest.raises(NotFoundError):
            shelf.get(key)
        with pytest.raises(NotFoundError):
            shelf.open_file(key)
    assert [held.plan.rank for held in shelf.shares()] == [0]
    shelf.keep(shard_in(slots[1], save_for(plan, 4), plan, 1))
    assert {h.save.step for h in shelf.shares()} == {3, 4}
    shelf.close()
    for slot in slots:
        slot.close()


def test_slots_of_a_dead_trainer_live_on_with_what_is_whole(shelf: AgentMemoryStore) -> None:
    plan = plan_of()
    whole, half = slot_for(plan, number=0), slot_for(plan, number=1)
    shelf.keep(shard_in(whole, save_for(plan, 1), plan))
    shelf.keep(shard_in(half, save_for(plan, 2), plan))
    half.begin(3)
    shelf.adopt([whole, half])
    assert half.fd < 0
    assert whole.fd >= 0
    assert {key.split("/")[1][:12] for key in content(shelf)} == {"000000000001"}
    shelf.clear(lambda name: age(name) < (1, 2), guests=False)
    assert whole.fd < 0
    assert not content(shelf)


@pytest.mark.parametrize("guests", [False, True])
def test_clearing_takes_own_shares_or_guests(shelf: AgentMemoryStore, guests: bool) -> None:
    plan = plan_of(world=2)
    slot = slot_for(plan)
    save = save_for(plan, 3)
    shelf.keep(shard_in(slot, save, plan, 0))
    snapshotting.put_share(shelf, plan, 1, values(3), save.name, save.attempt)
    shelf.clear(lambda name: age(name) < (1, 3), guests=guests)
    assert len({k for k in content(shelf) if "parts/r" in k}) == 2
    shelf.clear(lambda name: age(name) < (2, 1), guests=guests)
    left = {k[-5:] for k in content(shelf) if "parts/r" in k}
    assert left == {"00000" if guests else "00001"}
    assert [k for k in content(shelf) if k.endswith("/plan")], "the other share needs it"
    shelf.clear(lambda name: name == save.name, guests=not guests)
    assert not content(shelf)
    slot.close()


def test_segments_of_guests_are_recycled_unless_somebody_reads_them(
    shelf: AgentMemoryStore,
) -> None:
    def inode(key: str) -> int:
        opened = shelf._objects[key]
        return os.fstat(opened.segment.fd).st_ino  # type: ignore[union-attr]

    put(shelf, "data/a", b"a" * 9000)
    first = inode("data/a")
    shelf.delete(["data/a"])
    put(shelf, "data/b", b"b" * 8000)
    assert inode("data/b") == first
    opened = shelf.open_file("data/b")
    assert opened is not None
    shelf.delete(["data/b"])
    put(shelf, "data/c", b"c" * 8000)
    assert inode("data/c") != first
    assert os.pread(opened.fd, 8000, opened.shift) == b"b" * 8000
    os.close(opened.fd)


def test_a_guest_that_is_dropped_while_it_is_read_is_never_seen_mixed(
    shelf: AgentMemoryStore,
) -> None:
    size = 2 << 20
    stop = threading.Event()

    def fill() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            put(shelf, "data/x", bytes([number % 251]) * size)

    put(shelf, "data/x", bytes(size))
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(200):
            try:
                found = shelf.get("data/x")
            except NotFoundError:
                continue
            assert found == found[:1] * size
    finally:
        stop.set()
        thread.join()


def test_a_guest_that_is_filled_again_while_it_is_read_is_gone(
    shelf: AgentMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = agentmemory._copy

    def slow(*arguments: Any) -> None:
        copy(*arguments)
        put(shelf, "data/x", b"b" * 9000)

    put(shelf, "data/x", b"a" * 9000)
    monkeypatch.setattr(agentmemory, "_copy", slow)
    with pytest.raises(NotFoundError):
        shelf.get("data/x")


def test_no_memory_for_a_guest_is_said(shelf: AgentMemoryStore) -> None:
    with pytest.raises(StoreError) as caught:
        shelf.writer("data/huge", 1 << 50)
    assert caught.value.kind == "no-space"


def test_an_aborted_guest_leaves_nothing(shelf: AgentMemoryStore) -> None:
    with shelf.writer("data/x", 100) as writer:
        writer.write(memoryview(bytes(50)))
    assert not content(shelf)
