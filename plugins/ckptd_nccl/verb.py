"""``ckptd replay --flight-recorder``: one diagnosis of what PyTorch's flight recorder wrote."""

from __future__ import annotations

from pathlib import Path

from ckptd.cli import Document, note, print_document, shorten
from ckptd.monitor import Verdict, diagnose, join
from ckptd_nccl.flightrecorder import STUCK, read_folder

__all__ = ["FlightDocument", "show_dumps"]

_NAMED = 16
_TEXT_WIDTH = 300


class FlightDocument(Document, frozen=True, kw_only=True, tag="replay --flight-recorder"):
    """Output of ``ckptd replay --flight-recorder DIR --json``.

    Attributes
    ----------
    folder
        As given.
    ranks, world
        Dumps that were read; ranks of the job, as far as dumps tell.
    unread
        Files that are no dumps, and why.
    verdicts
        Causes before consequences.
    """

    folder: str
    ranks: int
    world: int
    unread: dict[str, str]
    verdicts: tuple[Verdict, ...]


def show_dumps(folder: str, *, json: bool) -> int:
    """Diagnose a folder of dumps and print it; return 1 if something is found, else 0.

    Dumps are taken to be of a job that stands still: no time has to pass for a verdict.
    """
    found = read_folder(Path(folder))
    job = join(found.views)
    document = FlightDocument(
        folder=folder,
        ranks=len(found.views),
        world=job.world,
        unread=found.unread,
        verdicts=diagnose(job, STUCK),
    )
    if json:
        print_document(document)
    else:
        _show(document)
    return 1 if document.verdicts else 0


def _show(document: FlightDocument) -> None:
    print(f"{document.ranks} dumps of a job of {document.world} ranks")
    for verdict in document.verdicts:
        named = [f"{s.target} {s.name}" for s in verdict.suspects]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        print(f"\n{verdict.kind}: {', '.join(named[:_NAMED])}{more}")
        for line in verdict.evidence:
            print(f"  {shorten(line, _TEXT_WIDTH)}")
        print(f"  refuted if {verdict.refuted_by}")
        print(f"  what to do: {verdict.action}")
    if not document.verdicts:
        print("no suspects: no rank waits for a missing rank")
    for name, why in document.unread.items():
        note(f"{shorten(name, _TEXT_WIDTH)} is not a dump: {shorten(why, _TEXT_WIDTH)}")
