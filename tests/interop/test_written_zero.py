"""Universal folders that were written without DeepSpeed are loaded by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.interop.made_zero import Net, train_and_save
from tests.interop.worlds import deepspeed_engine, quiet

pytestmark = pytest.mark.plugins

WORLD = {"DS_ACCELERATOR": "cpu"}


def load_universal(folder: str, stage: int, wanted: dict[str, torch.Tensor]) -> None:
    """Load, compare what is trained and its moments, and train on."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    quiet()
    net = Net()
    engine = deepspeed_engine(net, stage, decay=0.1, checkpoint={"load_universal": True})
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert (client["seen"], engine.global_steps) == (7, 2)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(safe_get_full_fp32_param(parameter), wanted[name]), name
            for state in ("exp_avg", "exp_avg_sq"):
                found = safe_get_full_optimizer_state(parameter, state)
                assert torch.equal(found, wanted[f"optim.{name}.{state}"]), (name, state)
    torch.manual_seed(dist.get_rank())
    loss = engine(torch.randint(31, (2, 5))).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    assert torch.isfinite(loss)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "stage", "half", "onto", "into"),
    [(2, 3, False, 3, 2), (3, 2, True, 2, 3), (2, 1, False, 2, 1)],
)
def test_another_stage_on_another_number_of_ranks(
    ranks: int, stage: int, half: bool, onto: int, into: int, tmp_path: Path, cli: Cli
) -> None:
    zero, out = str(tmp_path / "zero"), str(tmp_path / "out")
    wanted = run_ranks(ranks, train_and_save, zero, stage, half, {}, deadline_s=240.0, env=WORLD)[0]
    assert cli("reshard", zero, out, "--to", "ddp", "--format", "universal").code == 0
    run_ranks(onto, load_universal, out, into, wanted, deadline_s=240.0, env=WORLD)
