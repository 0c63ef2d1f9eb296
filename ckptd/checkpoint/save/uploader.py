"""From a slot to its tiers: a thread a tier, order, the root from the local file.

In it: which snapshots in memory are brought to the root at the end.

The share is digested once, where it was staged. Memory keeps it there; the peer and the folder get
its bytes, digests and part as they are; the root is written as without tiers. Where a snapshot goes
to the folder and to the root, the root is written from the folder's file, and the slot is free long
before an upload ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from ckptd import events
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.index import saving
from ckptd.checkpoint.save.arena import KEEPING
from ckptd.checkpoint.save.drain import StagedShard, as_document, put_shard
from ckptd.checkpoint.save.messages import Freed, Response, Settled, ShardStored
from ckptd.checkpoint.save.neartiers import NodeTiers, age
from ckptd.checkpoint.save.tiers import NEAR, ROOT
from ckptd.errors import CkptdError
from ckptd.store.base import Store

_RECENT = 8
_SPANS = {"peer": "upload", "local": "write"}
"""Name of the event of writing a data file, by tier that gets a copy."""

_log = logging.getLogger("ckptd")

ToRoot = Callable[[StagedShard, memoryview], None]


class TierUploader:
    """Brings the shares of one rank to their tiers.

    Parameters
    ----------
    near
        The node's tiers.
    send
        Sends to the trainer.
    to_root
        Writes a share to the root from the bytes given, and has it committed; raises nothing.
    """

    def __init__(self, near: NodeTiers, send: Callable[[Response], None], to_root: ToRoot) -> None:
        self._near = near
        self._send = send
        self._to_root = to_root
        self._pools = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"ckptd-{name}")
            for name in ("peer", "local", "root", "clear")
        }
        self._recent: dict[CommitName, StagedShard] = {}

    def take(self, shard: StagedShard) -> None:
        """Send a share to the near tiers of its save, in threads; returns at once."""
        save, memory = shard.save, self._near.memory
        if any(tier in save.near for tier in KEEPING):
            # For the peer tier as well: when a node is lost, the peers have only its own shares,
            # and those that lay with it are nowhere but with their owners.
            memory.keep(shard)
        else:
            memory.forget_slot(shard.slot)
        if "memory" in save.near:
            self._send(ShardStored(save.job, "memory"))
        self._recent[save.name] = shard
        for old in sorted(self._recent, key=age)[:-_RECENT]:
            del self._recent[old]
        readers = _Readers(lambda: self._send(Freed(save.job)))
        waiting = readers.join()
        if "peer" in save.near:
            self._pools["peer"].submit(self._to_near, shard, "peer", readers.join())
        in_folder: Future[bool] | None = None
        used = ExitStack()
        if "local" in save.near:
            if save.root:  # from now on, since the root may be busy until newer ones are there
                used.enter_context(self._near.using(save.folder))
            in_folder = self._pools["local"].submit(self._to_near, shard, "local", readers.join())
        if save.root:
            self._pools["root"].submit(self._write_root, shard, in_folder, used, readers.join())
        waiting()

    def settled(self, message: Settled) -> None:
        """Note what became of a snapshot on a tier; returns at once."""
        note = self._near.completed if message.complete else self._near.lost
        name = CommitName(message.step, message.generation)
        self._pools["clear"].submit(note, message.tier, name)

    def worth_saving(self) -> list[StagedShard]:
        """Return what is in memory of the newest complete snapshot and of later ones, newest first.

        A later one may be complete though this node has not received that yet; the ranks that know
        count on those that do not. What is known to lack a share is left out.
        """
        found: list[StagedShard] = []
        for name, shard in sorted(self._recent.items(), key=lambda i: age(i[0]), reverse=True):
            complete = self._is_complete(name)
            lost = all(self._near.is_lost(tier, name) for tier in shard.save.near)
            if shard.is_whole and (complete or not lost):
                found.append(shard)
                if complete:
                    break
        return found

    def newest(self) -> StagedShard | None:
        """Return what is in memory of the newest complete snapshot, if it is there."""
        return next((s for s in self.worth_saving() if self._is_complete(s.save.name)), None)

    def _is_complete(self, name: CommitName) -> bool:
        return any(self._near.is_complete(tier, name) for tier in (*NEAR, ROOT))

    def finish(self) -> None:
        """Return when every share that was taken is where it should be."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    # -- threads ---------------------------------------------------------------------------------

    def _to_near(self, shard: StagedShard, tier: str, done: Callable[[], None]) -> bool:
        """Copy a share to a near tier and report what became of it; return whether it is there."""
        save = shard.save
        error: dict[str, str | None] | None = None
        try:
            with (
                events.about(tier=tier),
                saving(self._near.memory, save.name, save.attempt, shard.plan.rank),
            ):
                store = self._near.store(tier)
                put_shard(store, shard, _SPANS[tier], may_delete=tier != "peer")
        except Exception as caught:  # noqa: BLE001 - a bug must reach the handle, not vanish
            error = as_document(caught)
        done()
        self._send(ShardStored(save.job, tier, error))
        return error is None

    def _write_root(
        self,
        shard: StagedShard,
        in_folder: Future[bool] | None,
        used: ExitStack,
        done: Callable[[], None],
    ) -> None:
        with used:
            written = in_folder is not None and in_folder.result()
            data = _mapped(self._near.store("local"), shard, used) if written else None
            if data is not None:
                done()
                self._to_root(shard, data)
            else:
                self._to_root(shard, shard.slot.data)
                done()


def _mapped(store: Store, shard: StagedShard, stack: ExitStack) -> memoryview | None:
    """Map the data section of a share's file in a folder, until `stack` ends.

    None where the store gives no descriptor, or the file is gone: the slot still holds the same.
    No other process writes there; should one truncate the file, this process ends by SIGBUS, and
    the trainer starts another.
    """
    if not shard.header:
        return memoryview(b"")
    try:
        opened = store.open_file(shard.key)
        if opened is None:
            return None
        stack.callback(os.close, opened.fd)
        start = opened.shift + len(shard.header)
        size = start + shard.data_bytes
        mapped = stack.enter_context(mmap.mmap(opened.fd, size, access=mmap.ACCESS_READ))
    except (CkptdError, OSError, ValueError) as error:
        _log.warning("cannot read step %d from its folder: %s", shard.save.step, error)
        return None
    return stack.enter_context(stack.enter_context(memoryview(mapped))[start:])


class _Readers:
    """Counts the readers of a slot."""

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
