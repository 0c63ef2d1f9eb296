"""``ckptd controller``: its options, a job's shapes and memory for the policy, its limits.

In it: options that become `JobSpec` and `ControllerSettings`; the document that ``--json`` prints.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ckptd.base.net.address import Address
from ckptd.base.net.signing import job_secret, need_secret
from ckptd.base.runtime.agentlink import run_folder
from ckptd.cli.output import Document, Json, note, print_document
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from ckptd.elastic.control.running import Setup
    from ckptd.elastic.control.states import ControllerSettings
    from ckptd.elastic.policy import JobSpec, MemoryNeed, Shape


class ControllerDocument(Document, frozen=True, kw_only=True, tag="controller"):
    """The document that ``ckptd controller --json`` prints once nodes may come.

    Attributes
    ----------
    job
        Whose controller it is.
    address
        ``HOST:PORT``.
    pid
        Its process.
    log
        Where the membership log is.
    life
        Which life of which controller it is.
    """

    job: str
    address: str
    pid: int
    log: str
    life: str


@Parameter(name="*")
@dataclass(frozen=True)
class PolicyOptions:
    """Options that describe a job to the layout policy."""

    nodes: Annotated[str, Parameter(help="Number of nodes: N or MIN:MAX.")] = "1"
    slots: Annotated[int, Parameter(help="Number of ranks per node.")] = 1
    layout: Annotated[
        str | None,
        Parameter(help="pp=P,dp=D,tp=T at full size; all data-parallel by default."),
    ] = None
    pp: Annotated[
        str, Parameter(help="Other pipeline sizes that the layers allow, such as 1,2.")
    ] = ""
    tp: Annotated[
        str, Parameter(help="Other tensor-parallel sizes that are allowed, such as 1,2.")
    ] = ""
    microbatches: Annotated[
        int | None, Parameter(help="Micro-batches per step, over all ranks together; constant.")
    ] = None
    least: Annotated[
        int | None, Parameter(help="Minimum number of ranks; by default those of MIN nodes.")
    ] = None
    memory: Annotated[
        str | None,
        Parameter(help="limit=B,replicated=B,sharded=B,activations=B in bytes."),
    ] = None


def controller(
    *,
    job: Annotated[
        str | None,
        Parameter(help="Name of the job; by default CKPTD_JOB, or 'default'.", show_default=False),
    ] = None,
    what: PolicyOptions | None = None,
    log: Annotated[
        str | None,
        Parameter(
            help="Path, URL of a store or etcd://HOST:PORT/PREFIX for the membership log; a folder"
            " of this machine by default.",
            show_default=False,
        ),
    ] = None,
    bind: Annotated[
        str, Parameter(help="Address to listen at; other than loopback needs CKPTD_SECRET.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 picks a free one.")] = 0,
    host: Annotated[
        str | None,
        Parameter(help="Host name that nodes connect to; by default its address."),
    ] = None,
    after: Annotated[
        int | None,
        Parameter(
            help="Number of the controller that this one replaces; it ends if another one replaced "
            "it first."
        ),
    ] = None,
    events: Annotated[
        Path | None, Parameter(help="Append each change to this file, as a line of JSON.")
    ] = None,
    setting: Annotated[
        tuple[str, ...],
        Parameter(name="--set", help="NAME=VALUE: set a deadline or limit; may be repeated."),
    ] = (),
    json: Json = False,
) -> int:
    """Control a job in the foreground until it ends.

    Killed at any instant and started again with the same log, it goes on; training goes on
    meanwhile. TERM or INT ends the controller and not the job: ckptd ctl stop does that.
    """
    from ckptd.base.net.address import listen_at
    from ckptd.elastic.control.running import Setup, run_controller
    from ckptd.elastic.places import open_places
    from ckptd.elastic.signpost import Signpost, put_up

    name = job or os.environ.get("CKPTD_JOB") or "default"
    described = _job(what or PolicyOptions())
    settings = _settings(setting)
    need_secret(bind, "the controller")
    secret = job_secret(name, run_folder())
    places = open_places(name, log)
    with listen_at(bind, port, "the controller") as sock:
        setup = Setup(
            name=name,
            secret=secret,
            job=described,
            settings=settings,
            places=places,
            sock=sock,
            address=_address(sock, host),
            after=after,
            several=_range((what or PolicyOptions()).nodes)[1] > 1,
            events=events,
            say=_say,
        )
        post = Signpost(job=name, address=setup.address, log=places.url, pid=os.getpid())
        with put_up(post):
            ending = run_controller(setup, lambda: _announce(setup, json))
        if ending is None:
            note("this controller ends; training continues and waits for another controller")
            return 0
        return ending.code


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the reader is gone, and the job goes on
        print(text, file=sys.stderr, flush=True)


def _announce(setup: Setup, json: bool) -> None:
    if json:
        print_document(
            ControllerDocument(
                job=setup.name,
                address=setup.address,
                pid=os.getpid(),
                log=setup.places.url,
                life=setup.life,
            )
        )
    else:
        print(setup.address)
    print(end="", flush=True)  # the process that started it waits for this


def _job(what: PolicyOptions) -> JobSpec:
    from ckptd.elastic.policy import JobSpec

    low, high = _range(what.nodes)
    if what.slots < 1:
        raise _bad("--slots", str(what.slots), "1 or more")
    planned = _shape(what.layout, high * what.slots)
    return JobSpec(
        # With so many, every further replica makes steps shorter.
        microbatches=what.microbatches or planned.dp * (planned.dp + 1),
        planned=planned,
        pp=_sizes("--pp", what.pp),
        tp=_sizes("--tp", what.tp),
        memory=_memory(what.memory),
        least=what.least or min(low * what.slots, planned.world),
    )


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise _bad("--nodes", text, "MIN:MAX, or how many")
    return least, most


def _shape(text: str | None, world: int) -> Shape:
    from ckptd.elastic.policy import Shape

    if text is None:
        return Shape(1, world, 1)
    sizes = {"pp": 1, "tp": 1, **_pairs("--layout", text, ("pp", "dp", "tp"))}
    sizes.setdefault("dp", max(world // max(sizes["pp"] * sizes["tp"], 1), 1))
    return Shape(**sizes)


def _memory(text: str | None) -> MemoryNeed | None:
    from ckptd.elastic.policy import MemoryNeed

    if text is None:
        return None
    sizes = _pairs("--memory", text, ("limit", "replicated", "sharded", "activations"))
    if "limit" not in sizes:
        raise _bad("--memory", text, "limit=BYTES at least")
    return MemoryNeed(**sizes)


def _pairs(where: str, text: str, names: tuple[str, ...]) -> dict[str, int]:
    out = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        if name not in names or not (value.isascii() and value.isdecimal()):
            raise _bad(where, text, ",".join(f"{name}=NUMBER" for name in names))
        out[name] = int(value)
    return out


def _sizes(where: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise _bad(where, text, "sizes such as 1,2")
    return tuple(int(part) for part in parts)


def _settings(assignments: tuple[str, ...]) -> ControllerSettings:
    from ckptd.elastic.control.states import ControllerSettings, ExitCodes

    settings = ControllerSettings()
    known = {one.name: getattr(settings, one.name) for one in fields(settings)}
    for text in assignments:
        name, _, value = text.partition("=")
        if name == "no_restart_on":
            ExitCodes(value)
            settings = replace(settings, no_restart_on=value)
            continue
        try:
            whole = isinstance(known.get(name), int | None)
            number: float = int(value) if whole else float(value)
        except ValueError:
            number = -1
        if name not in known or not 0 <= number < 1e12:
            raise _bad("--set", text, "NAME=NUMBER with NAME of " + ", ".join(sorted(known)))
        changes: dict[str, Any] = {name: number}
        settings = replace(settings, **changes)
    return settings


def _bad(where: str, found: str, wanted: str) -> UsageError:
    return UsageError("invalid value of an option", where=where, wanted=wanted, found=found)


def _address(sock: socket.socket, host: str | None) -> str:
    name, port = sock.getsockname()[:2]
    if host is None:
        anywhere = ipaddress.ip_address(name).is_unspecified
        host = socket.gethostname() if anywhere else name
    return str(Address(host, port))
