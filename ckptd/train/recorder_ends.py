"""How the end of a call is learnt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["Ends"]

_MOST_AWAITED = 1024

Ended = Callable[[bool], None]
"""Called once, with whether the call failed; must not raise."""


class Ends:
    """Tells when works end: by their future, or where they have none, when somebody waits.

    Work of an accelerator counts as ended when it is enqueued: its future fires then, and asking
    its events from another thread breaks the capture of a graph.
    """

    def __init__(self) -> None:
        self._awaited: OrderedDict[int, tuple[Any, Ended]] = OrderedDict()
        self._without: set[str] = set()
        self._wait: Any = None

    def install(self) -> None:
        """Watch `Work.wait`, which is all there is for works of gloo's send and receive."""
        self._wait = wait = dist.Work.wait

        def watched(work: Any, *args: Any, **more: Any) -> Any:
            entry = self._awaited.pop(id(work), None) if self._awaited else None
            if entry is None:
                return wait(work, *args, **more)
            try:
                result = wait(work, *args, **more)
            except BaseException:
                entry[1](True)
                raise
            entry[1](False)
            return result

        watched.__doc__ = wait.__doc__
        dist.Work.wait = watched  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave `Work.wait` as it was found."""
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None
        self._awaited.clear()

    def watch(self, work: Any, operator: str, ended: Ended) -> None:
        """Call `ended` when `work` is done."""
        if operator not in self._without:
            try:
                future = work.get_future()
            except (RuntimeError, NotImplementedError):
                self._without.add(operator)  # this backend has none for this operator
            else:
                future.add_done_callback(lambda done: ended(_has_failed(done)))
                return
        # The same object comes back to the caller as long as it is held here.
        self._awaited[id(work)] = (work, ended)
        if len(self._awaited) > _MOST_AWAITED:
            self._awaited.popitem(last=False)


def _has_failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # noqa: BLE001 - whatever it is, the program gets it from its own wait
        return True
    return False
