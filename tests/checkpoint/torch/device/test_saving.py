"""Saves from a simulated device: what is asked of the driver, and when."""

from __future__ import annotations

import pytest

from tests.checkpoint.torch.device import saving
from tests.simdevice import SCHEDULES, run
from tests.simulated import ON_SIMULATED_DEVICES, failing

pytestmark = ON_SIMULATED_DEVICES


def of_cuda(schedule: str) -> dict[str, str]:
    return failing(saving.OF_CUDA, schedule)


def of_every_kind(schedule: str) -> dict[str, str]:
    return failing(saving.OF_EVERY_KIND, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saves_from_cuda(schedule: str) -> None:
    failed = run(of_cuda, schedule, schedule=schedule, deadline_s=200.0)
    assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize("name", ["xpu", "newdevice"])
def test_saves_from_other_kinds(name: str) -> None:
    failed = run(of_every_kind, "starve:side", name=name, deadline_s=200.0)
    assert not failed, "\n".join(failed.values())
