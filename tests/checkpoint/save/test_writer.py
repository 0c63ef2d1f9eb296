"""The writing process: what reaches the root of a save that fails or is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptd.base.runtime.channel import queue_pair
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save import writer
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.client import post_failure
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import Response, SaveRequest, Sealed
from ckptd.checkpoint.save.structure import RankPlan
from ckptd.checkpoint.save.writer import SaveWriter
from ckptd.errors import CkptdError, ConflictError, SaveError, StoreError
from ckptd.store import StoreSpec, open_store
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.osio import is_cached
from tests.checkpoint.save.nearjob import NearJob
from tests.checkpoint.save.saving import Job, fill, plan_of, values
from tests.processes import PATIENCE_S, until

ROWS = 6 << 20  # 24 MiB of float32: three slices


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    return str(tmp_path / "root")


def test_an_upload_of_a_save_that_is_given_up_ends_before_it_is_whole(root: str) -> None:
    job = NearJob(root, slots=1, throttle=4e6, agent_ttl_s=1.0)
    job.plan = plan_of({"w": (ROWS,)})
    handle = job.save(1, {"w": np.zeros(ROWS, np.float32)}, root=True)
    until(lambda: handle.progress.done_bytes > 0)
    assert handle.progress.done_bytes < 4 * ROWS
    job.client.abandon(1, "another rank failed")
    until(lambda: not job.client.busy)  # the slot is read no more
    found = [info.key for info in open_store(root).list("data/")]
    assert not [key for key in found if key.endswith(".safetensors")]
    assert job.catalogue.latest() is None
    agent = job.agent
    job.close()
    os.kill(agent, signal.SIGKILL)  # it would keep the snapshot in memory for another life


def test_what_was_saved_is_in_the_page_cache(root: str) -> None:
    """Written past it; a job that evaluates the newest checkpoint need not wait for the disk."""
    job = Job(StoreSpec(root), plan=plan_of({"w": (2 << 20,)}))
    job.save(1, {"w": np.ones(2 << 20, np.float32)}).durable(PATIENCE_S)
    job.close()
    (path,) = Path(root).glob("data/*/r00000.safetensors")
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        found = is_cached(file.fileno(), *range(0, info.st_size, 1 << 16))
    if found is None or not os.major(info.st_dev):
        pytest.skip("no disk of this host, or a kernel that does not say")
    assert found


def test_only_the_newest_save_is_read_behind(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that come faster than the disk gives them back must not queue up."""
    asked: list[Callable[[], bool]] = []
    monkeypatch.setattr(writer, "bring_into_cache", lambda _, wanted: asked.append(wanted))
    job = Job(StoreSpec(root), store=StoreSpec(root).open())  # a thread of this process writes
    for step in (1, 2):
        job.save(step, values(step)).durable(PATIENCE_S)
        until(lambda: len(asked) == step)  # noqa: B023 - asked within this round
    assert [wanted() for wanted in asked] == [False, True]
    job.close()


@pytest.mark.parametrize(
    ("world", "part", "read"), [(1, 2.1, True), (1, 2.0, False), (2, 8.1, True), (2, 8.0, False)]
)
def test_what_is_read_behind_leaves_room(
    root: str, monkeypatch: pytest.MonkeyPatch, world: int, part: float, read: bool
) -> None:
    """A rank that is alone takes less than half of the memory; one of several knows no others."""
    asked: list[str] = []
    monkeypatch.setattr(writer, "bring_into_cache", lambda path, _: asked.append(path))
    plan = plan_of({"w": (2 << 20,)}, world)
    share = RankPlan(plan, 0)
    assert share.data_bytes > share.small_bytes
    monkeypatch.setattr(writer, "available_bytes", lambda: int(share.data_bytes * part))
    worker = SaveWriter(queue_pair()[0])
    worker._store = StoreSpec(root).open()
    worker._bring_into_cache(SaveRequest(1, 1, "0001", job=1), share)
    worker._store.close()
    assert bool(asked) is read


def test_the_process_collects_nothing_of_what_it_imports() -> None:
    """A fifth of the processor time from its start to its end went there."""
    code = (
        "import gc, runpy, socket, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "ours.close()\n"
        "sys.argv[1:] = [str(theirs.detach())]\n"
        "runpy.run_module('ckptd.checkpoint.save.writer', run_name='__main__')\n"
        "few = gc.get_stats()[1]['collections'] <= 3\n"
        "print(few, gc.isenabled(), gc.get_freeze_count() > 10_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "True True True\n", done


def test_a_failure_is_reported_before_its_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next save may find a free slot, and begin as if the last one had gone well."""
    sent: list[str] = []
    plain = SaveWriter.send

    def send(self: SaveWriter, message: Response) -> None:
        sent.append(type(message).__name__)
        plain(self, message)

    def full(*args: object) -> None:
        raise StoreError("the disk is full", kind="no-space")

    monkeypatch.setattr(SaveWriter, "send", send)
    monkeypatch.setattr(writer, "drain", full)
    spec = StoreSpec("memory://failed-slot")
    job = Job(spec, store=spec.open())  # the writer is a thread of this process
    handle = job.save(1, values(1))
    until(lambda: not job.client.busy)
    with pytest.raises(StoreError, match="the disk is full"):
        handle.durable(PATIENCE_S)
    job.close()
    forget_memory("failed-slot")
    assert [name for name in sent if name in {"ShardStored", "Freed"}] == ["ShardStored", "Freed"]


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    """A store that only a thread of this process can write to."""
    yield MemoryStore("writer-test")
    forget_memory("writer-test")


def two_ranks(store: MemoryStore) -> list[Job]:
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    first = Job(StoreSpec(store.url), store=store, board=boards[0])
    generation = first.generation
    return [first, Job(StoreSpec(store.url), store=store, board=boards[1], generation=generation)]


def begun(job: Job, step: int) -> tuple[SaveRequest, Slot, SaveTracker]:
    """Begin a save of which nothing is copied yet."""
    save = job.request(step)
    total = job.plan.filemap.data_bytes(job.board.rank)
    handle = SaveTracker(step, job.generation, save.attempt, total)
    slot = job.client.acquire(total, PATIENCE_S)
    job.client.begin(save, job.plan, handle, f"save/{step}/{save.attempt}", slot)
    return save, slot, handle


def test_saves_in_a_queue_keep_their_own_plans_and_seals(memory: MemoryStore) -> None:
    """Those of later ones arrive while an earlier one is still copied."""
    job = Job(StoreSpec(memory.url), store=memory, slots=4)
    plans = [job.plan, plan_of({"w": (64, 48)}), plan_of({"b": (48,), "e": (0, 4)})]
    save, slot, handle = begun(job, 1)
    handles = [handle]
    for step, job.plan in enumerate(plans[1:], 2):
        handles.append(job.save(step, values(step)))
    slot.staged = fill(plans[0], 0, values(1), slot.data)
    job.client.seal(save.job, slot)
    for step, (plan, handle) in enumerate(zip(plans, handles, strict=True), 1):
        handle.durable(PATIENCE_S)
        manifest = job.catalogue.manifest(CommitName(step, job.generation))
        assert [t.name for t in manifest.tensors] == [t.name for t in plan.tensors]
        (file,) = manifest.files
        expected = bytearray(file.data_bytes)
        fill(plan, 0, values(step), memoryview(expected))
        assert memory.get(file.path)[file.data_start :] == expected
    job.close()


def test_a_slot_without_the_seal_of_its_save_is_not_written(memory: MemoryStore) -> None:
    job = Job(StoreSpec(memory.url), store=memory)
    save, slot, handle = begun(job, 1)
    slot.staged = fill(job.plan, 0, values(1), slot.data)
    job.client._send(Sealed(save.job))  # as if the slot had another save by now
    with pytest.raises(SaveError, match="died before its state was copied"):
        handle.durable(PATIENCE_S)
    assert job.catalogue.latest() is None
    job.close()


def test_a_slot_is_kept_until_what_only_it_holds_is_committed(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small save of one rank has no part from which another process could go on."""
    sent: list[str] = []
    plain = SaveWriter.send

    def send(self: SaveWriter, message: Response) -> None:
        sent.append(type(message).__name__)
        plain(self, message)

    monkeypatch.setattr(SaveWriter, "send", send)
    job = Job(StoreSpec(memory.url), store=memory)
    job.save(1, values(1)).durable(PATIENCE_S)
    job.close()
    ends = ["SaveCommitted", "Freed"]
    assert [name for name in sent if name in ends] == ends


def test_a_save_that_is_given_up_keeps_no_later_one_waiting(memory: MemoryStore) -> None:
    """Rank 0 would wait for the part of a rank that has none, and the next save behind it."""
    jobs = two_ranks(memory)
    handle = jobs[0].save(1, values(1), timeout_s=10 * PATIENCE_S)
    post_failure(jobs[1].board, "save/1/0001", SaveError("a tensor changed"))
    with pytest.raises(SaveError, match="a tensor changed"):
        handle.durable(PATIENCE_S)
    for later in [job.save(2, values(2)) for job in jobs]:
        later.durable(PATIENCE_S)
    for job in jobs:
        job.close()


def test_what_failed_is_neither_removed_nor_committed_by_a_survivor(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 could not commit; the trainers were told so, and died later."""

    def full(*args: object) -> None:
        raise StoreError("the disk is full", kind="no-space")

    def reported() -> list[str]:
        return [info.key for info in memory.list() if "/parts/r" in info.key]

    before = {*threading.enumerate()}
    jobs = two_ranks(memory)
    handles = [jobs[1].save(1, values(1))]
    until(reported)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "commit_attempt", full)
        handles.append(jobs[0].save(1, values(1)))
        for handle in handles:
            with pytest.raises(CkptdError, match="the disk is full"):
                handle.durable(PATIENCE_S)
    monkeypatch.setattr(writer, "TURN_S", 0.0)
    workers = [t for t in {*threading.enumerate()} - before if t.name == "ckptd-worker"]
    for job in jobs:
        job.client.leave()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert len(reported()) == 2
    assert jobs[0].catalogue.latest() is None


def test_nothing_is_written_to_another_root_at_the_same_place(memory: MemoryStore) -> None:
    jobs = two_ranks(memory)
    handle = jobs[1].save(1, values(1), root_id="0" * 32)
    with pytest.raises(ConflictError) as caught:
        handle.durable(PATIENCE_S)
    assert caught.value.kind == "other-root"
    for job in jobs:
        job.close()
    assert [*memory.list("data/")] == []
