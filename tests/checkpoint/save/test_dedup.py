"""ChunkDedup chunks are referred to: what is written, what is read, and what may be deleted."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName, commit_key, part_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.save import dedup as referring
from ckptd.checkpoint.save.dedup import FIRST_OFF, MOST_FOLDERS, PATIENCE
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import Extra
from ckptd.errors import ConflictError, SaveError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.save.referring import (
    CHUNK,
    ROWS,
    SHAPES,
    assert_holds,
    assert_verified,
    is_held,
    own_bytes,
)
from tests.checkpoint.save.saving import Job, Keep, fill, plan_of, values
from tests.processes import PATIENCE_S, until

RECOVER = Path(__file__).parents[3] / "docs/recover.py"
_numbers = itertools.count()


@pytest.fixture
def store() -> Iterator[Store]:
    name = f"refer{next(_numbers)}"
    yield MemoryStore(name)
    forget_memory(name)


def job_of(store: Store, **options: Any) -> Job:
    return Job(StoreSpec("memory://unused"), store=store, plan=plan_of(SHAPES), **options)


def other(arrays: dict[str, Any], *names: str, seed: int = 0) -> dict[str, Any]:
    """Return the arrays with some of them changed."""
    fresh = values(1000 + seed, {n: SHAPES[n] for n in names})
    return arrays | fresh


def saved(job: Job, step: int, arrays: dict[str, Any], **options: Any) -> CommitName:
    job.save(step, arrays, **options).durable(PATIENCE_S)
    return CommitName(step, job.generation)


def test_only_what_changed_is_written(store: Store) -> None:
    job = job_of(store)
    first = values(1, SHAPES)
    second = other(first, "hot", "small")
    names = [saved(job, 1, first), saved(job, 2, second)]
    manifest = job.catalogue.manifest(names[1])
    assert own_bytes(manifest) == CHUNK + 64
    assert len(manifest.files) == 2
    assert job.catalogue.commit(names[1]).folders == tuple(
        sorted(job.catalogue.commit(n).folder for n in names)
    )
    for name, arrays in zip(names, (first, second), strict=True):
        assert_holds(store, name, arrays)
        assert_verified(store, name)
    job.close()
    assert not is_held(store)


def test_a_state_that_did_not_change_is_a_manifest_and_no_file(store: Store) -> None:
    shapes = {n: s for n, s in SHAPES.items() if n != "small"}
    job = job_of(store)
    job.plan = plan_of(shapes)
    arrays = values(1, shapes)
    saved(job, 1, arrays)
    name = saved(job, 2, arrays)
    manifest = job.catalogue.manifest(name)
    assert [bool(f.data_start) for f in manifest.files] == [False, True]
    assert_holds(store, name, arrays)
    assert_verified(store, name)
    assert_holds(
        store,
        saved(job, 3, arrays | values(2, {"hot": SHAPES["hot"]})),
        arrays | values(2, {"hot": SHAPES["hot"]}),
    )
    job.close()


def test_objects_of_private_size_are_written_each_time(store: Store) -> None:
    job = job_of(store)
    arrays = values(1, SHAPES)
    for step in (1, 2):
        body = b'"' + b"x" * (200_000 + step) + b'"'
        extra = (Extra("mine", len(body), "drop"),)
        job.save(step, arrays, [body], extra=extra).durable(PATIENCE_S)
    manifest = job.catalogue.manifest(CommitName(2, job.generation))
    assert own_bytes(manifest) == 64 + 200_004
    assert_verified(store, CommitName(2, job.generation))
    job.close()


def test_a_referred_folder_stays_when_its_checkpoint_goes_and_goes_with_the_last(
    store: Store,
) -> None:
    job = job_of(store)
    arrays = values(1, SHAPES)
    saved(job, 1, arrays, keep=Keep(last=1))
    name = saved(job, 2, other(arrays, "hot"), keep=Keep(last=1))
    job.client.close(60.0)  # retention comes after the commit
    job = job_of(store)
    assert job.catalogue.commits() == [name]
    assert len(store.children("data/")) == 2
    assert_holds(store, name, other(arrays, "hot"))
    last = values(9, SHAPES)
    name = saved(job, 3, last, keep=Keep(last=1))
    job.client.close(60.0)
    assert Catalogue(store).commits() == [name]
    assert len(store.children("data/")) == 1
    assert_holds(store, name, last)


def test_a_new_life_refers_to_what_the_old_one_wrote(store: Store) -> None:
    arrays = values(1, SHAPES)
    for step in (1, 2, 3):
        job = job_of(store)
        arrays = other(arrays, "hot", seed=step)
        name = saved(job, step, arrays)
        job.close()
    catalogue = Catalogue(store)
    assert own_bytes(catalogue.manifest(name)) == CHUNK + 64
    assert_holds(store, name, arrays)
    assert_verified(store, name)


def test_another_plan_refers_to_tensors_that_are_cut_alike(store: Store) -> None:
    job = job_of(store)
    arrays = values(1, SHAPES)
    saved(job, 1, arrays)
    more = SHAPES | {"adapter": (2 * ROWS, 512)}
    job.plan = plan_of(more)
    arrays |= values(2, {"adapter": more["adapter"]})
    name = saved(job, 2, arrays)
    assert own_bytes(job.catalogue.manifest(name)) == 2 * CHUNK + 64
    assert_holds(store, name, arrays)
    job.close()


def test_a_new_run_and_a_save_that_must_not_refer_write_everything(store: Store) -> None:
    arrays = values(1, SHAPES)
    job = job_of(store)
    saved(job, 1, arrays)
    name = saved(job, 2, arrays, refer=False)
    assert len(job.catalogue.commit(name).folders) == 1
    generation = job.catalogue.claim(None, 1, "fresh").generation
    job.close()
    job = job_of(store, generation=generation)
    assert len(job.catalogue.commit(saved(job, 1, arrays)).folders) == 1
    job.close()


def test_folders_stay_few_and_those_with_little_in_use_are_let_go(store: Store) -> None:
    job = job_of(store)
    arrays = values(0, SHAPES)
    hot = list(SHAPES)
    for step in range(1, 25):
        arrays = other(arrays, hot[step % len(hot)], seed=step)
        name = saved(job, step, arrays, keep=Keep(last=1))
        assert len(job.catalogue.commit(name).folders) <= MOST_FOLDERS
        assert_holds(store, name, arrays)
    job.close()
    catalogue = Catalogue(store)
    run_gc(store, plan_gc(catalogue, 1, leftover_s=0.0))
    used = {f.split("/")[1] + "/" for f in catalogue.commit(name).folders}
    assert set(store.children("data/")) == used
    held = sum(o.size for o in store.list("data/") if o.key.endswith(".safetensors"))
    # At least half of each old folder is needed, and the newest one is.
    assert held <= 2 * 7 * CHUNK + MOST_FOLDERS * 4096 + 2 * 7 * CHUNK // 2


def test_a_state_that_always_changes_is_searched_seldom(store: Store) -> None:
    watched = Fault(store, FaultSpec(()))
    job = job_of(watched)
    leased = []
    for step in range(1, PATIENCE + FIRST_OFF + 3):
        before = len(watched.operations)
        saved(job, step, values(step, SHAPES))
        ops = watched.operations[before:]
        leased.append(any(o.op == "put" and o.key.startswith("leases/") for o in ops))
    assert leased == [False] + [True] * PATIENCE + [False] * FIRST_OFF + [True]
    assert_holds(store, CommitName(step, job.generation), values(step, SHAPES))
    job.close()


# -- between the decision and the commit ----------------------------------------------------------


class Half:
    """A save whose bytes are copied and whose seal is missing: it has decided what to refer to."""

    def __init__(self, job: Job, step: int, arrays: dict[str, Any]) -> None:
        self.job = job
        save = job.request(step)
        total = job.plan.filemap.data_bytes(0)
        self.number = save.job
        self.handle = SaveTracker(step, job.generation, save.attempt, total)
        self.slot = job.client.acquire(total, 60.0)
        job.client.begin(save, job.plan, self.handle, f"save/{step}", self.slot)
        self.slot.staged = fill(job.plan, 0, arrays, self.slot.data)
        until(lambda: is_held(job.store))

    def finish(self) -> SaveTracker:
        self.job.client.seal(self.number, self.slot)
        return self.handle


def test_what_a_save_has_decided_to_refer_to_is_not_deleted_by_others(store: Store) -> None:
    job = job_of(store)
    arrays = values(1, SHAPES)
    names = [saved(job, 1, arrays), saved(job, 2, arrays)]
    half = Half(job, 3, arrays)
    other_process = Catalogue(store)
    other_process.rollback(1)
    run_gc(store, plan_gc(other_process, 1, abandoned_s=0.0))
    assert other_process.commits() == names  # the second is beside the line, and leased
    with pytest.raises(ConflictError) as caught:
        half.finish().durable(PATIENCE_S)
    assert caught.value.kind == "superseded"
    until(lambda: not is_held(store))
    run_gc(store, plan_gc(Catalogue(store), 1, abandoned_s=0.0))
    assert Catalogue(store).commits() == names[:1]
    assert_holds(store, names[0], arrays)
    job.close()


def test_a_save_fails_cleanly_when_what_it_refers_to_is_gone(store: Store) -> None:
    job = job_of(store)
    arrays = values(1, SHAPES)
    name = saved(job, 1, arrays)
    half = Half(job, 2, arrays)
    store.delete([commit_key(name)])  # nobody who keeps the rules does that
    with pytest.raises(SaveError) as caught:
        half.finish().durable(PATIENCE_S)
    assert "the checkpoint that this save refers to was deleted" in caught.value.message
    after = saved(job, 3, arrays)
    assert job.catalogue.commit(after).folders == (job.catalogue.commit(after).folder,)
    assert_holds(store, after, arrays)
    assert len(job.catalogue.commit(saved(job, 4, arrays)).folders) == 2
    job.close()
    assert not is_held(store)


def test_after_a_save_that_failed_one_is_written_whole(store: Store) -> None:
    """So that nothing about references can make save after save fail."""
    job = job_of(store)
    arrays = values(1, SHAPES)
    saved(job, 1, arrays)
    half = Half(job, 2, arrays)
    job.client.abandon(half.number, "no more")
    until(lambda: not is_held(store))
    names = [saved(job, step, arrays) for step in (3, 4)]
    assert [len(job.catalogue.commit(n).folders) for n in names] == [1, 2]
    for name in names:
        assert_holds(store, name, arrays)
    job.close()


def test_a_save_in_flight_keeps_what_an_overtaken_one_lets_go(store: Store) -> None:
    """Retention after one commit must not take what the next save has decided upon."""
    job = job_of(store)
    arrays = [values(1, SHAPES)]
    for step in range(1, 12):
        arrays.append(other(arrays[-1], "hot", seed=step))
    handles = [job.save(step, arrays[step], keep=Keep(last=1)) for step in range(1, 12)]
    for handle in handles:
        handle.durable(PATIENCE_S)
    job.close()
    assert_holds(store, CommitName(11, job.generation), arrays[11])


# -- several ranks --------------------------------------------------------------------------------


def ranks_of(store: Store, world: int, generation: int | None = None) -> list[Job]:
    plan = plan_of(SHAPES, world=world)
    board = LocalBoard(0, world)
    boards = [board, *(LocalBoard(r, world, board) for r in range(1, world))]
    jobs: list[Job] = []
    for b in boards:
        given = jobs[0].generation if jobs else generation
        jobs.append(
            Job(StoreSpec("memory://unused"), store=store, board=b, plan=plan, generation=given)
        )
    return jobs


def saved_by(jobs: list[Job], step: int, arrays: dict[str, Any], **options: Any) -> CommitName:
    for handle in [j.save(step, arrays, **options) for j in jobs]:
        handle.durable(PATIENCE_S)
    return CommitName(step, jobs[0].generation)


def test_all_ranks_refer_to_one_checkpoint(store: Store) -> None:
    jobs = ranks_of(store, 3)
    arrays = values(1, SHAPES)
    saved_by(jobs, 1, arrays)
    arrays = other(arrays, "hot", seed=5)
    name = saved_by(jobs, 2, arrays)
    manifest = jobs[0].catalogue.manifest(name)
    assert own_bytes(manifest) == CHUNK + 64
    assert len(manifest.files) == 6
    assert_holds(store, name, arrays)
    assert_verified(store, name)
    for job in jobs:
        job.close()
    jobs = ranks_of(store, 3)
    name = saved_by(jobs, 3, arrays)
    assert own_bytes(jobs[0].catalogue.manifest(name)) == 64
    assert_holds(store, name, arrays)
    for job in jobs:
        job.close()


def test_another_number_of_ranks_refers_to_what_is_cut_alike(store: Store) -> None:
    arrays = values(1, SHAPES)
    jobs = ranks_of(store, 3)
    saved_by(jobs, 1, arrays)
    for job in jobs:
        job.close()
    arrays = other(arrays, "hot", seed=5)
    jobs = ranks_of(store, 2)
    name = saved_by(jobs, 2, arrays)
    assert own_bytes(jobs[0].catalogue.manifest(name)) == CHUNK + 64
    assert_holds(store, name, arrays)
    assert_verified(store, name)
    for job in jobs:
        job.close()


def test_a_rank_that_hears_nothing_in_time_writes_everything(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ranks_of(store, 2)
    arrays = values(1, SHAPES)
    saved_by(jobs, 1, arrays)
    monkeypatch.setattr(referring, "ANNOUNCE_S", 0.05)
    late = jobs[1].save(2, arrays)  # rank 0 has not begun
    until(lambda: store.exists(part_key(jobs[1].request(2).folder, 1)))
    for handle in (jobs[0].save(2, arrays), late):
        handle.durable(PATIENCE_S)
    name = CommitName(2, jobs[0].generation)
    manifest = jobs[0].catalogue.manifest(name)
    assert [bool(f.data_bytes >= CHUNK) for f in manifest.files] == [False, True, True]
    assert_holds(store, name, arrays)
    assert_verified(store, name)
    for job in jobs:
        job.close()


def test_a_rank_whose_word_from_rank_0_is_damaged_fails_the_save(store: Store) -> None:
    class Liar(MemoryStore):
        def put(self, key: str, data: Any, **options: Any) -> None:
            super().put(key, b"?" if key.endswith("/parts/base") else data, **options)

    lying = Liar(store.url.removeprefix("memory://"))
    jobs = ranks_of(lying, 2)
    arrays = values(1, SHAPES)
    with pytest.raises(Exception, match="announcement of rank 0"):
        saved_by(jobs, 1, arrays)
    for job in jobs:
        job.close()


# -- readers that stand alone ---------------------------------------------------------------------


def test_the_recovery_script_reads_references(tmp_path: Path) -> None:
    job = Job(StoreSpec(str(tmp_path)), plan=plan_of(SHAPES))
    arrays = values(1, SHAPES)
    saved(job, 1, arrays)
    arrays = other(arrays, "hot")
    name = saved(job, 2, arrays)
    job.close()
    recover = runpy.run_path(str(RECOVER))["recover"]
    for key, array in arrays.items():
        found = recover(tmp_path / commit_key(name), key)
        assert np.array_equal(found, array), key
