"""Workers behind links of limited bandwidth: what a trainer sends though one of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.monitor.cluster.namespaces import needs_namespaces
from tests.publish.linked import LinkedWorld

pytestmark = pytest.mark.timeout(300)
ROWS = 1024
NEEDED = ROWS * 2048


@pytest.mark.parametrize(
    ("fault", "most"),
    # What the first one took before it died, and all of it once; or less than all, where the
    # worker that takes its place has had a part of it.
    [("killed as it takes", 1.9), ("killed as it gives", 2.3)],
)
def test_one_worker_takes_the_place_of_one_that_died(
    tmp_path: Path, fault: str, most: float
) -> None:
    needs_namespaces()
    world = LinkedWorld(tmp_path / "w", 3, 1, mbit=20, rows=ROWS, pass_on=True, fault=fault)
    with world:
        before = world.sent()
        wanted = world.publish(1)
        used = [world.used(worker) for worker in world.survivors()]
        assert {one.values for one in used} == {wanted}
        assert world.sent() - before < most * NEEDED
        wanted = world.publish(2)
        assert {world.used(worker).values for worker in world.survivors()} == {wanted}
