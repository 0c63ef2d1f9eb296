"""What the demo makes of steps with saves and without."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ckptd.errors import CkptdError
from ckptd_demo.spec import Cut, RunSpec, SnapshotRow, StepRow
from ckptd_demo.story import pace_of, step_seconds


def rows(pace: int, blocks: int, plain: float, saving: float) -> list[StepRow]:
    """Steps whose saves, if they have one, make the next step longer."""
    out, at = [], 0.0
    for step in range(1, pace * blocks):
        out.append(StepRow(step, 1.0, (), 0.1, at))
        at += saving if step // pace % 2 else plain
    return out


def test_steps_are_told_apart() -> None:
    plain, saving = step_seconds(rows(4, 5, 0.25, 0.5), 4)
    assert set(plain) == {0.25}
    assert set(saving) == {0.5}
    assert len(saving) == 6


def test_a_pace(tmp_path: Path) -> None:
    spec = RunSpec(folder=str(tmp_path), cut=Cut(2), until=20, steps=20, pace=4)
    lines = [msgspec.json.encode(row) for row in rows(4, 5, 0.25, 0.5)]
    spec.files.steps.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CkptdError, match="has not reported"):
        pace_of(spec)
    spec.files.snapshots.write_bytes(msgspec.json.encode(SnapshotRow(8, 7)) + b"\n")
    pace = pace_of(spec)
    assert (pace.ratio, pace.saves, pace.complete) == (2.0, 8, 7)
