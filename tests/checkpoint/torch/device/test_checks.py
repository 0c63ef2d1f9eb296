"""What lazy copies promise, on a simulated device, whatever it does by itself and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.torch import cuda_checks
from tests.sampling import sampled
from tests.simdevice import SCHEDULES, run
from tests.simulated import ON_SIMULATED_DEVICES, failing

pytestmark = ON_SIMULATED_DEVICES


EACH = 6
"""One check of so many has a writing process, which sees no device: it is as with a thread."""


def checked(folder: str, schedule: str, every: int) -> dict[str, str]:
    """Call every check; return the traces of those that fail.

    Of the optimizers, whose steps and saves take half of the time, schedules share: each has one of
    `every`, and all are under some schedule. Those of `test_fuzz` are under any.
    """
    cuda_checks.make_small()
    kinds = list(cuda_checks.OPTIMIZERS)
    for kind in set(kinds) - set(kinds[SCHEDULES.index(schedule) % every :: every]):
        del cuda_checks.OPTIMIZERS[kind]
    checks = cuda_checks.CHECKS
    roots = [folder if i % EACH == 0 else "memory://checks" for i in range(len(checks))]
    programs = {
        n: lambda _, n=n, root=root: checks[n](f"{root}/{n}")
        for n, root in zip(checks, roots, strict=True)
    }
    return failing(programs, schedule)


@sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_checks_pass(schedule: str, tmp_path: Path, every: int) -> None:
    folder = str(tmp_path) if schedule == "eager" else "memory://checks"
    failed = run(checked, folder, schedule, every, deadline_s=250.0)
    assert not failed, "\n".join(failed.values())
