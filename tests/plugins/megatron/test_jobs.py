"""Jobs of Megatron-core that save, end and go on in other parallel sizes."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.cli.running import Cli
from tests.plugins.megatron.world import Job

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(500)]

Sizes = tuple[int, int, int]
"""Tensor, pipeline and expert parallel ranks."""


def begin(root: str, sizes: Sizes, sharding: str, theirs: str = "") -> list[float]:
    """Train, save after two steps and train on; return all losses."""
    import ckptd_megatron

    logging.disable(logging.WARNING)
    job = Job(*sizes, sharding=sharding)
    losses = job.train(2)
    ckptd_megatron.save(root, job.iteration, job.state())
    if theirs:
        from megatron.core import dist_checkpointing

        os.makedirs(theirs, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(job.state(), theirs)
    return losses + job.train(2)


def go_on(root: str, sizes: Sizes, sharding: str, into: str = "") -> list[float]:
    """Load, save elsewhere and train on; return the losses since."""
    import ckptd_megatron

    logging.disable(logging.WARNING)
    job = Job(*sizes, sharding=sharding)
    job.take(ckptd_megatron.load(root, job.wanted()))
    assert job.iteration == ckptd_megatron.latest(root) == 2
    if into:
        ckptd_megatron.save(into, job.iteration, job.state())
    return job.train(2)


def chain(folder: str, first: Sizes, others: list[Sizes], theirs: str = "") -> list[list[float]]:
    """Run a job, and then others in other sizes, each from what the one before has saved."""
    sharding = "fully_reshardable"
    losses = [begin(f"{folder}/0", first, sharding, theirs)]
    for number, sizes in enumerate(others):
        losses.append(go_on(f"{folder}/{number}", sizes, sharding, f"{folder}/{number + 1}"))
    return losses


def compared(found: list[list[list[float]]]) -> int:
    """Compare the losses of jobs on several ranks; return how many there were in all."""
    whole = next(rank[0] for rank in found if rank[0])
    assert len(set(whole)) == len(whole)
    count = 0
    for rank in found:
        assert rank[0] in ([], whole)
        for losses in rank[1:]:
            assert losses in ([], whole[4:])
            count += len(losses)
    return count


def test_from_sizes_to_sizes_and_back(cli: Cli, tmp_path: Path) -> None:
    """Losses are equal bit for bit, with sums in one order; tensors are those of Megatron's own."""
    others = [(1, 2, 1), (2, 1, 1), (2, 2, 1)]
    theirs = str(tmp_path / "theirs")
    found = run_ranks(4, chain, str(tmp_path), (2, 2, 1), others, theirs, deadline_s=400.0)
    assert compared([[whole, *rest] for whole, _, *rest in found]) == 4 * (4 + 2)
    for whole, other, *_ in (rank for rank in found if rank[0] and rank[1]):
        assert other == pytest.approx(whole[4:], rel=1e-5)  # one tensor rank adds up in one go
    for number in range(4):
        tensors = cli.json("diff", str(tmp_path / str(number)), theirs, code=1)["tensors"]
        assert len(tensors) == 36
        assert all(t["equal"] for t in tensors)
    for source in ("3", "theirs"):
        said = ["--from", "megatron.dist", "--to", "hf.llama", "--format", "hf"]
        sizes = ["-e", "let kv = 2", "-e", "let hd = 4", "-e", "let v = 128"]
        made = str(tmp_path / f"hf-{source}")
        done = cli("reshard", str(tmp_path / source), made, *said, *sizes)
        assert done.code == 0, done
    assert cli.json("diff", str(tmp_path / "hf-3"), str(tmp_path / "hf-theirs"))["equal"]


def test_experts(tmp_path: Path) -> None:
    others = [(1, 1, 4), (2, 1, 2)]
    found = run_ranks(4, chain, str(tmp_path), (2, 1, 2), others, deadline_s=400.0)
    # Experts that are cut otherwise add up in another order.
    assert compared([[whole, last] for whole, _, last in found]) == 4 * 4


def test_buckets_on_fewer_ranks(tmp_path: Path) -> None:
    """An optimizer's own buckets, which only the number of data parallel ranks may cut anew."""
    root, sharding = str(tmp_path / "root"), "dp_reshardable"
    whole = run_ranks(4, begin, root, (2, 1, 1), sharding, deadline_s=200.0)
    found = run_ranks(2, go_on, root, (2, 1, 1), sharding, deadline_s=200.0)
    assert compared([[whole[0], losses] for losses in found]) == 2 * 4


def die(root: str) -> None:
    """Train on and die in the middle of a save, on one rank."""
    import ckptd_megatron
    from ckptd_dcp import CkptdWriter

    job = Job(2, 2, sharding="fully_reshardable")
    job.take(ckptd_megatron.load(root, job.wanted()))
    job.train(1)
    writer: Any = CkptdWriter
    plain = writer.write_data

    def write(self: Any, *args: Any) -> Any:
        done = plain(self, *args)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    writer.write_data = write
    ckptd_megatron.save(root, job.iteration, job.state())


def test_a_save_that_is_killed(cli: Cli, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    whole = run_ranks(4, begin, root, (2, 2, 1), "fully_reshardable", deadline_s=200.0)
    ended = rank_outcomes(4, die, root, deadline_s=200.0)
    assert ended[2].exit_code == -signal.SIGKILL
    assert not any(outcome.returned for outcome in ended)
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [2]
    assert cli("verify", root).code == 0
    found = run_ranks(4, go_on, root, (2, 2, 1), "fully_reshardable", deadline_s=200.0)
    assert compared([[w, f] for w, f in zip(whole, found, strict=True)]) == 2 * 4
