"""What lazy copies promise, on a simulated device, whatever it does by itself and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.torch import cuda_checks
from tests.simdevice import SCHEDULES, run
from tests.simulated import ON_SIMULATED_DEVICES, failing

pytestmark = ON_SIMULATED_DEVICES


def checked(root: str, schedule: str) -> dict[str, str]:
    """Call every check; return the traces of those that fail."""
    cuda_checks.make_small()
    checks = cuda_checks.CHECKS
    programs = {n: lambda _, n=n: checks[n](f"{root}/{n}") for n in checks}
    return failing(programs, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_checks_pass(schedule: str, tmp_path: Path) -> None:
    # The process that writes files sees no device: one schedule shows that it is as with a thread.
    root = str(tmp_path) if schedule == "eager" else "memory://checks"
    failed = run(checked, root, schedule, deadline_s=250.0)
    assert not failed, "\n".join(failed.values())
