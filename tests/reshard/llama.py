"""A small Llama as a checkpoint of Hugging Face names, with optimizer state and objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import Axis, Grid
from ckptd.checkpoint.format.manifest import ObjectEntry, encode_manifest
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardJob, ReshardShare
from ckptd.reshard.layouts import LayoutProgram, read_program
from ckptd.reshard.prepare import Prepared, prepare, source_program
from ckptd.reshard.reports import Resharded
from ckptd.reshard.source import open_own
from ckptd.store import open_store
from ckptd.store.base import Store
from tests.checkpoint.load.builder import Array, Saved, build

LAYERS, VOCABULARY, WIDTH, KV, REP, HEAD, HIDDEN = 4, 250, 16, 4, 2, 8, 24
SIZES = (f"let kv = {KV}", f"let v = {VOCABULARY}")
MEGATRON = ("megatron.gpt", "mesh megatron_gpt = pp:2 dp:1 tp:2", *SIZES)
HF = ("hf.llama", *SIZES)
STATES = ("exp_avg", "exp_avg_sq")


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        out |= {
            p + "self_attn.q_proj.weight": (KV * REP * HEAD, WIDTH),
            p + "self_attn.k_proj.weight": (KV * HEAD, WIDTH),
            p + "self_attn.v_proj.weight": (KV * HEAD, WIDTH),
            p + "self_attn.o_proj.weight": (WIDTH, KV * REP * HEAD),
            p + "mlp.gate_proj.weight": (HIDDEN, WIDTH),
            p + "mlp.up_proj.weight": (HIDDEN, WIDTH),
            p + "mlp.down_proj.weight": (WIDTH, HIDDEN),
            p + "input_layernorm.weight": (WIDTH,),
            p + "post_attention_layernorm.weight": (WIDTH,),
        }
    return out | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def values(seed: int = 0, *, states: bool = True) -> dict[str, Array]:
    """Return parameters, and with `states` Adam's moments and steps."""
    rng = np.random.default_rng(seed)
    out: dict[str, Array] = {}
    for name, shape in shapes().items():
        out[name] = rng.standard_normal(shape).astype(np.float32)
        if states:
            for state in STATES:
                out[f"optim.{name}.{state}"] = rng.standard_normal(shape).astype(np.float32)
            out[f"optim.{name}.step"] = np.array(7, dtype=np.float32)
    return out


def groups() -> list[dict[str, Any]]:
    decayed = [n for n in shapes() if "norm" not in n]
    plain = [n for n in shapes() if "norm" in n]
    return [{"params": sorted(decayed), "lr": 0.1}, {"params": sorted(plain), "lr": 0.2}]


def per_rank(name: str, found: Sequence[Any], on_change: str) -> tuple[ObjectEntry, Saved]:
    """Return a per-rank object, and the tensor that holds its values."""
    raw = [msgspec.json.encode(v) for v in found]
    data = np.frombuffer(b"".join(raw), dtype=np.uint8)
    grid = Grid((Axis.from_sizes([len(r) for r in raw]),))
    return ObjectEntry(name, tensor=name, per_rank=on_change), Saved(data, grid, range(len(raw)))


def save(
    store: Store,
    data: dict[str, Array],
    *,
    step: int = 5,
    parts: int = 4,
    objects: Sequence[ObjectEntry] = (),
    extra: dict[str, Saved] | None = None,
    lay: str = "",
) -> None:
    """Save values, matrices cut by rows over `parts` ranks."""

    def cut(v: Array) -> Saved:
        return Saved.rows(v, parts) if v.ndim == 2 else Saved.whole(v, 1)

    tensors = {n: cut(v) for n, v in data.items()} | (extra or {})
    built = build(store, tensors, step=step, objects=objects, publish=False)
    manifest = msgspec.structs.replace(built.manifest, metadata={"loss": 2.5}, lay=lay)
    if extra:
        # The witness leaves out what holds encoded objects, which the builder does not know.
        manifest = msgspec.structs.replace(manifest, witness=None)
    name, raw = encode_manifest(manifest)
    store.put(built.commit.folder + name, raw)
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    catalogue.claim(None, parts, "start")
    catalogue.publish(
        msgspec.structs.replace(
            built.commit,
            manifest=name,
            manifest_digest=digest_hex(raw),
            manifest_bytes=len(raw),
            metadata=manifest.metadata,
        )
    )


def program(name: str, *rules: str) -> LayoutProgram:
    return read_program(name, "--to", lambda run: run.target).with_rules(rules)


def latest(store: Store) -> CkptdReader:
    catalogue = Catalogue(store)
    name = catalogue.latest()
    assert name is not None
    return CkptdReader(catalogue, name)


def everything(folder: Path) -> dict[str, Array]:
    """Return all tensors of the newest checkpoint of a root."""
    with open_store(folder) as store:
        reader = latest(store)
        return reader.tensors(reader.names)


def prepared(
    store: Store, to: LayoutProgram, given: LayoutProgram | None = None, **options: Any
) -> Prepared:
    reader = latest(store)
    stock = open_own(reader)
    return prepare(stock, source_program(stock, given), to, **options)


def job_into(out: Store, found: Prepared) -> ReshardJob:
    """Return what writes a target into a root."""
    return ReshardJob(
        found.stock.source,
        found.assembled.target,
        Catalogue(out),
        step=found.stock.step,
        identity=found.identity,
        bulk=out,
        expected=found.expected,
    )


def resharded(
    source: Path,
    target: Path,
    to: LayoutProgram,
    given: LayoutProgram | None = None,
    share: ReshardShare | None = None,
    **options: Any,
) -> Resharded:
    """Reshard the newest checkpoint of one root into another."""
    with open_store(source) as store, open_store(target) as out:
        found = prepared(store, to, given, **options)
        return job_into(out, found).run(share or ReshardShare(), Budget.of(64 << 20, store))
