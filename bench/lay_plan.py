"""How long does one rank plan with Lay, as the number of ranks grows?

    python bench/lay_plan.py                # table, and bench/results/lay_plan.json
    python bench/lay_plan.py --ranks 16384  # one size

The models are simulated, the planning is not. A 405B dense model and a 671B one with experts
(expert and expert tensor parallelism folded over the other ranks) are moved between a layout of
tensors (TP x PP, FSDP2) and the buckets of a distributed optimizer, and both sides change. A case
is one source, one target and one number of ranks, in a fresh process with empty caches: one rank
plans everything it loads, parameters and optimizer state ("plan"), and all stored tensors of the
source are described with their grids and owners, as a save does ("describe"). Several ranks are
asked; the slowest is shown.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import tracemalloc
from typing import Any

from common import arguments, in_fresh_process, median, publish, table

from ckptd.lay.copies import compose
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse

RANKS = (16, 256, 1024, 4096, 16384)

DENSE = """
space dense { E[v h] head[v h] nf[h]
  L{l}.q[kv rep hd h] L{l}.k[kv hd h] L{l}.v[kv hd h] L{l}.o[h kv rep hd]
  L{l}.g[f h] L{l}.u[f h] L{l}.d[h f] L{l}.n1[h] L{l}.n2[h]
  follow m,s,w }
let D = decoder.layers.{#l@pp:bal}
layout mg of dense on M {
  embedding.weight = E[pad(v,128*tp)@tp h] on pp=0
  D.input_norm.weight = L{l}.n1[h] same
  D.linear_qkv.weight = L{l}[(kv@tp (q:rep|k:1|v:1) hd) h]
  D.linear_proj.weight = L{l}.o[h (kv@tp rep hd)]
  D.norm.weight = L{l}.n2[h] same
  D.linear_fc1.weight = L{l}[(g:f@tp|u:f@tp) h]
  D.linear_fc2.weight = L{l}.d[h f@tp]
  final_norm.weight = nf[h] same on pp=last
  output_layer.weight = head[pad(v,128*tp)@tp h] on pp=last
  FLAT
}
layout fs of dense on F {
  embed_tokens.weight = E[v@dp:ceil h]
  layers.{l}.input_norm.weight = L{l}.n1[h@dp:ceil]
  layers.{l}.q_proj.weight = L{l}.q[(kv rep hd)@dp:ceil h]
  layers.{l}.k_proj.weight = L{l}.k[(kv hd)@dp:ceil h]
  layers.{l}.v_proj.weight = L{l}.v[(kv hd)@dp:ceil h]
  layers.{l}.o_proj.weight = L{l}.o[h@dp:ceil (kv rep hd)]
  layers.{l}.norm.weight = L{l}.n2[h@dp:ceil]
  layers.{l}.gate_proj.weight = L{l}.g[f@dp:ceil h]
  layers.{l}.up_proj.weight = L{l}.u[f@dp:ceil h]
  layers.{l}.down_proj.weight = L{l}.d[h@dp:ceil f]
  norm.weight = nf[h@dp:ceil]
  lm_head.weight = head[v@dp:ceil h]
}
"""
DENSE_SIZES = {"l": 126, "v": 128256, "h": 16384, "kv": 8, "rep": 16, "hd": 128, "f": 53248}

EXPERTS = """
space experts { E[v h] head[v h] nf[h]
  L{l}.qa[r h] L{l}.qb[n hq r] L{l}.kva[c h] L{l}.kvb[n hk c] L{l}.o[h n hv]
  L{l}.n1[h] L{l}.n2[h] L{l}.router[e h] L{l}.sg[f h] L{l}.su[f h] L{l}.sd[h f]
  L{l}.X{e}.g[f h] L{l}.X{e}.u[f h] L{l}.X{e}.d[h f]
  follow m,s,w }
let D = decoder.layers.{#l@pp:bal}
layout mg of experts on M, X {
  embedding.weight = E[pad(v,128*tp)@tp h] on pp=0
  D.input_norm.weight = L{l}.n1[h] same
  D.q_down.weight = L{l}.qa[r h] same
  D.q_up.weight = L{l}.qb[(n@tp hq) r]
  D.kv_down.weight = L{l}.kva[c h] same
  D.kv_up.weight = L{l}.kvb[(n@tp hk) c]
  D.linear_proj.weight = L{l}.o[h (n@tp hv)]
  D.norm.weight = L{l}.n2[h] same
  D.router.weight = L{l}.router[e h] same
  D.shared.linear_fc1.weight = L{l}[(sg:f@tp|su:f@tp) h]
  D.shared.linear_fc2.weight = L{l}.sd[h f@tp]
  D.experts.{#e@ep}.linear_fc1.weight = L{l}.X{e}[(g:f@etp|u:f@etp) h]
  D.experts.{#e@ep}.linear_fc2.weight = L{l}.X{e}.d[h f@etp]
  final_norm.weight = nf[h] same on pp=last
  output_layer.weight = head[pad(v,128*tp)@tp h] on pp=last
  FLAT
}
layout fs of experts on F {
  embed_tokens.weight = E[v@dp:ceil h]
  layers.{l}.input_norm.weight = L{l}.n1[h@dp:ceil]
  layers.{l}.q_a.weight = L{l}.qa[r@dp:ceil h]
  layers.{l}.q_b.weight = L{l}.qb[(n hq)@dp:ceil r]
  layers.{l}.kv_a.weight = L{l}.kva[c@dp:ceil h]
  layers.{l}.kv_b.weight = L{l}.kvb[(n hk)@dp:ceil c]
  layers.{l}.o_proj.weight = L{l}.o[h@dp:ceil (n hv)]
  layers.{l}.norm.weight = L{l}.n2[h@dp:ceil]
  layers.{l}.router.weight = L{l}.router[e@dp:ceil h]
  layers.{l}.shared.gate.weight = L{l}.sg[f@dp:ceil h]
  layers.{l}.shared.up.weight = L{l}.su[f@dp:ceil h]
  layers.{l}.shared.down.weight = L{l}.sd[h@dp:ceil f]
  layers.{l}.experts.gate_up = L{l}.X[(e h)@dp:ceil (g:f|u:f)]
  layers.{l}.experts.down = L{l}.X.d[(e f)@dp:ceil h]
  norm.weight = nf[h@dp:ceil]
  lm_head.weight = head[v@dp:ceil h]
}
"""
EXPERT_SIZES = {
    "l": 61,
    "v": 129280,
    "h": 7168,
    "r": 1536,
    "c": 576,
    "n": 128,
    "hq": 192,
    "hk": 256,
    "hv": 128,
    "f": 2048,
    "e": 256,
}

BUCKETS = "flat bucket 40e6 @dp of m,s,w order reverse start/64 end/lcm(dp,128)"
EXPERT_BUCKETS = BUCKETS + "\n  " + BUCKETS.replace("dp", "edp")


def meshes(ranks: int) -> str:
    """Return the meshes of a world: Megatron's, the experts' over the same ranks, and FSDP's."""
    tp = 8
    pp = {16: 1, 64: 2, 256: 4}.get(ranks, 16)
    dp = ranks // (tp * pp)
    # Experts over as many ranks as there are, at most 64; two ranks share one.
    ep, etp = min(64, ranks // pp // 2), 2
    return f"""
    mesh M = pp:{pp} dp:{dp} tp:{tp}
    mesh X = pp:{pp} edp:{ranks // pp // ep // etp} ep:{ep} etp:{etp}
    mesh F = dp:{ranks}
    """


def bound(model: str, layout: str, ranks: int) -> Bound:
    """Return one of the layouts: ``mg`` (tensors), ``mg-bucket`` or ``fs``."""
    text, sizes = {"dense": (DENSE, DENSE_SIZES), "experts": (EXPERTS, EXPERT_SIZES)}[model]
    buckets = EXPERT_BUCKETS if model == "experts" else BUCKETS
    text = text.replace("FLAT", buckets if layout == "mg-bucket" else "")
    return Bound(resolve([parse(meshes(ranks) + text)], layout.split("-")[0]), sizes)


CASES = [
    (model, source, target)
    for model in ("dense", "experts")
    for source, target in (
        ("mg", "fs"),
        ("fs", "mg"),
        ("mg-bucket", "fs"),
        ("fs", "mg-bucket"),
        ("mg-bucket", "quarter"),
    )
]
"""``quarter``: the buckets of a quarter of the ranks, at least 16."""


def measure(model: str, source_name: str, target_name: str, ranks: int) -> dict[str, Any]:
    """Measure one case in this process."""
    start = time.perf_counter()
    source = bound(model, source_name, ranks)
    if target_name == "quarter":
        world = max(16, ranks // 4)
        target = bound(model, source_name, world)
    else:
        target, world = bound(model, target_name, ranks), ranks
    out: dict[str, Any] = {"resolve_s": time.perf_counter() - start}
    asked = [0, 1, world // 2, world - 1]
    best: dict[str, Any] = {"plan_s": 0.0}
    for rank in asked:
        composition = compose(source, target)
        start, cpu = time.perf_counter(), time.process_time()
        plans = [plan for _, plan in composition.local(rank)]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if seconds > best["plan_s"]:
            best = {
                "plan_s": seconds,
                "plan_cpu_s": cpu,
                "tensors": len(plans),
                "pieces": sum(len(s.pieces) for p in plans for s in p.sources),
                "blocks": sum(len(b) for p in plans for s in p.sources for _, b in s.pieces),
                "elements": sum(p.numel for p in plans),
                "rank": rank,
            }
        del plans
    out |= best
    tracemalloc.start()
    composition = compose(source, target)
    plans = [plan for _, plan in composition.local(int(best["rank"]))]
    out["plan_mib"] = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    del plans, composition
    start = time.perf_counter()
    stored = list(StoredForm(source).tensors())
    out["describe_s"] = time.perf_counter() - start
    out["stored"] = len(stored)
    out["stored_pieces"] = sum(t.grid.npieces for t in stored)
    out["owner_runs"] = sum(len(o.runs) for o in {id(t.owners): t.owners for t in stored}.values())
    out["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


def main() -> None:
    options = arguments(__doc__, ranks="", cases="")
    if options.case:
        model, source, target, ranks = options.case.split(",")
        print(json.dumps(measure(model, source, target, int(ranks))))
        return
    sizes = [int(r) for r in options.ranks.split(",") if r] or RANKS
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.reps):
        for ranks in sizes:
            for case in CASES:
                name = ",".join([*case, str(ranks)])
                runs.setdefault(name, []).append(in_fresh_process(__file__, ["--case", name]))
    head = ["model", "from", "to", "ranks", "plan s", "plan CPU s", "plan MiB", "describe s"]
    head += ["peak MiB", "tensors", "pieces", "blocks", "stored tensors", "stored pieces"]
    figures = ["plan_s", "plan_cpu_s", "plan_mib", "describe_s", "peak_mib"]
    counts = ["tensors", "pieces", "blocks", "stored", "stored_pieces"]
    rows = [
        [
            *name.split(","),
            *(median(found, k) for k in figures),
            *(int(found[0][k]) for k in counts),
        ]
        for name, found in runs.items()
    ]
    command = " ".join(["python", "bench/lay_plan.py", *sys.argv[1:]])
    publish("lay_plan", command, table(head, rows), runs)


if __name__ == "__main__":
    main()
