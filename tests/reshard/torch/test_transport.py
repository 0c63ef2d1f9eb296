"""The transport over torch.distributed passes the contract."""

from __future__ import annotations

import pytest

from ckptd.reshard.live.transport import Transport
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.testing.transport import TransportContract

pytestmark = pytest.mark.dist


def make() -> Transport:
    return TorchTransport(timeout_s=60.0)


class TestTorchTransport(TransportContract):
    make = staticmethod(make)
