"""The transport through shared memory passes the contract."""

from __future__ import annotations

import pytest

from ckptd.base.torch.ranks import board_of
from ckptd.reshard.live.transport import Transport
from ckptd.testing.transport import TransportContract
from tests.reshard.live.shm import ShmTransport

pytestmark = pytest.mark.dist


def make() -> Transport:
    return ShmTransport(board_of(None, 60.0), "contract", 60.0)


class TestShmTransport(TransportContract):
    make = staticmethod(make)
