"""Rules for saving and keeping."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.root.index import seconds_of, stamp
from ckptd.checkpoint.root.policy import Every, Keep, select, unmet
from ckptd.errors import CorruptError, UsageError


def commit(step: int, created: str = "2026-01-01T00:00:00Z", **metadata: object) -> Commit:
    return Commit(step, 1, "a", "", (), "", "", 0, "", created, 1, 0, metadata)


def kept(commits: list[Commit], keep: Keep) -> list[int]:
    return [n.step for n in select(commits, keep).kept]


ALL = [commit(s) for s in (5, 100, 150, 200, 299, 310, 420)]


def test_a_metric_that_no_checkpoint_has_is_named_with_those_that_exist() -> None:
    keep = Keep(last=1, best=("loss", "min", 1))
    three = [commit(s, val_loss=1.0, epoch=s, note="x") for s in (1, 2, 3)]
    assert unmet(three[:2], keep) == []  # no more than the rule keeps where all have it
    assert unmet(three, keep) == [
        "no checkpoint has the metric loss, so each waits and stays; there: epoch, val_loss"
    ]
    assert unmet([commit(s) for s in (1, 2, 3)], keep)[0].endswith("; there: no numbers")
    assert unmet([*three, commit(4, loss=None)], keep) == []
    assert unmet(three, Keep(last=None, best=("loss", "min", 1))) == []
    assert unmet(three, Keep(last=1)) == []


# -- Every -----------------------------------------------------------------------------------------


def test_every_steps() -> None:
    rule = Every(steps=50)
    due, last = [], None
    for step in range(201):
        if rule.due(step, last):
            due.append(step)
            last = step
    assert due == [50, 100, 150, 200]


def test_every_steps_at_the_first_step_after_a_multiple() -> None:
    rule = Every.of(50)
    assert rule.due(51, 49)
    assert not rule.due(99, 51)
    assert rule.due(100, 51)
    assert not rule.due(100, 100)
    assert not rule.due(60, 100)


def test_every_minutes() -> None:
    rule = Every(minutes=0.5)
    assert rule.by_clock
    assert not rule.late(29.9)
    assert rule.late(30.0)
    assert not rule.due(7, 6)
    both = Every(steps=10, minutes=1)
    assert both.due(10, 9)
    assert not both.due(11, 10)
    assert both.late(60.0)
    assert not Every(steps=10).by_clock
    assert not Every(steps=10).late(1e9)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"steps": 0}, {"steps": -1}, {"steps": True}, {"steps": 1.5}, {"minutes": 0}],
)
def test_every_refuses_nonsense(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError) as info:
        Every(**arguments)  # type: ignore[arg-type]
    assert any(name in info.value.message for name in arguments or {"steps or minutes"})


# -- Keep ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0},
        {"last": "3"},
        {"last": True},
        {"every_steps": 0},
        {"every": timedelta(0)},
        {"every": 60},
        {"best": ("loss", "least", 3)},
        {"best": ("loss", "min", 0)},
        {"best": "loss"},
    ],
)
def test_keep_refuses_nonsense(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as info:
        Keep(**arguments)  # type: ignore[arg-type]
    assert any(name in info.value.message for name in arguments)


def test_keep_of() -> None:
    assert Keep.of(3) == Keep() == Keep(last=3)
    assert Keep.of(None) == Keep(last=None)
    rule = Keep(last=1, every_steps=100)
    assert Keep.of(rule) is rule


def test_keep_travels_between_processes() -> None:
    rule = Keep(last=1, every_steps=7, every=timedelta(hours=1), best=("loss", "min", 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Keep) == rule


def test_last() -> None:
    assert kept(ALL, Keep(last=2)) == [310, 420]
    assert kept(ALL, Keep(last=None)) == [c.step for c in ALL]
    assert kept(ALL, Keep(last=99)) == [c.step for c in ALL]
    assert kept([], Keep(last=2)) == []


def test_every_steps_keeps_the_first_after_each_multiple() -> None:
    assert kept(ALL, Keep(last=1, every_steps=100)) == [100, 200, 310, 420]
    assert kept([commit(0), *ALL], Keep(last=1, every_steps=1000)) == [0, 420]


def test_every_time_keeps_the_first_of_each_period() -> None:
    hours = [commit(s, f"2026-01-01T{s:02d}:59:00Z") for s in range(8)]
    assert kept(hours, Keep(last=1, every=timedelta(hours=3))) == [0, 3, 6, 7]


def test_best() -> None:
    losses = [commit(s, loss=v) for s, v in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0), (5, 9))]
    assert kept(losses, Keep(last=1, best=("loss", "min", 1))) == [4, 5]
    assert kept(losses, Keep(last=1, best=("loss", "min", 2))) == [2, 4, 5]
    assert kept(losses, Keep(last=1, best=("loss", "max", 2))) == [1, 5]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), True, "0.1", None, [1], {"a": 1}, 10**400, -(10**400)]
)
def test_best_ignores_what_is_no_number(value: object) -> None:
    commits = [commit(1, loss=value), commit(2, loss=5.0), commit(3, loss=value), commit(4)]
    assert kept(commits, Keep(last=1, best=("loss", "min", 1))) == [2, 4]


def test_what_has_no_metric_waits_until_later_ones_have() -> None:
    def rule(last: int | None) -> Keep:
        return Keep(last=last, best=("loss", "min", 1))

    none = [commit(s) for s in range(1, 7)]
    assert kept(none, rule(1)) == [1, 2, 3, 4, 5, 6]
    first = [none[0], commit(2, loss=1.0), *none[2:]]
    assert kept(first, rule(1)) == [2, 3, 4, 5, 6]
    assert kept(first, rule(2)) == [1, 2, 3, 4, 5, 6]  # may be evaluated beside the one after it
    third = [*first[:3], commit(4, loss=2.0), *none[4:]]
    assert kept(third, rule(1)) == [2, 5, 6]
    assert kept(third, rule(2)) == [2, 3, 5, 6]
    chosen = select(third, rule(2))
    assert chosen.kept[CommitName(3, 1)] == ("waits for its loss",)
    assert kept([none[0], commit(2, loss=None), none[2]], rule(1)) == [3]  # it will have none


def test_reasons() -> None:
    chosen = select([commit(100, loss=1.0), commit(150)], Keep(1, 100, None, ("loss", "min", 1)))
    assert chosen.kept[CommitName(100, 1)] == ("every 100 steps", "best 1 by min loss")
    assert chosen.kept[CommitName(150, 1)] == ("newest 1", "waits for its loss")
    assert select(ALL, Keep(last=1)).dropped[CommitName(5, 1)] == ("no rule keeps it",)


keeps = st.builds(
    Keep,
    last=st.none() | st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 30),
    every=st.none() | st.integers(1, 90).map(lambda m: timedelta(minutes=m)),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)
metrics = st.none() | st.floats() | st.just("none yet")
runs = st.lists(st.tuples(st.integers(1, 9), metrics), max_size=30)


@given(run=runs, keep=keeps)
def test_deleting_as_one_goes_keeps_what_deleting_at_the_end_keeps(
    run: list[tuple[int, float | str | None]], keep: Keep
) -> None:
    """And what waits for its metric, perhaps longer: it is passed by those that are there."""
    everything: list[Commit] = []
    live: list[Commit] = []
    step = 0
    for gap, loss in run:
        step += gap
        new = commit(step, stamp(step * 600.0), **({} if loss == "none yet" else {"loss": loss}))
        everything.append(new)
        live.append(new)
        chosen = select(live, keep)
        assert new.name in chosen.kept
        assert not chosen.kept.keys() & chosen.dropped.keys()
        live = [c for c in live if c.name in chosen.kept]
        assert select(live, keep).kept.keys() == chosen.kept.keys()
    wanted = select(everything, keep).kept
    assert [c.name for c in live if c.name in wanted] == list(wanted)
    others = [c for c in live if c.name not in wanted]
    assert not any("loss" in c.metadata for c in others)
    assert len(others) < (keep.last or 1)


# -- times -----------------------------------------------------------------------------------------


def test_stamps_are_read_back() -> None:
    assert stamp(0.25) == "1970-01-01T00:00:00.250Z"
    assert seconds_of(stamp(1234567.5), "x") == 1234567.5
    assert seconds_of("1970-01-01T01:00:00+01:00", "x") == 0.0
    assert seconds_of("1970-01-01T00:00:01", "x") == 1.0


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z", "x" * 999])
def test_a_bad_time_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptError) as info:
        seconds_of(text, "commits/1.json")
    assert info.value.where == "commits/1.json"
