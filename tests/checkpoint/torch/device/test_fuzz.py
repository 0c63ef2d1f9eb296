"""Random programs save on simulated devices: 18 of them, or with ``--long`` 10,000 times.

See `tests.checkpoint.torch.device.fuzz`. The long form draws its first seed and prints it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.torch.device.fuzz import fuzz, tally_line
from tests.simdevice import run, run_simulated_ranks
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.usefixtures("writing_thread"), *ON_SIMULATED_DEVICES]

SOME = 12
"""Programs that have each schedule, place, setting and optimizer among them."""
SAVES = 10_000
BATCH = 60
"""Programs of one process: what they leave behind goes with it."""


def alone(first: int, seconds: float, programs: int) -> tuple[Counter[str], list[str]]:
    return fuzz(first, seconds=seconds, programs=programs)


def together(root: str, first: int, programs: int) -> tuple[Counter[str], list[str]]:
    """Play with what two ranks hold in common."""
    return fuzz(first, seconds=0.0, programs=programs, root=root)


def test_no_save_of_a_random_program_is_wrong(report: Callable[[str], None]) -> None:
    tally, faults = run(alone, 1, 3000.0, SOME, deadline_s=250.0)
    report(f"on a simulated device: {tally_line(tally)}")
    assert not faults, "\n".join(faults)
    assert tally["programs"] == SOME
    assert tally["saves"] > 10


def test_no_save_of_two_ranks_is_wrong(tmp_path: Path, report: Callable[[str], None]) -> None:
    found = run_simulated_ranks(2, together, str(tmp_path / "root"), 1, 6)
    report(f"on simulated devices of two ranks: {tally_line(found[0][0])}")
    assert not [fault for _, faults in found for fault in faults]
    assert found[0][0]["saves"] > 3


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_saves(tmp_path: Path, report: Callable[[str], None]) -> None:
    first = seed = random.SystemRandom().randrange(1 << 30)
    tally: Counter[str] = Counter()
    faults: list[str] = []
    while tally["saves"] < SAVES and not faults:
        found, faults = run(alone, seed, 3000.0, BATCH, deadline_s=3600.0)
        tally += found
        seed += BATCH
        both = run_simulated_ranks(2, together, str(tmp_path / "root"), seed, 5, deadline_s=600.0)
        tally += both[0][0]
        faults += [fault for _, found in both for fault in found]
        seed += 5
    report(f"on a simulated device: {tally_line(tally)}; seeds {first} to {seed - 1}")
    assert not faults, "\n".join(faults)
