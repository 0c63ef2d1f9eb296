"""Weights on simulated devices: copied while training goes on, applied to a device of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.publish.carrier import WeightCarrier
from ckptd.testing.carrier import CarrierContract
from tests.processes import PATIENCE_S
from tests.reshard.torch.layout.jobs import Tree, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused
from tests.simdevice import installed, run, run_simulated_ranks, simulated_play
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


def make_ipc(publishers: Sequence[int]) -> WeightCarrier:
    from tests.simdevice.ipc import IpcCarrier  # where there are devices

    return IpcCarrier(None, publishers, timeout_s=20.0)


class TestIpcCarrier(CarrierContract):
    make = staticmethod(make_ipc)
    play = staticmethod(simulated_play)


ONE = "mesh O = x:1\nspace s { w[n m] }\nlayout one of s on O { w = w[n m] }\n"


def between_devices(at: str) -> list[float]:
    """Publish from one process's device into another's; return what each version is there.

    The trainer steps at once after each `publish`, and the worker uses the weights at once.
    """
    device = f"{installed().name}:1"
    alone = [dist.new_group([rank]) for rank in range(2)]
    carrier = make_ipc((0,))
    store = dist.distributed_c10d._get_default_store()
    weight = torch.nn.Parameter(torch.zeros(300, 500, device=device))
    found = []
    if dist.get_rank() == 0:
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with ckptd.Publisher(ONE, at, process_group=alone[0], carrier=carrier) as publisher:
            for step in (1, 2, 3):
                weight.grad = torch.full_like(weight, -1.0)
                optimizer.step()
                publication = publisher.publish(step, {"m": {"w": weight}, "optim": optimizer})
                optimizer.step()  # behind the copy
                assert publication.wait(PATIENCE_S)
                store.set(f"published {step}", "")
                store.wait([f"had {step}"])
        carrier.close()
        return []
    with ckptd.Subscriber(ONE, {"m": {"w": weight}}, at, carrier=carrier) as subscriber:
        for step in (1, 2, 3):
            store.wait([f"published {step}"])
            report = subscriber.update(wait_s=60)
            assert report is not None
            assert report.bytes_received == weight.nbytes
            side = torch.get_device_module(device).Stream(1)
            with torch.no_grad(), torch.get_device_module(device).stream(side):
                made = weight.sum(1).cpu()  # on a stream that nobody has named to anybody
            assert bool((made == made[0]).all())
            found.append(made[0].item() / 500)
            store.set(f"had {step}", "")
    carrier.close()
    return found


@pytest.mark.parametrize("schedule", ["lazy", "starve:side"])
def test_versions_go_from_device_to_device_by_handles(tmp_path: Path, schedule: str) -> None:
    done = run_simulated_ranks(2, between_devices, str(tmp_path / "at"), schedule=schedule)
    assert done[1] == [1.0, 3.0, 5.0]
