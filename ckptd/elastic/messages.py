"""What a controller hears of, and what it has others do: plain data."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from ckptd.elastic.membership import Record

__all__ = [
    "Abort",
    "Action",
    "Append",
    "Broken",
    "Ended",
    "Event",
    "Fence",
    "Fenced",
    "Finish",
    "Left",
    "Loaded",
    "Lost",
    "NodeUp",
    "Notice",
    "Order",
    "OrderKind",
    "Progress",
    "Refuse",
    "Relaunch",
    "Reseat",
    "Reseated",
    "Save",
    "Saved",
    "Start",
    "Suspected",
    "Tell",
    "Tick",
]

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""As in the log, which no message may make unreadable."""
_Slots = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a controller hears of."""


class NodeUp(Event, frozen=True, kw_only=True, tag=True):
    """A node says that it is there, and again with every beat.

    Attributes
    ----------
    node
        Its name.
    life
        Which process of it speaks: another one after a restart, whose workers are gone.
    slots
        Ranks that it can run; 0 while it cannot start any yet, which takes a minute at most.
    fenced
        No worker of this or an earlier generation runs on it.
    running
        The generation whose workers run on it; 0 if none do.
    sessions
        All its workers hold a session: they can leave a generation and enter the next one without
        ending.
    host
        Where its workers are reached: a name or an address.
    """

    node: str
    life: _Word
    slots: _Slots
    fenced: _Count = 0
    running: _Count = 0
    sessions: bool = False
    host: _Word = ""


class Left(Event, frozen=True, kw_only=True, tag=True):
    """A node says goodbye, or its launcher knows that it is gone; its workers are dead."""

    node: str


class Lost(Event, frozen=True, kw_only=True, tag=True):
    """The connection to a node broke and did not come back at once: silence, known at once.

    Its workers may run on.
    """

    node: str


class Notice(Event, frozen=True, kw_only=True, tag=True):
    """A node will be taken away: pre-emption, or a scheduler's drain.

    Attributes
    ----------
    node
        Which one. It is not used any more, unless it comes back as another process.
    seconds
        From now until it is gone.
    reason
        In a few words.
    """

    node: str
    seconds: float
    reason: str = ""


class Broken(Event, frozen=True, kw_only=True, tag=True):
    """A collective of a session failed. That alone does not say whose fault it is.

    Attributes
    ----------
    node, generation
        Where, and in which generation.
    reason
        What the collective said.
    """

    node: str
    generation: _Count
    reason: str = ""


class Ended(Event, frozen=True, kw_only=True, tag=True):
    """Workers of a node ended by themselves; told again as more of them do.

    Attributes
    ----------
    node, generation
        Whose, and of which generation.
    code
        0 if all that have ended returned in good order; of several failures, the first one's.
    left
        Workers of the node that run on.
    well, bad
        How many have ended in good order, or are about to; and how many otherwise, if `code` is
        not 0.
    program
        Whether it was the program that ended so, and no launcher that could not start it.
    stepped
        Whether one of them had made a step.
    place
        Where in its program the first one that failed did: equal for the same error at the same
        line; empty where that is not known.
    text
        Why, for people; empty if there is nothing but the code.
    """

    node: str
    generation: _Count
    code: int
    left: _Count = 0
    well: _Count = 0
    bad: _Count = 1
    program: bool = False
    stepped: bool = False
    place: _Word = ""
    text: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class Fenced(Event, frozen=True, kw_only=True, tag=True):
    """No worker of a generation up to this one runs on a node any more."""

    node: str
    generation: _Count


class Loaded(Event, frozen=True, kw_only=True, tag=True):
    """All ranks of a node have the state from which a generation goes on.

    Attributes
    ----------
    node, generation
        Where, and of which generation.
    step
        The state's, the oldest of its ranks; 0 if they began from nothing, -1 if it is not known.
    """

    node: str
    generation: _Count
    step: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)] = -1


class Progress(Event, frozen=True, kw_only=True, tag=True):
    """A step of a generation is committed."""

    generation: _Count
    step: _Count


class Saved(Event, frozen=True, kw_only=True, tag=True):
    """What `Save` asked for lies where a planned restart finds it."""

    generation: _Count
    step: _Count


class Suspected(Event, frozen=True, kw_only=True, tag=True):
    """The monitor has named somebody, and the policy for this class says: act.

    Attributes
    ----------
    nodes
        Who is to be left out; empty if the ranks are only to be started again.
    reason
        In a few words.
    since_s
        How long it had lasted when it was told, in seconds.
    generation
        In which generation that was; 0 if it is not known. Of an earlier one than the present it
        only says whom to leave out.
    """

    nodes: tuple[str, ...]
    reason: str
    since_s: float = 0.0
    generation: int = 0


class OrderKind(enum.StrEnum):
    """What a person or a scheduler may order."""

    RESTART = "restart"
    EXCLUDE = "exclude"
    ADD = "add"
    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


class Order(Event, frozen=True, kw_only=True, tag=True):
    """A person, or a scheduler, wants something; see `OrderKind`."""

    kind: OrderKind
    nodes: tuple[str, ...] = ()
    reason: str = ""


class Reseated(Event, frozen=True, kw_only=True, tag=True):
    """The seat was taken anew, as `Reseat` asked for.

    Attributes
    ----------
    generation
        As in `Reseat`.
    """

    generation: int


class Tick(Event, frozen=True, kw_only=True, tag=True):
    """Time has passed."""


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a controller has others do. They are carried out in the order given."""


class Append(Action, frozen=True, kw_only=True, tag=True):
    """Write a record to the log; who finds another one in its place is no controller any more."""

    record: Record


class Fence(Action, frozen=True, kw_only=True, tag=True):
    """End every generation before `generation` on these nodes, and say `Fenced`.

    Attributes
    ----------
    nodes, generation
        Where, and which.
    level
        0: workers with a session leave their generation and stay; who has none, or does not come
        out, is killed. From 1 on every worker is killed.
    """

    nodes: tuple[str, ...]
    generation: int
    level: int = 1


class Start(Action, frozen=True, kw_only=True, tag=True):
    """Start the workers of a generation; they resume from its step, and say `Progress`.

    Attributes
    ----------
    record
        The generation.
    level
        0: idle sessions take seats, and workers are started where there are too few of them. From 1
        on all workers are new processes.
    nodes
        Who is to be told; empty for all nodes of the record.
    """

    record: Record
    level: int
    nodes: tuple[str, ...] = ()


class Relaunch(Action, frozen=True, kw_only=True, tag=True):
    """Have launchers of these nodes started anew, there or on other machines.

    Attributes
    ----------
    nodes
        Those that are gone, or that did not help when their workers were started anew.
    level
        2.
    """

    nodes: tuple[str, ...]
    level: int = 2


class Reseat(Action, frozen=True, kw_only=True, tag=True):
    """Take the controller's seat anew, and say `Reseated`.

    Nodes that cannot reach their controller renew their workers' lease as long as it has the seat:
    from then on none of them does.

    Attributes
    ----------
    generation
        The fence that waits for it.
    """

    generation: int


class Save(Action, frozen=True, kw_only=True, tag=True):
    """Have the ranks save now, before a planned restart."""

    generation: int


class Tell(Action, frozen=True, kw_only=True, tag=True):
    """Tell people."""

    text: str


class Finish(Action, frozen=True, kw_only=True, tag=True):
    """The job has ended in good order: let the nodes go."""


class Abort(Action, frozen=True, kw_only=True, tag=True):
    """The job ends without having finished.

    Attributes
    ----------
    kind
        ``exit-code``: its program says that starting it again is of no use; ``no-progress``,
        ``max-restarts``, ``no-nodes``, ``stopped``, or ``requeue``: the job is to be submitted
        again, and goes on from its log.
    text
        What happened, what was lost, what to do.
    code
        With which a worker ended last; 0 if none failed.
    """

    kind: str
    text: str
    code: int = 0


class Refuse(Action, frozen=True, kw_only=True, tag=True):
    """End this controller without deciding anything, and leave the nodes alone.

    Attributes
    ----------
    kind
        ``lost-log``: nodes know of generations, and the log is empty.
    text
        What was found, what to do.
    """

    kind: str
    text: str
