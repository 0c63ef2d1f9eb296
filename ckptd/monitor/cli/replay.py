"""``ckptd replay``: the diagnosis over a recording or dumps; its prints.

In it: widths of columns; how many are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ckptd.cli.output import Document, Json, Reply, note, option, print_rows, print_text, shorten
from ckptd.errors import UsageError, first_few
from ckptd.monitor.incidents import Incident
from ckptd.monitor.recording import Replay
from ckptd.monitor.recording import replay as replay_recording
from ckptd.monitor.settings import WatchSettings, changed
from ckptd.monitor.verdict import Suspect
from ckptd.plugins import DUMPS, load_entry

_NAMED = 8
_SUSPECTS_WIDTH = 40
_TEXT_WIDTH = 300


class ReplayedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident of a replay.

    Attributes
    ----------
    id, kind, state
        As the daemon tells them.
    at_s, until_s
        When it opened and closed, in seconds since the first frame; null while it is open.
    latency_s
        How long its sign had been there when it opened.
    suspects
        Likeliest first.
    nodes
        Of the suspects.
    evidence, rules_out, refuted_by, advice, numbers
        Of the newest verdict.
    consequences
        What followed from it.
    """

    id: str
    kind: str
    state: str
    at_s: float
    until_s: float | None
    latency_s: float
    suspects: tuple[Suspect, ...]
    nodes: tuple[str, ...]
    evidence: tuple[str, ...]
    rules_out: tuple[str, ...]
    refuted_by: str
    advice: str
    numbers: dict[str, float]
    consequences: tuple[str, ...]


class ReplayDocument(Document, frozen=True, kw_only=True, tag="replay"):
    """The document that ``ckptd replay --json`` prints.

    Attributes
    ----------
    file, job
        As given; whose recording it is.
    frames, sheets, refused
        Frames that were read; sheets that were taken; messages that were not.
    rounds, cpu_s
        Rounds of the watch, and the CPU seconds of all of them.
    seconds
        From the first frame to the last.
    unread
        Bytes behind the last whole frame.
    incidents
        In the order in which they opened.
    """

    file: str
    job: str
    frames: int
    sheets: int
    refused: int
    rounds: int
    cpu_s: float
    seconds: float
    unread: int
    incidents: tuple[ReplayedIncident, ...]


def replay(
    file: Annotated[str | None, Parameter(help="A recording, written by ckptd serve.")] = None,
    /,
    *,
    flight_recorder: Annotated[
        str | None,
        option("Instead of a recording: a folder of dumps of PyTorch's flight recorder."),
    ] = None,
    set: Annotated[
        tuple[str, ...],
        Parameter(
            help="Change a setting: floor.train=5. May be given several times.",
            show_default=False,
            negative=(),
        ),
    ] = (),
    json: Json = False,
) -> Reply | int:
    """Run the diagnosis again over what a daemon received."""
    if flight_recorder is not None and file is None:
        return _show_dumps(flight_recorder, json)
    if file is None or flight_recorder is not None:
        raise UsageError("give a recording, or --flight-recorder and a folder")
    settings = WatchSettings()
    for assignment in set:
        settings = changed(settings, assignment)
    result = replay_recording(Path(file), settings)
    document = _document(file, result)
    return Reply(document, _show, 1 if document.incidents else 0)


def _document(file: str, result: Replay) -> ReplayDocument:
    opened = {i.id: at for at, changes in result.changes for i in changes.opened}
    closed = {i.id: at for at, changes in result.changes for i in changes.closed}
    fields = msgspec.structs.asdict(result) | {
        "incidents": tuple(
            _incident(i, opened[i.id], closed.get(i.id)) for i in result.incidents if i.id in opened
        )
    }
    del fields["changes"]
    return ReplayDocument(file=file, **fields)


def _incident(incident: Incident, at: float, until: float | None) -> ReplayedIncident:
    verdict = incident.verdict
    return ReplayedIncident(
        id=incident.id,
        kind=incident.kind,
        state=incident.state,
        at_s=at,
        until_s=until,
        latency_s=incident.latency_s,
        suspects=verdict.suspects,
        nodes=incident.nodes,
        evidence=verdict.evidence,
        rules_out=verdict.rules_out,
        refuted_by=verdict.refuted_by,
        advice=verdict.action,
        numbers=dict(verdict.numbers),
        consequences=incident.consequences,
    )


# -- for people ------------------------------------------------------------------------------------


def _show(d: ReplayDocument) -> None:
    # A recording must not steer the terminal.
    print(f"{shorten(d.job, _TEXT_WIDTH)}: {d.sheets} sheets, {d.seconds:.1f} s, {d.rounds} rounds")
    if d.incidents:
        print()
        print_rows(
            d.incidents,
            {
                ">AT": lambda i: f"{i.at_s:.2f} s",
                ">AFTER": lambda i: f"{i.latency_s:.2f} s",
                "KIND": lambda i: i.kind,
                "SUSPECTS": _suspects,
                "NODES": lambda i: shorten(", ".join(i.nodes), _SUSPECTS_WIDTH),
            },
        )
        for incident in d.incidents:
            print(f"\n{incident.id}: {incident.kind}")
            for line in (*incident.evidence, *incident.consequences):
                print_text(f"  {shorten(line, _TEXT_WIDTH)}", 4)
            print_text(f"  refuted if {incident.refuted_by}", 4)
            print_text(f"  what to do: {incident.advice}", 4)
    else:
        print("no incidents")
    for number, text in (
        (d.refused, "messages were refused"),
        (d.unread, "bytes at the end of the recording are torn or damaged"),
    ):
        if number:
            note(f"{number} {text}")


def _suspects(incident: ReplayedIncident) -> str:
    named = [f"{s.target} {s.name}" for s in incident.suspects]
    return shorten(first_few(named, _NAMED), _SUSPECTS_WIDTH)


def _show_dumps(folder: str, json: bool) -> int:
    show = load_entry(DUMPS, "ckptd_nccl", "--flight-recorder")
    code: int = show(folder, json=json)
    return code
