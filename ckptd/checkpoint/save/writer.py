"""`SaveWriter`: process that writes; commits orphaned saves after its trainer's death; waits.

In it: how long parts of other ranks are awaited, a next generation, a turn among survivors.

It lives outside the trainer's session, so a signal to the trainer's group does not end it, and it
outlives the trainer: what was staged completely when the trainer died is still written and, if
every other rank's part arrives, committed: by rank 0's worker, or by any other that survives it.
It ends when nothing is left to do and the channel is closed.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: each collection would visit that

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ckptd import events
from ckptd.base.runtime.channel import Channel, SocketChannel
from ckptd.base.runtime.host import available_bytes, pid_space
from ckptd.checkpoint.format.names import commit_key, file_key, part_key
from ckptd.checkpoint.root.catalogue import Catalogue, remove_parts
from ckptd.checkpoint.root.index import root_tier, saving
from ckptd.checkpoint.save import messages
from ckptd.checkpoint.save.arena import Slot, half_staged
from ckptd.checkpoint.save.commit import (
    commit_attempt,
    join_parts,
    joined_key,
    reported_key,
    signer_of,
)
from ckptd.checkpoint.save.dedup import ChunkDedup
from ckptd.checkpoint.save.drain import StagedShard, as_document, drain, stage_shard
from ckptd.checkpoint.save.structure import RankPlan
from ckptd.checkpoint.save.tiers import ROOT
from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError, ConflictError, NotFoundError, ProcessError, SaveError
from ckptd.store.base import Store
from ckptd.store.osio import bring_into_cache

if TYPE_CHECKING:
    from ckptd.checkpoint.save.neartiers import NodeTiers
    from ckptd.checkpoint.save.uploader import TierUploader

ORPHAN_COMMIT_S = 60.0
"""How long a worker without a trainer waits for the other ranks' parts, in seconds."""
_SETTLE_S = 10.0
"""How long a snapshot that all ranks have written may be without a commit, in seconds."""
_CACHE_S = 2.0
"""How long a process that is to end reads on for the page cache, in seconds."""
_NEXT_LIFE_S = 30.0
"""How long a trainer that goes on in another generation may take for that, in seconds."""
TURN_S = 2.0
"""An orphan gives each lower rank (15 of them at most) so many seconds before it commits."""

_log = logging.getLogger("ckptd")


class SaveWriter:
    """Serves one channel. Jobs run one after the other; commits wait in a thread of their own.

    Parameters
    ----------
    channel
        The worker's end.
    store
        Used instead of the one that `WriterHello` describes (in-process stores).
    near
        The near tiers of the node; only its agent keeps any.
    """

    def __init__(
        self, channel: Channel, store: Store | None = None, near: NodeTiers | None = None
    ) -> None:
        self._channel = channel
        self._given_store = store
        self._near = near
        self._uploader: TierUploader | None = None
        self._arena: dict[int, Slot] = {}
        self._sealed: dict[int, messages.Sealed] = {}
        self._arrived = threading.Condition()
        """Notified when a seal, an abort or the end of the trainer has arrived."""
        self._plan: RankPlan | None = None
        self._aborted: dict[int, str] = {}
        self._orphan = threading.Event()
        self._root_id = ""
        self._trainer_died = False
        self._goes_on = False
        self._left_at = 0.0
        self.died_at = 0.0
        """When the trainer was found dead, on the monotonic clock: what it left may take longer."""
        self.stopped = False
        """Whether the trainer ended by `Stop`."""
        self._unsettled: deque[tuple[messages.SaveRequest, RankPlan]] = deque(maxlen=4)
        self._send_lock = threading.Lock()
        self._noted: set[str] = set()
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="ckptd-drain")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="ckptd-commit")
        self._cached = ThreadPoolExecutor(1, thread_name_prefix="ckptd-cache")
        self._newest: messages.SaveRequest | None = None
        # Side by side: one that waits in vain for a part must not hold up what is complete.
        self._orphans = ThreadPoolExecutor(4, thread_name_prefix="ckptd-orphan")

    def run(self, hello: messages.WriterHello | None = None) -> None:
        """Serve until the channel closes or `Stop` comes, then finish what is staged.

        Parameters
        ----------
        hello
            The first message, where it has been received already.
        """
        try:
            if hello is None:
                hello, _ = self._channel.receive(60.0) or (None, None)
            if not isinstance(hello, messages.WriterHello):
                return
            messages.check_protocol(hello.protocol, "the trainer")
            self._hello = hello
            self._store = self._given_store or hello.store.open()
            self._catalogue = Catalogue(self._store)
            self._tier = root_tier(self._store, [t.name for t in hello.tiers])
            self._unchanged = ChunkDedup(self._catalogue, hello.rank, hello.world)
            self.send(self._ready(hello))
            while self._serve_one():
                pass
        except CkptdError as error:
            self.send(
                messages.WriterReady(os.getpid(), error=error.to_dict(), protocol=messages.PROTOCOL)
            )
        except EOFError:
            self._trainer_died, self.died_at = True, time.monotonic()
        finally:
            self._finish()

    def _ready(self, hello: messages.WriterHello) -> messages.WriterReady:
        if self._near is None:
            return messages.WriterReady(os.getpid(), protocol=messages.PROTOCOL)
        self._near.prepare(hello.tiers)
        from ckptd.checkpoint.save.uploader import TierUploader

        self._uploader = TierUploader(self._near, self.send, self._shard_to_root)
        doors = self._near.serve(hello.bind, hello.key) if hello.bind else ("", "", "")
        here, known = self._near.here, self._near.neighbours
        return messages.WriterReady(
            os.getpid(), here, *doors, pid_space(), known, protocol=messages.PROTOCOL
        )

    @property
    def agent_ttl_s(self) -> float:
        """How long to keep what is in memory once the trainer has gone, in seconds."""
        return self._hello.agent_ttl_s if self.died_at and self.rank >= 0 else 0.0

    @property
    def rank(self) -> int:
        """Rank of the trainer; -1 before `WriterHello`."""
        return self._hello.rank if hasattr(self, "_hello") else -1

    def _serve_one(self) -> bool:
        item = self._channel.receive(3600.0)
        if item is None:
            return True
        message, fd = item
        if isinstance(message, messages.NewSlot) and fd is not None:
            self._drains.submit(self._swap_slot, Slot(message.slot, message.nbytes, fd))
        elif isinstance(message, messages.SetPlan):
            self._plan = RankPlan(message.plan, self._hello.rank)
        elif isinstance(message, messages.Sealed):
            with self._arrived:
                self._sealed[message.job] = message
                self._arrived.notify_all()
        elif isinstance(message, messages.AbortSave):
            with self._arrived:
                self._aborted[message.job] = message.reason
                self._arrived.notify_all()
        elif isinstance(message, messages.SaveRequest) and self._plan is not None:
            self._drains.submit(self._write, message, self._plan)
        elif isinstance(message, messages.Partner) and self._near is not None:
            self._near.set_peer(message.url, message.secret)
        elif isinstance(message, messages.Neighbours) and self._near is not None:
            self._near.neighbours = message.nodes
        elif isinstance(message, messages.Settled) and self._uploader is not None:
            self._uploader.settled(message)
        elif isinstance(message, messages.Leave):
            self._goes_on, self._left_at = self._near is not None, message.at
            raise EOFError
        self.stopped = isinstance(message, messages.Stop)
        return not self.stopped

    def _finish(self) -> None:
        self._end_waits()
        self._drains.shutdown(wait=True)
        if self._uploader is not None:
            self._uploader.finish()
            if self._goes_on and self._near is not None:
                # The next life needs the snapshots where they are: what is brought to the root
                # meanwhile would be in the way, and is soon too old.
                self._goes_on = self._near.wait_next(self._left_at, _NEXT_LIFE_S)
            if not self._goes_on:
                self._promote(self._uploader)
        if self._trainer_died and not self._goes_on:
            for save, plan in self._unsettled:
                self._orphans.submit(self._commit_as_survivor, save, plan)
        self._orphans.shutdown(wait=True)
        self._commits.shutdown(wait=True)
        self._cached.shutdown(wait=True)
        ahead = self.stopped and self._uploader is not None and self._is_ahead(self._uploader)
        if ahead:
            # The root could not take the newest snapshot: what is in memory is all there is of it.
            self.stopped, self.died_at = False, time.monotonic()
        if self._near is not None:
            self._near.memory.adopt(self._arena.values())
            if ahead:  # logged once it is so: the next life may begin at that
                _log.error("the newest snapshot is not at the root yet: keeping it in memory")
        else:
            for slot in self._arena.values():
                slot.close()
        if self._given_store is None and hasattr(self, "_store"):
            self._store.close()
        self._channel.close()

    def _end_waits(self) -> None:
        """End waits for the trainer: nothing comes from it any more."""
        with self._arrived:
            self._orphan.set()
            self._arrived.notify_all()

    def _swap_slot(self, slot: Slot) -> None:
        # The trainer replaces a slot that is read no more.
        old = self._arena.pop(slot.number, None)
        if old is not None:
            if self._near is not None:
                self._near.memory.forget_slot(old)
            old.close()
        self._arena[slot.number] = slot
        threading.Thread(target=slot.touch, name="ckptd-touch", daemon=True).start()

    def _wait_staged(self, save: messages.SaveRequest, slot: Slot, until: float, upto: int) -> None:
        """Return when the slot holds the first `upto` bytes of this very save."""

        def filling() -> bool:
            self._raise_aborted(save)
            return not self._orphan.is_set()

        slot.wait(save.job, upto, filling, _left_s(until))
        self._raise_aborted(save)

    def _wait_sealed(self, save: messages.SaveRequest, slot: Slot, until: float) -> messages.Sealed:
        """Return the seal of this very save: without one what is staged may be half a snapshot."""

        def ended() -> bool:
            return save.job in {*self._sealed, *self._aborted} or self._orphan.is_set()

        with self._arrived:
            self._arrived.wait_for(ended, _left_s(until))
            seal = self._sealed.get(save.job)
            # Drains go in order: what came for an earlier job, which failed, is needed no more.
            self._sealed = {j: s for j, s in self._sealed.items() if j > save.job}
            self._raise_aborted(save)
        if seal is None or slot.sealed != save.job:
            raise half_staged("a sealed snapshot", slot.staged)
        return seal

    def _raise_aborted(self, save: messages.SaveRequest) -> None:
        if save.job in self._aborted:
            raise SaveError(self._aborted[save.job], kind="aborted", where=save.folder)

    def _write(self, save: messages.SaveRequest, plan: RankPlan) -> None:
        """Bring a share to its tiers: to the root as it is copied, to several once it is whole."""
        try:
            slot = self._arena[save.slot]
            if self._uploader is not None:
                self._check_owner(save)
                self._uploader.take(self._stage(save, plan, slot))
                return
        except Exception as error:  # noqa: BLE001 - a bug must reach the handle, not vanish
            self._unchanged.end(save)
            for tier in (*save.near, ROOT) if save.root else save.near:
                self.send(messages.ShardStored(save.job, tier, as_document(error)))
            self.send(messages.Freed(save.job))
            return
        staged, sealed = self._waits(save, slot)
        self._write_root(
            save, plan, slot.data, staged, sealed, lambda: self.send(messages.Freed(save.job))
        )

    def _waits(
        self, save: messages.SaveRequest, slot: Slot
    ) -> tuple[Callable[[int], None], Callable[[], messages.Sealed]]:
        """Return what waits for so many bytes of a save, and for its seal; not for ever."""
        until = time.monotonic() + save.timeout_s
        return (
            partial(self._wait_staged, save, slot, until),
            partial(self._wait_sealed, save, slot, until),
        )

    def _write_root(
        self,
        save: messages.SaveRequest,
        plan: RankPlan,
        data: memoryview,
        wait: Callable[[int], None],
        sealed: Callable[[], messages.Sealed],
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a share to the root and have it committed; `free` when `data` is read no more.

        Raises nothing: the trainer receives what failed. See `drain` for `wait` and `sealed`.
        """
        reported = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported > 0.1 or done == total:
                reported = now
                self.send(messages.WriteProgress(save.job, done, total))

        try:
            self._catalogue.check_root(save.root_id)
            with events.about(tier=self._tier):
                part: messages.RankPart | None = None
                beside: dict[str, bytes] = {}
                if not self._is_reported(save):
                    store, unchanged = self._store, self._unchanged
                    more = wait, sealed, progress, unchanged, beside
                    part = drain(store, plan, save, data, *more)
        except Exception as error:  # noqa: BLE001 - as above
            self._unchanged.end(save)
            # First: a save that finds the slot free must know already that this one failed.
            self.send(messages.ShardStored(save.job, ROOT, as_document(error)))
            free()
            return
        self.send(messages.ShardStored(save.job, ROOT))
        if plan.is_alone and part is not None:
            # The slot is all there is of it until then: no part says what was written.
            if self._commit(save, plan, part, beside=beside):
                self._commits.submit(self._clean, save)
        elif not save.root and self._hello.rank == 0:
            self._orphans.submit(self._commit_as_survivor, save, plan)
        elif self._hello.rank == 0:
            self._commits.submit(self._commit_and_clean, save, plan)
        else:
            self._unsettled.append((save, plan))
            self._commits.submit(self._join, save, plan)
        free()
        self._newest = save
        self._cached.submit(self._bring_into_cache, save, plan)

    def _bring_into_cache(self, save: messages.SaveRequest, plan: RankPlan) -> None:
        """Have what was written past the page cache in it, for a load on this host, if it has room.

        Half of what is available is left alone. Several ranks may share the host, and none knows
        of the others: so it is an eighth then.
        """
        path = self._store.local_path(file_key(save.folder, plan.rank))
        size, part = plan.data_bytes, 2 if plan.is_alone else 8
        if path is None or not (size <= plan.small_bytes or size < available_bytes() // part):
            return
        until: float | None = None

        def wanted() -> bool:
            nonlocal until
            if until is None and self._orphan.is_set():
                until = time.monotonic() + _CACHE_S
            # What an older save left is not worth the disk any more.
            return self._newest is save and (until is None or time.monotonic() < until)

        bring_into_cache(str(path), wanted)

    def _join(self, save: messages.SaveRequest, plan: RankPlan) -> None:
        """Join the parts of this rank's block, if it is the first; a commit does not need it."""
        folder, rank, world, stop = save.folder, plan.rank, plan.plan.world, self._stop_of(save)

        def stop_or_settled() -> str | None:
            return stop() or ("the save has ended" if self._is_settled(save) else None)

        try:
            with events.about(tier=self._tier):
                store = signer_of(self._store, save) or self._store
                join_parts(store, folder, rank, world, stop_or_settled, save.timeout_s)
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("the parts of step %d are not joined: %s", save.step, error)

    def _is_reported(self, save: messages.SaveRequest) -> bool:
        """Tell whether a worker that died has written this rank's share and reported its part.

        Then the committer may have read the part, and what it names must not be written again. The
        part is looked for first: it is removed when the commit is there.
        """
        if not save.again:
            return False
        folder, rank = save.folder, self._hello.rank
        store = signer_of(self._store, save) or self._store
        for key in (part_key(folder, rank), reported_key(folder, rank)):
            with suppress(NotFoundError):
                part = messages.RankPart.decode(store.get(key), key)
                if part.error is not None:
                    raise CkptdError.from_dict(part.error)
                return True
        return any(map(self._store.exists, (joined_key(folder, rank), commit_key(save.name))))

    def _check_owner(self, save: messages.SaveRequest) -> None:
        """Drop what near tiers have of another root: one that was deleted may be made again."""
        if self._near is None or (self._root_id and self._root_id == save.root_id):
            return
        try:
            # Trainers of older versions do not send it. Memory must be of use also while the root
            # is not.
            self._root_id = save.root_id or self._root_id or self._catalogue.open().root_id
            self._near.belongs(self._root_id)
        except CkptdError as error:
            _log.warning("the root cannot be read: %s", error.message)

    # -- near tiers --------------------------------------------------------------------------------

    def _stage(self, save: messages.SaveRequest, plan: RankPlan, slot: Slot) -> StagedShard:
        """Digest a snapshot as it comes, and return this rank's share of it once it is whole."""
        with events.about(tier="memory"), saving(self._store, save.name, save.attempt, plan.rank):
            return stage_shard(plan, save, slot, *self._waits(save, slot), self._root_id)

    def _shard_to_root(self, shard: StagedShard, data: memoryview) -> None:
        save = shard.save
        self._write_root(
            save, shard.plan, data, lambda _: self._raise_aborted(save), lambda: shard.seal
        )

    def _promote(self, uploader: TierUploader) -> None:
        """Bring the newest complete snapshot to the root, if it was kept in memory only.

        Every rank's worker does so by itself when its trainer ends, however it ends: what was
        complete nearby is not lost with the memory. A newer life of the job may go on meanwhile:
        then the root refuses it, and nothing is missed.
        """
        for shard in uploader.worth_saving():
            if shard.save.root:
                continue  # its own lane has seen to it
            try:
                if self._is_past(shard.save):
                    return
                self._catalogue.check_not_superseded(shard.save.generation)
            except CkptdError as error:
                _log.warning("keeping step %d in memory: %s", shard.save.step, error.message)
                return
            self._shard_to_root(shard, shard.slot.data)

    def _is_ahead(self, uploader: TierUploader) -> bool:
        """Tell whether memory holds a complete snapshot that the root has not got.

        Rank 0's worker, perhaps on another node, commits what this one has written.
        """
        shard = uploader.newest()
        end = time.monotonic() + _SETTLE_S
        while shard is not None:
            try:
                if self._is_past(shard.save):
                    return False
                self._catalogue.check_not_superseded(shard.save.generation)
            except ConflictError:
                return False
            except CkptdError as error:
                _log.warning("the root cannot be read: %s", error.message)
                return True
            if time.monotonic() > end:
                return True
            time.sleep(0.1)
        return False

    def _is_past(self, save: messages.SaveRequest) -> bool:
        """Tell whether the root has this step or a later one."""
        self._catalogue.check_root(save.root_id)
        latest = self._catalogue.latest()
        return latest is not None and latest.step >= save.step

    def _commit_as_survivor(self, save: messages.SaveRequest, plan: RankPlan) -> None:
        """Commit what rank 0 did not: its worker may have died with the trainers.

        Only rank 0 commits while its job lives, so what was not aborted is still wanted.
        """
        end = time.monotonic() + _turn_s(self._hello.rank)
        while not self._is_settled(save):
            if time.monotonic() >= end:
                self._commit_and_clean(save, plan)
                return
            time.sleep(0.2)

    def _is_settled(self, save: messages.SaveRequest) -> bool:
        try:
            if save.job in self._aborted or self._store.exists(commit_key(save.name)):
                return True
            # Ranks that did not know how far the others were may have brought two snapshots.
            return not save.root and self._is_past(save)
        except CkptdError:
            return False  # the commit itself will raise what is wrong with the store

    def _stop_of(self, save: messages.SaveRequest) -> Callable[[], str | None]:
        """Return what says why parts of a save are waited for no more."""
        orphaned_at: float | None = None

        def stop() -> str | None:
            nonlocal orphaned_at
            if save.job in self._aborted:
                return self._aborted[save.job]
            if self._orphan.is_set():
                orphaned_at = orphaned_at or time.monotonic()
                if time.monotonic() - orphaned_at > ORPHAN_COMMIT_S:
                    return "the trainers have ended before every rank's part arrived"
            return None

        return stop

    def _commit_and_clean(self, save: messages.SaveRequest, plan: RankPlan) -> None:
        if self._commit(save, plan):
            self._clean(save)

    def _commit(
        self,
        save: messages.SaveRequest,
        plan: RankPlan,
        *parts: messages.RankPart,
        beside: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Commit, report it, and return whether the checkpoint exists."""
        stop = self._stop_of(save)
        rank, gathered = self._hello.rank, self._unchanged.gathered
        commit = None
        try:
            with events.about(tier=self._tier):
                more = self._catalogue, plan.plan, save, stop, save.timeout_s, rank, gathered
                commit = commit_attempt(*more, parts, beside)
        except Exception as error:  # noqa: BLE001 - as above
            failed = as_document(error)
            if self._orphan.is_set():  # no other process is there to report it
                _log.error("step %d was not committed: %s", save.step, failed.get("message"))
            self.send(messages.ShardStored(save.job, ROOT, failed))
            return False
        finally:
            self._unchanged.end(save, commit)
        self.send(messages.SaveCommitted(save.job))
        return True

    def _clean(self, save: messages.SaveRequest) -> None:
        """Remove what is needed no more; what fails here is a warning, as the checkpoint exists."""
        try:
            with (
                events.about(tier=self._tier),
                saving(self._store, save.name, save.attempt, self._hello.rank),
            ):
                remove_parts(self._store, save.folder)
                if save.keep is not None:
                    from ckptd.checkpoint.root.gc import apply_retention

                    for note in {*apply_retention(self._catalogue, save.keep)} - self._noted:
                        self._noted.add(note)
                        self.send(messages.Warned(save.job, {"message": note}))
        except CkptdError as error:
            self.send(messages.Warned(save.job, error.to_dict()))

    def send(self, message: messages.Response) -> None:
        """Send a message to the trainer, if it still lives."""
        with self._send_lock:
            try:
                self._channel.send(message)
            except ProcessError:
                self._end_waits()


def _left_s(until: float) -> float:
    return max(1.0, until - time.monotonic())


def _turn_s(rank: int) -> float:
    """Return how long an orphan holds back, in seconds: thousands must not commit at once."""
    return TURN_S * rank if rank <= 15 else TURN_S * 15 + rank % 97


def main() -> None:
    """Entry point of the process: the channel is the socket whose number is the only argument."""
    gc.freeze()
    gc.enable()
    report_crashes()
    worker = SaveWriter(SocketChannel(socket.socket(fileno=int(sys.argv[1])), messages.Request))
    # A worker in a thread of the trainer emits on the same bus, and must not emit twice.
    events.subscribe(lambda event: worker.send(messages.EventMessage(event)))
    worker.run()


if __name__ == "__main__":
    main()
