"""Replicas that drift: sampled digests of what ranks hold in common; windows and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

import msgspec
import numpy as np
import torch
import xxhash

from ckptd.base.digest import digest_hex
from ckptd.base.grids.grid import is_packed
from ckptd.base.torch.device import kind_of
from ckptd.base.torch.tensors import as_bytes, flat_memory, is_dtensor, local_tensor
from ckptd.checkpoint.save.messages import Blob
from ckptd.checkpoint.save.structure import ReplicaHolders, Shared
from ckptd.checkpoint.torch.state.leaves import ObjectLeaf, TensorLeaf

WHOLE_BYTES = 4096
WINDOWS = 32
WINDOW_BYTES = 64


def sample_digest(tensor: torch.Tensor) -> str:
    """XXH3-64 of a small tensor's bytes, of 32 windows of 64 bytes spread over a large one.

    The windows are those of the tensor's values in row-major order, whatever its strides and
    wherever it is.
    """
    local = local_tensor(tensor).detach()
    if local.device.type != "cpu" or not local.is_contiguous() or local.is_conj() or local.is_neg():
        return digest_of_sample(sampled_bytes(local).cpu().numpy())
    raw = as_bytes(local)
    ranges = sampled_ranges(raw.nbytes)
    if ranges is None:
        return xxhash.xxh3_64_hexdigest(raw.data)
    state = xxhash.xxh3_64()
    for start in ranges[0]:
        state.update(raw[start : start + ranges[1]].data)
    return state.hexdigest()


def sampled_bytes(local: torch.Tensor) -> torch.Tensor:
    """Return the bytes that `sample_digest` digests, flat on the tensor's device.

    A large strided view is not copied for the few bytes: there may be no memory for that.
    """
    local = local.detach()
    size = local.element_size()
    sampled = sampled_ranges(local.numel() * size) is not None
    if not sampled or local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg().contiguous()
    if not sampled:
        return local.reshape(-1).view(torch.uint8)
    # Bytes, because not every type can be indexed.
    raw = flat_memory(local).view(torch.uint8)
    kind = kind_of(local.device)
    stream = kind.current_stream(local.device) if kind.has_streams else None
    return raw[_positions(tuple(local.shape), local.stride(), size, local.device, stream)]


@lru_cache(maxsize=1024)
def _positions(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    size: int,
    device: torch.device,
    stream: torch.Stream | None,
) -> torch.Tensor:
    """Return where the sampled bytes of a strided tensor lie behind its first one.

    They are worked out on the device: to bring them there would wait for it. Each stream has its
    own, since nothing orders two streams.
    """
    if is_packed(shape, strides):
        shape, strides = (math.prod(shape),), (1,)
    last = math.prod(shape) * size - WINDOW_BYTES
    starts = torch.arange(WINDOWS, device=device).mul_(last).floor_divide_(WINDOWS - 1)
    wanted = (starts[:, None] + torch.arange(WINDOW_BYTES, device=device)).reshape(-1)
    if len(shape) == 1:
        return wanted if strides[0] == 1 else wanted // size * (strides[0] * size) + wanted % size
    index, at = wanted // size, wanted % size
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        at += index % n * (stride * size)
        index = index // n
    return at


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
    """Sampled digests, each taken when it is first asked for: call it with a local tensor.

    Parameters
    ----------
    shards
        The leaves among those with meshes that will be asked for; None: those that several ranks
        of their own mesh hold.
    views
        Views of what other ranks hold too, by the id of the local tensor, where a layout says that;
        of other tensors whole ones are asked for.
    """

    def __init__(
        self,
        shards: Iterable[TensorLeaf] | None = None,
        views: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        # With the tensor itself, so that its id stays its own.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        self._shards = None if shards is None else {id(x.local) for x in shards}
        self._views = views or {}

    def views(self, local: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the tensors that will be asked for in place of one of a state."""
        return self._views.get(id(local), (local,))

    def wants(self, leaf: TensorLeaf) -> bool:
        """Return whether several ranks may hold the same values of it."""
        if self._shards is None or not is_dtensor(leaf.tensor):
            return is_common(leaf.tensor)
        return id(leaf.local) in self._shards

    def __call__(self, local: torch.Tensor) -> str:
        """Return the digest of a tensor as it was at the first call."""
        found = self._known.get(id(local))
        if found is None:
            found = self._known[id(local)] = local, sample_digest(local)
        return found[1]

    def put(self, local: torch.Tensor, digest: str) -> None:
        """Add a digest that was taken elsewhere."""
        self._known[id(local)] = local, digest


def shards_in_common(
    tensors: Mapping[str, TensorLeaf], holders: ReplicaHolders
) -> list[TensorLeaf]:
    """Return the leaves with meshes of which another rank holds the same part."""
    return [
        leaf
        for name, leaf in tensors.items()
        if is_dtensor(leaf.tensor) and not holders.tensor(name).alone
    ]


def replica_digests(
    tensors: Mapping[str, TensorLeaf],
    objects: Mapping[str, ObjectLeaf],
    holders: ReplicaHolders,
    known: Mapping[Shared, Mapping[str, str]] | None = None,
    sample: Samples | None = None,
) -> tuple[tuple[tuple[str, str], ...], tuple[Blob, ...]]:
    """Digest what this rank holds in common with others, one table for each set of holders.

    Parameters
    ----------
    holders
        Says that; what no other rank has is not digested.
    known
        Tables that a layout makes, by holders; they hold all plain tensors then, and
        `tensors` are left to those with meshes of their own.
    sample
        Digests that are taken already.

    Returns
    -------
    replicas
        ``(group, digest)`` pairs for the part: a few, however many names there are.
    blobs
        The tables behind the digests, by which the committer names what differs.
    """
    sample = sample or Samples()
    tables: dict[Shared, dict[str, str]] = {}
    for name, leaf in objects.items():
        # An optimizer's groups name the parameters of one stage: other stages have others.
        shared = holders.alike if leaf.kind == "groups" else holders.object(name)
        if not shared.alone:
            body = msgspec.json.encode(leaf.raw)
            tables.setdefault(shared, {})[name] = digest_hex(body)[:16]
    for name, held in tensors.items():
        if known is not None and not is_dtensor(held.tensor):
            continue
        shared = holders.tensor(name)
        if not shared.alone:
            tables.setdefault(shared, {})[name] = sample(held.local)
    replicas, blobs = [], []
    for shared, table in chain(tables.items(), (known or {}).items()):
        body = msgspec.json.encode(table, order="sorted")
        digest = digest_hex(body)
        replicas.append((shared.key, digest))
        blobs.append(Blob(digest, body, shared.first))
    return tuple(replicas), tuple(blobs)


def is_common(tensor: torch.Tensor) -> bool:
    """Return whether several ranks of its mesh may hold the same values of it."""
    if not is_dtensor(tensor):
        return True
    replicated = any(p.is_replicate() for p in tensor.placements)
    return replicated and tensor.device_mesh.size() > 1
