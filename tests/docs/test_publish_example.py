"""The guide's example runs: the trainer's last weights come to where they belong in the rollout."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S, until

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


def models(module: ModuleType) -> list[torch.nn.Module]:
    """Return the models that the example makes from now on."""
    made: list[torch.nn.Module] = []
    kind = module.Model

    def make(**options: int) -> torch.nn.Module:
        made.append(kind(**options))
        return made[-1]

    module.__dict__["Model"] = make
    return made


def train(folder: str) -> dict[str, Any]:
    """Train, and in place of the pauses between steps wait until the rollout has printed each."""
    module = example(folder)
    made = models(module)
    steps = count(1)

    def pause(_: float) -> None:
        until(Path(folder, f"step.{next(steps)}").exists)

    module.__dict__["time"] = SimpleNamespace(sleep=pause)
    module.train()
    parameters: Iterable[tuple[str, Any]] = made[0].named_parameters()
    return {name: p.full_tensor().detach().numpy() for name, p in parameters}


def sample(folder: str) -> dict[str, Any]:
    module = example(folder)
    made = models(module)

    def note(line: str, **_: Any) -> None:
        if line.startswith("step"):
            Path(folder, f"step.{int(line[4:].partition(':')[0])}").touch()

    module.__dict__["print"] = note
    module.sample()
    return {name: p.detach().numpy() for name, p in made[0].named_parameters()}


def test_trainer_and_rollout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with ThreadPoolExecutor() as pool:
        trained = pool.submit(run_ranks, 2, train, folder, deadline_s=PATIENCE_S)
        sampled = run_ranks(2, sample, folder, deadline_s=PATIENCE_S)
        whole, _ = trained.result()
    for rank, found in enumerate(sampled):
        assert found.keys() == whole.keys()
        for name, values in found.items():
            axis = 1 if ".down." in name else 0
            parts = [whole[name]] * 2 if "embed" in name else np.split(whole[name], 2, axis)
            np.testing.assert_array_equal(values, parts[rank], err_msg=name)
