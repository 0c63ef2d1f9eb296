"""Flattening on real ranks: FSDP2, tensor parallel, both, DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.leaves import PerRank
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.bridge import assert_same, give, take

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("writing_thread")]


class Net(nn.Module):
    """Odd sizes: shards are uneven, and some ranks have none of a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Linear(6, 1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        hidden = self.norm(hidden + self.down(self.up(hidden).relu()))
        out: torch.Tensor = self.head(hidden * self.gain(hidden))
        return out


def net(kind: str, seed: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = Net()
    world = torch.distributed.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return shard(model, init_device_mesh("cpu", (world,)))
    if kind == "tp":
        return split(model, init_device_mesh("cpu", (world,)))
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    return shard(split(model, mesh["tp"]), mesh["dp"])


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded: nn.Module = model
    return sharded


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


class Rows(optim.Optimizer):
    """Keeps a state of another shape than the parameter, as Adafactor does.

    (torch's own Adafactor does not run on sharded parameters.)
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                shape = (*parameter.shape[:-1], 1)
                state["rows"] = parameter.detach().new_zeros(shape)
                state["calls"] = 0
            state["calls"] += 1
            state["rows"].add_(1)
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01 * state["calls"])


def hooked(params: Any) -> optim.Optimizer:
    """Says its count of loads besides, and is given everything by its own load."""
    made = optim.AdamW(params, lr=0.01)
    made.loads = 0  # type: ignore[attr-defined]
    made.register_state_dict_post_hook(lambda o, said: said.__setitem__("loads", o.loads))  # type: ignore[attr-defined]
    made.register_load_state_dict_pre_hook(lambda o, said: setattr(o, "loads", said["loads"]))
    return made


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "sgd": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "rows": lambda p: Rows(p, {}),
    "hooked": hooked,
}


def make(kind: str, optimizer: str, seed: int, device: str = "cpu") -> dict[str, Any]:
    model = net(kind, seed, device)
    return {
        "optim": OPTIMIZERS[optimizer](model.parameters()),
        "model": model,
        "rng": Rng(),
        "position": PerRank({"rank": torch.distributed.get_rank()}),
    }


def train(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = (torch.arange(8).reshape(2, 4) * (step + 1)) % 7
        state["optim"].zero_grad()
        loss = torch.nn.functional.cross_entropy(state["model"](x).flatten(0, 1), x.flatten())
        loss.backward()
        state["optim"].step()
        losses.append(loss.item())
    return losses


# --- what runs on the ranks ----------------------------------------------------------------------


def shapes(state: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    leaves = flatten(state)
    assert leaves.tensors["model.embed.weight"].aliases == ("model.head.weight",)
    assert list(leaves.objects) == ["optim.groups"]
    return {n: (leaf.dtype, leaf.shape) for n, leaf in leaves.tensors.items()}


def round_trip(kind: str, optimizer: str, device: str) -> None:
    world = torch.distributed.get_world_size()
    one = make(kind, optimizer, 1)
    train(one, range(3))
    taken = take(one)
    wanted = train(one, range(3, 6))

    two = make(kind, optimizer, 2, device)
    give(taken, two, saved_world=world, rank=torch.distributed.get_rank(), world=world)
    again = take(two)
    assert_same(again, taken)
    for name, tensor in taken.tensors.items():
        if isinstance(tensor, DTensor):
            other = again.tensors[name]
            assert isinstance(other, DTensor)
            assert tensor.placements == other.placements, name
            assert torch.equal(tensor.to_local(), other.to_local()), name
    assert train(two, range(3, 6)) == wanted


def sharded_after_an_evaluation() -> None:
    state = make("fsdp", "adamw", 1)
    before = take(state)
    with torch.no_grad():
        state["model"](torch.arange(3))
    assert not all(isinstance(p, DTensor) for p in state["model"].parameters())
    assert_same(take(state), before)
    train(state, range(1))


def aliases(kind: str) -> list[str]:
    """Return what is shared: a rank that holds nothing of a tensor must say the same."""
    model = net(kind, 1)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    leaves = flatten({"model": model, "weights": bare.state_dict()})
    return [f"{n}={leaf.aliases}" for n, leaf in leaves.tensors.items()]


def meta_keeps_what_fsdp_keeps() -> None:
    taken = take({"model": net("fsdp", 1)})
    model = net("fsdp", 2, "meta")
    give(taken, {"model": model})
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert len(sharded) == len(list(model.parameters()))
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    before = take({"model": model})
    train({"model": model, "optim": optimizer}, range(1))
    after = take({"model": model})
    moved = [n for n, t in before.tensors.items() if not torch.equal(t, after.tensors[n])]
    assert "model.up.weight" in moved


# Starting a world costs more than what runs in it, so each does several things.


def everything(kind: str) -> list[Any]:
    for optimizer in OPTIMIZERS:
        round_trip(kind, optimizer, "cpu")
    if kind.startswith("fsdp"):
        round_trip(kind, "adamw", "meta")
        round_trip(kind, "hooked", "meta")
    if kind == "fsdp":
        meta_keeps_what_fsdp_keeps()
        sharded_after_an_evaluation()
    state = make(kind, "adamw", 1)
    train(state, range(1))
    return [shapes(state), aliases(kind)]


# --- the tests -----------------------------------------------------------------------------------


# Of two ranks, too, one has none of a bias, and shards are uneven.
WORLDS = [("ddp", 2), ("fsdp", 2), ("tp", 2), ("fsdp+tp", 4)]
LARGER = [pytest.param(kind, 4, marks=pytest.mark.long) for kind in ("ddp", "fsdp", "tp")]


@pytest.mark.parametrize(("kind", "ranks"), [*WORLDS, *LARGER])
def test_training_goes_on_bit_for_bit_under_the_names_of_the_bare_model(
    kind: str, ranks: int
) -> None:
    model = Net()
    bare = {"optim": OPTIMIZERS["adamw"](model.parameters()), "model": model}
    train(bare, range(1))
    wanted = shapes(bare)
    shared = flatten({"model": model, "weights": model.state_dict()})
    aliases = [f"{n}={leaf.aliases}" for n, leaf in shared.tensors.items()]
    for found in run_ranks(ranks, everything, kind, deadline_s=240):
        assert list(found[0].items()) == list(wanted.items())
        assert found[1] == aliases
