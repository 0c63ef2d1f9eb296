"""torchao's CPUOffloadOptimizer on a simulated device: state is captured on the host, lazily."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import DeadlineError
from tests.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.plugins, *ON_SIMULATED_DEVICES]

WIDTH = 96  # of a matrix that is stepped on the host; the biases are stepped on the device


class Training:
    """A model of which each step is known."""

    def __init__(self, offload: bool = True) -> None:
        warnings.simplefilter("ignore")
        from torchao.optim import CPUOffloadOptimizer

        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.model.to("cuda")
        self.optimizer: Any = (
            CPUOffloadOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2, fused=False)
            if offload
            else torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        )
        self.state = {"model": self.model, "optim": self.optimizer}

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, WIDTH, generator=generator).to("cuda")
        self.optimizer.zero_grad()
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss)


def goes_on(root: str) -> None:
    """Save lazily, train on, and go on in a fresh training from what was saved."""
    device, first = installed(), Training()
    first.step(0)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
        ck.save(1, first.state)
        ck.wait()
        first.step(1)
        copies = next(iter(ck._saver._device_copies._streams.values()))
        let_go = device.hold(copies)
        handle = ck.save(2, first.state)
        try:
            with pytest.raises(DeadlineError):
                handle.staged(0.0)
            form = ck._saver._form[1]
            assert form is not None
            # The moments lie on the host and are copied there, while the device is held up.
            hosted = set(form.watched) - form.on_device
            assert hosted == {f"optim.{i}.weight.{k}" for i in (0, 2) for k in MOMENTS}
        finally:
            # A step comes before the copies are done: it has to wait for them.
            threading.Timer(0.3, let_go).start()
        later = [first.step(n) for n in range(2, 5)]
        handle.durable()
    second = Training()
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(second.state) == 2
    assert [second.step(n) for n in range(2, 5)] == later


MOMENTS = ("exp_avg", "exp_avg_sq")


def goes_on_from_the_device(root: str) -> None:
    """Go on from a training whose optimizer was on the device: names and values are the same."""
    plain, offloaded = Training(offload=False), Training()
    plain.step(0)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, plain.state)
    with ckptd.Checkpointer(root) as ck:
        ck.load(offloaded.state)
    wanted = [plain.step(n) for n in (1, 2)]
    assert [offloaded.step(n) for n in (1, 2)] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "starve:side", "starve:main"])
def test_saves_are_lazy_and_a_run_goes_on_bit_for_bit(schedule: str, tmp_path: Path) -> None:
    run(goes_on, str(tmp_path / "root"), schedule=schedule, deadline_s=90.0)


def test_a_run_goes_on_that_had_its_optimizer_on_the_device(tmp_path: Path) -> None:
    run(goes_on_from_the_device, str(tmp_path / "root"), deadline_s=90.0)
