"""Each of torch's optimizers, saved after two steps and loaded into a fresh one."""

from __future__ import annotations

import pytest

from tests.checkpoint.torch.optimizers import classes, play

TORCHS = classes("torch")


@pytest.mark.parametrize("name", TORCHS)
def test_each_of_torchs_comes_back_bit_for_bit(name: str) -> None:
    result = play(name, TORCHS[name])
    assert result.outcome == "exact", result.text
