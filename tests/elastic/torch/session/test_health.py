"""A look at simulated devices between two generations."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from ckptd.elastic.torch.session.health import empty_caches, fault_of_devices
from tests.processes import PATIENCE_S
from tests.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = ON_SIMULATED_DEVICES


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_devices_that_are_well(name: str) -> None:
    run(are_well, name, name=name)


def are_well(name: str) -> None:
    kept = torch.ones(3, device=torch.device(name, 1))
    installed().stall(0.05)
    assert fault_of_devices(soon()) == ""
    empty_caches()
    assert kept.tolist() == [1.0, 1.0, 1.0]


def test_a_sticky_error_is_found_on_any_device_that_is_used() -> None:
    run(has_a_sticky_error)


def has_a_sticky_error() -> None:
    sim = installed()
    sim.fail(1)
    assert fault_of_devices(soon()) == "", "this process has nothing to do with that device"
    kept = torch.ones(1, device="cuda:0")
    sim.fail(0, "an illegal memory access was encountered")
    found = fault_of_devices(soon())
    assert found == "the device fails: CUDA error: an illegal memory access was encountered"
    del kept


def test_only_the_own_device_of_a_rank_is_looked_at() -> None:
    run(uses_the_second)


def uses_the_second() -> None:
    sim = installed()
    torch.cuda.set_device(1)
    sim.fail(0)
    assert fault_of_devices(soon()) == "", "another rank's device is used by no look"
    sim.fail(1)
    assert fault_of_devices(soon()), "though it holds no memory there"


def test_a_device_that_hangs_is_given_up_in_time() -> None:
    run(hangs)


def hangs() -> None:
    end = installed().hold()
    began = time.monotonic()
    assert "has not finished what is queued after 0.3" in fault_of_devices(began + 0.3)
    assert time.monotonic() - began < PATIENCE_S
    end()


def test_a_look_that_fails_by_itself_is_no_hang() -> None:
    run(has_no_count_of_memory)


def has_no_count_of_memory() -> None:
    kept = torch.ones(1, device="cuda")

    def refused(device: object) -> int:
        raise LookupError("no such count")

    torch.cuda.memory_reserved = refused
    assert "no such count" in fault_of_devices(soon())
    del kept


def test_what_fills_a_device_and_waits_to_be_collected_is_no_fault() -> None:
    run(is_full)


def is_full() -> None:
    gc.collect()
    gc.disable()
    sim = installed()
    cycle: list[object] = [torch.ones(1000, device="cuda")]
    cycle.append(cycle)
    sim.capacity = sim.allocated[0]
    del cycle
    assert fault_of_devices(soon()) == ""
    kept = torch.ones(1, device="cuda")
    sim.capacity = sim.allocated[0]
    assert "out of memory" in fault_of_devices(soon()).lower()
    del kept
