"""Nodes that keep one another's snapshots, and what becomes of them when one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.save.messages import Neighbours
from ckptd.checkpoint.save.peers import KnownNode
from ckptd.errors import CkptdError
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.checkpoint.save.nearjob import NearJob, newest_at
from tests.processes import PATIENCE_S, lives, until

__all__ = ["tmpfs"]


class Nodes:
    """Two nodes of a rank each, in this process."""

    def __init__(self, root: str, tiers: tuple[str, ...]) -> None:
        self.root = root
        self.tiers = tiers
        board = LocalBoard(0, 2)
        self.boards = [board, LocalBoard(1, 2, board)]
        self.jobs: list[NearJob] = []
        for rank in (0, 1):
            self.jobs.append(self.start(rank))
        self.generation = self.jobs[0].catalogue.claim(None, 2, "test").generation
        self.meet()

    def start(self, rank: int) -> NearJob:
        return NearJob(
            self.root,
            node=f"n{rank}",
            tiers=self.tiers,
            board=self.boards[rank],
            generation=1,
            bind="127.0.0.1",
            agent_ttl_s=2.0,
        )

    def meet(self) -> None:
        for job, other in zip(self.jobs, reversed(self.jobs), strict=True):
            job.meet(other)

    def save(self, step: int) -> list[dict[str, str]]:
        """Save on both; return what became of the tiers."""
        handles = [job.save(step) for job in self.jobs]
        until(lambda: all(handle.done for handle in handles))
        return [handle.tiers for handle in handles]

    def close(self) -> None:
        pids = [job.agent for job in self.jobs if job.client.dead is None]
        for job in self.jobs:
            job.close()
        until(lambda: not any(map(lives, pids)))


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture(params=[("peer",), ("memory", "peer")], ids=["peer", "both"])
def nodes(root: str, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(root, request.param)
    yield nodes
    nodes.close()


def test_either_node_has_everything(nodes: Nodes) -> None:
    for step in (1, 2, 3):
        assert nodes.save(step) == [dict.fromkeys(nodes.tiers, "complete")] * 2
    for job in nodes.jobs:
        assert job.snapshots()[-1] == 3
    until(lambda: [job.snapshots() for job in nodes.jobs] == [[3], [3]])


def test_a_lost_node_comes_back_and_training_went_on(nodes: Nodes) -> None:
    nodes.save(1)
    lost = nodes.jobs[1]
    agent = lost.agent
    lost.client.leave()  # its trainers go with the node
    os.kill(agent, signal.SIGKILL)
    # What was complete is still whole where the other node is.
    assert nodes.jobs[0].snapshots() == [1]
    handle = nodes.jobs[0].save(2)
    nodes.boards[1].set("save/2/0002/near/peer/failed", b"rank 1 has no agent")
    if "memory" in nodes.tiers:
        nodes.boards[1].set("save/2/0002/near/memory/failed", b"rank 1 has no agent")
    until(lambda: handle.done)
    assert set(handle.tiers.values()) == {"failed"}
    assert nodes.jobs[0].snapshots() == [1], "a snapshot that failed took the newest one's place"
    nodes.jobs[1] = again = nodes.start(1)
    again.attempts = 2
    assert again.agent != agent
    nodes.meet()
    assert nodes.save(3) == [dict.fromkeys(nodes.tiers, "complete")] * 2
    assert [job.snapshots()[-1] for job in nodes.jobs] == [3, 3]


def test_a_peer_that_cannot_be_reached_fails_its_tier_only(root: str) -> None:
    nodes = Nodes(root, ("memory", "peer"))
    alone = NearJob(str(Path(root).parent / "other"), node="n0", tiers=("memory", "peer"))
    alone.meet(nodes.jobs[0])
    nodes.close()
    handle = alone.save(1, root=True)
    handle.durable(PATIENCE_S)
    until(lambda: handle.done)
    assert handle.tiers == {"memory": "complete", "peer": "failed"}
    with pytest.raises(CkptdError):
        handle.durable(tier="peer")
    pid = alone.agent
    alone.close()
    until(lambda: not lives(pid))


def test_the_next_life_hears_which_nodes_were_there(root: str) -> None:
    job = NearJob(root)
    assert job.client.answer().neighbours == ()
    nodes = tuple(KnownNode(f"n{i}", "ckptd://127.0.0.1:1", "", "ab" * 16, i) for i in range(3))
    job.client.set_peers(Neighbours(nodes[:1]))
    job.client.set_peers(Neighbours(nodes))
    job.save(1).durable(PATIENCE_S)
    pid = job.agent
    job.client.leave()
    again = NearJob(root)
    assert again.agent == pid
    assert again.client.answer().neighbours == nodes
    again.close()
    until(lambda: not lives(pid))


def test_killed_nodes_bring_their_newest_snapshot_to_the_root(root: str) -> None:
    nodes = Nodes(root, ("memory", "peer"))
    for step in (1, 2):
        nodes.save(step)
    nodes.close()
    assert newest_at(root) == 2


def test_a_full_disk_fails_that_tier_and_the_root_goes_on(root: str, tmpfs: Mounted) -> None:
    job = NearJob(root, tiers=("memory", "local"), folder=str(tmpfs.path / "near"))
    job.save(1).durable(PATIENCE_S)
    ballast = tmpfs.fill(leave=4096)
    handle = job.save(2, root=True)
    handle.durable(PATIENCE_S)
    until(lambda: handle.done)
    assert handle.tiers == {"memory": "complete", "local": "failed"}
    assert newest_at(root) == 2
    ballast.unlink()
    assert job.save(3).durable(PATIENCE_S, tier="local") is None
    pid = job.agent
    job.close()
    until(lambda: not lives(pid))
    assert newest_at(root) == 3
