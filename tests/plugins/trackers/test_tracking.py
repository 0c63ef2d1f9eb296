"""What trackers get, and that none of them stops or breaks training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptd
import ckptd_trackers
from ckptd.checkpoint.cli.address import CheckpointAddress, opened
from ckptd.errors import UsageError
from ckptd_simulated.feed import PlantedAt
from tests.monitor.daemon.daemons import fed, running
from tests.processes import until

pytestmark = pytest.mark.usefixtures("writing_thread")


class Noted:
    """Notes what it gets."""

    def __init__(self) -> None:
        self.numbers: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.checkpoints: list[tuple[str, str, int, int]] = []

    def number(self, name: str, value: float, step: int) -> None:
        self.numbers.append((name, value, step))

    def text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def checkpoint(self, place: str, record: str, step: int, generation: int) -> None:
        self.checkpoints.append((place, record, step, generation))

    def steps(self, name: str) -> list[int]:
        return [step for n, _, step in self.numbers if n == name]


def train(root: str, *steps: int, load: bool = False) -> None:
    state = {"w": torch.zeros(1000)}
    with ckptd.Checkpointer(root) as ck:
        if load:
            ck.load(state)
        for step in steps:
            ck.save(step, state)


def test_saves_commits_and_restarts(tmp_path: Path) -> None:
    root, noted = str(tmp_path / "root"), Noted()
    with ckptd_trackers.track(noted, root=root) as tracking:
        train(root, 1, 2)
        train(root, 3, load=True)
    assert tracking.lost == 0
    for name in ("save_blocked_s", "save_durable_s/local", "save_bytes/local"):
        assert sorted(noted.steps(f"ckptd/{name}")) == [1, 2, 3]
    assert [(v, s) for n, v, s in noted.numbers if n == "ckptd/generation"] == [
        (1, 1),
        (1, 2),
        (2, 3),
    ]
    assert all(v == 4000 for n, v, _ in noted.numbers if n == "ckptd/save_bytes/local")
    assert noted.texts == [("ckptd/restarts", "went on from step 2 of generation 1", 2)]
    assert [c[2:] for c in noted.checkpoints] == [(1, 1), (2, 1), (3, 2)]
    for place, record, step, generation in noted.checkpoints:
        assert Path(record.removeprefix("file://")).is_file()
        address = CheckpointAddress.of(place)
        with opened(address.root) as catalogue:
            found = address.find(catalogue)
        assert (found.step, found.generation) == (step, generation)


def test_a_save_that_fails_is_told(tmp_path: Path) -> None:
    root, noted = tmp_path / "root", Noted()
    with ckptd_trackers.track(noted, root=str(root)):
        with pytest.raises(ckptd.CkptdError), ckptd.Checkpointer(str(root)) as ck:
            ck.save(1, {"w": torch.zeros(3)}).durable()
            (root / "ckptd.json").unlink()
            ck.save(2, {"w": torch.zeros(3)})
        until(lambda: noted.steps("ckptd/saves_failed"))
    assert [c[2] for c in noted.checkpoints] == [1]
    assert [(n, s) for n, _, s in noted.texts] == [("ckptd/saves_failed", 2)]


def test_one_that_hangs_or_fails_disturbs_neither_training_nor_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, noted, go_on = str(tmp_path / "root"), Noted(), threading.Event()

    class Hangs(Noted):
        def number(self, name: str, value: float, step: int) -> None:
            go_on.wait()

    class Fails(Noted):
        def number(self, name: str, value: float, step: int) -> None:
            raise ConnectionError("no tracker there")

    tracking = ckptd_trackers.track(Hangs(), Fails(), noted, root=root)
    train(root, *range(1, 21))  # ends, although the first one has not taken a single event
    until(lambda: len(noted.steps("ckptd/save_durable_s/local")) == 20)
    assert len(noted.checkpoints) == 20
    tracking.close(0.1)
    assert tracking.lost >= 60
    assert len([r for r in caplog.records if "subscriber of events failed" in r.message]) == 1
    go_on.set()


@pytest.mark.timeout(600)
def test_incidents_goodput_and_lives_from_a_daemon(tmp_path: Path) -> None:
    noted = Noted()

    def told(part: str) -> Callable[[], bool]:
        return lambda: any(part in text for _, text, _ in noted.texts)

    with (
        running(tmp_path / "history") as daemon,
        fed(daemon, 4, PlantedAt("crash", 2, 1.0)),
        ckptd_trackers.track(
            noted,
            root="s3://bucket/run",
            daemon=f"{daemon.url}/?token={daemon.token}",
            period_s=0.1,
        ),
    ):
        until(told("is open"))
        until(told("generation 0 began with 4 ranks"))
        until(lambda: "ckptd/goodput" in {n for n, _, _ in noted.numbers})
        until(lambda: ("ckptd/incidents_open", 1.0) in {(n, v) for n, v, _ in noted.numbers})
    incidents = [text for name, text, _ in noted.texts if name == "ckptd/incidents"]
    assert len(incidents) == len(set(incidents))  # each once, however often it is asked
    assert any("2" in text for text in incidents)


def test_a_daemon_that_is_not_there_is_asked_again(tmp_path: Path) -> None:
    root, noted = str(tmp_path / "root"), Noted()
    with ckptd_trackers.track(noted, root=root, job="nobody-runs-this", period_s=0.01):
        train(root, 1)
        until(lambda: noted.checkpoints)


def test_what_is_no_tracker(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown kind of tracker"):
        ckptd_trackers.track(object(), root=str(tmp_path))
