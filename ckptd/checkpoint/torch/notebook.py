"""A checkpointer shown in a notebook (HTML); how many rows."""

from __future__ import annotations

from html import escape

import msgspec

from ckptd.checkpoint.root.index import Index
from ckptd.errors import CkptdError, NotFoundError, size_text

_ROWS = 20
_HEAD = "step", "generation", "created", "ranks", "size", "tags", "metadata"


def shown(title: str, index: Index | None) -> str:
    """Return the newest checkpoints of a root as HTML, below `title`; never raises for the root."""
    if index is None:
        return f"<p>{escape(title)}</p>"
    try:
        index.open()
        rows = _rows(index)
    except NotFoundError:
        rows = []
    except CkptdError as error:
        return f"<p>{escape(title)}</p><pre>{escape(str(error))}</pre>"
    lines = [_HEAD, *rows] if rows else [("no checkpoint yet",)]
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in line) for line in lines)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<p>{escape(title)}</p><table>{body}</table>"


def _rows(index: Index) -> list[tuple[object, ...]]:
    names = index.line()[-_ROWS:]
    records, tags = index.annotated(index.records(names)), index.tags()
    return [
        (
            r.step,
            r.generation,
            r.created,
            r.world_size,
            size_text(r.data_bytes),
            ", ".join(tag for tag, name in tags.items() if name == r.name),
            msgspec.json.encode(r.metadata).decode() if r.metadata else "",
        )
        for r in records.values()
    ]
