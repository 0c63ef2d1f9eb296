"""``ckptd cp``: copies checkpoints between roots; options and prints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from ckptd.checkpoint.cli.address import CheckpointAddress, Where, held, opened, spec_of
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.copy import Copied, Transfer
from ckptd.cli.output import Document, Json, Reply, counted, flag, progress_bar
from ckptd.errors import UsageError, size_text
from ckptd.store.base import Store, StoreSpec


class CpDocument(Document, frozen=True, kw_only=True, tag="cp"):
    """The document that ``ckptd cp --json`` prints.

    Attributes
    ----------
    source, target
        URLs of the roots.
    checkpoints
        What became of each, oldest first: step, source_generation, generation (of the copy), state
        (``copied``, or ``present``: it was there already), bytes, files, reused_files (finished by
        an earlier copy that was killed).
    """

    source: str
    target: str
    checkpoints: tuple[Copied, ...]


def cp(
    source: Where,
    target: Annotated[str, Parameter(help="Path or URL of the root to copy into.")],
    /,
    *,
    all: Annotated[bool, flag("Copy every checkpoint that counts, oldest first.")] = False,
    json: Json = False,
) -> Reply:
    """Copy checkpoints to another root, checking digests on the way.

    A copy that is killed leaves the target as it was; started again, it goes on where it stopped.
    It claims a generation of the target, so a job that saves there stops with an error.
    """
    address = CheckpointAddress.of(source)
    if all and address.step is not None:
        raise UsageError("--all copies every step", where=source, wanted="ROOT without @STEP")
    with opened(address.root) as catalogue, spec_of(target).open() as store:
        names = catalogue.line() if all else [address.find(catalogue)]
        with StoreSpec(target).open() as bulk:
            done = _copy(catalogue, names, Catalogue(store), bulk)
        document = CpDocument(source=catalogue.store.url, target=store.url, checkpoints=done)
    return Reply(document, _show)


def _copy(
    source: Catalogue, names: Sequence[CommitName], target: Catalogue, bulk: Store
) -> tuple[Copied, ...]:
    done = []
    with progress_bar("copying") as bar:
        with contextlib.closing(Transfer(source, target, bar, bulk=bulk)) as transfer:
            for name in names:
                with held(source, name, "cp") as commit:
                    done.append(transfer.copy(commit))
    return tuple(done)


def _show(document: CpDocument) -> None:
    for c in document.checkpoints:
        if c.state == "present":
            print(f"step {c.step} exists already (generation {c.generation})")
            continue
        again = f", {c.reused_files} of them copied before" if c.reused_files else ""
        print(
            f"copied step {c.step}: {size_text(c.bytes)} in {counted(c.files, 'file')}{again}, now"
            f" step {c.step} of generation {c.generation} in {document.target}"
        )
    if not document.checkpoints:
        print("no checkpoint counts at the source: nothing to copy")
