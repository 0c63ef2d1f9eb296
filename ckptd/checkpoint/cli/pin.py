"""``ckptd pin``: checkpoints that are never deleted."""

from __future__ import annotations

from typing import Annotated

from ckptd.checkpoint.cli.address import (
    CheckpointAddress,
    CheckpointDocument,
    Where,
    needs_step,
    opened,
)
from ckptd.checkpoint.format.manifest import OfCheckpoint
from ckptd.checkpoint.format.names import CommitName, commit_key, pin_key
from ckptd.checkpoint.format.records import Pin
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.cli.output import Document, Json, Reply, flag, note, option, print_rows
from ckptd.cli.output import time_text as when
from ckptd.errors import CorruptError, NotFoundError, UsageError


class PinRow(OfCheckpoint, frozen=True):
    """One pin: the checkpoint, when and why it was pinned, and whether it still exists."""

    created: str
    reason: str
    exists: bool


class PinDocument(Document, frozen=True, kw_only=True, tag="pin"):
    """The document of ``ckptd pin --json``: the pin; pinning twice keeps the first."""

    root: str
    pin: PinRow


class UnpinDocument(CheckpointDocument, frozen=True, kw_only=True, tag="pin --remove"):
    """The document of ``ckptd pin --remove --json``: the checkpoint that is no longer pinned."""


class PinsDocument(Document, frozen=True, kw_only=True, tag="pin --list"):
    """The document that ``ckptd pin --list --json`` prints: every pin of the root, by step."""

    root: str
    pins: tuple[PinRow, ...]


def pin(
    where: Where,
    /,
    *,
    reason: Annotated[str, option("Reason, shown by --list.")] = "",
    remove: Annotated[bool, flag("Remove the pin of ROOT@STEP.")] = False,
    listed: Annotated[bool, flag("List the pins of ROOT.", "--list")] = False,
    json: Json = False,
) -> Reply:
    """Keep a checkpoint for ever: no retention and no gc deletes it."""
    if remove + listed + bool(reason) > 1:
        raise UsageError("--reason, --remove and --list exclude one another")
    address = CheckpointAddress.of(where)
    if listed:
        return _list(where)
    if remove:
        return _remove(where)
    with opened(address.root) as catalogue:
        name = address.find(catalogue)
        catalogue.pin(name, reason)
        document = PinDocument(root=catalogue.store.url, pin=row(catalogue, pin_key(name)))
    return Reply(document, lambda _: print(f"pinned {name}"))


def _remove(where: str) -> Reply:
    """Remove a pin; the checkpoint stays until retention or gc finds it superfluous."""
    address = needs_step(where)
    with opened(address.root) as catalogue:
        if isinstance(address.step, str):
            meant = catalogue.tagged(address.step)
            address = CheckpointAddress(address.root, meant.step, meant.generation)
        name = _pinned(catalogue, address)
        catalogue.unpin(name)
        document = UnpinDocument(
            root=catalogue.store.url, step=name.step, generation=name.generation
        )
    return Reply(document, lambda _: print(f"no longer pinned: {name}"))


def _list(root: str) -> Reply:
    with opened(root) as catalogue:
        rows = tuple(row(catalogue, pin_key(name)) for name in sorted(catalogue.pins()))
        try:
            catalogue.line()
        except CorruptError as error:
            if error.kind != "missing-record":  # which `opened` has said
                note(f"{error.message} ({error.where}): no checkpoint counts until that is fixed")
        document = PinsDocument(root=catalogue.store.url, pins=rows)
    return Reply(document, _show)


def _show(document: PinsDocument) -> None:
    if not document.pins:
        print("nothing is pinned")
        return
    print_rows(
        document.pins,
        {
            ">STEP": lambda r: r.step,
            ">GEN": lambda r: r.generation,
            "PINNED": lambda r: when(r.created),
            "REASON": lambda r: (r.reason + " (the checkpoint is gone)" * (not r.exists)).strip(),
        },
    )


def row(catalogue: Catalogue, key: str) -> PinRow:
    """Return a pin as a row."""
    record = catalogue.read(key, Pin)
    exists = catalogue.store.exists(commit_key(record.name))
    return PinRow(record.step, record.generation, record.created, record.reason, exists)


def _pinned(catalogue: Catalogue, address: CheckpointAddress) -> CommitName:
    """Return the pin that is meant; its checkpoint need not exist any more."""
    found = [
        name
        for name in sorted(catalogue.pins(), reverse=True)
        if name.step == address.step and address.generation in (None, name.generation)
    ]
    if not found:
        raise NotFoundError(
            f"step {address.step} is not pinned",
            where=address.root,
            hint=f"ckptd pin {address.root} --list",
        )
    counted = set(catalogue.line())
    return next((name for name in found if name in counted), found[0])
