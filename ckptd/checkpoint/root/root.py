"""A root: the folder with ``ckptd.json`` in it, how a record is created exactly once, its tier."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from ckptd import events
from ckptd.checkpoint.format.names import COMMITS, GENERATIONS, ROOT_MARKER, CommitName
from ckptd.checkpoint.format.records import (
    MAX_RECORD_BYTES,
    R,
    RootMarker,
    decode_record,
    encode_record,
)
from ckptd.errors import ConflictError, CorruptError, NotFoundError, RefusedError, StoreError
from ckptd.store.base import Store, root_gone
from ckptd.store.wrap import innermost


def stamp(seconds: float | None = None) -> str:
    """Return a time (seconds since 1970; default: now) as a record's ``created`` field."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: str, where: str) -> float:
    """Return a record's time in seconds since 1970; `CorruptError` when it is none.

    A time without a zone is UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise CorruptError(
            "not a time", kind="bad-record", where=where, wanted="ISO 8601", found=repr(text[:80])
        ) from None


class Root:
    """The folder that a store shows.

    Parameters
    ----------
    store
        Where the root is, or will be.

    Attributes
    ----------
    root_id
        Of the root that was opened here; empty before. What is written from then on is for that
        root and for no other at the same place.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root_id = ""

    def expect(self, root_id: str) -> None:
        """Take in which root this is; `check_root` tells whether it still is."""
        if root_id != self.root_id:
            self._forget()
            self.root_id = root_id
        # A folder that is no root any more (renamed, unmounted, deleted) must not fill with files.
        self.store.anchor(ROOT_MARKER)

    def _forget(self) -> None:
        """Let go of what was read of another root."""

    def check_root(self, root_id: str = "") -> None:
        """Raise unless the root that was opened is still there; before anything is opened, don't.

        Parameters
        ----------
        root_id
            What it must be, whatever was opened (see `expect`); empty where that is not known.

        Raises
        ------
        StoreError
            Kind ``root-gone``: the folder is no root any more.
        ConflictError
            Kind ``other-root``: another root was made at the same place.
        """
        if root_id:
            self.expect(root_id)
        if not self.root_id:
            return
        try:
            found = self._marker().root_id
        except NotFoundError:
            raise root_gone(self.where(ROOT_MARKER)) from None
        if found != self.root_id:
            raise ConflictError(
                "another root was made at this place",
                kind="other-root",
                where=self.where(ROOT_MARKER),
                wanted=f"root {self.root_id}",
                found=f"root {found}",
                hint="this job belongs to the root that was here before: bring that back, or stop"
                " this job and start it anew",
            )

    def where(self, key: str) -> str:
        """Return the full name of an object of this root, for messages."""
        return f"{self.store.url.rstrip('/')}/{key}"

    def read(self, key: str, kind: type[R]) -> R:
        """Return a record; what claims to be one and is huge is not even fetched.

        Raises
        ------
        NotFoundError
            There is no such object.
        CorruptError
            It is not such a record; names it.
        """
        if self.store.stat(key).size > MAX_RECORD_BYTES:
            raise CorruptError("record too large", kind="limits", where=self.where(key))
        return decode_record(self.store.get(key), kind, self.where(key))

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, None when it is not there."""
        try:
            return self.store.stat(key).size
        except NotFoundError:
            return None

    def create_or_open(self) -> RootMarker:
        """Make this folder a root unless it is one; durable on return.

        Raises
        ------
        RefusedError
            Kind ``no-marker``: commits or generations lie here without ``ckptd.json``. Kind
            ``no-create-only``.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._opened()
        except NotFoundError:
            self._refuse_headless()
        marker = RootMarker(root_id=uuid.uuid4().hex, created=stamp())
        self._create(ROOT_MARKER, encode_record(marker))
        return self._opened()

    def open(self) -> RootMarker:
        """Return the marker of an existing root; creates nothing.

        Raises
        ------
        NotFoundError
            Kind ``no-root``: nothing is here. Kind ``not-a-root``: other things are.
        CorruptError
            Kind ``version``: a newer ckptd made this root.
        """
        try:
            return self._opened()
        except NotFoundError:
            names = self.store.children("")
        if not names:
            raise NotFoundError(
                "nothing is stored here",
                kind="no-root",
                where=self.store.url,
                wanted=ROOT_MARKER,
                hint="check the path; the first save creates the root",
            )
        raise NotFoundError(
            "not a checkpoint root of ckptd",
            kind="not-a-root",
            where=self.store.url,
            wanted=ROOT_MARKER,
            found=", ".join(names[:6]) + (" ..." if len(names) > 6 else ""),
            hint=f"name the folder that holds {ROOT_MARKER}",
        )

    def _opened(self) -> RootMarker:
        marker = self._marker()
        self.expect(marker.root_id)
        return marker

    def _marker(self) -> RootMarker:
        return self.read(ROOT_MARKER, RootMarker)

    def _refuse_headless(self) -> None:
        """A root that lost its marker is not ours to continue: its version is unknown."""
        for folder in (COMMITS, GENERATIONS):
            if self.store.children(folder):
                raise RefusedError(
                    f"this folder has {folder} but no {ROOT_MARKER}",
                    kind="no-marker",
                    where=self.store.url,
                    hint=f"give another folder, or put {ROOT_MARKER} back",
                )

    def _create(self, key: str, raw: bytes) -> bool:
        """Create an object and tell whether it is ours, also where the reply was lost."""
        if not self.store.capabilities.create_only:
            raise RefusedError(
                "this store cannot decide who creates an object first",
                kind="no-create-only",
                where=self.store.url,
                hint=f"ckptd doctor {self.store.url}",
            )
        try:
            self.store.put(key, raw, create_only=True)
        except ConflictError:
            return self.store.get(key) == raw
        except StoreError:
            # The reply may be lost and the object there: saying "failed" would make the caller
            # write the same checkpoint again and lose against itself.
            if self._holds(key, raw):
                return True
            raise
        return True

    def _holds(self, key: str, raw: bytes) -> bool:
        try:
            return self.store.get(key) == raw
        except (NotFoundError, StoreError):
            return False


def tier_of(store: Store) -> str:
    """Return the tier that a checkpointer's root is: ``local``, ``remote``, or ``memory``."""
    if not store.capabilities.shared:
        return "memory"
    # Of the store itself: one that packs gives no local files, wherever it is.
    return "local" if innermost(store).capabilities.local_files else "remote"


def root_tier(store: Store, near: Iterable[str]) -> str:
    """Return the tier that a root is beside near tiers: ``local`` is then a folder a node."""
    return "remote" if "local" in near else tier_of(store)


def saving(store: Store, name: CommitName, attempt: str, rank: int) -> AbstractContextManager[None]:
    """Say whose share of which save is worked on; a tier that was named already stays."""
    save = events.SaveId(name.step, name.generation, attempt, rank)
    return events.about(save, tier=events.current().tier or tier_of(store))
