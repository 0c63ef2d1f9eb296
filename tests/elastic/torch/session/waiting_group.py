"""Process groups that wait for one another as those of NCCL do, without a device.

A collective is a kernel that spins until its communicator is aborted. A thread that waits for the
device waits in C, where no signal handler of Python runs. An abort asks the kernels of its own
communicator to quit, and then waits for the device: for the kernels of all groups. So aborts that
are made one after the other hang in the first one, as NVIDIA/nccl#1013 has it.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

__all__ = ["NAME", "WaitingGroup", "register", "synchronize"]

NAME = "waiting"
_libc = ctypes.CDLL(None)
_MUTEX_BYTES = 64


class _Kernel:
    """One that runs until it is asked to quit."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(_MUTEX_BYTES)  # PTHREAD_MUTEX_INITIALIZER
        _libc.pthread_mutex_lock(self._mutex)
        self.runs = True

    def quit(self) -> None:
        if self.runs:
            self.runs = False
            _libc.pthread_mutex_unlock(self._mutex)

    def wait(self) -> None:
        """Wait until it has quit; no signal cuts that short."""
        try:
            _libc.pthread_mutex_lock(self._mutex)
        finally:  # a signal's handler raises here: what it left locked would hold up all others
            _libc.pthread_mutex_unlock(self._mutex)


class WaitingGroup(dist.ProcessGroup):
    """A group of the backend `NAME`.

    Attributes
    ----------
    groups
        All that were made in this process and not shut down.
    hangs
        Abort never returns, as where the device itself hangs; set by a test.
    """

    groups: ClassVar[list[WaitingGroup]] = []
    hangs: ClassVar[bool] = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.kernels: list[_Kernel] = []
        self.aborted = False
        self.shut = False
        self.groups.append(self)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Any:
        """Enqueue a collective whose peers are gone, and return at once."""
        if self.aborted:
            raise RuntimeError("this communicator was aborted")
        self.kernels.append(_Kernel())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)  # a wait lets a stream wait, and not the host
        return _create_work_from_future(done)

    def abort(self) -> None:
        self.aborted = True
        for kernel in self.kernels:
            kernel.quit()
        synchronize()
        if self.hangs:
            threading.Event().wait()

    def shutdown(self) -> None:
        """Destroy it; that of a group which is not aborted waits for its collectives."""
        synchronize()
        self.shut = True
        if self in self.groups:
            self.groups.remove(self)


def synchronize() -> None:
    """Wait for the device."""
    for group in list(WaitingGroup.groups):
        for kernel in list(group.kernels):
            kernel.wait()


def register() -> None:
    """Make the backend known to torch. Idempotent."""

    def make(store: object, rank: int, size: int, timeout: timedelta) -> WaitingGroup:
        return WaitingGroup(rank, size)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])
