"""A tier fails, or is slow: training goes on, nothing promised is lost, and the user is told.

Told means three times: by a line of the log, by the metric, and by the handle.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.base.runtime.agentlink import run_folder
from ckptd.checkpoint.save import client as clients
from ckptd.checkpoint.save.client import WriterClient
from ckptd.checkpoint.save.handle import SaveHandle
from ckptd.errors import CkptdError, StoreError
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.processes import PATIENCE_S, agents_in, lives, stop, until
from tests.servers import s3_url, start_moto

__all__ = ["tmpfs"]

ELEMENTS = 1 << 16


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((ELEMENTS,), float(step)), "step": step}


def save(ck: ckptd.Checkpointer, step: int, *, force: bool = False) -> SaveHandle:
    handle = ck.save(step, state_of(step), force=force)
    assert handle is not None
    return handle


def assert_told(
    ck: ckptd.Checkpointer, handle: SaveHandle, tier: str, text: str, log: pytest.LogCaptureFixture
) -> CkptdError:
    """A near tier's failure is in the handle, the log and the metric; returns the error."""
    with pytest.raises(CkptdError) as caught:
        handle.durable(PATIENCE_S, tier=tier)
    assert handle.tiers[tier] == "failed"
    line = f"step {handle.step} is not kept on the tier {tier}"
    until(lambda: any(line in r.getMessage() and text in r.getMessage() for r in log.records))
    until(lambda: failed(ck, tier) >= 1)
    return caught.value


def failed(ck: ckptd.Checkpointer, tier: str) -> float:
    """Return the metric."""
    want = f'ckptd_saves_total{{outcome="failed",tier="{tier}"}}'
    found = [n for n in ck.metrics_text().splitlines() if n.startswith(want)]
    return float(found[0].split()[-1]) if found else 0.0


def loaded(root: str | dict[str, Any], **options: Any) -> int:
    """Return the step that a new life finds; its values must be those of the step.

    Agents that still bring something to the root are waited for.
    """
    until(lambda: not agents_in(run_folder()))
    state = state_of(0)
    with ckptd.Checkpointer(str(root), **options) as ck:
        step = ck.load(state)
    assert state["step"] == step
    assert torch.equal(state["w"], torch.full((ELEMENTS,), float(step)))
    return step


def with_faults(monkeypatch: pytest.MonkeyPatch, *rules: FaultRule) -> None:
    """Let the agent's root fail by `rules`; the trainer's own view of it is sound."""

    def client(spec: StoreSpec, *given: Any) -> WriterClient:
        return WriterClient(spec.wrapped(FaultSpec(rules)), *given)

    monkeypatch.setattr(clients, "WriterClient", client)


def test_saves_that_overlap_on_a_slow_store(tmp_path: Path) -> None:
    """Memory has each step long before the root has one of them."""
    root = str(tmp_path / "root")
    tiers = [ckptd.Memory(every=1)]
    slow = 4 * ELEMENTS / 0.5  # half a second for each
    with ckptd.Checkpointer(
        root,
        every=2,
        tiers=tiers,
        storage=ckptd.Storage(throttle=slow),
        copy=ckptd.CopyOptions(slots=4),
    ) as ck:
        handles, ahead = {}, []
        for step in range(1, 9):
            handles[step] = save(ck, step)
            handles[step].durable(PATIENCE_S, tier="memory")
            ahead += [s for s, h in handles.items() if h.root and h.progress.phase != "durable"]
        assert ahead, "the store was not slow"
        for step in (2, 4, 6, 8):
            handles[step].durable(PATIENCE_S)
        assert failed(ck, "memory") == 0
    assert loaded(root) == 8


def test_a_root_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "root")
    error = StoreError("the disk is on fire", kind="injected").to_dict()
    with_faults(monkeypatch, FaultRule("error", op="writer", times=2, error=error))
    tiers = [ckptd.Memory(every=1)]
    with ckptd.Checkpointer(root, every=2, tiers=tiers, when_failed="warn") as ck:
        handles = {}
        for step in range(1, 9):
            handles[step] = save(ck, step)
            handles[step].durable(PATIENCE_S, tier="memory")
            if step % 2 == 0:
                until(lambda step=step: handles[step].done)
        for step in (2, 4):
            with pytest.raises(StoreError, match="on fire"):
                handles[step].durable(PATIENCE_S)
            assert any(f"step {step} was not saved" in r.getMessage() for r in caplog.records)
        assert failed(ck, "local") == 2
        handles[8].durable(PATIENCE_S)
    assert loaded(root) == 8


def test_what_memory_has_is_not_lost_where_the_root_failed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "root")
    error = StoreError("the disk is on fire", kind="injected").to_dict()
    with monkeypatch.context() as patch:
        with_faults(patch, FaultRule("error", op="put", key="*manifest*", times=1, error=error))
        tiers = [ckptd.Memory(every=1)]
        ck = ckptd.Checkpointer(root, every=4, tiers=tiers, when_failed="warn")
        handles = [save(ck, step) for step in range(1, 6)]
        handles[-1].durable(PATIENCE_S)
        agent = ck.writer_pid
        with pytest.raises(StoreError, match="on fire"):
            ck.close()  # nobody has looked at the handle of step 4
    until(lambda: not lives(agent or 0))
    assert loaded(root) == 5, "the agent brings its newest snapshot to the root before it ends"


@pytest.mark.s3
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(2.0, id="short"),
        pytest.param(60.0, id="a-minute", marks=[pytest.mark.long, pytest.mark.timeout(400)]),
    ],
)
def test_an_s3_server_that_stops_and_goes_on(
    server: tuple[int, dict[str, Any]], seconds: float
) -> None:
    """Requests hang for as long; memory goes on, and the save under way ends well."""
    pid, options = server
    url = s3_url()
    tiers = [ckptd.Memory(every=1)]
    with ckptd.Checkpointer(url, every=4, tiers=tiers, store_options=options) as ck:
        save(ck, 1, force=True).durable(PATIENCE_S)
        stop(pid)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
        timer.start()
        try:
            handles = [save(ck, step) for step in (2, 3, 4)]
            handles[0].durable(PATIENCE_S, tier="memory")
            for handle in handles:
                handle.durable(PATIENCE_S, tier="memory")
            handles[-1].durable(3 * PATIENCE_S)
        finally:
            timer.join()
        assert failed(ck, "memory") == failed(ck, "remote") == 0
    assert loaded(url, store_options=options) == 4


@pytest.fixture
def server() -> Iterator[tuple[int, dict[str, Any]]]:
    """An S3 server of this test's own: its process and the options of a store on it."""
    process, options = start_moto(os.getpid())
    with process:
        yield process.pid, options
        process.kill()


def test_a_full_disk_in_one_tier(
    tmpfs: Mounted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "root")
    tiers = [ckptd.Memory(every=1), ckptd.Local(str(tmpfs.path / "near"), every=1)]
    with ckptd.Checkpointer(root, every=3, tiers=tiers, when_failed="warn") as ck:
        save(ck, 1).durable(PATIENCE_S, tier="local")
        ballast = tmpfs.fill(leave=4096)
        full = save(ck, 2)
        error = assert_told(ck, full, "local", "no space", caplog)
        assert error.kind == "no-space"
        full.durable(PATIENCE_S, tier="memory")
        third = save(ck, 3)
        third.durable(PATIENCE_S)
        third.durable(PATIENCE_S, tier="memory")
        ballast.unlink()
        save(ck, 4).durable(PATIENCE_S, tier="local")
        agent = ck.writer_pid
    until(lambda: not lives(agent or 0))
    assert loaded(root) == 4


def test_a_killed_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a call of save, and while a save is written: another one has them all."""
    root = str(tmp_path / "root")
    acquire = WriterClient.acquire

    def die(client: WriterClient, nbytes: int, timeout_s: float) -> Any:
        os.kill(client.pid, signal.SIGKILL)
        return acquire(client, nbytes, timeout_s)

    tiers = [ckptd.Memory(every=1)]
    with ckptd.Checkpointer(root, every=4, tiers=tiers, when_failed="warn") as ck:
        save(ck, 1, force=True).durable(PATIENCE_S)
        first = ck.writer_pid
        with monkeypatch.context() as patch:
            patch.setattr(WriterClient, "acquire", die)
            taken = save(ck, 2)
        taken.durable(PATIENCE_S, tier="memory")
        assert any("another one takes over" in r.getMessage() for r in caplog.records)
        save(ck, 3).durable(PATIENCE_S, tier="memory")
        assert ck.writer_pid != first
        under_way = save(ck, 5)
        os.kill(ck.writer_pid or 0, signal.SIGKILL)
        under_way.durable(PATIENCE_S, tier="memory")
        under_way.durable(PATIENCE_S)
        assert failed(ck, "memory") == 0
        save(ck, 6).durable(PATIENCE_S, tier="memory")
        save(ck, 8).durable(PATIENCE_S)
    assert loaded(root) == 8


def lose_the_peer(root: str) -> tuple[list[str], list[str], float]:
    """Rank 1's agent dies, another comes. Returns the peer tier's states, log lines, the metric."""
    import logging

    rank = int(os.environ["RANK"])
    os.environ["CKPTD_NODE"] = f"n{rank}"
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("ckptd").addHandler(Lines())
    tiers = [ckptd.Memory(every=1), ckptd.Peer(every=1)]
    states = []
    with ckptd.Checkpointer(root, every=100, tiers=tiers, when_failed="warn") as ck:
        for step in range(1, 13):
            handle = save(ck, step)
            if step == 3 and rank == 1:
                os.kill(ck.writer_pid or 0, signal.SIGKILL)
            until(lambda handle=handle: handle.done)
            states.append(handle.tiers["peer"])
        return states, [n for n in lines if "tier peer" in n], failed(ck, "peer")


@pytest.mark.dist
def test_a_peer_that_is_gone(tmp_path: Path) -> None:
    ends = run_ranks(2, lose_the_peer, str(tmp_path / "root"), deadline_s=110.0)
    for states, _, count in ends:
        assert states[:2] == ["complete", "complete"]
        assert states[-1] == "complete"
        assert count == states.count("failed")
    assert loaded(str(tmp_path / "root")) == 12
