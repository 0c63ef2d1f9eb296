"""The model of `tests.reshard.torch.layout.jobs`: a trainer of two ranks, and a rollout of two."""

from __future__ import annotations

import torch

from tests.reshard.torch.layout.jobs import HD, HIDDEN, KV, LAYERS, PROGRAM, REP, WIDTH, Tensors

__all__ = ["TRAINER", "WORKER", "worker_part"]

_MESHES = """
mesh P = dp:2
mesh T = tp:2
layout pub on P { use hf; default [_@dp:ceil ...] }
layout roll of llama on T {
  embed.weight = E[v@tp h]
  layers.{l}.qkv.weight = L{l}[(q:((kv rep)@tp hd)|k:(kv@tp hd)|v:(kv@tp hd)) h]
  layers.{l}.o.weight = L{l}.o[h ((kv rep)@tp hd)]
  layers.{l}.gate_up.weight = L{l}[(g:f@tp|u:f@tp) h]
  layers.{l}.down.weight = L{l}.d[h f@tp]
  layers.{l}.norm.weight = L{l}.n1[h]
  norm.weight = nf[h]
  head.weight = head[v@tp h]
}
"""
TRAINER = f"# layout pub\n{PROGRAM}{_MESHES}"
WORKER = f"# layout roll\n{PROGRAM}{_MESHES}"


def worker_part(full: Tensors, tp: int, world: int = 2) -> Tensors:
    """Cut whole tensors as a rank of a tensor-parallel rollout holds them: fused, by hand."""

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(world)[tp]

    out = {"embed.weight": rows(full["embed.weight"]), "head.weight": rows(full["head.weight"])}
    out["norm.weight"] = full["norm.weight"]
    for i in range(LAYERS):
        at = f"layers.{i}"
        q, k, v = (rows(full[f"{at}.{n}.weight"]) for n in "qkv")
        out[f"{at}.qkv.weight"] = torch.cat([q, k, v])
        out[f"{at}.o.weight"] = full[f"{at}.o.weight"].chunk(world, 1)[tp]
        gate, up = rows(full[f"{at}.gate.weight"]), rows(full[f"{at}.up.weight"])
        out[f"{at}.gate_up.weight"] = torch.cat([gate, up])
        out[f"{at}.down.weight"] = full[f"{at}.down.weight"].chunk(world, 1)[tp]
        out[f"{at}.norm.weight"] = full[f"{at}.norm.weight"]
    return {n: t.contiguous() for n, t in out.items()}


assert (KV * REP * HD) % 2 == WIDTH % 2 == HIDDEN % 2 == 0
