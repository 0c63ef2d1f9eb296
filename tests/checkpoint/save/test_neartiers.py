"""Snapshots that a node keeps, and when older ones go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.neartiers import NodeTiers
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.errors import RefusedError, StoreError
from ckptd.store import StoreSpec
from tests.checkpoint.save import snapshotting
from tests.checkpoint.save.saving import plan_of, values
from tests.checkpoint.save.shares import content, save_for, shard_in, slot_for


@pytest.fixture
def near(tmp_path: Path) -> Iterator[NodeTiers]:
    near = NodeTiers()
    near.prepare((TierSpec("local", 2, StoreSpec(str(tmp_path / "folder"))),))
    yield near
    near.close()


def steps(store: object) -> list[int]:
    return sorted({int(k.split("/")[1][:12]) for k in content(store)})  # type: ignore[arg-type]


def in_folder(near: NodeTiers, *numbers: int) -> None:
    plan = plan_of()
    for step in numbers:
        snapshotting.put_share(near.store("local"), plan, 0, values(step), CommitName(step, 1))


def test_what_is_not_there_is_said() -> None:
    near = NodeTiers()
    with pytest.raises(StoreError) as caught:
        _ = near.store("local")
    assert "the local tier of this node's agent has no folder" in caught.value.message
    with pytest.raises(StoreError) as caught:
        _ = near.store("peer")
    assert caught.value.kind == "no-peer"
    near.close()


def test_a_peer_of_an_earlier_generation_is_tried_no_more_when_there_is_none() -> None:
    # Each save waited a second for a node that was gone, and held a slot meanwhile.
    near = NodeTiers()
    near.set_peer("http://127.0.0.1:1", "s" * 32)
    assert near.store("peer")
    near.set_peer("", "")
    with pytest.raises(StoreError) as caught:
        _ = near.store("peer")
    assert caught.value.kind == "no-peer"
    near.close()


def test_a_folder_keeps_the_newest_complete_ones_and_what_is_newer(near: NodeTiers) -> None:
    in_folder(near, 1, 2, 3, 4, 5)
    near.completed("local", CommitName(1, 1))
    assert steps(near.store("local")) == [1, 2, 3, 4, 5]
    near.completed("local", CommitName(2, 1))
    assert steps(near.store("local")) == [1, 2, 3, 4, 5]
    near.completed("local", CommitName(4, 1))
    assert steps(near.store("local")) == [2, 3, 4, 5]
    near.completed("local", CommitName(2, 1))
    assert steps(near.store("local")) == [2, 3, 4, 5]


def test_a_folder_keeps_what_the_life_before_left_until_there_is_as_much(near: NodeTiers) -> None:
    """This life does not know that step 1 is complete, and must not delete it for step 2 alone."""
    in_folder(near, 1, 2)
    near.completed("local", CommitName(2, 1))
    assert steps(near.store("local")) == [1, 2]


def test_a_folder_keeps_the_newest_ones_whichever_is_known_first(near: NodeTiers) -> None:
    in_folder(near, 1, 2, 3)
    near.completed("local", CommitName(3, 1))
    near.completed("local", CommitName(2, 1))
    assert steps(near.store("local")) == [2, 3]
    assert near.newest("local") == CommitName(3, 1)


def test_what_is_used_stays(near: NodeTiers) -> None:
    in_folder(near, 1, 2, 3)
    with near.using(save_folder(1)):
        for step in (2, 3):
            near.completed("local", CommitName(step, 1))
        assert steps(near.store("local")) == [1, 2, 3]
    in_folder(near, 4)
    near.completed("local", CommitName(4, 1))
    assert steps(near.store("local")) == [3, 4]


def save_folder(step: int) -> str:
    return snapshotting.save_of(CommitName(step, 1), "0001", plan_of()).folder


def test_a_life_that_names_another_folder_gets_it(near: NodeTiers, tmp_path: Path) -> None:
    old = near.store("local")
    other = StoreSpec(str(tmp_path / "other"))
    near.prepare((TierSpec("local", 1, other),))
    near.prepare((TierSpec("local", 1, other),))
    assert near.store("local").url == str(tmp_path / "other")
    old.put("data/x", b"an old lane may still write")


@pytest.mark.parametrize(
    ("tiers", "complete", "left"),
    [
        (["memory"], {"memory": 3}, [3]),
        (["peer"], {"peer": 2}, [2, 3]),
        (["memory", "peer"], {"memory": 3}, [1, 2, 3]),
        (["memory", "peer"], {"memory": 3, "peer": 2}, [2, 3]),
        (["memory", "peer"], {"memory": 3, "root": 2}, [2, 3]),
        (["memory", "peer"], {"memory": 3, "peer": 2, "root": 3}, [3]),
    ],
)
def test_own_shares_stay_that_any_tier_needs(
    near: NodeTiers, tiers: list[str], complete: dict[str, int], left: list[int]
) -> None:
    near.prepare(tuple(TierSpec(tier) for tier in tiers))
    plan = plan_of()
    slots = [slot_for(plan, number=n) for n in range(3)]
    for step, slot in enumerate(slots, 1):
        near.memory.keep(shard_in(slot, save_for(plan, step), plan))
    for tier, step in complete.items():
        near.completed(tier, CommitName(step, 1))
    assert steps(near.memory) == left
    near.memory.close()
    for slot in slots:
        slot.close()


def test_guests_go_when_a_newer_one_is_complete_or_theirs_never_will_be(near: NodeTiers) -> None:
    plan = plan_of()
    for step in (1, 2, 3):
        snapshotting.put_share(near.memory, plan, 0, values(step), CommitName(step, 1))
    near.lost("memory", CommitName(3, 1))
    assert steps(near.memory) == [1, 2, 3]
    near.lost("peer", CommitName(3, 1))
    assert steps(near.memory) == [1, 2]
    near.completed("memory", CommitName(2, 1))
    assert steps(near.memory) == [1, 2], "memory does not survive what a peer does"
    near.completed("peer", CommitName(2, 1))
    near.lost("peer", CommitName(2, 1))
    assert steps(near.memory) == [2], "it is complete, whoever says otherwise"
    near.completed("root", CommitName(5, 1))
    assert steps(near.memory) == []


def test_what_is_there_of_another_root_goes(near: NodeTiers) -> None:
    plan = plan_of()
    near.belongs("one")
    snapshotting.put_share(near.memory, plan, 0, values(9), CommitName(9, 1))
    near.completed("peer", CommitName(9, 1))
    near.belongs("one")
    assert steps(near.memory) == [9]
    near.belongs("two")
    assert steps(near.memory) == []
    assert near.newest("peer") is None


def test_other_nodes_put_and_read_and_delete_nothing(near: NodeTiers, tmp_path: Path) -> None:
    memory, local, secret = near.serve("127.0.0.1")
    with StoreSpec(memory, {"secret": secret}).open() as guest:
        guest.put("data/x/r", b"1")
        for refused in (lambda: guest.delete(["data/x/r"]), lambda: guest.put("other", b"1")):
            with pytest.raises(StoreError, match="does not allow"):
                refused()
        assert guest.get("data/x/r") == b"1"
    with StoreSpec(local, {"secret": secret}).open() as folder, pytest.raises(RefusedError):
        folder.put("data/x/r", b"1")


def test_what_a_death_left_goes_with_its_attempt(near: NodeTiers, tmp_path: Path) -> None:
    in_folder(near, 1, 2, 3)
    (attempt,) = (tmp_path / "folder" / "data").glob("000000000001-*")
    (attempt / "parts" / f"~{0:024x}.put").write_bytes(b"half")
    for step in (2, 3):
        near.completed("local", CommitName(step, 1))
    assert not attempt.exists()
