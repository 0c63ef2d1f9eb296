"""Real ranks on simulated nodes: every tier becomes complete, and what one rank lacks all hear."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save import client
from ckptd.checkpoint.save import client as joining
from ckptd.checkpoint.save.messages import Neighbours, Partner, WriterReady
from ckptd.checkpoint.save.peers import Distant, KnownNode
from ckptd.checkpoint.save.tiers import Local, Memory, Peer
from ckptd.checkpoint.torch.nearby import Nearby
from ckptd.errors import CkptdError, ProcessError, UsageError
from ckptd.store import open_store
from ckptd.store.local import LocalStore
from ckptd.store.net import StoreServer
from ckptd.testing.ranks import run_ranks
from tests.cli.agents import make_place
from tests.processes import PATIENCE_S, until, wait_for_end


def tiers(folder: str) -> list[Any]:
    return [Memory(every=1), Peer(every=2), Local(folder, every=3)]


def state_at(step: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return {"w": torch.full((5000,), float(step)), f"own{rank}": torch.full((100,), step + 0.5)}


def train(root: str, folder: str) -> list[dict[str, str]]:
    os.environ["CKPTD_NODE"] = f"n{torch.distributed.get_rank() // 2}"
    seen = []
    with ckptd.Checkpointer(root, every=4, tiers=tiers(folder), timeout_s=PATIENCE_S) as ck:
        for step in range(1, 7):
            handle = ck.save(step, state_at(step))
            assert handle is not None
            assert handle.root == (step == 4)
            for tier in handle.near:
                handle.durable(PATIENCE_S, tier=tier)
            handle.durable(PATIENCE_S)
            seen.append(handle.tiers)
    return seen


@pytest.mark.dist
def test_two_nodes_of_two_ranks_reach_every_tier(tmp_path: Path) -> None:
    root, folder = str(tmp_path / "root"), str(tmp_path / "near")
    for seen in run_ranks(4, train, root, folder, deadline_s=110.0):
        assert seen == [
            {"memory": "complete"},
            {"memory": "complete", "peer": "complete"},
            {"memory": "complete", "local": "complete"},
            {"memory": "complete", "peer": "complete"},
            {"memory": "complete"},
            {"memory": "complete", "peer": "complete", "local": "complete"},
        ]
    catalogue = Catalogue(open_store(root))
    assert catalogue.latest() is not None


def rows_of(value: float) -> dict[str, Any]:
    """Give each rank a part of one tensor: whoever lacks one share lacks the tensor."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows = 600 // mesh.size()
    part = torch.full((rows, 7), value) + torch.arange(rows)[:, None] + rows * mesh.get_rank()
    return {"w": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}


def life(root: str, nodes: list[str], steps: list[int]) -> tuple[int, dict[str, int]]:
    """Load, save some steps to the memory of nodes, and the 10th to the root, and go on."""
    torch.set_num_threads(1)
    os.environ["CKPTD_NODE"] = nodes[torch.distributed.get_rank()]
    ck = ckptd.Checkpointer(root, every=10, tiers=[Memory(every=1, agent_ttl_s=60.0)])
    state, found = rows_of(-1), 0
    if ck.latest() is not None:
        found = ck.load(state)
        assert torch.equal(state["w"].to_local(), rows_of(found)["w"].to_local())
    for step in steps:
        handle = ck.save(step, rows_of(step))
        assert handle is not None
        handle.durable(PATIENCE_S)
        handle.durable(PATIENCE_S, tier="memory")
    torch.distributed.barrier()
    ck.abandon()
    return found, {} if ck.last_load is None else dict(ck.last_load.sources)


@pytest.mark.dist
def test_shares_on_nodes_that_new_lives_leave_out_are_found(tmp_path: Path) -> None:
    with make_place(tmp_path) as place:

        def ranks(nodes: list[str], steps: list[int]) -> list[tuple[int, dict[str, int]]]:
            return run_ranks(len(nodes), life, place.root, nodes, steps, env=place.env)

        assert ranks(["n0", "n1", "n2"], [10, 11]) == [(0, {})] * 3
        found = ranks(["n0", "n1"], [])
        assert [step for step, _ in found] == [11, 11], "n2 was left out, and lives"
        assert any("peer" in sources for _, sources in found)
        ((step, sources),) = ranks(["n0"], [])
        assert step == 11, "n2 was left out two lives ago"
        assert {*sources} == {"memory", "peer"}
        for agent in place.statuses():
            if agent.node != "n0":
                os.kill(agent.pid, signal.SIGKILL)
                wait_for_end(agent.pid)
        ((step, _),) = ranks(["n0"], [])
        assert step == 10, "n1 and n2 are known, and gone"


def test_a_former_node_that_is_gone_is_tried_once_in_a_life(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"ckptd://127.0.0.1:{taken.getsockname()[1]}"
    board = LocalBoard()
    nearby = Nearby([Memory()], str(tmp_path / "root"), Agreement(board, PATIENCE_S))
    nearby._former = [
        KnownNode("gone", url, "", bytes(range(16)).hex()),
        KnownNode("odd", "ckptd://x", "", ""),
    ]
    for empty in (False, True):
        for source in nearby.sources():
            assert (source.former, source.tier) == (True, "peer")
            assert source.keys == (frozenset() if empty else None)
            with pytest.raises(CkptdError):
                source.store.list()
    nearby.close()


class Client:
    """Stands for a client whose agent is on another machine: it has an address for all."""

    life = 1

    def __init__(self, ready: WriterReady) -> None:
        self.ready = ready
        self.told: list[Partner | Neighbours] = []

    def answer(self) -> WriterReady:
        return self.ready

    def set_peers(self, message: Partner | Neighbours) -> None:
        self.told.append(message)


def node_on(board: LocalBoard, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CKPTD_NODE", name)
    return Nearby([Memory()], "/nowhere", Agreement(board, PATIENCE_S))


def agent_at(port: int) -> Any:
    return Client(
        WriterReady(
            1, memory=f"ckptd://127.0.0.1:{port}", secret=bytes(range(16)).hex(), neighbours=()
        )
    )


def test_a_load_asks_the_agent_that_came_in_place_of_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = LocalBoard()
    nodes = [node_on(LocalBoard(peers=board), f"n{i}", monkeypatch) for i in range(3)]
    for port, node in enumerate(nodes, 1):
        node.exchange(agent_at(port))
    met = {node._node: node._nodes[node._node] for node in nodes}
    for node in nodes:
        node._nodes = dict(met)

    def asked(node: Any) -> list[str]:
        return [source.store.url for source in node.sources()]

    assert asked(nodes[0]) == ["ckptd://127.0.0.1:2", "ckptd://127.0.0.1:3"]
    for port in (8, 9):
        nodes[2].exchange(agent_at(port))
    assert asked(nodes[0]) == ["ckptd://127.0.0.1:2", "ckptd://127.0.0.1:9"]
    assert asked(nodes[1]) == ["ckptd://127.0.0.1:1", "ckptd://127.0.0.1:9"]
    number = board.add("agents-again")  # one more is just being announced
    nodes[1].exchange(agent_at(5))
    asked(nodes[0])
    third = msgspec.structs.replace(met["n2"], memory="ckptd://127.0.0.1:7")
    board.set("agents/n2", msgspec.json.encode(third))
    board.set(f"agents-again/{number}", b"n2")
    assert asked(nodes[0]) == ["ckptd://127.0.0.1:5", "ckptd://127.0.0.1:7"]
    for node in nodes:
        node.close()


def test_a_former_node_that_lives_is_read_as_patiently_as_any_other(tmp_path: Path) -> None:
    secret = bytes(range(16)).hex()
    kept = LocalStore(tmp_path / "kept")
    kept.put("data/x", b"x")
    nearby = Nearby([Memory()], str(tmp_path / "root"), Agreement(LocalBoard(), PATIENCE_S))
    with closing(StoreServer(kept, "ckptd://127.0.0.1:0", secret=secret)) as server:
        nearby._former = [KnownNode("was", server.url, "", secret)]
        (source,) = nearby.sources()
        assert source.store.get("data/x") == b"x"
        assert isinstance(source.store, Distant)
        # All ranks may come at once, and a server that has no room is asked again.
        assert source.store.inner.options == {"secret": secret}
        nearby.close()


def begin_without_an_agent(root: str) -> str:
    rank = torch.distributed.get_rank()
    os.environ["CKPTD_NODE"] = f"n{rank}"
    if rank == 1:
        client.START_S = joining.START_S = 1.0
        sys.executable = "/bin/false"
    ck = ckptd.Checkpointer(root, tiers=[Memory()], timeout_s=600.0)
    try:
        ck.save(1, state_at(1))
    except CkptdError as error:
        return error.kind
    finally:
        ck.close()
    return "nothing was raised"


@pytest.mark.long
@pytest.mark.dist
def test_every_rank_hears_of_one_that_has_no_agent(tmp_path: Path) -> None:
    kinds = run_ranks(2, begin_without_an_agent, str(tmp_path / "root"), deadline_s=60.0)
    assert kinds == [ProcessError.default_kind] * 2


def test_one_node_has_no_peer_and_training_goes_on(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with ckptd.Checkpointer(root, every=3, tiers=[Memory(every=1), Peer()], timeout_s=60.0) as ck:
        handles = [ck.save(step, state_at(step)) for step in range(1, 5)]
        ck.wait(PATIENCE_S)
        for step, handle in enumerate(handles, 1):
            assert handle is not None
            handle.durable(PATIENCE_S, tier="memory")
            with pytest.raises(UsageError) as refused:
                handle.durable(PATIENCE_S, tier="local")
            assert "does not go to the tier" in refused.value.message
            if step == 3:
                with pytest.raises(CkptdError) as caught:
                    handle.durable(PATIENCE_S, tier="peer")
                assert caught.value.kind == "no-peer"


def test_a_killed_agent_fails_no_save(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with ckptd.Checkpointer(root, tiers=[Memory()], timeout_s=60.0) as ck:
        first = ck.save(1, state_at(1))
        assert first is not None
        first.durable(PATIENCE_S)
        old = ck.writer_pid
        assert old is not None
        os.kill(old, 19)
        second = ck.save(2, state_at(2))
        assert second is not None
        os.kill(old, 9)
        second.durable(PATIENCE_S)
        second.durable(PATIENCE_S, tier="memory")
        third = ck.save(3, state_at(3))
        assert third is not None
        third.durable(PATIENCE_S)
        assert third.tiers == {"memory": "complete"}
        assert ck.writer_pid != old


def never_starts(monkeypatch: pytest.MonkeyPatch, ck: ckptd.Checkpointer) -> None:
    """Kill the agent, and let no other one be started."""

    def refuse(*_: object) -> None:
        raise ProcessError("no agent")

    monkeypatch.setattr("ckptd.checkpoint.save.client.join_agent", refuse)
    assert ck.writer_pid is not None
    os.kill(ck.writer_pid, 9)


def test_a_save_that_failed_may_be_told_without_being_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "root")
    ck = ckptd.Checkpointer(root, tiers=[Memory()], timeout_s=60.0, when_failed="warn")
    first = ck.save(1, state_at(1))
    assert first is not None
    first.durable(PATIENCE_S)
    assert ck.writer_pid is not None
    os.kill(ck.writer_pid, 19)
    failed = ck.save(2, state_at(2))
    assert failed is not None
    with monkeypatch.context() as patch:
        never_starts(patch, ck)
        until(lambda: failed.done)
        assert isinstance(failed.error, ProcessError)
    handle = ck.save(3, state_at(3))
    assert handle is not None
    handle.durable(PATIENCE_S)
    ck.close()  # the root has a newer one: the job is fine


def test_the_last_save_that_failed_is_raised_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ck = ckptd.Checkpointer(str(tmp_path / "root"), tiers=[Memory()], when_failed="warn")
    ck.save(1, state_at(1))
    ck.wait(PATIENCE_S)
    assert ck.writer_pid is not None
    os.kill(ck.writer_pid, 19)
    assert ck.save(2, state_at(2))
    never_starts(monkeypatch, ck)
    with pytest.raises(ProcessError) as caught:
        ck.close()
    assert "the save of step 2" in str(caught.value.__notes__)


def test_an_agent_that_dies_with_nothing_on_its_way_to_the_root_stops_nobody(
    tmp_path: Path,
) -> None:
    with ckptd.Checkpointer(str(tmp_path / "root"), every=100, tiers=[Memory(every=1)]) as ck:
        for step in range(1, 7):
            handle = ck.save(step, state_at(step))
            assert handle is not None
            if step == 2:
                handle.durable(PATIENCE_S)
                assert ck.writer_pid is not None
                os.kill(ck.writer_pid, 9)
        handle.durable(PATIENCE_S, tier="memory")


def test_near_tiers_need_a_root_that_others_can_open() -> None:
    with pytest.raises(UsageError) as caught:
        ckptd.Checkpointer("memory://nearby", tiers=[Memory()])
    assert "a root in this process's memory has no near tiers" in caught.value.message


def test_what_another_run_left_in_a_folder_is_not_loaded(tmp_path: Path) -> None:
    folder = str(tmp_path / "near")
    for root, steps in (("first", 9), ("second", 3)):
        url = str(tmp_path / root)
        with ckptd.Checkpointer(
            url, every=3, tiers=[Local(folder, every=1)], copy=ckptd.CopyOptions(slots=2)
        ) as ck:
            for step in range(1, steps + 1):
                handle = ck.save(step, state_at(step if root == "first" else 100 * step))
                assert handle is not None
                handle.durable(PATIENCE_S, tier="local")
    with ckptd.Checkpointer(str(tmp_path / "second"), tiers=[Local(folder)]) as ck:
        state = state_at(0)
        assert ck.load(state) == 3
        assert state["w"][0] == 300.0
