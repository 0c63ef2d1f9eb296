"""docs/examples/deepspeed_engine.py: what the guide gives for DeepSpeed resumes bit for bit."""

from __future__ import annotations

import os
import runpy
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.cli.running import Cli

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[3] / "docs/examples/deepspeed_engine.py"


def train(
    root: str, folder: str, stage: int, steps: int, kill: bool = False, offload: bool = False
) -> Any:
    """Train to a step and save after every second one; return the step begun with and losses."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 6))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
        | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.checkpoint_engine = files = runpy.run_path(str(EXAMPLE))["CkptdEngine"](root)
    begun = 0
    if files.place(folder):
        engine.load_checkpoint(folder)
        begun = engine.global_steps
    losses = []
    for step in range(begun, steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 6, generator=generator)
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 2:
            if kill and step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.save_checkpoint(folder)
    return begun, losses


@pytest.mark.parametrize(
    ("stage", "offload"), [(1, False), (3, False), (2, True)], ids=["1", "3", "2 offloaded"]
)
def test_it_goes_on_bit_for_bit(cli: Cli, tmp_path: Path, stage: int, offload: bool) -> None:
    """Also where the optimizer's state is on the host (ZeRO-Offload)."""
    a, b = (str(tmp_path / name) for name in "ab")
    whole = run_ranks(2, train, a, str(tmp_path / "fa"), stage, 6, False, offload, deadline_s=180.0)
    for ended in rank_outcomes(
        2, train, b, str(tmp_path / "fb"), stage, 6, True, offload, deadline_s=180.0
    ):
        assert not ended.returned
    # In another folder: all data is in the root.
    second = run_ranks(
        2, train, b, str(tmp_path / "other"), stage, 6, False, offload, deadline_s=180.0
    )
    for (_, losses), (begun, since) in zip(whole, second, strict=True):
        assert begun == 2
        assert since == losses[2:]
    assert all(not p.stat().st_size for p in (tmp_path / "other").rglob("*.pt"))
    assert [c["step"] for c in cli.json("ls", b)["checkpoints"]] == [2, 4, 6]
    assert cli("verify", b).code == 0


class Committed:
    """What DeepSpeed gives to a commit."""

    def __init__(self, save_dir: str, tag: str) -> None:
        self.save_dir, self.tag = save_dir, tag


def swaps(root: str, folder: str, other: str) -> list[bytes]:
    """Save with swap files as ZeRO-Infinity has DeepSpeed copy them; return what a load finds."""
    example = runpy.run_path(str(EXAMPLE))
    rank, tag = dist.get_rank(), "global_step2"
    place = Path(folder, tag, "offloaded_tensors", f"rank{rank}")
    place.mkdir(parents=True)
    for number in range(3):
        (place / f"{number}.tensor.swp").write_bytes(bytes([rank, number]) * 2048)
    files = example["CkptdEngine"](root)
    files.create(None)
    files.save({"rank": rank}, f"{folder}/{tag}/zero_pp_rank_{rank}_optim_states.pt")
    dist.barrier()
    files.commit(Committed(folder, tag))
    assert not any(p.stat().st_size for p in place.iterdir())
    assert example["CkptdEngine"](root).place(other)
    again = Path(other, tag, "offloaded_tensors", f"rank{rank}")
    return [p.read_bytes() for p in sorted(again.iterdir())]


def test_swap_files_are_in_the_checkpoint(tmp_path: Path) -> None:
    """DeepSpeed's names and its copies; its own reads and writes of NVMe need libaio's headers."""
    folders = (str(tmp_path / name) for name in ("root", "folder", "other"))
    for rank, found in enumerate(run_ranks(2, swaps, *folders, deadline_s=120.0)):
        assert found == [bytes([rank, number]) * 2048 for number in range(3)]


def unnamed(root: str, folder: str) -> str:
    """Commit where the swap files in the folder are those of other ranks."""
    Path(folder, "global_step2", "offloaded_tensors", "rank7").mkdir(parents=True, exist_ok=True)
    files = runpy.run_path(str(EXAMPLE))["CkptdEngine"](root)
    with pytest.raises(RuntimeError, match="use_node_local_storage") as raised:
        files.commit(Committed(folder, "global_step2"))
    return str(raised.value)


def test_swap_files_that_are_not_found_are_not_left_out_silently(tmp_path: Path) -> None:
    said = run_ranks(1, unnamed, str(tmp_path / "root"), str(tmp_path / "f"), deadline_s=60.0)
    assert "no swap files of rank 0" in said[0]
