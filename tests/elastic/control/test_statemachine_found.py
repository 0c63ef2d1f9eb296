"""What simulations of many faults have found in the controller's decisions."""

from __future__ import annotations

import pytest

from ckptd.elastic.messages import Abort, Ended, Fence, NodeLost, NodeUp, Progress, Reseated
from tests.elastic.control.simulation import run
from tests.elastic.driven import Driver, none, restart


def test_found_116_a_launcher_that_was_stuck_is_fenced_again() -> None:
    driver = Driver(gather_s=1.0, patience_s=1.0)
    driver.up("a", "b", "c")
    driver.hear(Progress(generation=1, step=1))
    driver.hear(Ended(node="a", generation=1, code=-9))
    driver.all_fenced("a", "b")
    driver.pass_time(25, "a", "b", "c")
    assert not driver.machine.may_renew("c")
    driver.running["c"] = 0
    assert any(a.nodes == ("c",) for a in driver.hear(driver.said("c")) if isinstance(a, Fence))
    driver.all_fenced("c")
    assert driver.machine.may_renew("c")


def test_found_by_the_month_two_bad_nodes_in_a_row_do_not_end_a_job() -> None:
    d = Driver("abcdefgh", gather_s=1.0, flaps=2)
    d.up(*"abcdefgh")
    d.hear(Progress(generation=1, step=1))
    for name in "aabb":
        actions = d.hear(Ended(node=name, generation=d.machine.generation, code=-9))
        assert none(actions, Abort)
        restart(d, *"abcdefgh")
    assert d.machine.members == {"c", "d", "e"}


@pytest.mark.parametrize("life_s", [0.1, 5.0])
def test_found_by_the_month_a_bad_node_whose_workers_exit_by_themselves_does_not_end_a_job(
    life_s: float,
) -> None:
    d = Driver("abcd", gather_s=1.0)
    d.up("d", "a", "b", "c")
    d.hear(Progress(generation=1, step=1))
    for _ in range(2):
        d.pass_time(life_s, *"abcd")
        actions = d.hear(Ended(node="a", generation=d.machine.generation, code=1))
        assert none(actions, Abort)
        d.all_fenced(*"abcd")
        d.pass_time(0.5, *"abcd")
    restart(d, *"abcd")
    assert d.machine.members == {"b", "c", "d"}


def test_found_by_the_month_who_was_left_out_comes_back_as_the_last_spare() -> None:
    d = Driver("abcde", gather_s=1.0, flaps=1, out_s=10.0)
    d.up(*"abcde")
    d.hear(Progress(generation=1, step=1))
    d.hear(Ended(node="a", generation=1, code=1))
    restart(d, *"edcba")
    d.hear(Progress(generation=d.machine.generation, step=2))
    d.pass_time(20, *"abcde")  # a may be used again
    d.hear(Ended(node="b", generation=d.machine.generation, code=1))
    restart(d, *"edcba")
    assert d.machine.members == {"c", "d", "e"}


def test_found_51787_the_fence_of_an_older_generation_proves_nothing_of_the_newest() -> None:
    d = Driver("abc", gather_s=1.0, lease_s=20.0)
    d.up("a", "b", "c")
    d.hear(Progress(generation=1, step=1))
    for name in "bc":
        d.hear(NodeLost(node=name))
    d.all_fenced("a")
    assert d.machine.members == {"a"}
    d.hear(Progress(generation=d.machine.generation, step=2))
    d.hear(NodeLost(node="a"))  # and trains on, alone
    d.hear(Reseated(generation=d.machine.generation))
    d.up("b", "c")  # with workers of generation 1
    d.all_fenced("b", "c")
    d.hear(NodeUp(node="b", life="1", slots=1, running=1))  # said before, heard after
    d.pass_time(19, "b", "c")
    assert d.machine.members == {"a"}
    d.pass_time(2, "b", "c")
    assert d.machine.members == {"b", "c"}


def test_found_66239_who_fenced_while_it_was_cut_off_is_used_again() -> None:
    d = Driver("abc", gather_s=1.0, fence_s=3.0)
    d.up("a", "b", "c")
    d.hear(Progress(generation=1, step=1))
    d.hear(Ended(node="a", generation=1, code=-9))
    d.all_fenced("a", "b")
    d.pass_time(10, "a", "b", "c")  # c is stuck
    assert d.machine.nodes["c"].stuck_at is not None
    d.hear(NodeLost(node="c"))
    d.running["c"], d.fenced["c"] = 0, d.machine.generation
    d.pass_time(2, "a", "b", "c")
    assert d.machine.nodes["c"].stuck_at is None


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(n, marks=pytest.mark.long) for n in range(25, 40))]
)
def test_random_faults(seed: int) -> None:
    run(seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_faults() -> None:
    for seed in range(10_000, 12_000):
        run(seed)
