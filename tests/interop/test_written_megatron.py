"""torch_dist that was written without Megatron is loaded by it, as its own is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.plugins.megatron.world import VOCABULARY, Job

pytestmark = pytest.mark.plugins

SHARDING = "fully_reshardable"
SIZES = (f"let v = {VOCABULARY}", f"let vpad = {VOCABULARY}")


def train_and_save(folder: str) -> None:
    """Train over tensor parallelism, and save with the distributed optimizer."""
    job = Job(tp=2, sharding=SHARDING)
    job.train(2)
    from megatron.core import dist_checkpointing

    about = {"distrib_optim_sharding_type": SHARDING}
    dist_checkpointing.save(job.state(), folder, content_metadata=about)


def load_and_train(folder: str) -> tuple[int, list[float]]:
    """Go on over a pipeline; return the iteration, and the losses of the last stage."""
    job = Job(pp=2, sharding=SHARDING)
    from megatron.core import dist_checkpointing

    job.take(dist_checkpointing.load(job.wanted(), folder))
    return job.iteration, job.train(2)


@pytest.mark.dist
def test_a_job_goes_on_from_it_as_from_megatrons_own(tmp_path: Path, cli: Cli) -> None:
    """Through the names of Hugging Face, with moments and settings, and into another cut."""
    theirs, root, ours = (str(tmp_path / n) for n in ("theirs", "root", "ours"))
    Path(theirs).mkdir()
    run_ranks(2, train_and_save, theirs, deadline_s=240.0)
    sizes = [part for size in SIZES for part in ("-e", size)]
    there = ["--from", "megatron.dist", "--to", "hf.llama", "-e", "let kv = 2", *sizes]
    done = cli("reshard", theirs, root, *there)
    assert done.code == 0, done
    done = cli("reshard", root, ours, "--to", "megatron.dist", "--format", "torch_dist", *sizes)
    assert done.code == 0, done
    wanted, found = (run_ranks(2, load_and_train, f, deadline_s=240.0) for f in (theirs, ours))
    assert found == wanted
    assert [iteration for iteration, _ in found] == [2, 2]
    assert any(losses for _, losses in found)
