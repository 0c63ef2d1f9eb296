"""All messages between controller, launchers, workers, operators; exit codes of a job.

In it: limits of their fields; default times in which a session leaves a generation, without and
with accelerators; names of variables for lease and interrupt; `NodeRow` and `Status`; `OrderKind`.

Events come to a controller from nodes, operators and its own clock; actions are its orders to
others. Nodes and operators speak with the controller over a
`ckptd.base.net.connection.Connection`, workers with the launcher of their node over a Unix socket;
what a launcher only passes on has one message on both. Both ends ignore fields that they do not
know.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.elastic.membership import Record
from ckptd.elastic.policy import Candidate, Shape

LEASE_VARIABLE = "CKPTD_LEASE"
"""Path of the file that says until when workers may step."""
INTERRUPT_VARIABLE = "CKPTD_INTERRUPT_S"
"""Seconds after which the launcher kills a session that has not left its generation."""
INTERRUPT_S = 1.0
"""Default of these seconds where ranks use no device."""
DEVICE_INTERRUPT_S = 8.0
"""Default where they may use one: an abort waits for the kernels that are queued.

Less than the ``fence_s`` of a controller, after which every process that is not out is killed.
"""
LEASE_EXIT_CODE = 86
"""With which a worker ends whose lease is over."""
MOST_BYTES = 1 << 18
"""Largest message; an environment is the largest there is."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""As in the log, which no message may make unreadable."""
_Slots = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Short = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_URL = r"\Ahttps?://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}\Z"
_Sick = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=1024)
]
_Domains = Annotated[tuple[_Short, ...], msgspec.Meta(max_length=8)]
_Text = Annotated[str, msgspec.Meta(max_length=4000)]
_Url = Annotated[str, msgspec.Meta(max_length=256, pattern=_URL)]


# --- events ---------------------------------------------------------------------------------------


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a controller hears of."""


class NodeUp(JobEvent, frozen=True, kw_only=True, tag=True):
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
    sick
        Slots that are out of use, and not among `slots`, since their device fails each process: a
        sentence each.
    pid
        Of its launcher; 0 is unknown.
    domains
        Where it is in the network, from the widest domain to the narrowest.
    link_bytes_per_s, card_bytes_per_s
        Speed of its links, as measured before the job, and of its network cards, as they say; 0 is
        unknown.
    """

    node: str
    life: _Short
    slots: _Slots
    fenced: _Count = 0
    running: _Count = 0
    sessions: bool = False
    host: _Short = ""
    sick: _Sick = ()
    pid: _Count = 0
    domains: _Domains = ()
    link_bytes_per_s: _Count = 0
    card_bytes_per_s: _Count = 0


class Left(JobEvent, frozen=True, kw_only=True, tag=True):
    """A node says goodbye, or its launcher knows that it is gone; its workers are dead."""

    node: str


class NodeLost(JobEvent, frozen=True, kw_only=True, tag=True):
    """The connection to a node broke and did not come back at once: silence, known at once.

    Its workers may run on.
    """

    node: str


class Notice(JobEvent, frozen=True, kw_only=True, tag=True):
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


class Broken(JobEvent, frozen=True, kw_only=True, tag=True):
    """A collective of a session failed, and nothing had interrupted it.

    That alone does not say whose fault it is. The worker waits for `FenceNow`.

    Attributes
    ----------
    node, generation
        Where, and in which generation; a worker leaves the node out, its launcher fills it in.
    reason
        What the collective said.
    """

    node: str = ""
    generation: _Count
    reason: _Text = ""


class Ended(JobEvent, frozen=True, kw_only=True, tag=True):
    """Workers of a node ended by themselves; told again as more of them do.

    Attributes
    ----------
    node, generation
        Whose, and of which generation.
    code
        0 if all that have ended returned successfully; of several failures, the first one's.
    left
        Workers of the node that run on.
    well, bad
        How many have ended successfully, or are about to; and how many otherwise, if `code` is
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
    place: _Short = ""
    text: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class Fenced(JobEvent, frozen=True, kw_only=True, tag=True):
    """No worker of a generation up to this one runs on a node any more."""

    node: str
    generation: _Count


class Loaded(JobEvent, frozen=True, kw_only=True, tag=True):
    """A rank, or each rank of a node, has the state from which a generation goes on.

    Attributes
    ----------
    node, generation
        Where, and of which generation; a worker leaves the node out.
    step
        The state's, the oldest of its ranks; 0 if they began from nothing, -1 if it is not known.
    """

    node: str = ""
    generation: _Count
    step: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)] = -1


class Progress(JobEvent, frozen=True, kw_only=True, tag=True):
    """`step` is, for every rank, where a restart would find it."""

    generation: _Count
    step: _Count


class Saved(JobEvent, frozen=True, kw_only=True, tag=True):
    """The save that `SaveNow` asked for lies where a planned restart finds it."""

    generation: _Count
    step: _Count


class Suspected(JobEvent, frozen=True, kw_only=True, tag=True):
    """An incident of the monitor, of a class for which the policy says ``act``.

    Attributes
    ----------
    nodes
        Nodes to leave out; empty if the ranks are only to be started again.
    reason
        In a few words.
    since_s
        How long it had lasted when it was reported, in seconds.
    generation
        In which generation that was; 0 if it is not known. With an earlier one than the present
        the nodes are left out, and no rank is started again.
    """

    nodes: tuple[str, ...]
    reason: str
    since_s: float = 0.0
    generation: int = 0


class OrderKind(enum.StrEnum):
    """The kinds of orders of a person or a scheduler."""

    RESTART = "restart"
    EXCLUDE = "exclude"
    ADD = "add"
    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


class Order(JobEvent, frozen=True, kw_only=True, tag=True):
    """A person, or a scheduler, wants something; see `OrderKind`."""

    kind: OrderKind
    nodes: tuple[str, ...] = ()
    reason: str = ""


class Reseated(JobEvent, frozen=True, kw_only=True, tag=True):
    """The seat was taken again, as `Reseat` asked for.

    Attributes
    ----------
    generation
        As in `Reseat`.
    """

    generation: int


class Tick(JobEvent, frozen=True, kw_only=True, tag=True):
    """Time has passed.

    Attributes
    ----------
    away
        Seconds for which the controller itself did not run: it was stopped (Ctrl-Z), its container
        was paused, its machine slept. It heard no node meanwhile, and that counts as no silence.
    stopped
        Nodes on the controller's machine whose launcher is stopped: their workers are not, and
        train on until their lease ends.
    """

    away: float = 0.0
    stopped: frozenset[str] = frozenset()


# --- actions --------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a controller has others do. They are carried out in the order given."""


class Append(Action, frozen=True, kw_only=True, tag=True):
    """Write a record to the log; a process that finds another there is no controller any more."""

    record: Record


class Fence(Action, frozen=True, kw_only=True, tag=True):
    """End every generation before `generation` on these nodes, and say `Fenced`.

    Attributes
    ----------
    nodes, generation
        Where, and which.
    level
        0: workers with a session leave their generation and stay; one without, or one that does
        not come out, is killed. From 1 on every worker is killed.
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
        Nodes to notify; empty for all nodes of the record.
    """

    record: Record
    level: int
    nodes: tuple[str, ...] = ()


class Relaunch(Action, frozen=True, kw_only=True, tag=True):
    """Restart launchers of these nodes, there or on other machines.

    Attributes
    ----------
    nodes
        Those that are gone, or that did not help when their workers were restarted.
    level
        2.
    """

    nodes: tuple[str, ...]
    level: int = 2


class Reseat(Action, frozen=True, kw_only=True, tag=True):
    """Take the controller's seat again, and say `Reseated`.

    Nodes that cannot reach their controller renew their workers' lease as long as it has the seat:
    from then on none of them does.

    Attributes
    ----------
    generation
        The fence that waits for it.
    """

    generation: int


class SaveNow(Action, frozen=True, kw_only=True, tag=True):
    """Have the ranks of a generation save at once, before a planned restart, and say `Saved`."""

    generation: _Count


class Tell(Action, frozen=True, kw_only=True, tag=True):
    """Tell people: those who look at the job, and on consoles of launchers if it is `aloud`.

    Attributes
    ----------
    text
        One sentence, or some.
    aloud
        Whether launchers print it.
    nodes
        Whose launchers; those of all nodes if empty.
    command
        What a person may do about it: a command, without the name of the job.
    """

    text: _Text
    aloud: bool = False
    nodes: tuple[_Word, ...] = ()
    command: _Short = ""


class Finish(Action, frozen=True, kw_only=True, tag=True):
    """The job has ended successfully: the nodes may go."""


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
    text
        What was found, what to do.
    """

    text: str


SaidEvent = Left | Ended | Fenced | Loaded | Progress | Saved | Broken | Notice
"""Messages of a node, within `Envelope`."""
DoneEvent = Order | Suspected | Notice
"""Messages of an operator, within `OperatorCommand`."""

EXIT_CODES = {"done": 0, "requeue": 75, "no-nodes": 76, "no-progress": 77, "stopped": 130}
"""Exit codes of a launcher, by the kind of `Shutdown`."""


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
        Rises with each beat of a link; `LeaseRenewal` repeats it.
    up
        What the node is now.
    """

    number: _Count
    up: NodeUp


class Envelope(msgspec.Struct, frozen=True, tag=True):
    """Something happened on a node. It is repeated on each new connection, in the same order.

    Attributes
    ----------
    event
        What; where it names a node, that of the connection.
    number
        Rises with each event of a link; `LeaseRenewal.heard` acknowledges it.
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


class LeaseRenewal(msgspec.Struct, frozen=True, tag=True):
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
    """Stop all workers of generations before this one; a node then says `Fenced`.

    A worker with a session is sent it too: it leaves its generation and says `Out`.

    Attributes
    ----------
    generation
        The new one.
    level
        0: sessions are interrupted and stay; 1 and more: every worker is killed.
    """

    generation: _Count
    level: _Count = 1


class RankAssignment(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a node: its slot, its rank and its place."""

    slot: _Count
    rank: _Count
    pp: _Count
    dp: _Count
    tp: _Count


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start this node's part of a generation. A node that has started it already does nothing.

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
    seats: tuple[RankAssignment, ...]
    world: _Count
    hosts_store: bool = False
    mttr_s: float = 0.0
    mtbf_s: float = 0.0


class StoreAt(msgspec.Struct, frozen=True, tag=True):
    """Where the job store of a generation listens."""

    generation: _Count
    host: _Word
    port: _Port


class DaemonAt(msgspec.Struct, frozen=True, tag=True):
    """Where the job's daemon listens; told once a connection, and when another one is announced.

    Attributes
    ----------
    url
        ``http://HOST:PORT``.
    """

    url: _Url


class Shutdown(msgspec.Struct, frozen=True, tag=True):
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


class OperatorCommand(msgspec.Struct, frozen=True, tag=True):
    """Take in an event of an operator; `Answer` follows once it was decided upon."""

    number: _Count
    event: DoneEvent


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a request.

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
        Seconds for which it is left out; 0 if it is not, null until an operator orders otherwise.
    faults
        How often it was at fault lately.
    spare
        Whether it is there and no rank of the present generation is on it.
    silent_s
        Seconds since it last reported; null if never.
    sick
        Slots that are out of use, each with the reason: `slots` is without them.
    domains
        Where it is in the network, as it said; see `NodeUp`.
    ranks
        Those of the last generation that was begun on it.
    out_why
        Why it is left out; empty if it is not, or a controller before this one decided it.
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
    sick: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    out_why: str = ""


class Recovery(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"before": "from", "after": "to", "import_": "import"},
):
    """One restart, from the last sign that all was well to the next committed step; seconds.

    The parts add up to `total`. A part that was not reported is 0: its time is in the next one.

    Attributes
    ----------
    at
        Seconds since 1970 at which it was over.
    cause
        Why, in a few words.
    planned
        Whether it was ordered; of a planned one, the time of the save before it is not counted:
        ranks train meanwhile.
    before, after
        The generations; in other encodings ``from`` and ``to``.
    level
        How deep it went.
    detect, fence, plan
        Until the controller knew; until no rank of the old one ran; until there was a layout.
    spawn, import_, init, load, first_step
        Until the slowest rank had its process, its imports, its process group, its state, and until
        a step was committed.
    again
        Attempts that failed on the way.
    parked
        Time for which the job was paused meanwhile.
    total
        All of it.
    steps_lost
        Steps that were made again; null if no rank reported its steps.
    """

    at: float
    cause: str
    planned: bool
    before: int
    after: int
    level: int
    detect: float = 0.0
    fence: float = 0.0
    plan: float = 0.0
    spawn: float = 0.0
    import_: float = 0.0
    init: float = 0.0
    load: float = 0.0
    first_step: float = 0.0
    again: float = 0.0
    parked: float = 0.0
    total: float = 0.0
    steps_lost: int | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that people see of a job that can restart.

    Attributes
    ----------
    number
        Of the request that it answers; 0 of those that a subscription sends later.
    job
        Its name.
    state, reason
        See `ckptd.elastic.control.statemachine.State`; why it is in it.
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
        The last 100, the oldest first.
    goodput
        Seconds of each kind: those of `ckptd.elastic.control.history.Goodput`.
    told
        The last 20 sentences for people, the oldest first.
    log
        URL of the membership log.
    address, life
        Of the controller: ``HOST:PORT``, and which life of it this is.
    ended
        How the job ended: the kind of `Shutdown`; empty while it goes on.
    relaunch, relaunch_generation
        Nodes whose launchers were last wanted to be restarted (level 2), and the generation that
        waits for them; 0 if that never was.
    daemon
        URL of the daemon that was announced last to this life; empty if none was.
    chosen_at
        Seconds since 1970 at which the layout was chosen; 0 before one.
    why
        Sentences on why this layout, the deciding one first; empty if an older controller chose it.
    candidates
        The layouts that were compared for it, best first.
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
    recoveries: tuple[Recovery, ...] = ()
    goodput: dict[str, float] = {}
    told: tuple[str, ...] = ()
    log: str = ""
    address: str = ""
    life: str = ""
    ended: str = ""
    relaunch: tuple[str, ...] = ()
    relaunch_generation: int = 0
    daemon: str = ""
    chosen_at: float = 0.0
    why: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()


# --- worker to launcher ---------------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A worker is there: its first word, and again when it begins to hold a session.

    Attributes
    ----------
    pid
        Its process, as it sees it.
    rank, generation
        From its environment.
    session
        Whether it can leave a generation and go on in another one without being restarted.
    """

    pid: _Count
    rank: _Count
    generation: _Count
    session: bool = False


class Mark(msgspec.Struct, frozen=True, tag=True):
    """A worker has come so far in its start; told once a generation and name."""

    generation: _Count
    name: Literal["imported", "initialised", "loaded", "stepped"]


class Out(msgspec.Struct, frozen=True, tag=True):
    """A worker has left a generation, holds nothing of it, and waits for `Go`.

    Attributes
    ----------
    generation
        Which.
    unfit
        Why its process must not be used in another generation; empty if it may. The launcher kills
        it, and starts another one in its seat.
    device
        Whether that is since its device fails.
    """

    generation: _Count
    unfit: _Text = ""
    device: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """A session has returned: this worker ends soon, successfully."""

    generation: _Count


# --- launcher to worker ---------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Attach`, sent again when a process goes on in another generation.

    Attributes
    ----------
    mttr_s, mtbf_s
        Seconds that a restart of this job has taken, and between failures; 0 if unknown.
    """

    generation: _Count
    mttr_s: float = 0.0
    mtbf_s: float = 0.0


class Go(msgspec.Struct, frozen=True, tag=True):
    """Go on in a generation; what is not in `environ` stays as it is."""

    generation: _Count
    environ: dict[str, str]


class Quit(msgspec.Struct, frozen=True, tag=True):
    """The job is over: end."""


# --- messages by sender ---------------------------------------------------------------------------

FromNode = Beat | Envelope | Hosting | Timed
ToNode = LeaseRenewal | FenceNow | Begin | StoreAt | SaveNow | DaemonAt | Tell | Shutdown | Taken
FromOperator = Ask | Subscribe | OperatorCommand | Announce
ToOperator = Status | Answer

FromWorker = Attach | Mark | Loaded | Progress | Saved | Out | Broken | Done
ToWorker = Welcome | FenceNow | Go | SaveNow | Quit

# Now, and not by the first connection, in whichever thread that is opened.
msgpack_decoder(FromNode)
msgpack_decoder(ToNode)
msgpack_decoder(FromOperator)
msgpack_decoder(ToOperator)
msgpack_decoder(FromWorker)
msgpack_decoder(ToWorker)
