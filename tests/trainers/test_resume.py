"""Trainers that are killed and resumed do, bit for bit, what they would have done."""

from __future__ import annotations

import importlib
import re
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.trainers.packages import needs
from tests.trainers.report import Report, read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guide/exact-resume.md"


@dataclass(frozen=True)
class Trainer:
    """A module here with ``main(root, report)``; killed after step `kill_at` of `steps`."""

    script: str
    ranks: int
    steps: int
    kill_at: int
    resumed_from: int
    options: tuple[tuple[str, Any], ...] = ()
    package: str = ""


TRAINERS = {
    "nanogpt": Trainer("nanogpt", 2, 14, 7, 6),
    "workers": Trainer("workers", 1, 14, 10, 8),
    "fsdp2": Trainer("fsdp2", 2, 12, 9, 8),
    "ddp_compile": Trainer("ddp_compile", 2, 15, 9, 8),
    "stateful": Trainer(
        "workers", 1, 14, 10, 8, (("stateful", True),), "torchdata.stateful_dataloader"
    ),
    "accelerate": Trainer("with_accelerate", 2, 12, 7, 6, package="accelerate"),
    "lightning": Trainer("with_lightning", 1, 12, 7, 6, package="lightning"),
    "transformers": Trainer("with_transformers", 2, 12, 7, 6, package="transformers"),
    "titan_loop": Trainer("titan_loop", 2, 12, 7, 6),
    "torchtitan": Trainer(
        "with_torchtitan", 2, 12, 7, 6, package="torchtitan.components.dataloader"
    ),
}
SHORT = ("nanogpt", "workers")


def marks(name: str) -> Sequence[pytest.MarkDecorator]:
    if TRAINERS[name].package:
        return (pytest.mark.plugins,)
    return () if name in SHORT else (pytest.mark.long,)


def live(script: str, root: str, folder: str, kill_at: int, options: dict[str, Any]) -> None:
    """Run a trainer in this rank."""
    # Frameworks warn of much that is none of ours; what ckptd says comes as a log record.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    report = Report(Path(folder), kill_at)
    importlib.import_module(f"tests.trainers.{script}").main(root, report, **options)


def run(trainer: Trainer, root: Path, folder: Path, kill_at: int = 0) -> list[dict[str, str]]:
    arguments = (trainer.script, str(root), str(folder), kill_at, dict(trainer.options))
    if kill_at:
        for outcome in rank_outcomes(trainer.ranks, live, *arguments, deadline_s=420.0):
            assert outcome.exit_code == -signal.SIGKILL, outcome.trace or outcome.log
    else:
        run_ranks(trainer.ranks, live, *arguments, deadline_s=420.0)
    return read(folder)


@pytest.mark.dist
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name)) for name in TRAINERS],
)
def test_a_killed_trainer_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    trainer = TRAINERS[name]
    if trainer.package.startswith("torchtitan"):
        needs(trainer.package)
    whole = run(trainer, tmp_path / "a", tmp_path / "whole")
    first = run(trainer, tmp_path / "b", tmp_path / "first", trainer.kill_at)
    second = run(trainer, tmp_path / "b", tmp_path / "second")
    for rank in range(trainer.ranks):
        wanted = whole[rank]
        assert len({v for k, v in wanted.items() if k.isdigit()}) > trainer.steps // 2
        assert [k for k in wanted if k.isdigit()] == [str(s + 1) for s in range(trainer.steps)]
        assert first[rank].items() <= wanted.items()
        assert second[rank].pop("from") == str(trainer.resumed_from)
        assert second[rank].items() <= wanted.items()
        compared = [k for k in second[rank] if k.isdigit()]
        assert len(compared) == trainer.steps - trainer.resumed_from
        assert "parameters" in second[rank]


def took(script: str) -> int:
    """Count the lines of a script that are marked as ckptd's."""
    lines = (Path(__file__).parent / f"{script}.py").read_text().splitlines()
    return sum(re.search(r"  # ckptd\b", line) is not None for line in lines)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_guide_tells_what_each_trainer_took(name: str) -> None:
    trainer = TRAINERS[name]
    row = f"tests/trainers/{trainer.script}.py) | {took(trainer.script)} | "
    row += f"{trainer.steps - trainer.resumed_from} of {trainer.steps} | "
    assert row in PAGE.read_text(), row
