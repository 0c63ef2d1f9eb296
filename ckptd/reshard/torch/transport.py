"""Transport over torch.distributed (gloo, point to point); which of its errors mean a dead rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ckptd.base.digest import digest_hex
from ckptd.base.torch.ranks import global_ranks
from ckptd.errors import CkptdError, UsageError
from ckptd.reshard.live.transport import PendingMessage, gone

U8 = NDArray[np.uint8]

_OF_GROUP = timedelta(0)
"""How long gloo waits for a message: as long as its group was made for."""
_PATIENCE = timedelta(days=365)

_made: dict[str, int] = {}


class TorchTransport:
    """See `ckptd.reshard.live.transport.Transport`.

    Has connections of its own, that no process group of the job knows: nothing of the job's own
    traffic is in the way, and a move that fails breaks nothing. Every rank of `process_group`
    makes one at the same time.

    Parameters
    ----------
    process_group
        The ranks that take part; the default group when None.
    timeout_s
        For all ranks to be connected, and for each message, in seconds.
    """

    buffers = 0

    def __init__(self, process_group: Any = None, timeout_s: float = 300.0) -> None:
        ranks = global_ranks(process_group)
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialised",
                hint="call torch.distributed.init_process_group first",
            )
        own = digest_hex(repr(ranks).encode())[:12]
        _made[own] = _made.get(own, 0) + 1
        store = dist.PrefixStore(
            f"ckptd/transport/{own}/{_made[own]}", dist.distributed_c10d._get_default_store()
        )
        self.rank = ranks.index(dist.get_rank())
        self.world = len(ranks)
        try:
            group: Any = dist.ProcessGroupGloo(
                store, self.rank, self.world, timedelta(seconds=timeout_s)
            )
            # One that has nothing to send closes at once, and would break off others' connections.
            group.barrier().wait()
        except RuntimeError as error:
            raise CkptdError(
                "ranks could not be connected",
                found=str(error).splitlines()[0][:300],
                hint="create the transport on every rank of the group at the same time",
            ) from error
        self._group = group

    def begin(self, message_bytes: int) -> None:
        """See `ckptd.reshard.live.transport.Transport`; connections are there already."""

    def send(self, peer: int, data: U8) -> PendingMessage:
        """See `ckptd.reshard.live.transport.Transport`."""
        tensor = torch.from_numpy(data)
        return self._begin(peer, lambda: self._group.send([tensor], peer, 0))

    def receive(self, peer: int, into: U8, *, patient: bool = False) -> PendingMessage:
        """See `ckptd.reshard.live.transport.Transport`.

        Parameters
        ----------
        patient
            The message may come at any time. gloo closes all links of a process of which one
            message takes longer than `timeout_s`.
        """
        tensor = torch.from_numpy(into)
        most = _PATIENCE if patient else _OF_GROUP
        return self._begin(peer, lambda: self._group.recv([tensor], peer, 0), most)

    def _begin(
        self, peer: int, begin: Callable[[], Any], most: timedelta = _OF_GROUP
    ) -> PendingMessage:
        if self._group is None:
            raise UsageError("a transport is used after it was closed", kind="closed")
        try:
            return _Work(begin(), peer, most)
        except RuntimeError as error:
            raise _failed(peer, error) from error

    def close(self) -> None:
        """See `ckptd.reshard.live.transport.Transport`."""
        self._group = None


class _Work:
    """A message; a thread waits for it, since a wait in gloo can be given up only with the link."""

    def __init__(self, work: Any, peer: int, most: timedelta) -> None:
        self._work = work
        self._most = most
        self._peer = peer
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, name="ckptd-move", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait(self._most)
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """See `ckptd.reshard.live.transport.PendingMessage`."""
        if not self._done.wait(timeout_s):
            return False
        if self._error is not None:
            raise _failed(self._peer, self._error)
        return True


def _failed(peer: int, error: RuntimeError) -> CkptdError:
    text = str(error).splitlines()[0][:300]
    if "losed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return gone(peer, text)
    return CkptdError("a message was lost", where=f"rank {peer}", found=text)
