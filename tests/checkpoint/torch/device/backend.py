"""A backend of collectives whose calls run on a device's stream, as those of a device's library do.

A call is a kernel: it begins when the stream comes to it, and ends when the test says so. What it
computes is of no account here. The dispatcher sees the call with the device's own tensors, so that
hooks at ``BackendSelect`` do, as on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simdevice import Simulator, tensors

__all__ = ["StreamBackend"]


class StreamBackend:
    """All-reduces of simulated tensors.

    Parameters
    ----------
    simulator
        Of this process.
    key
        The dispatcher's key of its devices.

    Attributes
    ----------
    hold
        Whether calls from now on do not end by themselves.
    ends
        What ends each call that was held, in order.
    within
        Called within the next call, once: a backend may make calls itself.
    """

    def __init__(self, simulator: Simulator, key: str) -> None:
        self._simulator = simulator
        self._key = key
        # A wait for its works holds no host up, as one for those of a device's library does not.
        self._idle = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
        self.hold = False
        self.ends: list[Callable[[], None]] = []
        self.within: Callable[[], object] | None = None

    @contextmanager
    def installed(self) -> Iterator[StreamBackend]:
        """Let the dispatcher find it within the block."""
        library = torch.library.Library("c10d", "IMPL")
        before = tensors._collective
        try:
            library.impl("allreduce_", self._all_reduce, self._key, allow_override=True)
            tensors._collective = _below_python
            yield self
        finally:
            tensors._collective = before
            library._destroy()

    def _all_reduce(self, values: list[torch.Tensor], *_: Any) -> tuple[list[torch.Tensor], Any]:
        within, self.within = self.within, None
        if within is not None:
            within()
        if self.hold:
            self.ends.append(self._simulator.hold())
        return values, self._idle.allreduce([torch.ones(1)]).boxed()


def _below_python(func: Any, args: Any, kwargs: Any, sims: Any) -> Any:
    """Go on with a call as if its tensors were no class of Python's."""
    keys = torch._C._dispatch_keys(sims[0])
    keys = keys & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return func.redispatch(keys, *args, **kwargs)
