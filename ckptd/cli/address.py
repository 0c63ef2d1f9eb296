"""How the command line names a checkpoint, and how it opens one.

``ROOT`` is the newest checkpoint that counts, ``ROOT@STEP`` that step of the line, and
``ROOT@STEP-gGENERATION`` that commit wherever it is, also beside the line. ``ROOT@latest`` says
the first explicitly, for a root whose own name ends like a step.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from ckptd.cli.output import note, warn
from ckptd.errors import CkptdError, NotFoundError, UsageError
from ckptd.format.names import CommitName
from ckptd.format.records import Commit
from ckptd.readers.find import find_foreign, split_file
from ckptd.readers.twin import ForeignRoot
from ckptd.root.catalogue import Catalogue
from ckptd.root.leases import LEASE_S, Hold, hold_or_read
from ckptd.store.base import PackSpec, RetrySpec, StoreSpec

__all__ = ["CheckpointAddress", "Root", "Where", "held", "needs_step", "opened", "spec_of"]

Root = Annotated[str, Parameter(help="Path or URL of a root.")]
Where = Annotated[str, Parameter(help="ROOT, ROOT@STEP or ROOT@STEP-gGENERATION.")]

_RENEWAL_S = 30.0
_PATIENCE_S = 30.0
"""How long a call that may heal is tried again: somebody sits there and waits."""

_ADDRESS = re.compile(r"(.+)@(?:latest|([0-9]{1,12})(?:-g([0-9]{1,8}))?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CheckpointAddress:
    """A root and, unless the newest checkpoint is meant, a step and perhaps a generation."""

    root: str
    step: int | None = None
    generation: int | None = None

    @staticmethod
    def of(text: str) -> CheckpointAddress:
        """Parse what a user gave."""
        found = _ADDRESS.fullmatch(text)
        if not found:
            return CheckpointAddress(text)
        root, step, generation = found.groups()
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
            raise NotFoundError(
                "no checkpoint counts here",
                kind="no-commit",
                where=self.root,
                hint=f"ckptd ls {self.root} --all shows abandoned lines",
            )
        return latest


def needs_step(text: str) -> CheckpointAddress:
    """Parse an address that must name a step, for verbs where "the newest" is not obvious."""
    address = CheckpointAddress.of(text)
    if address.step is None:
        raise UsageError(
            "say which step",
            where=text,
            wanted="ROOT@STEP or ROOT@STEP-gGENERATION",
            hint=f"ckptd ls {address.root}",
        )
    return address


def spec_of(root: str) -> StoreSpec:
    """Return the store of a root, with tries that fit a person's patience."""
    return StoreSpec(root).wrapped(PackSpec(level=None), RetrySpec(deadline_s=_PATIENCE_S))


@contextmanager
def opened(root: str, step: int = 0, *, foreign: bool = True) -> Iterator[Catalogue]:
    """Open an existing root, or a foreign checkpoint as a root that is only read.

    Parameters
    ----------
    step
        Of a foreign checkpoint that does not say its own.
    foreign
        Whether there may be a foreign checkpoint.

    Raises
    ------
    NotFoundError
        There is neither.
    MismatchError, CorruptError, RefusedError
        As `ckptd.readers.find.find_foreign`.
    """
    folder, file = split_file(root)
    with spec_of(folder).open() as store:
        catalogue = Catalogue(store)
        try:
            if file:
                raise NotFoundError("no root", kind="not-a-root", where=root)
            catalogue.open()
        except NotFoundError as error:
            found = find_foreign(store, file, step) if foreign else None
            if found is not None:
                yield Catalogue(found)
                # Last: an error in JSON is alone on standard error.
                note(
                    f"{root} was read as {found.format}, which has no digests: sizes are checked,"
                    " bytes are not"
                )
                return
            if "@" in root.rpartition("/")[2] and error.hint:
                error.add_note("  note:   steps are written ROOT@STEP or ROOT@STEP-gGENERATION")
            raise
        suspect = catalogue.suspect()
        if suspect is not None:
            warn(f"{suspect.message} ({suspect.where})")
        yield catalogue


@contextmanager
def held(catalogue: Catalogue, name: CommitName, holder: str) -> Iterator[Commit]:
    """Keep a checkpoint from being deleted while the block runs, however long that takes.

    Where no lease can be written (a full disk, a root that is read-only), it is read without one,
    and the user is warned.
    """
    if isinstance(catalogue.store, ForeignRoot):
        yield catalogue.commit(name)  # nobody deletes it by ckptd's rules
        return
    lease = hold_or_read(catalogue, name, holder=holder)
    if not isinstance(lease, Hold):
        warn(lease.text)
        yield lease.commit
        return
    stop = threading.Event()
    keeper = threading.Thread(target=_renew, args=(lease, stop), daemon=True)
    keeper.start()
    try:
        yield lease.commit
    finally:
        # In this order, or a renewal under way would bring back what was released.
        stop.set()
        keeper.join(_RENEWAL_S)
        lease.release()


def _renew(lease: Hold, stop: threading.Event) -> None:
    while not stop.wait(LEASE_S / 4):
        try:
            lease.renew()
        except CkptdError as error:
            # Three more tries before the lease runs out; what is deleted then fails its read.
            note(f"the lease was not renewed: {error.message}")
