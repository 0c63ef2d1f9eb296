"""Guards optimizer steps: no step after the lease is over; exit with its own code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ckptd.elastic.exitreport import note_step
from ckptd.elastic.lease import WorkerLease
from ckptd.elastic.messages import LEASE_EXIT_CODE, LEASE_VARIABLE

_lease: WorkerLease | None = None
_installed = False
BEFORE_STEP: list[Callable[[], None]] = []
"""Further functions to call before each step; the step raises what they raise."""


def guard_steps() -> None:
    """Look at the lease before each step of any optimizer in this process. Idempotent.

    Where no launcher of ckptd leases this node to its ranks, there is nothing to look at. No
    connection to the launcher is made: this may be a process that a rank has started.
    """
    global _installed, _lease
    path = os.environ.get(LEASE_VARIABLE)
    if path and _lease is None:
        _lease = WorkerLease(path)
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        note_first_step()


def note_first_step() -> None:
    """Leave word for the launcher when an optimizer of this process has made its first step."""
    noted = False

    def stepped(*_: Any) -> None:
        # The hook stays: torch goes through the hooks themselves, and raises in the step where one
        # is removed before others.
        nonlocal noted
        if not noted:
            noted = True
            note_step()

    register_optimizer_step_post_hook(stepped)


def check_lease() -> None:
    """End this process if its lease is over: others may train on in its place by now."""
    if _lease is not None:
        end_if_over(_lease)


def end_if_over(lease: WorkerLease) -> None:
    """End this process, with code 86, if `lease` is over; no handler or destructor is run."""
    if lease.over:
        # Not through sys.stderr: nothing that could wait comes before the end.
        os.write(2, b"ckptd: the lease of this node is over: this rank must not step any more\n")
        os._exit(LEASE_EXIT_CODE)


def _before_step(*_: Any) -> None:
    check_lease()
    for check in tuple(BEFORE_STEP):
        check()
