"""What torchtitan's settings do; that a run goes on bit for bit is in tests/trainers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import NotFoundError, UsageError
from tests.trainers.packages import needs

pytestmark = pytest.mark.plugins


class Job:
    """A model of two stages on one rank, with what torchtitan has beside it."""

    def __init__(self, folder: Path, parts: int = 1, adapter: Any = None, **settings: Any) -> None:
        needs("torchtitan.components.checkpointer.base")
        from ckptd_torchtitan import CkptdManager

        self.parts = [nn.Linear(3, 3) for _ in range(parts)]
        self.optimizers = [torch.optim.AdamW(p.parameters(), lr=0.1) for p in self.parts]
        self.schedules = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)
        self.step = 0
        config: Any = CkptdManager.Config(
            **({"enable": True, "interval": 2, "folder": str(folder)} | settings)
        )
        self.manager: Any = config.build(
            dataloader=None,
            model_parts=self.parts,
            optimizers=self,
            lr_schedulers=self.schedules,
            states={"train_state": self},
            sd_adapter=adapter,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, steps: int) -> list[bool]:
        saved = []
        while self.step < steps:
            self.step += 1
            sum(part(torch.ones(2, 3)).sum() for part in self.parts).backward()
            self.manager.maybe_wait_for_staging()
            for optimizer in self.optimizers:
                optimizer.step()
            self.schedules.step()
            saved.append(self.manager.save(self.step, last_step=self.step == steps))
        self.manager.maybe_wait_for_saving()
        assert not self.manager.enable or self.manager.save_future is None
        self.manager.close()
        return saved

    def values(self) -> Any:
        return copy.deepcopy(
            ([p.state_dict() for p in self.parts], [o.state_dict() for o in self.optimizers])
        )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("parts", [1, 2])
def test_when_it_saves_and_what_it_loads(parts: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", parts, keep_latest_k=2, enable_first_step_checkpoint=True)
    assert job.manager.load() is False
    assert job.train(7) == [True, True, False, True, False, True, True]
    again = Job(tmp_path / "root", parts)
    assert again.manager.load() is True
    assert again.step == 7
    assert same(again.values(), job.values())
    again.manager.close()
    older = Job(tmp_path / "root", parts)
    with pytest.raises(NotFoundError):
        older.manager.load(4)
    assert older.manager.load(6)
    assert older.step == 6
    older.manager.close()


def test_one_that_is_off(tmp_path: Path) -> None:
    job = Job(tmp_path / "root", enable=False)
    assert not job.manager.load()
    assert job.train(2) == [False, False]
    only = Job(tmp_path / "root", load_only=True)
    assert only.train(2) == [False, False]
    assert not list(tmp_path.iterdir())


def test_an_initial_checkpoint(tmp_path: Path) -> None:
    first = Job(tmp_path / "first")
    first.train(4)
    before = sorted(p.name for p in (tmp_path / "first/generations").iterdir())
    for model_only, step in ((True, 0), (False, 4)):
        job = Job(
            tmp_path / f"root{step}",
            initial_load_path=str(tmp_path / "first"),
            initial_load_model_only=model_only,
        )
        assert job.manager.load() is True
        assert job.step == step
        assert same(job.values()[0], first.values()[0])
        assert same(job.values()[1], first.values()[1]) != model_only
        assert job.train(6)[-1]
    # The other run's root was read, and not taken over.
    assert sorted(p.name for p in (tmp_path / "first/generations").iterdir()) == before


def test_what_is_left_out(tmp_path: Path) -> None:
    first = Job(tmp_path / "root")
    first.train(4)
    job = Job(tmp_path / "root", exclude_from_loading=["optimizer", "lr_scheduler"])
    fresh = job.values()
    assert job.manager.load()
    assert job.step == 4
    assert same(job.values()[0], first.values()[0])
    assert same(job.values()[1], fresh[1])
    assert job.train(5) == [True]
    with pytest.raises(UsageError, match="unknown name of a part"):
        Job(tmp_path / "root", exclude_from_loading=["optim"]).manager.load()


def test_a_seed_is_weights(tmp_path: Path) -> None:
    seed = Job(tmp_path / "root")
    assert seed.manager.save(0, last_step=True)
    seed.manager.close()
    job = Job(tmp_path / "root")
    assert job.manager.load()
    assert job.step == 0
    assert same(job.values()[0], seed.values()[0])
    assert job.train(2) == [False, True]


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.arange(9.0).reshape(3, 3)
    safetensors.save_file(
        {"hf.weight": weight, "hf.bias": torch.ones(3)}, str(tmp_path / "model.safetensors")
    )

    class Adapter:
        hf_assets_path = str(tmp_path)

        def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
            return {f"hf.{name}": value for name, value in state.items()}

        def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
            return {name.removeprefix("hf."): value for name, value in state.items()}

        def get_hf_storage_reader(self, path: str, quantized: bool) -> Any:
            return HuggingFaceStorageReader(path)

    job = Job(tmp_path / "root", adapter=Adapter(), initial_load_in_hf=True)
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        job.manager.load()
    assert torch.equal(job.parts[0].weight, weight)
    job.manager.close()


def test_a_hugging_face_model_is_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Hugging Face"):
        Job(tmp_path / "root", last_save_in_hf=True)
