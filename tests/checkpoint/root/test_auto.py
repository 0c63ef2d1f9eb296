"""Young's and Daly's optimum, and what is made of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.checkpoint.root.auto import (
    NODE_MTBF_HOURS,
    Auto,
    Cost,
    Mtbf,
    beyond_near,
    choose,
    optimum_s,
    typical,
    waste,
)
from ckptd.errors import UsageError

costs = st.floats(0.0, 1e5)
mtbfs = st.floats(1.0, 1e9)


@pytest.mark.parametrize(
    ("mtbf_min", "published_min"), [(24 * 60, 117.0), (6 * 60, 57.0), (15.0, 9.1)]
)
def test_the_optimum_is_the_published_one(mtbf_min: float, published_min: float) -> None:
    """Figures 3 to 5 of Daly 2006: saves that take 5 minutes."""
    assert optimum_s(300.0, 60.0 * mtbf_min) / 60.0 == pytest.approx(published_min, abs=0.5)


def test_failures_of_llama_3() -> None:
    assert pytest.approx(54 * 24 / 419) == NODE_MTBF_HOURS / 2048


@given(cost=st.floats(1e-6, 1e3), mtbf=mtbfs)
def test_it_begins_with_the_square_root_of_young(cost: float, mtbf: float) -> None:
    assume(cost < 1e-4 * mtbf)
    assert optimum_s(cost, mtbf) == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.01)


@given(cost=st.floats(1e-3, 1e5), mtbf=mtbfs, factor=st.floats(0.01, 100.0), drain=costs)
def test_no_other_interval_loses_less(
    cost: float, mtbf: float, factor: float, drain: float
) -> None:
    assume(cost < 0.5 * mtbf)  # Daly: then the error of the approximation does not matter
    best = optimum_s(cost, mtbf)
    assert waste(best, cost, drain, mtbf) <= waste(factor * best, cost, drain, mtbf) + 1e-3


@given(mtbf=mtbfs, ratio=st.floats(2.0, 1e6))
def test_where_the_formula_does_not_hold_the_interval_is_the_mtbf(
    mtbf: float, ratio: float
) -> None:
    assert optimum_s(ratio * mtbf, mtbf) == mtbf


@given(cost=costs, mtbf=mtbfs, interval=st.floats(0.0, 1e7), drain=costs, more=st.floats(1.0, 10.0))
def test_waste_is_a_share_and_grows_with_what_is_bad(
    cost: float, mtbf: float, interval: float, drain: float, more: float
) -> None:
    lost = waste(interval, cost, drain, mtbf)
    assert 0.0 <= lost <= 1.0
    assert lost <= waste(interval, more * cost, drain, mtbf) + 1e-9
    assert lost <= waste(interval, cost, more * drain, mtbf) + 1e-9
    assert lost >= waste(interval, cost, drain, more * mtbf) - 1e-9


@given(
    blocked=costs,
    inflation=costs,
    durable=costs,
    mtbf=mtbfs,
    longest=st.floats(0.001, 1e5),
)
def test_the_interval_keeps_its_bounds(
    blocked: float, inflation: float, durable: float, mtbf: float, longest: float
) -> None:
    cost = Cost(blocked, inflation, durable)
    choice = choose(Auto(max_minutes=longest), cost, Mtbf(mtbf, "as given"))
    assert choice.interval_s >= durable
    assert choice.interval_s <= max(durable, 60.0 * longest)
    between = durable <= choice.optimum_s <= 60.0 * longest
    assert (choice.bound == "") == between
    assert not between or choice.interval_s == choice.optimum_s
    assert str(choice).count(" every ") == 2


def test_the_reason_is_one_sentence() -> None:
    choice = choose(Auto(), Cost(0.25, 0.75, 40.0), Mtbf(3.1 * 3600, "2048 nodes"))
    assert str(choice) == (
        "saving every 2.48 min (the optimum): a save costs 1 s (250 ms in the call, 750 ms in"
        " slower steps) and is durable after 40 s, a failure is expected every 3.1 h (2048 nodes),"
        " and 1.69 % of the time goes to saves and to work done twice"
    )
    slow = choose(Auto(), Cost(0.25, 0.75, 600.0), Mtbf(3.1 * 3600, "as given"))
    assert "every 10 min (as long as a save takes; the optimum would be 2.48 min)" in str(slow)
    rare = choose(Auto(max_minutes=1), Cost(0.25, 0.75, 40.0), Mtbf(1e6, "as given"))
    assert "every 60 s (max_minutes; the optimum would be 23.6 min)" in str(rare)


@pytest.mark.parametrize("hours", [5e-324, 1e-9, 1e300, 1.7e308])
def test_absurd_failure_rates_give_an_interval_all_the_same(hours: float) -> None:
    auto = Auto(mtbf_hours=hours)
    choice = choose(auto, Cost(1.0, 0.0, 2.0), Mtbf(3600.0 * hours, "as given"))
    assert 2.0 <= choice.interval_s <= 3600.0
    assert 0.0 <= choice.waste <= 1.0


def test_a_save_that_costs_nothing_is_made_as_soon_as_the_last_one_is_durable() -> None:
    choice = choose(Auto(), Cost(0.0, 0.0, 7.0), Mtbf(1e4, "as given"))
    assert (choice.interval_s, choice.bound) == (7.0, "drain")


def test_a_typical_save_is_the_median() -> None:
    usual = [Cost(1.0, 0.1, 3.0), Cost(1.2, 0.2, 4.0)]
    assert typical(usual[:1]) == usual[0]
    assert typical([*usual, Cost(50.0, 50.0, 50.0)]) == usual[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"mtbf_hours": 0},
        {"mtbf_hours": -1.0},
        {"mtbf_hours": math.nan},
        {"mtbf_hours": math.inf},
        {"mtbf_hours": 10**400},
        {"mtbf_hours": "3"},
        {"mtbf_hours": 3.0, "nodes": 2},
        {"nodes": 0},
        {"nodes": 1.5},
        {"nodes": True},
        {"node_mtbf_hours": 0.0},
        {"max_minutes": 0},
        {"max_minutes": math.inf},
    ],
)
def test_auto_refuses_nonsense(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as info:
        Auto(**arguments)
    assert any(name in info.value.message for name in arguments)


# -- restarts, and near tiers ----------------------------------------------------------------------


@given(
    cost=st.floats(1e-3, 1e4),
    mtbf=mtbfs,
    factor=st.floats(0.01, 100.0),
    restart=st.floats(0.0, 1e5),
)
def test_no_other_interval_loses_less_however_long_a_restart_takes(
    cost: float, mtbf: float, factor: float, restart: float
) -> None:
    assume(cost < 0.5 * mtbf)
    best = optimum_s(cost, mtbf)
    here, there = (waste(t, cost, 0.0, mtbf, restart) for t in (best, factor * best))
    assert here <= there + 1e-3
    assert here >= waste(best, cost, 0.0, mtbf) - 1e-9


@given(cost=st.floats(1e-2, 10.0), mtbf=st.floats(1e4, 1e7), share=st.floats(0.0, 0.1))
def test_the_first_approximation_with_restarts_loses_no_less(
    cost: float, mtbf: float, share: float
) -> None:
    restart = share * mtbf
    first = math.sqrt(2.0 * cost * (mtbf + restart)) - cost
    best = optimum_s(cost, mtbf)
    kept, other = (waste(t, cost, 0.0, mtbf, restart) for t in (best, first))
    assert kept <= other + 1e-5


def test_a_restart_is_counted_and_told() -> None:
    cost, mtbf = Cost(0.25, 0.75, 40.0), Mtbf(3600.0, "measured by the controller")
    without, told = choose(Auto(), cost, mtbf), choose(Auto(), cost, mtbf, 60.0)
    assert told.interval_s == without.interval_s
    assert told.waste - without.waste == pytest.approx(60.0 / 3600.0, rel=0.1)
    assert "every 60 min (measured by the controller), 60 s to restart, and" in str(told)
    assert "goes to saves, to restarts and to work done twice" in str(told)


def test_near_tiers_leave_the_root_the_failures_that_they_do_not_survive() -> None:
    mtbf = beyond_near(Auto(beyond_near=0.25), Mtbf(3600.0, "as given"))
    assert mtbf == Mtbf(14400.0, "25 % of failures are beyond near tiers; as given")


@pytest.mark.parametrize("share", [0, 1.01, math.nan, -0.5])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(UsageError) as info:
        Auto(beyond_near=share)
    assert "beyond_near" in info.value.message
