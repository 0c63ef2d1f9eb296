"""Checkpoints that DeepSpeed's engines write, beside what DeepSpeed says the tensors are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.interop.worlds import deepspeed_engine, quiet

__all__ = ["TAG", "train_and_save"]

TAG = "global_step2"
CLIENT = {"seen": 7, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}


class Net(nn.Module):
    """Odd sizes, biases, a tied pair, a weight that is not trained and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 10)
        self.up, self.down = nn.Linear(10, 23), nn.Linear(23, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 31, bias=False)
        self.head.weight = self.embed.weight
        self.kept = nn.Parameter(torch.ones(7, 3), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))) * self.kept.mean())


def train_and_save(
    folder: str, stage: int, half: bool, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Train for two steps, save, and return what is trained, in 32 bits, moments and the rest."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    quiet()
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    config = {"bf16": {"enabled": True}} if half else {}
    engine = deepspeed_engine(net, stage, zero=options, decay=0.1, **config)
    for step in range(2):
        torch.manual_seed(100 * dist.get_rank() + step)
        engine.backward(engine(torch.randint(31, (2, 5))).float().pow(2).mean())
        engine.step()
    if stage < 3:
        # DeepSpeed links states to parameters after the step of the first group alone.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    engine.save_checkpoint(folder, tag=TAG, client_state=CLIENT)
    out: dict[str, torch.Tensor] = {"table": net.table}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                out[name] = parameter.detach().clone()
            continue
        out[name] = safe_get_full_fp32_param(parameter).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            found = safe_get_full_optimizer_state(parameter, state)
            out[f"optim.{name}.{state}"] = found.clone()
        out[f"optim.{name}.step"] = torch.tensor(2.0)
    out["head.weight"] = out["embed.weight"]
    return out
