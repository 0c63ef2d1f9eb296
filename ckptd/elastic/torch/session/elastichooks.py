"""Messages of a checkpointer to its launcher (committed, loaded), and its wish for a save.

In it: checkpointers and publishers that are abandoned when a generation ends; the refusal to begin
behind the step that the job had reached.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ckptd.base.runtime.ranks import Board
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.torch.job import Abandonable, Job, MakeJob
from ckptd.checkpoint.torch.schedule import SAVE, SignalWatch
from ckptd.elastic.torch.session.leaseguard import check_lease, guard_steps
from ckptd.elastic.worker import WorkerLink
from ckptd.errors import RefusedError

if TYPE_CHECKING:
    from ckptd.store import Store

_log = logging.getLogger("ckptd.elastic")


_open: weakref.WeakSet[Abandonable] = weakref.WeakSet()


class LauncherWatch(SignalWatch):
    """Signals, and the launcher's wish for a save, which is answered as a signal to save is."""

    def __init__(self, signals: Iterable[int] | int) -> None:
        super().__init__(signals)
        self._link = WorkerLink.current()
        self._taken = False

    @property
    def active(self) -> bool:
        """Whether anybody may ask for a save: then ranks agree at each call whether one did."""
        return self._link is not None or super().active

    def pending(self, kind: str) -> int:
        """See `SignalWatch.pending`; 1 for the launcher's wish."""
        asked = kind == SAVE and self._link is not None and self._link.save_asked
        return super().pending(kind) or int(asked)

    def serve(self, kind: str) -> None:
        """See `SignalWatch.serve`."""
        super().serve(kind)
        if self._link is not None:
            self._taken = self._link.take_save() or self._taken

    @property
    def failures(self) -> tuple[float, float]:
        """Mean seconds between failures, and of a restart, in this job; 0.0 if unknown."""
        said = None if self._link is None else self._link.welcome
        return (0.0, 0.0) if said is None else (said.mtbf_s, said.mttr_s)

    def began(self, step: int) -> None:
        """The save of `step` begins; it answers what `serve` has served."""
        if self._taken and self._link is not None:
            self._taken = False
            self._link.serves(step)


class ElasticHooks(Job):
    """One checkpointer's part in a job that a launcher of ckptd has started.

    Where the launcher cannot be reached its methods do nothing.

    Parameters
    ----------
    board
        Of the ranks that share the state. Only a state of all ranks of the job is reported.
    signals
        As for `SignalWatch`.
    new_run
        Whether the job may begin from nothing though the controller knows of a committed step.
    """

    watch: LauncherWatch

    def __init__(
        self,
        checkpointer: Abandonable,
        board: Board,
        signals: Iterable[int] | int,
        new_run: bool = False,
    ) -> None:
        super().__init__(LauncherWatch(signals))
        self._link = link = WorkerLink.current()
        self._new_run = new_run
        self._saves: list[SaveTracker] = []
        self._unsure: list[int] = []
        if link is None:
            return
        self._generation = link.generation
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._tells = board.world == world
        guard_steps()
        link.mark("imported")
        link.mark("initialised")
        abandonable(checkpointer)

    def begins(self, root: Store) -> None:
        """Take in that there is nothing to load; RefusedError where the controller knows one."""
        promised = os.environ.get("CKPTD_STEP", "")
        known = int(promised) if promised.isdecimal() else 0
        asked = self._link is not None and self._tells and known > 0 and not self._new_run
        if asked and Index(root).generations():
            raise RefusedError(
                f"step {known} was committed, but no snapshot or checkpoint of this job is found",
                where=root.url,
                wanted=f"a snapshot or a checkpoint; step {known} was the newest",
                found="none, neither at the root nor in the near tiers of the nodes that are here",
                hint="bring back the nodes or the root that held it; to start from scratch on "
                "purpose, start a new job with another --log",
            )
        self.loaded(0)

    def loaded(self, step: int) -> None:
        """Tell that this rank has the state of `step`."""
        if self._link is not None and self._tells:
            self._link.loaded(self._generation, step)

    def saving(self, handle: SaveTracker) -> None:
        """Tell of a save when it is where a restart would find it."""
        link, generation, step = self._link, self._generation if self._link else 0, handle.step
        if link is None:
            return
        check_lease()
        self.watch.began(step)
        if self._tells:
            link.loaded(generation, 0)  # a job that began from nothing has loaded nothing
            self._vouch(link)
            self._saves.append(handle)
            handle.when_safe(lambda: link.committed(generation, step))

    def _vouch(self, link: WorkerLink) -> None:
        """Report steps as committed whose copy on a peer failed, though no node was lost.

        All ranks have made a step together since that save: so every node was there after it. A
        peer without room must not make a job look as if it made no progress.
        """
        for step in self._unsure:
            link.committed(self._generation, step)
        self._unsure = [save.step for save in self._saves if save.peer_failed]
        self._saves = [save for save in self._saves if not save.done]

    def closed(self, checkpointer: Abandonable) -> None:
        """The checkpointer is closed: there is nothing to abandon."""
        let_be(checkpointer)


JOB: MakeJob = ElasticHooks
"""The part ``job``."""


def abandonable(opened: Abandonable) -> None:
    """Have a session abandon this checkpointer or publisher when it leaves its generation."""
    if WorkerLink.current() is not None:
        _open.add(opened)


def let_be(closed: Abandonable) -> None:
    """Have a session abandon it no more: it is closed."""
    _open.discard(closed)


def abandon_all() -> None:
    """Abandon every open checkpointer and publisher of this process; never raises."""
    for opened in list(_open):
        _open.discard(opened)
        try:
            opened.abandon()
        except Exception as error:  # noqa: BLE001 - see below
            # It was cut short anywhere: a buffer still held elsewhere is a BufferError, one that
            # was let go of a ValueError; the next generation must begin all the same.
            what = type(opened).__name__.lower()
            _log.warning("leaving a %s failed: %r", what, error)
