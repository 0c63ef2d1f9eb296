"""The writing process: what it finishes, what it gives up, and who hears of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.save.messages import AbortSave, Freed, Response, ShardStored
from ckptd.checkpoint.save.writer import SaveWriter
from ckptd.errors import CkptdError, ConflictError, DeadlineError, ProcessError, SaveError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.store.memory import MemoryStore
from tests.checkpoint.save.saving import Blob, Extra, Job, fill, plan_of, values
from tests.processes import PATIENCE_S, stop, until, wait_for_end


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def test_a_save_becomes_durable_and_readable(root: str) -> None:
    job = Job(StoreSpec(root))
    arrays = values(1)
    handle = job.save(10, arrays, metadata={"loss": 0.5})
    handle.durable(PATIENCE_S)
    assert handle.progress.phase == "durable"
    name = CommitName(10, job.generation)
    assert job.catalogue.latest() == name
    assert job.catalogue.commit(name).metadata == {"loss": 0.5}
    manifest = job.catalogue.manifest(name)
    file = manifest.files[0]
    raw = (Path(root) / file.path).read_bytes()[file.data_start :]
    expected = bytearray(file.data_bytes)
    fill(job.plan, 0, arrays, memoryview(expected))
    assert raw == bytes(expected)
    job.client.close(PATIENCE_S)
    assert not [k for k in job.store.list() if "/parts/" in k.key]
    job.close()


def test_a_memory_store_is_written_by_a_thread() -> None:
    store = MemoryStore("client-test")
    job = Job(StoreSpec("memory://unused"), store=store)
    job.save(1, values(1)).durable(PATIENCE_S)
    assert job.client.pid == os.getpid()
    assert job.catalogue.latest() == CommitName(1, job.generation)
    job.client.close(PATIENCE_S)


def test_ranks_commit_together(root: str) -> None:
    boards = [LocalBoard(0, 3)]
    boards += [LocalBoard(r, 3, boards[0]) for r in (1, 2)]
    first = Job(StoreSpec(root), board=boards[0])
    jobs = [first] + [
        Job(StoreSpec(root), board=b, generation=first.generation) for b in boards[1:]
    ]
    arrays = values(3)
    handles = [j.save(5, arrays) for j in jobs]
    for h in handles:
        h.durable(PATIENCE_S)
    manifest = first.catalogue.manifest(CommitName(5, first.generation))
    assert manifest.world_size == 3
    for j in jobs:
        j.close()


def test_one_failing_rank_fails_the_save_for_all(root: str) -> None:
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    full = CkptdError.from_dict({"class": "StoreError", "message": "disk full", "kind": "no-space"})
    rule = FaultRule("error", op="write", error=full.to_dict())
    broken = StoreSpec(root).wrapped(FaultSpec((rule,)))
    first = Job(StoreSpec(root), board=boards[0])
    second = Job(broken, board=boards[1], generation=first.generation)
    arrays = {"big": np.zeros((1 << 20, 4), dtype=np.float32)}
    shapes = {"big": (1 << 20, 4)}
    for j in (first, second):
        j.plan = plan_of(shapes, world=2)
    handles = [j.save(5, arrays) for j in (first, second)]
    for h in handles:
        with pytest.raises(CkptdError, match="disk full"):
            h.durable(PATIENCE_S)
    assert first.catalogue.latest() is None
    for j in (first, second):
        j.close()


def test_a_worker_that_cannot_open_the_store_says_why(tmp_path: Path) -> None:
    job = Job(StoreSpec(str(tmp_path / "root")))
    job.close()
    client = WriterClient(StoreSpec("nosuchscheme://x"), LocalBoard())
    handle = SaveTracker(1, 1, "0001", 0)
    with contextlib.suppress(ProcessError):  # it may be known already
        client.begin(job.request(1), job.plan, handle, "k", client.acquire(8, PATIENCE_S))
    with pytest.raises(ProcessError) as caught:
        handle.durable(PATIENCE_S)
    assert "nosuchscheme" in str(caught.value)
    client.close(PATIENCE_S)


def test_a_trainer_that_dies_in_mid_copy_leaves_nothing_visible(root: str) -> None:
    script = """
        import os, signal, sys
        sys.path.insert(0, {top!r})
        from ckptd.store import StoreSpec
        from ckptd.checkpoint.save.handle import SaveTracker
        from tests.checkpoint.save.saving import Job
        job = Job(StoreSpec({root!r}))
        slot = job.client.acquire(job.plan.filemap.data_bytes(0), 60.0)
        job.client.begin(job.request(1), job.plan, SaveTracker(1, 1, "0001", 1), "k", slot)
        slot.staged = 100
        print(job.client.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    worker = run_and_get_worker(script, root)
    wait_for_end(worker)
    assert Catalogue(StoreSpec(root).open()).latest() is None


def test_what_was_staged_completely_outlives_the_trainer(root: str) -> None:
    script = """
        import os, signal, sys
        sys.path.insert(0, {top!r})
        from ckptd.store import StoreSpec
        from tests.checkpoint.save.saving import Job, values
        from tests.processes import stop
        job = Job(StoreSpec({root!r}))
        stop(job.client.pid)
        job.save(7, values(1))
        print(job.client.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    worker = run_and_get_worker(script, root)
    catalogue = Catalogue(StoreSpec(root).open())
    assert catalogue.latest() is None
    os.kill(worker, signal.SIGCONT)
    wait_for_end(worker)
    assert catalogue.latest() == CommitName(7, 1)


def run_and_get_worker(script: str, root: str) -> int:
    top = str(Path(__file__).parents[3])
    text = textwrap.dedent(script).format(top=top, root=root)
    # Its standard error is not a pipe: the worker inherits it and would hold the pipe open.
    ended = subprocess.run(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    return int(ended.stdout)


def test_a_missing_rank_ends_the_wait_by_name(root: str) -> None:
    boards = [LocalBoard(0, 2)]
    job = Job(StoreSpec(root), board=boards[0])
    handle = job.save(1, values(1), timeout_s=1.0)
    with pytest.raises(DeadlineError) as caught:
        handle.durable(PATIENCE_S)
    assert "ranks did not write their part in time" in caught.value.message
    assert "[1]" in (caught.value.found or "")
    job.close()


def test_a_zombie_is_told_that_it_is_superseded(root: str) -> None:
    job = Job(StoreSpec(root))
    job.save(1, values(1)).durable(PATIENCE_S)
    newer = job.catalogue.claim(job.catalogue.latest(), 1, "resume")
    with pytest.raises(ConflictError) as caught:
        job.save(2, values(2), attempt="0002").durable(PATIENCE_S)
    assert caught.value.kind == "superseded"
    assert str(newer.generation) in caught.value.message
    assert job.catalogue.latest() == CommitName(1, job.generation)
    job.close()


def test_the_same_step_twice_has_one_winner(root: str) -> None:
    job = Job(StoreSpec(root))
    job.save(1, values(1)).durable(PATIENCE_S)
    with pytest.raises(ConflictError) as caught:
        job.save(1, values(2), attempt="0002").durable(PATIENCE_S)
    assert "was committed by this run already, in an earlier save" in caught.value.message
    job.close()


def two_ranks(root: str) -> list[Job]:
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    first = Job(StoreSpec(root), board=boards[0])
    return [first, Job(StoreSpec(root), board=boards[1], generation=first.generation)]


def begun(job: Job, step: int) -> tuple[int, SaveTracker]:
    """Begin a save that is never sealed; return its job's number and its handle."""
    save = job.request(step)
    total = job.plan.filemap.data_bytes(job.board.rank)
    handle = SaveTracker(step, job.generation, save.attempt, total)
    slot = job.client.acquire(total, PATIENCE_S)
    job.client.begin(save, job.plan, handle, f"save/{step}/{save.attempt}", slot)
    return save.job, handle


def test_a_refused_save_keeps_its_reason_however_fast_the_writer_answers(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(StoreSpec(root))
    number, handle = begun(job, 1)
    send = job.client._send

    def slow(message: object, fd: int | None = None) -> None:
        send(message, fd)  # type: ignore[arg-type]
        if isinstance(message, AbortSave):
            assert handle.wait_done(PATIENCE_S)  # by the writer's answer

    monkeypatch.setattr(job.client, "_send", slow)
    cause = SaveError("2 tensors changed before they were copied", kind="mutated", where="w")
    job.client.abandon(number, "copying failed", cause)
    error = handle.error
    assert isinstance(error, SaveError)
    assert error.to_dict() == cause.to_dict()
    monkeypatch.undo()
    job.close()


def test_the_reason_of_another_rank_reaches_all(root: str) -> None:
    jobs = two_ranks(root)
    (_, first), (number, second) = begun(jobs[0], 1), begun(jobs[1], 1)
    cause = SaveError("2 tensors changed", kind="mutated", where="w", hint="wait")
    jobs[1].client.abandon(number, "copying failed", cause)
    for handle in (first, second):
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
        assert (caught.value.kind, caught.value.where) == ("mutated", "w")
        assert caught.value.hint == "wait"
    assert "rank 1 failed" in str(first.error)
    for job in jobs:
        job.close()


def test_drifting_replicas_are_named(root: str) -> None:
    jobs = two_ranks(root)
    bodies = [b'{"model.w":"aa","step":"11"}', b'{"model.w":"bb","step":"11"}']
    handles = []
    for job, body in zip(jobs, bodies, strict=True):
        blob = Blob(f"{job.board.rank:032x}", body, job.board.rank == 0)
        replicas = (("all:x", blob.digest),)
        handles.append(job.save(1, values(1), replicas=replicas, blobs=(blob,)))
    for h in handles:
        with pytest.raises(SaveError) as caught:
            h.durable(PATIENCE_S)
        assert caught.value.kind == "replicas-differ"
        assert caught.value.where == "model.w"
    for job in jobs:
        job.close()


def test_ranks_with_another_plan_are_named(root: str) -> None:
    jobs = two_ranks(root)
    jobs[1].plan = plan_of({"w": (64, 48)}, world=2)
    handles = [j.save(1, values(1)) for j in jobs]
    with pytest.raises(SaveError) as caught:
        handles[0].durable(PATIENCE_S)
    assert caught.value.kind == "structure"
    assert "[1]" in (caught.value.found or "")
    for job in jobs:
        job.close()


def test_private_sizes_become_tensors_of_the_manifest(root: str) -> None:
    jobs = two_ranks(root)
    handles = [
        j.save(
            1,
            values(1),
            [b"x" * (3 + j.board.rank)],
            extra=(Extra("rng", 3 + j.board.rank, "drop"),),
        )
        for j in jobs
    ]
    for h in handles:
        h.durable(PATIENCE_S)
    manifest = jobs[0].catalogue.manifest(CommitName(1, 1))
    tensor = next(t for t in manifest.tensors if t.name == "rng")
    assert (tensor.shape, tensor.dtype) == ((7,), "uint8")
    assert ObjectEntry("rng", tensor="rng", per_rank="drop") in manifest.objects
    for job in jobs:
        job.close()


def test_the_buffer_is_not_reused_before_it_is_written(root: str) -> None:
    job = Job(StoreSpec(root))
    stop(job.client.pid)
    first = job.save(1, values(1))
    with pytest.raises(SaveError) as caught:
        job.client.acquire(10, 0.05)
    assert "earlier saves still occupy the arena" in caught.value.message
    os.kill(job.client.pid, signal.SIGCONT)
    first.durable(PATIENCE_S)
    job.save(2, values(2), attempt="0002").durable(PATIENCE_S)
    assert [n.step for n in job.catalogue.line()] == [1, 2]
    job.close()


def test_progress_and_waiting_with_a_deadline(root: str) -> None:
    job = Job(StoreSpec(root))
    stop(job.client.pid)
    handle = job.save(1, values(1))
    handle.staged(0.0)
    with pytest.raises(DeadlineError):
        handle.durable(0.01)
    seen: list[str] = []
    watcher = threading.Thread(target=lambda: (handle.durable(PATIENCE_S), seen.append("done")))
    watcher.start()
    os.kill(job.client.pid, signal.SIGCONT)
    watcher.join(PATIENCE_S)
    assert seen == ["done"]
    job.close()


def test_abandoning_a_half_staged_save_frees_the_worker(root: str) -> None:
    job = Job(StoreSpec(root))
    handle = SaveTracker(1, job.generation, "0001", 0)
    slot = job.client.acquire(job.plan.filemap.data_bytes(0), PATIENCE_S)
    save = job.request(1)
    job.client.begin(save, job.plan, handle, "k", slot)
    job.client.abandon(save.job, "copying failed")
    with pytest.raises(SaveError, match="copying failed"):
        handle.durable(PATIENCE_S)
    job.save(2, values(2), attempt="0002").durable(PATIENCE_S)
    assert [n.step for n in job.catalogue.line()] == [2]
    job.close()


def test_a_slot_that_is_given_up_is_not_free_before_the_worker_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may still read there: bytes of the next save would go out under this one's name."""
    freed, plain = threading.Event(), SaveWriter.send

    def send(self: SaveWriter, message: Response) -> None:
        if isinstance(message, Freed):
            assert freed.wait(PATIENCE_S)
        plain(self, message)

    monkeypatch.setattr(SaveWriter, "send", send)
    job = Job(StoreSpec("memory://unused"), store=MemoryStore("client-test"))
    number, handle = begun(job, 1)
    job.client.abandon(number, "a tensor changed")
    assert handle.done
    with pytest.raises(SaveError, match="earlier saves still occupy the arena"):
        job.client.acquire(8, 0.0)
    freed.set()
    job.client.acquire(8, PATIENCE_S)
    job.close()


def test_the_newest_snapshot_in_memory_is_remembered_however_many_saves_follow() -> None:
    """An agent that comes in place of a dead one gets it from here."""
    job = Job(StoreSpec("memory://unused"), store=MemoryStore("client-test"), slots=2)
    save = job.request(1, near=("memory",))
    handle = SaveTracker(1, job.generation, "0001", 0, near=("memory",))
    total = job.plan.filemap.data_bytes(0)
    slot = job.client.acquire(total, PATIENCE_S)
    job.client.begin(save, job.plan, handle, "save/1", slot)
    slot.staged = fill(job.plan, 0, values(1), slot.data)
    job.client.seal(save.job, slot)
    job.client._handle(ShardStored(save.job, "memory"))  # as an agent would answer
    for step in range(2, 14):
        job.save(step, values(step)).durable(PATIENCE_S)
    assert len(job.client._jobs) < 12
    assert job.client.snapshot(1, job.generation, "0001") is not None
    job.close()


def test_a_taken_slot_is_never_handed_out(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger slot that could not be had leaves a gap in the numbers."""
    import ckptd.checkpoint.save.arena as arena

    job = Job(StoreSpec(root))
    job.client.close(PATIENCE_S)
    client = WriterClient(StoreSpec(root), LocalBoard(), slots=3)
    handle = SaveTracker(1, job.generation, "0001", 0)
    size = job.plan.filemap.data_bytes(0)
    first = client.acquire(size, PATIENCE_S)
    client.begin(job.request(1), job.plan, handle, "k", first)
    second = client.acquire(size, PATIENCE_S)
    save = msgspec.structs.replace(job.request(2), job=99)
    other = SaveTracker(2, job.generation, "0002", 0)
    client.begin(save, job.plan, other, "k2", second)
    client.abandon(1, "gives its slot back")
    until(lambda: 0 not in client._slots._taken)

    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(arena.os, "posix_fallocate", refuse)
        with pytest.raises(SaveError):
            client.acquire(2 * size, PATIENCE_S)
    assert other.error is None
    third = client.acquire(size, PATIENCE_S)
    assert third.number not in client._slots._taken
    assert third is not second
    client.abandon(99, "the end")
    client.close(PATIENCE_S)
    job.store.close()


@pytest.mark.parametrize("stuck", [False, True])
def test_a_worker_that_takes_nothing_more(
    root: str, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    job = Job(StoreSpec(root))
    job.save(1, values(1)).durable(PATIENCE_S)

    def broken(message: msgspec.Struct, fd: int | None = None) -> None:
        error = ProcessError("the other process has ended")
        raise error from (TimeoutError() if stuck else ConnectionResetError())

    monkeypatch.setattr(job.client._channel, "send", broken)
    if stuck:
        with pytest.raises(ProcessError):
            job.save(2, values(2))
        assert job.client.life == 1, "one that only takes nothing is not dead"
    else:
        job.save(2, values(2)).durable(PATIENCE_S)
        assert job.client.life == 2, "another one was not told what this one did not take"
    monkeypatch.undo()
    job.close()
