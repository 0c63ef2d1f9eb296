"""Parts of thousands of ranks: some ranks join those of others, and a commit needs none of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.base.runtime.channel import queue_pair
from ckptd.base.torch import ranks
from ckptd.checkpoint.format.names import DATA, PARTS, CommitName, data_folder, part_key
from ckptd.checkpoint.save import commit, writer
from ckptd.checkpoint.save.commit import gather_parts, join_parts, joined_key, reported_key
from ckptd.checkpoint.save.messages import RankPart, SaveRequest, WriterHello
from ckptd.errors import CkptdError, CorruptError, DeadlineError, SaveError
from ckptd.store import StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.wrap import Meter
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.processes import PATIENCE_S, lives, until

FOLDER = data_folder(CommitName(1, 1), "0001")
WORLD, TOGETHER = 11, 4


@pytest.fixture(params=["lists", "asks by name"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """A store, of which the parts of four ranks are joined by the first of them."""
    monkeypatch.setattr(commit, "TOGETHER", TOGETHER)
    monkeypatch.setattr(commit, "_DIRECT_S", 0.1)
    store = MemoryStore(f"joined-{time.monotonic_ns()}")
    lists = request.param == "lists"
    store.capabilities = replace(store.capabilities, consistent_list=lists)  # type: ignore[misc]
    yield store
    store.close()


def report(store: MemoryStore, *reporting: int) -> None:
    for rank in reporting:
        store.put(reported_key(FOLDER, rank), RankPart(rank, "plan").encode())


def join(store: MemoryStore, first: int, timeout_s: float = 20.0) -> None:
    join_parts(store, FOLDER, first, WORLD, lambda: None, timeout_s)


def gather(store: Any, timeout_s: float = 20.0, world: int = WORLD) -> list[int]:
    return [p.rank for p in gather_parts(store, FOLDER, range(world), lambda: None, timeout_s)]


def test_the_parts_of_a_block_become_one(store: MemoryStore) -> None:
    report(store, *range(WORLD))
    with ThreadPoolExecutor(1) as committer:
        gathered = committer.submit(gather, store)
        join(store, 8)
        join(store, 4)
        assert gathered.result() == [*range(WORLD)]
    names = [f"j{first:05d}" for first in (4, 8)] + [f"r{rank:05d}" for rank in range(TOGETHER)]
    assert store.children(FOLDER + PARTS) == names


@pytest.mark.parametrize("late", [4, 6, 10])
def test_who_joins_waits_for_the_last_of_the_block(store: MemoryStore, late: int) -> None:
    report(store, *(set(range(WORLD)) - {late}))
    with pytest.raises(DeadlineError, match="did not write") as caught:
        join(store, late - late % TOGETHER, 0.05)
    assert caught.value.found == f"missing ranks [{late}]"
    assert not store.exists(joined_key(FOLDER, late))
    with ThreadPoolExecutor(1) as leader:
        joined = leader.submit(join, store, late - late % TOGETHER)
        report(store, late)
        joined.result()
    assert gather(store) == [*range(WORLD)]


def test_what_nobody_joins_is_read_all_the_same(store: MemoryStore) -> None:
    """As where the node is gone that should join it."""
    report(store, *range(WORLD))
    join(store, 4)
    assert gather(store) == [*range(WORLD)]


@pytest.mark.parametrize("missing", [(1,), (5,), (4, 10), (8, 9, 10)])
def test_missing_ranks_are_named_though_nobody_joins(
    store: MemoryStore, missing: tuple[int, ...]
) -> None:
    report(store, *(set(range(WORLD)) - {*missing}))
    with pytest.raises(DeadlineError) as caught:
        gather(store, 0.3)
    assert caught.value.found == f"missing ranks {[*missing]}"


def test_a_rank_that_failed_ends_the_wait_whoever_should_join(store: MemoryStore) -> None:
    report(store, 0, 1, 2, 3, 4)
    error = CkptdError("the disk is full", kind="no-space").to_dict()
    rank = 9 if store.capabilities.consistent_list else 2
    store.put(part_key(FOLDER, rank), RankPart(rank, "plan", error=error).encode())
    with pytest.raises(SaveError, match=f"rank {rank} failed: the disk is full"):
        gather(store)


@pytest.mark.parametrize("lie", ["other ranks", "none", "flipped", "cut off"])
def test_joined_parts_that_lie_are_refused(store: MemoryStore, lie: str) -> None:
    report(store, *range(TOGETHER))
    first = 5 if lie == "other ranks" else 4
    parts = [RankPart(rank, "plan") for rank in range(first, first + TOGETHER)]
    raw = bytearray(RankPart.join([] if lie == "none" else parts))
    if lie == "flipped":
        raw[9] ^= 1
    if lie == "cut off":
        del raw[-1]
    store.put(joined_key(FOLDER, 4), bytes(raw))
    wanted = SaveError if lie == "other ranks" else CorruptError
    with pytest.raises(wanted):
        gather(store)


def test_a_commit_of_thousands_reads_hundreds_of_objects() -> None:
    """One object a rank was 16,384 reads, and as many deletions."""
    world = range(3000)
    inner = MemoryStore(f"joined-{time.monotonic_ns()}")
    report(inner, *world)
    for first in world[1:]:
        join_parts(inner, FOLDER, first, len(world), lambda: None, PATIENCE_S)
    meter = Meter(inner)
    assert gather(meter, world=len(world)) == [*world]
    assert sum(m.calls for m in meter.snapshot().values()) <= 128 + 23 + 1
    assert len([*inner.list(FOLDER + PARTS)]) == 128 + 23
    inner.close()


@pytest.mark.parametrize("there", ["", "part", "joined", "commit", "error"])
def test_a_process_in_the_place_of_one_that_died_knows_that_its_part_was_joined(
    store: MemoryStore, there: str
) -> None:
    """Or it would write again what a commit is about to name."""
    worker = writer.SaveWriter(queue_pair()[0], store)
    worker._store, worker._hello = store, WriterHello(store.describe(), 6, WORLD)
    save = SaveRequest(1, 1, "0001", job=1, again=True)
    if there == "part":
        report(store, 6)
    elif there == "joined":
        report(store, 4, 5, 6, 7)
        join(store, 4)
    elif there == "commit":
        store.put("commits/000000000001-g00000001.json", b"{}")
    elif there == "error":
        error = CkptdError("the disk is full", kind="no-space").to_dict()
        store.put(part_key(FOLDER, 6), RankPart(6, "plan", error=error).encode())
        with pytest.raises(CkptdError, match="the disk is full"):
            worker._is_reported(save)
        return
    assert worker._is_reported(save) == bool(there)


# -- gloo ranks ------------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    own = ckptd.PerRank(torch.distributed.get_rank(), on_change="drop")
    return {"w": torch.full((1000,), float(step)), "own": own}


def checkpointer(root: str, timeout_s: float = PATIENCE_S) -> ckptd.Checkpointer:
    """In a rank of a job in which each second rank joins the parts of the next one."""
    ranks._FAN = commit.TOGETHER = 2
    return ckptd.Checkpointer(root, timeout_s=timeout_s)


def save_and_load(root: str) -> tuple[set[str], int, int]:
    ck = checkpointer(root)
    read: set[str] = set()
    peek = commit._peek

    def seen(store: Any, key: str) -> Any:
        read.add(key.rpartition("/")[2])
        return peek(store, key)

    commit._peek = seen
    for step in (1, 2, 3):
        ck.save(step, state(step)).durable(PATIENCE_S)
    loaded = state(0)
    step = ck.load(loaded)
    assert torch.equal(loaded["w"], state(3)["w"])
    ck.close()
    return read, step, loaded["own"].value


def save_beside_the_dead(root: str, dying: int, reports: bool) -> tuple[str, str]:
    rank = torch.distributed.get_rank()
    ck = checkpointer(root)
    commit._DIRECT_S = 0.5
    ck.save(1, state(1)).durable(PATIENCE_S)
    torch.distributed.barrier()
    if not reports:
        ck._timeout_s = 12.0  # in which all others write the second one
    store, pid = StoreSpec(root).open(), Path(root).with_name("pid")
    if rank == dying:
        pid.with_name("~pid").write_text(str(os.getpid()))
        pid.with_name("~pid").rename(pid)
        if reports:
            ck.save(2, state(2))
            mine = f"/more/{rank:05d}/r{rank:05d}"
            until(lambda: any(o.key.endswith(mine) for o in store.list(f"{DATA}")))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == dying + 1:  # whose part the other should join with its own
        until(lambda: pid.exists() and not lives(int(pid.read_text())))
    try:
        ck.save(2, state(2)).durable(PATIENCE_S)
    except CkptdError as error:
        return error.message, str(error.found)
    return "saved", ""


@pytest.mark.dist
@pytest.mark.usefixtures("writing_thread")
@pytest.mark.parametrize("world", [3, 8])
def test_ranks_save_and_load(tmp_path: Path, world: int) -> None:
    root = tmp_path / "root"
    found = run_ranks(world, save_and_load, str(root))
    assert [(step, own) for _, step, own in found] == [(3, rank) for rank in range(world)]
    assert {*found[0][0]} >= {f"j{rank:05d}" for rank in range(2, world, 2)}
    assert not [*root.glob("data/*/parts/*")]


@pytest.mark.dist
@pytest.mark.usefixtures("writing_thread")
@pytest.mark.parametrize("dying", [4])
def test_a_commit_needs_no_rank_that_has_reported(tmp_path: Path, dying: int) -> None:
    """The rank that should join the parts of others is killed, with the process that writes."""
    found = rank_outcomes(
        6, save_beside_the_dead, str(tmp_path / "root"), dying, True, grace_s=PATIENCE_S
    )
    assert {r: f.value for r, f in enumerate(found) if r != dying} == {
        rank: ("saved", "") for rank in range(6) if rank != dying
    }


@pytest.mark.dist
@pytest.mark.usefixtures("writing_thread")
@pytest.mark.parametrize("dying", [2, 3])
def test_a_rank_that_dies_is_named_by_all(tmp_path: Path, dying: int) -> None:
    found = rank_outcomes(
        5, save_beside_the_dead, str(tmp_path / "root"), dying, False, grace_s=PATIENCE_S
    )
    said = {f.value for r, f in enumerate(found) if r != dying}
    assert said == {("ranks did not write their part in time", f"missing ranks [{dying}]")}
