"""Checkpoints that DeepSpeed writes here are read bit by bit, and as its own tools read them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.testing.ranks import run_ranks
from tests.interop.made_zero import train_and_save
from tests.interop.models import check
from tests.readers.opening import open_reader

pytestmark = pytest.mark.plugins

WORLD = {"DS_ACCELERATOR": "cpu"}
CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "1 on 2": (2, 1, False, {}),
    "1 on 3, bf16": (3, 1, True, {}),
    "2 on 3": (3, 2, False, {}),
    "2 on 2, bf16": (2, 2, True, {}),
    "2 on 3, round robin": (3, 2, False, {"round_robin_gradients": True}),
    "3 on 2": (2, 3, False, {}),
    "3 on 3, bf16": (3, 3, True, {}),
    "3 on 3, small groups": (3, 3, False, {"sub_group_size": 90}),
    "3 on 1": (1, 3, False, {}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_every_bit(case: str, tmp_path: Path) -> None:
    ranks, stage, half, options = CASES[case]
    asked = (str(tmp_path), stage, half, options)
    wanted = run_ranks(ranks, train_and_save, *asked, deadline_s=240.0, env=WORLD)[0]
    assert len(wanted) == 3 * 6 + 3
    tool = importlib.import_module("deepspeed.utils.zero_to_fp32")
    whole = tool.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    reader = open_reader(tmp_path)
    check(reader, wanted)
    for name in whole:
        if stage == 3 or name != "kept":  # theirs forgets it below stage 3
            found = torch.from_numpy(reader.tensors([name])[name].astype("f4"))
            assert torch.equal(found, whole[name].float()), name
    assert reader.objects()["seen"] == 7
    assert reader.commit.step == 2
