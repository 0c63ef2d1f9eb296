"""The transport over torch.distributed passes the contract."""

from __future__ import annotations

import pytest

from ckptd.live.transport import Transport
from ckptd.testing.transport import TransportContract
from ckptd.train.transport import TorchTransport

pytestmark = pytest.mark.dist


def make() -> Transport:
    return TorchTransport(timeout_s=60.0)


class TestTorchTransport(TransportContract):
    make = staticmethod(make)
