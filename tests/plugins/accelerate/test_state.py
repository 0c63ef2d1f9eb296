"""What is in the state of a program that accelerate prepared; resuming is in tests/trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptd.testing.ranks import run_ranks

pytestmark = [pytest.mark.plugins, pytest.mark.dist]


def prepared(root: str, models: int) -> tuple[list[str], bool]:
    """Return the names in the state, and whether a load gives back what was saved."""
    import accelerate

    import ckptd
    from ckptd_accelerate import state_of

    accelerator = accelerate.Accelerator(cpu=True)
    parts: Any = [nn.Linear(2, 2) for _ in range(models)]
    parts = [accelerator.prepare(part) for part in parts]
    optimizer = accelerator.prepare(torch.optim.AdamW(parts[0].parameters()))
    average = nn.Linear(1, 1)
    accelerator.register_for_checkpointing(average)
    state = state_of(accelerator, own={"best": 3})
    parts[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state)
    saved = [p.detach().clone() for m in (*parts, average) for p in m.parameters()]
    with torch.no_grad():
        for p in (p for m in (*parts, average) for p in m.parameters()):
            p.zero_()
    state["own"]["best"] = 0
    with ckptd.Checkpointer(root) as ck:
        ck.load(state)
    found = [p for m in (*parts, average) for p in m.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(saved, found, strict=True))
    return list(state), same and state["own"] == {"best": 3}


@pytest.mark.parametrize("models", [1, 2])
def test_everything_prepared_is_there(models: int, tmp_path: Any) -> None:
    names, same = run_ranks(1, prepared, str(tmp_path / "root"), models, deadline_s=120.0)[0]
    # Nothing stands for a scheduler and a scaler, which this program does not have.
    assert names == ["model", "optim", "custom", "rng", "own"]
    assert same
