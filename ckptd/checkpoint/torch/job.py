"""The job around a checkpointer: none, or that of a launcher of ours, which is the part ``job``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from ckptd.base.runtime import launched
from ckptd.base.runtime.ranks import Board
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.checkpoint.torch.schedule import SignalWatch
from ckptd.parts import part

if TYPE_CHECKING:
    from ckptd.store import Store

__all__ = ["Abandonable", "Job", "MakeJob", "job_of"]


class Abandonable(Protocol):
    """What a session lets go of when it leaves its generation."""

    def abandon(self) -> None:
        """Release everything without a wait for other ranks."""


class Job:
    """One checkpointer's part in its job; this one is that of a process that nobody launched.

    Attributes
    ----------
    watch
        What may ask for a save.
    """

    def __init__(self, watch: SignalWatch) -> None:
        self.watch = watch

    def begins(self, root: Store) -> None:
        """Take in that there is nothing to load: this job begins from nothing, if that is right.

        Parameters
        ----------
        root
            The checkpointer's. Where nothing was ever saved nothing can be lost: a job may have
            other checkpointers, of which the step is.

        Raises
        ------
        RefusedError
            kind ``lost-step``: the controller knows of a committed step. Training that began
            again without a word would be taken for training that goes on.
        """

    def loaded(self, step: int) -> None:
        """Tell that this rank has the state of `step`."""

    def saving(self, handle: SaveTracker) -> None:
        """Tell of a save when it is where a restart would find it."""

    def closed(self, checkpointer: Abandonable) -> None:
        """The checkpointer is closed: there is nothing to abandon."""

    @property
    def in_session(self) -> bool:
        """Whether the program goes on in this process when its generation ends."""
        return launched.current is not None

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
