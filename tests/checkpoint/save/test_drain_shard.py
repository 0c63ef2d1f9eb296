"""A share in memory is byte for byte what would have been written to a folder."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckptd.checkpoint.save.drain import put_shard, stage_shard
from ckptd.checkpoint.save.messages import Blob, Sealed
from ckptd.checkpoint.save.recover import complete_snapshots
from ckptd.errors import SaveError, StoreError
from ckptd.store.base import Writer
from ckptd.store.memory import MemoryStore
from tests.checkpoint.save import snapshotting
from tests.checkpoint.save.saving import plan_of, values
from tests.checkpoint.save.shares import content, save_for, shard_in, slot_for


@pytest.mark.parametrize("world", [2, 3])
def test_a_peer_gets_what_a_folder_gets(world: int) -> None:
    plan = plan_of(world=world)
    peer, folder = MemoryStore(f"peer-{world}"), MemoryStore(f"folder-{world}")
    save = save_for(plan, 7)
    for rank in range(world):
        shard = shard_in(slot_for(plan, rank), save, plan, rank)
        put_shard(peer, shard)
        shard.slot.close()
        snapshotting.put_share(folder, plan, rank, values(7), save.name, save.attempt)
    assert content(peer) == content(folder)


def test_what_is_digested_is_there_already() -> None:
    plan = plan_of()
    whole = shard_in(slot_for(plan), save_for(plan, 1), plan)
    slot = slot_for(plan)
    slot.begin(1)

    def wait(upto: int) -> None:
        slot.data[slot.staged : upto] = whole.slot.data[slot.staged : upto]
        slot.staged = upto

    shard = stage_shard(whole.plan, whole.save, slot, wait, lambda: Sealed(1))
    assert shard.small == whole.small
    slot.close()
    whole.slot.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_share_whose_slot_was_taken_is_not_put(sealed: bool) -> None:
    """Nor where the next snapshot is whole there: that is none of this one's."""
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    before = shard.is_whole
    shard.slot.begin(2)
    if sealed:
        shard.slot.seal()
    assert (before, shard.is_whole) == (True, False)
    store = MemoryStore("taken")
    with pytest.raises(SaveError) as caught:
        put_shard(store, shard)
    assert "the trainer died before its state was copied" in caught.value.message
    assert not content(store)
    shard.slot.close()
    assert not shard.is_whole


def test_a_slot_that_is_taken_while_the_last_of_it_is_written_leaves_no_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was written may be of two snapshots."""
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)

    class Slow(MemoryStore):
        def writer(self, key: str, size: int) -> Writer:
            writer = super().writer(key, size)
            write = writer.write

            def taken(data: memoryview) -> None:
                write(data)
                if len(data) == shard.data_bytes:
                    shard.slot.begin(2)
                    shard.slot.seal()

            monkeypatch.setattr(writer, "write", taken)
            return writer

    store = Slow("overtaken")
    with pytest.raises(SaveError):
        put_shard(store, shard)
    shard.slot.close()
    assert not content(store)


def test_the_part_goes_last() -> None:
    """It speaks for a file whose name is durable by then."""
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    sealed = Sealed(1, blobs=(Blob("0" * 32, b"{}", True),))
    shard = stage_shard(shard.plan, shard.save, shard.slot, lambda _: None, lambda: sealed)
    order: list[str] = []

    class Watched(MemoryStore):
        def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            order.append(key)
            super().put(key, data, create_only=create_only)

        def sync(self, prefix: str) -> None:
            order.append(prefix)

    put_shard(Watched("order"), shard)
    shard.slot.close()
    assert order[-1].endswith("parts/r00000")
    assert shard.save.folder in order


class Full(MemoryStore):
    """A store that has no room for data, and notes what is deleted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []
        self.full = False

    def writer(self, key: str, size: int) -> Writer:
        if self.full:
            raise StoreError("no space left", kind="no-space", where=key)
        return super().writer(key, size)

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self.deleted += names
        super().delete(names)


def test_a_share_whose_second_writing_fails_is_not_counted() -> None:
    """An agent that died may have left a part; its data goes with the failure, and so must it."""
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    store = Full("second")
    put_shard(store, shard)
    assert len(complete_snapshots([store])) == 1
    store.full = True
    with pytest.raises(StoreError):
        put_shard(store, shard)
    shard.slot.close()
    assert complete_snapshots([store]) == []


def test_a_part_that_is_there_after_its_put_failed_is_taken_down() -> None:
    class Late(Full):
        def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            super().put(key, data, create_only=create_only)
            if "/parts/r" in key:
                raise StoreError("the folder cannot be synced", where=key)

    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    store = Late("late")
    with pytest.raises(StoreError):
        put_shard(store, shard)
    shard.slot.close()
    assert not [k for k in content(store) if "/parts/r" in k or k.endswith(".safetensors")]


def test_another_nodes_memory_is_not_asked_to_delete() -> None:
    """It refuses; and where it hangs, the slot would be kept for another time-out."""
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    store = Full("peer")
    store.full = True
    with pytest.raises(StoreError):
        put_shard(store, shard, may_delete=False)
    shard.slot.close()
    assert store.deleted == []
