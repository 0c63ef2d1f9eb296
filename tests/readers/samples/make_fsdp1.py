"""Make what FSDP1 saves with `torch.save`, a file a rank: sharded and local state dicts.

torchrun --nproc-per-node 4 make_fsdp1.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def each_linear(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or isinstance(module, nn.Linear)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind in ("sharded", "local"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 4, False)))
        model = FullyShardedDataParallel(
            net,
            auto_wrap_policy=each_linear,
            device_id=torch.device("cpu"),
            use_orig_params=kind == "sharded",
        )
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.full((2, 5), rank + 1.0)).sum().backward()
        opt.step()
        out = folder / kind
        out.mkdir(parents=True, exist_ok=True)
        full: dict[str, Any] = {}
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            full |= {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
        with FullyShardedDataParallel.state_dict_type(
            model, getattr(StateDictType, f"{kind.upper()}_STATE_DICT")
        ):
            torch.save(model.state_dict(), out / f"model_world_size_{world}_rank_{rank}.pt")
            if kind == "sharded":
                states = FullyShardedDataParallel.optim_state_dict(model, opt)
                torch.save(states, out / f"optim_world_size_{world}_rank_{rank}.pt")
        if kind == "sharded":
            # Beside what was saved, by collectives of this script: 2.13's `full_optim_state_dict`
            # on a CPU gives exp_avg_sq for exp_avg.
            for name, state in states["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    parts: list[Any] = [None] * world
                    mine = [(s.metadata.shard_offsets, s.tensor) for s in state[key].local_shards()]
                    dist.all_gather_object(parts, mine)
                    rows = sorted((o for part in parts for o in part), key=lambda x: x[0])
                    full[f"state.{name}.{key}"] = torch.cat([t for _, t in rows]).numpy()
        if rank == 0:
            names = {n: n.replace("_fsdp_wrapped_module.", "") for n in full}
            np.savez_compressed(out / "expected.npz", **{names[n]: v for n, v in full.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
