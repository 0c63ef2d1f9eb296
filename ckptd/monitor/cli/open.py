"""``ckptd open``: the link to a job's web page."""

from __future__ import annotations

import socket
from typing import Annotated
from urllib.parse import urlsplit

from ckptd.cli.options import DaemonJob
from ckptd.cli.output import Document, Json, Reply, flag, note


class OpenDocument(Document, frozen=True, kw_only=True, tag="open"):
    """The document that ``ckptd open --json`` prints.

    Attributes
    ----------
    job
        The job that the page shows.
    link
        For a browser on this machine. It lets its holder read, and act unless only reading was
        asked for: keep it secret.
    """

    job: str
    link: str


def open(
    *,
    job: DaemonJob = None,
    read_only: Annotated[bool, flag("Print a link that lets its holder read and not act.")] = False,
    json: Json = False,
) -> Reply:
    """Print the link to the web page of a job whose daemon runs on this machine.

    The link lets its holder read and act: keep it secret. It is valid until the daemon ends.
    """
    from ckptd.monitor.daemon.place import find_daemon

    found = find_daemon(job)
    at = urlsplit(found.url)
    if at.hostname in ("127.0.0.1", "::1", "localhost") and not json:
        tunnel = f"ssh -L {at.port}:{at.hostname}:{at.port} {socket.gethostname()}"
        note(f"from another machine, before you open it: {tunnel}")
    link = found.reading if read_only else found.login
    return Reply(OpenDocument(job=found.job, link=link), lambda d: print(d.link))
