"""The survival matrix of docs/guide/tiers.md: what dies, and which step the next life starts from.

Two nodes of one rank each, several on one machine. Before the death the root has step 10, the
nodes' folders have 12, memory and peers have 13.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.cli.agents import Place, make_place
from tests.processes import PATIENCE_S, wait_for_end

pytestmark = pytest.mark.dist

STEPS = (10, 11, 12, 13)


def _checkpointer(folder: str, node: str) -> object:
    import torch

    import ckptd

    torch.set_num_threads(1)
    os.environ["CKPTD_NODE"] = node
    tiers = [
        ckptd.Memory(every=1, agent_ttl_s=120),
        ckptd.Peer(every=1, agent_ttl_s=120),
        ckptd.Local(f"{folder}/disk-{node}", every=4),
    ]
    return ckptd.Checkpointer(f"{folder}/root", every=10, tiers=tiers)


def _state(value: float) -> dict[str, object]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    rows = torch.full((500, 7), value) + torch.arange(500.0)[:, None] + 500 * mesh.get_rank()
    return {"w": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False), "step": int(value)}


def _live(folder: str, victims: str) -> None:
    """Save all steps to where they are due, then die as told; rank 0 is on node n0."""
    import torch.distributed as dist

    rank = dist.get_rank()
    ck = _checkpointer(folder, f"n{rank}")
    for step in STEPS:
        handle = ck.save(step, _state(step))  # type: ignore[attr-defined]
        handle.durable()
        for tier in handle.tiers:
            handle.durable(tier=tier)
    dist.barrier()
    agent: int = ck.writer_pid  # type: ignore[attr-defined]
    if victims == "agents":
        os.kill(agent, signal.SIGKILL)
        wait_for_end(agent)
        dist.barrier()
        # The first save may find no agent of the peer yet; near tiers never raise.
        for step in (14, 15):
            found = _saved_nearby(ck, step)
            dist.barrier()
        assert found == {"memory": "complete", "peer": "complete"}
        assert ck.writer_pid != agent  # type: ignore[attr-defined]
        ck.close()  # type: ignore[attr-defined]
        return
    if victims in ("all", f"node {rank}"):
        os.kill(agent, signal.SIGKILL)  # first: one that outlived its trainer would go on
    os.kill(os.getpid(), signal.SIGKILL)


def _saved_nearby(ck: object, step: int) -> dict[str, str]:
    from ckptd.errors import CkptdError

    handle = ck.save(step, _state(step))  # type: ignore[attr-defined]
    for tier in handle.tiers:
        with suppress(CkptdError):
            handle.durable(tier=tier)
    return dict(handle.tiers)


def _resume(folder: str, nodes: list[str]) -> tuple[int, list[str]]:
    """Load in a new life; return the step and the tiers that bytes came from."""
    import torch
    import torch.distributed as dist

    with _checkpointer(folder, nodes[dist.get_rank()]) as ck:  # type: ignore[attr-defined]
        state = _state(-1)
        assert ck.latest() is not None
        step = ck.load(state)
        wanted = _state(step)
        assert torch.equal(state["w"].to_local(), wanted["w"].to_local())  # type: ignore[attr-defined]
        assert state["step"] == step
        return step, sorted(ck.last_load.sources)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with make_place(tmp_path) as place:
        yield place


def _die(place: Place, victims: str) -> None:
    env = place.env
    outcomes = rank_outcomes(2, _live, str(place.folder), victims, env=env, grace_s=PATIENCE_S)
    assert [o.exit_code for o in outcomes] == [-signal.SIGKILL] * 2, outcomes


def _next(place: Place, *nodes: str) -> tuple[int, list[str]]:
    first, second = run_ranks(2, _resume, str(place.folder), list(nodes), env=place.env)
    assert first[0] == second[0]
    return first[0], sorted({*first[1], *second[1]})


def _lose_disks(place: Place, *nodes: str) -> None:
    for node in nodes:
        shutil.rmtree(place.folder / f"disk-{node}")


def test_the_trainers_die(place: Place) -> None:
    _die(place, "trainers")
    step, tiers = _next(place, "n0", "n1")
    assert step == 13
    assert "memory" in tiers


def test_a_node_is_lost(place: Place) -> None:
    _die(place, "node 0")
    _lose_disks(place, "n0")
    step, tiers = _next(place, "n2", "n1")
    assert step == 13
    assert set(tiers) & {"memory", "peer"}


@pytest.mark.long
def test_the_agents_die(place: Place) -> None:
    run_ranks(2, _live, str(place.folder), "agents", env=place.env)


@pytest.mark.long
def test_trainers_and_agents_die(place: Place) -> None:
    """A Slurm step's clean-up, a container or cgroup that is killed, nodes that are rebooted."""
    _die(place, "all")
    step, tiers = _next(place, "n0", "n1")
    assert (step, tiers) == (12, ["local"])


@pytest.mark.long
def test_all_nodes_are_lost(place: Place) -> None:
    """Also a node and the one that is its peer, where these are the only two."""
    _die(place, "all")
    _lose_disks(place, "n0", "n1")
    step, _ = _next(place, "n2", "n3")
    assert step == 10
