"""A writing process or an agent that is killed: what its trainers still hold goes to the next."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from ckptd.base.runtime.agentlink import reach
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.checkpoint.save.messages import AskStatus, visit
from ckptd.errors import ProcessError
from ckptd.store import StoreSpec
from ckptd.store.base import ThrottleSpec
from tests.checkpoint.save.nearjob import NearJob, Trainer, newest_at
from tests.checkpoint.save.saving import Job, fill, plan_of, values
from tests.processes import PATIENCE_S, stop, until


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    return str(tmp_path / "root")


def kill(client: WriterClient) -> None:
    """SIGKILL the writing process, and wait until there is another one."""
    life = client.life
    os.kill(client.pid, signal.SIGKILL)
    until(lambda: client.life > life)


def stored(job: Job, step: int) -> bytes:
    """Return what the checkpoint of a step holds of rank 0."""
    file = job.catalogue.manifest(CommitName(step, job.generation)).files[0]
    return job.store.get(file.path)[file.data_start :]


def expected(job: Job, seed: int) -> bytes:
    data = bytearray(job.plan.filemap.data_bytes(0))
    fill(job.plan, 0, values(seed), memoryview(data))
    return bytes(data)


# --- a process of its own ---------------------------------------------------------------------


def test_a_save_that_is_being_written_is_written_by_another(root: str) -> None:
    slow = StoreSpec(root).wrapped(ThrottleSpec(write_bytes_per_s=8000.0))
    job = Job(slow)
    handle = job.save(1, values(1))
    until(lambda: handle.progress.done_bytes > 0 or handle.done)
    kill(job.client)
    handle.durable(PATIENCE_S)
    assert stored(job, 1) == expected(job, 1)
    job.close()


def test_an_idle_process_that_dies_is_nobodys_concern(root: str) -> None:
    job = Job(StoreSpec(root))
    for step in (1, 2, 3):
        job.save(step, values(step)).durable(PATIENCE_S)
        kill(job.client)
    job.save(4, values(4)).durable(PATIENCE_S)
    assert [stored(job, step) for step in (1, 2, 3, 4)] == [expected(job, n) for n in (1, 2, 3, 4)]
    job.close()


def test_what_is_reported_already_is_not_written_anew(root: str) -> None:
    """The committer may have read the part: the file that it tells of must stay as it is."""
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    first = Job(StoreSpec(root), board=boards[0])
    second = Job(StoreSpec(root), board=boards[1], generation=first.generation)
    handle = first.save(5, values(5))
    folder = until(
        lambda: next((k.key for k in first.store.list("data/") if "parts/r00000" in k.key), "")
    )
    file = Path(root) / (folder.partition("parts/")[0] + "r00000.safetensors")
    before = (file.stat().st_ino, file.stat().st_mtime_ns)
    kill(first.client)
    second.save(5, values(5)).durable(PATIENCE_S)
    handle.durable(PATIENCE_S)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    for job in (first, second):
        job.close()


def test_a_rank_that_has_written_is_not_missed(root: str) -> None:
    """Rank 1's process dies between its part and rank 0's commit."""
    boards = [LocalBoard(0, 2)]
    boards.append(LocalBoard(1, 2, boards[0]))
    first = Job(StoreSpec(root), board=boards[0])
    second = Job(StoreSpec(root), board=boards[1], generation=first.generation)
    other = second.save(5, values(5))
    until(lambda: other.progress.phase == "committing")
    kill(second.client)
    first.save(5, values(5)).durable(PATIENCE_S)
    other.durable(PATIENCE_S)
    for job in (first, second):
        job.close()


def test_a_plan_reaches_the_process_that_writes_by_it(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies between a plan and the save takes the plan along: the next has no other."""
    job = Job(StoreSpec(root))
    begin = Slot.begin

    def late(slot: Slot, number: int) -> None:
        kill(job.client)
        begin(slot, number)

    monkeypatch.setattr(Slot, "begin", late)
    for step, job.plan in enumerate((plan_of(), plan_of({"w": (64, 48)})), 1):
        job.save(step, values(step), timeout_s=5.0).durable(PATIENCE_S)
        assert stored(job, step) == expected(job, step)
    job.close()


def test_a_save_whose_processes_all_die_is_given_up(root: str) -> None:
    """Perhaps it is why they do: nobody tries for ever."""
    job = Job(StoreSpec(root).wrapped(ThrottleSpec(write_bytes_per_s=500.0)))
    handle = job.save(1, values(1))
    while not handle.done:
        life = job.client.life
        os.kill(job.client.pid, signal.SIGKILL)
        until(lambda life=life: handle.done or job.client.life > life)
    assert isinstance(handle.error, ProcessError)
    assert "died repeatedly" in handle.error.message
    assert newest_at(root) == 0
    job.close()


def test_saves_go_on_while_processes_are_killed(root: str) -> None:
    """At any moment: each save is durable, and is what was saved."""
    job = Job(StoreSpec(root))
    handles: list[SaveHandle] = []
    rng = np.random.default_rng(1)
    for step in range(1, 13):
        timer = None
        if step % 3 == 0:
            timer = threading.Timer(float(rng.uniform(0.0, 0.05)), kill, (job.client,))
            timer.start()
        handles.append(job.save(step, values(step)))
        handles[-1].durable(PATIENCE_S)
        if timer is not None:
            timer.join()
    for step in range(1, 13):
        assert stored(job, step) == expected(job, step)
    job.close()


# --- the agent of a node ----------------------------------------------------------------------


def test_an_agent_that_is_killed_takes_no_snapshot_along(root: str) -> None:
    job = NearJob(root)
    for step in (1, 2, 3):
        job.save(step).durable(PATIENCE_S, tier="memory")
    kill(job.client)
    assert until(lambda: job.snapshots() or None) == [3]
    job.save(4).durable(PATIENCE_S, tier="memory")
    assert until(lambda: job.snapshots() == [4])
    job.close()
    until(lambda: newest_at(root) == 4)


def test_the_next_life_has_what_was_in_the_memory_of_a_killed_agent(root: str) -> None:
    """Trainers that died some time after the agent began at nothing, and were refused."""
    trainer = Trainer(
        root,
        """
        import os, signal
        for step in (1, 2, 3):
            job.save(step).durable(60.0, tier="memory")
        os.kill(job.agent, signal.SIGKILL)
        until(lambda: job.client.life == 2)
        say(until(lambda: job.snapshots() or None))
        """,
    )
    assert trainer.hear() == "[3]"
    trainer.kill()
    job = NearJob(root)
    assert job.snapshots() == [3]
    job.close()


@pytest.mark.parametrize("staged", [True, False])
def test_a_snapshot_under_way_when_the_agent_dies(root: str, staged: bool) -> None:
    job = NearJob(root)
    job.save(1).durable(PATIENCE_S, tier="memory")
    agent = job.agent
    stop(agent)
    handle = job.save(2, root=True, staged=staged)
    os.kill(agent, signal.SIGKILL)
    if not staged:
        until(lambda: job.client.life == 2)
        assert until(lambda: job.snapshots() or None) == [1], "the whole one went with the half one"
        finish(job, handle)
    handle.durable(PATIENCE_S, tier="memory")
    handle.durable(PATIENCE_S)
    assert newest_at(root) == 2
    job.close()


def finish(job: NearJob, handle: SaveHandle) -> None:
    """Copy the rest of a save."""
    number = max(job.client._jobs)
    slot = job.client._jobs[number].slot
    slot.staged = fill(job.plan, 0, values(handle.step), slot.data)
    job.client.seal(number, slot)


def test_both_ranks_of_a_node_hand_over(root: str) -> None:
    board = LocalBoard(0, 2)
    boards = [board, LocalBoard(1, 2, board)]
    jobs = [NearJob(root, board=b, generation=1) for b in boards]
    jobs[0].catalogue.claim(None, 2, "test")
    handles = [job.save(7) for job in jobs]
    until(lambda: all(h.done for h in handles))
    os.kill(jobs[0].agent, signal.SIGKILL)
    until(lambda: all(job.client.life == 2 for job in jobs))
    assert until(lambda: jobs[0].snapshots() or None) == [7]

    def complete() -> list[tuple[str, ...]]:
        agent = reach(jobs[0].place.socket)
        assert agent is not None
        return [kept.complete for kept in visit(agent, AskStatus()).snapshots]

    # An agent with some of the shares only knows from its trainers alone that it is complete.
    until(lambda: complete() == [("memory",)])
    assert jobs[0].agent == jobs[1].agent
    handles = [job.save(8) for job in jobs]
    until(lambda: all(h.done for h in handles))
    assert [h.tiers for h in handles] == [{"memory": "complete"}] * 2
    for job in jobs:
        job.close()


def test_a_share_is_counted_once(root: str) -> None:
    """One rank has it in memory when the agent dies; counted twice, two ranks would be three."""
    board = LocalBoard(0, 2)
    boards = [board, LocalBoard(1, 2, board)]
    jobs = [NearJob(root, board=b, generation=1) for b in boards]
    jobs[0].catalogue.claim(None, 2, "test")
    first = jobs[0].save(7)
    jobs[1].client.answer()  # connected: another agent is another life for both
    until(lambda: boards[1].count("save/7/0001/near/memory"))
    ((number, under_way),) = jobs[0].client._jobs.items()
    jobs[0].client._check_near(number, under_way)
    assert first.tiers == {"memory": "pending"}, "the other rank has no share yet"
    os.kill(jobs[0].agent, signal.SIGKILL)
    until(lambda: all(job.client.life == 2 for job in jobs))
    second = jobs[1].save(7)
    until(lambda: first.done and second.done)
    assert first.tiers == second.tiers == {"memory": "complete"}
    assert jobs[0].snapshots() == [7]
    for job in jobs:
        job.close()
