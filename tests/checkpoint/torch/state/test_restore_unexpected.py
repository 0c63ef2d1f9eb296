"""What a checkpoint has and no rank has a place for: judged over all ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.manifest import Manifest
from ckptd.checkpoint.torch.state.restore import SavedState, without_place
from ckptd.errors import MismatchError
from ckptd.testing.ranks import run_ranks
from tests.base.torch.test_ranks_agree import everywhere
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

LAYERS = 5


def saved(names: Sequence[str]) -> SavedState:
    manifest = Manifest(1, 1, "0001", 1, (), (), (), (), ())
    half = len(names) // 2
    tensors = {name: at for at, name in enumerate(names[:half])}
    return SavedState(manifest, tensors, dict.fromkeys(names[half:], 0), {}, {})


@pytest.mark.parametrize("world", [1, 2, 17, 40])
@pytest.mark.parametrize("names", [1, 7, 400])
def test_what_is_left_is_what_every_rank_leaves(world: int, names: int) -> None:
    draw = random.Random(world * names)
    every = [f"layer.{i}" for i in range(names)]
    for places in (0.0, 0.02, 1.0):
        left = [[n for n in every if draw.random() >= places] for _ in range(world)]

        def work(agreement: Agreement, left: list[list[str]] = left) -> list[str]:
            return without_place(agreement, saved(every), left[agreement.board.rank])

        wanted = set(every).intersection(*left)
        assert [set(found) for found in everywhere(world, work)] == [wanted] * world


def test_a_rank_that_failed_leaves_it_to_the_others() -> None:
    def work(agreement: Agreement, failed: set[int]) -> list[str]:
        fails = agreement.board.rank in failed
        return without_place(agreement, None if fails else saved(["a", "b"]), ["b"])

    assert everywhere(20, lambda a: work(a, {0, 1, 19}))[2:19] == [["b"]] * 17
    assert everywhere(3, lambda a: work(a, {0, 1, 2})) == [[]] * 3


class Stage(nn.Module):
    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in numbers})
        with torch.no_grad():
            for n in numbers:
                for p in self.layers[str(n)].parameters():
                    p.fill_(float(n + 1))


def stage_of(rank: int, world: int, value: float | None = None) -> dict[str, Any]:
    """Return the state of one stage; with a value that of its optimizer is there, and all is so."""
    stage = Stage(range(rank, LAYERS, world))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    if value is not None:
        for p in stage.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()
    return {"model": stage, "optim": optimizer}


def flat(state: dict[str, Any]) -> dict[str, list[float]]:
    model, optimizer = state["model"], state["optim"]
    return {
        name: [p.flatten()[0].item(), *optimizer.state[p]["exp_avg"].flatten()[:1].tolist()]
        for name, p in model.named_parameters()
    }


def save_stages(root: str) -> dict[str, list[float]]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = stage_of(rank, world, 0.5 + rank)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable(PATIENCE_S)
    return flat(state)


def load_stages(root: str) -> Any:
    """Load as the README does, then with what fits nowhere."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = stage_of(rank, world)
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(state) == 1
        assert ck.last_load is not None
        assert (ck.last_load.missing, ck.last_load.unexpected) == ((), ())
        loaded = flat(state)
        told = []
        wrong = stage_of(rank, world)
        if rank == world - 1:  # one rank's mistake is an error of all
            layers = wrong["model"].layers
            layers["misspelt"] = layers.pop(str(rank))
            wrong["optim"] = torch.optim.AdamW(wrong["model"].parameters(), lr=0.1)
        with pytest.raises(MismatchError) as caught:
            ck.load(wrong)
        told.append(str(caught.value))
        less = {"model": stage_of(rank, world)["model"]}
        with pytest.raises(MismatchError) as caught:
            ck.load(less)
        told.append(str(caught.value))
        ck.load(less, strict=False)
        assert ck.last_load is not None
        told.append(" ".join(ck.last_load.unexpected))
    return loaded, told


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_stages_load_what_stages_saved(tmp_path: Path, world: int) -> None:
    kept: dict[str, list[float]] = {}
    for part in run_ranks(2, save_stages, str(tmp_path)):
        kept |= part
    assert len(kept) == 2 * LAYERS
    results = run_ranks(world, load_stages, str(tmp_path))
    loaded: dict[str, list[float]] = {}
    for part, (misspelt, less, left) in results:
        loaded |= part
        assert f"model.layers.{world - 1}.weight: not in the live state" in misspelt
        lines = [n.split(":")[0].strip() for n in less.splitlines() if "not in the live" in n]
        assert "optim.groups" in lines
        assert all(n.startswith("optim.") for n in lines)
        assert "optim.groups" in left
        assert not [n for n in left.split() if n.startswith("model.")]
    assert loaded == kept


def load_beside(root: str) -> tuple[int, str]:
    """Load a model by a layout on rank 0, where rank 1 has none; then without its optimizer."""
    from tests.reshard.torch.layout.jobs import whole_job
    from tests.reshard.torch.layout.test_binder import WHOLE

    model, optimizer = whole_job(1, 1)
    note = {"note": torch.ones(2)}
    first = torch.distributed.get_rank() == 0
    whole = {"model": model, "optim": optimizer} if first else note
    with ckptd.Checkpointer(root, layout=WHOLE) as ck:
        ck.save(1, whole).durable(PATIENCE_S)
        step = ck.load(whole)
        with pytest.raises(MismatchError) as caught:
            ck.load({"model": model} if first else note)
    return step, str(caught.value)


@pytest.mark.dist
def test_a_rank_without_parameters_hides_no_state_that_all_lack(tmp_path: Path) -> None:
    for step, refused in run_ranks(2, load_beside, str(tmp_path)):
        assert step == 1
        assert "optim.embed.weight.exp_avg: not in the live state" in refused
        assert "\n    model." not in refused


def test_what_a_load_leaves_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"a": torch.ones(1), **{f"old{i}": i for i in range(6)}})
        ck.load({"a": torch.zeros(1)}, only="a")
        assert not caplog.records
        ck.load({"a": torch.zeros(1), "new": 0}, strict=False)
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "new not in the checkpoint" in record.message
    assert "old0, old1, old2, old3 and 2 more in the checkpoint" in record.message
