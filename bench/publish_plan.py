"""How long does a worker plan its pull of a 671B model, as trainers and workers grow?

    python bench/publish_plan.py                # table, and bench/results/publish_plan.json
    python bench/publish_plan.py --trainers 1024

The model is simulated (61 layers, 256 experts), the planning is not: what is measured is
`PullPlan`, all that a worker does before it asks the first trainer, with empty caches; what it then
lists of each trainer before it asks that one, for all of them together; and on a rank of the
trainer the list of what it publishes. No other party plans anything. Trainers are
``mg``: pipeline x tensor x data parallel with experts over up to 64 ranks; ``hsdp``: FSDP2 over at
most 64 ranks, with replicas; ``fs``: FSDP2 over all ranks, where each worker needs a part of each
tensor of each of them. Half as many workers as trainers: attention over 8 ranks with replicas,
experts over up to 256. Several ranks are asked; the slowest is shown.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import lay_plan
import numpy as np
from common import arguments, in_fresh_process, median, publish, table

from ckptd.lay.local import local_tensors
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse
from ckptd.publish.messages import PublishedAbout
from ckptd.publish.pull import PullPlan
from ckptd.reshard.live.memory import ArrayMemory
from ckptd.types import dtype_of

TRAINERS = (16, 64, 256, 1024, 4096, 16384)
LAYOUTS = ("mg", "hsdp", "fs")
SHARDS = 64

ROLLOUT = """
layout ro of experts on W, V {
  embed_tokens.weight = E[pad(v,64)@tp h]
  layers.{l}.input_norm.weight = L{l}.n1[h] any
  layers.{l}.qkv_a.weight = L{l}[(qa:r|kva:c) h] any
  layers.{l}.q_b.weight = L{l}.qb[(n@tp hq) r] any
  layers.{l}.kv_b.weight = L{l}.kvb[(n@tp hk) c] any
  layers.{l}.o_proj.weight = L{l}.o[h (n@tp hv)] any
  layers.{l}.norm.weight = L{l}.n2[h] any
  layers.{l}.router.weight = L{l}.router[e h] any
  layers.{l}.shared.gate_up.weight = L{l}[(sg:f@tp|su:f@tp) h] any
  layers.{l}.shared.down.weight = L{l}.sd[h f@tp] any
  layers.{l}.experts.w13 = L{l}.X[e@ep (g:f|u:f) h] any
  layers.{l}.experts.w2 = L{l}.X.d[e@ep h f] any
  norm.weight = nf[h] any
  lm_head.weight = head[pad(v,64)@tp h]
}
"""


def program(trainers: int, workers: int, *, shards: int) -> str:
    """Return the model, the meshes of both sides, and how each holds the model."""
    tp, ep = min(8, workers), min(256, workers)
    meshes = lay_plan.meshes(trainers).replace(
        f"mesh F = dp:{trainers}", f"mesh F = rep:{trainers // shards} dp:{shards}"
    )
    meshes += f"mesh W = rep:{workers // tp} tp:{tp}\nmesh V = erep:{workers // ep} ep:{ep}\n"
    return meshes + lay_plan.EXPERTS.replace("FLAT", "") + ROLLOUT


def measure(layout: str, trainers: int) -> dict[str, Any]:
    """Measure one case in this process."""
    workers = trainers // 2
    shards = min(trainers, SHARDS) if layout == "hsdp" else trainers
    text = program(trainers, workers, shards=shards)
    name = "mg" if layout == "mg" else "fs"
    about = PublishedAbout("epoch", trainers, f"# layout {name}\n{text}", lay_plan.EXPERT_SIZES)
    target = Bound(resolve([parse(text)], "ro"), lay_plan.EXPERT_SIZES)
    source = StoredForm(Bound(resolve([parse(text)], name), lay_plan.EXPERT_SIZES))
    place = ArrayMemory(np.empty(0, np.uint8), dtype_of("bfloat16"))
    found: dict[str, Any] = {"pull_s": 0.0, "publish_s": 0.0}
    for rank in sorted({0, workers // 2, workers - 1}):
        targets = {t.name: place for t in local_tensors(StoredForm(target), rank)}
        start, cpu = time.perf_counter(), time.process_time()
        plan = PullPlan(about, target, rank, targets)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if seconds > found["pull_s"]:
            cpu_all = time.process_time()
            parts = sum(len(plan._takings.of(giver)) for giver in plan.givers)
            cpu_all = time.process_time() - cpu_all
            found |= {"pull_s": seconds, "pull_cpu_s": cpu, "list_cpu_s": cpu_all}
            found |= {"givers": len(plan.givers), "parts": parts}
        del plan
    for rank in sorted({0, trainers // 2, trainers - 1}):
        start = time.perf_counter()
        published = list(local_tensors(source, rank))
        found["publish_s"] = max(found["publish_s"], time.perf_counter() - start)
        found["published"] = len([t for t in published if not t.state])
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    options = arguments(__doc__, trainers="")
    if options.case:
        layout, trainers = options.case.split(",")
        print(json.dumps(measure(layout, int(trainers))))
        return
    sizes = [int(n) for n in options.trainers.split(",") if n] or TRAINERS
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.reps):
        for case in [f"{layout},{n}" for layout in LAYOUTS for n in sizes]:
            runs.setdefault(case, []).append(in_fresh_process(__file__, ["--case", case]))
            print(case, runs[case][-1], file=sys.stderr)
    head = ["trainer", "trainers", "workers", "worker plans CPU s (aim 2)", "s", "peak MiB"]
    head.insert(4, "and lists all trainers' parts CPU s")
    head += ["trainers pulled from", "parts", "trainer lists s", "its tensors"]
    rows = []
    for case, found in runs.items():
        layout, trainers = case.split(",")
        seconds = [median(found, key) for key in ("pull_cpu_s", "list_cpu_s", "pull_s", "peak_mib")]
        counts = [int(found[0][key]) for key in ("givers", "parts")]
        rows.append([layout, trainers, int(trainers) // 2, *seconds, *counts])
        rows[-1] += [median(found, "publish_s"), int(found[0]["published"])]
    command = " ".join(["python", "bench/publish_plan.py", *sys.argv[1:]])
    publish("publish_plan", command, table(head, rows), runs)


if __name__ == "__main__":
    main()
