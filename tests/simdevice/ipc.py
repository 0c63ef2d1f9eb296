"""Blocks of a simulated device that other processes open, as CUDA IPC has it; a carrier on them.

`IpcCarrier` is a stand-in, and a pattern for a carrier of published weights between processes that
share devices: a rank of the publisher has a block for each worker and hands out its handle; what a
worker asks for is copied into that block, and the worker copies it out of there. Requests go over
the process group. What this cannot show: a driver, peer access, and rates.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ckptd.base.runtime.memory import anonymous_file
from ckptd.errors import TransientStoreError
from ckptd.publish.messages import MOST_READ_BYTES
from ckptd.publish.torch.carrier import GroupCarrier
from tests.simdevice.loading import installed
from tests.simdevice.tensors import DeviceMemory, SimTensor

__all__ = ["IpcBlock", "IpcCarrier", "IpcHandle"]

U8 = NDArray[np.uint8]


class IpcHandle(NamedTuple):
    """Names a block of a device to other processes of the host."""

    pid: int
    fd: int
    nbytes: int


class IpcBlock:
    """Memory of a simulated device that processes share.

    Attributes
    ----------
    tensor
        The block, as bytes on the device.
    handle
        What another process opens it by.
    """

    def __init__(self, fd: int, nbytes: int, device: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        raw = torch.frombuffer(self._map, dtype=torch.uint8)
        queue = installed().current(device)
        self.tensor = SimTensor(raw, DeviceMemory(raw, queue, shared=True))
        self.handle = IpcHandle(os.getpid(), fd, nbytes)
        self._fd = fd

    @staticmethod
    def of_size(nbytes: int, device: int) -> IpcBlock:
        """Return a new block."""
        fd = anonymous_file("ckptd-ipc")
        os.ftruncate(fd, nbytes)
        return IpcBlock(fd, nbytes, device)

    @staticmethod
    def opened(handle: IpcHandle, device: int) -> IpcBlock:
        """Return the block of another process.

        Raises
        ------
        OSError
            That process is gone.
        """
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return IpcBlock(fd, handle.nbytes, device)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Let no other process open it by this one any more; who has it keeps it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class IpcCarrier(GroupCarrier):
    """See `ckptd.publish.carrier.WeightCarrier`, and the module; all ranks have the same devices.

    Parameters
    ----------
    process_group, publishers, timeout_s
        As of `ckptd.publish.torch.carrier.GroupCarrier`.
    device
        Where the blocks are.
    """

    def __init__(
        self,
        process_group: Any,
        publishers: Sequence[int],
        timeout_s: float = 60.0,
        *,
        device: int = 0,
    ) -> None:
        import torch.distributed as dist

        super().__init__(process_group, publishers, timeout_s)
        self._device = device
        self._module: Any = torch.get_device_module(installed().name)
        self._stream = self._module.Stream(device)
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        workers = [peer for peer in range(world) if peer not in publishers]
        peers = workers if rank in publishers else []
        self._blocks = {peer: IpcBlock.of_size(MOST_READ_BYTES, device) for peer in peers}
        mine = {peer: tuple(block.handle) for peer, block in self._blocks.items()}
        every: list[Any] = [None] * world
        dist.all_gather_object(every, mine, group=process_group)
        self._handles = {
            peer: IpcHandle(*every[peer][rank]) for peer in publishers if rank in every[peer]
        }

    def _give(self, peer: int, head: U8, data: U8) -> None:
        """See `ckptd.publish.torch.carrier.GroupCarrier`: the block is there before its head."""
        # The worker has asked again, and so it has what was in the block.
        with self._module.stream(self._stream):
            self._blocks[peer].tensor[: len(data)].copy_(torch.from_numpy(data.copy()))
        self._stream.synchronize()
        self._send(peer, head)

    def _take(self, peer: int, into: U8) -> None:
        """See `ckptd.publish.torch.carrier.GroupCarrier`."""
        block = self._blocks.get(peer)
        if block is None:
            try:
                block = self._blocks[peer] = IpcBlock.opened(self._handles[peer], self._device)
            except OSError as error:
                raise TransientStoreError(
                    "the memory of a rank of the publisher cannot be opened",
                    kind="link-lost",
                    where=f"rank {peer}",
                    found=str(error),
                ) from error
        with self._module.stream(self._stream):
            host = block.tensor[: len(into)].cpu()
        into[:] = host.numpy()

    def close(self) -> None:
        """See `ckptd.publish.carrier.WeightCarrier`."""
        super().close()
        for block in self._blocks.values():
            block.close()
