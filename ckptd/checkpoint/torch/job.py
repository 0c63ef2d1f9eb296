"""Job around a checkpointer: generation claimed, last step, launcher; interface of sessions.

That of ckptd's own launchers is the part ``job``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from ckptd.base.runtime import launched
from ckptd.base.runtime.ranks import Board
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.names import CommitName, attempt_name
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.torch.schedule import SignalWatch
from ckptd.errors import RefusedError, StoreError
from ckptd.events.bus import phase
from ckptd.parts import part

if TYPE_CHECKING:
    from ckptd.store import Store


class Abandonable(Protocol):
    """Resource that a session abandons when it leaves its generation."""

    def abandon(self) -> None:
        """Release everything without a wait for other ranks."""


class Job:
    """One checkpointer's part in its job; this class: in a process without a launcher of ckptd.

    Attributes
    ----------
    watch
        What may ask for a save.
    """

    def __init__(self, watch: SignalWatch) -> None:
        self.watch = watch

    def begins(self, root: Store) -> None:
        """Check that this job may begin without a checkpoint: its root has none to load.

        Parameters
        ----------
        root
            The checkpointer's. Where nothing was ever saved nothing can be lost: the committed
            step may be that of another checkpointer of the job.

        Raises
        ------
        RefusedError
            The controller knows of a committed step. Training that silently began again would be
            taken for training that goes on.
        """

    def loaded(self, step: int) -> None:
        """Tell that this rank has the state of `step`."""

    def saving(self, handle: SaveTracker) -> None:
        """Tell of a save when it is where a restart would find it."""

    def closed(self, checkpointer: Abandonable) -> None:
        """The checkpointer is closed: there is nothing to abandon."""

    def is_interrupted(self) -> bool:
        """Whether the generation has ended: others wait for nothing of this rank any more."""
        return launched.current is not None and launched.current.wanted


MakeJob: TypeAlias = Callable[[Abandonable, Board, Iterable[int] | int, bool], Job]


def job_of(
    checkpointer: Abandonable, board: Board, signals: Iterable[int] | int, *, new_run: bool
) -> Job:
    """Return the part of a checkpointer in the job around it.

    Parameters
    ----------
    board
        Of the ranks that share the state.
    signals
        As for `SignalWatch`.
    new_run
        Whether the job may begin from nothing though the controller knows of a committed step.
    """
    if launched.LAUNCHER_VARIABLE not in os.environ:
        return Job(SignalWatch(signals))
    return cast("MakeJob", part("job"))(checkpointer, board, signals, new_run)


_log = logging.getLogger("ckptd")
_STILL = 100
"""Calls of one step after which the log says that no save is due at them."""


class _Unclaimed(NamedTuple):
    """A load whose generation could not be claimed, and what the newest one was then."""

    parent: CommitName
    committed: bool
    newest: int


class Lineage:
    """Claims the generation at the first save or load, and knows the last step.

    Attributes
    ----------
    generation
        Claimed generation; 0 before the first claim.
    last_step
        The step that was loaded or saved last; None when there is none.
    root_id, claim_id
        Of the root, and of the generation's record there: what is saved is for them alone.
    """

    def __init__(self, catalogue: Catalogue, agreement: Agreement, *, new_run: bool | None) -> None:
        self._catalogue = catalogue
        self._agreement = agreement
        self._new_run = new_run
        self._attempts = 0
        self.generation = 0
        self.last_step: int | None = None
        self.root_id = ""
        self.claim_id = ""
        self._unclaimed: _Unclaimed | None = None
        self._called: int | None = None
        self._still = 0

    def newest(self) -> CommitName | None:
        """Return the newest commit of the line, the same on every rank."""

        def find() -> tuple[int, int] | None:
            name = self._catalogue.newest()
            return None if name is None else (name.step, name.generation)

        found = self._agreement.on_rank_zero("newest", find)
        return found and CommitName(*found)

    @phase("ckpt")
    def claim_for_save(self, step: int) -> None:
        """Claim a generation that continues the newest line, if none is claimed yet.

        Raises
        ------
        RefusedError
            kind ``behind``: the line has a commit at or after `step`. kind ``not-loaded``: it has
            an earlier one, nothing was loaded, and `new_run` is not given.
        ConflictError
            kind ``superseded``: what was loaded could not be claimed then, and another
            life of the job has begun a generation since.
        """
        if self.generation:
            return
        late = self._unclaimed

        def claim() -> Any:
            if late is not None:
                self._catalogue.check_not_superseded(late.newest)
                return self._claim(late.parent, "load", committed=late.committed)

            from ckptd.checkpoint.load.opening import begin_beside

            begin_beside(self._catalogue)
            parent = self._catalogue.continue_line(step, self._new_run)
            return self._claim(parent, "start" if parent is None else "continue")

        self._take(self._agreement.on_rank_zero("claim", claim))

    @phase("ckpt")
    def claim_for_load(
        self, parent: CommitName, *, committed: bool = True, at_once: bool = True
    ) -> str:
        """Claim a generation whose parent is what was loaded: a commit, or a snapshot without.

        Where nothing can be written (a full disk, a read-only root, a store that cannot decide who
        creates an object first), or not `at_once`, the first save claims it: a program that only
        reads needs none, and would take the line from the job that trains. Returns a warning about
        what could not be written; else nothing.
        """

        def claim() -> Any:
            if not at_once:
                return 0, parent.step, "", "", "", self._catalogue.newest_generation()
            try:
                return self._claim(parent, "load", committed=committed)
            except (StoreError, RefusedError) as error:
                if isinstance(error, RefusedError) and error.kind != "no-create-only":
                    raise
                text = f"no generation could be claimed before the first save: {error.message}"
                return 0, parent.step, "", "", text, self._catalogue.newest_generation()

        *claimed, text, newest = self._agreement.on_rank_zero("claim", claim)
        self._take((*claimed, text, newest))
        self._called, self._still = None, 0
        late = bool(text) or not at_once
        self._unclaimed = _Unclaimed(parent, committed, newest) if late else None
        if text:
            _log.warning("%s", text)
        return str(text)

    def _claim(
        self, parent: CommitName | None, reason: str, *, committed: bool = True
    ) -> tuple[int, int | None, str, str, str, int]:
        world = self._agreement.board.world
        claimed = self._catalogue.claim(parent, world, reason, committed=committed)
        step = None if parent is None else parent.step
        return claimed.generation, step, claimed.root, claimed.claim_id, "", 0

    def _take(self, claimed: Any) -> None:
        self.generation, self.last_step, self.root_id, self.claim_id, _, _ = claimed
        self._unclaimed = None
        self._attempts = 0

    def follow(self, step: int) -> None:
        """Take the step of a call of ``save``, before any rule says whether it is due.

        Rules by step and by clock count from the last save: a step before it would be due to none
        of them, and a loop that counts from 1 again in each epoch would never save again. One that
        goes back without passing the last save may be rolled back in memory: the log says it.

        Raises
        ------
        RefusedError
            kind ``behind``: `step` is earlier than the last one saved or loaded. The same step
            may be tried again: if it was committed after all, the handle fails.
        """
        if self.last_step is not None and step < self.last_step:
            raise RefusedError(
                f"step {step} is earlier than the last one",
                kind="behind",
                wanted=f"a step from {self.last_step} on",
                found=step,
                hint="count steps across epochs, and after a restart from the step that load() "
                "returns; to go back, load() the older step first",
            )
        before, self._called = self._called, step
        self._still = self._still + 1 if step == before else 0
        if self._agreement.board.rank:
            return
        if before is not None and step < before:
            _log.warning(
                "save(%d) after save(%d): steps went backwards, and only a step later than the "
                "last saved one is due: count steps across epochs",
                step,
                before,
            )
        elif self._still == _STILL:
            _log.warning(
                "save(%d) was called %d times: steps must increase for another save to be due",
                step,
                _STILL + 1,
            )

    def next_attempt(self) -> str:
        """Return the attempt's name; every rank counts alike."""
        self._attempts += 1
        return attempt_name(self._attempts, self.claim_id)
