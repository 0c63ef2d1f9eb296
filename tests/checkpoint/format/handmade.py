"""A checkpoint on disk made by hand: spec sections 2 to 5 and nothing of the engine."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from ckptd.base.digest import BLOCK_BYTES, DigestIndex, digest, digest_hex
from ckptd.checkpoint.format.container import FileMap, build_header
from ckptd.checkpoint.format.manifest import encode_manifest
from ckptd.checkpoint.format.names import CommitName, commit_key, digests_key, generation_key
from ckptd.checkpoint.format.records import Commit, Generation, Parent, RootMarker, encode_record
from ckptd.types import DTYPES
from tests.checkpoint.format.strategies import Sample


def random_tensors(sample: Sample, seed: int = 0) -> list[np.ndarray]:
    """The logical tensors, as bytes with one more dimension; absent pieces are zero."""
    rng = np.random.default_rng(seed)
    out = []
    for number, t in enumerate(sample.manifest.tensors):
        high = 2 if t.dtype == "bool" else 256
        shape = (*t.shape, DTYPES[t.dtype].itemsize)
        tensor = rng.integers(0, high, math.prod(shape), dtype=np.uint8).reshape(shape)
        for piece in sample.model.absent.get(number, []):
            for at in sample.cuts[number].pieces[piece]:
                tensor[at] = 0
        out.append(tensor)
    return out


def write(root: Path, sample: Sample, tensors: list[np.ndarray]) -> Path:
    """Write the checkpoint and return the path of its commit record."""
    manifest, name = sample.manifest, CommitName(sample.manifest.step, sample.manifest.generation)
    (root / manifest.folder).mkdir(parents=True)
    files = [
        msgspec.structs.replace(entry, **_write_file(root / entry.path, number, sample, tensors))
        if entry.data_start
        else entry
        for number, entry in enumerate(manifest.files)
    ]
    manifest = msgspec.structs.replace(manifest, files=tuple(files))
    file_name, raw = encode_manifest(manifest)
    (root / manifest.folder / file_name).write_bytes(raw)
    commit = Commit(
        step=manifest.step,
        generation=manifest.generation,
        attempt=manifest.attempt,
        folder=manifest.folder,
        folders=(manifest.folder,),
        manifest=file_name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id="w",
        created="now",
        world_size=manifest.world_size,
        data_bytes=sum(f.data_bytes for f in files),
    )
    life = Generation(manifest.generation, "c", Parent(0, 1), "now", manifest.world_size)
    for key, record in {
        "ckptd.json": RootMarker("r", "now"),
        generation_key(manifest.generation): life,
        commit_key(name): commit,
    }.items():
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_bytes(encode_record(record))
    return root / commit_key(name)


def _write_file(
    path: Path, number: int, sample: Sample, tensors: list[np.ndarray]
) -> dict[str, object]:
    filemap = FileMap.of(sample.manifest, "manifest")
    header, _ = build_header(filemap.header_entries(number), {"format": "ckptd"})
    chunks = []
    for tensor, piece, _, _ in sample.model.chunks[number]:
        elements = sample.cuts[tensor].pieces[piece]
        chunks.append(b"".join(tensors[tensor][at].tobytes() for at in elements))
    data = b"".join(chunks)
    path.write_bytes(header + data)
    blocks = [digest(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]
    index = DigestIndex.build(len(data), blocks, [digest(c) for c in chunks]).encode()
    path.with_name(Path(digests_key(path.name)).name).write_bytes(index)
    return {"data_start": len(header), "data_bytes": len(data), "index": digest_hex(index)}
