"""Roots for tests of the command line: small real checkpoints, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.manifest import MeshEntry, ObjectEntry, encode_manifest
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import open_store
from ckptd.store.base import Store
from tests.checkpoint.load.builder import Array, Built, Saved, build

LAYERS = 3
TIED = {"model.embed.weight": ("model.head.weight",)}
OBJECTS = (
    ObjectEntry("step", 7),
    ObjectEntry(
        "optim.groups",
        [{"params": ["a", "b"], "lr": 0.001}],
        kind="groups",
    ),
    ObjectEntry("scheduler", {"last": 3, "betas": {"$": "tuple", "v": [0.9, 0.95]}}),
)
MESHES = (MeshEntry(("dp", "tp"), (2, 2), ((0, 1, 4),)),)


def values(seed: int) -> dict[str, Array]:
    """Return the tensors of a tiny model and part of its optimizer; they differ by seed."""
    rng = np.random.default_rng(seed)

    def f32(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    out: dict[str, Array] = {"model.embed.weight": f32(20, 6)}
    for layer in range(LAYERS):
        out[f"model.layers.{layer}.mlp.weight"] = f32(8, 6)
        out[f"model.layers.{layer}.norm.bias"] = f32(6).astype(ml_dtypes.bfloat16)
    out["model.scale"] = f32()
    out["model.empty"] = f32(0, 4)
    out["optim.layers.0.mlp.weight.exp_avg"] = f32(8, 6)
    return out


def cut(tensors: Mapping[str, Array], parts: int = 4) -> dict[str, Saved]:
    """Cut matrices by rows over `parts` files; leave the rest whole."""
    return {
        name: Saved.rows(v, parts) if v.ndim == 2 and v.shape[0] >= parts else Saved.whole(v, 1)
        for name, v in tensors.items()
    }


def by_columns(array: Array, parts: int = 2) -> Saved:
    """Cut a matrix by columns."""
    size = array.shape[1] // parts
    grid = Grid((Axis(((array.shape[0], 1),)), Axis(((size, parts),))))
    return Saved(array, grid, list(range(parts)))


def absent_rows(array: Array, parts: int = 2) -> Saved:
    """Cut a matrix by rows; the last part lies in no file."""
    saved = Saved.rows(array, parts)
    return Saved(array, saved.grid, [*saved.owners[:-1], ABSENT])


def put(
    store: Store,
    tensors: Mapping[str, Saved],
    step: int,
    *,
    generation: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    objects: Sequence[ObjectEntry] = OBJECTS,
    tied: Mapping[str, tuple[str, ...]] | None = None,
    created: str | None = None,
) -> Built:
    """Publish a checkpoint of the newest generation, or of `generation`."""
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    if not catalogue.newest_generation():
        catalogue.claim(None, 4, "start")
    generation = generation or catalogue.newest_generation()
    built = build(store, tensors, step=step, generation=generation, objects=objects, publish=False)
    aliases = TIED if tied is None else tied
    manifest = msgspec.structs.replace(
        built.manifest,
        tensors=tuple(
            msgspec.structs.replace(t, aliases=aliases.get(t.name, ()))
            for t in built.manifest.tensors
        ),
        metadata=dict(metadata or {}),
        meshes=MESHES if built.manifest.world_size >= 4 else (),
    )
    name, raw = encode_manifest(manifest)
    store.put(built.commit.folder + name, raw)
    commit = msgspec.structs.replace(
        built.commit,
        manifest=name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        metadata=manifest.metadata,
        created=created or built.commit.created,
    )
    publish(store, commit)
    return Built(manifest, built.filemap, commit)


def publish(store: Store, commit: Commit) -> None:
    """Create a commit record."""
    Catalogue(store).publish(commit)


def make_root(
    folder: Path, steps: Sequence[int] = (10, 20), *, tensors: Mapping[str, Saved] | None = None
) -> str:
    """Make a root with checkpoints of one generation, and return its path."""
    with open_store(folder) as store:
        for step in steps:
            put(store, tensors or cut(values(step)), step, metadata={"loss": 1.0 / step})
    return str(folder)


def rank_file(root: str, step: int, rank: int, generation: int = 1, attempt: str = "a") -> Path:
    """Path of a data file."""
    folder = f"{CommitName(step, generation).stem}-{attempt}"
    return Path(root) / "data" / folder / f"r{rank:05d}.safetensors"


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file; a negative position counts from its end."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
