"""Messages of trainer, writing process and agent; parts of ranks; protocol number.

In it: up to which size objects stand in the manifest; how long an answer may take.

Everything is msgpack of typed structs: nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from ckptd.base.digest import DIGEST_BYTES, digest
from ckptd.base.runtime.channel import SocketChannel
from ckptd.checkpoint.format.manifest import FileEntry, ObjectEntry, OfAttempt
from ckptd.checkpoint.root.policy import Keep
from ckptd.checkpoint.save.peers import MOST_TOLD, KnownNode
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.checkpoint.save.tiers import TierSpec
from ckptd.decoding import Decoder, msgpack_decoder
from ckptd.errors import CorruptError, DeadlineError, ProcessError
from ckptd.events.event import AnyEvent
from ckptd.store import StoreSpec

T = TypeVar("T")


ANSWER_S = 10.0


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """First message of a visitor: asks what the agent holds."""


class AskEnd(msgspec.Struct, frozen=True, tag=True):
    """First message of a visitor: asks the agent to end when its trainers have ended.

    Attributes
    ----------
    now
        Or without waiting for them: they find no agent at their next save, and start another.
    """

    now: bool = False


class KeptSnapshot(OfAttempt, frozen=True):
    """An attempt of which shares lie in the memory of an agent.

    Attributes
    ----------
    ranks, guests
        Whose shares: ranks of this node, and of the node whose peer tier this memory is.
    world
        Ranks of the job that saved it; 0 before that is known.
    bytes
        Of all that lies here.
    whole
        All ranks' shares lie here.
    complete
        Near tiers of which the agent knows that every rank's share is there, on whichever node.
    """

    ranks: tuple[int, ...]
    guests: tuple[int, ...]
    world: int
    bytes: int
    whole: bool
    complete: tuple[str, ...]


class AgentContents(msgspec.Struct, frozen=True):
    """The answer to a visitor.

    Attributes
    ----------
    job, node, socket, pid
        Whose agent it is, and where.
    ranks
        Of the trainers that are connected.
    snapshots
        In memory, oldest first.
    folder
        URL of the local tier; None without one.
    ends_in_s
        When it ends if no trainer comes, in seconds; None while trainers are connected, and for one
        that stays until a signal.
    ending
        It was asked to end when its trainers have ended.
    """

    job: str
    node: str
    socket: str
    pid: int
    ranks: tuple[int, ...]
    snapshots: tuple[KeptSnapshot, ...]
    folder: str | None
    ends_in_s: float | None
    ending: bool


def visit(
    sock: socket.socket, message: AskStatus | AskEnd, timeout_s: float = ANSWER_S
) -> AgentContents:
    """Ask an agent over a fresh connection, which is closed afterwards.

    Raises
    ------
    ProcessError
        It went away, or is of another version.
    DeadlineError
        It does not answer within `timeout_s`.
    """
    channel = SocketChannel(sock, AgentContents)
    try:
        channel.send(message)
        item = channel.receive(timeout_s)
    except (EOFError, msgspec.MsgspecError) as error:
        raise ProcessError("the agent closed the connection", found=str(error)) from error
    finally:
        channel.close()
    if item is None:
        raise DeadlineError("the agent does not answer", wanted=f"within {timeout_s:.0f} s")
    status: AgentContents = item[0]
    return status


INLINE_OBJECT_BYTES = 16 << 10
"""Replicated objects up to this size stand in the manifest; larger ones get a chunk."""


class Extra(msgspec.Struct, frozen=True):
    """A chunk whose size only its rank knows: an encoded object.

    `on_change` is the declared behaviour of a per-rank value; empty for a replicated object that
    is too large for the manifest. `shares` is what `codec.shares` says of it.
    """

    name: str
    nbytes: int
    on_change: str = ""
    shares: bool = False


PROTOCOL = 4
"""Number of the messages between a trainer and the process that writes for it.

Raise it when a process of the version before would misread one. A node's agent outlives trainers,
so a trainer may meet one of another version: both sides refuse another number. Versions that send
none count as 1.
"""


def check_protocol(protocol: int, sender: str) -> None:
    """Check the number that the other side sent.

    Raises
    ------
    ProcessError
        It is another one.
    """
    if protocol != PROTOCOL:
        raise ProcessError(
            f"{sender} has another version of ckptd",
            wanted=f"protocol {PROTOCOL}",
            found=f"protocol {protocol}",
            hint="stop the other agent: ckptd agent stop --now",
        )


class WriterHello(msgspec.Struct, frozen=True, tag=True):
    """First message: where to write, and for which rank.

    Attributes
    ----------
    tiers
        The near tiers, nearest first; only a node's agent keeps any.
    agent_ttl_s
        How long the agent keeps snapshots for the next life when this trainer dies, in seconds.
    bind
        Address on which the agents of other nodes reach this one's; empty: none does.
    key
        What the agent is to ask of other nodes, hexadecimal, derived from the job's secret; empty
        where the job has none: the agent then draws one, which is in `WriterReady`.
    """

    store: StoreSpec
    rank: int
    world: int
    tiers: tuple[TierSpec, ...] = ()
    agent_ttl_s: float = 0.0
    bind: str = ""
    key: str = ""
    protocol: int = 1


class Partner(msgspec.Struct, frozen=True, tag=True):
    """Owner of the peer tier's memory, and the key that opens it, hexadecimal.

    Empty where no other node is there: the one of an earlier generation holds no more.
    """

    url: str
    secret: str


_Known = Annotated[tuple[KnownNode, ...], msgspec.Meta(max_length=MOST_TOLD)]


class Neighbours(msgspec.Struct, frozen=True, tag=True):
    """Nodes that the agent names to the trainers that come next, instead of those it knew."""

    nodes: _Known


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Outcome of a snapshot on a tier, over all ranks.

    Attributes
    ----------
    complete
        Every rank has its share there: older snapshots may be deleted. False: it will never be
        complete there, and its shares may be deleted.
    """

    tier: str
    step: int
    generation: int
    complete: bool = True


class NewSlot(msgspec.Struct, frozen=True, tag=True):
    """A new slot of `nbytes` bytes; its descriptor travels beside this message."""

    slot: int
    nbytes: int


class SetPlan(msgspec.Struct, frozen=True, tag=True):
    """The plan that later saves name by digest."""

    plan: SavePlan


class Blob(msgspec.Struct, frozen=True):
    """An object that parts name by digest, written once however many ranks agree on it."""

    digest: str
    body: bytes
    leader: bool


class SaveRequest(OfAttempt, frozen=True, tag=True):
    """Write one attempt; a counter in its slot of the arena shows how far the copying is.

    Attributes
    ----------
    slot
        Number of the slot.
    timeout_s
        From the last byte written to the commit.
    near
        The near tiers it goes to, nearest first.
    root
        Whether it goes to the root, and is committed there.
    refer
        Whether chunks that did not change may be referred to instead of written to the root.
    root_id, claim_id
        Of the root and of the generation's claim that this save is for: nothing is written to
        another root at the same place, and nothing committed under another claim. Empty: unknown.
    again
        Whether a writing process that died had it before: then its part may be at the root.
    sign
        File of the private key that signs the commit; empty: none does.
    """

    job: int
    plan: str = ""
    extra: tuple[Extra, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    keep: Keep | None = None
    timeout_s: float = 0.0
    slot: int = 0
    near: tuple[str, ...] = ()
    root: bool = True
    refer: bool = True
    root_id: str = ""
    claim_id: str = ""
    again: bool = False
    sign: str = ""


class Sealed(msgspec.Struct, frozen=True, tag=True):
    """The snapshot of a job is whole: all of it is copied, and nothing was mutated meanwhile.

    Attributes
    ----------
    replicas
        ``(group, digest)``: sampled digests of what this rank holds in common with others; ranks
        that name one group must agree on its digest.
    blobs
        The tables behind the digests.
    """

    job: int
    replicas: tuple[tuple[str, str], ...] = ()
    blobs: tuple[Blob, ...] = ()


class AbortSave(msgspec.Struct, frozen=True, tag=True):
    """Give job up: another rank failed."""

    job: int
    reason: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The trainer goes on in another generation, with another connection, soon.

    Attributes
    ----------
    at
        When it was sent, by `time.monotonic`: the trainer may have come back before it is received.
    """

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish what is staged, then end."""


Request = (
    WriterHello
    | Leave
    | NewSlot
    | SetPlan
    | SaveRequest
    | Sealed
    | AbortSave
    | Stop
    | Partner
    | Neighbours
    | Settled
    | AskStatus
    | AskEnd
)


class WriterReady(msgspec.Struct, frozen=True, tag=True):
    """The worker has opened its store, or could not: then there is an `error`.

    Attributes
    ----------
    here
        Where trainers of this node read what its agent keeps in memory: a URL.
    memory, local
        Where other nodes read that, and what is in the node's folder: URLs, or empty.
    secret
        For both; empty where it is the `key` that the trainer gave.
    pid_space
        Whose numbers `pid` is of: an agent in another container counts otherwise.
    neighbours
        Nodes of the life before, as its trainers named them.
    error
        `CkptdError.to_dict`: nothing can be written.
    """

    pid: int
    here: str = ""
    memory: str = ""
    local: str = ""
    secret: str = ""
    pid_space: str = ""
    neighbours: _Known = ()
    error: dict[str, str | None] | None = None
    protocol: int = 1


class WriteProgress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a job that are written."""

    job: int
    done: int
    total: int


class ShardStored(msgspec.Struct, frozen=True, tag=True):
    """Outcome of this rank's share on a tier, a near one or the root.

    Attributes
    ----------
    error
        `CkptdError.to_dict` of what failed; for the root also the commit. None: the share is there,
        and on the root it is durable and reported.
    """

    job: int
    tier: str
    error: dict[str, str | None] | None = None


class Freed(msgspec.Struct, frozen=True, tag=True):
    """Nothing reads the job's slot any more."""

    job: int


class SaveCommitted(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint exists."""

    job: int


class Warned(msgspec.Struct, frozen=True, tag=True):
    """Retention went wrong, or has something to say; the checkpoint is fine."""

    job: int
    error: dict[str, str | None]


class EventMessage(msgspec.Struct, frozen=True, tag=True):
    """Something that metrics count happened in the writing process."""

    event: AnyEvent


Response = WriterReady | WriteProgress | ShardStored | Freed | SaveCommitted | Warned | EventMessage

# Now, and not by the first channel, in whichever thread that is opened.
msgpack_decoder(Request)
msgpack_decoder(Response)


class Base(OfAttempt, frozen=True):
    """The committed checkpoint that a save refers to."""


class Refer(msgspec.Struct, frozen=True):
    """Chunks of a rank that lie in a file of an older folder.

    Attributes
    ----------
    file
        As it stands in the manifest.
    runs
        ``(first, count)`` of chunk numbers in the canonical order of all chunks that the plan
        gives to the rank; rising.
    """

    file: FileEntry
    runs: tuple[tuple[int, int], ...]


def decoded(decoder: Decoder[T], raw: bytes | memoryview, what: str, where: str) -> T:
    """Return what a store has of another process; `CorruptError` where it does not decode."""
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"cannot decode {what}", where=where, found=str(error)[:200]) from None


class RankPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Report of one rank on an attempt; kept below ``parts/`` until the commit.

    Attributes
    ----------
    data_start, data_bytes, index
        As in `ckptd.checkpoint.format.manifest.FileEntry`.
    objects
        Replicated objects; only from the lowest rank of each group of alike ranks.
    slots, values
        Witness slots this rank could see (uint32) and their values (8 bytes each).
    digests
        The digest index, for the manifest: see `RankPlan.is_small`. Empty: it is a file.
    metadata
        The user's; rank 0's counts, whichever rank commits.
    base, refers
        The checkpoint whose chunks are referred to, and which of them.
    root
        Identity of its root, on near tiers: folders are used again, and roots are made again.
    hashes
        BLAKE3 of what it wrote, by key, where the commit is signed.
    seeks
        Whether this rank will look for unchanged chunks at its next save.
    error
        Why this rank failed, instead of all the rest.
    """

    rank: int
    plan: str
    data_start: int = 0
    data_bytes: int = 0
    index: str = ""
    extra: tuple[Extra, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    replicas: tuple[tuple[str, str], ...] = ()
    slots: bytes = b""
    values: bytes = b""
    digests: bytes = b""
    metadata: dict[str, Any] = {}
    base: Base | None = None
    refers: tuple[Refer, ...] = ()
    seeks: bool = False
    root: str = ""
    hashes: dict[str, str] = {}
    error: dict[str, str | None] | None = None

    def encode(self) -> bytes:
        """See `join`."""
        return self.join(self)

    @staticmethod
    def join(parts: RankPart | Sequence[RankPart]) -> bytes:
        """Return msgpack and its digest: nothing else vouches for a part."""
        raw = msgspec.msgpack.encode(parts)
        return raw + digest(raw)

    @staticmethod
    def decode(raw: bytes, where: str) -> RankPart:
        """Invert `encode`; anything else is a `CorruptError`."""
        return RankPart.split(raw, where)[0]

    @staticmethod
    def split(raw: bytes, where: str) -> Sequence[RankPart]:
        """Invert `join`; anything else, or none, is a `CorruptError`."""
        body = memoryview(raw)[:-DIGEST_BYTES]
        if raw[-DIGEST_BYTES:] != digest(body):
            raise CorruptError("a part is corrupt: digest mismatch", kind="digest", where=where)
        found = decoded(_parts, body, "a part", where)
        return (found,) if isinstance(found, RankPart) else found


_several = Annotated[tuple[RankPart, ...], msgspec.Meta(min_length=1)]
_parts: Decoder[Any] = msgpack_decoder(RankPart | _several)
