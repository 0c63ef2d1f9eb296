"""A checkpoint of TP4 PP2 resharded from disk to disk: to TP2 PP4, and to FSDP2 under other names.

    python bench/reshard.py

A Llama-like model in float32 with two moments: 4.5 GB by default. The share is that of the slower
of what the disk reads and writes, measured in the same run, as if one disk did both at once at full
speed. Most cannot: so a plain copy of the same files stands beside it, without digests or layouts,
reading and writing at the same time. Memory is the process's peak above what it was
when everything was planned. DCP's load onto the same layout, by eight gloo ranks from its own save
of the same tensors, reads only: it ends in memory, not on disk, and cannot change names or unfuse.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import common

KV, WIDTH, HIDDEN, WORDS = 16, 1024, 2816, 32768
MIB = 1 << 20
STATES = ("exp_avg", "exp_avg_sq")
LETS = (f"let kv = {KV}", "let rep = 1", f"let hd = {WIDTH // KV}", f"let v = {WORDS}")
SOURCE = ("megatron.gpt", "mesh megatron_gpt = pp:2 dp:1 tp:4", *LETS)
TARGETS: dict[str, tuple[str, ...]] = {
    "TP2 PP4": ("megatron.gpt", "mesh megatron_gpt = pp:4 dp:1 tp:2", *LETS),
    "FSDP2 x 8": ("fsdp", "mesh fsdp = dp:8", "use hf.llama", *LETS),
}
DCP = {"TP2 PP4": (4, 2), "FSDP2 x 8": (1, 8)}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the fused tensors, as stored."""
    out: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (WORDS, WIDTH)}
    for i in range(layers):
        p = f"decoder.layers.{i}."
        out |= {
            p + "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
            p + "self_attention.linear_qkv.weight": (3 * WIDTH, WIDTH),
            p + "self_attention.linear_proj.weight": (WIDTH, WIDTH),
            p + "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
            p + "mlp.linear_fc1.weight": (2 * HIDDEN, WIDTH),
            p + "mlp.linear_fc2.weight": (WIDTH, HIDDEN),
        }
    return out | {
        "decoder.final_layernorm.weight": (WIDTH,),
        "output_layer.weight": (WORDS, WIDTH),
    }


def state_bytes(layers: int) -> int:
    sizes = [s[0] * (s[1] if len(s) > 1 else 1) for s in shapes(layers).values()]
    return 12 * sum(sizes)


# --- ckptd ----------------------------------------------------------------------------------------


def program(name: str, *rules: str) -> Any:
    from ckptd.reshard.layouts import read_program

    return read_program(name, "bench", lambda run: run.target).with_rules(rules)


def write_folder(folder: Path, layers: int) -> None:
    """Write whole tensors of noise as safetensors, one file a state."""
    import numpy as np

    from ckptd.checkpoint.format.container import build_header
    from ckptd.types import DTYPES

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(1 << 24, dtype=np.float32)
    for state in ("", *STATES):
        names = {f"optim.{n}.{state}" if state else n: s for n, s in shapes(layers).items()}
        entries = [(n, DTYPES["float32"], s) for n, s in names.items()]
        header, _ = build_header(entries, {})
        with open(folder / f"{state or 'params'}.safetensors", "wb") as out:
            out.write(header)
            for shape in names.values():
                left = int(np.prod(shape))
                while left:
                    part = pool[int(rng.integers(1 << 20)) :][:left]
                    out.write(part.data)
                    left -= len(part)


def build(root: Path, layers: int, budget: int) -> None:
    """Make the source: noise as a folder, then a checkpoint of TP4 PP2."""
    from ckptd.checkpoint.load.reader import CkptdReader
    from ckptd.checkpoint.root.index import Index
    from ckptd.readers.find import find_foreign
    from ckptd.reshard.source import open_own
    from ckptd.store import open_store

    plain = root.with_name("plain")
    common.remove(str(plain))
    write_folder(plain, layers)
    on_none = ("megatron.gpt", "mesh megatron_gpt = pp:1 dp:1 tp:1", *LETS)
    with open_store(plain) as store, open_store(root) as out:
        found = find_foreign(store, step=1)
        assert found is not None
        index = Index(found)
        stock = open_own(CkptdReader(index, index.commit(found.name)))
        run(stock, program(*on_none), program(*SOURCE), out, budget)
    common.remove(str(plain))


def run(stock: Any, source: Any, target: Any, out: Any, budget: int) -> dict[str, Any]:
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.reshard.execute import Budget
    from ckptd.reshard.job import ReshardJob, ReshardShare
    from ckptd.reshard.prepare import prepare

    begun = time.perf_counter()
    prepared = prepare(stock, source, target)
    planned = time.perf_counter() - begun
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    before = peak()
    job = ReshardJob(
        stock.source,
        prepared.assembled.target,
        Catalogue(out),
        step=stock.step,
        identity=prepared.identity,
        bulk=out,
        expected=prepared.expected,
    )
    io = common.io_counters()
    done = job.run(ReshardShare(), Budget.of(budget, stock.source.store))
    after = common.io_counters()
    return {
        "seconds": time.perf_counter() - begun,
        "planned_s": planned,
        "read": done.bytes_read,
        "needed": done.bytes_needed,
        "asked": after["rchar"] - io["rchar"],
        "device": after["read_bytes"] - io["read_bytes"],
        "memory": peak() - before,
        "staged": done.peak_staged,
        "witness": done.witness_values,
        "rounds": done.rounds,
    }


def peak() -> int:
    """Return the peak of this process's memory since it was last reset, in bytes."""
    rows = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(rows["VmHWM"].split()[0])


def ours(folder: Path, name: str, budget: int) -> dict[str, Any]:
    """Reshard once, with nothing cached."""
    from ckptd.checkpoint.load.reader import CkptdReader
    from ckptd.checkpoint.root.catalogue import Catalogue
    from ckptd.reshard.prepare import source_program
    from ckptd.reshard.source import open_own
    from ckptd.store import open_store

    target = folder / "target"
    common.remove(str(target))
    common.settle()
    common.drop_caches(str(folder))
    with open_store(folder / "source") as store, open_store(target) as out:
        catalogue = Catalogue(store)
        latest = catalogue.latest()
        assert latest is not None
        start = time.perf_counter()
        stock = open_own(CkptdReader(catalogue, latest))
        opened = time.perf_counter() - start
        source = source_program(stock, None).with_rules(LETS)
        found = run(stock, source, program(*TARGETS[name]), out, budget)
        found["seconds"] += opened
    common.remove(str(target))
    return found


# --- DCP ------------------------------------------------------------------------------------------


def held(layers: int, pp: int, tp: int, *, noise: bool) -> dict[str, Any]:
    """Return this rank's DTensors: its pipeline stage, cut over the tensor-parallel ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
    mine, stage = mesh["tp"], mesh.get_local_rank("pp")
    columns = ("linear_proj", "linear_fc2")
    out: dict[str, Any] = {}
    for name, shape in shapes(layers).items():
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else 0 if parts[0] == "embedding" else -1
        home = layer * pp // layers if layer >= 0 else pp - 1
        if home != stage:
            continue
        axis = 1 if any(c in name for c in columns) and pp > 1 else 0
        local = list(shape)
        local[axis] = -(-shape[axis] // tp)
        for state in ("", *STATES):
            data = torch.randn(local) if noise else torch.zeros(local)
            key = f"optim.{name}.{state}" if state else name
            out[key] = DTensor.from_local(data, mine, [Shard(axis)], run_check=False)
    return out


def dcp_save(folder: str, layers: int) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    dcp.save(held(layers, 2, 4, noise=True), checkpoint_id=folder)
    return {}


def dcp_load(folder: str, layers: int, pp: int, tp: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    live = held(layers, pp, tp, noise=False)
    dist.barrier()
    if dist.get_rank() == 0:
        common.drop_caches(folder)
    dist.barrier()
    before = common.io_counters()
    start = time.perf_counter()
    dcp.load(live, checkpoint_id=folder)
    dist.barrier()
    after = common.io_counters()
    return {"seconds": time.perf_counter() - start, "asked": after["rchar"] - before["rchar"]}


def theirs(folder: Path, name: str, layers: int) -> dict[str, Any]:
    from ckptd.testing.ranks import run_ranks

    where = str(folder / "dcp")
    if not Path(where).exists():
        run_ranks(8, dcp_save, where, layers, deadline_s=900.0)
    common.settle()
    ranks = run_ranks(8, dcp_load, where, layers, *DCP[name], deadline_s=900.0)
    return {
        "seconds": max(r["seconds"] for r in ranks),
        "asked": sum(r["asked"] for r in ranks),
    }


# --- the run --------------------------------------------------------------------------------------


def main() -> None:
    options = common.arguments(__doc__, layers=24, budget=512 * MIB, compare="dcp")
    folder = Path(options.dir)
    if options.case:
        who, _, name = options.case.partition(":")
        if who == "build":
            build(folder / "source", options.layers, options.budget)
            print("{}")
        elif who == "ckptd":
            print(json.dumps(ours(folder, name, options.budget)))
        elif who == "copy":
            print(json.dumps({"seconds": common.copy_limit(str(folder / "source"))}))
        else:
            print(json.dumps(theirs(folder, name, options.layers)))
        return
    size = state_bytes(options.layers)
    args = ["--dir", options.dir, "--layers", str(options.layers)]
    args += ["--budget", str(options.budget)]
    common.remove(str(folder / "source"))
    common.in_fresh_process(__file__, [*args, "--case", "build"], 1200.0)
    cases = ["copy", *(f"ckptd:{name}" for name in TARGETS)]
    cases += [f"dcp:{name}" for name in TARGETS] if options.compare == "dcp" else []
    tell = partial(report, size=size, options=options)
    common.alternate(__file__, options, args, cases, size, tell, 1200.0)
    common.remove(str(folder / "source"))
    common.remove(str(folder / "dcp"))


def report(found: dict[str, list[Any]], size: int, options: Any) -> None:
    m = common.median
    write, read = (common.limit_of(found["limit"], what) for what in ("write", "read"))
    limit = max(write, read)
    text = f"{size / 1e9:.2f} GB of TP4 PP2, budget {options.budget // MIB} MiB;"
    text += f" {len(found['limit'])} repetitions, medians. The disk alone: {write:.2f} s to write,"
    copy = m(found["copy"], "seconds")
    text += f" {read:.2f} s to read, {copy:.2f} s to copy the same files.\n\n"
    rows = []
    for name in TARGETS:
        s = found[f"ckptd:{name}"]
        rows.append(
            [
                name,
                m(s, "seconds"),
                limit / m(s, "seconds"),
                copy / m(s, "seconds"),
                sum(x["read"] for x in s) / sum(x["needed"] for x in s),
                m(s, "asked") / size,
                m(s, "memory") / MIB,
                m(s, "planned_s"),
            ]
        )
    head = ["reshard to", "s", "min(read, write) limit / s (aim 0.8)", "plain copy / s"]
    head += [
        "bytes read / needed (aim 1.1)",
        "rchar / needed",
        "peak memory MiB",
        "of it planning s",
    ]
    text += common.table(head, rows)
    if options.compare == "dcp":
        rows = []
        for name in TARGETS:
            a, b = found[f"ckptd:{name}"], found[f"dcp:{name}"]
            rows.append(["ckptd, to disk", name, m(a, "seconds"), m(a, "asked") / size])
            rows.append(["DCP, to memory", name, m(b, "seconds"), m(b, "asked") / size])
        text += "\n\n" + common.table(["", "to", "s, cold", "bytes asked / needed"], rows)
    common.publish("reshard", "python bench/reshard.py", text, found)


if __name__ == "__main__":
    main()
