"""The agent of a node: outlives trainers however they die, and ends by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptd.base.runtime.agentlink import AgentPlace, listen, locked, reach
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.agent.node import NodeAgent
from ckptd.checkpoint.save import messages
from ckptd.checkpoint.save.client import AgentSpec, WriterClient
from ckptd.checkpoint.save.messages import AskEnd, AskStatus, visit
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.errors import CkptdError, ProcessError
from ckptd.store import StoreSpec
from tests.checkpoint.save.nearjob import NearJob, Trainer, newest_at
from tests.processes import PATIENCE_S, agents_in, lives, stop, until

SAVED = """
for step in (1, 2):
    job.save(step).durable(60, tier="memory")
say(job.agent)
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def run_folder() -> Path:
    return Path(os.environ["CKPTD_RUN_DIR"])


def test_it_ends_by_itself_after_a_goodbye_and_brings_the_newest_snapshot_to_the_root(
    root: str,
) -> None:
    job = NearJob(root)
    pid = job.agent
    for step in (1, 2, 3):
        job.save(step).durable(PATIENCE_S)
    assert newest_at(root) == 0
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 3
    assert not list(run_folder().glob("*.sock")) + list(run_folder().glob("*.mem"))


def test_a_killed_trainers_snapshot_is_saved_and_the_next_life_finds_it(root: str) -> None:
    with Trainer(root, SAVED) as trainer:
        pid = int(trainer.hear())
        trainer.kill()
    until(lambda: newest_at(root) == 2)
    job = NearJob(root)
    assert job.agent == pid
    assert 2 in job.snapshots()  # the one before may be there as well: nobody told that it may go
    job.save(3).durable(PATIENCE_S)
    until(lambda: job.snapshots() == [3])  # the old life's goes when the new one has a whole one
    job.close()
    until(lambda: not lives(pid))


def test_what_the_root_cannot_take_stays_in_memory_after_a_goodbye(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = WriterClient._notify_agent

    def late(*args: Any, **more: Any) -> None:
        time.sleep(0.5)  # in which a goodbye can overtake it
        notify(*args, **more)

    monkeypatch.setattr(WriterClient, "_notify_agent", late)
    job = NearJob(root)
    job.save(1, root=True).durable(PATIENCE_S)
    job.save(2).durable(PATIENCE_S)
    pid = job.agent
    data = Path(root) / "data"
    data.rename(f"{root}-data")
    data.write_text("in the way")
    job.close()
    until(lambda: "keeping it in memory" in job.place.log.read_text(), job.place.log.read_text)
    data.unlink()
    Path(f"{root}-data").rename(data)
    again = NearJob(root)
    assert again.agent == pid
    assert 2 in again.snapshots()
    again.save(3, root=True).durable(PATIENCE_S)
    again.close()
    until(lambda: not lives(pid))


def test_killed_in_mid_copy_the_snapshot_before_is_what_counts(root: str) -> None:
    body = SAVED + "job.save(3, staged=False)\nsay('half')"
    with Trainer(root, body) as trainer:
        pid = int(trainer.hear())
        assert trainer.hear() == "half"
        trainer.kill()
    until(lambda: newest_at(root) == 2)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not lives(pid))
    assert newest_at(root) == 2


def test_killed_at_the_moment_of_the_seal_nothing_is_lost(root: str) -> None:
    # Nobody has told the agent that the snapshot is complete, and nobody will.
    body = "say(job.agent)\nimport os\njob.save(1)\nos.kill(os.getpid(), 9)"
    with Trainer(root, body) as trainer:
        pid = int(trainer.hear())
        trainer.process.wait(PATIENCE_S)
    until(lambda: newest_at(root) == 1)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not lives(pid))


def test_a_terminated_agent_awaits_its_trainers_and_nobody_else(root: str) -> None:
    job = NearJob(root)
    pid = job.agent
    os.kill(pid, signal.SIGTERM)
    job.save(1).durable(PATIENCE_S, tier="memory")
    assert lives(pid)
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 1


TWO_SIGNALS = """
import signal, sys
from ckptd.checkpoint.agent.node import NodeAgent, end_on_signals

for line in range(1, 60):
    agent, left = NodeAgent(None, None), line

    def trace(frame, event, _):
        global left
        left -= event == "line"
        if event == "line" and left == 0:
            signal.raise_signal(signal.SIGINT)
        return trace

    end_on_signals(agent)
    sys.settrace(trace)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    assert agent.ending
    if left > 0:
        break
else:
    raise SystemExit("the second signal came within the first one's handler to the last")
"""


def test_a_second_signal_at_any_line_of_the_first_ones_handler_stops_nothing() -> None:
    """The lock of an event that the handler set would be waited for by the thread that has it."""
    subprocess.run([sys.executable, "-c", TWO_SIGNALS], check=True, timeout=PATIENCE_S)


def test_an_agent_that_is_stopped_at_once_finishes_what_its_trainers_handed_over(root: str) -> None:
    """Its trainer is there and does nothing: it can neither go nor hand it to another agent."""
    with Trainer(root, SAVED, throttle=100_000.0) as trainer:
        pid = int(trainer.hear())
        stop(trainer.process.pid)
        visit(reached(AgentPlace(root, "n0")), AskEnd(now=True), PATIENCE_S)
        until(lambda: not lives(pid))
        assert newest_at(root) == 2


def test_a_process_of_another_user_is_not_served(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = AgentPlace(root, "n0")
    monkeypatch.setattr("ckptd.checkpoint.agent.node.peer_of", lambda _: (1, os.geteuid() + 1))
    with locked(place), listen(place) as listener:
        agent = NodeAgent(listener, place)
        visitor = reached(place)
        agent._accept()
        with pytest.raises(ProcessError):
            visit(visitor, AskStatus(), PATIENCE_S)


def test_an_agent_that_is_to_stay_ends_only_when_it_is_told(root: str) -> None:
    place = AgentPlace(root, "n0")
    with locked(place):
        listener = listen(place)
    listener.setblocking(False)
    agent = NodeAgent(listener, place, stay=True)
    agent._until = 0.0
    assert not agent._may_end()
    agent.end()
    assert agent._may_end()


def test_visitors_and_trainers_that_cannot_begin_do_not_end_what_is_kept(
    root: str, tmp_path: Path
) -> None:
    with Trainer(root, SAVED) as trainer:
        pid = int(trainer.hear())
        trainer.kill()
    until(lambda: newest_at(root) == 2)
    place = AgentPlace(root, "n0")
    for _ in range(3):
        sock = reach(place.socket)
        assert sock is not None
        sock.close()
    agent = AgentSpec(place, (TierSpec("memory"),), PATIENCE_S)
    client = WriterClient(StoreSpec("nowhere://x"), LocalBoard(), None, 1, agent)
    with pytest.raises(CkptdError):
        client.answer(PATIENCE_S)
    client.close(PATIENCE_S)
    job = NearJob(root)
    assert job.agent == pid
    assert 2 in job.snapshots()  # the one before may be there as well: see above
    job.close()
    until(lambda: not lives(pid))


def test_a_killed_agent_takes_nothing_along_and_another_is_started(root: str) -> None:
    job = NearJob(root)
    first = job.agent
    job.save(1).durable(PATIENCE_S)
    stop(first)
    handle = job.save(2, root=True)
    os.kill(first, signal.SIGKILL)
    handle.durable(PATIENCE_S)
    handle.durable(PATIENCE_S, tier="memory")
    job.save(3, root=True).durable(PATIENCE_S)
    pid = job.agent
    assert pid != first
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 3
    assert not lives(first)


def test_several_roots_of_one_job_do_not_meet(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("actor", "critic")]
    jobs = [NearJob(root, name="rl") for root in roots]
    assert jobs[0].agent == jobs[1].agent
    for job, steps in zip(jobs, ((1, 9), (2, 3)), strict=True):
        for step in steps:
            job.save(step).durable(PATIENCE_S)
    until(lambda: [job.snapshots() for job in jobs] == [[9], [3]])
    pid = jobs[0].agent
    for job in jobs:
        job.close()
    until(lambda: not lives(pid))
    assert [newest_at(root) for root in roots] == [9, 3]


def test_what_is_kept_of_a_root_that_was_deleted_goes(root: str) -> None:
    with Trainer(root, "job.save(100).durable(60)\nsay(job.agent)") as trainer:
        pid = int(trainer.hear())
        trainer.kill()
    until(lambda: newest_at(root) == 100)
    # An agent that still works there takes its record back from a root without a marker.
    place = AgentPlace(root, "n0")
    until(lambda: not visit(reached(place), AskStatus(), PATIENCE_S).ranks)
    shutil.rmtree(root)
    job = NearJob(root)
    assert job.agent == pid
    for step in (1, 2):
        job.save(step).durable(PATIENCE_S)
    assert job.snapshots() == [2]
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 2


def test_trainers_that_come_at_once_get_one_agent(root: str) -> None:
    board = LocalBoard(0, 4)
    boards = [board, *(LocalBoard(rank, 4, board) for rank in (1, 2, 3))]
    ranks = [NearJob(root, board=board, generation=1) for board in boards]
    assert len({job.agent for job in ranks}) == 1
    assert agents_in(run_folder()) == [ranks[0].agent]
    ranks[0].catalogue.claim(None, 4, "test")
    handles = [job.save(5) for job in ranks]
    for handle in handles:
        handle.durable(PATIENCE_S)
    for job in ranks:
        job.close()
    until(lambda: newest_at(root) == 5)
    until(lambda: not agents_in(run_folder()))


def test_a_socket_that_a_killed_agent_left_is_replaced(root: str) -> None:
    place = AgentPlace(root, "n0")
    with locked(place):
        listen(place).close()
    assert place.socket.exists()
    assert reach(place.socket) is None
    job = NearJob(root)
    assert job.agent
    assert place.socket.is_socket()
    job.close()


@pytest.mark.long
def test_thousands_of_saves_leave_nothing_behind_in_the_trainer(root: str) -> None:
    board = LocalBoard(0, 2)
    ranks = [
        NearJob(root, board=board, generation=1),
        NearJob(root, board=LocalBoard(1, 2, board), generation=1),
    ]
    ranks[0].catalogue.claim(None, 2, "test")
    for step in range(1, 301):
        handles = [job.save(step) for job in ranks]
    for handle in handles:
        handle.durable(PATIENCE_S)
    for job in ranks:
        until(lambda job=job: len(job.client._jobs) <= 16)
    assert len([key for key in board._values if "/near/" in key]) <= 280
    pid = ranks[0].agent
    for job in ranks:
        job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 300


def test_a_zombie_of_an_older_life_displaces_nothing(root: str) -> None:
    zombie = NearJob(root)
    zombie.save(10).durable(PATIENCE_S)
    job = NearJob(root)
    assert job.agent == zombie.agent
    assert job.generation > zombie.generation
    job.save(5).durable(PATIENCE_S)
    zombie.save(11).durable(PATIENCE_S)
    assert 5 in job.snapshots()
    job.save(6).durable(PATIENCE_S)
    assert 6 in job.snapshots()
    zombie.close()
    pid = job.agent
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 6


TWO_NODES = """
import json
import os
from ckptd.base.runtime.ranks import LocalBoard
board = LocalBoard(0, 2)
boards = [board, LocalBoard(1, 2, board)]
jobs = [NearJob(job.catalogue.store.url, node=f"n{b.rank}", board=b, generation=1) for b in boards]
for handle in [j.save(1) for j in jobs]:
    handle.durable(60, tier="memory")
say([j.agent for j in jobs])
"""


@pytest.mark.parametrize(
    ("last", "step"),
    [
        # All is sealed, and no agent knows that the snapshot is complete.
        ("[j.save(2) for j in jobs]", 2),
        # One rank has sealed, the other has not: the one before is committed at once.
        ("jobs[0].save(2); jobs[1].save(2, staged=False)", 1),
    ],
    ids=["sealed", "half"],
)
def test_nodes_whose_trainers_die_together_agree_on_what_is_saved(
    root: str, last: str, step: int
) -> None:
    body = TWO_NODES + last + "\nos.kill(os.getpid(), 9)"
    with Trainer(root, body, node="n0") as trainer:
        pids = json.loads(trainer.hear())
        trainer.process.wait(PATIENCE_S)
    until(lambda: newest_at(root) == step)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(lives, pids)))


OLD_AGENT = """
import ckptd.checkpoint.save.messages as messages
messages.PROTOCOL = 1  # what an agent that sends no number counts as
messages.check_protocol = lambda *_: None  # and it looks at none
from ckptd.checkpoint.agent.__main__ import main
main()
"""


def test_a_trainer_refuses_an_agent_of_another_version(root: str) -> None:
    place = AgentPlace(root, "n0")
    with locked(place), listen(place) as listener:
        words = ["--fd", str(listener.fileno()), "--job", place.job, "--node", place.node]
        words += ["--folder", str(place.socket.parent)]
        old = subprocess.Popen(
            [sys.executable, "-c", OLD_AGENT, *words], pass_fds=[listener.fileno()]
        )
    try:
        job = NearJob(root)
        with pytest.raises(ProcessError, match="has another version of ckptd") as caught:
            job.client.answer()
        assert "has another version of ckptd" in caught.value.message
        assert "ckptd agent stop" in str(caught.value.hint)
        job.close()
        visit(reached(place), AskEnd(now=True))
        assert old.wait(PATIENCE_S) == 0
    finally:
        old.kill()


def test_an_agent_refuses_a_trainer_of_another_version(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    hello = messages.WriterHello
    monkeypatch.setattr(messages, "WriterHello", lambda *a, **k: hello(*a, **{**k, "protocol": 1}))
    job = NearJob(root)
    with pytest.raises(ProcessError, match="the trainer has another version of ckptd"):
        job.client.answer()
    job.close()
    if (agent := reach(job.place.socket)) is not None:  # without a trainer it ends
        visit(agent, AskEnd(now=True))


def reached(place: AgentPlace) -> socket.socket:
    found = reach(place.socket)
    assert found is not None
    return found
