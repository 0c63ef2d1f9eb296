from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptd.monitor.job import CallFlag, Phase, RankView
from ckptd.monitor.report import RankNote, from_views, gathered
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.rules.crash import crashes, ended
from ckptd.monitor.rules.endings import Endings
from ckptd.monitor.rules.limits import HangLimits
from tests.monitor.jobs import NOW, call, calls, changed, groups, inside, view


def gone(endings: Endings, views: list[RankView], now: float, **notes: Any) -> list[int]:
    """Ranks whose end is told."""
    sheet = from_views(views, job="j", source="s", number=1, **notes)
    job, rows = gathered([sheet], {})
    settled = endings.settle(job, rows, now)
    return settled.ranks["rank"][ended(settled)].tolist()


def dead(rank: int, code: int | None, **other: Any) -> RankView:
    return changed(view(rank, **other), alive=False, exit_code=code)


def test_nobody_has_ended() -> None:
    assert gone(Endings(), [view(0), view(1)], 0.0) == []


@pytest.mark.parametrize(
    ("code", "after"), [(-9, 0.0), (-11, 0.0), (-6, 0.5), (1, 0.5), (None, 0.5)]
)
def test_when_an_end_is_told(code: int | None, after: float) -> None:
    endings, views = Endings(), [dead(0, code), view(1)]
    assert (gone(endings, views, 0.0) == [0]) == (after == 0.0)
    assert gone(endings, views, after) == [0]


def test_an_end_with_a_code_beside_one_by_a_signal_is_told_at_once() -> None:
    assert gone(Endings(), [dead(0, 1), dead(1, -9), view(2)], 0.0) == [0, 1]


def test_one_that_was_told_to_end_while_its_neighbours_go_on() -> None:
    endings, views = Endings(), [dead(0, -15), view(1)]
    assert gone(endings, views, 0.0) == []
    assert gone(endings, views, 1.5) == [0]


def test_a_whole_node_that_was_told_to_end() -> None:
    endings = Endings()
    views = [dead(0, -15, node="a"), dead(1, -15, node="a"), view(2, node="b")]
    for now in np.arange(0, 100, 1.0):
        assert gone(endings, views, float(now)) == []
    waiting = inside(2, 5, 3, age=4.0, size=4, node="b")
    assert gone(endings, [*views[:2], waiting], 101.0) == [0, 1]


def test_exit_0_is_in_order_unless_others_wait() -> None:
    assert gone(Endings(), [dead(0, 0), view(1)], 9.0) == []
    assert gone(Endings(), [dead(0, 0), inside(1, 5, 3, age=1.0, size=2)], 9.0) == []
    endings = Endings()
    views = [dead(0, 0), inside(1, 5, 3, age=3.0, size=2)]
    gone(endings, views, 0.0)
    assert gone(endings, views, 1.0) == [0]


def test_a_recorder_that_was_closed_stands_for_a_code_that_nobody_saw() -> None:
    off = {0: RankNote(recorder=RecorderState.OFF)}
    for notes, told in (({}, [0]), (off, [])):
        endings = Endings()
        gone(endings, [dead(0, None), view(1)], 0.0, notes=notes)
        assert gone(endings, [dead(0, None), view(1)], 1.0, notes=notes) == told


def _left(failed: float) -> list[RankView]:
    """Rank 0 has said that it is done; 1 and 2 have called once more since, and have failed."""
    last = call(7, 4, NOW - 1, NOW, flags=CallFlag.FAILED if failed else 0)
    first = dead(0, 0, phase=Phase.EXIT, groups=groups({7: (3, 3, 3)}))
    return [
        first,
        *(dead(r, 1, groups=groups({7: (3, 4, 3)}), calls=calls(last)) for r in (1, 2)),
    ]


def test_who_leaves_with_exit_0_while_its_groups_still_call_is_the_cause() -> None:
    endings = Endings()
    gone(endings, _left(failed=True), 0.0)
    assert gone(endings, _left(failed=True), 1.0) == [0, 1, 2]
    job, rows = gathered([from_views(_left(failed=True), job="j", source="s", number=1)], {})
    (verdict,) = crashes(endings.settle(job, rows, 2.0), HangLimits())
    assert verdict.names() == ("0",)
    assert "exited with code 0" in verdict.suspects[0].detail


def test_who_leaves_with_exit_0_is_not_at_fault_for_what_ends_otherwise() -> None:
    endings = Endings()
    gone(endings, _left(failed=False), 0.0)
    assert gone(endings, _left(failed=False), 1.0) == [1, 2]


def test_who_has_said_that_it_is_done_is_missed_by_who_waits_for_it() -> None:
    """It does not matter that it said so: the call needs it."""
    done = dead(0, 0, phase=Phase.EXIT, groups=groups({7: (2, 3, 3)}))
    waiting = inside(1, 7, 4, age=3.0, size=2)
    endings = Endings()
    gone(endings, [done, waiting], 0.0)
    assert gone(endings, [done, waiting], 1.0) == [0]
    # A receive that was begun and given up holds nobody up who goes on.
    moving = changed(waiting, moved=NOW - 0.1)
    assert gone(Endings(), [done, moving], 1.0) == []


def test_another_process_of_the_rank_has_a_time_of_its_own() -> None:
    endings = Endings()
    gone(endings, [changed(dead(0, 1), pid=1), view(1)], 0.0)
    assert gone(endings, [changed(dead(0, 1), pid=2), view(1)], 5.0) == []


@pytest.mark.parametrize("codes", [(-15, -15, -15), (-15, -2, -15), (0, -15, -15)])
def test_who_alone_was_sent_its_signal_is_the_cause(codes: tuple[int, ...]) -> None:
    """Its launcher sends SIGTERM to the others next, so that all seem to have been asked to end."""
    endings, views = Endings(), [dead(r, c, node="a") for r, c in enumerate(codes)]
    assert gone(endings, views, 0.0) == []
    assert gone(endings, views, 2.0) == [], "nothing tells these from a job that was asked to end"
    views[1] = changed(views[1], answers=True)
    job, rows = gathered([from_views(views, job="j", source="s", number=1)], {})
    (verdict,) = crashes(endings.settle(job, rows, 2.0), HangLimits())
    assert verdict.names() == ("1",)


def test_a_job_that_ctrl_c_ends_is_no_crash_whatever_its_agent_saw() -> None:
    """Python catches SIGINT: an agent cannot see whether the others have been sent it."""
    views = [dead(r, -2, node="a") for r in range(3)]
    views[1] = changed(views[1], answers=True)
    endings = Endings()
    for now in (0.0, 0.5, 2.0, 9.0):
        assert gone(endings, views, now) == []
    late = Endings()
    assert gone(late, [views[1], view(0, node="a"), view(2, node="a")], 0.0) == []
    swept = [dead(0, -15, node="a"), views[1], dead(2, -15, node="a")]
    assert gone(late, swept, 9.0) == [], "somebody has lost patience"
