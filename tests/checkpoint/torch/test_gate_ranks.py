"""Lazy copies under FSDP2 and tensor parallelism: a save at every step, training in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.networks import build, step, whole

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("writing_thread")]

STEPS = 4


def train_and_save(root: str, kind: str) -> dict[int, dict[str, torch.Tensor]]:
    """Save at every step without waiting; return what each step's state was."""
    model, optim = build(kind, 1)
    seen = {}
    # Throttled, so that copies and writes are under way when the next step comes.
    with ckptd.Checkpointer(
        root, storage=ckptd.Storage(throttle=3e5), copy=ckptd.CopyOptions(slots=2)
    ) as ck:
        for number in range(1, STEPS + 1):
            step(model, optim)
            seen[number] = whole(model, optim)
            ck.save(number, {"model": model, "optim": optim})
    return seen


def load_all(root: str, kind: str) -> dict[int, dict[str, torch.Tensor]]:
    model, optim = build(kind, 2)
    found = {}
    for number in range(STEPS, 0, -1):
        with ckptd.Checkpointer(root) as ck:
            ck.load({"model": model, "optim": optim}, number)
        found[number] = whole(model, optim)
    return found


def test_each_step_is_what_it_was(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    seen = run_ranks(4, train_and_save, root, "fsdp+tp", deadline_s=120.0)[0]
    found = run_ranks(2, load_all, root, "fsdp", deadline_s=120.0)[0]
    for number, wanted in seen.items():
        assert found[number].keys() == wanted.keys()
        different = [n for n in wanted if not torch.equal(found[number][n], wanted[n])]
        assert not different, (number, different)
