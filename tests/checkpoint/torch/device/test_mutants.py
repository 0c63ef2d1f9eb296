"""Each mutant of the code that copies from devices is noticed: `scripts/test --long`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.checkpoint.torch.device.mutants import MUTANTS, ROOT, mutated_source
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = ON_SIMULATED_DEVICES


def test_every_mutant_breaks_what_is_there() -> None:
    """A mutant whose text is gone would never be hunted again."""
    for mutant in MUTANTS:
        compile(mutated_source(mutant), mutant.what, "exec")


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_every_mutant_is_noticed_or_means_the_same(report: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.torch.device.mutants"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for row in done.stdout.splitlines():
        report(row)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(MUTANTS)
