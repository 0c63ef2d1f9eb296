"""``ckptd ls``: the checkpoints of a root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from ckptd.cli.address import Root, opened
from ckptd.cli.listing import AttemptRow, CheckpointRow, GenerationRow, LsDocument, list_root
from ckptd.cli.output import Json, Reply, flag, print_rows, shorten, size_text
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
) -> Reply:
    """List the checkpoints of a root, the newest last."""
    with opened(root) as catalogue:
        document = list_root(catalogue, everything=all)
    rows = (*document.checkpoints, *(document.abandoned or ()))
    damaged = any(r.damaged for r in rows)
    return Reply(document, _show, CorruptError.exit_code if damaged else 0)


# -- for people ------------------------------------------------------------------------------------


def _show(document: LsDocument) -> None:
    if document.checkpoints:
        print_rows(document.checkpoints, _CHECKPOINT)
    else:
        print("no checkpoint counts here")
    if document.abandoned:
        print("\nabandoned")
        print_rows(document.abandoned, _CHECKPOINT)
    if document.attempts:
        print("\nnot committed")
        print_rows(document.attempts, _ATTEMPT)
    if document.generations:
        print("\ngenerations")
        print_rows(document.generations, _GENERATION)


def _marks(row: CheckpointRow) -> str:
    marks = ["pinned"] if row.pinned else []
    marks += [f"leased by {shorten(who or 'a reader', _HOLDER_WIDTH)}" for who in row.leases]
    if row.abandoned_by is not None:
        marks.append(f"abandoned by generation {row.abandoned_by}")
    return ", ".join(marks)


def _metadata(row: CheckpointRow) -> str:
    return (
        f"DAMAGED: {row.damaged}" if row.damaged else metadata_text(row.metadata, _METADATA_WIDTH)
    )


_CHECKPOINT: dict[str, Callable[[CheckpointRow], object]] = {
    ">STEP": lambda r: r.step,
    ">GEN": lambda r: r.generation,
    "CREATED": lambda r: None if r.damaged else when(r.created),
    ">SIZE": lambda r: None if r.damaged else size_text(r.data_bytes),
    ">RANKS": lambda r: None if r.damaged else r.world_size,
    "MARKS": _marks,
    "METADATA": _metadata,
}
_ATTEMPT: dict[str, Callable[[AttemptRow], object]] = {
    ">STEP": lambda r: r.step,
    ">GEN": lambda r: r.generation,
    "ATTEMPT": lambda r: r.attempt,
    "LAST WRITTEN": lambda r: when(r.modified),
    ">SIZE": lambda r: size_text(r.bytes),
    "STATE": lambda r: "given up: ckptd gc removes it" if r.over else "in flight, or died",
}
_GENERATION: dict[str, Callable[[GenerationRow], object]] = {
    ">GEN": lambda r: r.generation,
    "CLAIMED": lambda r: when(r.created),
    ">RANKS": lambda r: r.world_size,
    "CONTINUES": lambda r: r.parent.name if r.parent else "nothing",
    "REASON": lambda r: r.reason,
}


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
