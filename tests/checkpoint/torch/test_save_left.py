"""A save that one rank cannot begin costs that save, and none of those after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.torch.saver import wait_for_copying
from ckptd.errors import CkptdError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")


class Unsavable:
    """Nothing that a checkpoint can hold."""


class Scheduler:
    """Says what it is asked to say."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


def be_patient(ck: Any, seconds: float) -> None:
    for part in (ck, ck._agreement, ck._saver):
        part._timeout_s = seconds


def left_by_one(root: str) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {"weight": torch.ones(100)}
    more = {**state, "more": torch.ones(3)}
    step = 0
    with ckptd.Checkpointer(root, timeout_s=PATIENCE_S) as ck:
        for bad in (
            {**more, "bad": Unsavable()},
            {**more, "bad": Scheduler(RuntimeError("no state"))},
            {**more, "bad": Scheduler(KeyboardInterrupt())},
            {**state, "bad": Scheduler(RuntimeError("no state"))},
        ):
            good = {**state, "bad": Scheduler(None)} if len(bad) == 2 else state
            ck.save(step + 1, good).durable(PATIENCE_S)
            wrong = bad if rank == 1 else {**bad, "bad": Scheduler(None)}
            be_patient(ck, 3.0)
            with pytest.raises((CkptdError, RuntimeError, KeyboardInterrupt)):
                ck.save(step + 2, wrong).durable(PATIENCE_S)
            be_patient(ck, PATIENCE_S)
            dist.barrier()
            ck.save(step + 3, good).durable(PATIENCE_S)
            ck.save(step + 4, more).durable(PATIENCE_S)
            step += 4


def test_ranks_meet_again_after_one_of_them_could_not_begin(tmp_path: Path) -> None:
    run_ranks(2, left_by_one, str(tmp_path / "root"), deadline_s=180.0)


def test_a_copying_thread_whose_start_was_interrupted_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands among the threads before it can be joined, which raised in a session's leave."""
    copying = threading.Thread(target=time.sleep, args=(0.1,), name="ckptd-copy_0")
    monkeypatch.setattr(threading, "enumerate", lambda: [copying])
    assert not wait_for_copying(time.monotonic())
    later = threading.Timer(0.1, copying.start)
    later.start()
    assert wait_for_copying(time.monotonic() + 60.0)
    assert not copying.is_alive()
    later.join()
