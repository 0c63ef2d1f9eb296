"""``ckptd tag``: names for checkpoints, set, moved and removed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter

from ckptd.checkpoint.cli.address import CheckpointAddress, Where, opened
from ckptd.checkpoint.cli.pin import PinRow, row
from ckptd.checkpoint.format.names import tag_key
from ckptd.cli.output import Document, Json, Reply, flag, print_rows
from ckptd.cli.output import time_text as when
from ckptd.errors import UsageError


class TagRow(PinRow, frozen=True, kw_only=True):
    """One tag: its name, the checkpoint, when it was put there, and whether that still exists."""

    tag: str


class TagDocument(Document, frozen=True, kw_only=True, tag="tag"):
    """The document of ``ckptd tag --json``: every tag of the root as it is now, by name."""

    root: str
    tags: tuple[TagRow, ...]


def tag(
    where: Where,
    name: Annotated[str, Parameter(help="The tag: a letter, then letters, digits, . - _")] = "",
    /,
    *,
    remove: Annotated[bool, flag("Remove the tag of ROOT@TAG.")] = False,
    listed: Annotated[bool, flag("List the tags of ROOT.", "--list")] = False,
    json: Json = False,
) -> Reply:
    """Name a checkpoint, which is then never deleted; a name that is taken moves."""
    address = CheckpointAddress.of(where)
    if remove + listed + bool(name) != 1 or (remove and not isinstance(address.step, str)):
        raise UsageError(
            "give a TAG, --list, or --remove for ROOT@TAG",
            where=where,
            wanted="ckptd tag ROOT@STEP TAG",
        )
    with opened(address.root) as catalogue:
        if name:
            catalogue.tag(address.find(catalogue), name)
        elif remove:
            catalogue.untag(str(address.step))
        tags = tuple(
            TagRow(**msgspec.structs.asdict(row(catalogue, tag_key(n))), tag=n)
            for n in sorted(catalogue.tags())
        )
        return Reply(TagDocument(root=catalogue.store.url, tags=tags), _show)


def _show(document: TagDocument) -> None:
    if not document.tags:
        print("nothing is tagged")
        return
    print_rows(
        document.tags,
        {
            "TAG": lambda r: r.tag,
            ">STEP": lambda r: r.step,
            ">GEN": lambda r: r.generation,
            "SINCE": lambda r: when(r.created),
            "STATE": lambda r: "" if r.exists else "the checkpoint is gone",
        },
    )
