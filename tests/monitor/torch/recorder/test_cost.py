"""What recording costs is measured beside the ring, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.monitor.ring import RecorderState, RingIdentity, RingWriter, read
from ckptd.monitor.torch.recorder.cost import call_cost
from ckptd.monitor.torch.recorder.counters import CounterSource
from ckptd.monitor.torch.recorder.python import PythonSource
from ckptd.monitor.torch.recorder.sources import Broken


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return RingWriter(tmp_path / "x-0-1.ring", RingIdentity(rank=0, world=1))


def test_a_hook_costs_something_and_counters_nothing(ring: RingWriter) -> None:
    assert call_cost(PythonSource, ring) > 0
    assert call_cost(CounterSource, ring) == 0
    assert list(ring.path.parent.iterdir()) == [ring.path]
    assert not len(read(ring.path).calls)


class Failing:
    """Fails in its first call."""

    name, state = "failing", RecorderState.CALLS

    def __init__(self, ring: RingWriter, broken: Broken) -> None:
        self._broken = broken

    def start(self) -> None:
        self._broken(ValueError("no"))

    def silence(self) -> None: ...

    def stop(self) -> None: ...

    def beat(self) -> None: ...


def test_a_source_that_fails_is_not_measured(ring: RingWriter) -> None:
    with pytest.raises(RuntimeError, match="while it was measured"):
        call_cost(Failing, ring)
    assert list(ring.path.parent.iterdir()) == [ring.path]
