"""A trainer with frozen parameters: little is written, and everything is restored bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.save.referring import assert_verified, own_bytes
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

WIDTH = 576
LAYERS = 4
STEPS = 2


class Adapted(nn.Module):
    """A frozen matrix and a low-rank change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Trainer:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
        learned = [p for p in self.model.parameters() if p.requires_grad]
        self.optim = torch.optim.AdamW(learned, lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def step(self, number: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        self.model(x).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    def seen(self) -> dict[str, torch.Tensor]:
        out = {f"model.{n}": t.detach().clone() for n, t in self.model.state_dict().items()}
        for i, state in self.optim.state_dict()["state"].items():
            out |= {f"optim.{i}.{k}": v.clone() for k, v in state.items()}
        return out

    @property
    def frozen_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters() if not p.requires_grad)


def train(root: str, first: int, **options: Any) -> dict[int, dict[str, torch.Tensor]]:
    """Train and save at each step, from what there is; return each step's state."""
    trainer = Trainer(first)
    seen = {}
    with ckptd.Checkpointer(root, **options) as ck:
        if first > 1:
            assert ck.load(trainer.state) == first - 1
        for number in range(first, first + STEPS):
            trainer.step(number)
            seen[number] = trainer.seen()
            handle = ck.save(number, trainer.state)
            assert handle is not None
            handle.durable(PATIENCE_S)
    return seen


def load_all(root: str, steps: int) -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    with ckptd.Checkpointer(root) as ck:
        for number in range(steps, 0, -1):  # a load takes what came later off the line
            trainer = Trainer(99)
            ck.load(trainer.state, number)
            found[number] = trainer.seen()
    return found


def assert_same(
    found: dict[int, dict[str, torch.Tensor]], wanted: dict[int, dict[str, torch.Tensor]]
) -> None:
    for number, state in wanted.items():
        assert found[number].keys() == state.keys()
        different = [n for n in state if not torch.equal(found[number][n], state[n])]
        assert not different, (number, different)


def written(root: str) -> list[int]:
    """Return the bytes that each checkpoint wrote itself; every one is verified."""
    with open_store(root) as store:
        catalogue = Catalogue(store)
        names: list[CommitName] = catalogue.line()
        for name in names:
            assert_verified(store, name)
        return [own_bytes(catalogue.manifest(n)) for n in names]


def test_frozen_parameters_are_written_once_also_by_the_next_life(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    seen = train(root, 1) | train(root, STEPS + 1)
    frozen = Trainer(1).frozen_bytes
    sizes = written(root)
    # Biases are too small to be looked for.
    weights = LAYERS * WIDTH * WIDTH * 4
    assert frozen - weights < frozen // 50
    assert all(size == sizes[0] - weights for size in sizes[1:])
    assert sizes[1] < sizes[0] // 3
    assert_same(load_all(root, 2 * STEPS), seen)


def test_a_checkpointer_that_must_not_refer_writes_everything(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    train(root, 1, storage=ckptd.Storage(dedup=False))
    assert len(set(written(root))) == 1


@pytest.mark.dist
def test_ranks_and_another_number_of_ranks(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    seen = run_ranks(2, train, root, 1, deadline_s=120.0)[0]
    seen |= train(root, STEPS + 1)
    sizes = written(root)
    assert all(size == sizes[0] - LAYERS * WIDTH * WIDTH * 4 for size in sizes[1:])
    assert_same(run_ranks(2, load_all, root, 2 * STEPS, deadline_s=120.0)[1], seen)
    assert_same(load_all(root, 1), {1: seen[1]})
