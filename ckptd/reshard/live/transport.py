"""`Transport`: contract of what moves bytes between live ranks; the error for a rank that is gone.

A transport carries messages from rank to rank, in order, and tells when a rank is gone. It knows
nothing of tensors. `ckptd.testing.transport` has the tests that every transport has to pass.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckptd.errors import CkptdError

U8 = NDArray[np.uint8]


class PendingMessage(Protocol):
    """A message on its way."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is through: sent, and the buffer free; or received, and there.

        May be called again after False, and after True.

        Raises
        ------
        CkptdError
            kind ``rank-died``: the other rank is gone. Anything else.
        """


class Transport(Protocol):
    """Point-to-point messages between the ranks ``0 .. world - 1``.

    One thread sends and another receives. Messages from one rank to another arrive in the order
    in which they were sent, and a receive asks for exactly as many bytes as were sent. Up to two
    sends, and up to two receives, are begun before the first of them is waited for.
    """

    rank: int
    world: int

    def begin(self, message_bytes: int) -> None:
        """Get ready for messages of at most so many bytes; every rank calls it, with the same.

        Raises
        ------
        CkptdError
            Memory or connections cannot be had.
        """

    @property
    def buffers(self) -> int:
        """How many buffers of `message_bytes` the transport itself keeps on a rank."""

    def send(self, peer: int, data: U8) -> PendingMessage:
        """Begin to send; `data` stays as it is until the send is through."""

    def receive(self, peer: int, into: U8) -> PendingMessage:
        """Begin to receive; `into` is not looked at until the receive is through."""

    def close(self) -> None:
        """Release memory and connections. Idempotent."""


def gone(rank: int, found: str) -> CkptdError:
    """Return the error that names a rank whose process is gone."""
    return CkptdError(
        f"'rank {rank} has ended'",
        kind="rank-died",
        where=f"rank {rank}",
        found=found,
        hint="see the log of that rank; the tensors being filled here are incomplete",
    )
