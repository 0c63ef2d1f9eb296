from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from ckptd.elastic.membership import Record
from ckptd.elastic.messages import (
    Abort,
    Action,
    Append,
    Ended,
    Event,
    Fence,
    Fenced,
    Finish,
    Left,
    Loaded,
    NodeUp,
    Order,
    OrderKind,
    Progress,
    Refuse,
    Save,
    Saved,
    Start,
    Suspected,
    Tick,
)
from ckptd.elastic.policy import Job, Shape
from ckptd.elastic.statemachine import ControllerSettings, State, StateMachine
from tests.elastic.simulation import run

JOB = Job(microbatches=6, planned=Shape(dp=3))
A = TypeVar("A", bound=Action)


class Driver:
    """Hands events to a machine and remembers what it wants."""

    def __init__(
        self, names: str = "abc", records: Sequence[Record] = (), **settings: float
    ) -> None:
        self.now = 0.0
        self.machine = StateMachine(JOB, ControllerSettings(**settings), records, self.now)  # type: ignore[arg-type]
        self.actions: list[Action] = []
        self.life = dict.fromkeys(names, "1")
        self.running = dict.fromkeys(names, 0)
        self.fenced = dict.fromkeys(names, 0)

    def hear(self, event: Event, after: float = 0.01) -> list[Action]:
        self.now += after
        self.actions = self.machine.handle(event, self.now)
        for action in self.actions:
            if isinstance(action, Start):
                for node in action.record.nodes:
                    self.running[node] = action.record.generation
        return self.actions

    def up(self, *names: str, after: float = 0.01) -> None:
        for name in names:
            self.hear(self.said(name), after)

    def said(self, name: str) -> NodeUp:
        return NodeUp(
            node=name,
            life=self.life[name],
            slots=1,
            running=self.running[name],
            fenced=self.fenced[name],
        )

    def all_fenced(self, *names: str) -> list[Action]:
        """Have nodes say that they have killed what they ran; return all that follows."""
        out: list[Action] = []
        for name in names:
            self.running[name], self.fenced[name] = 0, self.machine.generation
            out += self.hear(Fenced(node=name, generation=self.machine.generation))
        return out

    def pass_time(self, seconds: float, *alive: str) -> list[Action]:
        """Let time pass while these nodes beat; return what is wanted meanwhile."""
        out: list[Action] = []
        until = self.now + seconds
        while self.now < until:
            for name in alive:
                out += self.hear(self.said(name), 0.0)
            out += self.hear(Tick(), 0.5)
        return out


def one(actions: Sequence[Action], kind: type[A]) -> A:
    found = [a for a in actions if isinstance(a, kind)]
    assert len(found) == 1, actions
    return found[0]


def none(actions: Sequence[Action], kind: type[Action]) -> bool:
    return not any(isinstance(a, kind) for a in actions)


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
    save = one(driver.pass_time(15, "a", "b", "c"), Save)
    assert save.generation == record.generation
    driver.hear(Saved(generation=record.generation, step=9))
    grown = one(driver.all_fenced("a", "b", "c"), Start).record
    assert (grown.shape, grown.step) == (Shape(dp=3), 9)


def test_silence_is_a_fault_once_it_is_long(driver: Driver) -> None:
    assert none(driver.pass_time(4, "a", "b"), Fence)
    assert not none(driver.pass_time(2, "a", "b"), Fence)
    assert "nothing is heard of c" in driver.machine.reason
    record = one([*driver.all_fenced("a", "b"), *driver.pass_time(2, "a", "b")], Start).record
    assert record.nodes == {"a", "b"}


def test_without_a_sure_death_the_lease_is_waited_for() -> None:
    d = Driver("ad", gather_s=0.0, lease_s=30.0, silent_s=2.0)
    d.up("a")
    d.hear(Progress(generation=1, step=1))
    d.pass_time(3, "d")
    assert d.machine.state is State.FENCE
    assert none(d.pass_time(20, "d"), Start)  # a may still train, by itself
    assert one(d.pass_time(15, "d"), Start).record.nodes == {"d"}


def test_who_wakes_up_with_old_workers_is_fenced(driver: Driver) -> None:
    driver.hear(Left(node="c"))
    driver.all_fenced("a", "b")
    driver.pass_time(2, "a", "b")
    fence = one(driver.hear(driver.said("c")), Fence)
    assert fence.nodes == ("c",)


def test_a_job_that_commits_nothing_is_given_up(driver: Driver) -> None:
    aborted = None
    for _ in range(6):
        generation = driver.machine.generation
        actions = driver.hear(Ended(node="abc"[generation % 3], generation=generation, code=1))
        aborted = next((a for a in actions if isinstance(a, Abort)), None)
        if aborted is not None:
            break
        driver.all_fenced("a", "b", "c")
        driver.pass_time(2, "a", "b", "c")
    assert aborted is not None
    assert aborted.kind == "no-progress"
    assert "The last committed step is 1." in aborted.text
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
        d.hear(Ended(node="a", generation=generation, code=1))
        d.all_fenced("a", "b", "c", "d")
        d.pass_time(2, "a", "b", "c", "d")
    record = d.machine.record
    assert record is not None
    assert record.nodes == {"b", "c", "d"}


def test_drain_saves_first_and_leaves_the_node_out(driver: Driver) -> None:
    one(driver.hear(Order(kind=OrderKind.DRAIN, nodes=("a",), reason="maintenance")), Save)
    assert driver.machine.state is State.SUSPECT
    driver.hear(Saved(generation=1, step=7))
    out = [*driver.all_fenced("a", "b", "c"), *driver.pass_time(2, "a", "b", "c")]
    record = one(out, Start).record
    assert record.nodes == {"b", "c"}
    assert (record.step, record.reason) == (7, "maintenance")


def test_a_save_that_does_not_come_does_not_hold_up_a_restart(driver: Driver) -> None:
    driver.hear(Order(kind=OrderKind.RESTART))
    assert not none(driver.pass_time(31, "a", "b", "c"), Fence)


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
        "stopped: enough. The last committed step is 4.",
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
    assert refused.kind == "lost-log"
    assert "generation 7" in refused.text
    assert d.hear(Tick()) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_faults(seed: int) -> None:
    run(seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_faults() -> None:
    for seed in range(10_000, 20_000):
        run(seed)
