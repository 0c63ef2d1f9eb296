"""Weights on simulated devices: copied while training goes on, applied to a device of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.testing.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES
from tests.train.layout.jobs import Tree, differing, whole
from tests.train.layout.test_binder import FUSED, WHOLE, fused

pytestmark = ON_SIMULATED_DEVICES


def steps(at: str) -> list[str]:
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
        for step in range(1, 4):
            wanted = {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            for name in ("norm.weight", "embed.weight"):
                module.get_parameter(name).grad = None  # these rest
            publication = publisher.publish(step, {"model": module, "optim": optimizer})
            optimizer.step()  # waits for what it would overwrite, and nothing else does
            assert publication.wait(60)
            report = subscriber.update(wait_s=60)
            assert report is not None
            here = {n: t.cpu() for n, t in into.state_dict().items()}
            found += differing(here, fused(wanted))
        rests = sum(wanted[n].nbytes for n in ("norm.weight", "embed.weight"))
        assert report.bytes_unchanged == rests
        with torch.no_grad():
            into.get_parameter("norm.weight").data[3] = 5.0
        publication = publisher.publish(4, {"model": module, "optim": optimizer})
        assert publication.wait(60)
        assert subscriber.update(wait_s=60) is not None
        here = {n: t.cpu() for n, t in into.state_dict().items()}
        wanted = {n: t.detach().cpu() for n, t in module.state_dict().items()}
        found += differing(here, fused(wanted))
    return found


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_a_worker_has_what_was_published(tmp_path: Path, schedule: str) -> None:
    assert run(steps, str(tmp_path / "at"), schedule=schedule) == []
