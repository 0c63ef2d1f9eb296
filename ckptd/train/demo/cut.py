"""Cut a model over ranks: FSDP2, or FSDP2 with tensor parallelism."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ckptd.train.demo.model import Gpt
from ckptd.train.demo.spec import Cut

__all__ = ["cut_model"]


def cut_model(model: Gpt, cut: Cut) -> DeviceMesh:
    """Cut `model` in place and return the mesh of its data-parallel ranks.

    With `tp` above 1, linear layers and the byte embedding are cut over it; norms and the position
    embedding are whole on each tensor-parallel rank, as usual without sequence parallelism.
    """
    if cut.tp > 1:
        mesh = init_device_mesh("cpu", (cut.dp, cut.tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], _tensor_parallel_plan())
        data_mesh = mesh["dp"]
    else:
        data_mesh = init_device_mesh("cpu", (cut.dp,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return data_mesh


def _tensor_parallel_plan() -> dict[str, ParallelStyle]:
    return {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
