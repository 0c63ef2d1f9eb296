"""A rollout of transformers, cut by its own plan, follows a trainer of FSDP2 over TP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptd
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S, until

pytestmark = [pytest.mark.plugins, pytest.mark.dist, pytest.mark.timeout(600)]

_SIZES = "let kv = 2\nlet v = 250\n"
TRAINER = f"""{_SIZES}mesh T = dp:2 tp:2
layout train on T {{
  **.q_proj.weight = q[((kv rep)@tp hd)@dp:ceil h]
  **.{{k,v}}_proj.weight = {{k,v}}[(kv@tp hd)@dp:ceil h]
  **.{{gate,up}}_proj.weight = {{g,u}}[f@tp@dp:ceil h]
  **.o_proj.weight = o[h@dp:ceil ((kv rep)@tp hd)]
  **.down_proj.weight = d[h@dp:ceil f@tp]
  model.embed_tokens.weight = E[v@tp@dp:ceil h]
  lm_head.weight = head[v@tp@dp:ceil h]
  use hf.llama
  use fsdp
}}
"""
ROLLOUT = f"""{_SIZES}mesh R = tp:2
layout roll on R {{
  **.q_proj.weight = q[((kv rep)@tp hd) h]
  **.{{k,v}}_proj.weight = {{k,v}}[(kv@tp hd) h]
  **.{{gate,up}}_proj.weight = {{g,u}}[f@tp h]
  **.o_proj.weight = o[h ((kv rep)@tp hd)]
  **.down_proj.weight = d[h f@tp]
  model.embed_tokens.weight = E[v@tp h]
  lm_head.weight = head[v@tp h]
  use hf.llama
}}
"""
STEPS = 2


def cut(folder: str, mesh: Any) -> Any:
    """Load a model as transformers cuts it by its own plan."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(250, (2, 8), generator=torch.Generator().manual_seed(seed))


def trainer(folder: str) -> None:
    """Train, publish each step, and leave what each had in a file."""
    from transformers import LlamaForCausalLM

    at, mesh = Path(folder), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = LlamaForCausalLM.from_pretrained(at / "model")
    columns, rows = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        f"model.layers.*.*.{n}_proj": columns() for n in ("q", "k", "v", "gate", "up")
    }
    plan |= {f"model.layers.*.*.{n}_proj": rows() for n in ("o", "down")}
    plan["model.embed_tokens"] = rows(input_layouts=Replicate())
    plan["lm_head"] = columns(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    with ckptd.Publisher(TRAINER, at / "at") as publisher:
        for step in range(1, STEPS + 1):
            model(tokens(step), labels=tokens(step)).loss.backward()
            optim.step()
            optim.zero_grad()
            whole = {n: t.full_tensor() for n, t in model.state_dict().items()}
            if dist.get_rank() == 0:
                torch.save(whole, at / "draft")
                (at / "draft").rename(at / f"step.{step}")
            assert publisher.publish(step, {"model": model, "optim": optim}).wait(PATIENCE_S)
            until(partial(has_both, at, step))


def has_both(at: Path, step: int) -> bool:
    return len(list(at.glob(f"had.{step}.*"))) == 2


def rollout(folder: str) -> list[str]:
    """Follow the trainer; return what differs from a model that was loaded from a file."""
    from transformers import LlamaForCausalLM

    at, mesh = Path(folder), init_device_mesh("cpu", (2,))
    rank, wrong = dist.get_rank(), []
    model = cut(str(at / "model"), mesh)
    with ckptd.Subscriber(ROLLOUT, model, at / "at", group=dist.group.WORLD) as subscriber:
        for step in range(1, STEPS + 1):
            report = subscriber.update(wait_s=120)
            assert report is not None
            assert report.version.step == step
            loaded = LlamaForCausalLM.from_pretrained(at / "model")
            loaded.load_state_dict(torch.load(at / f"step.{step}"))
            if rank == 0:
                loaded.save_pretrained(at / f"model.{step}")
            dist.barrier()
            other = cut(str(at / f"model.{step}"), mesh)
            held = dict(other.named_parameters())
            for name, mine in model.named_parameters():
                if not torch.equal(local_part(mine), local_part(held[name])):
                    wrong.append(f"{step}: {name}")
            with torch.no_grad():
                if not torch.equal(model(tokens(9)).logits, other(tokens(9)).logits):
                    wrong.append(f"{step}: logits")
            (at / f"had.{step}.{rank}").touch()
    return wrong


def local_part(tensor: Any) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    found = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    assert isinstance(found, torch.Tensor)
    return found


def test_logits_are_those_of_the_trainers_weights_bit_for_bit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with ThreadPoolExecutor(2) as pool:
        trained = pool.submit(run_ranks, 4, trainer, str(tmp_path), deadline_s=PATIENCE_S)
        assert run_ranks(2, rollout, str(tmp_path), deadline_s=PATIENCE_S) == [[], []]
        trained.result()
