"""`ElasticSampler`: micro-batches of this rank in a world that may change."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ckptd.checkpoint.data.schedule import Schedule
from ckptd.errors import CorruptError, UsageError

_log = logging.getLogger("ckptd")


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and how many there are, by torch; without a group 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class ElasticSampler:
    """Yields the micro-batches of this rank, for ever, from where the job is.

    Give it to a `torch.utils.data.DataLoader` as ``batch_sampler``: each item is the list of sample
    ids of one micro-batch, and a step takes ``len(indices)`` of them. A step consumes the
    same samples whatever the number of ranks, and across resumes each sample once an epoch.

    It does not count what a loader fetches ahead: call `advance` when a step's optimizer has
    stepped. Its position is one integer, equal on all ranks; put the sampler into the state that is
    saved. After a load, or in a new world, make a new iterator.

    Parameters
    ----------
    schedule
        What a step is made of.
    rank, world
        Which rank of how many; the default process group's, or 0 of 1, if left out. Of
        tensor-parallel ranks, which share their samples, give data-parallel rank and size.

    Attributes
    ----------
    consumed
        Samples that all steps so far took, on all ranks together.

    Raises
    ------
    UsageError
        There is no such rank, or not a micro-batch for each rank.
    """

    def __init__(
        self, schedule: Schedule, *, rank: int | None = None, world: int | None = None
    ) -> None:
        here = rank_and_world()
        self.schedule = schedule
        self.rank = here[0] if rank is None else rank
        self.world = here[1] if world is None else world
        self.consumed = 0
        self._share = schedule.mine(self.rank, self.world)
        self._assigned: tuple[int, Sequence[int]] | None = None

    @property
    def indices(self) -> Sequence[int]:
        """Which micro-batches of the next step this rank computes, numbered over all ranks."""
        return self._indices(self.consumed)

    def assign(self, indices: Sequence[int]) -> None:
        """Assign other micro-batches of the next step to this rank than its share.

        `KeptGradients.resume` calls it. Iterators that were made before do not see it.

        Raises
        ------
        UsageError
            A step has no such micro-batch.
        """
        if not all(0 <= index < self.schedule.microbatches for index in indices):
            raise UsageError(
                "micro-batch out of range",
                wanted=f"numbers from 0 to {self.schedule.microbatches - 1}",
                found=str(list(indices)),
            )
        self._assigned = self.consumed, tuple(indices)

    def _indices(self, consumed: int) -> Sequence[int]:
        assigned = self._assigned
        return assigned[1] if assigned is not None and assigned[0] == consumed else self._share

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from `consumed` on; it never ends."""
        consumed = self.consumed
        while True:
            for ids in self.schedule.samples_of(consumed, self._indices(consumed)):
                yield ids.tolist()
            consumed += self.schedule.batch

    def advance(self) -> None:
        """Count a step as done, on every rank."""
        self.consumed += self.schedule.batch

    @property
    def step(self) -> int:
        """Steps done."""
        return self.consumed // self.schedule.batch

    @property
    def epoch(self) -> int:
        """Times that the whole data set was consumed."""
        return self.consumed // self.schedule.size

    def state_dict(self) -> dict[str, Any]:
        """Return the position, ``{"consumed": N}``, and the schedule that it is one of."""
        return {"consumed": self.consumed, "schedule": self._of}

    @property
    def _of(self) -> dict[str, Any]:
        schedule = self.schedule
        sizes = {"size": schedule.size, "batch": schedule.batch}
        return sizes | {"seed": schedule.seed, "shuffle": schedule.shuffle}

    def load_state_dict(self, state: Any) -> None:
        """Go to a position; iterators made before go on where they were.

        The log of rank 0 says where it is a position in another schedule.

        Raises
        ------
        CorruptError
            `state` was not made by `state_dict`.
        """
        consumed = state.get("consumed") if isinstance(state, dict) else None
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise CorruptError(
                "the saved position in the data cannot be read",
                wanted='{"consumed": N}, N at least 0',
                found=repr(state)[:200],
            )
        schedule = state.get("schedule")
        if isinstance(schedule, dict) and self.rank == 0:
            found = [
                f"{name} was {str(schedule[name])[:40]} and is {now}"
                for name, now in self._of.items()
                if name in schedule and schedule[name] != now
            ]
            if found:
                _log.warning(
                    "the saved position belongs to another schedule: %s. The resume is not exact: "
                    "it continues after %d samples of the present schedule "
                    "(docs/guide/exact-resume.md)",
                    "; ".join(found),
                    consumed,
                )
        self.consumed = consumed
