"""Faults in real jobs; `tests.elastic.live.campaign` plays as many as one likes."""

from __future__ import annotations

import pytest

from tests.elastic.live.campaign import References, campaign, grown


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_real_job_goes_on_after_each_of_three_schedules() -> None:
    results = campaign(range(1, 4), each=3, right=References(), modes=("session",))
    assert [result.end for result in results] == ["progress"] * 3
    assert [result.wrong for result in results] == [[], [], []]


def test_what_grows_in_a_process_is_found() -> None:
    held = [{"n0 7": (90 + 10 * k, 20 + k, 9), "n1 8": (90, 20 + 20 * k, 9)} for k in range(6)]
    assert grown(held) == ["n1 8: 60 files, then 80"]
    held = [{"n0 7": (90, 20, 3 + 14 * (k % 2)), "n2 9": (50, 9, 9 * k)} for k in range(6)]
    assert grown(held) == ["n2 9: 18 threads, then 27"]
    assert grown(held[:4]) == []
