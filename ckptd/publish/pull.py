"""A worker's pull: plans parts, fetches in parallel lanes, checks digests, applies; bytes counted.

In it: size of messages, of what is kept; how many servers at once; overflow of casts.

The worker knows both layouts, so it knows for each of its tensors which strided parts of which
rank's tensors it is made of. It asks for just these parts. Where a server is on the same host the
worker reads them out of the slot; elsewhere the server gathers and sends them, cast already where
the worker's type is smaller. Nothing is written before everything is there.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.grids.block import Block
from ckptd.base.runtime.copier import copy_values
from ckptd.base.runtime.spare import SPARE
from ckptd.errors import CkptdError, MismatchError, TransientStoreError, UsageError, first_few
from ckptd.lay.agree import agreed
from ckptd.lay.bind import FilledGlobs, bind_sizes, with_globs
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.lay.local import local_tensors
from ckptd.lay.resolve import Bound
from ckptd.lay.values import Values
from ckptd.publish.carrier import SlotReader
from ckptd.publish.link import (
    Arrived,
    NearMemory,
    ReadRequest,
    ServerLink,
    VersionMemory,
    damaged,
)
from ckptd.publish.messages import (
    AskChanged,
    AskTensors,
    BlockRead,
    ChangedBlocks,
    PublishedAbout,
    PublishedTensor,
    TensorPlaces,
)
from ckptd.publish.passing import Passing
from ckptd.publish.quantized import QuantizedTensor, ScaleMemory, quantized_tensors
from ckptd.publish.tiles import tile_counts
from ckptd.reshard.layouts import read_text
from ckptd.reshard.live.memory import ArrayMemory, LentMemory, TensorMemory
from ckptd.reshard.live.move import Arrivals, change_between, no_place, place_of, put_fills
from ckptd.reshard.live.plan import Incoming, PartBlock, Takings, TensorFills
from ckptd.types import DType, dtype_of

U8 = NDArray[np.uint8]
T = TypeVar("T")
_log = logging.getLogger("ckptd")

_MESSAGE_BYTES = 2 << 20
"""Of what is asked for at a time: two fit the buffers of a socket, so both ends work at once."""
_DELTA_TIMES = 4
"""So many times that where deltas may come in place of it."""
_LEAST_MESSAGE_BYTES = 4096
_MOST_BLOCKS = 4096
_NARROW = frozenset(
    {
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)
"""Types that a value of another one may be too large for."""
_SCRATCH_BYTES = 4 << 20
_LOOKED_AT_BYTES = 16 << 20
"""Of what the magnitudes are asked of at a time: the answer is small."""
_LANES = 8
"""Servers that are asked at a time."""
_DIGESTS_S = 10.0
_MOST_UNKNOWN = 4
"""Versions in a row of which a worker may pull all without knowing what has changed."""


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """The work of one worker.

    Attributes
    ----------
    bytes_needed
        Of the parts of published tensors that the own tensors are made of, in the smaller of both
        types; and of the magnitudes that scales are made of.
    bytes_received
        Over sockets: less than is needed where what changed since an earlier version was enough,
        more where some of it had to come whole after that.
    bytes_passed
        Of these: from other workers, and not from the publisher.
    bytes_mapped
        Read out of slots of this host.
    bytes_unchanged
        Left out: the own tensors hold them already.
    staged_bytes
        Memory that the pull took besides the tensors.
    """

    bytes_needed: int = 0
    bytes_received: int = 0
    bytes_passed: int = 0
    bytes_mapped: int = 0
    bytes_unchanged: int = 0
    staged_bytes: int = 0

    def __add__(self, other: PullReport) -> PullReport:
        mine, more = dataclasses.asdict(self), dataclasses.asdict(other)
        return PullReport(**{name: mine[name] + more[name] for name in mine})


@dataclass(frozen=True)
class HeldTensors:
    """A worker's tensors of an earlier version of the same publisher.

    Attributes
    ----------
    number
        Number of that version.
    names
        Own tensors that certainly still hold it.
    """

    number: int
    names: frozenset[str]


@dataclass(frozen=True, eq=False)
class _Part:
    """A block of a tensor of a rank, on its way into an own tensor.

    Attributes
    ----------
    dtype
        In which it is there.
    memory
        Where it is, with the block's own places; else `data` is the block, row-major.
    near
        The same where devices copy it by themselves.
    mapped
        What both are of.
    quantized
        What the values in `memory` are quantized by on their way.
    """

    incoming: Incoming
    block: PartBlock
    dtype: DType
    memory: ArrayMemory | None = None
    near: NearMemory | None = None
    mapped: VersionMemory | None = None
    data: U8 | None = None
    quantized: QuantizedTensor | None = None


def published_layout(about: PublishedAbout) -> Bound:
    """Return the layout of what is published.

    Raises
    ------
    MismatchError, UsageError
        It is none, or is for another number of ranks.
    """
    resolved = read_text(about.layout, "the publisher").resolve()
    globs = [FilledGlobs(*g) for g in about.globs]
    source = bind_sizes(with_globs(resolved, globs), about.sizes)
    mesh = source.layout.mesh
    if (1 if mesh is None else mesh.world) != about.world:
        raise MismatchError(
            "the publisher's layout is for another number of ranks",
            kind="lay-fit",
            where=source.layout.name,
            wanted=f"{about.world} ranks, as publish",
            found=f"{1 if mesh is None else mesh.world} ranks",
        )
    return source


class PullPlan:
    """The parts that one worker needs, by the rank that has them.

    Parameters
    ----------
    about
        What is published.
    target
        The worker's layout.
    rank
        Of this worker in its layout.
    targets
        Memory of the worker's tensors, by their names in its program. The plan stands in for any of
        the same types and lengths, see `lend`.
    scales
        That of the scales of those that are held quantized.

    Raises
    ------
    MismatchError
        The published model is another one: the message names the tensors or axes.
    UsageError
        The published program is not one.
    """

    def __init__(
        self,
        about: PublishedAbout,
        target: Bound,
        rank: int,
        targets: Mapping[str, TensorMemory],
        scales: Mapping[str, ScaleMemory] | None = None,
    ) -> None:
        self.epoch = about.epoch
        source = published_layout(about)
        self.transfers = Transfers(Composition(*agreed(source, target)))
        self._places = {n: LentMemory(m) for n, m in targets.items()}
        self._scales = {
            n: x._replace(memory=LentMemory(x.memory)) for n, x in (scales or {}).items()
        }
        self._takings = Takings(self.transfers, rank, frozenset({""}), self._places)
        self._unknown = 0
        if self._takings.homeless:
            raise no_place(self._takings.homeless[0])
        self._quantized = (
            self._held_quantized(rank, self._places, self._scales) if self._scales else {}
        )
        self.lend(targets, scales)

    def lend(
        self,
        targets: Mapping[str, TensorMemory],
        scales: Mapping[str, ScaleMemory] | None = None,
    ) -> None:
        """Have the next pulls fill this memory; of none, the plan keeps no tensor alive."""
        for name, place in self._places.items():
            place.lend(targets.get(name))
        for name, scale in self._scales.items():
            if isinstance(scale.memory, LentMemory):
                scale.memory.lend(scales[name].memory if scales and name in scales else None)

    def _held_quantized(
        self, rank: int, targets: Mapping[str, TensorMemory], scales: Mapping[str, ScaleMemory]
    ) -> dict[str, QuantizedTensor]:
        """Return what is held quantized, by name."""
        form = self.transfers.composition.target
        out = {}
        for tensor, said, _ in quantized_tensors(form, local_tensors(form, rank)):
            name = tensor.name
            if name in scales and name in targets:
                memory = targets[name]
                change_between(memory.dtype, memory, Values((), (said,)), name)
                out[name] = QuantizedTensor(tensor, said, memory.dtype, scales[name])
        for fills in self._takings.fills:
            if fills.name in out and any(f.value for f in fills.fills):
                raise UsageError(
                    "a quantized tensor is padded with zeros only",
                    kind="lay-use",
                    where=fills.name,
                    hint="pad(axis, n) without a value",
                )
        return out

    @property
    def givers(self) -> list[int]:
        """Ranks of the publisher that something is taken of."""
        return self._takings.givers

    def spans(self, giver: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield tensors of a rank, with first element and end of each part that is taken."""
        for found in self._takings.of(giver):
            yield found.segment.source, [p.block.source_span for p in found.segment.pieces]

    def stage(
        self,
        number: int,
        links: Mapping[int, SlotReader],
        budget_bytes: int | None,
        held: HeldTensors | None = None,
        *,
        in_place: bool = False,
        step: Callable[[], object] = lambda: None,
        passing: Passing | None = None,
    ) -> StagedPull:
        """Pull a version, which is held, up to the last byte; writes nothing.

        Parameters
        ----------
        links
            To the server of each giver.
        budget_bytes
            Most memory for what comes over sockets; None: as much as it takes.
        held
            What need not be pulled, where it did not change.
        in_place
            What does not fit the budget comes when it is applied, a message at a time.
        step
            Called when the pull, or what is applied of it, has got on; by any thread.
        passing
            Takes of other workers what is staged, and passes it on.

        Raises
        ------
        CkptdError
            A server is gone, or does not have what is needed.
        UsageError
            A live move cannot be made within so few bytes.
        """
        staged = StagedPull(self._takings.fills, step)
        quantized = self._quantized
        since = 0 if held is None else held.number
        givers = [
            _Giver(links[g], self._takings.of(g), quantized, step, since, passing)
            for g in self.givers
        ]
        if held is not None:
            # Digests of a new version take a moment: waited for where something may be left out,
            # and now and then to see what has come to rest.
            waits = bool(held.names) or self._unknown == _MOST_UNKNOWN
            # Servers digest at the same time, so all of them together are waited for so long.
            end = time.monotonic() + (_DIGESTS_S if waits else 0.0)
            for giver in givers:
                giver.look(number, held, max(0.0, end - time.monotonic()))
                step()
            known = all(g.compared for g in givers)
            self._unknown = 0 if known or waits else self._unknown + 1
            if known:
                staged.changed = set().union(*(g.changed for g in givers))
                # A block has one scale, whichever rank has changed a part of it.
                rests = held.names - set().union(*(g.touched for g in givers))
                quantized = {n: q for n, q in quantized.items() if n not in rests}
                for giver in givers:
                    giver.leave_out(rests)
        needed = sum(g.staged_bytes for g in givers) + sum(
            q.scale_bytes for q in quantized.values()
        )
        now = givers
        if budget_bytes is not None and needed > budget_bytes:
            if not in_place:
                raise UsageError(
                    "a version pulled over sockets does not fit budget_bytes; it is buffered "
                    "because it is applied whole or not at all",
                    wanted=f"budget_bytes of at least {needed}",
                    found=f"{budget_bytes} bytes",
                    hint="give a larger budget_bytes; or in_place=True, which writes values as "
                    "they arrive: the tensors are inconsistent until update() returns",
                )
            now = [g for g in givers if not g.staged_bytes]
            limit = max(_LEAST_MESSAGE_BYTES, min(budget_bytes, _MESSAGE_BYTES))
            staged.later = [partial(g.stream, number, limit) for g in givers if g.staged_bytes]
        if quantized:
            staged.quantized = list(quantized.values())
            staged.report += self._measure(number, givers, staged.quantized)
        room = staged.room(sum(g.staged_bytes for g in now))
        stop = threading.Event()
        pulls: list[Callable[[], _Share]] = []
        for giver in now:
            into, room = room[: giver.staged_bytes], room[giver.staged_bytes :]
            pulls.append(partial(giver.pull, number, into, stop))
        for share in in_lanes(pulls, stop):
            staged.add(share)
        return staged

    def _measure(
        self, number: int, givers: Sequence[_Giver], quantized: Sequence[QuantizedTensor]
    ) -> PullReport:
        """Find the scales of what is held quantized; return what that took."""
        for tensor in quantized:
            tensor.begin()
        report = PullReport(staged_bytes=sum(q.scale_bytes for q in quantized))
        stop = threading.Event()
        for done in in_lanes([partial(g.measure, number, stop) for g in givers], stop):
            report += done
        for tensor in quantized:
            tensor.settle()
        return report


def in_lanes(calls: Sequence[Callable[[], T]], stop: threading.Event) -> list[T]:
    """Return what calls return that are made at the same time; the first error ends all of them."""
    with ThreadPoolExecutor(min(_LANES, max(1, len(calls))), "ckptd-pull") as lanes:
        made = [lanes.submit(call) for call in calls]
        done, _ = wait(made, return_when=FIRST_EXCEPTION)
        if failed := [m for m in done if m.exception() is not None]:
            stop.set()
            lanes.shutdown(wait=False, cancel_futures=True)
            failed[0].result()
        return [m.result() for m in made]


@dataclass(eq=False)
class StagedPull:
    """A version that is all there; `apply` writes it.

    Attributes
    ----------
    step
        Called when something of it is written.
    parts
        What is written.
    mapped
        Slots that parts lie in.
    changed
        Own tensors that mostly changed since the version that is held; None: it is not known.
    later
        Give what is pulled only when it is applied.
    written
        Names of the tensors that something arrived for.
    quantized
        Tensors that get new scales.
    memory
        What came over sockets, and its size in bytes; None: nothing did.
    """

    fills: Sequence[TensorFills]
    step: Callable[[], object]
    parts: list[_Part] = field(default_factory=list)
    mapped: list[VersionMemory] = field(default_factory=list)
    report: PullReport = field(default_factory=PullReport)
    changed: set[str] | None = None
    later: list[Callable[[], Iterator[_Share]]] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    quantized: list[QuantizedTensor] = field(default_factory=list)
    memory: tuple[mmap.mmap, int] | None = None

    def room(self, size: int) -> U8:
        """Return memory for what comes over sockets."""
        if not size:
            return np.empty(0, np.uint8)
        mapping, room = SPARE.take(size)
        self.memory = mapping, size
        return room

    def handed(self) -> tuple[mmap.mmap, int] | None:
        """Leave the memory to the caller, with its size; None: there is none."""
        memory, self.memory = self.memory, None
        return memory

    def give_back(self) -> None:
        """Keep the memory for the next pull; call it when devices have copied out of it, too."""
        self.parts.clear()
        if self.memory is not None:
            mapping, size = self.memory
            self.memory = None
            SPARE.give_back(mapping, size)

    def add(self, share: _Share) -> None:
        """Add what came from one rank."""
        self.parts += share.parts
        self.mapped += share.mapped
        self._note(share)

    def _note(self, share: _Share) -> None:
        self.written |= {p.incoming.tensor.name for p in share.parts}
        self.report += share.report

    def apply(self) -> None:
        """Write the tensors.

        Raises
        ------
        CkptdError
            `state_corrupted`: the tensors are of no version.
        """
        arrivals = Arrivals()
        try:
            for part in self.parts:
                _put(part, arrivals)
                self.step()
            lost = [m for m in self.mapped if not m.near_intact]
            for part in self.parts if lost else ():
                if part.mapped in lost and part.near is not None:
                    _put(dataclasses.replace(part, near=None), arrivals)
            for stream in self.later:
                for share in stream():
                    self._note(share)
                    for part in share.parts:
                        _put(part, arrivals)
            arrivals.finish()
            for tensor in self.quantized:
                tensor.put_scales()
            for fills in self.fills:
                if fills.alone or fills.name in self.written:
                    put_fills(fills, _SCRATCH_BYTES)
            if not all(m.intact for m in self.mapped):
                raise CkptdError(
                    "a version was overwritten while it was applied", hint="update() again"
                )
        except CkptdError as error:
            error.state_corrupted = True
            raise


def _put(part: _Part, arrivals: Arrivals) -> None:
    incoming, block = part.incoming, part.block
    if part.data is not None:
        arrivals.put(incoming, part.dtype, block, part.data)
        return
    if part.memory is None:
        return
    source, target, copy = part.memory, place_of(incoming), block.block
    if isinstance(target, LentMemory):
        target = target.memory
    values, of = incoming.parts[block.part]
    if part.near is not None and part.near.copy_to(target, copy):
        return
    if (
        isinstance(target, ArrayMemory)
        and part.quantized is None
        and of == 1
        and change_between(part.dtype, target, values, incoming.tensor.name) is None
    ):
        found = source.view(copy.source_start, copy.shape, copy.source_strides)
        copy_values(target.view(copy.target_start, copy.shape, copy.target_strides), found)
        return
    size = source.dtype.itemsize
    scratch = np.empty(min(copy.numel * size, _SCRATCH_BYTES + size), np.uint8)
    for cut in cut_block(copy, max(1, _SCRATCH_BYTES // size)):
        data = scratch[: cut.numel * size]
        source.take(cut.source_start, cut.shape, cut.source_strides, data)
        dtype = part.dtype
        if part.quantized is not None:
            dtype = target.dtype
            data = part.quantized.made(cut, data.view(part.dtype.numpy))
        arrivals.put(incoming, dtype, PartBlock(block.part, cut), data)


_Message = list[tuple[BlockRead, Incoming, PartBlock, DType]]


def _take_held(message: _Message, into: U8) -> None:
    """Put what own tensors hold where deltas are applied to it."""
    at = 0
    for read, incoming, part, dtype in message:
        end = at + part.block.numel * dtype.itemsize
        if read.since:
            cut = part.block
            place_of(incoming).take(cut.target_start, cut.shape, cut.target_strides, into[at:end])
        at = end


_Measured = tuple[BlockRead, QuantizedTensor, Block]


@dataclass(eq=False)
class _Share:
    """The data that came from one rank; see `StagedPull`."""

    parts: list[_Part] = field(default_factory=list)
    mapped: list[VersionMemory] = field(default_factory=list)
    report: PullReport = field(default_factory=PullReport)


def _try(part: _Part) -> None:
    """Check for overflow before anything is applied; raises `UsageError`."""
    incoming, target = part.incoming, place_of(part.incoming)
    narrow = target.dtype.name in _NARROW or target.dtype.numpy.kind in "iu"
    if not narrow or part.quantized is not None:
        return
    values, of = incoming.parts[part.block.part]
    change = change_between(part.dtype, target, values, incoming.tensor.name)
    if change is None or of > 1:
        return
    for data in _values(part):
        change.apply(np.empty(len(data), target.dtype.numpy), data)


def _values(part: _Part) -> Iterator[NDArray[np.generic]]:
    """Yield the values of a part, a bounded number at a time."""
    if part.data is not None:
        yield part.data.view(part.dtype.numpy)  # of one message
    elif part.memory is not None:
        size = part.dtype.itemsize
        for cut in cut_block(part.block.block, max(1, _SCRATCH_BYTES // size)):
            data = np.empty(cut.numel * size, np.uint8)
            part.memory.take(cut.source_start, cut.shape, cut.source_strides, data)
            yield data.view(part.dtype.numpy)


class _Giver:
    """The data that come from one rank.

    Attributes
    ----------
    compared
        Whether the server knew what changed.
    changed
        Own tensors of which more than half changed.
    touched
        Own tensors of which something changed.
    """

    # The version that the own tensors hold, perhaps: the digest of what deltas make of it shows.
    _since: int

    def __init__(
        self,
        link: SlotReader,
        incoming: list[Incoming],
        quantized: Mapping[str, QuantizedTensor],
        step: Callable[[], object],
        since: int = 0,
        passing: Passing | None = None,
    ) -> None:
        self._link = link
        self._passing = passing
        self._since = since if isinstance(link, ServerLink) else 0
        self._step = step
        self._incoming = incoming
        self._quantized = [quantized.get(i.tensor.name) for i in incoming]
        self._mapping: VersionMemory | None = None
        self.compared = False
        self.changed: set[str] = set()
        self.touched: set[str] = set()
        names = tuple(dict.fromkeys(i.segment.source for i in incoming))
        self._numbers = {n: i for i, n in enumerate(names)}
        found = link.ask(AskTensors(names), TensorPlaces).places
        if len(found) != len(names):
            raise CkptdError("protocol error: unexpected reply")
        self._places: dict[str, PublishedTensor] = dict(zip(names, found, strict=True))
        missing = [n for n, p in self._places.items() if not p.dtype]
        if missing:
            raise MismatchError(
                "the publisher's layout names tensors that its state lacks",
                kind="lay-fit",
                where=first_few(missing),
                hint="compare the layout with the state that the trainer publishes",
            )
        self._pieces: list[Sequence[PartBlock]] = [
            i.segment.pieces if q is None else _along_axes(i.segment.pieces, q)
            for i, q in zip(incoming, self._quantized, strict=True)
        ]
        self._alike: set[tuple[int, int]] = set()
        """Parts that are in the own tensors as they are sent."""
        self._casts = {
            (number, part): self._cast(number, i, part)
            for number, i in enumerate(incoming)
            for part in range(len(i.parts))
        }

    def _dtype(self, incoming: Incoming) -> DType:
        return dtype_of(self._places[incoming.segment.source].dtype)

    def _cast(self, number: int, incoming: Incoming, part: int) -> str:
        """Return the type that the server casts to, if any; raises where types do not fit."""
        source, target = self._dtype(incoming), place_of(incoming)
        values, of = incoming.parts[part]
        change = change_between(source, target, values, incoming.tensor.name)
        if (quantized := self._quantized[number]) is not None:
            quantized.check(values, of)
            return target.dtype.name
        plain = change is not None and (change.scale, change.shift) == (1.0, 0.0)
        smaller = target.dtype.itemsize < source.itemsize
        cast = target.dtype.name if plain and smaller and of == 1 else ""
        if of == 1 and (cast or change is None):
            self._alike.add((number, part))
        return cast

    def _sent(self, number: int, part: int) -> DType:
        """Return the type in which a part comes over a socket."""
        cast = self._casts[number, part]
        return dtype_of(cast) if cast else self._dtype(self._incoming[number])

    def look(self, number: int, held: HeldTensors, wait_s: float) -> None:
        """Leave out what did not change since a version that the own tensors hold."""
        found = self._link.ask(
            AskChanged(held.number, number, wait_s), ChangedBlocks, wait_s + _DIGESTS_S
        )
        if not found.known:
            return
        self.compared = True
        if len(found.bits) != len(self._numbers) or not found.block_bytes:
            raise CkptdError("protocol error: unexpected reply")
        for at, incoming in enumerate(self._incoming):
            source = incoming.segment.source
            size = self._dtype(incoming).itemsize
            bits = np.frombuffer(found.bits[self._numbers[source]], np.uint8)
            blocks = -(-self._places[source].numel * size // found.block_bytes)
            if len(bits) != -(-blocks // 8):
                raise CkptdError("protocol error: unexpected reply", where=source)
            changed = np.unpackbits(bits).view(np.bool_)
            kept = list(_touched(incoming.segment.pieces, changed, found.block_bytes, size))
            if kept:
                self.touched.add(incoming.tensor.name)
            every = sum(p.block.numel for p in incoming.segment.pieces)
            moved = sum(p.block.numel for p in kept)
            # What several ranks' values are combined to is taken whole, or not; what is quantized
            # is taken whole if any rank has changed something.
            combined = any(of > 1 for _, of in incoming.parts)
            quantized = self._quantized[at] is not None
            if combined or (quantized and kept):
                moved = every
            if moved > every // 2:
                self.changed.add(incoming.tensor.name)
            if incoming.tensor.name in held.names and not (combined or quantized):
                self._pieces[at] = kept

    def leave_out(self, names: frozenset[str]) -> None:
        """Leave out quantized tensors of which no rank has changed anything."""
        for at, quantized in enumerate(self._quantized):
            if quantized is not None and self._incoming[at].tensor.name in names:
                self._pieces[at] = ()

    def measure(self, number: int, stop: threading.Event) -> PullReport:
        """Note the magnitudes of what is quantized, unless `stop` is set."""
        if not any(self._quantized_pieces()):
            return PullReport()
        if self._link.local:
            mapped = self._mapped(number)
            for at, quantized, piece in self._quantized_pieces():
                memory = mapped.tensor(self._places[self._incoming[at].segment.source])
                for cut in cut_block(piece, max(1, _SCRATCH_BYTES // memory.dtype.itemsize)):
                    data = np.empty(cut.numel * memory.dtype.itemsize, np.uint8)
                    memory.take(cut.source_start, cut.shape, cut.source_strides, data)
                    quantized.measure(cut, data.view(memory.dtype.numpy))
                if stop.is_set():
                    raise _stopped()
                self._step()
            return PullReport()
        asked: deque[list[_Measured]] = deque()

        def requests() -> Iterator[ReadRequest]:
            for message in self._questions():
                asked.append(message)
                counts = sum(tile_counts(read.shape, read.tiles) for read, *_ in message)
                reads = tuple(read for read, *_ in message)
                yield ReadRequest(reads, np.empty(4 * counts, np.uint8))

        report, beat = PullReport(), self._beats(stop)
        with closing(self._arrivals(number, requests(), beat)) as arrivals:
            for found in arrivals:
                beat()
                if not found.good:
                    raise damaged(f"magnitudes of version {number}")
                data = found.data
                passed = len(data) if found.passed else 0
                report += PullReport(
                    bytes_needed=len(data), bytes_received=len(data), bytes_passed=passed
                )
                maxima = data.view(np.float32)
                for read, quantized, cut in asked.popleft():
                    count = tile_counts(read.shape, read.tiles)
                    quantized.note(cut, maxima[:count])
                    maxima = maxima[count:]
        return report

    def _beats(self, stop: threading.Event) -> Callable[[], None]:
        """Return what notes that the pull gets on, unless `stop` is set."""

        def beat() -> None:
            if stop.is_set():
                raise _stopped()
            self._step()

        return beat

    def _arrivals(
        self,
        number: int,
        requests: Iterable[ReadRequest],
        beat: Callable[[], object] | None,
    ) -> Generator[Arrived]:
        """Yield each buffer once it is filled; with `beat` other workers may fill it."""
        link = self._link
        if not isinstance(link, ServerLink):
            reads = link.reads(number, (r[:2] for r in requests))
            return (Arrived(d, len(d), True) for d in reads)
        if self._passing is None or beat is None:
            return link.arrivals(number, requests)
        return self._passing.arrivals(link, number, requests, beat)

    def _quantized_pieces(self) -> Iterator[tuple[int, QuantizedTensor, Block]]:
        for at, (pieces, quantized) in enumerate(zip(self._pieces, self._quantized, strict=True)):
            if quantized is not None:
                yield from ((at, quantized, piece.block) for piece in pieces)

    def _questions(self) -> Iterator[list[_Measured]]:
        """Yield what magnitudes are asked of at a time."""
        message: list[_Measured] = []
        room = _LOOKED_AT_BYTES
        for at, quantized, piece in self._quantized_pieces():
            source = self._incoming[at]
            size = self._dtype(source).itemsize
            for cut in cut_block(piece, _LOOKED_AT_BYTES // size):
                if message and (cut.numel * size > room or len(message) == _MOST_BLOCKS):
                    yield message
                    message, room = [], _LOOKED_AT_BYTES
                tensor = self._numbers[source.segment.source]
                read = BlockRead(
                    tensor,
                    cut.source_start,
                    cut.shape,
                    cut.source_strides,
                    tiles=quantized.tiles(cut),
                )
                message.append((read, quantized, cut))
                room -= cut.numel * size
        if message:
            yield message

    @cached_property
    def _bytes(self) -> int:
        """Bytes that are pulled."""
        return self._bytes_of(dict(enumerate(self._pieces)))

    def _bytes_of(self, pieces: Mapping[int, Sequence[PartBlock]]) -> int:
        return sum(
            p.block.numel * self._sent(at, p.part).itemsize
            for at, found in pieces.items()
            for p in found
        )

    @property
    def staged_bytes(self) -> int:
        """Bytes that are kept until they are applied."""
        return 0 if self._link.local else self._bytes

    def pull(self, number: int, into: U8, stop: threading.Event) -> _Share:
        """Get everything, unless `stop` is set.

        What comes over a socket is put into `into`, of `staged_bytes`.
        """
        share = self._counted()
        if self._bytes and self._link.local:
            self._map(number, share)
        elif self._bytes:
            limit = _MESSAGE_BYTES * (_DELTA_TIMES if self._since else 1)
            beat = self._beats(stop)
            for found in self._received(number, limit, into, beat):
                beat()
                for part in found.parts:
                    _try(part)  # cast by the sender are those that get smaller alone
                share.parts += found.parts
                share.report += found.report
            share.report += PullReport(staged_bytes=self._bytes)
        return share

    def stream(self, number: int, limit: int) -> Iterator[_Share]:
        """Get everything, in messages that take at most `limit` bytes together."""
        yield self._counted()
        # Of two that are under way one may have its deltas beside it.
        messages = 3 if self._since else 2
        yield from self._received(number, max(_LEAST_MESSAGE_BYTES, limit // messages))

    def _counted(self) -> _Share:
        """Return a share with nothing in it yet, and what it is going to be."""
        every = self._bytes_of({at: i.segment.pieces for at, i in enumerate(self._incoming)})
        report = PullReport(bytes_needed=self._bytes, bytes_unchanged=every - self._bytes)
        return _Share(report=report)

    def _mapped(self, number: int) -> VersionMemory:
        """Return the slot of a version, which is whole."""
        if self._mapping is None or self._mapping.number != number:
            self._mapping = self._link.map(number)
        if not self._mapping.intact:
            raise CkptdError("a version is incomplete", kind="no-version", where=f"{number}")
        return self._mapping

    def _map(self, number: int, share: _Share) -> None:
        mapped = self._mapped(number)
        share.mapped.append(mapped)
        for at, (incoming, pieces) in enumerate(zip(self._incoming, self._pieces, strict=True)):
            place, quantized = self._places[incoming.segment.source], self._quantized[at]
            memory = mapped.tensor(place)
            size = memory.dtype.itemsize
            # As they are: what is cast, quantized or combined is made by this host.
            plain = [(at, p.part) in self._alike and not self._casts[at, p.part] for p in pieces]
            reads = [p.block.source_span for p, x in zip(pieces, plain, strict=True) if x]
            spans = [(first * size, end * size) for first, end in reads]
            near = mapped.near(place, spans) if spans else None
            parts = [
                _Part(
                    incoming,
                    piece,
                    memory.dtype,
                    memory=memory,
                    near=near if as_is else None,
                    mapped=mapped,
                    quantized=quantized,
                )
                for piece, as_is in zip(pieces, plain, strict=True)
            ]
            for part in parts:
                _try(part)
            share.parts += parts
        share.report += PullReport(bytes_mapped=self._bytes)

    def _received(
        self,
        number: int,
        limit: int,
        into: U8 | None = None,
        beat: Callable[[], object] | None = None,
    ) -> Iterator[_Share]:
        def buffers() -> Iterator[tuple[_Message, U8]]:
            at = 0
            for message, nbytes in self._messages(limit):
                yield (
                    message,
                    np.empty(nbytes, np.uint8) if into is None else into[at : at + nbytes],
                )
                at += nbytes

        again: list[tuple[_Message, U8]] = []
        yield from self._filled(number, buffers(), again, beat)
        for message, _ in again:
            if any(read.since for read, *_ in message):
                _log.warning(
                    "tensors hold other values than they got, and are pulled whole: %s, ...",
                    message[0][1].tensor.name,
                )
            message[:] = [
                (msgspec.structs.replace(read, since=0), source, block, dtype)
                for read, source, block, dtype in message
            ]
        yield from self._filled(number, again)

    def _filled(
        self,
        number: int,
        buffers: Iterable[tuple[_Message, U8]],
        again: list[tuple[_Message, U8]] | None = None,
        beat: Callable[[], object] | None = None,
    ) -> Iterator[_Share]:
        """Yield what is in buffers that are filled; those with other values go to `again`.

        Without that these are an error. For `beat` see `_arrivals`.
        """
        asked: deque[_Message] = deque()

        def requests() -> Iterator[ReadRequest]:
            for message, data in buffers:
                asked.append(message)
                blocks = tuple(read for read, *_ in message)
                yield ReadRequest(blocks, data, partial(_take_held, message, data))

        with closing(self._arrivals(number, requests(), beat)) as arrivals:
            # It has the link's lock, also where an error keeps this frame.
            for came in arrivals:
                self._step()
                message, data = asked.popleft(), came.data
                passed = came.nbytes if came.passed else 0
                share = _Share(report=PullReport(bytes_received=came.nbytes, bytes_passed=passed))
                if not came.good and again is None:
                    raise damaged(message[0][1].tensor.name)
                if not came.good and again is not None:
                    again.append((message, data))
                    yield share
                    continue
                at = 0
                for _, incoming, block, dtype in message:
                    end = at + block.block.numel * dtype.itemsize
                    share.parts.append(_Part(incoming, block, dtype, data=data[at:end]))
                    at = end
                yield share

    def _messages(self, limit: int) -> Iterator[tuple[_Message, int]]:
        """Yield what is asked for at a time, and how many bytes it is."""
        message: _Message = []
        room = limit
        for number, incoming in enumerate(self._incoming):
            tensor = self._numbers[incoming.segment.source]
            for piece in self._pieces[number]:
                dtype = self._sent(number, piece.part)
                wide = max(dtype.itemsize, self._dtype(incoming).itemsize)
                for cut in cut_block(piece.block, max(1, limit // wide)):
                    nbytes = cut.numel * dtype.itemsize
                    if message and (nbytes > room or len(message) == _MOST_BLOCKS):
                        yield message, limit - room
                        message, room = [], limit
                    read = BlockRead(
                        tensor,
                        cut.source_start,
                        cut.shape,
                        cut.source_strides,
                        self._casts[number, piece.part],
                        since=self._since if (number, piece.part) in self._alike else 0,
                    )
                    if (quantized := self._quantized[number]) is not None:
                        read = msgspec.structs.replace(
                            read, tiles=quantized.tiles(cut), scales=quantized.scales(cut)
                        )
                    message.append((read, incoming, PartBlock(piece.part, cut), dtype))
                    room -= nbytes
        if message:
            yield message, limit - room


def _stopped() -> CkptdError:
    return TransientStoreError("another rank's part did not arrive", kind="link-lost")


def _along_axes(pieces: Sequence[PartBlock], quantized: QuantizedTensor) -> list[PartBlock]:
    return [PartBlock(p.part, cut) for p in pieces for cut in quantized.cuts(p.block)]


def _touched(
    pieces: Sequence[PartBlock], changed: NDArray[np.bool_], block_bytes: int, size: int
) -> Iterator[PartBlock]:
    """Yield what of some copies reads blocks that changed."""
    for piece in pieces:
        blocks = _of_span(piece.block, changed, block_bytes, size)
        if not len(blocks) or blocks.all():
            yield piece
        elif blocks.any():
            for cut in cut_block(piece.block, max(1, block_bytes // size)):
                if _of_span(cut, changed, block_bytes, size).any():
                    yield PartBlock(piece.part, cut)


def _of_span(
    block: Block, changed: NDArray[np.bool_], block_bytes: int, size: int
) -> NDArray[np.bool_]:
    lo, hi = (n * size for n in block.source_span)
    return changed[lo // block_bytes : -(-hi // block_bytes)]


def cut_block(block: Block, most: int) -> Iterator[Block]:
    """Cut a copy into copies of at most `most` elements, so that each reads few places."""
    if block.numel <= most:
        yield block
        return
    long = [d for d, n in enumerate(block.shape) if n > 1]
    dim = max(long, key=lambda d: block.source_strides[d])
    inner = block.numel // block.shape[dim]
    step = max(1, most // inner)
    for at in range(0, block.shape[dim], step):
        shape = list(block.shape)
        shape[dim] = min(step, block.shape[dim] - at)
        part = Block(
            tuple(shape),
            block.source_start + at * block.source_strides[dim],
            block.source_strides,
            block.target_start + at * block.target_strides[dim],
            block.target_strides,
        )
        yield from cut_block(part, most)
