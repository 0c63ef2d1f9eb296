"""The transport over torch.distributed passes the contract."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ckptd.reshard.live.transport import Transport
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.testing.ranks import run_ranks
from ckptd.testing.transport import TransportContract

pytestmark = pytest.mark.dist


def make() -> Transport:
    return TorchTransport(timeout_s=60.0)


class TestTorchTransport(TransportContract):
    make = staticmethod(make)


def closed_at_once(times: int) -> int:
    for _ in range(times):
        make().close()
        dist.barrier()
    return times


def test_a_rank_that_closes_at_once_does_not_break_off_another_that_connects() -> None:
    assert run_ranks(2, closed_at_once, 200, deadline_s=200.0) == [200, 200]
