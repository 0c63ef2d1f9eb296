"""Messages of publishing, and their limits: rank and server, worker and server, worker and worker.

In it: protocol names; how long a server waits for its address.

What workers send is bounded before anything is made of it: a worker has proved that it knows the
job's secret, and may still have another version of the program.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.base.net.handed import Proof
from ckptd.decoding import json_decoder, msgpack_decoder
from ckptd.errors import UsageError

PURPOSE = "publish 4"
"""Of connections; its number rises with messages that older programs do not know."""
PASSING = "pass on 1"
"""Of connections of workers to workers."""
MOST_BODY = 16 << 20
"""Largest message in bytes: the names of a large model's tensors."""
MOST_FAILED = 16
"""Workers that one worker tries to take of before it asks the server."""
MOST_READ_BYTES = 64 << 20
"""Most raw bytes of one answer."""

_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Name = Annotated[str, Meta(max_length=4096)]
_Text = Annotated[str, Meta(max_length=4096)]
_Dims = Annotated[tuple[_Number, ...], Meta(max_length=64)]


class ServerEntry(msgspec.Struct, frozen=True):
    """Where the server of a rank is reached.

    Attributes
    ----------
    host
        Tells its host from all others; on it the Unix socket is tried first.
    address
        ``HOST:PORT``.
    socket
        Path of the Unix socket; empty for none.
    epoch
        Which publisher it is of.
    """

    host: _Text
    address: _Text
    socket: _Text
    epoch: Annotated[str, Meta(max_length=64)]


class PublishedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the slots of a rank."""

    name: _Name
    dtype: Annotated[str, Meta(max_length=64)]
    start: _Number
    numel: _Number


# --- a rank and its server ------------------------------------------------------------------------


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what a rank sends to its server."""


class Opening(_Order, frozen=True, tag="opening"):
    """The first message: the sender, and its address.

    Attributes
    ----------
    bind
        Address of the interface; `port` 0 takes any that is free.
    folder
        Of the Unix socket; empty for none.
    to
        URL of a store that versions are written to; empty for none.
    anchors
        See `ckptd.publish.stored.StoreDesk`: every, and keep.
    """

    epoch: str
    rank: int
    world: int
    proof: Proof
    bind: str
    port: int
    folder: str
    slots: int
    lease_s: float
    linger_s: float
    to: str = ""
    anchors: tuple[int, int] = (0, 0)


def most_listen_s(opening: Opening) -> float:
    """Return for how long a server waits for the address that an earlier one is about to leave."""
    return opening.linger_s + opening.lease_s


class SetLeader(_Order, frozen=True, tag="leader"):
    """Where rank 0's server is, to all others."""

    entry: ServerEntry


class SetDirectory(_Order, frozen=True, tag="directory"):
    """To rank 0's server: the layout as in `PublishedAbout`, and where the servers are."""

    layout: str
    sizes: dict[str, int]
    globs: tuple[tuple[int, tuple[str, ...], dict[str, int]], ...]
    entries: tuple[ServerEntry, ...]


class SetTensors(_Order, frozen=True, tag="tensors"):
    """The contents of each slot, and most memory for what changed from version to version."""

    tensors: tuple[PublishedTensor, ...]
    delta_bytes: int = 0


class SlotMemory(_Order, frozen=True, tag="slot"):
    """A slot's memory, whose descriptor comes beside this; an older one of this number goes."""

    slot: int
    nbytes: int


class AskSlot(_Order, frozen=True, tag="place"):
    """To rank 0's server: where does a version go? It answers `SlotAnswer`."""

    number: int
    step: int


class VersionSealed(_Order, frozen=True, tag="sealed"):
    """The share of this rank in a version is whole."""

    number: int
    slot: int


class VersionWhole(_Order, frozen=True, tag="whole"):
    """Every rank has sealed a version; passed on to rank 0's server."""

    number: int


class VersionDropped(_Order, frozen=True, tag="dropped"):
    """A version will never be whole; passed on to rank 0's server."""

    number: int


class ServerStop(_Order, frozen=True, tag="stop"):
    """The publisher is closed: serve what is held, and end."""


ORDER = (
    Opening
    | SetLeader
    | SetDirectory
    | SetTensors
    | SlotMemory
    | AskSlot
    | VersionSealed
    | VersionWhole
    | VersionDropped
    | ServerStop
)


class _Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what a server sends to its rank."""


class ServerReady(_Reply, frozen=True, tag="ready"):
    """It listens; or why it does not, as `CkptdError.to_dict` has it."""

    entry: ServerEntry | None
    error: dict[str, str | None] | None = None


class SlotAnswer(_Reply, frozen=True, tag="placed"):
    """See `ckptd.publish.versions.SlotChoice`."""

    number: int
    slot: int
    fresh: bool
    reason: str


class VersionKnown(_Reply, frozen=True, tag="known"):
    """Answer to `VersionWhole`: the leader gives it to workers from now on; or does not answer."""

    number: int
    good: bool


class VersionSettled(_Reply, frozen=True, tag="settled"):
    """The leader to rank 0: a version is whole, or will never be."""

    number: int
    whole: bool


class PlaceLost(_Reply, frozen=True, tag="lost"):
    """To rank 0: another publisher has the store; an error as `CkptdError.to_dict` has it."""

    error: dict[str, str | None]


REPLY = ServerReady | SlotAnswer | VersionKnown | VersionSettled | PlaceLost


# --- workers and servers --------------------------------------------------------------------------


class _Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what is asked of a server."""


class AskAbout(_Question, frozen=True, tag="about"):
    """Of the leader: what is published, and how it is cut. Answered by `PublishedAbout`."""


class AskWhere(_Question, frozen=True, tag="where"):
    """Of the leader: where the servers of some ranks are. Answered by `ServerList`."""

    ranks: Annotated[tuple[int, ...], Meta(max_length=65536)]


class AskNewest(_Question, frozen=True, tag="newest"):
    """Of the leader: what is newer than a version. Answered by `Newest`, after `wait_s` at most."""

    than: _Number
    wait_s: Annotated[float, Meta(ge=0, le=60)]


class AskHold(_Question, frozen=True, tag="hold"):
    """Of the leader: keep a version, until `AskRelease`, the end of the connection or of its lease.

    Asked once more, it renews the lease. Answered by `HoldAnswer`.
    """

    number: _Number


class AskRelease(_Question, frozen=True, tag="release"):
    """Of the leader: all that this connection holds may go. Answered by `HoldAnswer`."""


class AskCommit(_Question, frozen=True, tag="commit"):
    """A rank's server to the leader: every rank has sealed a version."""

    number: _Number


class AskDrop(_Question, frozen=True, tag="drop"):
    """A rank's server to the leader: a version will not be whole."""

    number: _Number


class StoredShare(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the objects that have a rank's share in a version, 0 where there is none.

    With digests of the digests of its blocks, and of the object that has its tensors.
    """

    full: _Number
    delta: _Number
    digests: bytes
    described: bytes


class AskStore(_Question, frozen=True, tag="store"):
    """A rank's server to the leader: what is to be written above a version. By `StoreOrder`."""

    than: _Number
    wait_s: Annotated[float, Meta(ge=0, le=60)]


class AskStored(_Question, frozen=True, tag="stored"):
    """A rank's server to the leader: its share is written; or it could not be."""

    rank: _Number
    number: _Number
    share: StoredShare | None


class AskTensors(_Question, frozen=True, tag="tensors"):
    """Where some tensors lie; later questions of this connection name them by their places here.

    Answered by `TensorPlaces`.
    """

    names: Annotated[tuple[_Name, ...], Meta(max_length=1 << 17)]


class AskMap(_Question, frozen=True, tag="map"):
    """The memory of a version (Unix socket): answered by `Mapped` and a descriptor beside it."""

    number: _Number


class AskChanged(_Question, frozen=True, tag="changed"):
    """Ask which blocks of the tensors that `AskTensors` named differ in two versions.

    Answered by `ChangedBlocks`.
    """

    since: _Number
    number: _Number
    wait_s: Annotated[float, Meta(ge=0, le=60)]


class TileSteps(msgspec.Struct, frozen=True, array_like=True):
    """How a dimension of a part runs through tiles that have one scale each.

    Position p of it is in tile ``(first + p * step) // size``.
    """

    first: Annotated[int, Meta(ge=0, lt=1 << 31)]
    step: Annotated[int, Meta(ge=0, lt=1 << 31)]
    size: Annotated[int, Meta(ge=1, lt=1 << 31)]


class BlockRead(msgspec.Struct, frozen=True, array_like=True):
    """A strided part of a tensor, in elements.

    Attributes
    ----------
    cast
        The type in which it is sent; empty for its own.
    tiles
        For each dimension; without them the values are sent as they are. With them they are
        quantized to `cast`; without a `cast` just the largest magnitude of each tile is sent, in
        float32 and row-major.
    scales
        Of the tiles, row-major, as bytes of float32, where there is a `cast`.
    since
        The version that the worker holds in this place, in the type that is sent: what changed
        since then is enough. 0: the values are sent.
    """

    tensor: _Number
    start: _Number
    shape: _Dims
    strides: _Dims
    cast: Annotated[str, Meta(max_length=64)] = ""
    tiles: Annotated[tuple[TileSteps, ...], Meta(max_length=64)] = ()
    scales: bytes = b""
    since: _Number = 0


class AskRead(_Question, frozen=True, tag="read"):
    """Parts of tensors, one after the other. Answered by `ReadBytes` with the bytes behind it."""

    number: _Number
    blocks: Annotated[tuple[BlockRead, ...], Meta(max_length=1 << 16)]


_Sum = Annotated[bytes, Meta(min_length=32, max_length=32)]


class AskSource(_Question, frozen=True, tag="source"):
    """Of whom to take the answers to some questions in place of this server; by `ServerList`.

    Attributes
    ----------
    key
        Of the questions, see `ckptd.publish.passing`: this connection asks them if no other
        worker has the answers.
    entry
        Where the worker is going to pass them on.
    failed
        Addresses of workers that did not give them.
    """

    key: _Sum
    entry: ServerEntry
    failed: Annotated[tuple[_Text, ...], Meta(max_length=MOST_FAILED)] = ()


class AskProved(_Question, frozen=True, tag="proved"):
    """Whether the server has given answers with this sum to some questions. By `HoldAnswer`."""

    key: _Sum
    sum: _Sum


QUESTION = msgpack_decoder(
    AskAbout
    | AskWhere
    | AskNewest
    | AskHold
    | AskRelease
    | AskCommit
    | AskDrop
    | AskStore
    | AskStored
    | AskTensors
    | AskMap
    | AskChanged
    | AskRead
    | AskSource
    | AskProved
)


class AskPassed(_Question, frozen=True, tag="passed"):
    """Of a worker: answers that it passes on, after `wait_s` at most. Answered by `Passed`.

    Lower places have their turn before others.
    """

    name: _Sum
    wait_s: Annotated[float, Meta(ge=0, le=60)]
    place: _Number = 0


class AskPart(_Question, frozen=True, tag="part"):
    """Of a worker: one of the answers that it offered. By `ReadBytes` and the bytes."""

    at: _Number


PASSED_QUESTION = msgpack_decoder(AskPassed | AskPart)


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what a server answers."""


_Globs = tuple[
    _Number,
    Annotated[tuple[_Name, ...], Meta(max_length=64)],
    Annotated[dict[_Name, _Number], Meta(max_length=64)],
]


class PublishedAbout(_Answer, frozen=True, tag="about"):
    """The publisher: its epoch, its ranks, its layout as a program, and the length of each axis.

    `globs` has what those in names of its rules represent (`ckptd.lay.bind.FilledGlobs`).
    """

    epoch: str
    world: Annotated[int, Meta(ge=1, lt=1 << 24)]
    layout: Annotated[str, Meta(max_length=1 << 20)]
    sizes: Annotated[dict[_Name, _Number], Meta(max_length=4096)]
    globs: Annotated[tuple[_Globs, ...], Meta(max_length=1 << 17)] = ()


class ServerList(_Answer, frozen=True, tag="found"):
    """Where servers are, in the order of the question; see also `ckptd.publish.passing.Sources`."""

    entries: tuple[ServerEntry, ...]
    place: _Number = 0


class Newest(_Answer, frozen=True, tag="newest"):
    """Number, step and age of a version; number 0: there is none."""

    number: _Number
    step: int
    age_s: float = 0.0


class HoldAnswer(_Answer, frozen=True, tag="held"):
    """Whether it is done, and how long the lease of what is held is, in seconds."""

    good: bool
    lease_s: float = 0.0


class StoreOrder(_Answer, frozen=True, tag="order"):
    """A version to be written, number 0: none yet; since which one, and whether all of it."""

    number: _Number
    base: _Number = 0
    full: bool = False
    generation: _Number = 0


class TensorPlaces(_Answer, frozen=True, tag="places"):
    """Type, first byte and elements of each tensor asked for; an empty type where there is none."""

    places: tuple[PublishedTensor, ...]


class Mapped(_Answer, frozen=True, tag="mapped"):
    """The memory beside this has a control page and so many bytes."""

    nbytes: _Number


class ChangedBlocks(_Answer, frozen=True, tag="changes"):
    """For each tensor a bit a block of `block_bytes`; not `known`: all may differ.

    The first bit is the highest of the first byte.
    """

    known: bool
    block_bytes: _Number
    bits: tuple[bytes, ...]


class ReadBytes(_Answer, frozen=True, tag="read"):
    """The bytes that were asked for follow; their digest is of `ckptd.publish.blocks.outgoing`.

    Attributes
    ----------
    sizes
        Bytes of the deltas that follow in place of the values, see
        `ckptd.publish.blocks.incoming`; empty: the values do.
    """

    digest: bytes
    sizes: Annotated[tuple[_Number, ...], Meta(max_length=1 << 17)] = ()


class Passed(_Answer, frozen=True, tag="offered"):
    """The answers that a worker offers.

    Attributes
    ----------
    there
        Whether it has all answers, or is about to have them.
    progress
        Rises while it gets on.
    sums
        Of the answers, which this connection may ask for now; empty: not yet.
    """

    there: bool
    progress: _Number = 0
    sums: Annotated[tuple[_Sum, ...], Meta(max_length=1 << 18)] = ()


class PublishRefusal(_Answer, frozen=True, tag="refused"):
    """It cannot be done: an error as `CkptdError.to_dict` has it."""

    error: dict[str, str | None]


ANSWER = msgpack_decoder(
    PublishedAbout
    | ServerList
    | Newest
    | HoldAnswer
    | StoreOrder
    | TensorPlaces
    | Mapped
    | ChangedBlocks
    | ReadBytes
    | Passed
    | PublishRefusal
)


def check_about(about: PublishedAbout) -> None:
    """Raise `UsageError` (``lay-use``) for what workers would not take."""
    raw = msgspec.msgpack.encode(about)
    problem = f"{len(raw)} bytes" if len(raw) > MOST_BODY else ""
    try:
        ANSWER.decode(raw)
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem:
        raise UsageError(
            "a layout is too large to be published",
            kind="lay-use",
            wanted=f"a program with fewer names, at most {MOST_BODY} bytes",
            found=problem,
            hint="rules with indexes in place of globs",
        )


DIRECTORY = json_decoder(ServerEntry)
"""Of the file through which workers find rank 0's server."""
