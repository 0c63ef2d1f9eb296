"""Which step a watched rank shows: the checkpointer's, and an optimizer's from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.monitor.torch.recorder import recorder

pytestmark = pytest.mark.usefixtures("writing_thread")


class Shown:
    """A recorder that is attached, and a program of one rank."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optim": self.optimizer}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()

    @property
    def step(self) -> int:
        current = recorder._current
        assert current is not None
        return current.ring.current_step


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shown]]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "CKPTD_JOB": "steps"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rings").mkdir(mode=0o700)

    def attach() -> Shown:
        recorder.detach()
        recorder.attach(folder=tmp_path / "rings")
        return Shown()

    yield attach
    recorder.detach()


def test_a_loaded_step_is_gone_on_from(attached: Callable[[], Shown], tmp_path: Path) -> None:
    first = attached()
    first.train(3)
    before = first.step
    with ckptd.Checkpointer(tmp_path / "root") as ck:
        ck.save(3305, first.state).durable()
        assert first.step == 3305 > before
        first.train(2)
        assert first.step == 3307
    again = attached()
    with ckptd.Checkpointer(tmp_path / "root") as ck:
        ck.load(again.state)
        assert again.step == 3305
        again.train(1)
        assert again.step == 3306
        ck.save(3306, again.state)
        assert again.step == 3306


def test_a_program_that_counts_epochs_shows_epochs(
    attached: Callable[[], Shown], tmp_path: Path
) -> None:
    shown = attached()
    with ckptd.Checkpointer(tmp_path / "root") as ck:
        for epoch in (1, 2, 3):
            shown.train(10)
            ck.save(epoch, shown.state)
        assert shown.step == 3
        shown.train(10)
        assert shown.step == 3


def test_weights_that_are_taken_from_elsewhere_are_no_step(
    attached: Callable[[], Shown], tmp_path: Path
) -> None:
    shown = attached()
    with ckptd.Checkpointer(tmp_path / "root") as ck:
        ck.save(500, shown.state).durable()
    fresh = attached()
    fresh.train(2)
    before = fresh.step
    with ckptd.Checkpointer(tmp_path / "root") as ck:
        ck.load({"model": fresh.model}, weights_only=True)
    assert fresh.step == before
