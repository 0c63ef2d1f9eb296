"""From a slot to the tiers: what a lane reads stays, and a slot is free when nobody reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.drain import StagedShard
from ckptd.checkpoint.save.messages import Freed, Response, Settled, ShardStored
from ckptd.checkpoint.save.neartiers import NodeTiers
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.checkpoint.save.uploader import TierUploader
from ckptd.store import StoreSpec
from tests.checkpoint.save.saving import fill, plan_of, values
from tests.checkpoint.save.shares import save_for, shard_in, slot_for
from tests.processes import PATIENCE_S, until

PLAN = plan_of()
SLOTS = 4


class World:
    """The uploader of one rank, and what they told and wrote to the root."""

    def __init__(self, folder: str) -> None:
        self.sent: list[Response] = []
        self.rooted: dict[int, bytes] = {}
        self.root_busy = threading.Event()
        self.root_busy.set()
        self.near = NodeTiers()
        self.near.prepare((TierSpec("local", 1, StoreSpec(folder)),))
        self.uploader = TierUploader(self.near, self.sent.append, self.to_root)
        self.slots = [slot_for(PLAN, number=n) for n in range(SLOTS)]

    def to_root(self, shard: StagedShard, data: memoryview) -> None:
        assert self.root_busy.wait(PATIENCE_S)
        self.rooted[shard.save.step] = bytes(data[: shard.data_bytes])

    def take(self, step: int, near: tuple[str, ...], *, root: bool = False) -> None:
        save = save_for(PLAN, step, near, root=root)
        self.uploader.take(shard_in(self.slots[step % SLOTS], save, PLAN))

    def freed(self, step: int) -> bool:
        return Freed(step) in self.sent

    def complete(self, tier: str, step: int) -> None:
        self.uploader.settled(Settled(tier, step, 1))
        until(lambda: self.near.is_complete(tier, CommitName(step, 1)))

    def worth(self) -> list[int]:
        return [shard.save.step for shard in self.uploader.worth_saving()]

    def close(self) -> None:
        self.root_busy.set()
        self.uploader.finish()
        self.near.close()
        for slot in self.slots:
            slot.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(str(tmp_path / "folder"))
    yield world
    world.close()


def expected(step: int) -> bytes:
    data = bytearray(PLAN.filemap.data_bytes(0))
    fill(PLAN, 0, values(step), memoryview(data))
    return bytes(data)


def test_the_root_is_written_from_the_folder_and_the_slot_is_free_before(world: World) -> None:
    world.root_busy.clear()
    world.take(1, ("local",), root=True)
    until(lambda: world.freed(1))
    world.slots[1].begin(99)
    world.slots[1].data[:] = bytes(len(world.slots[1].data))
    world.root_busy.set()
    world.uploader.finish()
    assert world.rooted == {1: expected(1)}


def test_a_folder_keeps_what_the_root_has_not_yet_got(world: World) -> None:
    # The root is slow: meanwhile newer snapshots are complete in the folder, which keeps one.
    world.root_busy.clear()
    for step in (1, 2, 3):
        world.take(step, ("local",), root=True)
        until(lambda step=step: ShardStored(step, "local") in world.sent)
        world.complete("local", step)
    world.root_busy.set()
    world.uploader.finish()
    assert world.rooted == {step: expected(step) for step in (1, 2, 3)}


def test_where_a_folder_gives_no_descriptor_the_slot_is_read(tmp_path: Path) -> None:
    world = World(f"fsspec+file://{tmp_path}/folder")
    world.root_busy.clear()
    world.take(1, ("local",), root=True)
    until(lambda: ShardStored(1, "local") in world.sent)
    assert not world.freed(1)
    world.root_busy.set()
    until(lambda: world.freed(1))
    assert world.rooted == {1: expected(1)}
    world.close()


def test_a_folder_that_fails_leaves_the_root_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("not a folder")
    world = World(str(tmp_path / "folder"))
    world.take(1, ("memory", "local"), root=True)
    until(lambda: world.freed(1))
    assert world.rooted == {1: expected(1)}
    assert ShardStored(1, "memory") in world.sent
    assert [m.tier for m in world.sent if isinstance(m, ShardStored) and m.error] == ["local"]
    world.close()


def test_no_peer_is_told(world: World) -> None:
    world.take(1, ("peer",))
    until(lambda: world.freed(1))
    failed = [m for m in world.sent if isinstance(m, ShardStored) and m.error]
    assert [(m.tier, m.error["kind"]) for m in failed] == [("peer", "no-peer")]


@pytest.mark.parametrize(("tier", "kept"), [("memory", 1), ("peer", 1), ("local", 0)])
def test_what_peers_keep_is_kept_by_its_owner_as_well(world: World, tier: str, kept: int) -> None:
    world.take(1, (tier,))
    assert len(world.near.memory.shares()) == kept


def test_worth_saving_is_the_newest_complete_one_and_what_is_later(world: World) -> None:
    for step in (1, 2, 3):
        world.take(step, ("memory",))
    assert world.worth() == [3, 2, 1]
    world.complete("memory", 2)
    assert world.worth() == [3, 2]
    world.uploader.settled(Settled("memory", 3, 1, complete=False))
    until(lambda: world.near.is_lost("memory", CommitName(3, 1)))
    assert world.worth() == [2]
    world.slots[2].begin(9)
    assert world.worth() == [1], "the newest complete one is overwritten"


def test_a_snapshot_that_failed_on_one_tier_only_may_be_complete_on_another(world: World) -> None:
    world.take(1, ("memory", "peer"))
    world.uploader.settled(Settled("peer", 1, 1, complete=False))
    until(lambda: world.near.is_lost("peer", CommitName(1, 1)))
    assert world.worth() == [1]
