"""Faults in real jobs; `tests.elastic.live.campaign` plays as many as one likes."""

from __future__ import annotations

import pytest

from tests.elastic.live.campaign import References, campaign


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_real_job_goes_on_after_each_of_three_schedules() -> None:
    results = campaign(range(1, 4), each=3, right=References(), modes=("session",))
    assert [result.end for result in results] == ["progress"] * 3
    assert [result.wrong for result in results] == [[], [], []]
