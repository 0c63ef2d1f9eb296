"""Experts that move to where the load is, while the job trains.

    torchrun --nproc-per-node 4 docs/examples/move_experts.py          # or --json

A tiny model trains on all ranks; each rank has some experts of each layer. After a few steps the
experts are dealt out anew by the tokens that they got. First the price is printed, then they move,
with their Adam state, between two steps. At the end the losses are compared with those of the same
job without the move: they are equal to the bit.

Every rank sees all tokens. The rank that has a token's expert computes it, and one sum over the
ranks brings the outputs together: one term is the output and the others are zeros, so a placement
changes no bit. What is no expert is the same on all ranks. (A real trainer sends tokens instead.)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptd

LAYERS, EXPERTS, HIDDEN, INNER = 2, 6, 4, 3

Tables = Mapping[int, Sequence[Sequence[int]]]
"""Experts of each rank, by layer."""

_SPACE = """
mesh M = ep:{world}
let e = {experts}

space moe {{
  L{{l}}.router[e h]
  L{{l}}.X{{e}}.w1[f h]
  L{{l}}.X{{e}}.w2[h f]
  follow m=exp_avg, s=exp_avg_sq
  scalar step(param)
}}
"""
_STACKS = """
layout train of moe on M {
  layers.{l}.router = L{l}.router[e h]
  layers.{l}.w1 = L{l}.X.w1[e@ep:bal f h]
  layers.{l}.w2 = L{l}.X.w2[e@ep:bal h f]
}
"""
_LISTS = """
layout train of moe on M {
  layers.{l}.router = L{l}.router[e h]
  layers.{l}.experts.{#e@ep:bal}.w1 = L{l}.X{e}.w1[f h]
  layers.{l}.experts.{#e@ep:bal}.w2 = L{l}.X{e}.w2[h f]
}
"""


def layout_of(world: int, *, lists: bool = False) -> str:
    """Return the layout of a job whose experts are dealt out evenly."""
    return _SPACE.format(world=world, experts=EXPERTS) + (_LISTS if lists else _STACKS)


def evenly(world: int) -> dict[int, list[list[int]]]:
    """Return where that layout has the experts."""
    parts = [p.tolist() for p in torch.arange(EXPERTS).tensor_split(world)]
    return dict.fromkeys(range(LAYERS), parts)


class _Together(torch.autograd.Function):
    """The sum over the ranks; each rank's part has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Apart(torch.autograd.Function):
    """The same on all ranks; gradients of their parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        out = grads[0].clone()
        dist.all_reduce(out)
        return out


def _weights(layer: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(layer)
    shapes = (EXPERTS, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return [torch.randn(s, generator=made) * 0.5 for s in shapes]


class Expert(nn.Module):
    def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())


class Layer(nn.Module):
    """Experts as two stacks, or as a list of modules."""

    def __init__(self, number: int, mine: Sequence[int], *, lists: bool) -> None:
        super().__init__()
        router, w1, w2 = _weights(number)
        self.router = nn.Parameter(router)
        self.mine = sorted(mine)
        if lists:
            self.experts = nn.ModuleList(Expert(w1[e], w2[e]) for e in self.mine)
        else:
            self.w1, self.w2 = nn.Parameter(w1[self.mine]), nn.Parameter(w2[self.mine])
        self.lists = lists
        self.tokens = [0] * EXPERTS

    def expert(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        """Return what one of the rank's experts makes of some tokens."""
        own: Any = self.experts[slot] if self.lists else None
        w1, w2 = (self.w1[slot], self.w2[slot]) if own is None else (own.w1, own.w2)
        return (x @ w1.T).relu() @ w2.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.linear(x, self.router).softmax(-1)
        weight, expert = chosen.max(-1)
        for number in expert.tolist():
            self.tokens[number] += 1
        inner: torch.Tensor = _Apart.apply(x)  # type: ignore[no-untyped-call]
        # Input and weights are used whatever the tokens are: they always have a gradient.
        out = inner * 0.0
        for slot, number in enumerate(self.mine):
            rows = (expert == number).nonzero().flatten()
            out = out.index_add(0, rows, self.expert(inner[rows], slot))
        if not self.lists:
            out = out + 0.0 * (self.w1.sum() + self.w2.sum())
        together: torch.Tensor = _Together.apply(out)  # type: ignore[no-untyped-call]
        return x + weight[:, None] * together


class Trainer:
    """Model and Adam of one rank; `tables` say where the experts are."""

    def __init__(self, tables: Tables, *, lists: bool = False) -> None:
        rank = dist.get_rank()
        layers = [Layer(n, tables[n][rank], lists=lists) for n in range(LAYERS)]
        self.layers = layers
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.number = 0

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optim": self.optim}

    def place(self, tables: Tables) -> None:
        """Say that the experts lie elsewhere."""
        for number, table in tables.items():
            self.layers[number].mine = sorted(table[dist.get_rank()])

    def step(self) -> float:
        """Train one step; return its loss."""
        self.number += 1
        made = torch.Generator().manual_seed(1000 + self.number)
        x = y = torch.randn(16, HIDDEN, generator=made)
        for layer in self.layers:
            y = layer(y)
        loss = (y - x.roll(1, 0)).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return float(loss.detach())

    def steps(self, count: int) -> list[float]:
        """Train some steps."""
        return [self.step() for _ in range(count)]


def by_load(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Return a placement that gives each rank about as many tokens: the largest ones first."""
    out: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for expert in sorted(range(len(tokens)), key=lambda e: -tokens[e]):
        rank = loads.index(min(loads))
        out[rank].append(expert)
        loads[rank] += max(1, tokens[expert])
    return out


def run(steps: int, *, tell: bool) -> dict[str, Any]:
    """Train, move, train on; return what it cost and whether the losses are the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(evenly(world))
    losses = trainer.steps(steps)
    tables = {n: by_load(layer.tokens, world) for n, layer in enumerate(trainer.layers)}
    move = ckptd.ExpertMove(trainer.state, layout_of(world), tables)
    if rank == 0 and tell:
        print(f"moves {move.price.experts} experts, {move.price.all_bytes} bytes", flush=True)
    report = move.run()
    trainer.place(tables)
    losses += trainer.steps(steps)
    unmoved = Trainer(evenly(world)).steps(2 * steps)
    return {
        "placement": tables,
        "price": move.price.to_dict(),
        "seconds": report.seconds,
        "losses": losses,
        "equal": losses == unmoved,
    }


def main() -> None:
    """Run as one of torchrun's ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = run(options.steps, tell=not options.json)
    if dist.get_rank() == 0:
        if options.json:
            print(json.dumps(found))
        else:
            print(f"losses {found['losses'][-1]:.6f}, equal to the bit: {found['equal']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
