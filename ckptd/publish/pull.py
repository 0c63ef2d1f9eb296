"""What one worker takes of a publisher: planned by the worker alone, pulled, and then applied.

The worker knows both layouts, so it knows of every own tensor which strided parts of which rank's
tensors it is made of. It asks for just these parts. Where a server is on the same host the worker
reads them out of the slot; elsewhere the server gathers and sends them, cast already where the
worker's type is smaller. Nothing is written before everything is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.layout.block import Block
from ckptd.layout.lay.agree import agreed
from ckptd.layout.lay.bind import bind_sizes
from ckptd.layout.lay.copies import Composition
from ckptd.layout.lay.live import Transfers
from ckptd.layout.lay.resolve import Bound
from ckptd.live.memory import ArrayMemory, TensorMemory
from ckptd.live.move import Arrivals, change_between, place_of, put_fills
from ckptd.live.plan import Incoming, MovePlan, PartBlock, Roles, make_plan
from ckptd.publish.link import MappedVersion, ServerLink
from ckptd.publish.messages import (
    AskTensors,
    BlockRead,
    PublishedAbout,
    PublishedTensor,
    TensorPlaces,
)
from ckptd.reshard.layouts import read_text
from ckptd.types import DType, dtype_of

__all__ = ["PullPlan", "PullReport", "StagedPull", "cut_block"]

U8 = NDArray[np.uint8]

_MESSAGE_BYTES = 16 << 20
_MOST_BLOCKS = 4096
_SCRATCH_BYTES = 4 << 20


@dataclass
class PullReport:
    """What one worker did.

    Attributes
    ----------
    bytes_needed
        Of the parts of published tensors that the own tensors are made of, in the smaller of both
        types.
    bytes_received
        Over sockets.
    bytes_mapped
        Read out of slots of this host.
    staged_bytes
        Memory that the pull took besides the tensors.
    """

    bytes_needed: int = 0
    bytes_received: int = 0
    bytes_mapped: int = 0
    staged_bytes: int = 0


@dataclass(frozen=True, eq=False)
class _Part:
    """A block of a tensor of a rank, on its way into an own tensor.

    Attributes
    ----------
    dtype
        In which it is there.
    memory
        Where it is, with the block's own places; else `data` is the block, row-major.
    """

    incoming: Incoming
    block: PartBlock
    dtype: DType
    memory: ArrayMemory | None = None
    data: U8 | None = None


class PullPlan:
    """The parts that one worker needs, by the rank that has them.

    Parameters
    ----------
    about
        What is published.
    target
        The worker's layout.
    rank, world
        Of this worker in its layout, and the layout's ranks.
    targets
        Memory of the worker's tensors, by their names in its program.

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
        world: int,
        targets: Mapping[str, TensorMemory],
    ) -> None:
        self.epoch = about.epoch
        source = bind_sizes(read_text(about.layout, "the publisher").resolve(), about.sizes)
        mesh = source.layout.mesh
        if (1 if mesh is None else mesh.world) != about.world:
            raise MismatchError(
                "the publisher's layout is for another number of ranks",
                kind="lay-fit",
                where=source.layout.name,
                wanted=f"{about.world} ranks, as publish",
                found=f"{1 if mesh is None else mesh.world} ranks",
            )
        self.transfers = Transfers(Composition(*agreed(source, target)))
        roles = Roles(tuple(range(about.world)), tuple(range(about.world, about.world + world)))
        self._plan: MovePlan = make_plan(
            self.transfers,
            roles,
            about.world + rank,
            states=frozenset({""}),
            sources={},
            targets=targets,
        )
        for incoming in self._plan.incoming.values():
            for found in incoming:
                place_of(found)

    @property
    def givers(self) -> list[int]:
        """Ranks of the publisher that something is taken of."""
        return sorted(self._plan.incoming)

    def stage(
        self, number: int, links: Mapping[int, ServerLink], budget_bytes: int | None
    ) -> StagedPull:
        """Pull a version, which is held, up to the last byte; writes nothing.

        Parameters
        ----------
        links
            To the server of each giver.
        budget_bytes
            Most memory for what comes over sockets; None: as much as it takes.

        Raises
        ------
        CkptdError
            A server is gone, or does not have what is needed.
        UsageError
            kind ``budget``.
        """
        staged = StagedPull(self._plan)
        givers = [_Giver(links[g], self._plan.incoming[g]) for g in self.givers]
        needed = sum(g.staged_bytes for g in givers)
        if budget_bytes is not None and needed > budget_bytes:
            raise UsageError(
                "what is pulled over sockets does not fit the budget, and is applied whole or "
                "not at all",
                kind="budget",
                wanted=f"budget_bytes of at least {needed}",
                found=f"{budget_bytes} bytes",
            )
        for giver in givers:
            giver.pull(number, staged)
        return staged


@dataclass(eq=False)
class StagedPull:
    """A version that is all there; `apply` writes it.

    Attributes
    ----------
    parts
        What is written.
    mapped
        Slots that parts lie in.
    """

    plan: MovePlan
    parts: list[_Part] = field(default_factory=list)
    mapped: list[MappedVersion] = field(default_factory=list)
    report: PullReport = field(default_factory=PullReport)

    def apply(self) -> None:
        """Write the tensors.

        Raises
        ------
        CkptdError
            `poisoned`: the tensors are of no version.
        """
        arrivals = Arrivals()
        try:
            for part in self.parts:
                _put(part, arrivals)
            arrivals.finish()
            filled = {p.incoming.tensor.name for p in self.parts}
            for fills in self.plan.fills:
                if fills.alone or fills.name in filled:
                    put_fills(fills, _SCRATCH_BYTES)
            if not all(m.intact for m in self.mapped):
                raise CkptdError(
                    "a version was overwritten while it was applied",
                    kind="transport",
                    hint="update() again",
                )
        except CkptdError as error:
            error.poisoned = True
            raise


def _put(part: _Part, arrivals: Arrivals) -> None:
    incoming, block = part.incoming, part.block
    if part.data is not None:
        arrivals.put(incoming, part.dtype, block, part.data)
        return
    if part.memory is None:
        return
    source, target, copy = part.memory, place_of(incoming), block.block
    values, of = incoming.parts[block.part]
    if (
        isinstance(target, ArrayMemory)
        and of == 1
        and change_between(part.dtype, target, values, incoming.tensor.name) is None
    ):
        found = source.view(copy.source_start, copy.shape, copy.source_strides)
        np.copyto(target.view(copy.target_start, copy.shape, copy.target_strides), found)
        return
    size = source.dtype.itemsize
    scratch = np.empty(min(copy.numel * size, _SCRATCH_BYTES + size), np.uint8)
    for cut in cut_block(copy, max(1, _SCRATCH_BYTES // size)):
        data = scratch[: cut.numel * size]
        source.take(cut.source_start, cut.shape, cut.source_strides, data)
        arrivals.put(incoming, part.dtype, PartBlock(block.part, cut), data)


class _Giver:
    """What comes from one rank."""

    def __init__(self, link: ServerLink, incoming: list[Incoming]) -> None:
        self._link = link
        self._incoming = incoming
        names = tuple(dict.fromkeys(i.segment.source for i in incoming))
        self._numbers = {n: i for i, n in enumerate(names)}
        found = link.ask(AskTensors(names), TensorPlaces).places
        if len(found) != len(names):
            raise CkptdError("not an answer to what was asked", kind="transport")
        self._places: dict[str, PublishedTensor] = dict(zip(names, found, strict=True))
        missing = [n for n, p in self._places.items() if not p.dtype]
        if missing:
            raise MismatchError(
                "the publisher's layout has tensors that its state has not",
                kind="lay-fit",
                where=", ".join(missing[:8]) + (" ..." if len(missing) > 8 else ""),
                hint="see what the trainer publishes",
            )
        self._casts = {
            (number, part): self._cast(i, part)
            for number, i in enumerate(incoming)
            for part in range(len(i.parts))
        }

    def _dtype(self, incoming: Incoming) -> DType:
        return dtype_of(self._places[incoming.segment.source].dtype)

    def _cast(self, incoming: Incoming, part: int) -> str:
        """Return the type that the server casts to, if any; raises where types do not fit."""
        source, target = self._dtype(incoming), place_of(incoming)
        values, of = incoming.parts[part]
        change = change_between(source, target, values, incoming.tensor.name)
        plain = change is not None and (change.scale, change.shift) == (1.0, 0.0)
        smaller = target.dtype.itemsize < source.itemsize
        return target.dtype.name if plain and smaller and of == 1 else ""

    @cached_property
    def _bytes(self) -> int:
        return sum(
            p.block.numel * self._sent(number, p.part).itemsize
            for number, i in enumerate(self._incoming)
            for p in i.segment.pieces
        )

    def _sent(self, number: int, part: int) -> DType:
        """Return the type in which a part comes over a socket."""
        cast = self._casts[number, part]
        return dtype_of(cast) if cast else self._dtype(self._incoming[number])

    @property
    def staged_bytes(self) -> int:
        """Bytes that are kept until they are applied."""
        return 0 if self._link.local else self._bytes

    def pull(self, number: int, staged: StagedPull) -> None:
        """Get everything."""
        staged.report.bytes_needed += self._bytes
        if self._link.local:
            self._map(number, staged)
        else:
            self._receive(number, staged)

    def _map(self, number: int, staged: StagedPull) -> None:
        mapped = self._link.map(number)
        if not mapped.intact:
            raise CkptdError("a version is not whole", kind="no-version", where=f"{number}")
        staged.mapped.append(mapped)
        for incoming in self._incoming:
            place, dtype = self._places[incoming.segment.source], self._dtype(incoming)
            end = place.start + place.numel * dtype.itemsize
            if end > len(mapped.data):
                raise CkptdError("a tensor is not inside its slot", kind="transport")
            memory = ArrayMemory(mapped.data[place.start : end], dtype)
            for piece in incoming.segment.pieces:
                staged.parts.append(_Part(incoming, piece, dtype, memory=memory))
        staged.report.bytes_mapped += self._bytes

    def _receive(self, number: int, staged: StagedPull) -> None:
        for message, nbytes in self._messages():
            data = np.empty(nbytes, np.uint8)
            self._link.read(number, tuple(read for read, *_ in message), data)
            staged.report.staged_bytes += nbytes
            staged.report.bytes_received += nbytes
            at = 0
            for _, incoming, block, dtype in message:
                end = at + block.block.numel * dtype.itemsize
                staged.parts.append(_Part(incoming, block, dtype, data=data[at:end]))
                at = end

    def _messages(self) -> Iterator[tuple[list[tuple[BlockRead, Incoming, PartBlock, DType]], int]]:
        """Yield what is asked for at a time, and how many bytes it is."""
        message: list[tuple[BlockRead, Incoming, PartBlock, DType]] = []
        room = _MESSAGE_BYTES
        for number, incoming in enumerate(self._incoming):
            tensor = self._numbers[incoming.segment.source]
            for piece in incoming.segment.pieces:
                dtype = self._sent(number, piece.part)
                wide = max(dtype.itemsize, self._dtype(incoming).itemsize)
                for cut in cut_block(piece.block, _MESSAGE_BYTES // wide):
                    nbytes = cut.numel * dtype.itemsize
                    if message and (nbytes > room or len(message) == _MOST_BLOCKS):
                        yield message, _MESSAGE_BYTES - room
                        message, room = [], _MESSAGE_BYTES
                    cast = self._casts[number, piece.part]
                    read = BlockRead(tensor, cut.source_start, cut.shape, cut.source_strides, cast)
                    message.append((read, incoming, PartBlock(piece.part, cut), dtype))
                    room -= nbytes
        if message:
            yield message, _MESSAGE_BYTES - room


def cut_block(block: Block, most: int) -> Iterator[Block]:
    """Cut a copy into copies of at most `most` elements."""
    if block.numel <= most:
        yield block
        return
    dim = next(d for d, n in enumerate(block.shape) if n > 1)
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
