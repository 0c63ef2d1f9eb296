"""A share in memory is byte for byte what would have been written to a folder."""

from __future__ import annotations

import pytest

from ckptd.errors import SaveError
from ckptd.save.drain import put_shard
from ckptd.store.memory import MemoryStore
from tests.save import snapshotting
from tests.save.saving import plan_of, values
from tests.save.shares import content, save_for, shard_in, slot_for


@pytest.mark.parametrize("world", [1, 3])
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


def test_a_share_whose_slot_was_taken_is_not_put() -> None:
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    assert shard.is_whole
    shard.slot.begin(2)
    assert not shard.is_whole
    store = MemoryStore("taken")
    with pytest.raises(SaveError) as caught:
        put_shard(store, shard)
    assert caught.value.kind == "half-staged"
    assert not content(store)
    shard.slot.close()
    assert not shard.is_whole


def test_the_part_goes_last() -> None:
    plan = plan_of()
    shard = shard_in(slot_for(plan), save_for(plan, 1), plan)
    order: list[str] = []

    class Watched(MemoryStore):
        def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            order.append(key)
            super().put(key, data, create_only=create_only)

    put_shard(Watched("order"), shard)
    shard.slot.close()
    assert order[-1].endswith("parts/r00000")
