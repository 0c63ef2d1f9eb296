"""``ckptd incidents``: lists, follows and shows incidents, from a daemon or its history file.

In it: pauses between tries, width of texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ckptd.cli.options import Daemon, DaemonJob
from ckptd.cli.output import (
    Document,
    Json,
    Reply,
    flag,
    note,
    option,
    print_rows,
    print_text,
    shorten,
    time_text,
)
from ckptd.errors import CkptdError, NotFoundError, TransientStoreError, UsageError, first_few

_RETRY_S = 1.0
_WIDTH = 100


class IncidentsDocument(Document, frozen=True, kw_only=True, tag="incidents"):
    """The document that ``ckptd incidents --json`` prints.

    Attributes
    ----------
    source
        URL of the daemon, or path of the history file.
    incidents
        The newest first, as GET /api/v1/incidents tells them; of one that is named, with its
        evidence. With --follow there is one document for each change.
    """

    source: str
    incidents: list[dict[str, Any]]


def incidents(
    ident: Annotated[str | None, option("Id of one incident, to show its evidence.")] = None,
    /,
    *,
    daemon: Daemon = None,
    job: DaemonJob = None,
    history: Annotated[
        Path | None, Parameter(help="Read this history file instead of asking a daemon.")
    ] = None,
    state: Annotated[str | None, Parameter(help="Only open, or only closed incidents.")] = None,
    limit: Annotated[int, Parameter(help="Number of incidents to show at most.")] = 50,
    ack: Annotated[str | None, Parameter(help="Mark the incident as seen, with this note.")] = None,
    follow: Annotated[
        bool, flag("Keep running, and print each incident as it opens and closes.")
    ] = False,
    json: Json = False,
) -> Reply | int:
    """List incidents, the newest first, or show one with its evidence.

    Without a daemon, --history reads the file that it left. The exit code is 0 whatever is found.
    """
    if history is not None and (daemon or follow or ack is not None):
        raise UsageError("--history reads a file and cannot be combined with a daemon")
    if state not in (None, "open", "closed"):
        raise UsageError("invalid --state", wanted="open or closed", found=state)
    if follow:
        return _follow(daemon, job, json)
    source, found = _found(ident, daemon, job, history, state, limit, ack)
    document = IncidentsDocument(source=source, incidents=found)
    return Reply(document, _list if ident is None else lambda d: _show(d.incidents[0]))


def _found(
    ident: str | None,
    daemon: str | None,
    job: str | None,
    history: Path | None,
    state: str | None,
    limit: int,
    ack: str | None,
) -> tuple[str, list[dict[str, Any]]]:
    if history is not None:
        return str(history), _of_file(history, ident, state, limit)
    from ckptd.monitor.daemon.client import connect

    client = connect(daemon, job)
    if ident is None:
        if ack is not None:
            raise UsageError("--ack needs the id of an incident", where="--ack")
        body = client.get("/incidents", state=state, limit=limit)
        return client.url, body["incidents"]
    place = f"/incidents/{_safe(ident)}"
    if ack is not None:
        client.post(f"{place}/ack", {"note": ack})
    return client.url, [client.get(place)]


def _of_file(
    history: Path, ident: str | None, state: str | None, limit: int
) -> list[dict[str, Any]]:
    import msgspec

    from ckptd.monitor.daemon.documents import IncidentDocument
    from ckptd.monitor.daemon.history import from_stored, read_incidents

    if not history.exists():
        raise NotFoundError("the history file does not exist", where=str(history))
    most = limit if ident is None else 1 << 30
    stored = (from_stored(data) for data in read_incidents(history, state, None, most))
    found = [i for i in stored if i is not None and ident in (None, i.id)]
    if ident is not None and not found:
        raise NotFoundError("unknown incident", where=ident)
    documents = [IncidentDocument.of(i, evidence=ident is not None) for i in found]
    return [msgspec.to_builtins(document, str_keys=True) for document in documents]


def _safe(ident: str) -> str:
    from urllib.parse import quote

    return quote(ident, safe="")


# -- as they come ----------------------------------------------------------------------------------


def _follow(daemon: str | None, job: str | None, json: bool) -> int:
    said: dict[str, tuple[Any, ...]] = {}
    for source, incident in _coming(daemon, job):
        key = (incident["state"], [s["name"] for s in incident["verdict"]["suspects"]])
        if said.get(incident["id"]) == key:
            continue
        said[incident["id"]] = key
        change = IncidentsDocument(source=source, incidents=[incident])
        Reply(change, lambda d: print(_line(d.incidents[0]))).print(as_json=json)
        print(end="", flush=True)
    return 0


def _coming(daemon: str | None, job: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the daemon's URL and incidents as they change; asks again while it is away."""
    from ckptd.monitor.daemon.client import connect

    last, lost = "", False
    client = connect(daemon, job)
    while True:
        try:
            for ident, name, body in client.events(last):
                last, lost = ident, False
                if name == "incident":
                    yield client.url, body
        except TransientStoreError as error:
            if not lost:
                note(error.message)
            lost = True
        time.sleep(_RETRY_S)
        with suppress(CkptdError):  # after a restart it may have another port
            client = connect(daemon, job)


def _line(incident: dict[str, Any]) -> str:
    what = "closed" if incident["state"] == "closed" else "open"
    at = time_text(incident["closed_at"] or incident["updated_at"])
    return f"{at}  {what:6}  {incident['id']}  {incident['kind']}: {shorten(_who(incident), 300)}"


# -- for people ------------------------------------------------------------------------------------


def _list(document: IncidentsDocument) -> None:
    if not document.incidents:
        print("no incidents")
        return
    print_rows(
        document.incidents,
        {
            "ID": lambda i: i["id"],
            "OPENED": lambda i: time_text(i["opened_at"]),
            "STATE": lambda i: i["state"],
            "CLASS": lambda i: i["kind"],
            "SUSPECTS": lambda i: shorten(_who(i), 60),
            ">STEP": lambda i: i["step"] if i["step"] >= 0 else "-",
            "SEEN": lambda i: "yes" if i["acknowledged_at"] else "no",
        },
    )


def _who(incident: dict[str, Any]) -> str:
    named = [f"{s['target']} {s['name']}" for s in incident["verdict"]["suspects"]]
    return first_few(named) or "no suspect"


def _show(incident: dict[str, Any]) -> None:
    verdict = incident["verdict"]
    print(f"{incident['id']}: {incident['kind']}, {incident['state']}")
    print_text(shorten(incident["headline"], 300))
    print_text(
        f"opened {time_text(incident['opened_at'])}, {incident['latency_s']:.2f} s after its first"
        f" sign, generation {incident['generation']}, step {incident['step']}",
        2,
    )
    if incident["closed_at"]:
        print(f"closed {time_text(incident['closed_at'])}")
    if incident["acknowledged_at"]:
        seen = time_text(incident["acknowledged_at"])
        print_text(f"seen {seen}: {shorten(incident['note'], 200)}", 2)
    print()
    for suspect in verdict["suspects"][:64]:
        rank = suspect["name"] if suspect["target"] == "rank" else ""
        node, pid = incident.get("pids", {}).get(rank, ("", 0))
        print_text(
            f"suspect: {suspect['target']} {shorten(suspect['name'], 128)},"
            + (f" process {pid} on {shorten(node, 128)}," if pid else "")
            + f" confidence {suspect['confidence']:.2f}: {shorten(suspect['detail'], 200)}",
            2,
        )
    share = incident["cost"]
    whole = "all of the job" if share == 1 else f"{100 * (share or 0):.1f} % of the job"
    for title, texts in (
        ("last call", [verdict["place"]] if verdict["place"] else []),
        ("cost", [] if share is None else [whole + ", while it lasts"]),
        ("evidence", verdict["evidence"]),
        ("rules out", verdict["rules_out"]),
        ("refuted by", [verdict["refuted_by"]]),
        ("action", [verdict["action"]]),
        ("followed by", incident["consequences"]),
    ):
        for text in texts:
            print_text(f"{title}: {shorten(text, 300)}", 2)
    numbers = [f"{k} = {'-' if v is None else f'{v:g}'}" for k, v in verdict["numbers"].items()]
    if numbers:
        print_text("numbers: " + ", ".join(numbers), 2)
    _show_evidence(incident)


def _show_evidence(incident: dict[str, Any]) -> None:
    suspects = {s["name"] for s in incident["verdict"]["suspects"] if s["target"] == "rank"}
    if incident.get("said"):
        print("\nwhat the job says, and > where it begins:")
        _print_block(incident["said"])
    for rank, stack in sorted(incident["stacks"].items(), key=lambda i: i[0] not in suspects):
        print(f"\nstacks of rank {rank} ({stack['how'] or 'not taken'}):")
        _print_block(stack["text"])
    for name, title in (("calls", "last calls"), ("logs", "last output")):
        for rank, text in incident[name].items():
            print(f"\n{title} of rank {rank}:")
            _print_block(text)
    for probe in incident["probes"][:64]:
        seconds = probe["seconds"]
        took = "no answer" if seconds is None else f"{1e3 * seconds:.3f} ms"
        print(f"link {probe['src']}>{probe['dst']}: {took} {shorten(probe['error'], 100)}")


def _print_block(text: str) -> None:
    """Print lines that cannot steer a terminal."""
    for line in text.splitlines():
        shown = "  " + shorten(line.expandtabs(), _WIDTH * 2)
        print_text(shown, len(shown) - len(shown.lstrip()) + 2)
