"""Leases: a reader keeps a checkpoint from deletion: length, renewal, clock slack.

A reader creates the lease first and looks for marks on the commit second; gc marks the commit
first, looks for leases second, and only then deletes it. Whatever the order of events, one of the
two sees the other: either the reader is refused, since the checkpoint is being deleted, or gc lets
it live. A death between any two steps loses nothing that was promised. See
`ckptd.checkpoint.root.index`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.checkpoint.format.names import LEASES, CommitName, commit_key, lease_key
from ckptd.checkpoint.format.records import Commit, Lease, encode_record
from ckptd.checkpoint.root.index import Index, unmarked
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError
from ckptd.store.base import ReadOnlyStore, Store
from ckptd.types import ByteRange

_log = logging.getLogger("ckptd")

LEASE_S = 3600.0
"""How long a lease lasts unless it is renewed, in seconds."""
SLACK_S = 300.0
"""How far the clocks of two machines may be apart, in seconds."""
MAX_TRIES = 16
_RENEWAL_S = 30.0
"""How long the end of a lease waits for a renewal that is under way, in seconds."""


@dataclass
class Hold(OfOneProcess):
    """A lease in force. Leaving the ``with`` block releases it.

    Attributes
    ----------
    commit
        Record of the checkpoint that is held.
    lease_id
        Name of the lease.
    """

    inert = frozenset({"release", "__exit__"})

    index: Index
    commit: Commit
    lease_id: str
    holder: str
    seconds: float

    def renew(self) -> None:
        """Begin the lease's time again.

        Raises
        ------
        NotFoundError
            It had run out, and the checkpoint was deleted.
        """
        put_lease(self.index.store, self.commit.name, self.lease_id, self.holder, self.seconds)
        relied_on(self.index, self.commit.name)

    def release(self) -> None:
        """End the lease. Idempotent; one that cannot be ended now runs out by itself."""
        try:
            self.index.store.delete([lease_key(self.lease_id)])
        except StoreError as error:
            # What was read or written under it is done: its end decides nothing any more.
            _log.info("a lease could not be removed and stays until it expires: %s", error.message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(index: Index, name: CommitName, *, seconds: float = LEASE_S, holder: str = "") -> Hold:
    """Keep a checkpoint, and every folder it refers to, from being deleted for `seconds`.

    Raises
    ------
    NotFoundError
        There is no such checkpoint, or it was deleted at this very moment.
    """
    lease_id = uuid.uuid4().hex
    holder = f"{holder or 'reader'} {socket.gethostname()}:{os.getpid()}"
    put_lease(index.store, name, lease_id, holder, seconds)
    try:
        commit = relied_on(index, name)
    except BaseException:
        index.store.delete([lease_key(lease_id)])
        raise
    return Hold(index, commit, lease_id, holder, seconds)


@contextmanager
def renewed(lease: Hold, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Renew a lease while the block runs, however long that takes, and release it.

    Parameters
    ----------
    on_failure
        Called from a thread with what to say of a renewal that failed. Three more tries follow
        before the lease runs out; what is deleted then fails its read.
    """
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(lease.seconds / 4):
            try:
                lease.renew()
            except CkptdError as error:
                on_failure(f"the lease was not renewed: {error.message}")

    keeper = threading.Thread(target=renew, name="ckptd-lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        # In this order, or a renewal under way would bring back what was released.
        stop.set()
        keeper.join(_RENEWAL_S)
        lease.release()


class Unheld(msgspec.Struct, frozen=True):
    """A checkpoint that is read without a lease, which could not be written.

    Attributes
    ----------
    commit
        Its record.
    text
        What to say of it; empty where no verb could delete it.
    """

    commit: Commit
    text: str


def hold_or_read(index: Index, name: CommitName, *, holder: str = "") -> Hold | Unheld:
    """Hold a checkpoint as `hold` does, or read it unheld where no lease can be written.

    A full disk, a quota and a read-only file system must not keep anybody from the checkpoints that
    are there: on such a day they are wanted most. Should the checkpoint be deleted meanwhile, the
    digests of what is read tell so.

    Raises
    ------
    NotFoundError
        No commit of this step and generation.
    StoreError
        Its record cannot be read either.
    """
    if isinstance(index.store, ReadOnlyStore):  # a foreign checkpoint
        return Unheld(index.commit(name), "")
    try:
        return hold(index, name, holder=holder)
    except StoreError as error:
        commit = index.commit(name)
        text = f"cannot write a lease, reading {name} without one: {error.message}"
        return Unheld(commit, f"{text}; the read fails if {name} is deleted meanwhile")


@contextmanager
def reading(lease: Hold | Unheld, say: Callable[[str], None]) -> Iterator[Commit]:
    """Read a checkpoint while the block runs, however long that takes; yield its record.

    Its lease is renewed meanwhile, and released at the end.

    Parameters
    ----------
    say
        Called with why there is no lease; and, from a thread, with why one was not renewed.
    """
    if isinstance(lease, Unheld):
        if lease.text:
            say(lease.text)
        yield lease.commit
        return
    with renewed(lease, say):
        yield lease.commit


def relied_on(index: Index, name: CommitName) -> Commit:
    """Return the record of a checkpoint that is leased or pinned by now.

    Raises
    ------
    NotFoundError
        There is no such checkpoint, or it is being deleted.
    """
    commit = index.commit(name)
    if not unmarked(index.store, commit.folders, commit.folder):
        raise NotFoundError(
            f"{name} is being deleted",
            where=index.where(commit_key(name)),
            hint=f"ckptd ls {index.store.url} --all",
        )
    return index.commit(name)  # the clean-up that this waited for may have deleted it


def hold_step(
    index: Index, step: int | str | None, generation: int | None = None, *, holder: str = ""
) -> Hold | Unheld | None:
    """Hold the checkpoint of a step, or the newest that counts, as `hold_or_read` does.

    Retention may delete the newest between finding and holding, because a newer one came: then that
    one is taken. None when no step is given and none counts.

    Parameters
    ----------
    step
        A step or a tag, as for `Index.find`; None takes the newest.
    generation
        That of the checkpoint, wherever it is; None: on the line that counts.

    Raises
    ------
    NotFoundError
        There is no such step.
    ConflictError
        Kind ``busy``: each of `MAX_TRIES` was deleted at that moment.
    StoreError
        As of `hold_or_read`.
    """
    if step is not None:
        name = index.find(step, all=generation is not None, generation=generation)
        return hold_or_read(index, name, holder=holder)
    for _ in range(MAX_TRIES):
        latest = index.latest()
        if latest is None:
            return None
        try:
            return hold_or_read(index, latest, holder=holder)
        except NotFoundError:
            continue
    raise index.busy("could not lease a checkpoint: each candidate was deleted first")


def put_lease(
    store: Store, name: CommitName, lease_id: str, holder: str, seconds: float = LEASE_S
) -> None:
    """Write a lease of `seconds` from now on, or write it again."""
    record = Lease(name.step, name.generation, expires=time.time() + seconds, holder=holder)
    store.put(lease_key(lease_id), encode_record(record))


def leases(index: Index) -> dict[str, Lease]:
    """Return all leases by key, those that ran out included."""
    out: dict[str, Lease] = {}
    for name in index.store.children(LEASES):
        key = LEASES + name
        if name.endswith(".json"):
            try:
                out[key] = index.read(key, Lease)
            except NotFoundError:
                continue  # released since the listing
            except CorruptError:
                if index.size(key) and index.store.get(key, ByteRange(0, 1)) != b"\0":
                    raise
                # What a power cut left of one (`Store.fleeting`): its process is gone as well.
                out[key] = Lease(0, 0, expires=0.0)
    return out


def expired(lease: Lease, now: float) -> bool:
    """Tell whether a lease ran out, by any clock that is at most `SLACK_S` off."""
    return lease.expires + SLACK_S < now
