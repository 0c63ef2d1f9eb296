"""torch_dist that was written without Megatron is loaded by it, as its own is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.interop.made_megatron import load_both, save_torch_dist

pytestmark = pytest.mark.plugins

SIZES = ("-e", "let kv = 2", "-e", "let v = 128")


@pytest.mark.dist
def test_weights_and_moments_there_and_back(tmp_path: Path, cli: Cli) -> None:
    """Through the names of Hugging Face, with the moments, and into another cut."""
    theirs, root, ours = (str(tmp_path / n) for n in ("theirs", "root", "ours"))
    Path(theirs).mkdir()
    run_ranks(2, save_torch_dist, theirs, 2, 1, deadline_s=240.0)
    there = cli("reshard", theirs, root, "--from", "megatron.dist", "--to", "hf.llama", *SIZES)
    assert there.code == 0, there
    back = ["--to", "megatron.dist", "--format", "torch_dist"]
    done = cli("reshard", root, ours, *back)
    assert done.code == 0, done
    counts = run_ranks(2, load_both, theirs, ours, 1, 2, deadline_s=240.0)
    assert min(counts) > 60
