"""From one rank's snapshot in a slot to the tiers: a lane each, none waits for a slower one.

The share is digested once in memory. Its peer gets it from there; the folder and the root are
written as a root always is. Where a snapshot goes to the folder and to the root, the root is
written from the folder's file, and the slot is free long before an upload ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from ckptd import events
from ckptd.errors import CkptdError, WorkerError
from ckptd.format.names import CommitName
from ckptd.root.spans import saving
from ckptd.save.arena import KEEPING
from ckptd.save.commit import plan_key
from ckptd.save.dedup import Unchanged
from ckptd.save.drain import drain
from ckptd.save.messages import Complete, Freed, Lost, NearFailed, Reached, Response, Save, Sealed
from ckptd.save.neartiers import Near
from ckptd.save.rankplan import RankPlan
from ckptd.save.shard import Held, put_share
from ckptd.save.tiers import NEAR
from ckptd.store.base import Store

__all__ = ["Lanes", "Share", "as_worker_error"]

_RECENT = 8
_TIERS = (*NEAR, "root")

_log = logging.getLogger("ckptd")

ToRoot = Callable[["Share", memoryview], None]


@dataclass(frozen=True, slots=True)
class Share:
    """What is needed to write a rank's share anywhere."""

    held: Held
    plan: RankPlan
    seal: Sealed

    @property
    def save(self) -> Save:
        """The save that it is of."""
        return self.held.save

    def write(self, store: Store, data: memoryview, unchanged: Unchanged | None = None) -> None:
        """Write data file, digests and part; durable on return. See `ckptd.save.drain.drain`."""
        drain(
            store,
            self.plan,
            self.save,
            data,
            _is_there,
            lambda _: self.seal,
            _unseen,
            unchanged,
            self.held.root,
        )


class Lanes:
    """The lanes of one rank.

    Parameters
    ----------
    near
        The node's tiers.
    tell
        Sends to the trainer.
    to_root
        Writes a share to the root from the bytes given, and has it committed; raises nothing.
    """

    def __init__(self, near: Near, tell: Callable[[Response], None], to_root: ToRoot) -> None:
        self._near = near
        self._tell = tell
        self._to_root = to_root
        self._pools = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"ckptd-{name}")
            for name in ("peer", "local", "root", "clear")
        }
        self._recent: dict[CommitName, Share] = {}

    def take(self, share: Share) -> None:
        """Let a share go to the tiers of its save; returns at once."""
        save, shelf = share.save, self._near.shelf
        if any(tier in save.near for tier in KEEPING):
            # For the peer tier as well: when a node is lost, the peers have only its own shares,
            # and those that lay with it are nowhere but with their owners.
            shelf.keep(share.held)
        else:
            shelf.forget_slot(share.held.slot)
        if "memory" in save.near:
            self._tell(Reached(save.job, "memory"))
        self._recent[save.name] = share
        for old in sorted(self._recent, key=_age)[:-_RECENT]:
            del self._recent[old]
        readers = _Readers(lambda: self._tell(Freed(save.job)))
        waiting = readers.join()
        if "peer" in save.near:
            self._pools["peer"].submit(self._to_peer, share, readers.join())
        in_folder: Future[bool] | None = None
        used = ExitStack()
        if "local" in save.near:
            if save.root:  # from now on, since the root may be busy until newer ones are there
                used.enter_context(self._near.using(save.folder))
            in_folder = self._pools["local"].submit(self._to_local, share, readers.join())
        if save.root:
            self._pools["root"].submit(self._write_root, share, in_folder, used, readers.join())
        waiting()

    def completed(self, message: Complete) -> None:
        """Take in that a snapshot is complete on a tier; returns at once."""
        name = CommitName(message.step, message.generation)
        self._pools["clear"].submit(self._near.completed, message.tier, name)

    def worth_saving(self) -> list[Share]:
        """Return what is in memory of the newest complete snapshot and of later ones, newest first.

        Of a later one nobody may have had the time to say that it is complete; the ranks that know
        count on those that do not. What is known to lack a share is left out.
        """
        found: list[Share] = []
        for name, share in sorted(self._recent.items(), key=lambda i: _age(i[0]), reverse=True):
            complete = self._is_complete(name)
            lost = all(self._near.is_lost(tier, name) for tier in share.save.near)
            if share.held.is_whole and (complete or not lost):
                found.append(share)
                if complete:
                    break
        return found

    def newest(self) -> Share | None:
        """Return what is in memory of the newest complete snapshot, if it is there."""
        return next((s for s in self.worth_saving() if self._is_complete(s.save.name)), None)

    def _is_complete(self, name: CommitName) -> bool:
        return any(self._near.is_complete(tier, name) for tier in _TIERS)

    def lost(self, message: Lost) -> None:
        """Take in that a snapshot will never be complete on a tier; returns at once."""
        name = CommitName(message.step, message.generation)
        self._pools["clear"].submit(self._near.lost, message.tier, name)

    def finish(self) -> None:
        """Return when every share that was taken is where it should be."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    # -- the lanes ---------------------------------------------------------------------------------

    def _to_peer(self, share: Share, done: Callable[[], None]) -> bool:
        return self._attempt(share, "peer", done, lambda: put_share(self._near.peer, share.held))

    def _to_local(self, share: Share, done: Callable[[], None]) -> bool:
        def write() -> None:
            store = self._near.local
            body = msgspec.msgpack.encode(share.plan.plan)
            store.put(plan_key(share.save.folder), body)
            share.write(store, share.held.slot.data)

        return self._attempt(share, "local", done, write)

    def _attempt(
        self, share: Share, tier: str, done: Callable[[], None], write: Callable[[], None]
    ) -> bool:
        """Write to a near tier, and tell how it went."""
        save = share.save
        error: dict[str, str | None] | None = None
        try:
            with (
                events.about(tier=tier),
                saving(self._near.shelf, save.name, save.attempt, share.held.rank),
            ):
                write()
        except CkptdError as caught:
            error = caught.to_dict()
        except Exception as caught:  # noqa: BLE001 - a bug must reach the handle, not vanish
            error = as_worker_error(caught)
        done()
        self._tell(NearFailed(save.job, tier, error) if error else Reached(save.job, tier))
        return error is None

    def _write_root(
        self,
        share: Share,
        in_folder: Future[bool] | None,
        used: ExitStack,
        done: Callable[[], None],
    ) -> None:
        with used:
            written = in_folder is not None and in_folder.result()
            data = _mapped(self._near.local, share, used) if written else None
            if data is not None:
                done()
                self._to_root(share, data)
            else:
                self._to_root(share, share.held.slot.data)
                done()


def _mapped(store: Store, share: Share, stack: ExitStack) -> memoryview | None:
    """Map the data section of a share's file in a folder, until `stack` ends.

    None where the store gives no descriptor, or the file is gone: the slot still holds the same.
    Nobody else writes there; should somebody truncate the file, the process ends by SIGBUS, and
    the trainer starts another.
    """
    held = share.held
    if not held.header:
        return memoryview(b"")
    try:
        opened = store.open_file(held.key)
        if opened is None:
            return None
        stack.callback(os.close, opened.fd)
        start = opened.shift + len(held.header)
        size = start + held.data_bytes
        mapped = stack.enter_context(mmap.mmap(opened.fd, size, access=mmap.ACCESS_READ))
    except (CkptdError, OSError, ValueError) as error:
        _log.warning("step %d is not read from its folder: %s", share.save.step, error)
        return None
    whole = stack.enter_context(memoryview(mapped))
    return stack.enter_context(whole[start:])


def _age(name: CommitName) -> tuple[int, int]:
    return name.generation, name.step


class _Readers:
    """Counts who still reads a slot."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._count = 0

    def join(self) -> Callable[[], None]:
        """Return what a reader calls when it is done."""
        with self._lock:
            self._count += 1
        return self._leave

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1
            last = not self._count
        if last:
            self._free()


def as_worker_error(error: Exception) -> dict[str, str | None]:
    """Return a bug in the writing process as an error that can be sent."""
    where = "".join(traceback.format_exception(error)[-3:])
    return WorkerError(
        "the writing process failed unexpectedly", kind="internal", where=where, found=repr(error)
    ).to_dict()


def _is_there(upto: int, timeout_s: float) -> None:
    """Wait for bytes that are all there."""


def _unseen(done: int, total: int) -> None:
    """Tell nobody of the progress of a lane."""
