"""State that lies on the host by design, beside a simulated device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import SaveError
from tests.processes import PATIENCE_S
from tests.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.usefixtures("writing_thread"), *ON_SIMULATED_DEVICES]

WIDTH = 96


class Interleaved(torch.optim.SGD):
    """Steps every second parameter on the host, by a thread, and the others on the device.

    After each step the momenta change places, as those of Deep Optimizer States do.

    Parameters
    ----------
    loose
        Whether `step` returns before the thread is done.
    """

    def __init__(self, params: Any, loose: threading.Event | None = None) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self._steps = 0
        self._loose = loose
        self._thread = ThreadPoolExecutor(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        on_host = params[self._steps % 2 :: 2]
        grads = {p: p.grad.cpu() for p in on_host}
        self._steps += 1
        begun = [self._thread.submit(self._one, p, grads[p], "cpu") for p in on_host]
        for p in params[self._steps % 2 :: 2]:
            self._one(p, p.grad, p.device)
        for future in () if self._loose else begun:
            future.result()

    def _one(self, parameter: Any, grad: torch.Tensor, place: Any) -> None:
        if self._loose is not None and place == "cpu":
            self._loose.wait(PATIENCE_S)
        with torch.no_grad():
            held = self.state[parameter].get("momentum_buffer", torch.zeros_like(grad))
            momentum = held.to(place) if self._loose is None else held
            self.state[parameter]["momentum_buffer"] = momentum.mul_(0.9).add_(
                grad.to(momentum.device)
            )
            parameter.sub_(momentum.to(parameter.device), alpha=0.1)

    def wait(self) -> None:
        """Return when the thread is done."""
        self._thread.submit(int).result()


class Training:
    """A model of which each step is known, and a tensor in page-locked memory."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.model.to("cuda")
        self.optimizer = Interleaved(self.model.parameters())
        self.pinned = torch.zeros(WIDTH, WIDTH, pin_memory=True)
        self.state = {"model": self.model, "optim": self.optimizer, "seen": self.pinned}

    def backward(self, number: int) -> float:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to("cuda")
        self.optimizer.zero_grad()
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.pinned += x.sum().cpu()
        return float(loss.detach())

    def step(self, number: int) -> float:
        loss = self.backward(number)
        self.optimizer.step()
        return loss


def changes_places(root: str) -> None:
    """Save in the midst of a training whose momenta change between device and host."""
    first, losses = Training(), []
    assert first.pinned.is_pinned()
    with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
        for number in range(6):
            losses.append(first.step(number))
            ck.save(number + 1, first.state)
            device = {s["momentum_buffer"].device.type for s in first.optimizer.state.values()}
            assert device == {"cpu", "cuda"}
            form = ck._saver._form[1]
            assert form is not None
            early = {step.name for step in form.steps} - form.late
            # Nothing says who changes a tensor of the host; a few bytes are not worth a wait.
            assert {name for name in early if ".bias." not in name} == {"seen"}
    second = Training()
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(second.state, 3) == 3
    assert [second.step(n) for n in range(3, 6)] == losses[3:]
    assert torch.equal(second.pinned, first.pinned)


def test_momenta_that_change_places_go_on_bit_for_bit(tmp_path: Path) -> None:
    run(changes_places, str(tmp_path / "root"), deadline_s=60.0)


def goes_on_alone(root: str) -> str:
    """Save while a thread of the optimizer is not done; it writes before everything is copied."""
    training, go = Training(), threading.Event()
    training.step(0)
    training.step(1)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
        ck.save(1, training.state)
        ck.wait()
        training.backward(2)
        training.optimizer._loose = go
        training.optimizer.step()
        (stream,) = ck._saver._device_copies._streams.values()
        let_go = installed().hold(stream)  # copies take their time
        handle = ck.save(2, training.state)
        go.set()
        training.optimizer.wait()
        let_go()
        with pytest.raises(SaveError) as raised:
            handle.durable()
        training.optimizer._loose = None
        training.optimizer.wait()
        ck.save(3, training.state).durable()
    return raised.value.kind


def test_a_thread_that_writes_after_the_step_fails_the_save(tmp_path: Path) -> None:
    assert run(goes_on_alone, str(tmp_path / "root"), deadline_s=60.0) == "mutated"
