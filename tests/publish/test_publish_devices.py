"""Weights on simulated devices: copied while training goes on, applied to a device of a worker."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor

import ckptd
from ckptd.base.grids.block import Block
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import UsageError
from ckptd.publish.carrier import WeightCarrier
from ckptd.publish.torch.devices import CudaSharing, DeviceCarrier, _Block, _NearVersion
from ckptd.reshard.live.memory import TensorMemory
from ckptd.reshard.torch.relayout import TorchMemory
from ckptd.testing.carrier import CarrierContract
from ckptd.testing.ranks import rank_outcomes
from tests.processes import PATIENCE_S, lives, until
from tests.reshard.torch.layout.jobs import Tree, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused
from tests.simdevice import installed, run, run_simulated_ranks, simulated_play
from tests.simdevice.ipc import SimSharing
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = ON_SIMULATED_DEVICES


def steps(at: str, far: bool) -> list[str]:
    """Publish, step the optimizer at once, and compare what a worker has with what there was."""
    device = installed().name
    module = Tree(whole(1)).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    into = Tree(fused(whole(99))).to(device)
    found: list[str] = []
    with (
        ckptd.Publisher(WHOLE, at) as publisher,
        ckptd.Subscriber(FUSED, into, at) as subscriber,
    ):
        subscriber._far = far  # so that what changed is applied to what the device holds
        for step in range(1, 4):
            wanted = {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            for name in ("norm.weight", "embed.weight"):
                module.get_parameter(name).grad = None  # these rest
            publication = publisher.publish(step, {"model": module, "optim": optimizer})
            optimizer.step()  # waits for what it would overwrite, and nothing else does
            assert publication.wait(PATIENCE_S)
            report = subscriber.update(wait_s=60)
            assert report is not None
            here = {n: t.cpu() for n, t in into.state_dict().items()}
            found += differing(here, fused(wanted))
        rests = sum(wanted[n].nbytes for n in ("norm.weight", "embed.weight"))
        assert report.bytes_unchanged == rests
        assert not far or report.bytes_received < report.bytes_needed
        with torch.no_grad():
            into.get_parameter("norm.weight").data[3] = 5.0
        publication = publisher.publish(4, {"model": module, "optim": optimizer})
        assert publication.wait(PATIENCE_S)
        assert subscriber.update(wait_s=60) is not None
        here = {n: t.cpu() for n, t in into.state_dict().items()}
        wanted = {n: t.detach().cpu() for n, t in module.state_dict().items()}
        found += differing(here, fused(wanted))
    return found


@pytest.mark.parametrize(("schedule", "far"), [("eager", False), ("lazy", False), ("lazy", True)])
def test_a_worker_has_what_was_published(tmp_path: Path, schedule: str, far: bool) -> None:
    assert run(steps, str(tmp_path / "at"), far, schedule=schedule) == []


def make_near(_: Sequence[int]) -> WeightCarrier:
    return DeviceCarrier(None, SimSharing())


class TestDeviceCarrier(CarrierContract):
    make = staticmethod(make_near)
    device = "cuda"
    play = staticmethod(simulated_play)


ONE = "mesh O = x:1\nspace s { w[n m] }\nlayout one of s on O { w = w[n m] }\n"


def between_devices(at: str, how: str) -> list[Any]:
    """Publish from one process's device into another's, with a fault in the second version.

    The trainer steps at once after each `publish`, and the worker uses the weights at once. Returns
    what each version is there, and which of them went from device to device.
    """
    device = f"{installed().name}:1"
    alone = [dist.new_group([rank]) for rank in range(2)]
    sharing = SimSharing()
    carrier = DeviceCarrier(device, sharing)
    store = dist.distributed_c10d._get_default_store()
    weight = torch.nn.Parameter(torch.zeros(300, 500, device=device))
    steps = (1, 2) if how == "killed" else (1, 2, 3)
    if dist.get_rank() == 0:
        if how == "host":
            weight = torch.nn.Parameter(weight.detach().cpu())
        store.set("pid", str(os.getpid()))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with ckptd.Publisher(ONE, at, process_group=alone[0], carrier=carrier) as publisher:
            for step in steps:
                weight.grad = torch.full_like(weight, -1.0)
                optimizer.step()
                publication = publisher.publish(step, {"m": {"w": weight}, "optim": optimizer})
                optimizer.step()  # behind the copy
                assert publication.wait(PATIENCE_S)
                if step == 2 and how == "closed":
                    for shared in sharing.made.values():
                        shared.close()
                if step == 2 and how == "damaged":
                    for held, _ in carrier._blocks.values():
                        held.memory[70_000:70_001] ^= 1
                        held.memory[:1].cpu()
                store.set(f"published {step}", "")
                if step == 2 and how in ("withdrawn", "killed"):
                    store.wait(["now"])  # the worker copies
                    for slot in publisher._slots.values():
                        carrier.withdraw(slot)
                    store.set("withdrawn", "")
                store.wait([f"had {step}"])
                if how == "withdrawn":
                    steps = steps[:2]
        carrier.close()
        return []
    values, near = [], []
    copied = TorchMemory.copy_to

    def watched(self: TorchMemory, target: TensorMemory, block: Block) -> bool:
        if step == 2 and how in ("withdrawn", "killed"):
            if how == "killed":
                pid = int(store.get("pid"))
                os.kill(pid, signal.SIGKILL)
                until(lambda: not lives(pid), "the end of the publisher")
            else:
                store.set("now", "")
                store.wait(["withdrawn"])
            self._flat.fill_(-7.0)  # it is other memory by now
        assert block.numel == weight.numel()
        near.append(step)
        return copied(self, target, block)

    with (
        ckptd.Subscriber(ONE, {"m": {"w": weight}}, at, carrier=carrier) as subscriber,
        patch.object(TorchMemory, "copy_to", watched),
    ):
        for step in steps[: 2 if how == "withdrawn" else 3]:
            store.wait([f"published {step}"])
            report = subscriber.update(wait_s=60)
            assert report is not None
            assert report.bytes_mapped == weight.nbytes
            side = torch.get_device_module(device).Stream(1)
            with torch.no_grad(), torch.get_device_module(device).stream(side):
                made = weight.sum(1).cpu()  # on a stream that nobody has named to anybody
            assert bool((made == made[0]).all())
            values.append(made[0].item() / 500)
            if how != "killed" or step == 1:
                store.set(f"had {step}", "")
    carrier.close()
    return [values, near]


@pytest.mark.parametrize(("schedule", "how"), [("lazy", ""), ("starve:side", ""), ("lazy", "host")])
def test_versions_go_from_device_to_device_by_handles(
    tmp_path: Path, schedule: str, how: str
) -> None:
    at = str(tmp_path / "at")
    done = run_simulated_ranks(2, between_devices, at, how, schedule=schedule)
    assert done[1] == [[1.0, 3.0, 5.0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("how", "values", "near"),
    [
        ("closed", [1.0, 3.0, 5.0], [1, 3]),  # the first block is open already
        ("damaged", [1.0, 3.0, 5.0], [1, 3]),
        ("withdrawn", [1.0, 3.0], [1, 2]),
        ("killed", [1.0, 3.0], [1, 2]),
    ],
)
def test_what_a_block_cannot_give_comes_out_of_the_slot(
    tmp_path: Path, how: str, values: list[float], near: list[int]
) -> None:
    play = simulated_play()
    at = str(tmp_path / "at")
    outcomes = rank_outcomes(2, between_devices, at, how, deadline_s=100.0, play=play)
    found = outcomes[1].value
    assert found is not None, outcomes
    assert found == [values, near]


class _Named(NamedTuple):
    uuid: str


def test_handles_are_those_of_torch() -> None:
    """As `torch.multiprocessing.reductions` calls these names, which no CPU has."""
    order = list(inspect.signature(rebuild_cuda_tensor).parameters)
    names = ["storage_handle", "storage_size_bytes", "storage_offset_bytes"]
    names += ["ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"]
    assert [n for n in order if n in names] == names
    shared = (1, b"segment", 64, 512, b"counts", 7, b"event", True)
    storage = torch.empty(64, dtype=torch.uint8).untyped_storage()
    devices = {0: _Named("GPU-b"), 1: _Named("GPU-a")}
    with (
        patch.object(torch.UntypedStorage, "_share_cuda_", return_value=shared),
        patch.object(torch.UntypedStorage, "_new_shared_cuda", return_value=storage) as opens,
        patch.object(torch.UntypedStorage, "_release_ipc_counter_cuda") as ends,
        patch.object(torch.cuda, "device_count", return_value=2),
        patch.object(torch.cuda, "get_device_properties", side_effect=lambda i: devices[i]),
    ):
        sharing = CudaSharing()
        block, handle = sharing.make(64, torch.device("cpu"))
        assert block.nbytes == 64
        devices[0], devices[1] = devices[1], devices[0]  # another process counts otherwise
        assert sharing.open(handle).untyped_storage().data_ptr() == storage.data_ptr()
        opens.assert_called_once_with(0, *shared[1:])
        sharing.end(handle)
        ends.assert_called_once_with(b"counts", 7)
        devices.clear()
        devices[0] = devices[1] = _Named("GPU-c")
        with pytest.raises(OSError, match="does not see device GPU-a"):
            sharing.open(handle)


def test_a_device_that_shares_nothing_is_an_error_with_what_to_do() -> None:
    slot = Slot(0, 1000)
    try:
        with pytest.raises(UsageError, match="no memory that other processes can open") as caught:
            DeviceCarrier("cpu").expose(slot)
        assert "expandable_segments" in str(caught.value.hint)
        assert "CUDA is not available" in str(caught.value.found)
    finally:
        slot.close()


class _Failing:
    """Memory whose device fails when it is asked for."""

    def __getitem__(self, _: object) -> _Failing:
        return self

    def cpu(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_block_whose_device_fails_is_left_for_the_slot(caplog: pytest.LogCaptureFixture) -> None:
    mapped: Any = SimpleNamespace(number=1, data=None, card=b"card", intact=True)
    memory: Any = _Failing()
    version = _NearVersion(mapped, _Block(memory, 1), lambda: True)
    assert not version.near_intact
    assert version.intact
    assert "illegal memory access" in caplog.text
