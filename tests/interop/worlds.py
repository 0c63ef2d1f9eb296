"""What ranks do in these tests: models in DCP and in DeepSpeed, each called by `run_ranks`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.interop.models import blank, load

__all__ = ["deepspeed_engine", "quiet", "reload_dcp", "reload_zero", "save_dcp", "save_zero"]


def quiet() -> None:
    """Silence what frameworks warn of, and make one thread of each rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def sharded(model: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Cut a model over all ranks by FSDP2, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dtype is not None:
        model = model.to(dtype)
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_dcp(source: str, target: str) -> None:
    """Load every model of a folder, cut it and save it by DCP."""
    import torch.distributed.checkpoint as dcp

    quiet()
    for folder in sorted(Path(source).iterdir()):
        model = sharded(load(folder))
        dcp.save({"model": model.state_dict()}, checkpoint_id=Path(target) / folder.name)


def reload_dcp(models: str, source: str, target: str) -> None:
    """Load every checkpoint of DCP into a model with other weights, and save that by DCP."""
    import torch.distributed.checkpoint as dcp

    quiet()
    for folder in sorted(Path(source).iterdir()):
        model = sharded(blank(Path(models) / folder.name))
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        dcp.save({"model": model.state_dict()}, checkpoint_id=Path(target) / folder.name)


def deepspeed_engine(
    model: Any,
    stage: int,
    *,
    decay: float = 0.0,
    groups: Sequence[dict[str, Any]] = (),
    zero: Mapping[str, Any] = {},
    **more: Any,
) -> Any:
    """Return DeepSpeed's engine around a model, with two groups in AdamW of torch.

    Parameters
    ----------
    decay
        Of the first group; without one, a step without gradients changes nothing.
    groups
        Of parameters, in place of the two.
    zero, more
        Further settings, of ``zero_optimization`` and beside it.
    """
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    stage3 = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4000}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, **(stage3 if stage == 3 else {}), **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **more,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = groups or [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def save_zero(source: str, target: str, stage: int) -> None:
    """Load every model of a folder, and save it with moments as DeepSpeed's engine does."""
    quiet()
    for folder in sorted(Path(source).iterdir()):
        model = load(folder)
        half = {"bf16": {"enabled": True}} if model.dtype == torch.bfloat16 else {}
        engine = deepspeed_engine(model, stage, **half)
        # A step makes the moments; at this rate it leaves the weights as they are.
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.backward(engine(torch.arange(1, 9).reshape(1, 8)).logits.float().pow(2).mean())
        engine.step()
        engine.save_checkpoint(str(Path(target) / folder.name), tag="global_step0")


def reload_zero(models: str, source: str, target: str, stage: int) -> None:
    """Load every universal checkpoint into an engine with other weights, and save that."""
    quiet()
    for folder in sorted(Path(source).iterdir()):
        model = blank(Path(models) / folder.name)
        more: dict[str, Any] = {"checkpoint": {"load_universal": True}}
        if model.dtype == torch.bfloat16:
            more["bf16"] = {"enabled": True}
        engine = deepspeed_engine(model, stage, **more)
        found, _ = engine.load_checkpoint(str(folder))
        assert found is not None
        engine.save_checkpoint(str(Path(target) / folder.name), tag="global_step0")
