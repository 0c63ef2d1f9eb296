"""The transport through shared memory passes the contract."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.base.torch.ranks import board_of
from ckptd.reshard.live.transport import Transport
from ckptd.testing.transport import TransportContract
from tests.reshard.live import shm
from tests.reshard.live.shm import ShmTransport
from tests.reshard.live.world import boards

pytestmark = pytest.mark.dist


def make() -> Transport:
    return ShmTransport(board_of(None, 60.0), "contract", 60.0)


class TestShmTransport(TransportContract):
    make = staticmethod(make)


def test_a_slot_that_gets_another_message_meanwhile_is_not_taken_for_the_old_one() -> None:
    """The old one is taken by whom it is for, and the number of the new one is not there yet."""

    class Changing(list[int]):
        def __getitem__(self, at: Any) -> Any:
            if at == shm._PEER:
                self[shm._TAKEN] = 1
                self[shm._PEER] = 2
            return super().__getitem__(at)

    head: Any = Changing([1, 1, 4, 0])
    transport = shm.ShmTransport(boards(3)[2], "key")
    assert transport._waits(head) == 0
    head[shm._NUMBER] = 2
    assert transport._waits(head) == 2
