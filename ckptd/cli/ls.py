"""``ckptd ls``: the checkpoints of a root."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ckptd.cli.address import Root, opened
from ckptd.cli.listing import AttemptRow, CheckpointRow, GenerationRow, LsDocument, list_root
from ckptd.cli.output import Json, flag, print_document, print_table, shorten, size_text
from ckptd.cli.output import time_text as when
from ckptd.errors import CorruptError

__all__ = ["ls", "metadata_text"]

_METADATA_WIDTH = 60
_HOLDER_WIDTH = 30


def ls(
    root: Root,
    /,
    *,
    all: Annotated[
        bool, flag("Abandoned lines, generations and uncommitted attempts too.")
    ] = False,
    json: Json = False,
) -> int:
    """List the checkpoints of a root, the newest last."""
    with opened(root) as catalogue:
        document = list_root(catalogue, everything=all)
    if json:
        print_document(document)
    else:
        _show(document)
    rows = (*document.checkpoints, *(document.abandoned or ()))
    return CorruptError.exit_code if any(r.damaged for r in rows) else 0


# -- for people ------------------------------------------------------------------------------------


def _show(document: LsDocument) -> None:
    if document.checkpoints:
        _show_checkpoints(document.checkpoints)
    else:
        print("no checkpoint counts here")
    if document.abandoned:
        print("\nabandoned")
        _show_checkpoints(document.abandoned)
    if document.attempts:
        print("\nnot committed")
        _show_attempts(document.attempts)
    if document.generations:
        print("\ngenerations")
        _show_generations(document.generations)


def _show_checkpoints(rows: tuple[CheckpointRow, ...]) -> None:
    print_table(
        (">STEP", ">GEN", "CREATED", ">SIZE", ">RANKS", "MARKS", "METADATA"),
        [_cells(row) for row in rows],
    )


def _cells(row: CheckpointRow) -> tuple[str, ...]:
    marks = ["pinned"] if row.pinned else []
    marks += [f"leased by {shorten(who or 'a reader', _HOLDER_WIDTH)}" for who in row.leases]
    if row.abandoned_by is not None:
        marks.append(f"abandoned by generation {row.abandoned_by}")
    if row.damaged:
        unread = (str(row.step), str(row.generation), "", "", "")
        return (*unread, ", ".join(marks), f"DAMAGED: {row.damaged}")
    return (
        str(row.step),
        str(row.generation),
        when(row.created),
        size_text(row.data_bytes),
        str(row.world_size),
        ", ".join(marks),
        metadata_text(row.metadata, _METADATA_WIDTH),
    )


def _show_attempts(rows: tuple[AttemptRow, ...]) -> None:
    print_table(
        (">STEP", ">GEN", "ATTEMPT", "LAST WRITTEN", ">SIZE", "STATE"),
        [
            (
                str(r.step),
                str(r.generation),
                r.attempt,
                when(r.modified),
                size_text(r.bytes),
                "given up: ckptd gc removes it" if r.over else "in flight, or died",
            )
            for r in rows
        ],
    )


def _show_generations(rows: tuple[GenerationRow, ...]) -> None:
    print_table(
        (">GEN", "CLAIMED", ">RANKS", "CONTINUES", "REASON"),
        [
            (
                str(r.generation),
                when(r.created),
                str(r.world_size),
                str(r.parent.name) if r.parent else "nothing",
                r.reason,
            )
            for r in rows
        ],
    )


def metadata_text(metadata: dict[str, Any], width: int) -> str:
    """Return metadata as ``name=value`` pairs in at most `width` characters."""
    pairs = (
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={_plain(value)}"
        for key, value in metadata.items()
    )
    return shorten(" ".join(pairs), width)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ",".join(value)
    return msgspec.json.encode(value).decode()
