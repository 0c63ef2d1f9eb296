"""Copies live tensors into a slot: order, early and late copies, mutations found, freed memory.

In it: sizes of guarded reads; the error for a tensor that changed while it was copied.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property, partial
from operator import methodcaller

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.digest import digest
from ckptd.base.grids.block import Region
from ckptd.base.grids.grid import reach_of
from ckptd.base.runtime import launched
from ckptd.base.runtime.memory import Pages, mappings, read_memory
from ckptd.base.runtime.pool import batches
from ckptd.base.torch.device import has_streams, kind_of
from ckptd.base.torch.memorywatch import MemorySpan, Resizes, SpanWatch
from ckptd.base.torch.tensors import WORDS, as_bytes, bytes_at
from ckptd.checkpoint.format.container import ChunkRef
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.checkpoint.torch import ondevice
from ckptd.checkpoint.torch.feed import CopyFeed, CopyGroup, CopyMark, CopyStep, StridedWindow
from ckptd.checkpoint.torch.layouts import LayoutSave
from ckptd.checkpoint.torch.ondevice import DeviceCopies, DeviceSnapshot, OnDevice
from ckptd.checkpoint.torch.replicas import Samples
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.leaves import RecalledLeaves, TensorLeaf
from ckptd.errors import SaveError, first_few
from ckptd.types import Box

_log = logging.getLogger("ckptd")
REPORT_BYTES = 8 << 20
SMALL_TENSOR_BYTES = 4096


def copy_steps(plan: SavePlan, rank: int, laid: LayoutSave, describer: Describer) -> list[CopyStep]:
    """Return the steps for what `rank` writes under `plan`, in file order."""
    leaves = laid.leaves.tensors
    steps: list[CopyStep] = []
    for chunk in plan.filemap.chunks(rank):
        if chunk.end == chunk.start:
            continue
        name = plan.tensors[chunk.tensor].name
        special = laid.steps(name, chunk)
        if special is not None:
            steps += special
            continue
        leaf, part = leaves[name], None
        if leaf.tensor is not leaf.local or chunk.piece.box.shape != leaf.local.shape:
            held = describer.held(name, leaf.tensor)
            box = _local_box(chunk, held.regions, tuple(held.local.shape))
            part = None if box.shape == tuple(held.local.shape) else box
        steps.append(CopyStep(name, part, chunk.start, chunk.end))
    return steps


def _local_box(chunk: ChunkRef, regions: Sequence[Region], local_shape: tuple[int, ...]) -> Box:
    piece = chunk.piece.box
    for region in regions:
        if region.box == piece or region.box.intersect(piece) == piece:
            corner = np.unravel_index(region.start, local_shape) if local_shape else ()
            offset = tuple(
                int(c) + p - r
                for c, p, r in zip(corner, piece.offset, region.box.offset, strict=True)
            )
            return Box(offset, piece.shape)
    raise AssertionError(f"plan gives this rank a piece it does not hold: {piece}")


class CopyForm:
    """Facts of the copy steps, computed once for all saves of the same tensors, without these.

    It keeps no tensor alive: between saves the program may free all of them. It is valid for a
    save whose leaves are the same views of the same memory.

    Parameters
    ----------
    steps
        The copies, in file order. Large steps on a device are cut, so that the link is free
        for others meanwhile.
    leaves
        Leaf by name, those that steps use among them.
    held
        Tells of a leaf that nothing mutates it before the gate says so.

    Attributes
    ----------
    steps
        As they are copied.
    on_device
        Names of the leaves that steps use on devices with streams and events.
    late
        Names of the leaves that may be copied late.
    watched
        Those of them that steps use.
    fresh
        Names of the leaves that each save may find in other memory: facts of memory here do not
        hold for theirs.
    shared
        Names of the leaves in memory that other processes may write. These ask no gate, so such
        memory is copied at once, and must be the same afterwards. Fresh ones may be there.
    addresses
        Where the local tensor of each step begins.
    plain
        Of each step whether it is a run of bytes on the host; `CopySources` keep the memory.
    runs
        The address, the place and the length of those that are.
    """

    def __init__(
        self,
        steps: Sequence[CopyStep],
        leaves: Mapping[str, TensorLeaf],
        held: Callable[[TensorLeaf], bool],
    ) -> None:
        locals = {s.name: leaves[s.name].local for s in steps}
        devices = {x.device for x in locals.values()}
        streams = {d for d in devices if has_streams(d)}
        self.on_device = {n for n, x in locals.items() if x.device in streams} if streams else set()
        kinds = {d.type for d in devices}
        for kind in kinds:
            _note_if_without_streams(kind)
        self._mappings = mappings() if "cpu" in kinds else []
        shared = [(m.start, m.end) for m in self._mappings if m.shared]
        self.fresh = {n for n in locals if leaves[n].fresh}
        self.shared = _lying_in(leaves, shared) | self.fresh
        self.late = {n for n, leaf in leaves.items() if held(leaf) and self._waits(n, leaf.local)}
        self.watched = [n for n in locals if n in self.late]
        self.steps = steps
        if self.on_device:
            self.steps = [cut for step in steps for cut in self._cut(step, locals[step.name])]
        self.addresses = array("Q", [locals[step.name].data_ptr() for step in self.steps])
        runs = [
            None if step.name in self.fresh else _run(locals[step.name], step)
            for step in self.steps
        ]
        self.plain = bytes([run is not None for run in runs])
        self.runs = np.array([run or (0, 0, 0) for run in runs], np.int64).reshape(-1, 3)
        self._nbytes = {n: locals[n].nbytes for n in self.watched}
        self._order: Mapping[str, int | None] | None = None
        self._numbers: list[int] = []

    def _waits(self, name: str, local: torch.Tensor) -> bool:
        """Tell whether a local tensor may be copied late, if it is held."""
        if local.is_cpu:
            # Beside tensors on devices the few bytes of an optimizer's step counters would be all
            # that the host has to wait for at the gate.
            small = self.on_device and local.numel() * local.element_size() <= SMALL_TENSOR_BYTES
            # Dense: it has its memory for itself, in whatever order.
            shape = tuple(local.shape)
            dense = local.is_contiguous() or reach_of(shape, local.stride()) == local.numel()
            return name not in self.shared and dense and not small
        return has_streams(local.device) and name not in self.shared

    def _cut(self, step: CopyStep, local: torch.Tensor) -> Iterable[CopyStep]:
        if step.name not in self.on_device or step.end - step.start <= ondevice.CHUNK_BYTES:
            return (step,)
        shape = tuple(local.shape) if step.part is None else step.part.shape
        return step.cut(shape, local.element_size(), ondevice.CHUNK_BYTES)

    @cached_property
    def watch(self) -> SpanWatch:
        """Finds writes that torch does not count to what is copied late on the host."""
        spans = []
        whole = set()
        for number in self.late_on_host:
            step = self.steps[number]
            if self.plain[number]:
                at, start, nbytes = self.runs[number].tolist()
                spans.append(MemorySpan(step.name, at, nbytes, start))
            elif step.name not in whole:
                whole.add(step.name)
                at = self.addresses[number]
                spans.append(MemorySpan(step.name, at, self._nbytes[step.name], None))
        return SpanWatch(spans, self._mappings, Pages.of_this_process())

    @cached_property
    def early(self) -> array[int]:
        """Numbers of the steps that are copied at once, on the host."""
        return array("q", self._on_host(late=False))

    @cached_property
    def early_runs(self) -> NDArray[np.int64]:
        """Numbers of those of `early` that are runs of bytes."""
        return np.array([number for number in self.early if self.plain[number]], np.int64)

    def early_are_there(self, leaves: Mapping[str, TensorLeaf]) -> bool:
        """Tell whether all of `early_runs` lie where they did; False: look at each by its name."""
        if not isinstance(leaves, RecalledLeaves) or (order := leaves.order) is None:
            return False
        if order is not self._order:
            found = [order[self.steps[n].name] for n in self.early_runs.tolist()]
            self._order, self._numbers = order, [n for n in found if n is not None]
        wanted = np.array(self.addresses)[self.early_runs]
        return np.array_equal(leaves.places(self._numbers), wanted)

    @cached_property
    def late_on_host(self) -> list[int]:
        """Numbers of the steps that a thread copies on the host."""
        return self._on_host(late=True)

    @cached_property
    def late_groups(self) -> list[list[int]]:
        """`late_on_host`, in groups after which progress is reported."""
        steps = self.steps
        return [*batches(self.late_on_host, lambda n: steps[n].end - steps[n].start, REPORT_BYTES)]

    def _on_host(self, *, late: bool) -> list[int]:
        return [
            number
            for number, step in enumerate(self.steps)
            if step.name not in self.on_device and (step.name in self.late) == late
        ]


class CopySources:
    """Source tensors of one save's copy steps. It keeps them, even if the program frees them.

    Parameters
    ----------
    form
        The facts of the copy steps.
    leaves
        Leaf by name.

    """

    def __init__(self, form: CopyForm, leaves: Mapping[str, TensorLeaf]) -> None:
        self.form = form
        self.leaves = leaves

    def local(self, number: int) -> torch.Tensor:
        """Return the local tensor that a step copies, or a part of it."""
        return self.leaves[self.form.steps[number].name].local

    def versions(self) -> list[int]:
        """Return where each tensor lies that is copied late, and what torch counts of its changes.

        Three numbers a tensor, in the order of `CopyForm.watched`: an operation on a DTensor, or
        on a subclass that wraps tensors, raises its count, and not always that of those inside.
        """
        found: list[int] = []
        locals, inner = self._watched
        for name, local in zip(self.form.watched, locals, strict=True):
            counted = type(local) is torch.Tensor and not local.is_inference()
            count = local._version if counted else _version(local)
            whole = _version(self.leaves[name].origin) if name in inner else count
            found += (local.data_ptr(), count, whole)
        return found

    @cached_property
    def _watched(self) -> tuple[list[torch.Tensor], set[str]]:
        """The local tensors of `CopyForm.watched`, and which are inside of others."""
        names, leaves = self.form.watched, self.leaves
        some = leaves.hold(names) if isinstance(leaves, RecalledLeaves) else names
        inner = {n for n in some if leaves[n].tensor is not leaves[n].local or leaves[n].wrapped}
        return self._locals(names), inner

    def _locals(self, names: Sequence[str]) -> list[torch.Tensor]:
        leaves = self.leaves
        return (
            leaves.locals(names)
            if isinstance(leaves, RecalledLeaves)
            else [leaves[n].local for n in names]
        )

    def among(self, storages: Container[int]) -> list[str]:
        """Return the names of what is copied late and lies in some storages."""
        return [
            name
            for name in self.form.watched
            if self.leaves[name].local.untyped_storage()._cdata in storages
        ]

    @property
    def devices(self) -> dict[torch.device, OnDevice]:
        """The copy steps by device with streams; parts that other ranks hold are not filled in."""
        found: dict[torch.device, OnDevice] = {}
        for number, step in enumerate(self.form.steps if self.form.on_device else ()):
            if step.name not in self.form.on_device:
                continue
            local = self.local(number)
            part = found.setdefault(local.device, OnDevice())
            if step.name in self.form.late:
                part.late.append(number)
                part.held[step.name] = local
            else:
                part.early.append(number)
        return found

    def source(self, number: int) -> torch.Tensor:
        """Return what a step copies."""
        return self.parts((number,))[0]

    def parts(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return what some steps copy; windows of one tensor share its contiguous copy.

        Raises
        ------
        SaveError
            kind ``mutated``: its memory was freed. A kernel that reads there could cost the device.
        """
        self._check_there(numbers)
        found = []
        flat: dict[str, torch.Tensor] = {}
        for number in numbers:
            step, local = self.form.steps[number], self.local(number)
            if isinstance(step.part, StridedWindow):
                if step.name not in flat:
                    flat[step.name] = local.contiguous()
                local = flat[step.name]
            found.append(_part(local, step.part))
        return found

    def copy_early(self, slot: Slot) -> None:
        """Copy what is copied at once, on the host, into its places in the slot.

        Raises
        ------
        SaveError
            kind ``mutated``: its memory was freed.
        """
        form, runs = self.form, self.form.early_runs
        if len(runs):
            if not form.early_are_there(self.leaves):
                self._check_there(runs.tolist())
            slot.fill(form.runs[runs])
        for number in form.early if len(runs) < len(form.early) else ():
            if not form.plain[number]:
                step = form.steps[number]
                _copy(self.source(number), slot.place(step.start, step.end))

    def copy_late(self, numbers: Sequence[int], slot: Slot) -> None:
        """Copy what the program may free at any moment, in a thread of its own.

        Raises
        ------
        SaveError
            kind ``mutated``: its memory was freed.
        """
        form = self.form
        loose = [n for n in numbers if not form.plain[n]]
        self._check_there(loose)  # the others, by their addresses, when all is copied
        try:
            slot.read(form.runs[[n for n in numbers if form.plain[n]]])
            for number in loose:
                step, at = form.steps[number], form.addresses[number]
                place = slot.place(step.start, step.end)
                _copy_guarded(self.local(number), at, step.part, place)
        except (SaveError, OSError):
            # The kernel copies, and says so where memory is freed under it.
            self._check_there(numbers)
            raise

    def _check_there(self, numbers: Sequence[int]) -> None:
        steps, addresses = self.form.steps, self.form.addresses
        names = [steps[n].name for n in numbers]
        places = map(methodcaller("data_ptr"), self._locals(names))
        moved = [x for x, n, at in zip(names, numbers, places, strict=True) if at != addresses[n]]
        if gone := [name for name in moved if name not in self.form.fresh]:
            raise _mutated(gone)

    def is_copied(self, number: int, slot: Slot) -> bool:
        """Tell whether the slot holds what a step's tensor, which is on the host, holds now."""
        step = self.form.steps[number]
        place = slot.place(step.start, step.end)
        if self.form.plain[number]:
            at, _, nbytes = self.form.runs[number].tolist()
            return bool(np.array_equal(place, bytes_at(at, nbytes)))
        return digest(place.data) == _digest(self.source(number))


class _HostLane:
    """Copies in `push`, by the thread that feeds. See `Lane`."""

    limit = 1
    free = False

    def __init__(self, slot: Slot, sources: CopySources) -> None:
        self._slot = slot
        self._sources = sources

    def push(self, group: CopyGroup) -> CopyMark:
        self._sources.copy_late(group.steps, self._slot)
        if group.task is not None:
            group.task()
        return self

    def done(self) -> bool:
        return True


class Snapshot:
    """One save's copying: what may not wait at once, the rest in another thread.

    Parameters
    ----------
    sources
        What is copied.
    slot
        Where it goes.
    look
        Digest what is held now and again when it is copied: finds also what torch does not count
        as a mutation (writes through ``.data`` or numpy). Costs a pass over the state.
    copies
        Carries out the copies from devices.
    clone
        See `DeviceSnapshot`.
    samples
        Gets digests of what ranks hold in common, each of the values that are copied. None: ranks
        are not compared.
    timeout_s
        A device that copies nothing for so long hangs.

    Attributes
    ----------
    devices
        From which something is copied by streams, so that `order` lets the host go on.

    Notes
    -----
    Tensors on the host and on devices with streams and events may be held. What is on other devices
    is copied at once and synchronously.
    """

    def __init__(
        self,
        sources: CopySources,
        slot: Slot,
        *,
        look: bool = False,
        copies: DeviceCopies | None = None,
        clone: bool = True,
        samples: Samples | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._form = form = sources.form
        self._steps = form.steps
        self._slot = slot
        self._sources: CopySources | None = sources
        self._samples = samples
        self._shared = copies
        self._clone = clone
        self._timeout_s = timeout_s
        self._resizes = Resizes()
        self._versions = sources.versions()
        # Before anything is copied: what is written from now on is not of this step.
        self._watched = form.watch.begin() if form.late_on_host else None
        self._unsteady: list[str] = []
        self._found: list[str] = []
        # Until the gate opens nothing changes what is on the host; what a device has may change
        # before the host sees its copies done, so of that the staged bytes are compared.
        self._digests = {
            name: _digest(sources.leaves[name].local)
            for name in (form.watched if look else ())
            if name not in form.on_device
        }
        self._staged_digests = {
            number: _digest(sources.source(number).cpu())
            for number, step in enumerate(form.steps if look else ())
            if step.name in form.late and step.name in form.on_device
        }
        self._aborts = None if launched.current is None else launched.current.aborts
        self._checking = threading.Lock()
        self._changed: list[str] | None = None
        self._on_device: DeviceSnapshot | None = None
        self._feed: CopyFeed | None = None
        self.devices: tuple[torch.device, ...] = ()

    @property
    def _live(self) -> CopySources:
        if self._sources is None:
            raise SaveError("this snapshot was copied already")
        return self._sources

    # -- in save ---------------------------------------------------------------------------------

    def copy_now(self) -> None:
        """Copy what may change at any time. Returns when it is copied, or cloned on its device."""
        self._live.copy_early(self._slot)
        for number in self._form.early if self._form.shared else ():
            name = self._steps[number].name
            if name in self._form.shared and not self._live.is_copied(number, self._slot):
                self._unsteady.append(name)
        if self._samples is not None:
            self._sample_on_host(self._samples, late=False)
        look = self._form.on_device or self._samples is not None
        if look and (devices := self._devices()):
            self._begin_on(devices)

    def _common(self, *, on_device: bool, late: bool) -> list[torch.Tensor]:
        """Return what other ranks hold as well, on devices with streams or elsewhere."""
        if self._samples is None:
            return []
        tensors = {
            id(leaf.local): leaf.local  # several may lie in one buffer
            for name, leaf in self._live.leaves.items()
            if (name in self._form.late) == late
            and has_streams(leaf.local.device) == on_device
            and self._samples.wants(leaf)
        }
        return [v for t in tensors.values() for v in self._samples.views(t)]

    def _devices(self) -> dict[torch.device, OnDevice]:
        """Return what is on devices with streams, and what of it ranks have in common."""
        found = self._live.devices
        for late in (False, True):
            for tensor in self._common(on_device=True, late=late):
                part = found.setdefault(tensor.device, OnDevice())
                (part.common_late if late else part.common_early).append(tensor)
        return found

    def _begin_on(self, devices: dict[torch.device, OnDevice]) -> None:
        self._on_device = DeviceSnapshot(
            self._shared or DeviceCopies(),
            self._slot,
            devices,
            self._steps,
            self._live.parts,
            clone=self._clone,
            placed=self._form.early,
            timeout_s=self._timeout_s,
        )
        groups = self._on_device.groups + self._host_groups()
        self._feed = self._feed_of(groups, self._on_device.placed)
        self.devices = tuple(devices)

    def _host_groups(self) -> list[CopyGroup]:
        lane = _HostLane(self._slot, self._live)
        groups = [CopyGroup(lane, numbers) for numbers in self._form.late_groups]
        if (samples := self._samples) is not None:
            groups.append(CopyGroup(lane, (), lambda: self._sample_on_host(samples, late=True)))
        return groups

    def _sample_on_host(self, samples: Samples, *, late: bool) -> None:
        for tensor in self._common(on_device=False, late=late):
            samples(tensor)

    def _feed_of(self, groups: Iterable[CopyGroup], placed: Iterable[int]) -> CopyFeed:
        report = partial(setattr, self._slot, "staged")
        return CopyFeed(self._steps, groups, report, (*self._form.early, *placed))

    # -- in the copying thread -------------------------------------------------------------------

    def copy_rest(self) -> None:
        """Copy what is held, front to back; on return the snapshot's tensors are all there.

        Raises
        ------
        SaveError
            kind ``mutated``: something changed before it was copied; the snapshot is worth
            nothing. Names what. A device hangs. Kind ``aborted``: collectives of a device were cut
            off meanwhile.
        """
        if self._feed is None:
            self._feed = self._feed_of(self._host_groups(), ())
        with nullcontext() if self._on_device is None else self._on_device.devices():
            try:
                self._feed.run(self._timeout_s)
                if self._on_device is not None and self._samples is not None:
                    self._on_device.give(self._samples)
                self._check()
            finally:
                self._release_sources()
        self._slot.staged = self._steps[-1].end if self._steps else 0

    def _release_sources(self) -> None:
        """Drop what keeps memory, unless a device may still use it."""
        if self._feed is not None and not self._feed.stuck:
            if self._on_device is not None:
                self._on_device.release()
            self._feed = self._on_device = None
            with self._checking:
                self._changed = self._changed or []
                if self._watched is not None:
                    self._watched.end()
                self._watched = self._sources = self._samples = None

    def _check(self) -> None:
        # An optimizer's step may stand behind a collective that was cut off, and run on garbage,
        # and these copies behind it. A copy that the host saw done before an abort began is right.
        if self._aborts is not None and self._aborts.begun:
            raise SaveError(
                "collectives were cut off while this snapshot was copied",
                kind="aborted",
                wanted="values that were computed before the generation ended",
                hint="no action needed: the next generation loads an earlier step",
            )
        changed = self._changes() + self._unsteady
        if self._on_device is not None:
            changed += self._on_device.changed()
        for number, wanted in self._staged_digests.items():
            step = self._steps[number]
            if digest(self._slot.data[step.start : step.end]) != wanted:
                changed.append(step.name)
        if changed:
            raise _mutated(changed)

    def _changes(self) -> list[str]:
        """Return what has changed by now, or by the time when the gate opened."""
        with self._checking:
            if self._changed is None:
                self._changed = self._found + self._counted_changes()
                if self._watched is not None:
                    at = np.frombuffer(self._slot.data, np.uint8).ctypes.data
                    self._changed += self._watched.changed(at)
                self._changed += [
                    n for n, d in self._digests.items() if _digest(self._live.leaves[n].local) != d
                ]
            return list(self._changed)

    def _counted_changes(self) -> list[str]:
        changed: list[str] = []
        if (now := self._live.versions()) != self._versions:
            for at, name in enumerate(self._form.watched):
                of = slice(3 * at, 3 * at + 3)
                changed += [name] if now[of] != self._versions[of] else []
        resized = self._resizes.storages()
        return changed + (self._live.among(resized) if resized else [])

    # -- at the gate -----------------------------------------------------------------------------

    def before_captured(self) -> None:
        """Look at what has changed by now: a step is about to be captured into a graph.

        Torch counts what the step does, though on the device nothing is done before a replay.
        """
        with self._checking:
            if self._changed is None:
                self._found += self._counted_changes()

    def after_captured(self) -> None:
        """Disregard what was counted since `before_captured`, of what a device holds."""
        with self._checking:
            if self._changed is None:
                now = self._live.versions()
                for at, name in enumerate(self._form.watched):
                    if name in self._form.on_device:
                        of = slice(3 * at, 3 * at + 3)
                        self._versions[of] = now[of]

    def order(self, timeout_s: float) -> bool:
        """Order later work on the current streams after the copies.

        The host itself waits for the copies of tensors on the host only.

        Returns
        -------
        bool
            False: even that took longer than `timeout_s`.
        """
        feed, on_device = self._feed, self._on_device
        if feed is None or on_device is None:
            return True  # everything is copied, or given up
        if not feed.hurry(timeout_s):
            return False
        self._changes()
        on_device.order()
        return True

    @property
    def stuck(self) -> bool:
        """Whether a device may still write into the slot though the copying was given up."""
        feed = self._feed
        return feed is not None and feed.stuck


@cache
def _note_if_without_streams(kind: str) -> None:
    """Log, once in a process, that a kind of device has no lazy path."""
    if kind not in ("cpu", "meta") and not kind_of(kind).has_streams:
        _log.warning(
            "save() waits until tensors on %s are copied: torch has no streams and events for that "
            "kind of device",
            kind,
        )


def _mutated(names: Iterable[str]) -> SaveError:
    found = sorted(set(names))
    return SaveError(
        f"{len(found)} tensors changed before they were copied",
        kind="mutated",
        where=first_few(found, 5),
        wanted="no change between save() and before_mutation() or the optimizer's step",
        hint="call the checkpointer's before_mutation() before code that changes tensors, or "
        'create it with copy=CopyOptions(lazy="off"); other processes that write this memory '
        "must wait too",
    )


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # of inference tensors torch counts nothing
        return 0


def _run(local: torch.Tensor, step: CopyStep) -> tuple[int, int, int] | None:
    """Return address, place and length of a step that is a run of bytes on the host."""
    if isinstance(step.part, StridedWindow):
        return None
    tensor = local if step.part is None else _part(local, step.part)
    lazy = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_cpu or not tensor.is_contiguous() or lazy:
        return None
    at, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes and not at:
        as_bytes(tensor)  # raises what is wrong with it
    return at, step.start, nbytes


def _lying_in(leaves: Mapping[str, TensorLeaf], ranges: Sequence[tuple[int, int]]) -> set[str]:
    """Return the names of what lies in sorted ranges of this process's memory."""
    here = [
        (name, leaf.local)
        for name, leaf in leaves.items()
        if ranges and leaf.local.is_cpu and leaf.local.numel()
    ]
    if not here:
        return set()
    at = np.array([local.data_ptr() for _, local in here], np.uint64)
    starts, ends = np.array(ranges, np.uint64).T
    found = np.searchsorted(starts, at, side="right")
    inside = np.flatnonzero((found > 0) & (at < ends[found - 1]))
    # Page-locked memory is mapped as shared by the driver, and no other process has it.
    return {here[i][0] for i in inside.tolist() if not here[i][1].is_pinned()}


def _part(local: torch.Tensor, part: Box | StridedWindow | None) -> torch.Tensor:
    if isinstance(part, Box):
        for dim, (offset, size) in enumerate(zip(part.offset, part.shape, strict=True)):
            local = local.narrow(dim, offset, size)
    elif part is not None:
        flat = local.contiguous().view(-1)
        return flat.as_strided(part.shape, part.strides, flat.storage_offset() + part.start)
    return local


def _digest(local: torch.Tensor) -> bytes:
    return digest(as_bytes(_words(local).contiguous().resolve_conj().resolve_neg()).data)


def _copy(source: torch.Tensor, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    lazy = source.is_conj() or source.is_neg()
    if source.device.type == "cpu" and source.is_contiguous() and not lazy:
        np.copyto(target, as_bytes(source))
        return
    source = _words(source)
    torch.from_numpy(target).view(source.dtype).view(source.shape).copy_(source)


def _words(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor by the words of its memory, as torch cannot copy the values of every type."""
    lazy = local.is_conj() or local.is_neg()
    return local if lazy else local.view(WORDS[local.element_size()])


_GUARDED_BYTES = 8 << 20
_FEW_BYTES = 64 << 10


def _copy_guarded(
    local: torch.Tensor,
    at: int,
    part: Box | StridedWindow | None,
    target: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> None:
    """Copy a part of a tensor on the host, which lies `at`, and may be freed at any moment.

    Raises
    ------
    OSError
        It was freed.
    """
    if not target.nbytes:
        return
    shape, strides, size = tuple(local.shape), local.stride(), local.element_size()
    kept = None
    if isinstance(part, StridedWindow):
        if not local.is_contiguous():
            kept = torch.empty(shape, dtype=WORDS[size])
            _read_into(kept, at, strides)
            at = kept.data_ptr()
        at += size * part.start
        shape, strides = part.shape, part.strides
    elif part is not None:
        at += size * sum(o * s for o, s in zip(part.offset, strides, strict=True))
        shape = part.shape
    into = torch.from_numpy(target)
    _read_into(into.view(WORDS[size]).view(shape), at, strides)
    if local.is_conj() or local.is_neg():
        plain = into.view(local.dtype)
        plain = plain.conj() if local.is_conj() else plain
        into.view(local.dtype).copy_(torch._neg_view(plain) if local.is_neg() else plain)


def _read_into(into: torch.Tensor, at: int, strides: tuple[int, ...]) -> None:
    """Have the kernel copy pieces of memory, and take what lies there at strides out of these.

    No view of the memory is made: torch makes none of what is freed.
    """
    numel, size, shape = into.numel(), into.element_size(), tuple(into.shape)
    if not numel:
        return
    reach = reach_of(shape, strides)
    sparse = reach > 2 * numel and reach * size > _FEW_BYTES
    if sparse or reach * size > _GUARDED_BYTES:
        dim = max(range(len(shape)), key=lambda d: (shape[d] > 1, strides[d]))
        rows = 1 if sparse else max(1, shape[dim] * _GUARDED_BYTES // (reach * size))
        if rows < shape[dim]:
            for row in range(0, shape[dim], rows):
                piece = into.narrow(dim, row, min(rows, shape[dim] - row))
                _read_into(piece, at + size * row * strides[dim], strides)
            return
    raw = torch.empty(reach * size, dtype=torch.uint8)
    read_memory(np.array([(at, raw.data_ptr(), len(raw))]))
    into.copy_(raw.view(into.dtype).as_strided(shape, strides))
