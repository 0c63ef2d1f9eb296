"""Runs the watcher: in the node's agent or as a process; its arguments, ``--floor``.

``python -m ckptd.monitor.agent.watched --job NAME --daemon URL [--node NAME] [--rings FOLDER]
[--floor PHASE=SECONDS]``
watches until a signal, or until its standard input is closed: so it ends with its parent.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ckptd.base.net.signing import job_secret
from ckptd.base.runtime.agentlink import AgentPlace, run_folder
from ckptd.base.runtime.host import node_name
from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError, StoreError, UsageError
from ckptd.monitor.agent.probes import listen_for_probes, shown_address
from ckptd.monitor.agent.rings import Rings
from ckptd.monitor.agent.uplink import Uplink
from ckptd.monitor.agent.watcher import Watcher
from ckptd.monitor.job import Phase
from ckptd.monitor.rules.limits import HangLimits

RINGS_VARIABLE = "CKPTD_RINGS"

_log = logging.getLogger("ckptd.monitor")
_MOST_JOB = 128


def floors_of(words: Mapping[str, float] | None) -> HangLimits:
    """Return limits with the floors of some phases changed, seconds by the phase's name.

    Raises
    ------
    UsageError
        There is no such phase, or a time is not above 0.
    """
    limits = HangLimits()
    for name, seconds in (words or {}).items():
        if name.upper() not in Phase.__members__ or not 0 < seconds < 1e9:
            raise UsageError(
                "invalid --floor",
                where="--floor",
                wanted=f"PHASE=SECONDS, of {', '.join(p.lower() for p in Phase.__members__)}",
                found=f"{name}={seconds}",
            )
        limits.floors[Phase[name.upper()]] = seconds
    return limits


@contextmanager
def watching(
    url: str,
    job: str,
    *,
    node: str | None = None,
    rings: Path | None = None,
    ring_job: str | None = None,
    limits: HangLimits | None = None,
    run_dir: str | None = None,
) -> Iterator[Watcher]:
    """Watch the ranks of this node, and report to the daemon at `url`, while the block runs.

    Parameters
    ----------
    url
        Of the daemon, which need not be there yet.
    job, node
        Names; `node` is by default this host's.
    rings
        Folder of the rings; by default ``CKPTD_RINGS``, or ``rings`` in the run folder.
    ring_job
        Name of the job in the rings that are meant, those of `node`; None takes all that lie there.
    limits
        As of `Watcher`.
    run_dir
        The run folder, where the job's secret lies; see `ckptd.base.runtime.agentlink.run_folder`.

    Raises
    ------
    UsageError
        Not a URL. As of `job_secret`.
    RefusedError
        As of `job_secret` and `run_folder`.
    """
    job = job[:_MOST_JOB]
    folder = run_folder(run_dir)
    secret = job_secret(job, folder)
    chosen = rings or os.environ.get(RINGS_VARIABLE) or folder / "rings"
    with ExitStack() as stack:
        uplink = Uplink(url, secret)
        stack.callback(uplink.close)
        address, daemon = "", urlsplit(url).hostname or "localhost"
        try:
            answerer = stack.enter_context(listen_for_probes(secret, daemon))
            address = shown_address(answerer, daemon)
        except StoreError as error:  # the rest of the watch matters more
            _log.warning("%s", error)
        name = node_name(node)
        watcher = Watcher(
            job,
            name,
            Rings(Path(chosen), ring_job, None if ring_job is None else name),
            uplink,
            secret,
            limits=limits,
            address=address,
        )
        stack.callback(watcher.close)
        watcher.start()
        yield watcher


def beside_agent(
    url: str, place: AgentPlace, ring_job: str, run_dir: str | None = None
) -> AbstractContextManager[object]:
    """Watch the ranks of an agent's node in its process; the part ``watching``, as `watching`."""
    return watching(url, place.job, node=place.node, ring_job=ring_job, run_dir=run_dir)


def main() -> None:
    """Watch until a signal, or the end of standard input."""
    report_crashes()
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--node", help="Name of the node as in its ranks; by default the host name")
    parser.add_argument("--rings", type=Path)
    parser.add_argument("--floor", action="append", default=[])
    given = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        limits = floors_of({k: _seconds(v) for k, _, v in (f.partition("=") for f in given.floor)})
        with watching(given.daemon, given.job, node=given.node, rings=given.rings, limits=limits):
            _until_signalled()
    except CkptdError as error:
        sys.exit(str(error))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # which no phase may have


def _until_signalled() -> None:
    """Return at TERM or INT, or when standard input ends."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        try:
            selector.register(0, selectors.EVENT_READ)
        except (OSError, ValueError):  # a file, or nothing at all
            _log.debug("standard input is not waited for")
        while True:
            for key, _ in selector.select():
                if key.fd == read or not os.read(0, 4096):
                    return


if __name__ == "__main__":
    main()
