"""What a job tells of its saves and loads: recorded by every process, counted, joined."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd import events
from ckptd.errors import DeadlineError, ProcessError
from ckptd.events import FOLDER_VARIABLE, LoadDone, SaveBegun, SaveDurable, Span
from ckptd.events.event import AnyEvent
from ckptd.events.eventfiles import EventFolder
from ckptd.events.profile import Profiles, SaveProfile
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.networks import build, step
from tests.cli.running import process
from tests.processes import PATIENCE_S, until
from tests.programs import Program
from tests.servers import s3_moto, s3_url

__all__ = ["s3_moto"]


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = torch.nn.Linear(64, 64)
    optim = torch.optim.AdamW(model.parameters())
    return model, optim, {"model": model, "optim": optim}


def train(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optim.step()
    optim.zero_grad()


def recorded(folder: Path | str) -> tuple[list[AnyEvent], list[SaveProfile]]:
    profiles = Profiles()
    found = [event for _, event in EventFolder.open(str(folder)).read()]
    for event in found:
        profiles.add(event)
    return found, profiles.saves()


def save_and_load(root: str, folder: str) -> str:
    """Save three times on every rank of a sharded job and load; return the metrics."""
    model, optim = build("fsdp", 1)
    state = {"model": model, "optim": optim}
    with closing(events.record(folder)), ckptd.Checkpointer(root, keep=1) as ck:
        for number in (1, 2, 3):
            step(model, optim)
            tags = {"best": True, "name": "x", "loss": torch.tensor(0.5), "none": math.nan}
            ck.save(number, state, metadata={**tags, "tokens": 100 * number})
        step(model, optim)
        ck.load(state)
        return ck.metrics_text()


@pytest.mark.dist
def test_two_ranks_tell_every_phase(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    texts = run_ranks(2, save_and_load, str(tmp_path / "root"), str(folder), deadline_s=120.0)
    assert len(list(folder.glob("*.jsonl"))) == 4  # two trainers, two that write
    found, saves = recorded(folder)
    assert [(s.step, s.outcome, s.ranks) for s in saves] == [(n, "durable", 2) for n in (1, 2, 3)]
    for save in saves:
        ranks = {p.name: p.ranks for p in save.phases}
        for name in (
            "call",
            "flatten",
            "plan",
            "acquire",
            "enqueue",
            "copy",
            "digest",
            "write",
            "sync",
            "part",
        ):
            assert ranks[name] == 2, name
        for name in ("gather", "commit"):
            assert ranks[name] == 1, name
        assert save.numbers == {"loss": 0.5, "tokens": 100.0 * save.step}  # no flag, no text
        assert save.stall is not None
        assert save.stall.max_s > 0
        assert save.durable_s.keys() == {"local"}
        assert 0 < save.durable_s["local"] <= save.seconds
        wrote = {p.name: p.bytes for p in save.phases}
        assert 0 < wrote["digest"] < wrote["write"]
    assert "gate_wait" in {p.name for s in saves for p in s.phases}
    loads = [e for e in found if isinstance(e, LoadDone)]
    assert sorted((e.rank, e.step) for e in loads) == [(0, 3), (1, 3)]
    assert {e.name for e in found if isinstance(e, Span) and not e.attempt} == {
        "fetch",
        "fill",
        "verify",
    }
    assert len(found) < 2 * 3 * 30
    for text in texts:
        assert 'ckptd_saves_total{outcome="durable",tier="local"} 3.0' in text
        assert 'ckptd_last_durable_step{tier="local"} 3.0' in text
        assert "ckptd_loads_total 1.0" in text

    result = process("trace", str(folder), "--out", str(tmp_path / "trace.json"))
    assert result.code == 0, result.err
    assert result.out.count("durable") == 3
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_spans_of_one_process_fit_into_one_another(tmp_path: Path) -> None:
    model, optim, state = job()
    with (
        closing(events.record(tmp_path / "events")),
        ckptd.Checkpointer(str(tmp_path / "root")) as ck,
    ):
        train(model, optim)
        before = time.time_ns()
        ck.save(1, state)
        ck.wait()
        after = time.time_ns()
    found, _ = recorded(tmp_path / "events")
    slack = 50_000_000  # the wall clock may be slewed meanwhile
    for event in found:
        assert before - slack <= event.time_ns <= after + slack
    begun = next(e for e in found if isinstance(e, SaveBegun))
    durable = next(e for e in found if isinstance(e, SaveDurable))
    spans = {e.name: e for e in found if isinstance(e, Span)}
    commit = spans["commit"]
    assert begun.at_ns <= spans["call"].start_ns <= commit.start_ns
    # What the writing process says of the commit, and when this process heard of it.
    assert commit.start_ns + commit.duration_ns <= durable.at_ns


def test_a_kill_in_the_middle_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    code = """
        import sys, torch, ckptd
        from ckptd import events
        from tests.checkpoint.torch.test_checkpointer_telling import job, train
        model, optim, state = job()
        recording = events.record(sys.argv[2])
        ck = ckptd.Checkpointer(sys.argv[1], storage=ckptd.Storage(throttle=1e5))
        for step in range(1, 1000):
            train(model, optim)
            handle = ck.save(step, state)
            if step == 1:
                handle.durable(60)
            print(step, ck.writer_pid, flush=True)
    """
    child = Program("-c", textwrap.dedent(code), tmp_path / "r", tmp_path / "e")
    for _ in range(3):
        worker = int(child.stdout.readline().split()[1])
    # A kill takes what a process has not written yet: another save must be on the disk.
    until(lambda: len(recorded(tmp_path / "e")[1]) > 1, "a second save is recorded")
    os.kill(worker, signal.SIGKILL)
    child.kill()
    child.communicate()
    folder = EventFolder.open(str(tmp_path / "e"))
    assert len([e for _, e in folder.read()]) > 0
    assert (folder.skipped, folder.unreadable) == (0, 0)
    _, saves = recorded(tmp_path / "e")
    assert saves[0].outcome == "durable"
    assert "unfinished" in {save.outcome for save in saves[1:]}


def test_uploads_are_told(s3_moto: dict[str, Any], tmp_path: Path) -> None:
    model, optim, state = job()
    url = s3_url()
    with closing(events.record(tmp_path)), ckptd.Checkpointer(url, store_options=s3_moto) as ck:
        train(model, optim)
        ck.save(1, state)
    _, (save,) = recorded(tmp_path)
    phases = {p.name: p for p in save.phases}
    assert phases["upload"].bytes == phases["write"].bytes
    assert {p.tier for p in save.phases} == {"remote"}
    assert save.durable_s.keys() == {"remote"}


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "events"))
    code = """
        import sys
        from tests.checkpoint.torch.test_checkpointer_telling import job, train, ckptd
        model, optim, state = job()
        with ckptd.Checkpointer(sys.argv[1]) as ck:
            train(model, optim)
            ck.save(1, state)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "root")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE_S)
    _, (save,) = recorded(tmp_path / "events")
    assert (save.outcome, save.slowest != "") == ("durable", True)


def test_a_save_that_fails_is_told(tmp_path: Path) -> None:
    model, optim, state = job()
    recording = events.record(tmp_path / "events")
    ck = ckptd.Checkpointer(
        str(tmp_path / "root"),
        storage=ckptd.Storage(throttle=1000.0),
        timeout_s=30.0,
    )
    train(model, optim)
    handle = ck.save(1, state)
    assert handle is not None
    with pytest.raises(ProcessError):  # those that take over as well
        for _ in range(20):
            if worker := ck.writer_pid:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            with suppress(DeadlineError):
                handle.durable(1.0)
    ck.close()
    recording.close()
    assert 'ckptd_saves_total{outcome="failed",tier="local"} 1.0' in ck.metrics_text()
    _, (save,) = recorded(tmp_path / "events")
    assert save.outcome == "failed"
    assert save.reason.startswith("the writing process died")
