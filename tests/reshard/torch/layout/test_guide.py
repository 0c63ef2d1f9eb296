"""The guide's example, run as it stands."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.testing.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("writing_thread")]

GUIDE = Path(__file__).parents[4] / "docs" / "guide" / "layouts.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def run(folder: str) -> tuple[bool, bool, int]:
    os.chdir(folder)
    names: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank())
    for code in blocks("python"):
        exec(compile(code, str(GUIDE), "exec"), names)
    rank, loaded = dist.get_rank(), names["loaded"]
    pp, tp = divmod(rank, 2)
    group = names["model"].layers[1].qkv.weight.detach()
    name = f"blocks.{2 * pp + 1}"
    parts = [loaded[f"{name}.{t}.weight"].chunk(2)[tp] for t in ("q", "k", "v")]
    alike = all(torch.equal(t.chunk(4)[rank], names["rows"][n]) for n, t in loaded.items())
    return torch.equal(group, torch.cat(parts)), alike, names["report"].samples


def test_the_example_runs(tmp_path: Path) -> None:
    (tmp_path / "job.lay").write_text(blocks("lay")[0])
    for saved, moved, samples in run_ranks(4, run, str(tmp_path), deadline_s=200.0):
        assert saved
        assert moved
        assert samples
