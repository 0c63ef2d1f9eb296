"""What a controller hears of, and what it has others do: plain data."""

from __future__ import annotations

import enum

import msgspec

from ckptd.elastic.membership import Record

__all__ = [
    "Abort",
    "Action",
    "Append",
    "Ended",
    "Event",
    "Fence",
    "Fenced",
    "Finish",
    "Left",
    "Loaded",
    "NodeUp",
    "Order",
    "OrderKind",
    "Progress",
    "Save",
    "Saved",
    "Start",
    "Suspected",
    "Tell",
    "Tick",
]


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
        Ranks that it can run.
    fenced
        No worker of this or an earlier generation runs on it.
    running
        The generation whose workers run on it; 0 if none do.
    """

    node: str
    life: str
    slots: int
    fenced: int = 0
    running: int = 0


class Left(Event, frozen=True, kw_only=True, tag=True):
    """A node says goodbye, or its launcher knows that it is gone; its workers are dead."""

    node: str


class Ended(Event, frozen=True, kw_only=True, tag=True):
    """Workers of a node ended by themselves.

    Attributes
    ----------
    node, generation
        Whose, and of which generation.
    code
        0 if all returned in good order; of several failures, the first one's.
    """

    node: str
    generation: int
    code: int


class Fenced(Event, frozen=True, kw_only=True, tag=True):
    """No worker of a generation up to this one runs on a node any more."""

    node: str
    generation: int


class Loaded(Event, frozen=True, kw_only=True, tag=True):
    """All ranks of a node have the state from which a generation goes on."""

    node: str
    generation: int


class Progress(Event, frozen=True, kw_only=True, tag=True):
    """A step of a generation is committed."""

    generation: int
    step: int


class Saved(Event, frozen=True, kw_only=True, tag=True):
    """What `Save` asked for lies where a planned restart finds it."""

    generation: int
    step: int


class Suspected(Event, frozen=True, kw_only=True, tag=True):
    """The monitor has named somebody, and the policy for this class says: act.

    Attributes
    ----------
    nodes
        Who is to be left out; empty if the ranks are only to be started again.
    reason
        In a few words.
    """

    nodes: tuple[str, ...]
    reason: str


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


class Tick(Event, frozen=True, kw_only=True, tag=True):
    """Time has passed."""


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a controller has others do. They are carried out in the order given."""


class Append(Action, frozen=True, kw_only=True, tag=True):
    """Write a record to the log; who finds another one in its place is no controller any more."""

    record: Record


class Fence(Action, frozen=True, kw_only=True, tag=True):
    """Kill every worker of a generation before `generation` on these nodes, and say `Fenced`."""

    nodes: tuple[str, ...]
    generation: int


class Start(Action, frozen=True, kw_only=True, tag=True):
    """Start the workers of a generation; they resume from its step, and say `Progress`."""

    record: Record
    level: int


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
        ``no-progress``, ``no-nodes`` or ``stopped``.
    text
        What happened, what was lost, what to do.
    """

    kind: str
    text: str
