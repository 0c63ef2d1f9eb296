"""What the workers of torchrun's agent say of themselves, put together for the controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckptd.elastic.launchers import (
    Attach,
    Begin,
    FromWorker,
    LauncherEnd,
    Loaded,
    Mark,
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

    Scripts that do not use ckptd say nothing, and nothing is told of them.

    Parameters
    ----------
    node
        Its name.
    path
        Of the socket, see `ckptd.elastic.workerend.LauncherEnd`.
    tell
        Is given what the controller is to hear.
    """

    def __init__(self, node: str, path: Path, tell: Callable[[SaidEvent | Timed], None]) -> None:
        self._node, self._tell = node, tell
        self._lock = threading.Lock()
        self._begin: Begin | None = None
        self._at = 0.0
        self._workers = 0
        self._ends: dict[int, WorkerEnd] = {}
        """By rank."""
        self._marks: dict[str, float] = {}
        self._marked: dict[str, set[int]] = {}
        self._loaded: dict[int, int] = {}
        self._end = LauncherEnd(path, self._heard)

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._end.path

    def begin(self, begin: Begin, at: float) -> None:
        """Go on with a new generation, whose `Begin` came at this moment of `time.monotonic`."""
        with self._lock:
            self._begin, self._at, self._workers = begin, at, 0
            self._marks, self._marked, self._loaded = {}, {}, {}
            self._ends.clear()

    @property
    def stepped(self) -> bool:
        """Whether a worker of this generation has told of a step."""
        return "stepped" in self._marked

    def spawned(self, workers: int) -> None:
        """All `workers` of the generation have been started."""
        with self._lock:
            self._workers = workers
            self._marks["spawned"] = time.monotonic() - self._at
            self._tell_marks()
            self._look_loaded()

    def save_soon(self, generation: int) -> bool:
        """Ask the workers for a save; return whether any was there to ask."""
        with self._lock:
            asked = list(self._ends.values()) if self._generation == generation else []
        told = [end.send(SaveNow(generation=generation)) for end in asked]
        return any(told)

    def close(self) -> None:
        """Let go of the socket."""
        self._end.close()

    @property
    def _generation(self) -> int:
        return self._begin.generation if self._begin is not None else 0

    def _heard(self, worker: WorkerEnd, message: FromWorker | None) -> None:
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
                    welcome = Welcome(begin.generation, begin.mttr_s, begin.mtbf_s)
                    worker.send(welcome)
                case Mark():
                    self._mark(message.name, rank)
                case Loaded():
                    self._loaded[rank] = message.step
                    self._look_loaded()
                case Progress() | Saved() if message.generation == begin.generation:
                    self._tell(message)

    def _mark(self, name: str, rank: int) -> None:
        self._marked.setdefault(name, set()).add(rank)
        self._marks[name] = time.monotonic() - self._at
        if 0 < self._workers <= len(self._marked[name]):
            self._tell_marks()

    def _tell_marks(self) -> None:
        self._tell(Timed(generation=self._generation, node=self._node, marks=dict(self._marks)))

    def _look_loaded(self) -> None:
        if 0 < self._workers <= len(self._loaded):
            step = min(self._loaded.values())
            self._tell(Loaded(node=self._node, generation=self._generation, step=step))
