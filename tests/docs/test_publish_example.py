"""The guide's example runs: each of the trainer's last weights comes to the rollout."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "docs/examples/publish.py"


def example(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__.update(STEPS=4, PLACE=f"{folder}/at")
    return module


def train(folder: str) -> None:
    example(folder).train()


def sample(folder: str) -> list[float]:
    module = example(folder)
    seen: list[torch.nn.Module] = []
    model = module.Model
    module.Model = lambda parts: seen.append(model(parts)) or seen[0]  # type: ignore[func-returns-value]
    module.sample()
    return [float(p.abs().sum()) for p in seen[0].parameters()]


def test_trainer_and_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    trainer = threading.Thread(target=run_ranks, args=(2, train, folder))
    trainer.start()
    first, second = run_ranks(2, sample, folder, deadline_s=PATIENCE_S)
    trainer.join()
    assert first[0] == second[0]  # the embedding is whole on both
    assert first[-1] != second[-1]
