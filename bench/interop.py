"""Conversions between formats of others, ours against the tools that come with them.

    scripts/install plugins
    .venv-plugins/bin/python bench/interop.py --gb 4

Weights and two moments in float32 of a model like Llama, saved by the libraries themselves: torch's
DCP on four ranks, DeepSpeed's ZeRO-3 on two. Each conversion is a process of its own with nothing
cached, its start and its imports included, by turns with the tool it is compared with. The share is
that of the slower of what the disk reads and writes, measured in the same run; memory is the
process's largest resident set; bytes read are those that came from the disk. How much of all this
is the start shows a conversion that writes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

WIDTH, HIDDEN, WORDS = 1024, 2816, 32768
STATES = ("exp_avg", "exp_avg_sq")
MIB = 1 << 20
PATIENCE_S = 900.0
SPEED_AIM, BYTES_AIM = 0.8, 1.05
"""Of the disk's speed, at least; bytes read for one that is written, at most."""
START = "start"
CKPTD = "from ckptd.cli.main import main; main()"
TORCH_SAVE = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as run; "
TO_DCP = "from torch.distributed.checkpoint.format_utils import torch_save_to_dcp as run; "
CONSOLIDATE = (
    "import json, sys; from torch.distributed.checkpoint._consolidate_hf_safetensors import "
    "consolidate_safetensors_files as run; "
    "run(sys.argv[1], sys.argv[2], json.load(open(sys.argv[3])), num_threads=2)"
)
# Packages are installed with their modules compiled; those of a checkout must be so, too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of a model."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out |= {p + f"self_attn.{n}_proj.weight": (WIDTH, WIDTH) for n in "qkvo"}
        out |= {p + f"mlp.{n}_proj.weight": (HIDDEN, WIDTH) for n in ("gate", "up")}
        out |= {p + "mlp.down_proj.weight": (WIDTH, HIDDEN)}
        out |= {p + n: (WIDTH,) for n in ("input_layernorm.weight", "post_norm.weight")}
    return out | {"model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}


def weight_bytes(layers: int) -> int:
    """Return the bytes of the weights, a third of the state."""
    return 4 * sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes(layers).values())


def layers_of(gb: float) -> int:
    """Return the layers of a model whose state has about so many bytes."""
    one = weight_bytes(1) - weight_bytes(0)
    return max(1, round((gb * 1e9 / 3 - weight_bytes(0)) / one))


# --- sources, in ranks --------------------------------------------------------------------------


def tensor_of(shape: tuple[int, ...], seed: int) -> Any:
    """Return noise."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save_dcp(folder: str, layers: int) -> None:
    """Save weights and moments by DCP, and the weights once more in its form for Hugging Face."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for number, (name, shape) in enumerate(shapes(layers).items()):
        local = (shape[0] // dist.get_world_size(), *shape[1:])
        for kind in ("", *STATES):
            key = f"optim.state.{name}.{kind}" if kind else f"model.{name}"
            data = tensor_of(local, 7 * number + dist.get_rank() + len(kind))
            state[key] = DTensor.from_local(data, mesh, [Shard(0)], run_check=False)
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    model = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
    writer = HuggingFaceStorageWriter(f"{folder}/shards", save_distributed=True)
    dcp.save(model, storage_writer=writer)


def save_zero(folder: str, layers: int) -> None:
    """Save the same model by DeepSpeed's stage 3, after a step that makes the moments."""
    import deepspeed
    import deepspeed.ops
    import torch
    from torch import nn

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, (name, shape) in enumerate(shapes(layers).items()):
                self.register_parameter(
                    name.replace(".", "_"), nn.Parameter(tensor_of(shape, number))
                )

        def forward(self) -> Any:
            return sum(p.reshape(-1)[:1].sum() for p in self.parameters())

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine())
    engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(f"{folder}/zero", tag="global_step1", client_state=info)


def save_files(folder: str, layers: int) -> None:
    """Save the whole state as one file of torch, and the weights for Hugging Face."""
    import torch
    from safetensors.torch import save_file

    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for number, (name, shape) in enumerate(shapes(layers).items()):
        state["model"][name] = tensor_of(shape, number)
        state["optim"]["state"][name] = {s: tensor_of(shape, number + len(s)) for s in STATES}
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, f"{folder}/state.pt")
    index = dict.fromkeys(state["model"], 1)
    Path(f"{folder}/index.json").write_text(json.dumps(index))
    Path(f"{folder}/hf").mkdir(exist_ok=True)
    save_file(state["model"], f"{folder}/hf/model.safetensors", {"format": "pt"})


def build(folder: Path, layers: int) -> None:
    """Make the sources that are not there."""
    from ckptd.testing.ranks import run_ranks

    made = folder / f"made-{layers}"
    if made.exists():
        return
    common.remove(str(folder / "sources"))
    sources = str(folder / "sources")
    files = [sys.executable, __file__, "--dir", sources, "--case", f"files:{layers}"]
    subprocess.run(files, check=True, timeout=PATIENCE_S)
    run_ranks(4, save_dcp, sources, layers, deadline_s=PATIENCE_S)
    run_ranks(2, save_zero, sources, layers, deadline_s=PATIENCE_S, env=ENVIRONMENT)
    made.touch()


# --- conversions --------------------------------------------------------------------------------


def conversions(s: str, t: str, budget: int) -> dict[str, dict[str, tuple[list[str], int]]]:
    """Return commands by conversion and tool, and what each writes: 1 is weights, 3 the state.

    Parameters
    ----------
    s, t
        The folder of the sources, and the target.
    budget
        Bytes that ckptd may use for data.
    """

    def ours(source: str, *options: str) -> list[str]:
        bound = ["--budget", f"{budget // MIB}MiB"]
        return ["-c", CKPTD, "reshard", f"{s}/{source}", t, *bound, *options]

    def module(name: str, *options: str) -> list[str]:
        return ["-m", name, *options]

    tag = f"{s}/zero/global_step1"
    extract = ["--num_extract_workers", "2", "--num_merge_workers", "2"]
    universal = ["--input_folder", tag, "--output_folder", f"{t}/out", *extract]
    hf = ["--to", "names.plain", "--format", "hf"]
    dcp = ["--to", "names.dcp", "--format", "dcp"]
    return {
        "DCP -> HF": {
            "ckptd": (ours("dcp", *hf), 1),
            "dcp_to_torch_save": (
                ["-c", f"{TORCH_SAVE}run({f'{s}/dcp'!r}, {f'{t}.pt'!r})"],
                3,
            ),
        },
        "shards of DCP for HF -> HF": {
            "ckptd": (ours("shards", *hf), 1),
            "_consolidate_hf_safetensors": (
                ["-c", CONSOLIDATE, f"{s}/shards", t, f"{s}/index.json"],
                1,
            ),
        },
        "ZeRO-3 -> HF": {
            "ckptd": (ours("zero", *hf), 1),
            "zero_to_fp32.py": (
                module("deepspeed.utils.zero_to_fp32", f"{s}/zero", t, "--safe_serialization"),
                1,
            ),
        },
        "ZeRO-3 of 2 -> any ranks": {
            "ckptd": (ours("zero", "--to", "names.plain", "--format", "universal"), 3),
            "ds_to_universal.py": (module("deepspeed.checkpoint.ds_to_universal", *universal), 3),
        },
        "torch.save -> DCP": {
            "ckptd": (ours("state.pt", *dcp), 3),
            "torch_save_to_dcp": (
                ["-c", f"{TO_DCP}run({f'{s}/state.pt'!r}, {t!r})"],
                3,
            ),
        },
        "HF -> DCP": {"ckptd": (ours("hf", *dcp), 1)},
        START: {"ckptd": (ours("dcp", *hf, "--dry-run"), 0)},
    }


def measure(folder: Path, command: list[str]) -> dict[str, Any]:
    """Run a command with nothing cached, to the end of what it left to the disk."""
    target = folder / "target"
    clear(target)
    target.mkdir()
    if command[1] == CKPTD:
        target.rmdir()
    common.settle()
    common.drop_caches(str(folder))
    start = time.perf_counter()
    # Not `subprocess.run`: the resources of this one process are wanted, and of what it started.
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            cwd=folder,
        )
        deadline = threading.Timer(PATIENCE_S, process.kill)
        deadline.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            deadline.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.perf_counter() - start
    if status:
        code = process.returncode
        raise SystemExit(f"{command} ended with {code}:\n{(folder / 'said').read_text()[-3000:]}")
    clear(target)
    return {
        "seconds": seconds,
        "memory": used.ru_maxrss * 1024,
        "read": used.ru_inblock * 512,
        "cpu": used.ru_utime + used.ru_stime,
    }


def clear(target: Path) -> None:
    common.remove(str(target))
    target.with_suffix(".pt").unlink(missing_ok=True)


# --- the run ------------------------------------------------------------------------------------


def main() -> None:
    options = common.arguments(__doc__, gb=4.0, budget=512 * MIB, only="")
    folder = Path(options.dir)
    if options.case:
        save_files(options.dir, int(options.case.partition(":")[2]))
        return
    layers = layers_of(options.gb)
    build(folder, layers)
    every = conversions(f"{folder}/sources", f"{folder}/target", options.budget)
    found: dict[str, list[dict[str, Any]]] = {"limit": []}
    for rep in range(options.reps):
        found["limit"].append(common.disk_limit(options.dir, weight_bytes(layers)))
        for name, tools in every.items():
            if options.only not in name and name != START:
                continue
            order = list(tools) if rep % 2 else list(tools)[::-1]
            for tool in order:
                figures = measure(folder, tools[tool][0])
                found.setdefault(f"{name}: {tool}", []).append(figures)
                print(f"{rep + 1}/{options.reps} {name}: {tool}: {figures}", file=sys.stderr)
        report(found, every, layers, options)


def report(found: dict[str, list[dict[str, Any]]], every: Any, layers: int, options: Any) -> None:
    m, size, reps = common.median, weight_bytes(layers), len(found["limit"])
    read, write = (common.limit_of(found["limit"], w) for w in ("read", "write"))
    rows: list[list[Any]] = []
    for name, tools in every.items():
        for tool, (_, written) in tools.items():
            samples = found.get(f"{name}: {tool}")
            if not samples or name == START:
                continue
            seconds = m(samples, "seconds")
            needed = written * size
            rows.append(
                [
                    name,
                    tool,
                    seconds,
                    written * max(read, write) / seconds,
                    m(samples, "memory") / MIB,
                    m(samples, "read") / needed,
                    m(samples, "cpu"),
                ]
            )
    start = found[f"{START}: ckptd"]
    head = ["conversion", "by", "s", "min(read, write) limit / s", "peak memory MiB"]
    head += ["bytes read / written", "CPU s"]
    text = (
        f"A state of {3 * size / 1e9:.2f} GB, of which {size / 1e9:.2f} GB are weights; budget "
        f"{options.budget // MIB} MiB; {reps} repetition{'s' * (reps > 1)}, medians; processes "
        f"with their start. The disk alone, for the weights: {write:.2f} s to write, {read:.2f} s "
        "to read. `dcp_to_torch_save` writes moments too, as it cannot leave them out; in files of "
        "DCP they lie between the weights. Of ckptd's figures the start, with the libraries it "
        f"reads and the source's metadata, is {m(start, 'seconds'):.2f} s, {m(start, 'cpu'):.2f} s "
        f"of the processor, and {m(start, 'read') / size:.2f} of the weights' bytes.\n\n"
        f"{summary(rows)}\n\n"
    )
    command = f"python bench/interop.py --gb {options.gb:g} --reps {reps}"
    common.publish("interop", command, text + common.table(head, rows), found)


def summary(rows: list[list[Any]]) -> str:
    """Return in words how ours compares with the others, and which aims it misses."""
    ours = {row[0]: row for row in rows if row[1] == "ckptd"}
    pairs = [(ours[row[0]], row) for row in rows if row[1] != "ckptd" and row[0] in ours]
    words = []
    if pairs:
        time, memory = (span(mine[k] / theirs[k] for mine, theirs in pairs) for k in (2, 4))
        words += [f"Ours takes {time} of the time of theirs, and {memory} of the memory."]
    aims = {
        f"at least {SPEED_AIM:g} of the disk's speed": [
            row[3] for row in ours.values() if row[3] < SPEED_AIM
        ],
        f"at most {BYTES_AIM:g} bytes read for one that is written": [
            row[5] for row in ours.values() if row[5] > BYTES_AIM
        ],
    }
    missed = [
        f"{aim} (in {len(values)} of {len(ours)}: {span(values)})"
        for aim, values in aims.items()
        if values
    ]
    return " ".join([*words, f"Missed aims: {'; '.join(missed) or 'none'}."])


def span(values: Iterable[float]) -> str:
    """Return the lowest and the highest value."""
    found = sorted(values)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
