"""No optimizer steps after the lease of its node is over, or in a generation that is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd.elastic.lease import Lease
from ckptd.elastic.worker import WorkerLink
from ckptd.elastic.workerwire import LEASE_EXIT_CODE

__all__ = ["BEFORE_STEP", "check_lease", "end_if_over", "guard_steps"]

_installed = False
BEFORE_STEP: list[Callable[[], None]] = []
"""What else is called before each step; what it raises is raised by the step."""


def guard_steps() -> None:
    """Look at the lease before each step of any optimizer in this process. Idempotent.

    Does nothing where no launcher of ckptd started it.
    """
    global _installed
    if _installed or WorkerLink.current() is None:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)


def check_lease() -> None:
    """End this process if its lease is over: others may train on in its place by now."""
    link = WorkerLink.current()
    if link is not None and link.lease is not None:
        end_if_over(link.lease)


def end_if_over(lease: Lease) -> None:
    """End this process, with code 86, if `lease` is over; no handler or destructor is run."""
    if lease.over:
        # Not through sys.stderr: nothing that could wait comes before the end.
        os.write(2, b"ckptd: the lease of this node is over: this rank must not step any more\n")
        os._exit(LEASE_EXIT_CODE)


def _before_step(*_: Any) -> None:
    check_lease()
    for check in tuple(BEFORE_STEP):
        check()
