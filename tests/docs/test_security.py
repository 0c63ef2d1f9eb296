"""docs/reference/security.md has every door of the code, with what the code says of it.

``python -m tests.docs.test_security`` prints the tables as they should be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptd.base.net import door, wsgi
from ckptd.base.net.roles import DOORS
from ckptd.base.net.tls import LEAF_S
from ckptd.elastic import controller_server
from ckptd.monitor.agent import preflight, probes
from ckptd.monitor.daemon import server as daemon
from ckptd.publish import passing
from ckptd.publish import server as publish
from ckptd.store.net.session import Limits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/security.md"
LISTENS = {"listen_at", "create_server", "Door", "TCPStore", "serve_wsgi"}
STORE = Limits()


class Row(NamedTuple):
    """One door: the words that only people know, and where the code makes it."""

    name: str
    module: str
    where: str
    proof: str
    strangers: object
    wait_s: float | None
    clients: object
    purpose: str = ""


TLS = "TLS 1.3, both ends"
ROWS = (
    Row(
        "controller",
        "ckptd.elastic.cli.controller",
        "`--rdzv-endpoint`, `--bind`: loopback without a secret",
        TLS,
        controller_server._MOST_STRANGERS,
        controller_server._HANDSHAKE_S,
        "one a node; operators unbounded",
        "controller",
    ),
    Row(
        "store (`ckptd://`, memory of peers)",
        "ckptd.store.net.server",
        "`CKPTD_BIND`, or the interface towards `MASTER_ADDR`, any port; only of several nodes",
        f"{TLS}, of an authority of this node's key",
        STORE.strangers,
        STORE.greeting_s,
        STORE.connections,
        "store",
    ),
    Row(
        "publisher",
        "ckptd.publish.server",
        "as a store; rank 0 at `tcp://HOST:PORT` where that is given",
        TLS,
        door.MOST_STRANGERS,
        publish._GREETING_S,
        publish._MOST_CONNECTIONS,
        "publish 4",
    ),
    Row(
        "worker that passes on weights",
        "ckptd.publish.passing",
        "`Subscriber(pass_on=True)`: the interface towards the publisher, any port",
        TLS,
        door.MOST_STRANGERS,
        passing._GREETING_S,
        passing._MOST_CONNECTIONS,
        "pass on 1",
    ),
    Row(
        "link probe",
        "ckptd.monitor.agent.probes",
        "each watched node, any port",
        TLS,
        door.MOST_STRANGERS,
        probes._GREETING_S,
        probes._AT_ONCE,
        "probe",
    ),
    Row(
        "check of a cluster",
        "ckptd.monitor.agent.preflight",
        "`ckptd doctor --cluster`, `--rendezvous`; while it runs",
        TLS,
        door.MOST_STRANGERS,
        preflight._GREETING_S,
        preflight._MOST_HELLOS,
        "preflight",
    ),
    Row(
        "daemon: page, API, agents' reports",
        "ckptd.monitor.cli.serve",
        "`ckptd serve --bind`: loopback by default",
        "HTTP: token or session of people, MAC of agents",
        daemon._MOST_STRANGERS,
        daemon._HEAD_S,
        daemon._MOST_CONNECTIONS,
    ),
    Row(
        "metrics of an agent",
        "ckptd.base.net.wsgi",
        "`CKPTD_AGENT_METRICS`; none by default",
        "nothing: anybody may read numbers",
        wsgi._MOST,
        wsgi._REQUEST_S,
        "all are strangers",
    ),
    Row(
        "torch's store",
        "ckptd.elastic.torch.session.zygote_store",
        "`MASTER_ADDR:MASTER_PORT`",
        "nothing at the door: values carry a MAC of this life",
        "torch's",
        None,
        "torch's",
    ),
)


def table() -> str:
    """Return the doors between processes of several hosts, as they are in the code."""
    heads = ("door", "listens at", "proof", "answers as", "strangers at once", "they leave after")
    lines = ["| " + " | ".join((*heads, "clients at once")) + " |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        serves = f"`{DOORS[row.purpose].serves}`" if row.purpose else ""
        wait = "" if row.wait_s is None else f"{row.wait_s:g} s"
        cells = (row.name, row.where, row.proof, serves, row.strangers, wait, row.clients)
        lines.append(
            "| "
            + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
            + " |"
        )
    return "\n".join(lines)


def roles() -> str:
    """Return which role may send which message at which door."""
    lines = ["| door | role | messages |", "|---|---|---|"]
    for row in ROWS:
        if row.purpose:
            for role, may in DOORS[row.purpose].may.items():
                names = ", ".join(f"`{name.removeprefix('_')}`" for name in sorted(may))
                lines.append(f"| {row.name} | `{role}` | {names} |")
    return "\n".join(lines)


def listening() -> Iterator[str]:
    """Yield the modules of ckptd and its plugins that let other hosts' processes connect."""
    for top in ("ckptd", "plugins"):
        for path in (ROOT / top).rglob("*.py"):
            tree = ast.parse(path.read_text())
            calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
            names = {f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls}
            if names & LISTENS:
                found = path.relative_to(ROOT).with_suffix("")
                yield ".".join(part for part in found.parts if part != "plugins")


def test_the_page_has_the_doors_of_the_code() -> None:
    page = PAGE.read_text()
    assert table() in page, table()
    assert roles() in page, roles()
    assert f"valid for {LEAF_S / 3600:g} hours" in page


def test_no_listener_is_missing() -> None:
    within = {
        "ckptd.base.net.address",  # of a store
        "ckptd.checkpoint.agent.metrics",  # calls base.net.wsgi
        "ckptd.testing.ranks",  # of tests, on loopback
        "ckptd_torchrun.store",  # torch's store
        "ckptd.elastic.controller_server",  # is given the socket of cli.controller
    }
    known = {row.module for row in ROWS}
    assert {*listening()} - within - known == set()
    assert {*listening()} >= within
    assert {row.purpose for row in ROWS} - {""} == set(DOORS)


if __name__ == "__main__":
    print(table(), roles(), sep="\n\n")
