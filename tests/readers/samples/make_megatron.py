"""Make torch_dist of Megatron-core with the optimizer in buckets (``dp_reshardable``), TP2 PP2 DP2.

The first stage has several buckets, as with `overlap_grad_reduce`; the second has one. Beside the
folder lies what the optimizer says that weights and moments of each rank are.

PYTHONPATH=.:plugins torchrun --nproc-per-node 8 tests/readers/samples/make_megatron.py FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.plugins.megatron.world import Job, on_cpu


def moments(job: Job) -> dict[str, Any]:
    """Return weights and moments of this rank's parameters, whole, by name and state."""
    optimizer = getattr(job.optimizer, "chained_optimizers", [job.optimizer])[0]
    mine = []
    for name, parameter in job.model.module.named_parameters():
        try:
            place = optimizer._get_model_param_range_map(parameter)["param"]
        except KeyError:  # another rank has all of it
            continue
        found = optimizer._get_main_param_and_optimizer_states(parameter)
        states = {k: found[k].detach().clone() for k in ("param", "exp_avg", "exp_avg_sq")}
        mine.append((name, place.start, place.end, states))
    parts: list[Any] = [None] * dist.get_world_size(optimizer.data_parallel_group)
    dist.all_gather_object(parts, mine, group=optimizer.data_parallel_group)
    shapes = {n: p.shape for n, p in job.model.module.named_parameters()}
    whole = {
        f"{n}.{k}": torch.full(shape, float("nan"))
        for n, shape in shapes.items()
        for k in ("param", "exp_avg", "exp_avg_sq")
    }
    for name, start, end, states in (each for part in parts for each in part):
        for key, value in states.items():
            whole[f"{name}.{key}"].view(-1)[start:end] = value
    assert not any(v.isnan().any() for v in whole.values())
    return {n: v.numpy() for n, v in whole.items()}


def in_hugging_face(ranks: dict[tuple[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Return what ranks hold under the names that transformers has for this model."""
    out: dict[str, Any] = {}

    def put(name: str, kind: str, value: Any) -> None:
        out[name if kind == "param" else f"optim.{name}.{kind}"] = np.ascontiguousarray(value)

    for pp in (0, 1):
        first, second = ranks[pp, 0], ranks[pp, 1]
        for whole, one in first.items():
            name, _, kind = whole.rpartition(".")
            two = second[whole]
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                here = "model.embed_tokens" if name.startswith("embedding") else "lm_head"
                put(f"{here}.weight", kind, np.concatenate([one, two]))
                continue
            if name.endswith("norm.weight"):
                assert one.tobytes() == two.tobytes()
            if name == "decoder.final_layernorm.weight":
                put("model.norm.weight", kind, one)
                continue
            _, _, number, part = name.split(".", 3)
            at = f"model.layers.{2 * pp + int(number)}"
            if part == "self_attention.linear_qkv.weight":  # a group of heads on each rank
                for i, (lo, hi) in enumerate([(0, 8), (8, 12), (12, 16)]):
                    rows = np.concatenate([one[lo:hi], two[lo:hi]])
                    put(f"{at}.self_attn.{'qkv'[i]}_proj.weight", kind, rows)
            elif part == "mlp.linear_fc1.weight":
                for gate, lo in (("gate", 0), ("up", 12)):
                    rows = np.concatenate([one[lo : lo + 12], two[lo : lo + 12]])
                    put(f"{at}.mlp.{gate}_proj.weight", kind, rows)
            elif part == "input_layernorm.weight":
                put(f"{at}.input_layernorm.weight", kind, one)
            elif part == "pre_mlp_layernorm.weight":
                put(f"{at}.post_attention_layernorm.weight", kind, one)
            else:
                down = "mlp.down_proj" if "fc2" in part else "self_attn.o_proj"
                put(f"{at}.{down}.weight", kind, np.concatenate([one, two], axis=1))
    return out


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    on_cpu()
    from megatron.core import dist_checkpointing, distributed, parallel_state

    plain = distributed.DistributedDataParallel

    def bucketed(config: Any, ddp: Any, model: Any) -> Any:
        """Cut the first stage's buffer into buckets, as `overlap_grad_reduce` does."""
        ddp.overlap_grad_reduce, ddp.bucket_size = True, 1000
        made = plain(config, ddp, model)
        for each in (made.ddp_config, *(b.ddp_config for b in made.buffers)):
            each.overlap_grad_reduce = False
        return made

    distributed.DistributedDataParallel = bucketed
    job = Job(2, 2, sharding="dp_reshardable")
    job.train(2)
    out = folder / "iter_0000002"
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(job.state(), os.fspath(out))
    pp = parallel_state.get_pipeline_model_parallel_rank()
    tp = parallel_state.get_tensor_model_parallel_rank()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ((pp, tp), moments(job)))
    if dist.get_rank() == 0:
        shutil.copy(Path(__file__).with_name("megatron.lay"), out / "local.lay")
        ranks = dict(every)
        for (pp, tp), held in ranks.items():
            np.savez(folder / f"local_pp{pp}_tp{tp}.npz", **held)
        np.savez(folder / "expected-hf.npz", **in_hugging_face(ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
