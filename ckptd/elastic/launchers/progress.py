"""Progress of a node's workers in a generation: spawned, imported, loaded, steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from ckptd.elastic.messages import FromWorker, Loaded, Mark, Progress, SaidEvent, Saved, Timed


class NodeProgress:
    """Marks and loaded steps of one generation after the other; used under one lock.

    A node has come as far as its slowest worker.

    Parameters
    ----------
    node
        Its name.
    tell
        Sends to the controller.
    complete
        Whether these ranks are all that the node runs.
    """

    def __init__(
        self,
        node: str,
        tell: Callable[[SaidEvent | Timed], None],
        complete: Callable[[Collection[int]], bool],
    ) -> None:
        self._node, self._tell, self._complete = node, tell, complete
        self.begin(0, 0.0)

    def begin(self, generation: int, at: float) -> None:
        """Go on with a new generation, which was ordered at this second of `time.monotonic`."""
        self._generation, self._at = generation, at
        self._reached: dict[str, dict[int, float]] = {}
        """Seconds after the order, by mark and rank."""
        self._loaded: dict[int, int] = {}
        self._marks: dict[str, float] = {}
        """Those that the controller knows."""
        self._loaded_sent = False

    def mark(self, name: str, ranks: Iterable[int]) -> None:
        """Note that ranks have reached a mark; only the first time counts."""
        reached = self._reached.setdefault(name, {})
        for rank in ranks:
            reached.setdefault(rank, time.monotonic() - self._at)

    def has(self, name: str, rank: int | None = None) -> bool:
        """Return whether a rank, or any, has reached a mark."""
        reached = self._reached.get(name, {})
        return bool(reached) if rank is None else rank in reached

    def works(self, rank: int) -> bool:
        """Return whether a rank has loaded its state, or made a step."""
        return rank in self._loaded or self.has("stepped", rank)

    def take(self, rank: int, message: FromWorker) -> None:
        """Take what a worker of this generation reports; `settle` sends what follows from it."""
        match message:
            case Mark():
                self.mark(message.name, (rank,))
            case Loaded():
                self._loaded[rank] = max(message.step, self._loaded.get(rank, -1))
            case Progress() | Saved():
                self._tell(message)

    def settle(self) -> None:
        """Send what all workers have reached since the last time."""
        new = {
            name: max(reached.values())
            for name, reached in self._reached.items()
            if name not in self._marks and reached and self._complete(reached.keys())
        }
        if new:
            self._marks |= new
            self._tell(Timed(self._generation, self._node, dict(self._marks)))
        if self._loaded and not self._loaded_sent and self._complete(self._loaded.keys()):
            self._loaded_sent = True
            step = min(self._loaded.values())
            self._tell(Loaded(node=self._node, generation=self._generation, step=step))
