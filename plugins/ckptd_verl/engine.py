"""verl's `CheckpointEngine`: actors publish, each rank a share; each rollout rank pulls a share."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import ckptd
from ckptd.errors import CkptdError, DeadlineError, UsageError
from ckptd_verl.shares import (
    Published,
    WholeTensor,
    read_published,
    shares_layout,
    write_published,
)

__all__ = ["BACKEND", "CkptdCheckpointEngine"]

BACKEND = "ckptd"
_FILE = "verl-tensors.json"
_POLL_S = 0.2


@CheckpointEngineRegistry.register(BACKEND)
class CkptdCheckpointEngine(CheckpointEngine):
    """Weights from verl's actors to its rollouts, by `ckptd.Publisher` and `ckptd.Subscriber`.

    verl gives whole tensors to every actor rank, one at a time, and wants whole ones on every
    rollout rank, one at a time. In between a rank keeps its share alone: actors one in as many
    parts as there are actors, on the host; rollouts one in as many as a replica has ranks, which
    put each tensor together as verl asks for it.

    Parameters
    ----------
    bucket_size
        verl's; there are no buckets here.
    is_master
        verl's: False or True on actors; rollouts have none.
    at
        A folder that all actors and rollouts see, of this run alone.
    secret
        See `ckptd.Publisher`.
    rollout_dtype
        What floating-point tensors are cast to before they are published; None: as they are.
    pass_on
        See `ckptd.Subscriber`; of rollouts.
    wait_s
        Longest wait of one side for the other, in seconds.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        at: str,
        secret: str | None = None,
        rollout_dtype: str | None = None,
        pass_on: bool = False,
        wait_s: float = 600.0,
    ) -> None:
        self._is_actor = is_master is not None
        self._is_master = bool(is_master)
        self._at = Path(at)
        self._secret = secret
        self._cast = None if rollout_dtype is None else WholeTensor((), rollout_dtype).torch_dtype
        self._pass_on = pass_on
        self._wait_s = wait_s
        # Later than of any earlier actors, so that their last version is no answer.
        self._step = time.time_ns() // 1_000_000 if self._is_master else 0
        self._publisher: ckptd.Publisher | None = None
        self._subscriber: ckptd.Subscriber | None = None
        self._tensors: dict[str, WholeTensor] = {}
        self._place = ""
        self._shares: dict[str, torch.Tensor] = {}
        self._rank, self._world = 0, 1

    def prepare(self) -> dict[str, Any]:
        """Return which version comes next; the first actor knows."""
        return {"step": self._step + 1} if self._is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every rank the version that comes next."""
        step = next(m["step"] for m in metadata if m and "step" in m)
        return {"step": [step] * actor_wg_world_size}, {"step": [step] * rollout_world_size}

    def init_process_group(self, step: int) -> None:
        """Note which version is sent or received next."""
        self._step = step
        if dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def finalize(self) -> None:
        """Nothing: the publisher stays for rollouts that come late."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Keep this rank's share of each tensor, and publish all of them as one version."""
        found: dict[str, WholeTensor] = {}
        async for name, tensor in _each(weights):
            whole = tensor.detach()
            if self._cast is not None and whole.is_floating_point():
                whole = whole.to(self._cast)
            found[name] = WholeTensor.of(whole)
            if self._tensors.get(name) != found[name]:
                self._shares[name] = found[name].share(self._rank, self._world)
            self._shares[name].copy_(found[name].part_of(whole, self._rank, self._world))
        if found != self._tensors:
            self._begin(found)
        await asyncio.to_thread(self._publish)

    def _begin(self, found: dict[str, WholeTensor]) -> None:
        """Make a publisher for these tensors."""
        self._shares = {n: self._shares[n] for n in found}
        self._tensors = found
        if self._publisher is not None:
            self._publisher.close()
        # A place of its own: rollouts must not look for these tensors at an earlier publisher.
        place = str(self._step)
        self._publisher = ckptd.Publisher(
            shares_layout(found, self._world), str(self._at / place), self._secret
        )
        if self._is_master:
            earlier = read_published(self._at / _FILE)
            write_published(self._at / _FILE, Published(place, found))
            if earlier is not None:
                shutil.rmtree(self._at / earlier.place, ignore_errors=True)

    def _publish(self) -> None:
        publisher = self._publisher
        if publisher is None:
            raise UsageError("no weights to publish")
        done = publisher.publish(self._step, {"model": self._shares}, wait_s=self._wait_s)
        if done.skipped:
            raise DeadlineError(
                "the weights could not be published",
                kind="no-version",
                wanted=f"a free slot within {self._wait_s:.0f} s",
                found=done.skipped,
            )
        publisher.before_mutation()  # the shares are written again by the next call

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Pull the version that actors send now, whole; then yield tensor by tensor.

        Yields
        ------
        tuple
            Name and whole tensor, in the same order on every rank of a replica.

        Raises
        ------
        DeadlineError
            The actors' version is not there in time.
        """
        await asyncio.to_thread(self._pull)
        for name, whole in self._tensors.items():
            yield name, self._whole(whole, self._shares[name])

    def _pull(self) -> None:
        end = time.monotonic() + self._wait_s
        while not self._has_it():
            subscriber = self._subscribed(end)
            left = max(0.0, end - time.monotonic())
            if subscriber is None or subscriber.update(min(left, 5.0)) is None:
                time.sleep(_POLL_S)

    def _has_it(self) -> bool:
        held = None if self._subscriber is None else self._subscriber.version
        return held is not None and held.step == self._step

    def _subscribed(self, end: float) -> ckptd.Subscriber | None:
        """Return the subscriber for the tensors that actors have; None while they say nothing."""
        found = self._agreed(end)
        if found is None:
            return None
        if found.place != self._place:
            if self._subscriber is not None:
                self._subscriber.close()
            self._place, self._tensors = found.place, found.tensors
            self._shares = {n: t.share(self._rank, self._world) for n, t in self._tensors.items()}
            self._subscriber = ckptd.Subscriber(
                shares_layout(self._tensors, self._world),
                {"model": self._shares},
                str(self._at / self._place),
                self._secret,
                group=dist.group.WORLD if self._world > 1 else None,
                pass_on=self._pass_on,
            )
        return self._subscriber

    def _agreed(self, end: float) -> Published | None:
        """Return what the replica's first rank reads; all give up when it does, or none."""
        found: Published | CkptdError | None = None
        if self._rank == 0:
            try:
                found = self._read(end)
            except CkptdError as error:
                found = error
        if self._world > 1:
            box = [found]
            dist.broadcast_object_list(box, src=0)
            found = box[0]
        if isinstance(found, CkptdError):
            raise found
        return found

    def _read(self, end: float) -> Published | None:
        if time.monotonic() < end:
            return read_published(self._at / _FILE)
        held = self._subscriber
        raise DeadlineError(
            "the actors' weights did not arrive",
            kind="no-version",
            wanted=f"version {self._step} within {self._wait_s:.0f} s",
            found=str(held and (held.last_error or held.version)),
        )

    def _whole(self, tensor: WholeTensor, share: torch.Tensor) -> torch.Tensor:
        """Put a tensor together. Every rank of the replica calls it."""
        if self._world == 1:
            return share.reshape(tensor.shape)
        rows, rest = tensor.rows(self._world), tensor.cut_shape[1:]
        padded = torch.zeros((rows, *rest), dtype=share.dtype)
        padded[: share.shape[0]] = share
        parts = torch.empty((self._world * rows, *rest), dtype=share.dtype)
        # As bytes: gloo does not know every type.
        dist.all_gather_into_tensor(_raw(parts), _raw(padded))
        return parts[: tensor.cut_shape[0]].reshape(tensor.shape)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield what verl gives, which may be an iterator of either kind."""
    if inspect.isasyncgen(weights) or hasattr(weights, "__aiter__"):
        async for name, tensor in weights:
            yield name, tensor
    else:
        found: Iterator[tuple[str, torch.Tensor]] = iter(weights)
        for name, tensor in found:
            yield name, tensor
