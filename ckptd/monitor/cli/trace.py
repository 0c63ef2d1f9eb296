"""``ckptd trace``: cost of each save by phase and rank, and a timeline for Perfetto."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from ckptd.cli.output import Document, Json, Reply, note, option, print_rows, seconds_text, shorten
from ckptd.cli.output import time_text as when
from ckptd.errors import StoreError, UsageError, size_text
from ckptd.events.eventfiles import EventFolder
from ckptd.events.profile import Profiles, SaveProfile
from ckptd.events.timeline import Timeline

_REASON_WIDTH = 60
_TIER_WIDTH = 12


class TraceDocument(Document, frozen=True, kw_only=True, tag="trace"):
    """The document that ``ckptd trace --json`` prints.

    Attributes
    ----------
    folder
        As given.
    files
        Event files that were read.
    events
        Events that were read.
    unreadable, skipped, lost, left_out
        Files that hold no events; lines that are none; events that their process could not write;
        events of saves older than those shown.
    loads
        Loads that ended, each rank counted.
    saves
        The newest ones, the newest last.
    out
        Where the trace was written; null without ``--out``.
    traced, untraced
        Trace events in that file, and events that it did not take.
    """

    folder: str
    files: int
    events: int
    unreadable: int
    skipped: int
    lost: int
    left_out: int
    loads: int
    saves: tuple[SaveProfile, ...]
    out: str | None
    traced: int
    untraced: int


def trace(
    folder: Annotated[str, Parameter(help="Folder with recorded events.")],
    /,
    *,
    out: Annotated[str | None, option("Write a Chrome trace to this file, for Perfetto.")] = None,
    last: Annotated[int, Parameter(help="Number of saves to show, the newest.")] = 20,
    json: Json = False,
) -> Reply:
    """Show what each save cost and which rank was slowest, from recorded events."""
    if last < 1:
        raise UsageError("--last wants a positive number", found=last)
    events = EventFolder.open(folder)
    profiles = Profiles(last)
    count = 0
    with _timeline(out, events) as timeline:
        for head, event in events.read():
            count += 1
            profiles.add(event)
            if timeline is not None:
                timeline.add(head.host, event)
    document = TraceDocument(
        folder=folder,
        files=len(events.heads),
        events=count,
        unreadable=events.unreadable,
        skipped=events.skipped,
        lost=events.lost,
        left_out=profiles.left_out,
        loads=profiles.loads,
        saves=tuple(profiles.saves()),
        out=out,
        traced=timeline.written if timeline else 0,
        untraced=timeline.left_out if timeline else 0,
    )
    return Reply(document, _show)


@contextmanager
def _timeline(out: str | None, events: EventFolder) -> Iterator[Timeline | None]:
    """Give what writes the trace; the file gets its name when it is complete."""
    if out is None:
        yield None
        return
    partial = f"{out}.partial"
    base = min(head.wall_ns for head in events.heads.values())
    try:
        with open(partial, "w", encoding="utf-8") as file:
            timeline = Timeline(file, base)
            yield timeline
            timeline.finish()
        os.replace(partial, out)
    except OSError as error:
        raise StoreError("the trace cannot be written", where=out, found=str(error)) from error
    finally:
        with suppress(OSError):
            os.unlink(partial)


# -- for people ------------------------------------------------------------------------------------


def _show(d: TraceDocument) -> None:
    if d.saves:
        _show_saves(d.saves)
        _show_phases(d.saves[-1])
    else:
        print("no save was recorded")
    if d.out is not None:
        print(f"\n{d.out}: {d.traced} trace events; open it at https://ui.perfetto.dev")
    for number, text in (
        (d.unreadable, "files hold no events"),
        (d.skipped, "lines without an event were skipped"),
        (d.lost, "events were lost where they were recorded"),
        (d.left_out, "events belong to older saves, or to more than there is room for"),
        (d.untraced, "events did not fit the trace"),
    ):
        if number:
            note(f"{number} {text}")


def _show_saves(saves: tuple[SaveProfile, ...]) -> None:
    columns: dict[str, Callable[[SaveProfile], object]] = {
        ">STEP": lambda s: s.step,
        ">GEN": lambda s: s.generation,
        "BEGUN": lambda s: when(s.begun_ns / 1e9),
        "OUTCOME": lambda s: s.outcome,
        ">RANKS": lambda s: s.ranks,
        ">SIZE": lambda s: size_text(s.bytes),
        ">TOTAL": lambda s: seconds_text(s.seconds),
        ">STALL": lambda s: seconds_text(s.stall.max_s) if s.stall else "-",
    }
    if sys.stdout.isatty():  # hardly one has room for all phases
        del columns[">RANKS"]
        columns["SLOWEST"] = lambda s: s.slowest
    else:
        names = dict.fromkeys(p.name for s in saves for p in s.phases)
        columns |= {f">{name}": partial(_cell, name=name) for name in names}
    print_rows(saves, columns)
    print("\neach time is of the slowest rank; * marks the slowest phase")


def _cell(save: SaveProfile, name: str) -> str:
    times = [p.max_s for p in save.phases if p.name == name]
    if not times:
        return "-"
    return seconds_text(max(times)) + ("*" if name == save.slowest else "")


def _show_phases(save: SaveProfile) -> None:
    ranks = f"{save.ranks} rank{'s' * (save.ranks > 1)}"
    print(f"\nstep {save.step} of generation {save.generation}, over {ranks}")
    if save.reason:
        print(f"{save.outcome}: {shorten(save.reason, _REASON_WIDTH)}")
    stats = ([save.stall] if save.stall else []) + list(save.phases)
    print_rows(
        stats,
        {
            "PHASE": lambda p: p.name + "*" * (p.name == save.slowest),
            "TIER": lambda p: shorten(p.tier, _TIER_WIDTH),
            ">RANKS": lambda p: p.ranks,
            ">MIN": lambda p: seconds_text(p.min_s),
            ">MEDIAN": lambda p: seconds_text(p.median_s),
            ">MAX": lambda p: seconds_text(p.max_s),
            ">SLOWEST RANK": lambda p: p.slowest_rank,
            ">SIZE": lambda p: size_text(p.bytes) if p.bytes else None,
        },
    )
