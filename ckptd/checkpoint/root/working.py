"""One process at work in a generation without ranks (copies); its lease, takeover.

In it: the refusal of a step that is behind; pauses between tries.

A copy is written by one process, which may be killed and started again. The lease that it keeps on
its unfinished checkpoint shows others that it lives, and keeps gc away from what it wrote so far.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.checkpoint.format.names import CommitName, lease_key
from ckptd.checkpoint.format.records import Lease
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import LEASE_S, expired, leases, put_lease
from ckptd.errors import ConflictError, RefusedError

_RENEW_S = LEASE_S / 6
_PAUSES_S = (0.1, 0.3, 1.0)
"""Longest waits before a process that began at the moment of a rival looks again."""


class Working(OfOneProcess):
    """A process at work in a generation of its own. Thread-safe.

    Attributes
    ----------
    generation
        The generation.
    work_id
        Unique to this process's work.
    """

    inert = frozenset({"end"})

    def __init__(self, catalogue: Catalogue, generation: int, reason: str) -> None:
        self.generation = generation
        self.work_id = uuid.uuid4().hex
        self._catalogue = catalogue
        self._reason = reason
        self._holder = f"{reason} {_place()}:{os.getpid()}"
        self._lock = threading.Lock()
        self._on: CommitName | None = None
        self._renewed = 0.0

    @staticmethod
    def begin(catalogue: Catalogue, reason: str) -> Working:
        """Take over the newest generation if it is one of this kind, else claim one.

        Raises
        ------
        ConflictError
            Another process is at work in the newest generation.
        """
        newest = catalogue.newest_generation()
        record = catalogue.generation(newest) if newest else None
        if record is None or record.reason != reason:
            newest = catalogue.claim(catalogue.latest(), 0, reason).generation
        working = Working(catalogue, newest, reason)
        working.enter(CommitName(0, newest))
        return working

    def enter(self, name: CommitName, rivals: Callable[[str], bool] | None = None) -> None:
        """Begin to work on `name`, unless a rival is at work in the generation.

        Parameters
        ----------
        rivals
            Tells by its reason whether a process is one; those of the same reason if left out.

        Raises
        ------
        ConflictError
            Another process does this very work here, or another reshard writes into the folder.
        """
        rivals = rivals or self._reason.__eq__
        self._refuse(rivals)
        for most in (*_PAUSES_S, 0.0):
            self.touch(name)
            try:
                # Again: of two that begin at one moment, one at least finds the other's lease.
                self._refuse(rivals)
                break
            except ConflictError:
                self.end()
                if not most:
                    raise
            time.sleep(random.uniform(0, most))

    def _refuse(self, rivals: Callable[[str], bool]) -> None:
        """Raise when a rival is at work."""
        for key, lease in leases(self._catalogue).items():
            if key == lease_key(self.work_id) or lease.generation != self.generation:
                continue
            if not rivals(lease.holder.rpartition(" ")[0]) or expired(lease, time.time()):
                continue
            if _is_dead(lease.holder):
                self._catalogue.store.delete([key])
                continue
            raise ConflictError(
                "another process is writing here",
                where=self._catalogue.where(key),
                found=f"{lease.holder}, generation {self.generation}",
                hint="wait for it; if its machine is gone, remove that lease",
            )

    def touch(self, name: CommitName) -> None:
        """Write a sign that work on `name` goes on; cheap when the last one is recent."""
        with self._lock:
            now = time.time()
            if name == self._on and now - self._renewed < _RENEW_S:
                return
            put_lease(self._catalogue.store, name, self.work_id, self._holder)
            self._on, self._renewed = name, now

    def end(self) -> None:
        """Say that the work is over. Idempotent."""
        with self._lock:
            self._on = None
            self._catalogue.store.delete([lease_key(self.work_id)])


def refuse_behind(catalogue: Catalogue, line: Sequence[CommitName], step: int) -> None:
    """Raise `RefusedError` (kind ``behind``) unless `step` comes after a root's line."""
    if line and line[-1].step >= step:
        raise RefusedError(
            f"steps must be later than the target's newest, {line[-1].step}",
            kind="behind",
            where=catalogue.store.url,
            wanted=f"a step after {line[-1].step}",
            found=f"step {step}",
            hint="write older steps first, or into a root of their own",
        )


def at_work(catalogue: Catalogue) -> dict[str, Lease]:
    """Return the leases of processes that are not known to have ended, by the id of their work."""
    return {
        key.rpartition("/")[2].removesuffix(".json"): lease
        for key, lease in leases(catalogue).items()
        if not expired(lease, time.time()) and not _is_dead(lease.holder)
    }


def _place() -> str:
    """Return the host and its process namespace: elsewhere a process id means another process."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}/{namespace}"


def _is_dead(holder: str) -> bool:
    """Tell whether the holder was a process of this very place that is no more."""
    place, _, pid = holder.rpartition(" ")[2].rpartition(":")
    if place != _place() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False
