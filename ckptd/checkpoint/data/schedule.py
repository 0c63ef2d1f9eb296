"""Which sample is in which micro-batch and on which rank, whatever their number.

A job has a fixed number of micro-batches of a fixed size in each step. How many ranks share them
changes nothing about what a step is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from ckptd.checkpoint.data.permutation import Permutation
from ckptd.errors import UsageError


def share(count: int, parts: int, part: int) -> range:
    """Return the run of ``range(count)`` that falls to `part` of `parts`.

    Runs are contiguous, in the order of the parts, and differ by one at most; the earlier ones are
    the longer ones.

    Raises
    ------
    UsageError
        There is no such part.
    """
    if not 0 <= part < parts or count < 0:
        raise UsageError(
            "part out of range",
            wanted="0 <= part < parts, 0 <= count",
            found=f"part {part} of {parts}, count {count}",
        )
    least, more = divmod(count, parts)
    begin = part * least + min(part, more)
    return range(begin, begin + least + (part < more))


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that each step consumes; constant for the life of a job.

    The position of a job in its data is one integer, the samples consumed so far. Sample number
    ``k`` of the job is element ``k % size`` of the permutation of epoch ``k // size``: nothing is
    dropped at the end of an epoch, and each epoch holds each sample once.

    Attributes
    ----------
    size
        Samples of the data set.
    microbatch
        Samples of a micro-batch.
    microbatches
        Micro-batches of a step, on all ranks together.
    seed
        Of the order of samples.
    shuffle
        Without it, samples come in their own order.

    Raises
    ------
    UsageError
        A number below 1.
    """

    size: int
    microbatch: int
    microbatches: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        if min(self.size, self.microbatch, self.microbatches) < 1:
            raise UsageError(
                "a schedule needs samples",
                wanted="size, microbatch and microbatches of at least 1",
                found=f"{self.size}, {self.microbatch}, {self.microbatches}",
            )

    @property
    def batch(self) -> int:
        """Samples of a step, on all ranks together."""
        return self.microbatch * self.microbatches

    def samples(self, begin: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the ids of samples number `begin` to ``begin + count`` of the job, int64.

        Raises
        ------
        UsageError
            A negative number.
        """
        if begin < 0 or count < 0:
            raise UsageError("samples are counted from 0", found=f"{count} from number {begin}")
        parts = [np.zeros(0, np.int64)]
        while count:
            epoch, place = divmod(begin, self.size)
            here = min(count, self.size - place)
            places = np.arange(place, place + here)
            if self.shuffle:
                places = Permutation(self.size, self.seed, epoch)[places]
            parts.append(places)
            begin, count = begin + here, count - here
        return np.concatenate(parts)

    def mine(self, rank: int, world: int) -> range:
        """Return the micro-batches of a step that `rank` of `world` computes; see `share`.

        Raises
        ------
        UsageError
            There is no such rank, or not a micro-batch for each rank.
        """
        if world > self.microbatches:
            raise UsageError(
                "more ranks than micro-batches",
                wanted=f"at most {self.microbatches} ranks, one a micro-batch",
                found=f"{world} ranks",
                hint="use more and smaller micro-batches, or keep the other ranks as spares",
            )
        return share(self.microbatches, world, rank)

    def samples_of(
        self, consumed: int, microbatches: Iterable[int]
    ) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Yield the samples of each of some micro-batches of the step after `consumed`.

        Errors as of `samples`.
        """
        for run in _runs(microbatches):
            count = len(run) * self.microbatch
            ids = self.samples(consumed + run.start * self.microbatch, count)
            yield from ids.reshape(len(run), self.microbatch)


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the longest runs of numbers that follow one another: samples are made a run at once."""
    run = range(0)
    for number in numbers:
        if run and number == run.stop:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
