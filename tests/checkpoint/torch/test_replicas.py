"""What several ranks hold in common is compared by who holds it, name by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptd
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CkptdError
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

State = dict[str, Any]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def outcome(root: str, state: State, group: Any = None) -> str:
    """Save and say what became of it: the same on every rank, but for whom an error names."""
    try:
        with ckptd.Checkpointer(root, timeout_s=60.0, process_group=group) as ck:
            handle = ck.save(1, state)
            assert handle is not None
            handle.durable(PATIENCE_S)
    except CkptdError as error:
        return f"{error.kind} {error.where}"
    return "durable"


# --- scenarios: each gives the state of one of four ranks, and what must become of it -------------


def one_name_more(rank: int) -> State:
    """Two seeds, and a value that only rank 0 has."""
    return {"model": model(rank == 0)} | ({"best_val_loss": 1.5} if rank == 0 else {})


def one_tensor_more(rank: int) -> State:
    return {"model": model(rank == 2)} | ({"best": torch.ones(1)} if rank == 2 else {})


def value_apart(rank: int) -> State:
    """A value in common, and names that only some ranks have."""
    return {"n": int(rank == 0), "m": 7} | ({"own": 1} if rank == 0 else {})


def large_value_apart(rank: int) -> State:
    return {"n": [int(rank == 0)] * 20_000} | ({"own": 1} if rank == 0 else {})


def stages_share(rank: int) -> State:
    """Two stages of two data-parallel ranks; each has its own idea of the embedding."""
    stage = rank // 2
    tied = torch.full((5,), 1.0 + stage)
    return {"model": {"tied": tied, f"s{stage}.w": torch.full((4,), float(stage))}}


def stages_number_alike(rank: int) -> State:
    """Each stage calls its first layer 0: one of them would be lost."""
    return {"model": model(rank // 2)} | {f"s{rank // 2}": torch.ones(2)}


def sharded_in_stages(rank: int) -> State:
    """What both stages cut over their own ranks, on slices of one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    local = torch.full((2, 3), 1.0 + rank % 2 + (rank == 3))
    tied = DTensor.from_local(local, mesh["dp"], [Shard(0)], run_check=False)
    return {"tied": tied, f"s{rank // 2}": torch.ones(2)}


def hsdp_with_one_more(rank: int) -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    local = torch.full((2, 3), 1.0 + rank % 2 + (rank == 0))
    both = [Replicate(), Shard(0)]
    tensor = DTensor.from_local(local, mesh, both, run_check=False)
    return {"t": tensor} | ({"best": 1.0} if rank == 0 else {})


def learning_rates(rank: int) -> State:
    net = model(0)
    optim = torch.optim.SGD(net.parameters(), lr=0.1 + (rank == 3))
    return {"model": net, "optim": optim} | ({"best": 1.0} if rank == 3 else {})


def two_kinds(rank: int) -> State:
    return {"best": torch.ones(()) if rank == 1 else 1.0}


def per_rank_and_value(rank: int) -> State:
    return {"best": ckptd.PerRank(1.0, on_change="drop") if rank == 1 else 1.0}


def per_rank_and_tensor(rank: int) -> State:
    return {"best": ckptd.PerRank(1.0, on_change="drop") if rank == 1 else torch.ones(3)}


def declared_twice(rank: int) -> State:
    return {"x": ckptd.PerRank(rank, on_change="drop" if rank == 1 else "error")}


def tied_on_some(rank: int) -> State:
    first, second = torch.ones(3), torch.zeros(3)
    return {"a": first, "b": second if rank == 1 else first}


def cut_and_whole(rank: int) -> State:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    cut = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], run_check=False)
    return {"t": torch.ones(4, 3) if rank == 2 else cut}


def all_well(rank: int) -> State:
    """Names of all, of a stage and of one rank, equal where they are common."""
    stage = rank // 2
    state: State = {"model": model(0), "n": 3, f"stage{stage}": torch.full((3,), float(stage))}
    if rank == 0:
        state |= {"best_val_loss": 1.5, "ema": model(4)}
    return state | {"own": ckptd.PerRank(rank, on_change="drop")}


BAD: list[tuple[Callable[[int], State], str, str]] = [
    (
        one_name_more,
        "replicas-differ",
        "model.0.bias, model.0.weight, model.1.bias, model.1.weight",
    ),
    (one_tensor_more, "replicas-differ", "model.0.bias"),
    (value_apart, "replicas-differ", "n"),
    (large_value_apart, "replicas-differ", "n"),
    (stages_share, "replicas-differ", "model.tied"),
    (stages_number_alike, "replicas-differ", "model.0.bias"),
    (sharded_in_stages, "replicas-differ", "tied"),
    (hsdp_with_one_more, "replicas-differ", "t"),
    (learning_rates, "replicas-differ", "optim.groups"),
    (two_kinds, "structure", "best"),
    (per_rank_and_value, "structure", "best"),
    (per_rank_and_tensor, "structure", "best"),
    (declared_twice, "structure", "x"),
    (tied_on_some, "structure", "b"),
    (cut_and_whole, "structure", "t"),
]


def every_scenario(root: str) -> dict[str, str]:
    rank = dist.get_rank()
    out = {f.__name__: outcome(f"{root}/{f.__name__}", f(rank)) for f, _, _ in BAD}
    out["all_well"] = outcome(f"{root}/all_well", all_well(rank))
    # A group of two of the four ranks, whose names are other ranks' too.
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    state = {"model": model(rank // 2 if rank % 2 else 0)} | ({"best": 1.0} if rank < 2 else {})
    out["pair"] = outcome(f"{root}/pair{rank % 2}", state, mine)
    return out


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    root = tmp_path_factory.mktemp("replicas")
    return root, run_ranks(4, every_scenario, str(root), deadline_s=300.0)


@pytest.mark.dist
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("state", "kind", "where"), BAD, ids=[b[0].__name__ for b in BAD])
def test_what_ranks_do_not_agree_on_is_never_committed(
    told: tuple[Path, list[dict[str, str]]],
    state: Callable[[int], State],
    kind: str,
    where: str,
) -> None:
    root, said = told
    for by_rank in said:
        found, _, names = by_rank[state.__name__].partition(" ")
        assert found == kind, by_rank[state.__name__]
        assert names.startswith(where)
    assert Catalogue(open_store(str(root / state.__name__))).line() == []


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_names_that_only_some_ranks_hold_are_no_difference(
    told: tuple[Path, list[dict[str, str]]],
) -> None:
    root, said = told
    assert [by_rank["all_well"] for by_rank in said] == ["durable"] * 4
    state: State = {"model": model(9), "n": 0, "ema": model(9), "best_val_loss": 0.0}
    state |= {"stage0": torch.zeros(3), "stage1": torch.zeros(3)}
    with ckptd.Checkpointer(str(root / "all_well")) as ck:
        ck.load(state, strict=False)
    assert torch.equal(state["model"][0].weight, model(0)[0].weight)
    assert torch.equal(state["ema"][0].weight, model(4)[0].weight)
    assert (state["n"], state["best_val_loss"]) == (3, 1.5)
    assert torch.equal(state["stage1"], torch.ones(3))


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_a_group_compares_its_own_ranks_alone(
    told: tuple[Path, list[dict[str, str]]],
) -> None:
    even, odd = (told[1][0]["pair"], told[1][2]["pair"]), (told[1][1]["pair"], told[1][3]["pair"])
    assert even == ("durable", "durable")
    assert all(s.startswith("replicas-differ model.0.bias") for s in odd)
