from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptd.elastic.control.history import Splitter
from ckptd.elastic.control.statemachine import State
from ckptd.elastic.control.states import ExitCodes
from ckptd.elastic.messages import (
    Abort,
    Action,
    Append,
    Broken,
    Ended,
    Fence,
    Finish,
    Left,
    Loaded,
    NodeLost,
    NodeUp,
    Notice,
    Order,
    OrderKind,
    Progress,
    Refuse,
    Relaunch,
    Reseat,
    Reseated,
    Saved,
    SaveNow,
    Start,
    Suspected,
    Tell,
    Tick,
)
from ckptd.elastic.policy import JobSpec, Shape
from ckptd.errors import UsageError
from tests.elastic.driven import Driver, none, one, restart, with_sessions


@pytest.fixture
def driver() -> Driver:
    """Return three nodes in a job that runs; patience keeps it from beginning with one node."""
    d = Driver(gather_s=1.0, patience_s=1.0)
    d.up("a", "b", "c")
    assert d.machine.record is not None
    assert d.machine.record.shape == Shape(dp=3)
    d.hear(Progress(generation=1, step=1))
    assert d.machine.state is State.RUNNING
    return d


def test_a_generation_is_logged_before_it_is_started() -> None:
    d = Driver(gather_s=1.0, patience_s=1.0)
    d.up("a", "b", "c")
    assert [type(a) for a in d.actions[:2]] == [Append, Start]
    states = [d.machine.state]
    for name in "abc":
        d.hear(Loaded(node=name, generation=1))
        states.append(d.machine.state)
    assert states == [State.RESHARD, State.RESHARD, State.RESHARD, State.RESUME]
    d.hear(Progress(generation=1, step=5))
    assert (d.machine.state, d.machine.step) == (State.RUNNING, 5)


def test_a_stand_in_controller_leaves_out_whom_people_ordered_out(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("c",)))
    driver.hear(Saved(generation=1, step=1))
    restart(driver, "a", "b", "c")
    record = driver.machine.record
    assert record is not None
    assert (record.nodes, record.out) == ({"a", "b"}, ("c",))
    again = Driver(records=[record], grow_s=1.0)
    again.running.update(a=record.generation, b=record.generation)
    again.up("a", "b", "c")
    again.hear(Tick())
    again.hear(Progress(generation=record.generation, step=record.step + 1))
    assert none(again.pass_time(5, "a", "b", "c"), SaveNow)
    again.hear(Order(kind=OrderKind.ADD, nodes=("c",)))
    one(again.pass_time(5, "a", "b", "c"), SaveNow)  # it is taken in


def test_a_job_that_is_started_anew_has_all_its_nodes(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("c",)))
    driver.hear(Saved(generation=1, step=1))
    restart(driver, "a", "b", "c")
    assert driver.machine.record is not None
    assert driver.machine.record.out == ("c",)
    again = Driver(records=[driver.machine.record], settle_s=1.0, gather_s=5.0, lease_s=1.0)
    out = again.pass_time(5, "a", "b", "c")
    out += restart(again, "a", "b", "c")
    assert one(out, Start).record.nodes == {"a", "b", "c"}


def test_launchers_that_were_there_before_are_no_new_run(driver: Driver) -> None:
    """The last generation is of one node, which is cut off with the controller that began it."""
    driver.hear(Order(kind=OrderKind.EXCLUDE, nodes=("c",)))
    driver.hear(Saved(generation=1, step=1))
    driver.all_fenced("a", "b", "c")
    for name in "bc":
        driver.hear(NodeLost(node=name))
    restart(driver, "a")
    record = driver.machine.record
    assert record is not None
    assert record.nodes == {"a"}
    again = Driver("bcd", records=[record], settle_s=1.0, gather_s=1.0, lease_s=1.0)
    again.fenced = dict.fromkeys("bcd", 2)
    again.pass_time(5, "b", "c", "d")
    again.all_fenced("b", "c", "d")
    again.hear(Reseated(generation=again.machine.generation))
    again.pass_time(5, "b", "c", "d")
    assert again.machine.record is not None
    assert again.machine.record.nodes == {"b", "d"}
    assert again.machine.record.reason == "no heartbeat since the controller's restart from a"


@pytest.mark.parametrize("others", ["run", "have fenced"])
def test_a_node_that_came_back_under_a_stand_in_is_named(driver: Driver, others: str) -> None:
    """Node c was killed together with the controller, and its next launcher is there at once."""
    driver.hear(Saved(generation=1, step=1))
    assert driver.machine.record is not None
    again = Driver(records=[driver.machine.record])
    again.life["c"] = "2"
    generation = driver.machine.generation
    now = again.running if others == "run" else again.fenced
    now.update(a=generation, b=generation)
    again.up("a", "b", "c")
    again.pass_time(1, "a", "b", "c")
    record = one(restart(again, "a", "b", "c"), Start).record
    assert record.reason == "c came back without its workers"


def test_steps_that_were_lost_are_told(driver: Driver) -> None:
    driver.hear(Progress(generation=1, step=40))
    driver.hear(Ended(node="b", generation=1, code=-9))
    driver.all_fenced("a", "b", "c")
    for name, step in zip("ab", (40, 31), strict=True):
        assert none(driver.hear(Loaded(node=name, generation=3, step=step)), Tell)
    told = one(driver.hear(Loaded(node="c", generation=3, step=40)), Tell)
    assert told.text == "9 committed steps were lost: step 40 was promised, and step 31 found"
    assert (driver.machine.state, driver.machine.step) == (State.RESUME, 40)


def test_a_kill_that_is_told_late_is_the_cause_of_what_was_told_first(driver: Driver) -> None:
    driver.hear(Ended(node="a", generation=1, code=1, text="rank 0: its connection was closed"))
    driver.hear(Ended(node="b", generation=1, code=1, text="rank 1: its connection was closed"))
    driver.hear(Ended(node="b", generation=1, code=-9, text="rank 2: sent by somebody"))
    record = one(driver.all_fenced("a", "b", "c"), Start).record
    assert record.reason == "a worker on b ended with -9: rank 2: sent by somebody"
    window_s = driver.machine.settings.flap_window_s
    driver.pass_time(5, "a", "b", "c")
    faults = [driver.machine.nodes.recent(name, driver.now, window_s) for name in "ab"]
    assert faults == [0, 1], "it is the fault of no node that has failed because of it"
    driver.hear(Ended(node="c", generation=record.generation, code=-9))
    driver.hear(Ended(node="a", generation=record.generation, code=-9))
    assert "on c" in driver.machine.reason, "of two that were killed the first one is named"


def test_a_dead_worker_fences_all_and_the_same_nodes_go_on(driver: Driver) -> None:
    fence = one(driver.hear(Ended(node="b", generation=1, code=-9)), Fence)
    assert (fence.nodes, fence.generation) == (("a", "b", "c"), 2)
    assert none(driver.all_fenced("a", "b"), Start)  # c may still train
    record = one(driver.all_fenced("c"), Start).record
    assert (record.generation, record.shape, record.step) == (3, Shape(dp=3), 1)


def test_a_node_that_is_gone_is_replaced_by_fewer_replicas_and_grown_again(driver: Driver) -> None:
    driver.hear(Left(node="c"))
    driver.all_fenced("a", "b")
    record = one(driver.pass_time(2, "a", "b"), Start).record
    assert record.shape == Shape(dp=2)
    assert record.nodes == {"a", "b"}
    driver.hear(Progress(generation=record.generation, step=2))
    driver.life["c"], driver.running["c"] = "2", 0
    save = one(driver.pass_time(15, "a", "b", "c"), SaveNow)
    assert save.generation == record.generation
    driver.hear(Saved(generation=record.generation, step=9))
    grown = one(driver.all_fenced("a", "b", "c"), Start).record
    assert (grown.shape, grown.step) == (Shape(dp=3), 9)


def test_silence_is_a_fault_once_it_is_long(driver: Driver) -> None:
    assert none(driver.pass_time(4, "a", "b"), Fence)
    assert not none(driver.pass_time(2, "a", "b"), Fence)
    assert "no heartbeat from c" in driver.machine.reason
    record = one([*driver.all_fenced("a", "b"), *driver.pass_time(2, "a", "b")], Start).record
    assert record.nodes == {"a", "b"}


def test_a_controller_that_was_stopped_calls_nobody_silent(driver: Driver) -> None:
    """As by Ctrl-Z, with the launchers of its machine: they beat again when it looks again."""
    driver.pass_time(1, "a", "b", "c")
    assert none(driver.hear(Tick(away=60.0), 60.0), Fence)
    assert none(driver.pass_time(20, "a", "b", "c"), Fence)


def test_silence_goes_on_after_a_controller_was_stopped(driver: Driver) -> None:
    driver.pass_time(3, "a", "b")
    assert none(driver.hear(Tick(away=60.0), 60.0), Fence)
    assert not none(driver.pass_time(3, "a", "b"), Fence)
    assert "no heartbeat from c" in driver.machine.reason


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_launcher_that_is_stopped_here_is_missed_only_when_its_lease_ends(
    driver: Driver, goes_on: bool
) -> None:
    until = driver.now + driver.machine.settings.lease_s - 5
    while driver.now < until:
        driver.up("a", "b")
        assert none(driver.hear(Tick(stopped=frozenset("c")), 0.5), Fence)
    assert none(driver.pass_time(1, "a", "b"), Fence)  # it is not stopped any more
    assert none(driver.pass_time(9, "a", "b", *("c" if goes_on else "")), Fence) == goes_on


def test_without_a_sure_death_the_lease_is_waited_for() -> None:
    d = Driver("ad", gather_s=0.0, lease_s=30.0, silent_s=2.0)
    d.up("a")
    d.hear(Progress(generation=1, step=1))
    reseat = one(d.pass_time(3, "d"), Reseat)
    assert d.machine.state is State.FENCE
    # Where a reaches the log, it renews its lease as long as this controller has the seat.
    assert none(d.pass_time(40, "d"), Start)
    d.hear(Reseated(generation=reseat.generation - 1))  # of a fence before this one
    assert none(d.pass_time(40, "d"), Start)
    d.hear(Reseated(generation=reseat.generation))
    assert none(d.pass_time(28, "d"), Start)  # a may still train, by itself
    assert one(d.pass_time(3, "d"), Start).record.nodes == {"d"}


def test_the_seat_is_taken_again_after_a_node_was_heard_of_once_more() -> None:
    d = Driver("ad", gather_s=0.0, lease_s=30.0, silent_s=2.0)
    d.up("a")
    d.hear(Progress(generation=1, step=1))
    d.hear(Reseated(generation=one(d.pass_time(3, "d"), Reseat).generation))
    d.pass_time(5, "d")
    d.up("a")  # its lease is new, and so is the seat that it has heard of
    again = one(d.pass_time(5, "d"), Reseat)
    assert none(d.pass_time(40, "d"), Start)
    d.hear(Reseated(generation=again.generation))
    assert one(d.pass_time(31, "d"), Start).record.nodes == {"d"}


def test_a_node_whose_connection_broke_is_not_heard_though_it_spoke_a_moment_before() -> None:
    """A controller that hears three nodes, which do not hear it: they end their connections."""
    d = Driver("abcd")
    d.up("a", "b", "c", "d")
    d.pass_time(10, "a", "b", "c", "d")
    assert d.machine.hears(d.now, 2.0) == (4, 4)
    for name in "bcd":
        d.hear(NodeLost(node=name))
    assert d.machine.hears(d.now, 2.0, linked=True) == (1, 4)
    assert d.machine.hears(d.now, 2.0) == (4, 4), "signs for launchers change no sooner"


@pytest.mark.parametrize(
    ("others", "goes_on"), [("", ("a",)), ("b", ("a", "b")), ("bc", ("a", "b", "c"))]
)
def test_a_stand_in_goes_on_without_most_nodes_only_once_they_had_the_time_to_come(
    driver: Driver, others: str, goes_on: tuple[str, ...]
) -> None:
    """Its own worker fails at once. It took itself for the whole job, though most of it lived."""
    assert driver.machine.record is not None
    again = Driver(records=[driver.machine.record], settle_s=5.0)
    again.running = dict(driver.running)
    again.up("a")
    again.hear(Ended(node="a", generation=1, code=1))
    out = again.all_fenced("a")
    out += again.pass_time(0.4, "a")
    assert none(out, Append)
    again.up(*others)
    out = again.all_fenced(*others)
    out += again.pass_time(0.5 if others else 4.5, "a", *others)
    assert one(out, Append).record.nodes == set(goes_on)
    assert again.machine.hears(again.now + 5, 9.0, linked=True) == (len(goes_on), 3)


def test_who_wakes_up_with_old_workers_is_fenced(driver: Driver) -> None:
    driver.hear(Left(node="c"))
    driver.all_fenced("a", "b")
    driver.pass_time(2, "a", "b")
    fence = one(driver.hear(driver.said("c")), Fence)
    assert fence.nodes == ("c",)


def test_a_job_that_commits_nothing_is_given_up(driver: Driver) -> None:
    aborted = None
    for _ in range(8):
        generation = driver.machine.generation
        actions = driver.hear(Ended(node="abc"[generation % 3], generation=generation, code=1))
        aborted = next((a for a in actions if isinstance(a, Abort)), None)
        if aborted is not None:
            break
        driver.all_fenced("a", "b", "c")
        driver.pass_time(2, "a", "b", "c")
    assert aborted is not None
    assert aborted.kind == "no-progress"
    assert "Step 1 or a later one is committed." in aborted.text
    assert driver.machine.state is State.ABORTED
    assert driver.hear(Tick()) == []


def test_a_job_that_commits_a_step_a_generation_goes_on_for_ever(driver: Driver) -> None:
    for turn in range(12):
        generation = driver.machine.generation
        driver.hear(Progress(generation=generation, step=10 + turn))
        driver.hear(Ended(node="abc"[turn % 3], generation=generation, code=1), after=700.0)
        driver.up("a", "b", "c")
        driver.all_fenced("a", "b", "c")
        driver.pass_time(2, "a", "b", "c")
        assert driver.machine.state is State.RESHARD


def test_a_node_that_is_often_at_fault_is_left_out_while_others_suffice() -> None:
    d = Driver("abcd", gather_s=1.0, patience_s=1.0, flaps=2)
    d.up("d", "a", "b", "c")
    for _ in range(2):
        record = d.machine.record
        assert record is not None
        assert "a" in record.nodes
        generation = record.generation
        d.hear(Progress(generation=generation, step=d.machine.step + 1))
        d.hear(Ended(node="a", generation=generation, code=-9))
        d.all_fenced("a", "b", "c", "d")
        d.pass_time(2, "a", "b", "c", "d")
    record = d.machine.record
    assert record is not None
    assert record.nodes == {"b", "c", "d"}


def said_aloud(actions: Sequence[Action]) -> list[Tell]:
    return [a for a in actions if isinstance(a, Tell) and a.aloud]


def fail_twice(d: Driver, node: str, *names: str) -> list[Tell]:
    """Have a node fail twice, with steps between; return what launchers print of it."""
    told: list[Tell] = []
    for _ in range(2):
        generation = d.machine.generation
        d.hear(Progress(generation=generation, step=d.machine.step + 1))
        told += said_aloud(d.hear(Ended(node=node, generation=generation, code=-9)))
        told += said_aloud([*d.all_fenced(*names), *d.pass_time(2, *names)])
    return told


def test_every_launcher_says_who_is_left_out_until_when_why_and_what_ends_it() -> None:
    d = Driver("abcd", gather_s=1.0, patience_s=1.0, flaps=2)
    d.up("d", "a", "b", "c")
    (told,) = fail_twice(d, "a", "a", "b", "c", "d")
    assert told.nodes == ()
    assert told.text.startswith("node a is left out for 60 min, until ")
    assert told.text.endswith("UTC: it failed 2 times within 10 min")
    assert told.command == "ckptd ctl add a"
    # Its launcher is started again: that one prints it too, and no other one does.
    d.life["a"], d.running["a"], d.fenced["a"] = "2", 0, 0
    (again,) = said_aloud(d.hear(d.said("a")))
    assert again.nodes == ("a",)
    assert "it failed 2 times" in again.text
    assert said_aloud(d.hear(d.said("a"))) == []
    (ordered,) = said_aloud(d.hear(Order(kind=OrderKind.EXCLUDE, nodes=("b",), reason="hot")))
    assert ordered.text == "node b is left out until it is taken back: hot"


def test_a_node_that_no_other_one_replaces_is_not_left_out_while_the_job_gets_on() -> None:
    d = Driver("abc", gather_s=1.0, patience_s=1.0, flaps=2, grow_s=1.0)
    d.up("a", "b", "c")
    for _ in range(3):
        assert fail_twice(d, "a", "a", "b", "c") == []
        assert d.machine.record is not None
        assert d.machine.record.nodes == {"a", "b", "c"}


def test_it_is_left_out_for_a_short_time_in_place_of_the_job_being_given_up() -> None:
    d = Driver("abc", gather_s=1.0, patience_s=1.0, flaps=2, grow_s=1.0)
    d.up("a", "b", "c")
    told: list[Tell] = []
    for _ in range(d.machine.settings.cycles + 1):
        told += said_aloud(d.hear(Ended(node="a", generation=d.machine.generation, code=-9)))
        told += said_aloud([*d.all_fenced("a", "b", "c"), *d.pass_time(2, "a", "b", "c")])
        if told:
            break
    assert "for 5 min" in told[0].text
    d.hear(Progress(generation=d.machine.generation, step=d.machine.step + 1))
    assert d.machine.record is not None
    assert d.machine.record.nodes == {"b", "c"}
    d.pass_time(200, "a", "b", "c")
    assert d.machine.state is State.RUNNING
    d.pass_time(200, "a", "b", "c")
    d.all_fenced("a", "b", "c")
    d.pass_time(5, "a", "b", "c")
    assert d.machine.record.nodes == {"a", "b", "c"}


def test_a_suspected_node_that_the_job_needs_is_used_again() -> None:
    d = Driver("a", gather_s=1.0, patience_s=1.0)
    d.up("a")
    event = Suspected(nodes=("a",), generation=d.machine.generation, reason="it hangs")
    (told,) = said_aloud(d.hear(event))
    assert told.text == "node a is used again, as no other can take its place: it hangs"
    d.all_fenced("a")
    d.pass_time(3, "a")
    assert d.machine.record is not None
    assert d.machine.record.nodes == {"a"}


def test_a_worker_that_fails_because_another_node_is_lost_is_no_fault_of_its_node() -> None:
    d = Driver("abcd", gather_s=1.0, patience_s=1.0, flaps=1)
    d.up("d", "a", "b", "c")
    d.hear(Ended(node="a", generation=d.machine.generation, code=1))
    d.all_fenced("a", "b", "c", "d")
    d.hear(NodeLost(node="b"), after=0.5)
    d.all_fenced("a", "c", "d")
    d.pass_time(5, "a", "c", "d")
    record = d.machine.record
    assert record is not None
    assert record.nodes == {"a", "c", "d"}
    assert not d.machine.nodes["a"].faults
    assert d.machine.nodes["b"].faults


@pytest.mark.parametrize("stand_in", [False, True])
def test_the_node_that_is_lost_is_told_before_the_worker_that_failed_because_of_it(
    stand_in: bool,
) -> None:
    """A stand-in has never heard the node that was lost with the controller before it."""
    d = Driver("abcd", gather_s=1.0, patience_s=1.0, flaps=1)
    d.up("a", "b", "c")
    if stand_in:
        assert d.machine.record is not None
        running, record = d.running, d.machine.record
        d = Driver("abcd", records=[record], gather_s=1.0, patience_s=1.0, flaps=1)
        d.running = running
        d.up("a", "b")
    d.hear(Ended(node="a", generation=1, code=1))
    if not stand_in:
        d.hear(NodeLost(node="c"))
    d.all_fenced("a", "b")
    d.pass_time(5, "a", "b")
    assert d.machine.record is not None
    assert d.machine.record.nodes == {"a", "b"}
    lost = "no heartbeat from c" if stand_in else "the connection to c broke"
    assert d.machine.record.reason.startswith(f"{lost}; a worker on a ended with 1")
    assert not d.machine.nodes["a"].faults


def test_a_worker_that_fails_by_itself_costs_its_node_a_fault_a_little_later() -> None:
    d = Driver("abcd", gather_s=1.0, patience_s=1.0, flaps=1)
    d.up("d", "a", "b", "c")
    d.hear(Ended(node="a", generation=d.machine.generation, code=1))
    d.all_fenced("a", "b", "c", "d")
    d.pass_time(6, "a", "b", "c", "d")
    d.all_fenced("a", "b", "c", "d")
    d.pass_time(6, "a", "b", "c", "d")
    record = d.machine.record
    assert record is not None
    assert record.nodes == {"b", "c", "d"}


def test_drain_saves_first_and_leaves_the_node_out(driver: Driver) -> None:
    one(driver.hear(Order(kind=OrderKind.DRAIN, nodes=("a",), reason="maintenance")), SaveNow)
    assert driver.machine.state is State.SUSPECT
    driver.hear(Saved(generation=1, step=7))
    out = [*driver.all_fenced("a", "b", "c"), *driver.pass_time(2, "a", "b", "c")]
    record = one(out, Start).record
    assert record.nodes == {"b", "c"}
    assert (record.step, record.reason) == (7, "maintenance")


def test_a_save_that_does_not_come_does_not_hold_up_a_restart(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.RESTART))
    assert not none(driver.pass_time(31, "a", "b", "c"), Fence)


def test_a_job_that_tells_nothing_is_not_waited_for_to_save() -> None:
    # Each order cost a plain script half a minute.
    d = Driver(steady_s=1.0)
    d.up("a", "b", "c")
    d.pass_time(3, "a", "b", "c")
    assert d.machine.state is State.RUNNING
    actions = d.hear(Order(kind=OrderKind.RESTART))
    assert none(actions, SaveNow)
    assert d.machine.state is State.FENCE


def test_pause_and_resume(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.PAUSE))
    driver.hear(Saved(generation=1, step=4))
    driver.all_fenced("a", "b", "c")
    assert driver.machine.state is State.PARKED
    assert none(driver.pass_time(60, "a", "b", "c"), Start)
    out = driver.hear(Order(kind=OrderKind.RESUME))
    assert one(out, Start).record.step == 4


def test_stop_ends_the_job_once_all_are_fenced(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.STOP, reason="enough"))
    driver.hear(Saved(generation=1, step=4))
    aborted = one(driver.all_fenced("a", "b", "c"), Abort)
    assert (aborted.kind, aborted.text) == (
        "stopped",
        "stopped: enough. Step 4 or a later one is committed.",
    )


def test_whom_the_monitor_names_is_left_out(driver: Driver) -> None:
    driver.hear(Suspected(nodes=("b",), reason="rank 1 hangs: stopped"))
    out = [*driver.all_fenced("a", "b", "c"), *driver.pass_time(2, "a", "b", "c")]
    record = one(out, Start).record
    assert record.nodes == {"a", "c"}
    assert record.reason == "rank 1 hangs: stopped"


def test_all_workers_that_return_end_the_job(driver: Driver) -> None:
    for name in "ab":
        assert none(driver.hear(Ended(node=name, generation=1, code=0)), Finish)
    one(driver.hear(Ended(node="c", generation=1, code=0)), Finish)
    assert driver.machine.state is State.DONE


def test_a_controller_that_comes_back_lets_training_go_on(driver: Driver) -> None:
    record = driver.machine.record
    assert record is not None
    again = Driver(records=[record])
    again.running = dict(driver.running)
    again.up("a", "b")
    assert again.machine.state is State.SUSPECT
    again.up("c")
    again.hear(Tick())
    assert again.machine.state is State.RESUME
    again.hear(Progress(generation=1, step=30))
    assert (again.machine.state, again.machine.step) == (State.RUNNING, 30)


def test_a_controller_that_comes_back_fences_if_somebody_is_missing(driver: Driver) -> None:
    record = driver.machine.record
    assert record is not None
    again = Driver(records=[record])
    again.running = dict(driver.running)
    assert not none(again.pass_time(8, "a", "b"), Fence)
    assert "c" in again.machine.reason


@pytest.mark.parametrize(
    ("heard", "late", "waits", "why"),
    [
        ("ab", "", 0.5, "; no heartbeat from c"),
        ("a", "b", 0.5, "; no heartbeat from c"),
        ("a", "", 0.5, "; no heartbeat from b, c"),
        ("ab", "c", 0.5, ""),
        ("abc", "", 2.0, ""),
    ],
)
def test_who_does_not_come_to_a_stand_in_is_why_a_collective_failed(
    driver: Driver, heard: str, late: str, waits: float, why: str
) -> None:
    """Nodes that come while the others are being stopped are not lost."""
    record = driver.machine.record
    assert record is not None
    again = Driver(records=[record])
    again.running = dict(driver.running)
    again.up(*heard)
    began = again.now
    again.hear(Broken(node="a", generation=1, reason="a collective failed"))
    while none(again.hear(Tick(), 0.05), Fence):
        again.up(*heard, after=0.0)
    assert waits <= again.now - began < waits + 0.2
    again.up(*late)
    out = again.all_fenced(*heard, *late)
    out += again.pass_time(6, *heard, *late)
    reason = f"a: a collective failed{why}"
    assert one(out, Append).record.reason == reason
    again.hear(Progress(generation=again.machine.generation, step=99))
    splitter = Splitter()
    for move in again.machine.moves():
        splitter.moved(move)
    assert [recovery.cause for recovery in splitter.recoveries] == [reason]


def test_what_a_lost_controller_had_begun_is_not_begun_again_under_its_number(
    driver: Driver,
) -> None:
    record = driver.machine.record
    assert record is not None
    again = Driver(records=[record])
    again.fenced = dict.fromkeys("abc", 41)
    again.up("a", "b", "c")
    again.all_fenced("a", "b")
    assert one(again.all_fenced("c"), Start).record.generation == 43


@pytest.mark.parametrize("known", [{"running": 7}, {"fenced": 7}])
def test_an_empty_log_is_refused_over_a_job_that_has_begun(known: dict[str, int]) -> None:
    d = Driver()
    refused = one(d.hear(NodeUp(node="a", life="1", slots=1, **known)), Refuse)
    assert "the membership log is empty" in refused.text
    assert "generation 7" in refused.text
    assert d.hear(Tick()) == []


def test_levels_go_deeper_until_something_is_committed(driver: Driver) -> None:
    machine = driver.machine
    levels = []
    for turn in range(3):
        with_sessions(driver, "a", "b", "c")
        fence = one(
            driver.hear(Ended(node="abc"[turn], generation=machine.generation, code=1)), Fence
        )
        levels.append((fence.level, one(restart(driver, "a", "b", "c"), Start).level))
    assert levels == [(0, 0), (1, 1), (1, 1)]  # there is nothing deeper than 1 here
    driver.hear(Progress(generation=machine.generation, step=2))
    with_sessions(driver, "a", "b", "c")
    fence = one(driver.hear(Order(kind=OrderKind.RESTART)), Fence)
    assert fence.level == 0
    assert machine.record is not None
    assert (machine.record.failures, machine.record.fruitless) == (3, 2)


def test_launchers_that_are_started_anew_count_as_heard() -> None:
    """Else a node that is cut off takes the place of the controller that has just ordered this."""
    d = Driver(gather_s=1.0, levels=3, flaps=99, relaunch_s=8.0)
    d.up("a", "b", "c")
    d.hear(Ended(node="a", generation=1, code=1))
    one(d.all_fenced("a", "b", "c"), Relaunch)
    assert d.machine.hears(d.now, 2.0) == (3, 3)
    d.pass_time(5)
    assert d.machine.hears(d.now, 2.0) == (3, 3)
    d.pass_time(5)  # as long as that may take
    assert d.machine.hears(d.now, 2.0) == (0, 3)


def test_launchers_are_started_anew_at_level_two_and_the_job_at_three() -> None:
    d = Driver(gather_s=1.0, levels=3, flaps=99)
    d.up("a", "b", "c")
    d.hear(Ended(node="a", generation=1, code=1))
    assert one(d.all_fenced("a", "b", "c"), Relaunch).nodes == ("a", "b", "c")
    assert none(d.pass_time(5, "a", "b", "c"), Start)  # the old ones are about to go
    for name in "abc":
        d.life[name], d.running[name], d.fenced[name] = "2", 0, 0
    d.up("a", "b")
    assert d.machine.state is State.PLAN
    d.up("c")
    assert one(d.actions, Start).level == 2
    d.hear(Ended(node="b", generation=d.machine.generation, code=7))
    aborted = one(d.all_fenced("a", "b", "c"), Abort)
    assert (aborted.kind, aborted.code) == ("requeue", 7)


def test_a_job_that_was_submitted_again_is_given_up_after_some_times() -> None:
    record = None
    for turn in range(4):
        d = Driver(records=[record] if record else [], gather_s=1.0, levels=3, flaps=99)
        if record is not None:  # all of it is new, and nobody runs anything
            d.up("a", "b", "c")
            d.pass_time(6, "a", "b", "c")
            d.all_fenced("a", "b", "c")
        d.up("a", "b", "c")
        ended = []
        while not ended:
            ended = [
                a
                for a in d.hear(Ended(node="a", generation=d.machine.generation, code=1))
                if isinstance(a, Abort)
            ]
            d.life = dict.fromkeys("abc", str(turn * 10 + d.machine.generation))
            ended += [a for a in d.all_fenced("a", "b", "c") if isinstance(a, Abort)]
            d.running, d.fenced = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
            if not ended:
                d.up("a", "b", "c")
        record = d.machine.record
        if ended[0].kind == "no-progress":
            break
        assert ended[0].kind == "requeue"
    assert ended[0].kind == "no-progress"


def test_nodes_that_are_there_are_not_called_missing_when_a_job_is_run_again() -> None:
    d = Driver(gather_s=1.0)
    d.up("a", "b", "c")
    record = d.machine.record
    assert record is not None
    for there, said in (
        ("abc", "the job was started again"),
        ("ab", "the job was started again, without c"),
    ):
        again = Driver(records=[record], settle_s=1.0, gather_s=1.0)
        again.up(*there)
        again.pass_time(6, *there)
        assert again.machine.reason == said


def test_only_faults_count_against_max_restarts() -> None:
    d = Driver(gather_s=1.0, max_restarts=1)
    d.up("a", "b", "c")
    for step in range(1, 4):
        d.hear(Progress(generation=d.machine.generation, step=step))
        d.hear(Order(kind=OrderKind.RESTART))
        d.hear(Saved(generation=d.machine.generation, step=step))
        restart(d, "a", "b", "c")
    d.hear(Progress(generation=d.machine.generation, step=9))
    assert none(d.hear(Ended(node="a", generation=d.machine.generation, code=3)), Abort)
    restart(d, "a", "b", "c")
    d.hear(Progress(generation=d.machine.generation, step=10))
    aborted = one(d.hear(Ended(node="b", generation=d.machine.generation, code=5)), Abort)
    assert (aborted.kind, aborted.code) == ("max-restarts", 5)


def test_a_lost_connection_is_silence_at_once(driver: Driver) -> None:
    fence = one(driver.hear(NodeLost(node="c")), Fence)
    assert fence.nodes == ("a", "b")
    assert one(restart(driver, "a", "b"), Start).record.nodes == {"a", "b"}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_of_which_nothing_is_heard_while_a_cause_is_awaited_is_named(
    driver: Driver, stopped: bool
) -> None:
    """Node c is stopped, its worker is killed, and no process is there that could report it."""
    driver.pass_time(1, "a", "b", "c")
    driver.hear(Broken(node="a", generation=1, reason="closed by its peer"))
    driver.pass_time(3, "a", "b", *(() if stopped else "c"))
    record = one(restart(driver, "a", "b", "c"), Start).record
    said = "; no heartbeat from c" if stopped else ""
    assert record.reason == f"a: closed by its peer{said}"


def test_a_broken_collective_waits_for_its_cause(driver: Driver) -> None:
    driver.hear(Broken(node="a", generation=1, reason="connection reset"))
    fence = one(driver.hear(Ended(node="b", generation=1, code=-9)), Fence)
    assert "b ended" in driver.machine.reason
    assert fence.generation == 2


def test_a_broken_collective_without_a_cause_is_a_fault(driver: Driver) -> None:
    driver.hear(Broken(node="a", generation=1, reason="connection reset"))
    assert none(driver.pass_time(1.5, "a", "b", "c"), Fence)
    assert not none(driver.pass_time(1.5, "a", "b", "c"), Fence)
    assert driver.machine.reason == "a: connection reset"


def test_a_node_that_will_be_taken_away_is_saved_from_and_left_out(driver: Driver) -> None:
    one(driver.hear(Notice(node="b", seconds=10.0, reason="pre-empted")), SaveNow)
    driver.hear(Saved(generation=1, step=5))
    record = one(restart(driver, "a", "b", "c"), Start).record
    assert (record.nodes, record.step) == ({"a", "c"}, 5)
    driver.life["b"], driver.fenced["b"] = "2", 0  # another machine, under its name
    driver.hear(Progress(generation=record.generation, step=6))
    assert not none(driver.pass_time(15, "a", "b", "c"), SaveNow)


def test_what_cannot_do_without_a_node_only_saves_when_it_will_be_taken_away() -> None:
    d = Driver("a", gather_s=0.0)
    d.up("a")
    d.hear(Progress(generation=1, step=1))
    actions = d.hear(Notice(node="a", seconds=10.0))
    assert not none(actions, SaveNow)
    assert d.machine.state is State.RUNNING


def test_sessions_that_commit_each_step_grow_without_a_save(driver: Driver) -> None:
    driver.hear(Left(node="c"))
    record = one(restart(driver, "a", "b"), Start).record
    with_sessions(driver, "a", "b")
    for step in (2, 3):
        driver.hear(Progress(generation=record.generation, step=step))
    driver.life["c"], driver.running["c"], driver.fenced["c"] = "2", 0, 0
    out: list[Action] = []
    for _ in range(15):
        with_sessions(driver, "a", "b")
        out += driver.hear(driver.said("c"))
        out += driver.hear(Tick(), 1.0)
    assert none(out, SaveNow)
    assert next(a for a in out if isinstance(a, Fence) and a.level == 0)


def test_who_is_drained_saves_first_also_where_each_step_is_kept_in_memory(driver: Driver) -> None:
    # Its memory goes with it, and may hold the only copy of its part.
    with_sessions(driver, "a", "b", "c")
    for step in (2, 3):
        driver.hear(Progress(generation=1, step=step))
    with_sessions(driver, "a", "b", "c")
    one(driver.hear(Order(kind=OrderKind.DRAIN, nodes=("a",))), SaveNow)
    driver.hear(Saved(generation=1, step=4))
    assert driver.machine.state is State.FENCE
    assert driver.machine.level == 0


def test_a_job_that_tells_nothing_is_taken_to_run() -> None:
    d = Driver(gather_s=1.0, steady_s=30.0)
    d.up("a", "b", "c")
    d.pass_time(31, "a", "b", "c")
    assert d.machine.state is State.RUNNING
    (began,) = [m for m in d.machine.moves() if m.state is State.RUNNING]
    assert 29.0 <= began.quiet_s <= 31.0  # in which it trained, for all that is known
    for _ in range(6):  # and each time it has made progress, for all that is known
        d.hear(Ended(node="a", generation=d.machine.generation, code=1), after=700.0)
        d.up("a", "b", "c")
        restart(d, "a", "b", "c")
        d.pass_time(31, "a", "b", "c")
        assert d.machine.state is State.RUNNING


def test_the_first_start_waits_for_the_planned_world() -> None:
    d = Driver("ab", gather_s=20.0)
    d.up("a", "b")
    assert none(d.pass_time(15, "a", "b"), Start)
    assert one(d.pass_time(10, "a", "b"), Start).record.shape == Shape(dp=2)


def test_the_first_start_waits_for_a_node_that_is_about_to_be_ready() -> None:
    d = Driver("abc", gather_s=5.0)
    d.up("a", "b")
    for _ in range(40):
        d.hear(NodeUp(node="c", life="1", slots=0))
        assert none(d.pass_time(1, "a", "b"), Start)
    assert one(d.hear(d.said("c")), Start).record.nodes == {"a", "b", "c"}


def test_the_first_start_waits_for_no_node_without_end() -> None:
    d = Driver("abc", gather_s=5.0)
    d.up("a", "b")
    for _ in range(80):
        d.hear(NodeUp(node="c", life="1", slots=0))
        d.pass_time(1, "a", "b")
    assert d.machine.record is not None
    assert d.machine.record.nodes == {"a", "b"}


def test_fewer_ranks_than_asked_for_are_refused_with_what_was_there() -> None:
    d = Driver("ab", gather_s=1.0, nodes_s=20.0)
    d.machine.job = JobSpec(microbatches=6, planned=Shape(dp=3), least=3)
    d.up("a", "b")
    aborted = one(d.pass_time(30, "a", "b"), Abort)
    assert aborted.kind == "no-nodes"
    assert "2 slots on 2 nodes" in aborted.text
    assert "3 slots at least" in aborted.text
    assert "Bring nodes back" in aborted.text


def test_who_does_not_come_out_is_killed_and_who_does_not_kill_is_left_to_its_lease(
    driver: Driver,
) -> None:
    with_sessions(driver, "a", "b", "c")
    assert one(driver.hear(Ended(node="a", generation=1, code=-9)), Fence).level == 0
    driver.all_fenced("a", "b")
    fences = [a for a in driver.pass_time(12, "a", "b", "c") if isinstance(a, Fence)]
    assert {a.level for a in fences if a.nodes == ("c",)} == {0, 1}
    out = driver.pass_time(15, "a", "b", "c")
    assert one(out, Start).record.nodes == {"a", "b"}
    assert not driver.machine.may_renew("c")


def test_a_member_that_runs_nothing_and_does_not_say_why_is_a_fault(driver: Driver) -> None:
    driver.running["b"], driver.fenced["b"] = 0, 1
    assert none(driver.pass_time(4, "a", "b", "c"), Fence)
    assert not none(driver.pass_time(3, "a", "b", "c"), Fence)
    assert driver.machine.reason == "the workers of b are gone"


# What the simulations found; each was mended.


def says(node: str, code: int, place: str = "here", **more: object) -> Ended:
    """A program of one rank has ended before its first step."""
    fields = {"generation": 0, "program": True, "place": place} | more
    return Ended(node=node, code=code, **fields)  # type: ignore[arg-type]


def fails(driver: Driver, node: str, code: int, **more: object) -> list[Action]:
    """Let it end so in the generation that runs; return what follows, a restart included."""
    event = says(node, code, generation=driver.machine.generation, **more)  # type: ignore[arg-type]
    out = list(driver.hear(event))
    if driver.machine.state is not State.ABORTED:
        out += restart(driver, *"abc")
    return out


def begun(**settings: object) -> Driver:
    """Return three nodes whose generation has made no step yet."""
    driver = Driver(gather_s=1.0, patience_s=1.0, **settings)  # type: ignore[arg-type]
    driver.up(*"abc")
    assert driver.machine.generation == 1
    return driver


def test_a_code_from_the_same_place_on_two_nodes_ends_the_job() -> None:
    driver = begun()
    assert none(fails(driver, "a", 7), Abort)
    abort = one(fails(driver, "b", 7), Abort)
    assert (abort.kind, abort.code) == ("exit-code", 7)


@pytest.mark.parametrize(
    ("node", "code", "more"),
    [
        ("b", 8, {}),
        ("b", 7, {"place": "elsewhere"}),
        ("b", 7, {"stepped": True}),
        ("b", 7, {"program": False}),
        ("b", -9, {"place": ""}),
    ],
)
def test_what_is_not_the_same_end_again_is_restarted(
    node: str, code: int, more: dict[str, object]
) -> None:
    driver = begun()
    fails(driver, "a", 7)
    assert none(fails(driver, node, code, **more), Abort)


def test_pythons_own_code_says_nothing_without_the_place() -> None:
    driver = begun()
    fails(driver, "a", 1, place="")
    assert none(fails(driver, "b", 1, place=""), Abort)


def test_a_node_alone_with_its_end_is_left_out_and_the_job_goes_on() -> None:
    driver = begun()
    for _ in range(2):
        assert none(fails(driver, "b", 7), Abort)
    assert driver.machine.members == {"a", "c"}


def test_a_loss_that_explains_an_end_makes_it_no_saying() -> None:
    driver = begun()
    driver.hear(says("a", 7, generation=driver.machine.generation))
    driver.hear(NodeLost(node="c"))
    restart(driver, *"ab")
    event = says("b", 7, generation=driver.machine.generation)
    assert none(driver.hear(event), Abort)


def test_named_codes_end_the_job_whenever_they_come() -> None:
    driver = begun(no_restart_on="3,64-78")
    driver.hear(Progress(generation=1, step=1))
    abort = one(fails(driver, "a", 70, stepped=True), Abort)
    assert (abort.kind, abort.code) == ("exit-code", 70)


def test_who_fails_after_others_have_ended_well_restarts_nothing(driver: Driver) -> None:
    generation = driver.machine.generation
    driver.hear(Ended(node="a", generation=generation, code=0))
    assert none(driver.hear(Ended(node="b", generation=generation, code=-9)), Fence)
    assert none(driver.pass_time(20, *"abc"), Fence)
    abort = one(driver.hear(Ended(node="c", generation=generation, code=0)), Abort)
    assert (abort.kind, abort.code) == ("exit-code", -9)


def test_a_second_failure_after_others_have_ended_well_restarts(driver: Driver) -> None:
    generation = driver.machine.generation
    driver.hear(Ended(node="a", generation=generation, code=0))
    driver.hear(Ended(node="b", generation=generation, code=-9))
    assert one(driver.hear(Ended(node="c", generation=generation, code=1)), Fence)


@pytest.mark.parametrize("bad", ["0", "256", "7-3", "a", "1,,x", "-1", "9" * 30])
def test_what_is_no_exit_code_is_refused(bad: str) -> None:
    with pytest.raises(UsageError):
        ExitCodes(bad)


def test_exit_codes_are_read() -> None:
    codes = ExitCodes("2, 64-78,139,none")
    assert [code in codes for code in (1, 2, 63, 64, 78, 79, -11, -9)] == [
        *(False, True, False, True, True, False, True, False)
    ]
    assert not codes.repeat
    assert ExitCodes("repeat").repeat
    assert ExitCodes("").repeat
