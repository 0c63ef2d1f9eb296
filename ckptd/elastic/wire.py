"""What nodes, operators and the controller say to each other: plain data.

Frames and the handshake are those of `ckptd.net.connection`. Both ends ignore fields that they do
not know.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.elastic.messages import (
    Broken,
    Ended,
    Fenced,
    Left,
    Loaded,
    NodeUp,
    Notice,
    Order,
    Progress,
    Saved,
    Suspected,
)
from ckptd.elastic.policy import Shape

__all__ = [
    "EXIT_CODES",
    "Announce",
    "Answer",
    "Ask",
    "Beat",
    "Begin",
    "Bye",
    "DaemonAt",
    "Do",
    "DoneEvent",
    "Echo",
    "FenceNow",
    "FromNode",
    "FromOperator",
    "Hosting",
    "NodeRow",
    "Said",
    "SaidEvent",
    "SaveNow",
    "Seat",
    "Status",
    "StoreAt",
    "Subscribe",
    "Taken",
    "Timed",
    "ToNode",
    "ToOperator",
    "exit_code",
]

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_URL = r"\Ahttps?://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}\Z"
_Text = Annotated[str, msgspec.Meta(max_length=4000)]
_Url = Annotated[str, msgspec.Meta(max_length=256, pattern=_URL)]

SaidEvent = Left | Ended | Fenced | Loaded | Progress | Saved | Broken | Notice
"""What a node says with `Said`."""
DoneEvent = Order | Suspected | Notice
"""What an operator says with `Do`."""

EXIT_CODES = {"done": 0, "requeue": 75, "no-nodes": 76, "no-progress": 77, "stopped": 130}
"""What a launcher ends with, by the kind of `Bye`."""


def exit_code(kind: str, worker: int = 0) -> int:
    """Return what a launcher ends with; of other kinds, the code of the worker that failed.

    Of one that a signal has ended, 128 and the signal's number, as shells have it.
    """
    return EXIT_CODES.get(kind, 128 - worker if worker < 0 else worker or 1)


# --- node to controller ---------------------------------------------------------------------------


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A node is there.

    Attributes
    ----------
    number
        Rises with each beat of a link; `Echo` repeats it.
    up
        What the node is now.
    """

    number: _Count
    up: NodeUp


class Said(msgspec.Struct, frozen=True, tag=True):
    """Something happened on a node. It is repeated on each new connection, in the same order.

    Attributes
    ----------
    event
        What; where it names a node, that of the connection.
    number
        Rises with each event of a link; `Echo.heard` acknowledges it.
    """

    event: SaidEvent
    number: _Count = 0


class Hosting(msgspec.Struct, frozen=True, tag=True):
    """The job store of a generation listens here."""

    generation: _Count
    host: _Word
    port: _Port


class Timed(msgspec.Struct, frozen=True, tag=True):
    """How far a node's workers are.

    Attributes
    ----------
    generation, node
        Whose.
    marks
        Seconds from the arrival of `Begin` to each mark: ``spawned``, ``imported``,
        ``initialised``, ``loaded``, ``stepped``; the slowest worker's.
    """

    generation: _Count
    node: _Word
    marks: dict[str, float]


# --- controller to node ---------------------------------------------------------------------------


class Echo(msgspec.Struct, frozen=True, tag=True):
    """A beat was heard; the lease counts from when that beat was sent.

    Attributes
    ----------
    number
        Of the beat.
    heard
        All events up to this number were taken in.
    lease_s
        Workers may go on for so long after that beat was sent; 0: the lease is not renewed, as for
        a node that does not fence.
    """

    number: _Count
    heard: _Count = 0
    lease_s: float = 0.0


class FenceNow(msgspec.Struct, frozen=True, tag=True):
    """Let no worker of a generation before this one go on; then say `Fenced`.

    Attributes
    ----------
    generation
        The new one.
    level
        0: sessions are interrupted and stay; 1 and more: every worker is killed.
    """

    generation: _Count
    level: _Count = 1


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a node: its slot, its rank and its place."""

    slot: _Count
    rank: _Count
    pp: _Count
    dp: _Count
    tp: _Count


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start this node's part of a generation. Who has started it already does nothing.

    Attributes
    ----------
    generation, level, shape
        Which; how deep the recovery cuts; the layout's sizes.
    step
        The last step that is known to be committed; 0 if none.
    reason
        Why there is a new generation.
    nodes, node_rank
        How many nodes there are, and which this one is: node 0 has rank 0.
    seats
        The ranks that run here.
    world
        Ranks on all nodes.
    hosts_store
        Whether this node opens the job store and says `Hosting`.
    mttr_s, mtbf_s
        How long a recovery takes and how long passes between two faults, as measured; 0: unknown.
    """

    generation: _Count
    level: _Count
    shape: Shape
    step: _Count
    reason: str
    nodes: _Count
    node_rank: _Count
    seats: tuple[Seat, ...]
    world: _Count
    hosts_store: bool = False
    mttr_s: float = 0.0
    mtbf_s: float = 0.0


class StoreAt(msgspec.Struct, frozen=True, tag=True):
    """Where the job store of a generation listens."""

    generation: _Count
    host: _Word
    port: _Port


class SaveNow(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks of a generation save at once, before a planned restart."""

    generation: _Count


class DaemonAt(msgspec.Struct, frozen=True, tag=True):
    """Where the job's daemon listens; told once a connection, and when another one is announced.

    Attributes
    ----------
    url
        ``http://HOST:PORT``.
    """

    url: _Url


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The job has ended, or goes on without this launcher: kill what runs, and end.

    Attributes
    ----------
    kind
        ``done``, or the kind of `ckptd.elastic.messages.Abort`; or ``name-taken``: this launcher
        was taken for gone, and another one has its name.
    text
        For people.
    code
        What the launcher ends with.
    """

    kind: str
    text: str
    code: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    """Another launcher has this node's name: try again later. The connection ends.

    Attributes
    ----------
    text
        For people.
    """

    text: str


# --- operators ------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Send the status once."""

    number: _Count


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Send the status now, and again after changes, at most five times a second."""

    number: _Count


class Announce(msgspec.Struct, frozen=True, tag=True):
    """An operator is the job's daemon; said on each of its connections. `Answer` follows.

    Of several daemons the one that was announced last counts.

    Attributes
    ----------
    url
        ``http://HOST:PORT``, as nodes reach it.
    """

    number: _Count
    url: _Url


class Do(msgspec.Struct, frozen=True, tag=True):
    """Take in an event of an operator; `Answer` follows once it was decided upon."""

    number: _Count
    event: DoneEvent


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What became of a request.

    Attributes
    ----------
    number
        Of the request.
    ok
        Whether it was taken in.
    kind, text
        Why not; empty if it was.
    """

    number: _Count
    ok: bool
    kind: str = ""
    text: _Text = ""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as the controller knows it.

    Attributes
    ----------
    name, host
        Its name, and the address under which others reach it; empty if it does not say.
    up
        Whether it is there.
    slots
        Ranks that it can run.
    running, fenced
        The generation whose workers run on it (0: none); none up to this one runs any more.
    out_until_s
        Seconds for which it is left out; 0 if it is not, null if until somebody orders otherwise.
    faults
        How often it was at fault lately.
    spare
        Whether it is there and no rank of the present generation is on it.
    silent_s
        Seconds since it was last heard of; null if never.
    """

    name: str
    host: str = ""
    up: bool
    slots: int
    running: int = 0
    fenced: int = 0
    out_until_s: float | None = 0.0
    faults: int = 0
    spare: bool = False
    silent_s: float | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that people see of a job that can restart.

    Attributes
    ----------
    number
        Of the request that it answers; 0 of those that a subscription sends later.
    job
        Its name.
    state, reason
        See `ckptd.elastic.statemachine.State`; why it is in it.
    since
        Seconds since 1970 at which the state began.
    at
        Seconds since 1970 at which this was so.
    generation, step
        The newest of each: generations may have been fenced and not begun; the last committed step.
    shape, world
        The layout of the last generation that was begun, and its ranks; null and 0 before one.
    planned
        The layout that the job was made for.
    nodes
        Sorted by name.
    recoveries
        The last 100, the oldest first: the fields of `ckptd.elastic.splits.Recovery`.
    goodput
        Seconds of each kind: those of `ckptd.elastic.goodput.Goodput`.
    told
        The last 20 sentences for people, the oldest first.
    log
        URL of the membership log.
    address, life
        Of the controller: ``HOST:PORT``, and which life of it this is.
    ended
        How the job ended: the kind of `Bye`; empty while it goes on.
    relaunch, relaunch_generation
        Nodes whose launchers were last wanted to be started anew (level 2), and the generation that
        waits for them; 0 if that never was.
    daemon
        URL of the daemon that was announced last to this life; empty if none was.
    """

    number: int = 0
    job: str
    state: str
    reason: str
    since: float
    at: float
    generation: int
    step: int
    shape: Shape | None
    world: int
    planned: Shape
    nodes: tuple[NodeRow, ...]
    recoveries: tuple[dict[str, Any], ...] = ()
    goodput: dict[str, float] = {}
    told: tuple[str, ...] = ()
    log: str = ""
    address: str = ""
    life: str = ""
    ended: str = ""
    relaunch: tuple[str, ...] = ()
    relaunch_generation: int = 0
    daemon: str = ""


FromNode = Beat | Said | Hosting | Timed
ToNode = Echo | FenceNow | Begin | StoreAt | SaveNow | DaemonAt | Bye | Taken
FromOperator = Ask | Subscribe | Do | Announce
ToOperator = Status | Answer

# Now, and not by the first connection, in whichever thread that is opened.
msgpack_decoder(FromNode)
msgpack_decoder(ToNode)
msgpack_decoder(FromOperator)
msgpack_decoder(ToOperator)
