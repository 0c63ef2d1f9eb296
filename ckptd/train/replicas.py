"""Sampled digests of what ranks hold in common: drifting replicas are found at the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate

from ckptd.engine.job import Blob
from ckptd.format.digest import digest_hex
from ckptd.train.dtypes import as_bytes, local_tensor
from ckptd.train.leaves import ObjectLeaf, TensorLeaf

__all__ = [
    "Samples",
    "digest_of_sample",
    "is_common",
    "replica_digests",
    "sample_digest",
    "sampled_ranges",
]

WHOLE_BYTES = 4096
WINDOWS = 32
WINDOW_BYTES = 64
# A mesh of 16,384 ranks is looked at once, not once a tensor; the mesh is kept so that its id
# stays its own.
_names: dict[tuple[int, tuple[Any, ...]], tuple[Any, str]] = {}


def sample_digest(tensor: torch.Tensor) -> str:
    """XXH3-64 of a small tensor's bytes, of 32 windows of 64 bytes spread over a large one."""
    local = local_tensor(tensor).detach()
    if local.numel() * local.element_size() > WHOLE_BYTES and not local.is_contiguous():
        local = local.reshape(-1)
    if local.device.type != "cpu" or not local.is_contiguous() or local.is_conj() or local.is_neg():
        local = local.to("cpu").contiguous().resolve_conj().resolve_neg()
    raw = as_bytes(local)
    ranges = sampled_ranges(raw.nbytes)
    if ranges is None:
        return xxhash.xxh3_64_hexdigest(raw.data)
    state = xxhash.xxh3_64()
    for start in ranges[0]:
        state.update(raw[start : start + ranges[1]].data)
    return state.hexdigest()


def sampled_ranges(nbytes: int) -> tuple[list[int], int] | None:
    """Return where the windows of `sample_digest` begin and how long each is; None means all."""
    if nbytes <= WHOLE_BYTES:
        return None
    starts = [(nbytes - WINDOW_BYTES) * i // (WINDOWS - 1) for i in range(WINDOWS)]
    return starts, WINDOW_BYTES


def digest_of_sample(raw: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    """Return the digest for bytes that were sampled elsewhere: all, or the windows in order."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(raw).data)


class Samples:
    """Sampled digests, each taken when it is first asked for: call it with a tensor."""

    def __init__(self) -> None:
        # With the tensor itself, so that its id stays its own.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def __call__(self, tensor: torch.Tensor) -> str:
        """Return the digest of a tensor as it was at the first call."""
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = tensor, sample_digest(tensor)
        return found[1]

    def put(self, tensor: torch.Tensor, digest: str) -> None:
        """Add a digest that was taken elsewhere."""
        self._known[id(tensor)] = tensor, digest


def replica_digests(
    tensors: Mapping[str, TensorLeaf],
    objects: Mapping[str, ObjectLeaf],
    structure: str,
    leader: bool,
    known: Mapping[str, Mapping[str, str]] | None = None,
    sample: Samples | None = None,
) -> tuple[tuple[tuple[str, str], ...], tuple[Blob, ...]]:
    """Digest what this rank holds in common with others.

    Parameters
    ----------
    structure
        Digest of the rank's structure: ranks with the same one compare with each other.
    leader
        Whether this is the first of those ranks.
    known
        Tables that a layout makes, by group; they hold all plain tensors then, and `tensors` are
        left to those with meshes of their own.
    sample
        Digests that are taken already.

    Returns
    -------
    replicas
        ``(group, digest)`` pairs for the part.
    blobs
        The tables behind the digests, by which the committer names what differs.
    """
    sample = sample or Samples()
    common = {
        name: digest_hex(msgspec.json.encode(leaf.raw))[:16] for name, leaf in objects.items()
    }
    sharded: dict[str, dict[str, str]] = {}
    for name, leaf in tensors.items():
        tensor = leaf.tensor
        if not isinstance(tensor, DTensor):
            if known is not None:
                continue
            common[name] = sample(tensor)
        elif is_common(tensor):
            group = _holders(tensor)
            sharded.setdefault(group, {})[name] = sample(tensor)
    tables: dict[str, Mapping[str, str]] = {f"all:{structure}": common, **(known or {})}
    tables |= {f"{group}:{structure}": table for group, table in sharded.items()}
    replicas, blobs = [], []
    for group, table in tables.items():
        body = msgspec.json.encode(table)
        digest = digest_hex(body)
        replicas.append((group, digest))
        blobs.append(Blob(digest, body, leader))
    return tuple(replicas), tuple(blobs)


def is_common(tensor: torch.Tensor) -> bool:
    """Return whether several ranks may hold the same values of it."""
    if not isinstance(tensor, DTensor):
        return True
    replicated = any(isinstance(p, Replicate) for p in tensor.placements)
    return replicated and tensor.device_mesh.size() > 1


def _holders(tensor: DTensor) -> str:
    """Name the set of ranks that hold the same shard: the coordinates on the sharding dimensions.

    Ranks that differ only on replicated dimensions give the same name. The mesh's ranks on those
    coordinates are part of it, because two slices of a larger mesh hold different things.
    """
    mesh = tensor.device_mesh
    known = (id(mesh), tensor.placements)
    if known in _names and _names[known][0] is mesh:
        return _names[known][1]
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    ranks = mesh.mesh
    fixed = []
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            fixed.append((axis, coordinate[axis]))
    for axis, where in reversed(fixed):
        ranks = ranks.select(axis, where)
    name = f"mesh:{digest_hex(repr((fixed, ranks.flatten().tolist())).encode())[:16]}"
    _names[known] = (mesh, name)
    return name
