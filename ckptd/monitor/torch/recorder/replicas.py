"""Samples of a trainer: checksums of replicas (`check_replicas`), gradient norms."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ckptd.base.torch.commhook import Reduced, comm_hook, mean
from ckptd.base.torch.tensors import is_dtensor
from ckptd.checkpoint.torch.state.modules import has_statistics
from ckptd.errors import StoreError, UsageError
from ckptd.monitor.rules.corruption import CHUNK, checksum
from ckptd.monitor.samples import SampleKind
from ckptd.monitor.torch.recorder.finite import fetched
from ckptd.monitor.torch.recorder.recorder import Recorder, recorder

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOST_PENDING = 64

Named = Mapping[str, torch.Tensor]


class _Samples:
    """The samples of this process; made with the first one, for one recorder."""

    def __init__(self, of: Recorder) -> None:
        self.of = of
        self.writer = of.samples()
        self.calls: dict[str, int] = {}

    def step(self, name: str) -> int:
        """Return the step being made; where steps are not marked, the number of such calls."""
        self.calls[name] = number = self.calls.get(name, 0) + 1
        marked = self.of.ring.current_step
        return number if marked < 0 else marked


_current: _Samples | None = None


def _samples() -> _Samples | None:
    """Return where samples go; None where nothing is recorded."""
    global _current
    now = recorder()
    if now is None or not now.on:
        return None
    if _current is None or _current.of is not now:
        try:
            _current = _Samples(now)
        except StoreError as error:
            now.aside(error)
            return None
    return _current


# --- replicas -----------------------------------------------------------------------------------


def check_replicas(
    what: nn.Module | Named,
    *,
    every: int = 100,
    group: Any = None,
    budget: int = 64 << 20,
) -> None:
    """Take a checksum of what other ranks hold as well, for the monitor to compare.

    Call it on every rank in each step, after the optimizer. Nothing is sent between ranks here and
    nothing is waited for, except that bytes of a device are copied to the host.

    Parameters
    ----------
    what
        A module, or tensors by name. DTensors are compared among the ranks that hold the same
        shard; what no other rank holds is left out. All else counts as equal on all ranks of
        `group`: parameters of DDP are, and buffers as well if they are broadcast, but for the
        statistics of norm layers, which are each rank's own until the next forward.
    every
        Steps between checks. Steps as marked for the recorder, else calls.
    group
        Ranks that hold the tensors that are no DTensors; the default group when None.
    budget
        Bytes that one check looks at, at most (but one chunk of 1 MiB at least). Where there are
        more, each check takes another part of them.

    Raises
    ------
    UsageError
        `every` or `budget` is not positive. Whatever else goes wrong makes the recorder step aside.
    """
    if every < 1 or budget < 1:
        raise UsageError(
            "invalid every= or budget=",
            wanted="every and budget of at least 1",
            found=f"every={every}, budget={budget}",
        )
    samples = _samples()
    if samples is None:
        return
    step = samples.step("replicas")
    if step % every:
        return
    try:
        for ranks, held in _by_holders(dict(_tensors(what)), group).items():
            parts = list(_part(held, step // every, budget))
            value = checksum(((n, _bytes(held[t], a)) for n, t, a in parts), salt=step)
            samples.writer.add(SampleKind.SUM, _set("sum", ranks), len(ranks), step, value)
    except Exception as error:  # noqa: BLE001 - the watched program must not notice
        samples.of.aside(error)


def _tensors(what: nn.Module | Named) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(what, nn.Module):
        yield from what.items()
        return
    yield from what.named_parameters()
    if not isinstance(what, nn.parallel.DistributedDataParallel) or what.broadcast_buffers:
        statistics = {
            id(b) for m in what.modules() if has_statistics(m) for b in m.buffers(recurse=False)
        }
        yield from ((n, b) for n, b in what.named_buffers() if id(b) not in statistics)


def _by_holders(tensors: Named, group: Any) -> dict[tuple[int, ...], dict[str, torch.Tensor]]:
    """Return local tensors by the ranks that hold the same; without those that one rank holds."""
    out: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    everybody = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    for name, tensor in tensors.items():
        ranks, local = everybody, tensor.detach()
        if is_dtensor(tensor):
            ranks, local = _holders(tensor), tensor.to_local().detach()
        dense = local.layout == torch.strided and not local.is_meta
        if len(ranks) > 1 and dense and local.numel():
            out.setdefault(ranks, {})[name] = local
    return out


def _holders(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold the same shard as this one."""
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if where is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, where, strict=True)
    )
    ranks: list[int] = mesh.mesh[index].reshape(-1).tolist()
    return tuple(sorted(ranks))


def _part(held: Named, turn: int, budget: int) -> Iterator[tuple[str, str, int]]:
    """Yield name of the chunk, of its tensor, and where it begins, for the turn's share."""
    chunks = [
        (f"{name}@{at}", name, at)
        for name in sorted(held)
        for at in range(0, held[name].nbytes, CHUNK)
    ]
    parts = -(-sum(t.nbytes for t in held.values()) // budget)
    yield from chunks[turn % parts :: parts]


def _bytes(tensor: torch.Tensor, at: int) -> Any:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)[at : at + CHUNK]
    return flat.cpu().numpy()


def _set(what: str, ranks: tuple[int, ...]) -> int:
    text = f"{what} {','.join(map(str, ranks))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


# --- norms of gradients -------------------------------------------------------------------------


@dataclass
class _Norms:
    """State of the hook: norms of the buckets so far, and norms that are still on a device."""

    inner: Any
    state: Any
    ranks: tuple[int, ...]
    every: int
    buckets: list[torch.Tensor] = field(default_factory=list)
    pending: deque[tuple[int, torch.Tensor, Any]] = field(default_factory=deque)


def watch_gradients(
    model: nn.parallel.DistributedDataParallel,
    hook: Any = None,
    state: Any = None,
    *,
    every: int = 1,
) -> None:
    """Take the norm of this rank's gradients before they are reduced, for the monitor to compare.

    Registers a communication hook of `model`; a rank whose gradients are out of line with those of
    the others, step after step, is suspected of computing wrong.

    Parameters
    ----------
    hook, state
        What the model is to reduce its gradients with; the mean, as without any hook, when None.
    every
        Steps between samples.

    Raises
    ------
    RuntimeError
        The model has a communication hook already: give it as `hook` instead.
    """
    ranks = tuple(dist.get_process_group_ranks(model.process_group))
    inner = hook or mean
    model.register_comm_hook(
        _Norms(inner, model.process_group if hook is None else state, ranks, every), _norms
    )


@comm_hook
def _norms(of: _Norms, bucket: dist.GradBucket) -> Reduced:
    samples = _samples()
    if samples is not None:
        try:
            _take(of, bucket, samples)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            samples.of.aside(error)
    result: Reduced = of.inner(of.state, bucket)
    return result


def _take(of: _Norms, bucket: dist.GradBucket, samples: _Samples) -> None:
    buffer = bucket.buffer().detach()
    of.buckets.append(
        torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
    )
    if bucket.is_last():
        _finish(of, samples)


def _finish(of: _Norms, samples: _Samples) -> None:
    """Remember the norm of a step; write down those that are known without waiting."""
    buckets, of.buckets = of.buckets, []
    step = samples.step("norms")
    if step % of.every == 0:
        norm = torch.linalg.vector_norm(torch.stack(buckets))
        of.pending.append((step, *fetched(norm)))
    while of.pending and (of.pending[0][2] is None or of.pending[0][2].query()):
        then, norm, _ = of.pending.popleft()
        samples.writer.norm(_set("norm", of.ranks), len(of.ranks), then, float(norm))
    while len(of.pending) > _MOST_PENDING:
        of.pending.popleft()
