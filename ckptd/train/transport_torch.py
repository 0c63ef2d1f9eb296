"""Messages between ranks through torch.distributed, point to point."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ckptd.engine.transport import Pending, gone
from ckptd.errors import CkptdError, UsageError

__all__ = ["TorchTransport"]

U8 = NDArray[np.uint8]


class TorchTransport:
    """See `ckptd.engine.transport.Transport`.

    Makes a process group of its own: nothing of the job's own traffic is in the way, and nothing
    is broken by a move that fails. Every rank of `process_group` makes one at the same time.

    Parameters
    ----------
    process_group
        The ranks that take part; the default group when None.
    """

    buffers = 0

    def __init__(self, process_group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialised",
                kind="no-process-group",
                hint="call torch.distributed.init_process_group first",
            )
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank = ranks.index(dist.get_rank())
        self.world = len(ranks)
        self._closed = False

    def begin(self, message_bytes: int) -> None:
        """See `ckptd.engine.transport.Transport`; connections are there already."""

    def send(self, peer: int, data: U8) -> Pending:
        """See `ckptd.engine.transport.Transport`."""
        tensor = torch.from_numpy(data)
        return self._begin(peer, lambda: dist.isend(tensor, group=self._group, group_dst=peer))

    def receive(self, peer: int, into: U8) -> Pending:
        """See `ckptd.engine.transport.Transport`."""
        tensor = torch.from_numpy(into)
        return self._begin(peer, lambda: dist.irecv(tensor, group=self._group, group_src=peer))

    def _begin(self, peer: int, begin: Callable[[], Any]) -> Pending:
        if self._closed:
            raise UsageError("a transport is used after its end", kind="closed")
        try:
            return _Work(begin(), peer)
        except RuntimeError as error:
            raise _failed(peer, error) from error

    def close(self) -> None:
        """See `ckptd.engine.transport.Transport`."""
        if not self._closed:
            self._closed = True
            # A group of which a rank is gone cannot be taken apart in order.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(self._group)


class _Work:
    """A message; a thread waits for it, since a wait in gloo can be given up only with the link."""

    def __init__(self, work: Any, peer: int) -> None:
        self._work = work
        self._peer = peer
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, name="ckptd-move", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """See `ckptd.engine.transport.Pending`."""
        if not self._done.wait(timeout_s):
            return False
        if self._error is not None:
            raise _failed(self._peer, self._error)
        return True


def _failed(peer: int, error: RuntimeError) -> CkptdError:
    text = str(error).splitlines()[0][:300]
    if "losed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return gone(peer, text)
    return CkptdError("a message was lost", kind="transport", where=f"rank {peer}", found=text)
