"""Make what Megatron-FSDP saves as ``fsdp_dtensor``: DCP of DTensors that are cut unevenly.

torchrun --nproc-per-node 3 make_fsdp_dtensor.py FOLDER

The parts and their metadata are those of megatron_fsdp (megatron-core 0.16.1): bucket by bucket a
rank may have any rows of a parameter, or none. Its wrapper of a model wants CUDA, so that the model
is cut here, and saved as Megatron-LM's `save_checkpoint` does.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

LAYER = {
    "self_attention.linear_proj.weight": (8, 16),
    "self_attention.linear_qkv.layer_norm_weight": (8,),
    "self_attention.linear_qkv.weight": (32, 8),
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "mlp.linear_fc1.weight_w": (6, 8),
    "mlp.linear_fc1.weight_v": (6, 8),
    "mlp.linear_fc2.weight": (8, 6),
}
SHAPES = {
    "embedding.word_embeddings.weight": (128, 8),
    **{f"decoder.layers.{n}.{name}": shape for n in range(2) for name, shape in LAYER.items()},
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (128, 8),
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    whole: dict[str, torch.Tensor] = {}
    total = sum(shape[0] for shape in SHAPES.values())
    generator = torch.Generator().manual_seed(3)

    def cut(name: str, shape: tuple[int, ...], first: int) -> DTensor:
        """Cut rows where the shares of one bucket of all parameters end."""
        values = whole[name] = torch.randn(shape, generator=generator)
        low, high = (max(0, min(shape[0], total * r // world - first)) for r in (rank, rank + 1))
        strides = values.stride()
        return DTensor.from_local(
            values[low:high].clone(), mesh, [Shard(0)], shape=shape, stride=strides
        )

    weights, states, first = {}, {}, 0
    for name, shape in SHAPES.items():
        weights[f"module.{name}"] = cut(f"model.module.{name}", shape, first)
        states[f"module.{name}"] = {
            key: cut(f"optimizer.state.module.{name}.{key}", shape, first)
            for key in ("exp_avg", "exp_avg_sq")
        }
        first += shape[0]
    group = {"lr": 0.001, "params": list(weights), "step": 2}
    state = {
        "args": Namespace(num_layers=1),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "model": weights,
        "optimizer": {"state": states, "param_groups": [group]},
    }
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.save(state, checkpoint_id=folder)
    if rank == 0:
        np.savez(folder / "expected.npz", **{n: t.numpy() for n, t in whole.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
