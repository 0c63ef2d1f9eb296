"""What a controller that follows knows of what people have ordered."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.elastic.control.statemachine import State
from ckptd.elastic.membership import Record, check_log, decode_record, encode_record
from ckptd.elastic.messages import (
    Append,
    Broken,
    Ended,
    Notice,
    Order,
    OrderKind,
    Progress,
    Relaunch,
    Saved,
    SaveNow,
    Start,
    Suspected,
)
from tests.elastic.driven import Driver, none, one, restart


def follower(before: Driver, **settings: float) -> Driver:
    """Return a controller that has nothing but the log's last record."""
    record = before.machine.record
    assert record is not None
    return Driver(
        "".join(before.life), records=[decode_record(encode_record(record), "log")], **settings
    )


@pytest.fixture
def driver() -> Driver:
    """Return four nodes, of which three train."""
    d = Driver("abcd", gather_s=1.0, patience_s=1.0)
    d.up("a", "b", "c", "d")
    d.hear(Progress(generation=1, step=1))
    assert d.machine.state is State.RUNNING
    assert d.machine.members == {"a", "b", "c"}
    return d


def test_a_spare_that_was_ordered_out_stays_out_under_a_follower(driver: Driver) -> None:
    before = driver.machine.record
    record = one(driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("d",))), Append).record
    assert before is not None
    assert (record.generation, record.members, record.out) == (1, before.members, ("d",))
    check_log([before, record], "log")
    assert none(driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("d",))), Append)
    again = follower(driver)
    assert not again.machine.nodes["d"].usable(0.0, all_up=True)


def test_who_was_let_in_again_is_used_by_a_follower(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("d",)))
    record = one(driver.hear(Order(kind=OrderKind.ADD, nodes=("d",))), Append).record
    assert (record.generation, record.out) == (1, ())
    again = follower(driver)
    again.running.update(driver.running)
    again.up("a", "b", "c", "d")
    assert again.machine.nodes["d"].usable(again.now)


def paused(driver: Driver) -> Driver:
    driver.hear(Order(kind=OrderKind.PAUSE))
    driver.hear(Saved(generation=1, step=4))
    driver.all_fenced("a", "b", "c", "d")
    assert driver.machine.state is State.PARKED
    return driver


def test_a_paused_job_stays_paused_under_a_follower(driver: Driver) -> None:
    again = follower(paused(driver), settle_s=1.0, gather_s=1.0, lease_s=1.0)
    again.fenced = dict(driver.fenced)
    out = again.pass_time(10)  # nobody has found it yet
    out += again.pass_time(10, "a")
    out += restart(again, "a", "b", "c", "d")
    out += again.pass_time(60, "a", "b", "c", "d")
    assert (again.machine.state, none(out, Start)) == (State.PARKED, True)
    assert "paused" in again.machine.reason
    out = again.hear(Order(kind=OrderKind.RESUME))
    started = one(out, Start).record
    assert (started.parked, started.generation > driver.machine.generation) == (False, True)
    records: list[Record] = [a.record for a in out if isinstance(a, Append)]
    check_log(records, "log")


def test_a_job_that_is_started_anew_is_not_paused(driver: Driver) -> None:
    again = follower(paused(driver), settle_s=1.0, gather_s=1.0, lease_s=1.0)
    out = again.pass_time(3)
    out += again.pass_time(5, "a", "b", "c")
    out += restart(again, "a", "b", "c")
    assert one(out, Start).record.nodes == {"a", "b", "c"}


def test_a_pause_that_was_ordered_is_carried_out_by_a_follower(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.PAUSE))  # the save is waited for
    again = follower(driver)
    again.running = dict(driver.running)
    again.hear(Progress(generation=1, step=2))  # nodes say again what they said
    again.up("a", "b", "c", "d")
    out = again.pass_time(1, "a", "b", "c", "d")
    one(out, SaveNow)
    again.hear(Saved(generation=1, step=9))
    again.all_fenced("a", "b", "c", "d")
    assert again.machine.state is State.PARKED
    assert again.machine.step == 9


def test_a_resumed_job_is_not_paused_by_a_follower(driver: Driver) -> None:
    paused(driver)
    one(driver.hear(Order(kind=OrderKind.RESUME)), Start)
    assert driver.machine.record is not None
    assert not driver.machine.record.parked


def test_what_a_node_says_at_length_is_cut(driver: Driver) -> None:
    driver.hear(Broken(node="b", generation=1, reason="x" * 100_000))
    driver.pass_time(5, "a", "b", "c", "d")
    assert 0 < len(driver.machine.reason) < 2000
    driver = Driver("abc", gather_s=1.0)
    driver.up("a", "b", "c")
    driver.hear(Progress(generation=1, step=1))
    driver.hear(Notice(node="b", seconds=30.0, reason="x" * 100_000))
    assert 0 < len(driver.machine.reason) < 2000


def test_who_was_named_by_the_monitor_stays_away_under_a_follower(driver: Driver) -> None:
    driver.hear(Suspected(nodes=("d",), reason="corrupts"))
    again = follower(driver)
    assert not again.machine.nodes["d"].usable(again.now)
    hour = again.machine.settings.out_s
    assert 0 < again.machine.nodes["d"].out_until <= driver.now + hour + 1
    driver.hear(Suspected(nodes=("b",), reason="hangs"))
    restart(driver, "a", "b", "c", "d")
    record = driver.machine.record
    assert record is not None
    assert [name for name, _ in record.resting] == ["b", "d"]
    check_log([record], "log")


def test_a_clock_far_ahead_does_not_keep_a_node_away_for_years(driver: Driver) -> None:
    driver.hear(Suspected(nodes=("d",), reason="corrupts"))
    record = driver.machine.record
    assert record is not None
    wrong = msgspec.structs.replace(record, resting=(("d", 1e12),))
    machine = Driver(records=[wrong]).machine
    assert machine.nodes["d"].out_until <= 64 * machine.settings.out_s


def test_an_order_while_launchers_are_started_anew_starts_them_no_second_time() -> None:
    d = Driver(gather_s=1.0, levels=3, flaps=99)
    d.up("a", "b", "c")
    d.hear(Ended(node="a", generation=1, code=1))
    one(d.all_fenced("a", "b", "c"), Relaunch)
    d.life["a"], d.running["a"], d.fenced["a"] = "2", 0, 0
    d.up("a")
    began = d.machine.since
    assert none(d.hear(Order(kind=OrderKind.DRAIN, nodes=("c",)), 5.0), Relaunch)
    assert d.machine.nodes["a"].up
    assert (d.machine.state, d.machine.since) == (State.PLAN, began)
    d.hear(Order(kind=OrderKind.PAUSE))
    assert d.machine.state is State.PARKED
