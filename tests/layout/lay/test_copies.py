from __future__ import annotations

from itertools import permutations

import pytest

from ckptd.layout.lay.copies import Composition, compose
from ckptd.layout.lay.proving import prove
from ckptd.layout.lay.stored import StoredForm
from tests.layout.lay.world import bound, execute, local_elements, piece_elements

SPACE = """
space llama { E[v h] head[v h] nf[h]
  L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.v[kv hd h] L{l}.o[h kv rep hd]
  L{l}.g[f h] L{l}.u[f h] L{l}.d[h f] L{l}.n1[h]
  follow m }
"""
SIZES = {"l": 3, "v": 10, "h": 4, "kv": 4, "rep": 2, "hd": 4, "f": 6}

MEGATRON = """
mesh M = pp:2 dp:2 tp:2
let D = decoder.layers.{#l@pp:ceil}
layout mg of llama on M {
  embedding.weight = E[pad(v,3*tp)@tp h] on pp=0
  D.qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  D.proj.weight = L{l}.o[h (kv@tp rep hd)]
  D.fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
  D.fc2.weight = L{l}.d[h f@tp]
  D.norm.weight = L{l}.n1[h] same
  output.weight = head[pad(v,3*tp)@tp h] on pp=last
  norm.weight = nf[h] same on pp=last
  FLAT
}
"""
RAW_ROWS = """
mesh R = tp:6
layout raw of llama on R {
  emb = E[v@tp:ceil h]
  out = head[v h@tp:ceil]
  norm = nf[h]
  layers.{l}.qkv = L{l}[(kv (q:rep|k:1|v:1) hd)@tp:ceil h]
  layers.{l}.o = L{l}.o[h (kv rep hd)@tp:bal]
  layers.{l}.gu = L{l}[(g:f|u:f)@tp h]
  layers.{l}.d = L{l}.d[h f@tp]
  layers.{l}.n = L{l}.n1[h@tp:ceil]
}
"""
FSDP_OVER_TP = """
mesh T = dp:3 tp:2
layout tf of llama on T {
  emb.weight = E[v@tp@dp:ceil h]
  head.weight = head[v@tp@dp:ceil h]
  norm.weight = nf[h@dp:ceil]
  l.{l}.q.weight = L{l}.q[((kv rep)@tp hd)@dp:ceil h]
  l.{l}.k.weight = L{l}.k[(kv@tp hd)@dp:bal h]
  l.{l}.v.weight = L{l}.v[(kv@tp hd)@dp:ceil h]
  l.{l}.o.weight = L{l}.o[h@dp:ceil ((kv rep)@tp hd)]
  l.{l}.g.weight = L{l}.g[f@tp@dp h]
  l.{l}.u.weight = L{l}.u[f@tp@dp h]
  l.{l}.d.weight = L{l}.d[h@dp:ceil f@tp]
  l.{l}.n.weight = L{l}.n1[h@dp:[1 0 3]]
}
"""
HF = """
layout hf of llama on none {
  emb.weight = E[v h]
  head.weight = head[v h]
  norm.weight = nf[h]
  layers.{l}.q = L{l}.q[(kv rep two half) h]
  layers.{l}.k = L{l}.k[(kv half two) h]
  layers.{l}.v = L{l}.v[(kv hd) h]
  layers.{l}.o = L{l}.o[h (kv rep hd)]
  gate = L.g[(l f) h]
  layers.{l}.u = L{l}.u[h f]
  layers.{l}.d = L{l}.d[h f]
  layers.{l}.n = L{l}.n1[h]
}
let hd = (two half)
"""
ZERO = """
mesh Z = dp:5
layout z3 of llama on Z {
  emb.weight = E[v h]
  head.weight = head[v h]
  norm.weight = nf[h]
  layers.{l}.q = L{l}.q[(kv rep hd) h]
  layers.{l}.k = L{l}.k[(kv hd) h]
  layers.{l}.v = L{l}.v[(kv hd) h]
  layers.{l}.o = L{l}.o[h (kv rep hd)]
  layers.{l}.gu = L{l}[(g:f|u:f) h]
  layers.{l}.d = L{l}.d[h f]
  layers.{l}.n = L{l}.n1[h]
  FLAT
}
"""
NONE, EACH = "", "flat each @dp:ceil of params,m"
BUCKET = "flat bucket 100 @dp of m order reverse start/8 end/lcm(dp,16)"
GROUP = "flat group(layers.{l}.**) @dp:ceil of * order module start/3"
LAYOUTS = {
    "mg": (MEGATRON.replace("FLAT", NONE), "mg"),
    "mg-bucket": (MEGATRON.replace("FLAT", BUCKET), "mg"),
    "raw": (RAW_ROWS, "raw"),
    "tf": (FSDP_OVER_TP, "tf"),
    "hf": (HF, "hf"),
    "z3": (ZERO.replace("FLAT", EACH), "z3"),
    "fsdp1": (ZERO.replace("FLAT", GROUP), "z3"),
}
PARTS = {"two": 2, "half": 2}


def made(name: str) -> StoredForm:
    text, layout = LAYOUTS[name]
    return StoredForm(bound(SPACE + text, layout, **SIZES, **PARTS))


def composed(source: str, target: str) -> Composition:
    return compose(made(source).bound, made(target).bound)


@pytest.mark.parametrize(("source", "target"), list(permutations(LAYOUTS, 2)))
def test_every_pair(source: str, target: str) -> None:
    c = composed(source, target)
    for rank in range(c.target.mesh.world):
        for tensor, plan in c.local(rank):
            wanted = local_elements(c.target, tensor, rank)
            assert execute(plan, c.source).tolist() == wanted.tolist(), tensor.name
            prove(plan)
    for stored in c.target.tensors():
        for piece in range(stored.grid.npieces):
            plan = c.piece((stored.rule, stored.indexes, stored.state), piece)
            wanted = piece_elements(c.target, stored, piece)
            assert execute(plan, c.source).tolist() == wanted.tolist(), stored.name
