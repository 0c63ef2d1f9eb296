"""Plans of saves are agreed on once, and stay agreed on when a save fails on one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.errors import CkptdError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist]


def save_with_one_bad_state(root: str) -> list[str]:
    """Nothing goes to the root, so that rank 0 is raised nothing."""
    tiers = [ckptd.Memory(every=1)]
    said = []
    with ckptd.Checkpointer(root, every=100, tiers=tiers, timeout_s=30.0) as ck:
        for step in (1, 2, 3):
            state: dict[str, Any] = {"a": torch.full((3,), float(step))}
            if (step, dist.get_rank()) == (2, 1):
                state["odd"] = object()
            try:
                handle = ck.save(step, state)
                assert handle is not None
                handle.durable(PATIENCE_S, tier="memory")
                said.append("complete")
            except CkptdError as error:
                said.append(error.kind)
    return said


def test_ranks_keep_their_plan_when_one_of_them_cannot_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    first, second = run_ranks(2, save_with_one_bad_state, str(tmp_path / "root"))
    assert first == ["complete", "aborted", "complete"]
    assert second[0] == second[2] == "complete"
    assert second[1] not in ("complete", "aborted")
