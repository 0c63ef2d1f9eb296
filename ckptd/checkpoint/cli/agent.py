"""``ckptd agent``: runs a node's agent, shows what it holds, stops it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Annotated

from cyclopts import App, Parameter

from ckptd.base.runtime.agentlink import AgentPlace, listen, locked, reach, run_folder
from ckptd.base.runtime.host import host_id
from ckptd.checkpoint.cli.address import spec_of
from ckptd.checkpoint.format.words import ranks_text
from ckptd.checkpoint.save.messages import AgentContents, AskEnd, AskStatus, visit
from ckptd.cli.output import Document, Json, Reply, flag, note, option, print_rows
from ckptd.errors import CkptdError, ConflictError, NotFoundError, UsageError, size_text
from ckptd.parts import part

agent = App(
    name="agent",
    help="Run, show or stop a node's agent.",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
)

MaybeRoot = Annotated[str | None, option("Path or URL of the job's root; need not exist yet.")]
Job = Annotated[str | None, option("Value of CKPTD_JOB in the trainers, if set.")]
Node = Annotated[str | None, option("Value of CKPTD_NODE in the trainers, if set.")]


class AgentRunDocument(Document, frozen=True, kw_only=True, tag="agent run"):
    """The document that ``ckptd agent run --json`` prints once it listens.

    Attributes
    ----------
    job, node
        Whose agent it is.
    socket
        Where trainers find it.
    pid
        Its process.
    metrics
        URL of its metrics; null when they are not served.
    """

    job: str
    node: str
    socket: str
    pid: int
    metrics: str | None


class AgentStatusDocument(Document, frozen=True, kw_only=True, tag="agent status"):
    """The document that ``ckptd agent status --json`` prints.

    Attributes
    ----------
    run_folder
        Where sockets of this user's agents lie.
    agents
        Those that answered; see `AgentContents`.
    silent
        Sockets of those that did not.
    """

    run_folder: str
    agents: tuple[AgentContents, ...]
    silent: tuple[str, ...]


class AgentStopDocument(Document, frozen=True, kw_only=True, tag="agent stop"):
    """The document that ``ckptd agent stop --json`` prints: the agent that was asked, and how."""

    agent: AgentContents
    now: bool


@agent.command
def run(
    root: MaybeRoot = None,
    /,
    *,
    job: Job = None,
    node: Node = None,
    stay: Annotated[bool, flag("Serve until a signal, even when idle.")] = False,
    watch: Annotated[
        str | None,
        option("Watch ranks and report to the daemon at this URL; stays. Default: CKPTD_DAEMON."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        option(
            "Serve /metrics on this port of the loopback address; 0 picks a free one. By default "
            "CKPTD_AGENT_METRICS=HOST:PORT."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Run a node's agent in the foreground, instead of one that a checkpointer starts.

    It is found by checkpointers of the same user, root (or CKPTD_JOB), node and run folder. TERM
    or INT ends it when its trainers have ended, a second one at once.
    """
    from ckptd.checkpoint.agent.node import NodeAgent, end_on_signals

    place = _place(root, job, node)
    with ExitStack() as stack:
        metrics = _serve_metrics(stack, metrics_port)
        with locked(place):
            _refuse_second(place)
            listener = listen(place)
        if url := watch or os.environ.get("CKPTD_DAEMON"):
            ring_job = job or os.environ.get("CKPTD_JOB") or ""
            stack.enter_context(part("watching")(url, place, ring_job))
        serving = NodeAgent(listener, place, stay=stay or watch is not None)
        end_on_signals(serving)
        document = AgentRunDocument(
            job=place.job,
            node=place.node,
            socket=str(place.socket),
            pid=os.getpid(),
            metrics=metrics,
        )
        Reply(document, _show_listening).print(as_json=json)
        print(end="", flush=True)  # the process that started it waits for this
        serving.run()
    return 0


def _serve_metrics(stack: ExitStack, port: int | None) -> str | None:
    from ckptd.checkpoint.agent.metrics import serve_metrics

    name = "CKPTD_AGENT_METRICS"
    given = os.environ.get(name) if port is None else f"127.0.0.1:{port}"
    where = name if port is None else "--metrics-port"
    return stack.enter_context(serve_metrics(given, where)) if given else None


def _refuse_second(place: AgentPlace) -> None:
    sock = reach(place.socket)
    if sock is not None:
        sock.close()
        raise ConflictError(
            "an agent of this job runs on this node already",
            where=str(place.socket),
            hint="ckptd agent status shows it; ckptd agent stop ends it",
        )


@agent.command(name=("status", "ls"))
def status(
    root: MaybeRoot = None, /, *, job: Job = None, node: Node = None, json: Json = False
) -> Reply:
    """List the agents of this user on this machine, and the snapshots in their memory.

    With ROOT or --job that job's only; the exit code is 4 when there is none. It is 1 when one does
    not answer.
    """
    found: list[AgentContents]
    silent: list[str]
    if root or job:
        found, silent = [_ask(_place(root, job, node), AskStatus())], []
    else:
        found, silent = _everybody()
    document = AgentStatusDocument(
        run_folder=str(run_folder()), agents=tuple(found), silent=tuple(silent)
    )
    return Reply(document, _show_all, 1 if silent else 0)


@agent.command
def stop(
    root: MaybeRoot = None,
    /,
    *,
    job: Job = None,
    node: Node = None,
    now: Annotated[
        bool, flag("Do not wait for the trainers: they start another agent at their next save.")
    ] = False,
    json: Json = False,
) -> Reply:
    """Ask a job's agent to end when its trainers have ended; returns at once.

    It does not wait for another trainer. Before it ends, it writes the newest complete snapshot to
    the root.
    """
    asked = _ask(_place(root, job, node), AskEnd(now))
    waits = f" when its {len(asked.ranks)} trainers have ended" if asked.ranks and not now else ""
    document = AgentStopDocument(agent=asked, now=now)
    return Reply(document, lambda _: print(f"process {asked.pid} ends{waits}"))


# -- finding them ----------------------------------------------------------------------------------


def _place(root: str | None, job: str | None, node: str | None) -> AgentPlace:
    """Return where checkpointers look for the agent: by the same rules."""
    name = job or os.environ.get("CKPTD_JOB")
    if not name:
        if not root:
            raise UsageError(
                "no job given",
                wanted="ROOT, --job or CKPTD_JOB",
                hint="ckptd agent status",
            )
        with spec_of(root).open() as store:
            name = store.url
    return AgentPlace(name, node or host_id())


def _ask(place: AgentPlace, message: AskStatus | AskEnd) -> AgentContents:
    sock = reach(place.socket)
    if sock is None:
        raise NotFoundError(
            "no agent of this job runs on this node",
            where=str(place.socket),
            wanted=f"job {place.job}, node {place.node}",
            hint="ckptd agent status lists those that there are; CKPTD_RUN_DIR, CKPTD_JOB and"
            " CKPTD_NODE must be as in the trainers",
        )
    return visit(sock, message)


def _everybody() -> tuple[list[AgentContents], list[str]]:
    """Return the agents that answer, and the sockets of those that listen and do not."""
    found: list[AgentContents] = []
    silent: list[str] = []
    for path in sorted(run_folder().glob("*.sock")):
        sock = reach(path)
        if sock is None:  # what one that was killed left behind
            continue
        try:
            found.append(visit(sock, AskStatus()))
        except CkptdError as error:
            note(f"{path}: {error.message}")
            silent.append(str(path))
    return found, silent


# -- for people ------------------------------------------------------------------------------------


def _show_listening(document: AgentRunDocument) -> None:
    print(f"agent of {document.job} on {document.node}: listens at {document.socket}")
    if document.metrics:
        print(f"metrics: {document.metrics}")


def _show_all(document: AgentStatusDocument) -> None:
    if not document.agents:
        print(f"no agent answers in {document.run_folder}")
    for number, one in enumerate(document.agents):
        print(end="\n" if number else "")
        _show(one)


def _show(one: AgentContents) -> None:
    trainers = f"trainers {ranks_text(one.ranks)}" if one.ranks else "no trainers"
    print(f"{one.job} on {one.node}: process {one.pid}, {trainers}, {_end(one)}")
    if one.folder is not None:
        print(f"folder {one.folder}")
    if not one.snapshots:
        print("no snapshot in memory")
        return
    print_rows(
        one.snapshots,
        {
            ">STEP": lambda s: s.step,
            ">GEN": lambda s: s.generation,
            "SHARES OF RANKS": lambda s: ranks_text(s.ranks),
            "GUESTS": lambda s: ranks_text(s.guests),
            ">OF": lambda s: s.world,
            ">SIZE": lambda s: size_text(s.bytes),
            "WHOLE": lambda s: "yes" if s.whole else "no",
            "COMPLETE ON": lambda s: ", ".join(s.complete),
        },
    )


def _end(one: AgentContents) -> str:
    if one.ends_in_s is not None:
        return f"ends in {one.ends_in_s:.0f} s"
    if one.ranks:
        return "ends with them" if one.ending else "waits for them"
    return "stays"
