"""Views: what a rank shows without being told anything."""

from __future__ import annotations

import math

from ckptd.monitor.job import CALL, GROUP, RankView


def test_a_rank_that_has_just_begun() -> None:
    view = RankView(rank=0, world=1, node="a", at=1.0, moved=1.0)
    assert view.alive
    assert view.groups.dtype == GROUP
    assert view.calls.dtype == CALL
    assert not len(view.groups)
    assert not len(view.calls)
    assert view.pending_group == 0
    assert math.isnan(view.pending_since)
    other = RankView(rank=1, world=1, node="a", at=1.0, moved=1.0)
    assert view.calls is not other.calls
