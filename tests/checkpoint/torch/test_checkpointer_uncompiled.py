"""Calls of a checkpointer inside a compiled function run as they are."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("default")


def test_a_compiled_step_saves_loads_and_announces() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    counters = torch._dynamo.utils.counters
    with ckptd.Checkpointer(f"memory://{uuid.uuid4().hex}") as ck:

        @torch.compile(backend="eager")
        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            y = model(x).square().sum()
            ck.before_mutation()
            ck.save(n, state)
            return y * 2

        for n in (1, 2, 3):
            step(torch.ones(2, 3), n).backward()
            optimizer.step()
            optimizer.zero_grad()
        ck.wait()
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        ck.save(4, state).durable(PATIENCE_S)

        @torch.compile(backend="eager")
        def begin(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x + 1, ck.load(state)

        with torch.no_grad():
            model.weight.zero_()
        assert begin(torch.ones(1))[1] == 4
    assert torch.equal(model.weight, saved["weight"])
    reasons = " ".join(counters["graph_break"])
    assert "torch.compiler.disable" in reasons
    # Nothing inside of save was looked into.
    assert "allocate_lock" not in reasons
    assert "ckptd/checkpoint/save" not in reasons


def test_a_program_that_compiles_nothing_imports_no_compiler() -> None:
    code = (
        "import sys, torch, ckptd\n"
        "with ckptd.Checkpointer('memory://x') as ck:\n"
        "    ck.save(1, {'a': torch.ones(2)})\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ended.stdout.strip() == "False"
