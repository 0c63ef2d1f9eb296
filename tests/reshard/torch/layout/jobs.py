"""One small model as several jobs hold it: whole, cut by hand as Megatron cuts, and by FSDP2.

The cutting is written out here, tensor by tensor, and shares nothing with the layouts. AdamW works
element by element, so what a rank has after some steps is the same part of what a whole job has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.torch import networks

PROGRAM = """
mesh M = pp:2 tp:2
mesh D = dp:2 tp:2
mesh F = dp:3
mesh G = dp:4
let kv = 2
let v = 20

space llama {
  E[v h] head[v h] nf[h]
  L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.v[kv hd h] L{l}.o[h kv rep hd]
  L{l}.g[f h] L{l}.u[f h] L{l}.d[h f] L{l}.n1[h]
  follow m=exp_avg, s=exp_avg_sq
  scalar step(param)
}

layout hf of llama on none {
  embed.weight = E[v h]
  layers.{l}.q.weight = L{l}.q[(kv rep hd) h]
  layers.{l}.{k,v}.weight = L{l}.{k,v}[(kv hd) h]
  layers.{l}.o.weight = L{l}.o[h (kv rep hd)]
  layers.{l}.{gate,up}.weight = L{l}.{g,u}[f h]
  layers.{l}.down.weight = L{l}.d[h f]
  layers.{l}.norm.weight = L{l}.n1[h]
  norm.weight = nf[h]
  head.weight = head[v h]
}

layout fs on F {
  use hf
  default [_@dp:ceil ...]
}

layout fs4 on G {
  use hf
  default [_@dp:ceil ...]
}

layout mg of llama on M {
  embedding.weight = E[pad(v, 8*tp)@tp h] on pp=0
  decoder.layers.{#l@pp:bal}.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  decoder.layers.{#l@pp:bal}.proj.weight = L{l}.o[h (kv@tp rep hd)]
  decoder.layers.{#l@pp:bal}.fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
  decoder.layers.{#l@pp:bal}.fc2.weight = L{l}.d[h f@tp]
  decoder.layers.{#l@pp:bal}.norm.weight = L{l}.n1[h]
  final_norm.weight = nf[h] on pp=last
  output.weight = head[pad(v, 8*tp)@tp h] on pp=last
}

layout mgd of llama on D {
  embedding.weight = E[pad(v, 8*tp)@tp h]
  decoder.layers.{l}.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  decoder.layers.{l}.proj.weight = L{l}.o[h (kv@tp rep hd)]
  decoder.layers.{l}.fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
  decoder.layers.{l}.fc2.weight = L{l}.d[h f@tp]
  decoder.layers.{l}.norm.weight = L{l}.n1[h]
  final_norm.weight = nf[h]
  output.weight = head[pad(v, 8*tp)@tp h]
}
"""

LAYERS, VOCABULARY, WIDTH = 3, 20, 16
KV, REP, HD, HIDDEN = 2, 2, 4, 12

Tensors = dict[str, torch.Tensor]

_SHAPES = {
    "q": (KV * REP * HD, WIDTH),
    "k": (KV * HD, WIDTH),
    "v": (KV * HD, WIDTH),
    "o": (WIDTH, KV * REP * HD),
    "gate": (HIDDEN, WIDTH),
    "up": (HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
    "norm": (WIDTH,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, WIDTH),
    **{f"layers.{i}.{n}.weight": s for i in range(LAYERS) for n, s in _SHAPES.items()},
    "norm.weight": (WIDTH,),
    "head.weight": (VOCABULARY, WIDTH),
}


def whole(seed: int) -> Tensors:
    """Return random tensors of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


class Tree(nn.Module):
    """A module with parameters of given names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part] or self
            module.register_parameter(last, nn.Parameter(tensor.clone()))


def stages(world: int) -> list[range]:
    """Return the layers of each stage: three over two are two and one."""
    return [range(2), range(2, 3)] if world == 2 else [range(LAYERS)]


def megatron(full: Tensors, pp: int, tp: int, pipeline: int = 2) -> Tensors:
    """Cut whole tensors as a rank of the Megatron-like job holds them."""
    out: Tensors = {}
    if pp == 0:
        out["embedding.weight"] = _vocabulary(full["embed.weight"], tp)
    for local, layer in enumerate(stages(pipeline)[pp]):
        old, new = f"layers.{layer}", f"decoder.layers.{local}"
        q = full[f"{old}.q.weight"].view(KV, REP * HD, WIDTH)
        k = full[f"{old}.k.weight"].view(KV, HD, WIDTH)
        v = full[f"{old}.v.weight"].view(KV, HD, WIDTH)
        group = torch.cat([q[tp], k[tp], v[tp]])
        out[f"{new}.qkv.weight"] = group
        columns = slice(tp * REP * HD, (tp + 1) * REP * HD)
        out[f"{new}.proj.weight"] = full[f"{old}.o.weight"][:, columns]
        half = slice(tp * HIDDEN // 2, (tp + 1) * HIDDEN // 2)
        gate, up = full[f"{old}.gate.weight"][half], full[f"{old}.up.weight"][half]
        out[f"{new}.fc1.weight"] = torch.cat([gate, up])
        out[f"{new}.fc2.weight"] = full[f"{old}.down.weight"][:, half]
        out[f"{new}.norm.weight"] = full[f"{old}.norm.weight"]
    if pp == pipeline - 1:
        out["final_norm.weight"] = full["norm.weight"]
        out["output.weight"] = _vocabulary(full["head.weight"], tp)
    return {n: t.contiguous() for n, t in out.items()}


def _vocabulary(tensor: torch.Tensor, tp: int) -> torch.Tensor:
    padded = torch.zeros(32, WIDTH)
    padded[:VOCABULARY] = tensor
    return padded[tp * 16 : (tp + 1) * 16]


def chunks(full: Tensors, rank: int, world: int) -> Tensors:
    """Cut whole tensors along their rows as FSDP2 does."""
    out = {}
    for name, tensor in full.items():
        parts = torch.chunk(tensor, world)
        # A rank beyond the last part has nothing.
        out[name] = parts[rank].contiguous() if rank < len(parts) else tensor[:0]
    return out


def trained(module: nn.Module, grads: list[Tensors]) -> torch.optim.AdamW:
    """Make an optimizer and step it with given gradients."""
    optim = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    for found in grads:
        for name, parameter in module.named_parameters():
            parameter.grad = found[name].clone()
        optim.step()
    return optim


def megatron_job(seed: int, steps: int, pipeline: int = 2) -> tuple[Tree, torch.optim.AdamW]:
    """Return this rank's module and optimizer, after some steps, of four ranks."""
    rank = dist.get_rank()
    pp, tp = (rank // 2, rank % 2) if pipeline == 2 else (0, rank % 2)
    module = Tree(megatron(whole(seed), pp, tp, pipeline))
    grads = [megatron(whole(seed + 10 + i), pp, tp, pipeline) for i in range(steps)]
    return module, trained(module, grads)


def whole_job(seed: int, steps: int) -> tuple[Tree, torch.optim.AdamW]:
    """Return the whole job, in one process."""
    module = Tree(whole(seed))
    return module, trained(module, [whole(seed + 10 + i) for i in range(steps)])


def fsdp_job(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a job of FSDP2 that has not stepped."""
    module = Tree(whole(seed))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module, torch.optim.AdamW(module.parameters(), lr=0.5)


contents = networks.whole
"""All parameters and states of a rank; DTensors in full."""


def differing(found: Tensors, wanted: Tensors) -> list[str]:
    """Return the names at which two sets of tensors are not bit for bit the same."""
    return sorted(
        n
        for n in found.keys() | wanted.keys()
        if n not in found or n not in wanted or not torch.equal(found[n], wanted[n])
    )
