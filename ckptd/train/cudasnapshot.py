"""What one snapshot has on CUDA devices: clones, lanes, and what is looked at there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from ckptd.engine.arena import Slot
from ckptd.train.cudacopy import CudaCopies, CudaLane, cloned, lane_groups
from ckptd.train.cudasamples import DeviceSamples, Unchanged
from ckptd.train.feed import Feed, Group, Unit
from ckptd.train.replicas import Samples

__all__ = ["CudaSnapshot", "OnDevice"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and this rank's part of it."""


@dataclass(slots=True)
class OnDevice:
    """What of a snapshot is on one device.

    Attributes
    ----------
    early, late
        Units of what may change once `save` has returned, and of what may not.
    held
        Local tensors that are copied late, by name.
    common_early, common_late
        What other ranks hold as well.
    """

    early: list[Unit] = field(default_factory=list)
    late: list[Unit] = field(default_factory=list)
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    common_early: list[Pair] = field(default_factory=list)
    common_late: list[Pair] = field(default_factory=list)


class CudaSnapshot:
    """Begins the copies of one snapshot from all devices, without waiting.

    What may change at once is cloned on the device first; where memory does not allow that, it is
    copied before this returns. Groups for the rest are in `groups`.

    Parameters
    ----------
    parts
        What is on each device.
    source
        Returns the live tensor of a unit.
    whole
        Returns the live tensor of a copy step.
    clone
        False: nothing changes before everything is copied, so nothing needs a clone.

    Attributes
    ----------
    groups
        For a `Feed`, in the order in which lanes get them.
    placed
        Indexes of the units that are in place already.
    """

    def __init__(
        self,
        shared: CudaCopies,
        slot: Slot,
        parts: Mapping[torch.device, OnDevice],
        source: Callable[[Unit], torch.Tensor],
        whole: Callable[[int], torch.Tensor],
        ends: Sequence[int],
        *,
        clone: bool,
        timeout_s: float,
    ) -> None:
        self._shared = shared
        self._slot = slot
        self._clones: dict[int, torch.Tensor] = {}
        self._live = source
        self.groups: list[Group] = []
        self.placed: list[int] = []
        self._lanes = shared.lanes(parts, slot, self._source)
        shared.pins.use(slot, 1)
        self._samples = {device: DeviceSamples() for device in parts}
        self._watches: list[Unchanged] = []
        try:
            for device, part in parts.items():
                at_once = clone and not self._clone(part.early, whole)
                self._begin(self._lanes[device], part, at_once, ends, timeout_s)
        except BaseException:
            self.release()
            raise

    def _clone(self, early: Sequence[Unit], whole: Callable[[int], torch.Tensor]) -> bool:
        steps = list(dict.fromkeys(unit.step for unit in early))
        clones = cloned([whole(step) for step in steps]) if steps else []
        if clones is None:
            return False
        self._clones.update(zip(steps, clones, strict=True))
        return True

    def _source(self, unit: Unit) -> torch.Tensor:
        clone = self._clones.get(unit.step)
        if clone is None:
            return self._live(unit)
        for dim, size in enumerate(() if unit.part is None else unit.part.shape):
            clone = clone.narrow(dim, unit.part.offset[dim] if unit.part else 0, size)
        return clone

    def _begin(
        self,
        lane: CudaLane,
        part: OnDevice,
        at_once: bool,
        ends: Sequence[int],
        timeout_s: float,
    ) -> None:
        samples = self._samples[lane.device]
        samples.take(part.common_early)
        watch = Unchanged(part.held)
        self._watches.append(watch)
        lane.begin()
        early = lane_groups(lane, part.early)
        if at_once:
            Feed(ends, early, lambda front: None).run(timeout_s)
            self.placed += [unit.index for unit in part.early]
            early = []

        def last() -> None:
            watch.look_again(lane)
            samples.fetch(lane)

        self.groups += early
        self.groups.append(Group(lane, (), lambda: samples.take(part.common_late)))
        self.groups += lane_groups(lane, part.late)
        self.groups.append(Group(lane, (), last))

    def order(self) -> None:
        """Let what the current streams do from now on come after everything that is pushed."""
        for lane in list(self._lanes.values()):  # the copying thread lets go of them when it ends
            lane.order()

    @contextmanager
    def devices(self) -> Iterator[None]:
        """Make this thread ask nothing of a device that the snapshot has nothing on."""
        with ExitStack() as stack:
            for device in self._lanes:
                stack.enter_context(torch.cuda.device(device))
            yield

    def changed(self) -> list[str]:
        """Return what changed though torch did not count it, once everything is copied."""
        return [name for watch in self._watches for name in watch.changed()]

    def give(self, samples: Samples) -> None:
        """Add the digests of what ranks hold in common, once everything is copied."""
        for taken in self._samples.values():
            taken.give(samples)

    def release(self) -> None:
        """Let go of clones and of the slot: nothing is under way any more."""
        self._shared.pins.use(self._slot, -1)
        self._clones.clear()
        self._lanes.clear()
        self.groups.clear()
        self._watches.clear()
        self._samples.clear()
