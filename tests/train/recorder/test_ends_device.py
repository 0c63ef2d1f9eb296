"""Times of calls on accelerators; what needs a device is skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.train.recorder.ends import DeviceClock
from tests.train.recorder.cuda_checks import CHECKS


def test_the_least_delay_ever_seen_is_nearest_to_the_truth() -> None:
    clock = DeviceClock()
    # The device's zero is at 1000 ms of the host's; events are seen 80, 5 and 60 ms late.
    assert clock.host_ns(10.0, 1_090_000_000) == 1_090_000_000
    assert clock.host_ns(20.0, 1_025_000_000) == 1_025_000_000
    assert clock.host_ns(30.0, 1_090_000_000) == 1_035_000_000


def test_nothing_ends_after_it_was_seen() -> None:
    clock = DeviceClock()
    clock.host_ns(0.0, 500_000_000)
    assert clock.host_ns(90.0, 580_000_000) == 580_000_000


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or not torch.distributed.is_nccl_available(),
    reason="NO CUDA DEVICE: ends of calls on CUDA tensors are NOT tested here",
)
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_device(check: str, tmp_path: Path) -> None:
    CHECKS[check](str(tmp_path))
    torch.cuda.synchronize()
