"""Reports of the workers of torchrun's agent, put together for the controller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ckptd.elastic.launchers import (
    AskProof,
    Attach,
    Begin,
    FromWorker,
    HandedProof,
    LauncherEnd,
    Loaded,
    Mark,
    NodeProgress,
    Progress,
    SaidEvent,
    Saved,
    SaveNow,
    Timed,
    Welcome,
    WorkerEnd,
)

__all__ = ["Reports"]


class Reports:
    """Listens to the workers of one node, generation after generation.

    Scripts that do not use ckptd report nothing.

    Parameters
    ----------
    node
        Its name.
    path, hand
        Of the socket, see `ckptd.elastic.workerend.LauncherEnd`.
    tell
        Sends to the controller.
    """

    def __init__(
        self,
        node: str,
        path: Path,
        tell: Callable[[SaidEvent | Timed], None],
        hand: Callable[[AskProof], HandedProof] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._begin: Begin | None = None
        self._workers = 0
        self._progress = NodeProgress(node, tell, lambda ranks: 0 < self._workers <= len(ranks))
        self._ends: dict[int, WorkerEnd] = {}
        """By rank."""
        self._end = LauncherEnd(path, self._received, hand=hand or (lambda _: HandedProof()))

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._end.path

    def begin(self, begin: Begin, at: float) -> None:
        """Go on with a new generation, whose `Begin` came at this moment of `time.monotonic`."""
        with self._lock:
            self._begin, self._workers = begin, 0
            self._progress.begin(begin.generation, at)
            self._ends.clear()

    @property
    def stepped(self) -> bool:
        """Whether a worker of this generation has reported a step."""
        return self._progress.has("stepped")

    def spawned(self, workers: int) -> None:
        """All `workers` of the generation have been started."""
        with self._lock:
            self._workers = workers
            self._progress.mark("spawned", range(workers))
            self._progress.settle()

    def save_soon(self, generation: int) -> bool:
        """Ask the workers for a save; return whether any was there to ask."""
        with self._lock:
            current = self._begin is not None and self._begin.generation == generation
            asked = list(self._ends.values()) if current else []
        sent = [end.send(SaveNow(generation=generation)) for end in asked]
        return any(sent)

    def close(self) -> None:
        """Close the socket."""
        self._end.close()

    def _received(self, worker: WorkerEnd, message: FromWorker | None) -> None:
        with self._lock:
            begin = self._begin
            if begin is None or worker.attach.generation != begin.generation:
                return
            rank = worker.attach.rank
            match message:
                case None:
                    self._ends.pop(rank, None)
                case Attach():
                    self._ends[rank] = worker
                    worker.send(Welcome(begin.generation, begin.mttr_s, begin.mtbf_s))
                case Mark() | Loaded() | Progress() | Saved():
                    if message.generation == begin.generation:
                        self._progress.take(rank, message)
                        self._progress.settle()
