"""What a checkpointer tells of itself: events of its saves, and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptd import events
from ckptd.engine.board import Board
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.metrics import Metrics
from ckptd.engine.telling import saving
from ckptd.format.names import CommitName

__all__ = ["Telling"]


class Telling:
    """Emits the events of one checkpointer's calls.

    Parameters
    ----------
    tier
        What the root is called.
    folder
        Where this process and its writing process record events; None for nowhere.

    Raises
    ------
    StoreError
        kind ``events-folder``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        catalogue: Catalogue,
        board: Board,
        tier: str,
    ) -> None:
        self._tier = tier
        self._store = catalogue.store
        self._rank = board.rank
        self._recording = None if folder is None else events.record(folder)
        self._metrics = Metrics()

    @contextmanager
    def saving(self, name: CommitName, attempt: str, since_ns: int) -> Iterator[None]:
        """Say that the code within saves; the call began at `since_ns` of the monotonic clock."""
        with (
            events.about(tier=self._tier),
            saving(self._store, name, attempt, self._rank),
            events.span("call", since_ns=since_ns),
        ):
            events.emit(
                events.SaveBegun(
                    step=name.step,
                    generation=name.generation,
                    attempt=attempt,
                    rank=self._rank,
                    at_ns=events.now_ns() - (time.monotonic_ns() - since_ns),
                )
            )
            yield

    def skipped(self, name: CommitName, reason: str) -> None:
        """Say that a save that was due does not begin."""
        events.emit(
            events.SaveSkipped(
                step=name.step,
                generation=name.generation,
                rank=self._rank,
                at_ns=events.now_ns(),
                reason=reason,
            )
        )

    def metrics_text(self) -> str:
        """See `ckptd.train.checkpointer.Checkpointer.metrics_text`."""
        return self._metrics.text()

    def close(self) -> None:
        """Record and count no more. Idempotent."""
        self._metrics.close()
        if self._recording is not None:
            self._recording.close()
            self._recording = None
