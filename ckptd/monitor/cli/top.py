"""``ckptd top``: asks a daemon and draws ranks and incidents in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ckptd.cli.options import Daemon, DaemonJob
from ckptd.cli.output import Document, Json, Reply, flag, option, time_text
from ckptd.errors import CkptdError, TransientStoreError, UsageError

if TYPE_CHECKING:
    from ckptd.monitor.daemon.client import DaemonClient

_MARGIN = 8
"""Lines of the screen that are not ranks."""
_VERSIONS_S = 10.0
"""Between two questions for published weights, in seconds: the daemon reads files for it."""


class TopDocument(Document, frozen=True, kw_only=True, tag="top"):
    """The document that ``ckptd top --json`` prints.

    Attributes
    ----------
    url
        Of the daemon.
    job, ranks
        As GET /api/v1/job and /api/v1/ranks tell them.
    incidents
        Open ones, the newest first, as GET /api/v1/incidents tells them.
    versions
        Of published weights, as GET /api/v1/checkpoints tells them; None: none are.
    """

    url: str
    job: dict[str, Any]
    ranks: dict[str, Any]
    incidents: list[dict[str, Any]]
    versions: dict[str, Any] | None = None


def top(
    *,
    daemon: Daemon = None,
    job: DaemonJob = None,
    every: Annotated[float, Parameter(help="Seconds between updates.")] = 1.0,
    limit: Annotated[
        int | None,
        option("Number of ranks to list; as many as fit, or 20 with --once."),
    ] = None,
    once: Annotated[bool, flag("Print it once, as text, and end.")] = False,
    json: Json = False,
) -> Reply | int:
    """Show a job's ranks, the least well first, and its open incidents, live.

    Ctrl-C ends it. Where standard output is no terminal it prints once. While the daemon does not
    answer it shows since when, and tries again.
    """
    from ckptd.monitor.daemon.client import connect

    if not every >= 0.1:
        raise UsageError("--every is too short", wanted="0.1 s", found=every)
    if limit is not None and limit < 0:
        raise UsageError("--limit is negative", found=limit)
    client = connect(daemon, job)
    if json or once or not sys.stdout.isatty():
        asked = _asked(client, _versions(client))
        return Reply(asked, lambda d: _print_once(d, 20 if limit is None else limit))
    _live(client, lambda: connect(daemon, job), every, limit)
    return 0


def _versions(client: DaemonClient) -> dict[str, Any] | None:
    found: dict[str, Any] | None = client.get("/checkpoints").get("versions")
    return found


def _asked(client: DaemonClient, versions: dict[str, Any] | None) -> TopDocument:
    return TopDocument(
        url=client.url,
        job=client.get("/job"),
        ranks=client.get("/ranks"),
        incidents=client.get("/incidents", state="open", limit=8)["incidents"],
        versions=versions,
    )


def _print_once(d: TopDocument, limit: int) -> None:
    from ckptd.cli.screen import screen
    from ckptd.cli.terminal import drawing

    console = drawing(sys.stdout)
    if not console.is_terminal:
        console.width = 120  # a file has no width
    console.print(screen(d.job, d.ranks, d.incidents, limit, versions=d.versions))


def _live(
    client: DaemonClient, again: Callable[[], DaemonClient], every: float, limit: int | None
) -> None:
    from rich.live import Live

    from ckptd.cli.screen import screen
    from ckptd.cli.terminal import drawing

    console = drawing(sys.stdout)
    known, lost = _asked(client, _versions(client)), 0.0
    looked = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            rows = console.height - _MARGIN - 3 * len(known.incidents) - 2 * bool(known.versions)
            drawn = screen(
                known.job,
                known.ranks,
                known.incidents,
                max(rows, 0) if limit is None else min(limit, max(rows, 0)),
                time_text(lost) if lost else "",
                known.versions,
            )
            live.update(drawn, refresh=True)
            time.sleep(every)
            try:
                versions = known.versions
                if time.monotonic() - looked > _VERSIONS_S:
                    versions, looked = _versions(client), time.monotonic()
                known, lost = _asked(client, versions), 0.0
            except TransientStoreError:
                lost = lost or time.time()
                with suppress(CkptdError):  # after a restart it may have another port
                    client = again()
