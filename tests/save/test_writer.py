"""The writing process in an agent: what reaches the root of a save that has near tiers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ckptd.store import open_store
from tests.processes import until
from tests.save.nearjob import NearJob
from tests.save.saving import plan_of

ROWS = 6 << 20  # 24 MiB of float32: three slices


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    return str(tmp_path / "root")


def test_an_upload_of_a_save_that_is_given_up_ends_before_it_is_whole(root: str) -> None:
    job = NearJob(root, slots=1, throttle=4e6, linger_s=1.0)
    job.plan = plan_of({"w": (ROWS,)})
    handle = job.save(1, {"w": np.zeros(ROWS, np.float32)}, root=True)
    until(lambda: handle.progress.done_bytes > 0)
    assert handle.progress.done_bytes < 4 * ROWS
    job.client.abandon(1, "another rank failed")
    until(lambda: not job.client.busy)  # the slot is read no more
    found = [info.key for info in open_store(root).list("data/")]
    assert not [key for key in found if key.endswith(".safetensors")]
    assert job.catalogue.latest() is None
    agent = job.agent
    job.close()
    os.kill(agent, signal.SIGKILL)  # it would keep the snapshot in memory for another life
