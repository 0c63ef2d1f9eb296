"""Jobs of two nodes die at random, in any of their processes: what was promised is found again.

After each death the next life must load at least the newest step that was promised on a tier which
that death leaves standing, bit for bit; nothing may stay behind. What a seed means is in
`tests.checkpoint.crash.tiers.schedule`; ``python -m tests.checkpoint.crash.tiers.run SEED`` runs
one again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.checkpoint.crash.tiers.outcome import Outcome
from tests.checkpoint.crash.tiers.tally import lines

Report = Callable[[str], None]
pytestmark = [pytest.mark.dist]
ROOT = Path(__file__).parents[4]


def run(report: Report, arguments: Sequence[str], timeout_s: float) -> list[Outcome]:
    command = [sys.executable, "-m", "tests.checkpoint.crash.tiers.run", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in out.splitlines()]
    for line in lines(outcomes):
        report(line)
    assert process.returncode == 0, [o for o in outcomes if o.faults]
    return outcomes


@pytest.mark.timeout(600)
def test_a_few_seeds(report: Report) -> None:
    outcomes = run(report, ["2", "6", "1002"], 580.0)
    assert sum(len(o.kills) for o in outcomes)
    assert sum(o.restored.get("snapshot", 0) for o in outcomes)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_five_hundred_kills(report: Report) -> None:
    first = random.SystemRandom().randrange(10**6, 10**9)
    report(f"seeds from {first}")
    outcomes = run(report, ["--kills", "500", f"{first}:{first + 2000}"], 7100.0)
    assert sum(len(o.kills) for o in outcomes) >= 500
