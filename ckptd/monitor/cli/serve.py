"""``ckptd serve``: options of the daemon, forwarder or simulated job, webhook, access, TLS."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ckptd.base.net.signing import (
    access_token,
    checked_secret,
    derived_key,
    job_secret,
    need_secret,
)
from ckptd.base.runtime.agentlink import run_folder
from ckptd.cli.output import Document, Json, flag, print_document
from ckptd.errors import UsageError
from ckptd.plugins import SIMULATIONS, load_entry

if TYPE_CHECKING:
    import socket
    from asyncio import AbstractEventLoop

    from ckptd.monitor.daemon.access import Access
    from ckptd.monitor.daemon.service import DaemonSetup, Service
    from ckptd.monitor.settings import WatchSettings

HOOK_VARIABLE = "CKPTD_WEBHOOK_SECRET"


class ServeDocument(Document, frozen=True, kw_only=True, tag="serve"):
    """The document that ``ckptd serve --json`` prints once it listens.

    Attributes
    ----------
    job
        Whose daemon it is.
    url
        Where it listens.
    login
        URL for a browser; it lets its holder act. Null of a forwarder.
    pid
        Its process.
    history
        The history file; null of a forwarder.
    forwards_to
        URL of the daemon above; null where there is none.
    """

    job: str
    url: str
    login: str | None = None
    pid: int
    history: str | None = None
    forwards_to: str | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Settings of the watch that differ from the defaults."""

    floor: Annotated[
        tuple[str, ...],
        Parameter(help="PHASE=SECONDS, such as train=30: short for --set floor.PHASE=SECONDS."),
    ] = ()
    setting: Annotated[
        tuple[str, ...],
        Parameter(name="--set", help="NAME=VALUE: a setting of the watch; may be repeated."),
    ] = ()
    policy: Annotated[
        tuple[str, ...],
        Parameter(help="KIND=ACTION, such as slow-rank=act: short for --set policy.KIND=ACTION."),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job that does not exist, to look at."""

    simulate: Annotated[int | None, Parameter(help="Show a simulated job of N ranks.")] = None
    fault: Annotated[
        tuple[str, ...],
        Parameter(help="Fault of the simulated job: KIND:RANK or KIND:RANK@SECONDS."),
    ] = ()


def serve(
    *,
    job: Annotated[
        str | None, Parameter(help="Name of the job; CKPTD_JOB, or default.", show_default=False)
    ] = None,
    bind: Annotated[
        str, Parameter(help="Address to listen at; other than loopback needs CKPTD_SECRET.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 picks a free one.")] = 0,
    name: Annotated[
        tuple[str, ...],
        Parameter(help="Host name that browsers may use for it; may be repeated."),
    ] = (),
    history: Annotated[
        Path | None, Parameter(help="History file; in the run folder by default.")
    ] = None,
    events: Annotated[
        tuple[str, ...], Parameter(help="Folder with recorded events of saves; may be repeated.")
    ] = (),
    watch: WatchOptions | None = None,
    record: Annotated[
        Path | None, Parameter(help="Record all messages to this new file, for ckptd replay.")
    ] = None,
    webhook: Annotated[str | None, Parameter(help="URL that incidents are POSTed to.")] = None,
    metrics_open: Annotated[bool, flag("Serve /metrics without a token on any address.")] = False,
    forward_to: Annotated[
        str | None, Parameter(help="Run as a forwarder: merge reports for this daemon.")
    ] = None,
    linger: Annotated[
        float | None, Parameter(help="End after this many seconds without a message from an agent.")
    ] = None,
    controller: Annotated[
        str | None,
        Parameter(
            help="The job's controller: HOST:PORT, the URL of its log, or auto for one of this"
            " machine. The daemon shows its state, sends it orders, and acts on incidents.",
            show_default=False,
        ),
    ] = None,
    simulated: SimulatedJob | None = None,
    json: Json = False,
) -> int:
    """Run a job's daemon in the foreground until TERM or INT.

    It prints a URL with a token that lets its holder read and act. Agents learn of it by
    ckptd agent run --watch URL, or CKPTD_DAEMON in their environment.
    """
    _need_packages()
    simulated = simulated or SimulatedJob()
    if simulated.fault and simulated.simulate is None:
        raise UsageError("--fault needs --simulate", where="--fault")
    job = job or os.environ.get("CKPTD_JOB") or ("simulated" if simulated.simulate else "default")
    need_secret(bind, "the daemon")
    secret = job_secret(job, run_folder())
    with ExitStack() as stack:
        from ckptd.base.net.address import listen_at

        sock = stack.enter_context(listen_at(bind, port, "the daemon"))
        if forward_to is not None:
            return _forward(stack, sock, job, secret, forward_to, name, json)
        from ckptd.monitor.daemon.service import DaemonSetup

        setup = DaemonSetup(
            job=job,
            secret=secret,
            history=history or run_folder() / "none",
            settings=_settings(watch or WatchOptions(), controller is not None),
            events=events,
            recording=record,
            webhook=webhook,
            webhook_key=_webhook_key(secret),
            controller=_controller(job, controller),
            url=_for_nodes(sock),
        )
        access = _access(secret, bind, name, metrics_open)
        return _serve(stack, sock, setup, access, history is None, linger, simulated, json)


def _for_nodes(sock: socket.socket) -> str:
    """Return the URL by which other machines reach the daemon, as far as it is known."""
    from ckptd.monitor.daemon.server import url_of

    anywhere = ip_address(sock.getsockname()[0]).is_unspecified
    return url_of(sock, gethostname() if anywhere else None)


def _serve(
    stack: ExitStack,
    sock: socket.socket,
    setup: DaemonSetup,
    access: Access,
    usual: bool,
    linger: float | None,
    simulated: SimulatedJob,
    json: bool,
) -> int:
    from ckptd.monitor.daemon.app import make_app
    from ckptd.monitor.daemon.place import DaemonAddress, DaemonPlace
    from ckptd.monitor.daemon.server import Serving, url_of
    from ckptd.monitor.daemon.service import Service

    place = DaemonPlace(setup.job)
    stack.enter_context(place.held())
    if usual:
        setup = replace(setup, history=place.history)
    saved: Path | None = None
    if simulated.simulate is not None and not setup.events:
        saved = Path(stack.enter_context(TemporaryDirectory(prefix="ckptd-simulated-")))
        setup = replace(setup, events=(str(saved),))
    service = Service(setup)
    stack.callback(service.close)
    address = DaemonAddress(
        job=setup.job,
        url=url_of(sock),
        token=access.login,
        pid=os.getpid(),
        history=str(setup.history),
    )

    def started(loop: AbstractEventLoop) -> None:
        # From now on a signal ends it in order, so the reader of this line may send one.
        service.start(loop)
        place.write(address)
        document = ServeDocument(
            job=address.job,
            url=address.url,
            login=address.login,
            pid=address.pid,
            history=address.history,
        )
        _announce(document, f"daemon of {address.job}: {address.login}", json)

    serving = Serving(
        make_app(service, access),
        sock,
        started=started,
        ending=service.hub.close,
        idle=_idle(service, linger),
    )
    if simulated.simulate is not None:
        _simulate(stack, service, simulated.simulate, simulated.fault, saved)
    serving.run()
    return 0


def _simulate(
    stack: ExitStack, service: Service, ranks: int, fault: tuple[str, ...], saved: Path | None
) -> None:
    simulate = load_entry(SIMULATIONS, "ckptd_simulated", "--simulate")
    feeder = simulate(service.setup.job, ranks, fault, saved, service.ingest.hand_in)
    stack.callback(feeder.close)


def _forward(
    stack: ExitStack,
    sock: socket.socket,
    job: str,
    secret: bytes,
    above: str,
    name: tuple[str, ...],
    json: bool,
) -> int:
    from ckptd.monitor.daemon.forward import Forwarder
    from ckptd.monitor.daemon.server import Serving, url_of

    forwarder = Forwarder(job, secret, above)
    stack.callback(forwarder.close)
    access = _access(secret, sock.getsockname()[0], name, False)
    url = url_of(sock)

    def started(_: AbstractEventLoop) -> None:
        forwarder.start()
        document = ServeDocument(job=job, url=url, pid=os.getpid(), forwards_to=above)
        _announce(document, f"forwarder of {job}: {url} to {above}", json)

    Serving(forwarder.app(access), sock, started=started, ending=lambda: None).run()
    return 0


def _announce(document: ServeDocument, text: str, json: bool) -> None:
    if json:
        print_document(document)
    else:
        print(text)
    print(end="", flush=True)  # the process that started it waits for this


def _idle(service: Service, linger: float | None) -> Callable[[], bool]:
    received_at = time.monotonic()
    taken = 0

    def idle() -> bool:
        nonlocal received_at, taken
        now = service.ingest.counts.taken["sheet"]
        if now != taken:
            received_at, taken = time.monotonic(), now
        return linger is not None and taken > 0 and time.monotonic() - received_at > linger

    return idle


def _webhook_key(secret: bytes) -> bytes:
    """Return the key of the webhook's signature: with it nothing else opens."""
    if given := os.environ.get(HOOK_VARIABLE):
        return checked_secret(os.fsencode(given), HOOK_VARIABLE)
    return derived_key(secret, "webhook").hex().encode()


def _need_packages() -> None:
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"the daemon needs {package.replace('_', '-')}, which is not installed",
                kind="missing-package",
                hint="pip install 'ckptd[monitor]'",
            )


def _access(secret: bytes, bind: str, names: tuple[str, ...], metrics_open: bool) -> Access:
    from ckptd.base.net.address import is_loopback
    from ckptd.monitor.daemon.access import Access

    return Access(
        token=access_token(secret),
        metrics_open=metrics_open or is_loopback(bind),
        names=frozenset(n.lower() for n in names),
    )


def _controller(job: str, said: str | None) -> Callable[[], str] | None:
    """Return what says where the controller is; UsageError, if that is none."""
    from ckptd.base.net.address import parse_address
    from ckptd.elastic.places import open_places

    if said is None:
        return None
    if re.fullmatch(r"[^/]+:\d+", said):
        parse_address(said)
        return lambda: said
    seat = open_places(job, None if said == "auto" else said).leader

    def newest() -> str:
        found = seat.newest()
        return found.address if found is not None else ""

    return newest


def _settings(given: WatchOptions, controlled: bool) -> WatchSettings:
    from ckptd.monitor.daemon.response import RUN_POLICY
    from ckptd.monitor.settings import WatchSettings, changed

    settings = WatchSettings(policy=dict(RUN_POLICY) if controlled else {})
    short = [f"floor.{text}" for text in given.floor]
    short += [f"policy.{text}" for text in given.policy]
    for assignment in (*short, *given.setting):
        settings = changed(settings, assignment)
    return settings
