"""Which conversions are exact: every source to every target, and each element compared.

Nothing that ckptd says of itself counts. What a source holds, the library that wrote it said; what
a target holds, the library that reads it says. `scripts/interop` writes docs/reference/interop.md
from what ran here.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.readers.opening import unpack

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "interop.md"

Array = np.ndarray[Any, Any]
Command = tuple[str, ...]
SOURCE, OUT, ROOT = "./SOURCE", "./out", "./root"


@dataclass(frozen=True)
class Content:
    """Weights by name, and states of the optimizer by name and state, as bits."""

    weights: Mapping[str, Array]
    states: Mapping[tuple[str, str], Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A checkpoint that a library wrote.

    Attributes
    ----------
    name
        What it is called in the page, and in commands.
    reader
        Of ckptd, by which it is read.
    made
        The library, and how many ranks of what.
    make
        Writes it below a folder; returns the path that a user gives, and what it holds.
    layouts
        Options of a command that changes names on the way; empty where names stay.
    """

    name: str
    reader: str
    made: str
    make: Callable[[Path], tuple[Path, Content]]
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A format, how it is asked for, and how its own library reads it.

    Attributes
    ----------
    name, about
        For the page.
    commands
        Those of a source; `SOURCE`, `OUT` and `ROOT` stand for paths.
    read
        What its library finds in the folder.
    has_states
        Whether it holds the optimizer's.
    left_out
        States that it does not hold as such.
    lossy
        What happens to values; None: nothing.
    """

    name: str
    about: str
    commands: Callable[[Source], tuple[Command, ...]]
    read: Callable[[Path], Content]
    has_states: bool = True
    left_out: tuple[str, ...] = ()
    lossy: Callable[[Array], Array] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of one conversion: ``exact``, ``lossy`` or ``refused``, with numbers or reasons."""

    result: str
    command: str
    said: str


class Wrong(Exception):
    """A conversion that is not what the libraries say: a defect, and no line of a table."""


# -- sources: real samples, and what libraries write here ------------------------------------------

Made = tuple[Path, Content]
LLAMA = ("--from", "megatron.dist", "--to", "hf.llama", "-e", "let kv = 2", "-e", "let v = 128")
_MASTER = {"param": "master"}
"""States that libraries name otherwise than ckptd does."""


def split(named: Mapping[str, Array], weight: str, state: str) -> Content:
    """Part what a library names into weights and states, by how names of both begin."""
    weights, states = {}, {}
    for name, values in named.items():
        if name.startswith(state):
            of, _, what = name.removeprefix(state).rpartition(".")
            states[of, _MASTER.get(what, what)] = values
        elif name.startswith(weight):
            weights[name.removeprefix(weight)] = values
        else:
            raise Wrong(f"{name} is neither weight nor state")
    return Content(weights, states)


def bits(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Return torch's tensors as numpy's; bfloat16 as its bits."""
    import torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    half = torch.bfloat16
    return {n: (t.view(torch.uint16) if t.dtype == half else t).numpy() for n, t in whole.items()}


def sample(
    folder: str, path: str, expected: str, weight: str = "", state: str = "optim.", *, tar: str
) -> Callable[[Path], Made]:
    """Return what unpacks a sample of the repository, whose library said what it holds."""

    def make(out: Path) -> Made:
        unpack(tar, out)
        found = dict(np.load(out / folder / expected))
        return out / folder / path, split(found, weight, state)

    return make


MADE_HERE = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
"""Versions of what writes sources when they are wanted; samples have theirs in their own text."""


def check_version(package: str) -> None:
    """Raise unless the page says of a library the version that is installed."""
    if version(package).partition("+")[0] != MADE_HERE[package]:
        raise Wrong(f"{package} {version(package)} is not {MADE_HERE[package]}: scripts/interop")


def by_dcp(ranks: int, function: str, **options: bool) -> Callable[[Path], Made]:
    """Return what lets ranks save by DCP."""

    def make(out: Path) -> Made:
        from ckptd.testing.ranks import run_ranks

        check_version("torch")
        whole: dict[str, Any] = {}
        for part in run_ranks(
            ranks, _dcp_rank, function, str(out / "dcp"), options, deadline_s=280.0
        ):
            whole |= part
        return out / "dcp", split(bits(whole), "model.", "optim.state.")

    return make


def _dcp_rank(function: str, folder: str, options: Mapping[str, bool]) -> dict[str, Any]:
    from tests.interop import made_dcp

    found: dict[str, Any] = getattr(made_dcp, function)(folder, **options)
    return found


def by_deepspeed(
    ranks: int, stage: int, *, half: bool = False, **options: Any
) -> Callable[[Path], Made]:
    """Return what lets ranks save by DeepSpeed."""

    def make(out: Path) -> Made:
        from ckptd.testing.ranks import run_ranks

        check_version("deepspeed")
        asked = str(out / "zero"), stage, half, options
        world = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        whole = run_ranks(ranks, _zero_rank, *asked, deadline_s=280.0, env=world)[0]
        return out / "zero", split(bits(whole), "", "optim.")

    return make


def _zero_rank(folder: str, stage: int, half: bool, options: dict[str, Any]) -> dict[str, Any]:
    from tests.interop.made_zero import train_and_save

    return train_and_save(folder, stage, half, options)


def by_transformers(name: str) -> Callable[[Path], Made]:
    """Return what saves a model of transformers; safetensors says what the files hold."""

    def make(out: Path) -> Made:
        from tests.interop.models import save

        check_version("transformers")
        folder = save(name, out / name)
        return folder, read_hf(folder)

    return make


def one_file(out: Path) -> Made:
    """Write a model as torch's own tutorials do."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9))
    torch.save({"model": net.state_dict(), "step": 3}, out / "model.pt")
    return out / "model.pt", Content(bits(net.state_dict()))


def joined(out: Path) -> Made:
    """Unpack a universal folder that DeepSpeed's own script made; torch says what it holds."""
    unpack("deepspeed", out)
    folder = out / "deepspeed" / "pipe1-universal"
    return folder, read_universal(folder)


def legacy(out: Path) -> Made:
    """Write a file of torch as before 1.6, which is no zip."""
    import torch

    torch.save({"w": torch.ones(3)}, out / "old.pt", _use_new_zipfile_serialization=False)
    return out / "old.pt", Content({})


def compressed(out: Path) -> Made:
    """Write items of DCP that torch compresses."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(str(out / "packed"), _extensions=[ZStandard()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    return out / "packed", Content({})


def sources() -> list[Source]:
    """Return all sources, in the order of the page."""

    def dcp(name: str) -> Callable[[Path], Made]:
        wanted = "expected.npz", "model.", "optim.state."
        return sample(f"dcp/{name}", "", *wanted, tar="foreign")

    torch, deepspeed = (f"{package} {MADE_HERE[package]}" for package in ("torch", "deepspeed"))
    megatron = "megatron-core 0.16.1, torch_dist of TP2 x PP2"
    opt = sample("megatron-tp2pp2-opt", "optim-fully_reshardable", "expected-hf.npz", tar="foreign")
    return [
        Source(
            "dcp-fsdp2-tp", "dcp", f"{torch}, FSDP2 x TP, 2 x 2 ranks, AdamW", dcp("dcp-fsdp2-tp")
        ),
        Source(
            "dcp-threads",
            "dcp",
            f"{torch}, the same weights, a file a thread",
            dcp("dcp-per-thread-files"),
        ),
        Source(
            "dcp-safetensors",
            "dcp",
            f"{torch}, the same weights, safetensors items",
            dcp("dcp-safetensors"),
        ),
        Source("dcp-fsdp1", "dcp", f"{torch}, FSDP1 sharded, 4 ranks", dcp("fsdp1-sharded")),
        Source(
            "dcp-3",
            "dcp",
            f"{torch}, FSDP2 on 3 ranks, AdamW",
            by_dcp(3, "fsdp2", flatten=False, half=False),
        ),
        Source(
            "dcp-3-flat",
            "dcp",
            f"{torch}, the same in bf16, flat names of states",
            by_dcp(3, "fsdp2", flatten=True, half=True),
        ),
        Source(
            "dcp-hsdp", "dcp", f"{torch}, FSDP2 in 2 replicas of 2 shards, SGD", by_dcp(4, "hsdp")
        ),
        Source(
            "dcp-pipeline",
            "dcp",
            f"{torch}, FSDP x TP x PP, 2 x 2 x 2 ranks",
            by_dcp(8, "pipeline"),
        ),
        Source("dcp-zstd", "dcp", f"{torch}, items that `ZStandard` compressed", compressed),
        Source(
            "rank-dtensors",
            "torch",
            f"{torch}, a file a rank with DTensors, FSDP2 x TP (verl)",
            sample("dcp/torch-save-dtensor", "", "expected.npz", tar="foreign"),
        ),
        Source(
            "rank-fsdp1",
            "torch",
            f"{torch}, a file a rank with ShardedTensors, FSDP1 on 4 ranks",
            sample("fsdp1/sharded", "", "expected.npz", "", "state.", tar="fsdp1"),
        ),
        Source("torch-file", "torch", f"{torch}, one file of a model's `state_dict`", one_file),
        Source("torch-legacy", "torch", f"{torch}, no zip, as before 1.6", legacy),
        Source(
            "megatron",
            "megatron",
            f"{megatron}, stacked names",
            sample("megatron-tp2pp2", "model-stacked", "expected-hf.npz", tar="foreign"),
            LLAMA,
        ),
        Source(
            "megatron-adam",
            "megatron",
            f"{megatron}, distributed optimizer, `fully_reshardable`",
            opt,
            LLAMA,
        ),
        Source(
            "megatron-buckets",
            "megatron",
            "megatron-core 0.16.1, torch_dist of TP2 x PP2 x DP2, distributed optimizer,"
            " `dp_reshardable`, by a layout of its own",
            sample("megatron-buckets", "iter_0000002", "expected-hf.npz", tar="megatron-buckets"),
            ("--from", f"{SOURCE}/local.lay:buckets", "--to", "hf.llama"),
        ),
        Source(
            "zero3",
            "deepspeed",
            "deepspeed 0.19.8, ZeRO-3 on 2 ranks",
            sample("deepspeed/zero3-fp32", "", "expected.npz", tar="foreign"),
        ),
        *(
            Source(
                name,
                "deepspeed",
                f"deepspeed 0.19.8, {about}",
                sample(f"deepspeed/{folder}", "", "expected.npz", tar="deepspeed"),
            )
            for name, folder, about in (
                ("moe", "moe0-fp32", "experts on 4 ranks, without ZeRO"),
                ("moe-zero2", "moe2-fp32", "experts on 4 ranks, ZeRO-2"),
                ("moe-shared", "moeshared2-fp32", "experts that two of 4 ranks share, ZeRO-2"),
            )
        ),
        Source(
            "universal", "deepspeed", "deepspeed 0.19.8, `ds_to_universal.py` of a pipeline", joined
        ),
        Source("zero1", "deepspeed", f"{deepspeed}, ZeRO-1 on 2 ranks", by_deepspeed(2, 1)),
        Source(
            "zero2",
            "deepspeed",
            f"{deepspeed}, ZeRO-2 on 3 ranks, round robin",
            by_deepspeed(3, 2, round_robin_gradients=True),
        ),
        Source(
            "zero3-bf16",
            "deepspeed",
            f"{deepspeed}, ZeRO-3 on 3 ranks, bf16",
            by_deepspeed(3, 3, half=True),
        ),
        *(
            Source(
                f"hf-{name.replace('_', '-')}",
                "hf",
                f"transformers {MADE_HERE['transformers']}, {about}",
                by_transformers(name),
                # Names of a job are those of the live model, which the libraries' files have not.
                ("--to", f"hf.{name}") if name in ("mixtral", "qwen3_moe") else (),
            )
            for name, about in (
                ("llama", "Llama, float32"),
                ("llama-tied", "Llama, bf16, tied"),
                ("mixtral", "Mixtral"),
                ("gpt2", "GPT-2"),
                ("qwen3_moe", "Qwen3-MoE"),
            )
        ),
    ]


# -- targets ---------------------------------------------------------------------------------------


def read_root(folder: Path) -> Content:
    """Read a root of ckptd, every block compared with its digest, under a Checkpointer's names."""
    from ckptd.checkpoint.load.reader import CkptdReader
    from ckptd.checkpoint.root.index import Index
    from ckptd.store import open_store

    index = Index(open_store(str(folder)))
    index.open()
    latest = index.latest()
    if latest is None:
        raise Wrong("no checkpoint was committed")
    reader = CkptdReader(index, latest)
    found = reader.tensors(reader.names)
    named = {a: found[n] for n in reader.names for a in (n, *reader.info(n).aliases)}
    named = {n: v.view(np.uint16) if v.dtype.name == "bfloat16" else v for n, v in named.items()}
    return split(named, "model.", "optim.")


def read_hf(folder: Path) -> Content:
    """Read a folder by safetensors."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return Content(bits(found))


def read_dcp(folder: Path, weight: str = "model.", state: str = "optim.state.") -> Content:
    """Load every tensor by torch's dcp.load."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    values = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(values, checkpoint_id=str(folder), no_dist=True)
    return split(bits(values), weight, state)


def read_torch_dist(folder: Path) -> Content:
    """Load every tensor by torch's dcp.load: names of states have the state before the weight."""
    found, begins = read_dcp(folder, "", "no state begins so").weights, "optimizer.state."
    weights = {name: values for name, values in found.items() if not name.startswith(begins)}
    states = {}
    for name in found.keys() - weights:
        state, _, of = name.removeprefix(begins).partition(".")
        states[of, _MASTER.get(state, state)] = found[name]
    return Content(weights, states)


def read_ranks(folder: Path) -> Content:
    """Load the files of two ranks by torch, and join the rows, as torch cuts them."""
    import torch

    files = [torch.load(folder / f"rank_{r}.pt", weights_only=True) for r in range(2)]
    parts = [dict(_leaves(file)) for file in files]
    whole = {}
    for name in parts[0]:
        rows = [part[name] for part in parts if name in part]
        joined = rows[0] if not rows[0].dim() else torch.cat(rows)
        cut = [joined] * 2 if not joined.dim() else list(joined.chunk(2))
        if any(not torch.equal(a, b) for a, b in zip(cut, rows, strict=len(cut) == len(rows))):
            raise Wrong(f"{name} is not cut as torch cuts it")
        whole[name] = joined
    return split(bits(whole), "model.", "optim.")


def read_universal(folder: Path) -> Content:
    """Load DeepSpeed's files by torch: one a state, and one with what is not trained."""
    import torch

    [tagged] = [*folder.glob("*_universal/zero"), *folder.glob("zero")]
    kept = torch.load(tagged.parent / "mp_rank_00_model_states.pt", weights_only=False)
    weights, states = bits(kept["module"] or {}), {}
    for path in tagged.glob("*/*.pt"):
        if path.stem == "step":
            continue
        [(_, values)] = bits({"": torch.load(path, weights_only=False)["param"]}).items()
        if path.stem == "fp32":
            weights[path.parent.name] = values
        else:
            states[path.parent.name, path.stem] = values
    return Content(weights, states)


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, dict):
            yield from _leaves(one, f"{path}{key}.")
        else:
            yield f"{path}{key}", one


def _renamed(recipe: str, *more: str, out: str = OUT) -> Callable[[Source], tuple[Command, ...]]:
    """Return a reshard by a recipe, which stands beside a source's own layouts."""

    def commands(source: Source) -> tuple[Command, ...]:
        to = ("-e", f"use {recipe}") if source.layouts else ("--to", recipe)
        return (("ckptd", "reshard", SOURCE, out, *source.layouts, *to, *more),)

    return commands


def _hf(source: Source) -> tuple[Command, ...]:
    if source.layouts:
        return (("ckptd", "reshard", SOURCE, OUT, *source.layouts, "--format", "hf"),)
    return (("ckptd", "export", SOURCE, OUT),)


def _ranks(source: Source) -> tuple[Command, ...]:
    rules = "mesh fsdp = dp:2", 'files "rank_{dp}.pt"', "use names.ckptd"
    said = ("--to", "fsdp", *(w for rule in rules for w in ("-e", rule)), "--format", "ranks")
    if not source.layouts:
        return (("ckptd", "reshard", SOURCE, OUT, *said),)
    return (*_renamed("names.ckptd", out=ROOT)(source), ("ckptd", "reshard", ROOT, OUT, *said))


def _in_bf16(source: Source) -> tuple[Command, ...]:
    export = ("ckptd", "export", SOURCE, OUT, "--dtype", "bfloat16")
    if not source.layouts:
        return (export,)
    return (*_renamed("names.ckptd", out=ROOT)(source), (*export[:2], ROOT, *export[3:]))


def narrowed(values: Array) -> Array:
    """Return the bits that torch's own cast to bfloat16 gives."""
    import torch

    if values.dtype != np.float32:
        return values
    narrow: Array = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    return narrow


def targets() -> list[Target]:
    """Return all targets, in the order of the page."""
    return [
        Target(
            "root",
            "a root of ckptd, under a `Checkpointer`'s names",
            _renamed("names.ckptd"),
            read_root,
        ),
        Target(
            "hf", "Hugging Face safetensors, read by safetensors", _hf, read_hf, has_states=False
        ),
        Target(
            "hf in bf16",
            "the same, narrowed to bfloat16, as torch narrows",
            _in_bf16,
            read_hf,
            has_states=False,
            lossy=narrowed,
        ),
        Target(
            "dcp",
            "a folder of `torch.distributed.checkpoint`, loaded by `dcp.load`",
            _renamed("names.dcp", "--format", "dcp"),
            read_dcp,
        ),
        Target(
            "universal",
            "DeepSpeed's universal folder, its files loaded by `torch.load`",
            _renamed("names.plain", "--format", "universal"),
            read_universal,
            left_out=("step", "master"),
        ),
        Target(
            "torch_dist",
            "Megatron-core's torch_dist under the source's own names, loaded by `dcp.load`",
            _renamed("names.megatron", "--format", "torch_dist"),
            read_torch_dist,
        ),
        Target(
            "ranks",
            "a file of `torch.save` for each of two ranks of FSDP, loaded by `torch.load`;"
            " counters of steps are left out",
            _ranks,
            read_ranks,
            left_out=("step",),
        ),
    ]


# -- running ---------------------------------------------------------------------------------------


def compare(found: Content, wanted: Content, target: Target) -> str:
    """Compare each element; return how many were. Raises `Wrong`."""
    tensors = elements = 0
    pairs: list[tuple[str, Array, Array | None]] = [
        (name, values, found.weights.get(name)) for name, values in wanted.weights.items()
    ]
    if target.has_states:
        for (name, state), values in wanted.states.items():
            if state not in target.left_out:
                pairs.append((f"{name}: {state}", values, found.states.get((name, state))))
    for name, values, there in pairs:
        right = values if target.lossy is None else target.lossy(values)
        if there is None or there.shape != right.shape or there.tobytes() != right.tobytes():
            raise Wrong(f"{name} is {'missing' if there is None else 'another'}")
        tensors += 1
        elements += values.size
    return f"{tensors} tensors, {elements:,} elements"


def convert(source: Source, path: Path, wanted: Content, target: Target, out: Path) -> Outcome:
    """Run one conversion as a user does, and compare what came of it."""
    commands, shown = target.commands(source), shown_command(source, target)
    places = {SOURCE: str(path), OUT: str(out), ROOT: str(out.with_suffix(".root"))}
    for _, *words in commands:
        for name, place in places.items():
            words = [place + w.removeprefix(name) if w.startswith(name) else w for w in words]
        error = run_command(words)
        if error and error["class"] == "CorruptError" and wanted.weights:
            raise Wrong(f"{shown}: {error}")
        if error:
            return Outcome("refused", shown, f"`{error['kind']}`: {error['message']}")
    counted = compare(target.read(out), wanted, target)
    return Outcome("exact" if target.lossy is None else "lossy", shown, counted)


def shown_command(source: Source, target: Target) -> str:
    """Return the commands of a conversion as the page has them."""
    words = map(shlex.join, target.commands(source))
    return " && ".join(words).replace(SOURCE, f"./{source.name}")


def run_command(words: Sequence[str]) -> dict[str, Any]:
    """Run ``ckptd`` with some arguments in this process; return its error, or {}."""
    from ckptd.cli.main import run

    failed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(failed):
        code = run([*words, "--json"])
    found: dict[str, Any] = json.loads(failed.getvalue().strip())["error"] if code else {}
    return found


def outcomes(source: Source) -> Iterator[tuple[Target, Outcome]]:
    """Make a source and convert it to each target."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "made").mkdir()
        path, wanted = source.make(Path(folder) / "made")
        for number, target in enumerate(targets()):
            out = Path(folder) / f"out{number}"
            try:
                yield target, convert(source, path, wanted, target, out)
            except Wrong as error:
                raise Wrong(f"{source.name} to {target.name}: {error}") from None
            shutil.rmtree(out, ignore_errors=True)


def row(source: Source, found: Mapping[str, Outcome]) -> str:
    """Return the line of a source in the table of the page."""
    cells = " | ".join(found[target.name].result for target in targets())
    return f"| [{source.name}](#{source.name}) | `{source.reader}` | {cells} |"


def section(source: Source, found: Mapping[str, Outcome]) -> str:
    """Return what the page says of a source."""
    lines = [f"## {source.name}", "", f"{source.made}.", ""]
    lines += ["| target | | | command |", "|---|---|---|---|"]
    for target in targets():
        outcome = found[target.name]
        lines.append(
            f"| `{target.name}` | {outcome.result} | {outcome.said} | `{outcome.command}` |"
        )
    return "\n".join(lines) + "\n"


def page(rows: Mapping[str, str], sections: Mapping[str, str]) -> str:
    """Return the page of what came of the conversions, by names of sources."""
    lines = [
        "# What converts to what",
        "",
        "`scripts/interop` wrote this page: libraries wrote the sources, each command was run, and",
        "each element of what came of it, as the target's own library reads it, was compared with",
        "what the source's library said that it holds. Some sources are [samples][samples] of the",
        "repository, the others were written for this page; a test does all of it again.",
        "",
        "*exact*: every bit. *lossy*: values change as the command says, each as torch changes it.",
        "*refused*: nothing is written, and the error says why. Compared are weights, and states",
        "of the optimizer where both sides hold them. [Checkpoints of others](../guide/interop.md)",
        "says what is read and written, [Conversions](../guide/conversions.md) what is asked for.",
        "",
        "[samples]: ../../tests/readers/samples/README.md",
        "",
        "| target | |",
        "|---|---|",
        *(f"| `{t.name}` | {t.about} |" for t in targets()),
        "",
        f"| source | read by | {' | '.join(f'`{t.name}`' for t in targets())} |",
        f"|---|---|{'---|' * len(targets())}",
    ]
    lines += [rows[source.name] for source in sources()]
    return "\n".join([*lines, "", *(sections[source.name] for source in sources())])


def main(names: Sequence[str]) -> None:
    """Write the page; with names of sources, only what it says of those."""
    old = PAGE.read_text() if names else ""
    rows = {line.split("]")[0][3:]: line for line in old.splitlines() if line.startswith("| [")}
    sections = {part.split("\n")[0]: f"## {part.strip()}\n" for part in old.split("\n## ")[1:]}
    for source in sources():
        if not names or source.name in names:
            found = {target.name: outcome for target, outcome in outcomes(source)}
            rows[source.name], sections[source.name] = row(source, found), section(source, found)
    PAGE.write_text(page(rows, sections))


if __name__ == "__main__":
    main(sys.argv[1:])
