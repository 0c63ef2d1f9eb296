"""``ckptd ctl``: prints a job's status (nodes, recoveries, layout), sends orders of a person.

In it: columns and texts of ``ctl status`` and ``ctl why``; how long an answer is awaited;
restart, exclude, drain, add, pause, resume, stop.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter

from ckptd.base.net.signing import job_secret
from ckptd.base.runtime.agentlink import run_folder
from ckptd.cli.output import Document, Json, Reply, flag, option, print_rows, print_text, time_text
from ckptd.elastic.messages import NodeRow, Order, OrderKind, Recovery, Status
from ckptd.elastic.operator import OperatorLink
from ckptd.elastic.places import open_places
from ckptd.elastic.policy import Candidate, Shape
from ckptd.elastic.signpost import signposts
from ckptd.errors import CkptdError, DeadlineError, NotFoundError, RefusedError, first_few

ctl = App(
    name="ctl",
    help="Show the state of an elastic job, and send orders to its controller.",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
)

Name = Annotated[str, option("Names of nodes.")]

_ANSWER_S = 10.0
_MOST_SHOWN = 5
_ENDED = ("done", "aborted")


class CtlStatusDocument(Document, frozen=True, kw_only=True, tag="ctl status"):
    """The document that ``ckptd ctl status --json`` prints: `ckptd.elastic.messages.Status`."""

    status: Status


class CtlWhyDocument(Document, frozen=True, kw_only=True, tag="ctl why"):
    """The document that ``ckptd ctl why --json`` prints: fields of `ckptd.elastic.messages.Status`.

    Attributes
    ----------
    job, reason, generation, shape, planned, chosen_at, why, candidates, nodes
        As there.
    """

    job: str
    reason: str
    generation: int
    shape: Shape | None
    planned: Shape
    chosen_at: float
    why: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    nodes: tuple[NodeRow, ...]


class CtlOrderDocument(Document, frozen=True, kw_only=True, tag="ctl order"):
    """The document that an order with ``--json`` prints.

    Attributes
    ----------
    order, nodes
        The order, and its nodes.
    state, generation, step
        Of the job when this returned; of the moment after the order without ``--wait``.
    """

    order: str
    nodes: tuple[str, ...]
    state: str
    generation: int
    step: int


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Which controller is meant."""

    job: Annotated[
        str | None,
        option(
            "Name of the job; by default CKPTD_JOB, or the only job with a controller on this "
            "machine."
        ),
    ] = None
    controller: Annotated[
        str | None, Parameter(help="HOST:PORT; found on this machine or in the log by default.")
    ] = None
    log: Annotated[
        str | None, Parameter(help="URL or path of the membership log, as given to the controller.")
    ] = None

    @property
    def name(self) -> str:
        """The job's.

        Raises
        ------
        NotFoundError
            None is named, and not exactly one has a controller here.
        """
        named = self.job or os.environ.get("CKPTD_JOB")
        if named or self.controller or self.log:
            return named or "default"
        posts = signposts()
        if len({post.job for post in posts}) == 1:
            return posts[0].job
        raise NotFoundError(
            "several jobs have a controller here" if posts else "no controller runs here",
            found=", ".join(sorted({post.job for post in posts})) or None,
            hint="give --job NAME" if posts else "give --controller HOST:PORT",
        )

    def place(self) -> str | None:
        """Return where the log is, if that is said, or known on this machine."""
        return self.log or next((p.log for p in signposts() if p.job == self.name), None)


@Parameter(name="*")
@dataclass(frozen=True)
class How(Where):
    """Which controller is meant, and how an order is given."""

    reason: Annotated[str, Parameter(help="Reason, written to the log.")] = ""
    wait: Annotated[bool, flag("Wait until the order has been carried out.")] = False
    timeout: Annotated[float, Parameter(help="Time-out of --wait in seconds.")] = 600.0
    json: Json = False


@ctl.command
def status(*, where: Where | None = None, json: Json = False) -> Reply:
    """Show state, nodes and the last recoveries."""
    return Reply(CtlStatusDocument(status=_status(where)), lambda d: _show(d.status))


@ctl.command
def why(*, where: Where | None = None, json: Json = False) -> Reply:
    """Explain the layout: what else was possible, at what cost, and where ranks run."""
    found = _status(where)
    names = set(CtlWhyDocument.__struct_fields__) - {"schema"}
    return Reply(CtlWhyDocument(**{name: getattr(found, name) for name in names}), _explain)


@ctl.command
def restart(*, how: How | None = None) -> Reply:
    """Save, and start a new generation."""
    return _order(OrderKind.RESTART, (), how)


@ctl.command
def exclude(*nodes: Name, how: How | None = None) -> Reply:
    """Leave nodes out from now on, and go on without them."""
    return _order(OrderKind.EXCLUDE, nodes, how)


@ctl.command
def drain(*nodes: Name, how: How | None = None) -> Reply:
    """Leave nodes out from now on, because they will be taken away."""
    return _order(OrderKind.DRAIN, nodes, how)


@ctl.command
def add(*nodes: Name, how: How | None = None) -> Reply:
    """Take nodes back that were left out."""
    return _order(OrderKind.ADD, nodes, how)


@ctl.command
def pause(*, how: How | None = None) -> Reply:
    """Save, end all workers, and wait for resume."""
    return _order(OrderKind.PAUSE, (), how)


@ctl.command
def resume(*, how: How | None = None) -> Reply:
    """Go on after pause."""
    return _order(OrderKind.RESUME, (), how)


@ctl.command
def stop(*, how: How | None = None) -> Reply:
    """Save, and end the job: launchers end with exit code 130."""
    return _order(OrderKind.STOP, (), how)


# --- the controller -------------------------------------------------------------------------------


def _status(where: Where | None) -> Status:
    link = _link(where or Where())
    try:
        return link.status()
    finally:
        link.close()


def _link(where: Where) -> OperatorLink:
    def find() -> str:
        if where.controller is not None:
            return where.controller
        newest = open_places(where.name, where.place()).leader.newest()
        if newest is None:
            raise NotFoundError(
                "no controller of this job was found",
                where=f"job {where.name}",
                hint="give --controller HOST:PORT or --log URL",
            )
        return newest.address

    find()  # if there never was one, nothing is worth waiting for
    secret = job_secret(where.name, run_folder())
    return OperatorLink(find, where.name, secret, name=_person(), timeout_s=_ANSWER_S)


def _person() -> str:
    try:
        return getpass.getuser()[:200]
    except (OSError, KeyError):
        return f"user {os.getuid()}"


def _order(kind: OrderKind, nodes: tuple[str, ...], how: How | None) -> Reply:
    how = how or How()
    link = _link(how)
    try:
        before = link.status()
        answer = link.order(Order(kind=kind, nodes=nodes, reason=how.reason))
        if not answer.ok:
            raise RefusedError(
                answer.text.partition("\n")[0], kind=answer.kind, hint="see ckptd ctl status"
            )
        now = _awaited(link, kind, nodes, before, how.timeout) if how.wait else link.status()
        if how.wait and now.state == "aborted" and kind is not OrderKind.STOP:
            raise RefusedError(
                f"the job has ended before the order to {kind} was carried out",
                found=f"{now.ended}: {now.reason}",
            )
    finally:
        link.close()
    document = CtlOrderDocument(
        order=str(kind), nodes=nodes, state=now.state, generation=now.generation, step=now.step
    )
    what = f"{kind}: {'carried out' if how.wait else 'taken in'}; the job:"
    return Reply(
        document, lambda d: print(f"{what} {d.state}, generation {d.generation}, step {d.step}")
    )


def _awaited(
    link: OperatorLink, kind: OrderKind, nodes: tuple[str, ...], before: Status, timeout: float
) -> Status:
    """Return the status in which an order has been carried out."""
    end = time.monotonic() + timeout
    last = before
    while time.monotonic() < end:
        try:
            last = link.status()
        except CkptdError:
            if kind is OrderKind.STOP:
                return last  # it has ended, and its controller with it
            raise
        if _carried_out(kind, nodes, before, last):
            return last
        time.sleep(0.1)
    raise DeadlineError(
        f"the order to {kind} was not carried out in time",
        wanted=f"within {timeout:g} s",
        found=f"{last.state}: {last.reason}",
        hint="the order remains in effect; ckptd ctl status shows progress",
    )


def _carried_out(kind: OrderKind, nodes: tuple[str, ...], before: Status, now: Status) -> bool:
    if kind is OrderKind.ADD:
        return True
    if kind is OrderKind.STOP or now.state in _ENDED:
        return now.state in _ENDED
    if kind is OrderKind.PAUSE:
        return now.state == "parked"
    if kind in (OrderKind.EXCLUDE, OrderKind.DRAIN):
        used = {row.name for row in now.nodes if not row.spare and row.running}
        return now.state == "running" and not used.intersection(nodes)
    newer = now.generation > before.generation or kind is OrderKind.RESUME
    return now.state == "running" and newer


# --- for people -----------------------------------------------------------------------------------


def _show(found: Status) -> None:
    shape = f"{found.shape} on {found.world} ranks" if found.shape is not None else "not begun"
    reason = f": {found.reason}" if found.reason else ""
    print(f"job {found.job}: {found.state}{reason}")
    print(f"since {time_text(found.since)}, generation {found.generation}, step {found.step}")
    print(f"layout {shape}; planned {found.planned}")
    print(f"controller {found.address}, log {found.log}")
    print()
    print_rows(
        found.nodes,
        {
            "NODE": lambda row: row.name,
            "IS": _is,
            ">SLOTS": lambda row: row.slots,
            ">GENERATION": lambda row: row.running or "-",
            ">FAULTS": lambda row: row.faults,
        },
    )
    for row in found.nodes:
        for text in row.sick:
            print_text(f"- {row.name}: {text} (out of use)", 2)
    if found.recoveries:
        print()
        _show_recoveries(found.recoveries[-_MOST_SHOWN:])
    if found.goodput:
        total = sum(found.goodput.values()) or 1.0
        parts = [f"{name} {100 * s / total:.1f} %" for name, s in found.goodput.items() if s]
        print()
        print_text("time: " + ", ".join(parts), 2)
    for text in found.told[-_MOST_SHOWN:]:
        print_text(f"- {text}", 2)


def _explain(found: CtlWhyDocument) -> None:
    if found.shape is None:
        print_text(f"job {found.job} has no layout yet: {found.reason}")
        return
    print(f"job {found.job}: {found.shape} on {found.shape.world} ranks; planned {found.planned}")
    print(f"chosen {time_text(found.chosen_at)}, generation {found.generation}")
    for text in found.why or ("chosen by an older controller, which kept no reasons",):
        print_text(f"- {text}", 2)
    possible = [one for one in found.candidates if not one.refused]
    if possible:
        print()
        _show_costs(possible)
    print()
    stage = found.shape.dp * found.shape.tp
    homes: dict[tuple[int, str], list[str]] = {}
    for row in found.nodes:
        for number in dict.fromkeys(rank // stage for rank in row.ranks):
            homes.setdefault((number, "/".join(row.domains) or "-"), []).append(row.name)
    print_rows(
        sorted(homes.items()),
        {
            ">STAGE": lambda row: row[0][0],
            "DOMAIN": lambda row: row[0][1],
            ">NODES": lambda row: len(row[1]),
            "NAMES": lambda row: first_few(row[1], _MOST_SHOWN),
        },
    )
    if idle := [row for row in found.nodes if not row.ranks]:
        print()
    groups = sum(row.slots // found.shape.tp for row in idle if _is(row) == "spare")
    for row in idle:
        print_text(f"- {row.name}, {_is(row)}: {_idle_why(row, found, groups)}", 2)


def _show_costs(rows: list[Candidate]) -> None:
    chosen = rows[0].cost or 1.0

    def part(seconds: float) -> str:
        return f"{100 * seconds / chosen:.1f} %"

    print("A step of each layout that was possible, in parts of a step of the chosen one:")
    print_rows(
        rows,
        {
            "LAYOUT": lambda row: row.shape,
            ">STEP": lambda row: part(row.cost),
            ">COMPUTING": lambda row: part(row.cost - row.idle - row.network),
            ">IDLE": lambda row: part(row.idle),
            ">NETWORK": lambda row: part(row.network),
            ">IN ONE DOMAIN": lambda row: (
                "-" if row.within is None else f"{row.within} of {row.shape.pp}"
            ),
            ">LOAD STATE": lambda row: f"{row.moves} of {row.shape.world}",
        },
    )


def _idle_why(row: NodeRow, found: CtlWhyDocument, groups: int) -> str:
    shape = found.shape or found.planned
    if row.out_until_s != 0:
        return row.out_why or "a controller before this one decided it"
    if not row.up:
        return "no heartbeat"
    if shape == found.planned:
        return "all planned ranks have a place"
    if groups >= shape.pp:
        return "it came after this layout was chosen; it is taken in once it has been there a while"
    return f"one more replica needs {shape.pp * shape.tp} free slots, {shape.tp} on one node"


def _is(row: NodeRow) -> str:
    if row.out_until_s is None:
        return "left out"
    if row.out_until_s > 0:
        return f"left out for {row.out_until_s:.0f} s"
    if not row.up:
        return "gone"
    return "spare" if row.spare else "in use"


_SPLITS = ("detect", "fence", "plan", "spawn", "import_", "init", "load", "first_step", "total")


def _show_recoveries(rows: tuple[Recovery, ...]) -> None:
    columns: dict[str, Callable[[Recovery], object]] = {
        "LEVEL": lambda row: f"L{row.level}",
        **{f">{n.upper().replace('_', ' ').strip()}": partial(_seconds, name=n) for n in _SPLITS},
        ">LOST": lambda row: "-" if row.steps_lost is None else row.steps_lost,
    }
    print_rows(rows, columns)
    for row in rows:
        print_text(f"- L{row.level}: {row.cause}", 2)


def _seconds(row: Recovery, name: str) -> str:
    return f"{getattr(row, name):.2f}"
