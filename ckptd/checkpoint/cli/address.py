"""How verbs name a checkpoint (``ROOT@STEP``, ``ROOT@TAG``), open and hold it.

In it: for how long calls of a verb are tried again; hints of the right address.

``ROOT`` is the newest checkpoint that counts, ``ROOT@STEP`` that step of the line,
``ROOT@STEP-gGENERATION`` that commit wherever it is, also beside the line, and ``ROOT@TAG`` the
commit that a tag names. ``ROOT@latest`` says the first explicitly, for a root whose own name ends
like one of them; a path that exists is taken as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.load.foreign import SHARD, split_file
from ckptd.checkpoint.load.opening import (
    foreign_format,
    foreign_loss,
    nothing_counts,
    open_catalogue,
)
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import hold_or_read, reading
from ckptd.checkpoint.root.opening import Trust, trusting
from ckptd.cli.output import Document, left_out, warn
from ckptd.errors import NotFoundError, UsageError
from ckptd.store.base import PackSpec, RetrySpec, StoreSpec

Root = Annotated[str, Parameter(help="Path or URL of a root.")]
Where = Annotated[str, Parameter(help="ROOT, ROOT@STEP, ROOT@STEP-gGENERATION or ROOT@TAG.")]

_PATIENCE_S = 30.0
"""Seconds for which a call that may heal is tried again: a person waits for it."""

_MAKE = {"cp": "copy", "export": "export", "reshard": "outcome"}
"""Verbs that make something else of a checkpoint."""

_ADDRESS = re.compile(
    r"(.+)@(?:latest|([0-9]{1,12})(?:-g([0-9]{1,8}))?|([A-Za-z][A-Za-z0-9._-]{0,63}))", re.DOTALL
)


class CheckpointDocument(Document, frozen=True, kw_only=True):
    """Output about one checkpoint, which begins with URL of its root, step and generation."""

    root: str
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class CheckpointAddress:
    """A root and, unless the newest checkpoint is meant, a tag, or a step and its generation."""

    root: str
    step: int | str | None = None
    generation: int | None = None

    @staticmethod
    def of(text: str) -> CheckpointAddress:
        """Parse what a user gave."""
        found = _ADDRESS.fullmatch(text)
        if not found or (found[4] and os.path.exists(text)):
            return CheckpointAddress(text)
        root, step, generation, tag = found.groups()
        if tag:
            return CheckpointAddress(root, tag)
        return CheckpointAddress(
            root, int(step) if step else None, int(generation) if generation else None
        )

    def find(self, catalogue: Catalogue, *, everywhere: bool = False) -> CommitName:
        """Return the commit that is meant.

        Raises
        ------
        NotFoundError
            There is none.
        """
        if self.step is not None:
            lost = everywhere or self.generation is not None
            return catalogue.find(self.step, all=lost, generation=self.generation)
        latest = catalogue.latest()
        if latest is None:
            raise nothing_counts(self.root)
        return latest


def needs_step(text: str) -> CheckpointAddress:
    """Parse an address that must name a step, for verbs where "the newest" is not obvious."""
    address = CheckpointAddress.of(text)
    if address.step is None:
        raise UsageError(
            "no step given",
            where=text,
            wanted="ROOT@STEP, ROOT@STEP-gGENERATION or ROOT@TAG",
            hint=f"ckptd ls {address.root}",
        )
    return address


def spec_of(root: str) -> StoreSpec:
    """Return the store of a root, with tries that fit a person's patience."""
    return StoreSpec(root).wrapped(PackSpec(level=None), RetrySpec(deadline_s=_PATIENCE_S))


@contextmanager
def opened(
    root: str, step: int = 0, *, foreign: bool = True, trust: Trust | None = None
) -> Iterator[Catalogue]:
    """Open an existing root, or a foreign checkpoint as a root that is only read.

    Parameters
    ----------
    step
        Of a foreign checkpoint that does not say its own.
    foreign
        Whether there may be a foreign checkpoint.
    trust
        As for `ckptd.checkpoint.root.opening.trusting`.

    Raises
    ------
    NotFoundError
        There is neither.
    MismatchError, CorruptError, RefusedError
        As `ckptd.checkpoint.load.foreign.ForeignFormats`.
    """
    folder, file = split_file(root)
    with trusting(spec_of(folder), trust).open() as store:
        try:
            catalogue = open_catalogue(store, root, file, step, foreign=foreign)
        except NotFoundError as error:
            if "@" in root.rpartition("/")[2] and error.hint:
                error.add_note("  note:   steps are written ROOT@STEP or ROOT@STEP-gGENERATION")
            raise
        found = foreign_format(catalogue)
        suspect = None if found else catalogue.suspect()
        if suspect is not None:
            warn(f"{suspect.message} ({suspect.where})")
        yield catalogue
        if found:
            count, names, unread = foreign_loss(catalogue)
            left_out(root, count, names)
            if unread:
                warn(f"{root}: not read: {unread}")
            # Last: an error in JSON is alone on standard error.
            shard = SHARD.search(file)
            if shard and int(shard[2]) > 1:
                warn(
                    f"{file} alone was read, which is one of {int(shard[2])} files of a model;"
                    " name the folder to read all"
                )
            warn(
                f"{root} was read as {found}, which has no digests: sizes are checked,"
                " bytes are not"
            )


@contextmanager
def held(catalogue: Catalogue, name: CommitName, holder: str) -> Iterator[Commit]:
    """Keep a checkpoint from being deleted while the block runs, however long that takes.

    Where no lease can be written (a full disk, a root that is read-only), it is read without one,
    and the user is warned.
    """
    with reading(hold_or_read(catalogue, name, holder=holder), warn) as commit:
        yield commit
        names = catalogue.store.children(commit.folder) if holder in _MAKE else ()
        if any(n.startswith("signature-") for n in names):
            warn(f"{name} is signed, and the {_MAKE[holder]} is not")
