"""How the end of a call is learnt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptd.train.recorder_calls import first_tensor

__all__ = ["Ends"]

_MOST_AWAITED = 1024

Ended = Callable[[bool], None]
"""Called once, with whether the call failed; must not raise."""


class Ends:
    """Tells when works end: by their future, or when somebody waits, as the caller does at once.

    The future of an accelerator's work fires when that is enqueued: see `recorder_device`.
    """

    def __init__(self, broken: Callable[[BaseException], None]) -> None:
        self._broken = broken
        self._awaited: OrderedDict[int, tuple[Any, Ended]] = OrderedDict()
        self._by_output: dict[int, int] = {}
        self._library: torch.library.Library | None = None
        self._without: set[str] = set()
        self._wait: Any = None

    def install(self) -> None:
        """Watch the waits, which is all there is for some works of gloo, as send and receive."""
        self._watch_functional()
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
        dist.Work.wait = watched  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Leave `Work.wait` as it was found."""
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None
        if self._library is not None:
            self._library._destroy()
            self._library = None
        self._awaited.clear()
        self._by_output.clear()

    def _watch_functional(self) -> None:
        """Watch the operator with which functional calls wait: it does so below Python."""
        redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def watched(keyset: Any, tensor: Any) -> Any:
            result = redispatch(keyset & below, tensor)
            if self._by_output:
                self._written(tensor)
            return result

        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("wait_tensor", watched, "BackendSelect", with_keyset=True)
        self._library = library

    def _written(self, tensor: Any) -> None:
        try:
            key = self._by_output.pop(_address(tensor), None)
            entry = None if key is None else self._awaited.pop(key, None)
            if entry is not None:
                entry[1](False)
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            self._broken(error)

    def watch(self, work: Any, operator: str, output: Any, ended: Ended) -> None:
        """Call `ended` when `work` is done, which writes `output`."""
        if operator not in self._without:
            try:
                future = work.get_future()
            except (RuntimeError, NotImplementedError):
                self._without.add(operator)  # this backend has none for this operator
            else:
                future.add_done_callback(lambda done: ended(_has_failed(done)))
                return
        self.at_its_wait(work, ended, output)

    def at_its_wait(self, work: Any, ended: Ended, output: Any = None) -> None:
        """Call `ended` when somebody has waited for `work`, or for what it writes if that is given.

        Where the caller waits at once this is cheaper than a future, which takes the GIL in a
        thread of the backend.
        """
        # The same object comes back to the caller as long as it is held here.
        self._awaited[id(work)] = (work, ended)
        if len(self._awaited) > _MOST_AWAITED:
            # Nobody waits for this one any more. For ever under way, it would look like a hang.
            self._awaited.popitem(last=False)[1][1](False)
        written = None if output is None else first_tensor(output)
        if written is not None:
            self._by_output[_address(written)] = id(work)
            if len(self._by_output) > _MOST_AWAITED:
                del self._by_output[next(iter(self._by_output))]


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _has_failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:  # noqa: BLE001 - whatever it is, the program gets it from its own wait
        return True
    return False
