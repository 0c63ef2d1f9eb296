"""Which copies are pushed when: with lanes over threads that really copy, late."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ckptd.checkpoint.torch.feed import CopyFeed, CopyGroup, CopyStep, StridedWindow, grouped
from ckptd.errors import SaveError
from ckptd.types import Box
from tests.processes import PATIENCE_S, until

SOURCE = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
SIZE = len(SOURCE) // 20
STEPS = [CopyStep("w", None, i * SIZE, (i + 1) * SIZE) for i in range(20)]


class Later:
    """Done when a thread has copied."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True


class ThreadLane:
    """A queue that another thread copies from, as soon as `go` is set."""

    def __init__(self, limit: int, *, free: bool = True) -> None:
        self.limit = limit
        self.free = free
        self.target = np.zeros_like(SOURCE)
        self.go = threading.Event()
        self.pushed: list[int] = []
        self.fail: Callable[[CopyGroup], None] = lambda group: None
        self.refuse: Callable[[CopyGroup], None] = lambda group: None
        self._thread = ThreadPoolExecutor(1)

    def push(self, group: CopyGroup) -> Later:
        self.refuse(group)
        self.pushed += group.steps
        return Later(self._thread.submit(self._copy, group))

    def _copy(self, group: CopyGroup) -> None:
        assert self.go.wait(PATIENCE_S)
        self.fail(group)
        for step in (STEPS[number] for number in group.steps):
            self.target[step.start : step.end] = SOURCE[step.start : step.end]
        if group.task is not None:
            group.task()


def feed_of(*lanes: ThreadLane, reports: list[int] | None = None) -> CopyFeed:
    """Return a feed of 20 steps, dealt to lanes in turn, each a group of its own."""
    groups = [CopyGroup(lanes[n % len(lanes)], (n,)) for n in range(20)]
    reported = [] if reports is None else reports
    return CopyFeed(STEPS, groups, reported.append)


def running(feed: CopyFeed, timeout_s: float = 60.0) -> Future[None]:
    return ThreadPoolExecutor(1).submit(feed.run, timeout_s)


@pytest.mark.parametrize("limits", [(1,), (4,), (100,), (2, 3)])
def test_everything_is_copied_and_reported_from_the_front(limits: Sequence[int]) -> None:
    lanes = [ThreadLane(limit) for limit in limits]
    reports: list[int] = []
    feed = feed_of(*lanes, reports=reports)
    for lane in lanes:
        lane.go.set()
    feed.run(60.0)
    assert (sum(lane.target for lane in lanes) == SOURCE).all()
    assert reports == sorted(reports)
    assert reports[-1] == len(SOURCE)
    assert not feed.stuck


def test_the_limit_holds_until_somebody_is_in_a_hurry() -> None:
    lane = ThreadLane(3)
    other = ThreadLane(100)
    other.go.set()
    done = running(feed := feed_of(lane, other))
    until(lambda: len(other.pushed) == 10)  # the feeding thread has gone around and come back
    until(lambda: len(lane.pushed) == 3)
    assert len(lane.pushed) == 3
    assert feed.hurry(30.0)
    assert len(lane.pushed) == 10, "hurry waits for nothing on the lane"
    assert not done.done()
    lane.go.set()
    done.result(PATIENCE_S)
    assert (lane.target + other.target == SOURCE).all()


def test_a_hurry_before_the_feeding_thread_pushes_all() -> None:
    lane = ThreadLane(1)
    feed = feed_of(lane)
    assert feed.hurry(30.0)
    assert lane.pushed == list(range(20))
    lane.go.set()
    feed.run(60.0)
    assert (lane.target == SOURCE).all()


def test_a_lane_that_is_not_free_is_waited_for() -> None:
    lane = ThreadLane(2, free=False)
    feed = feed_of(lane)
    assert not feed.hurry(0.05), "nobody feeds it"
    done = running(feed)
    assert not feed.hurry(0.05), "its limit stands"
    lane.go.set()
    assert feed.hurry(30.0)
    assert len(lane.pushed) == 20
    done.result(PATIENCE_S)


def test_what_is_in_place_already_is_not_awaited() -> None:
    lane = ThreadLane(4)
    lane.go.set()
    reports: list[int] = []
    groups = [CopyGroup(lane, (n,)) for n in range(5, 20)]
    CopyFeed(STEPS, groups, reports.append, range(5)).run(60.0)
    assert reports[0] == STEPS[4].end
    assert reports[-1] == len(SOURCE)


def test_tasks_come_in_their_turn() -> None:
    lane = ThreadLane(2)
    seen: list[str] = []
    groups = [
        CopyGroup(lane, (), lambda: seen.append("first")),
        CopyGroup(lane, (0, 1), lambda: seen.append("copied")),
        CopyGroup(lane, (), lambda: seen.append("last")),
    ]
    lane.go.set()
    CopyFeed(STEPS[:2], groups, lambda front: seen.append(f"{front}")).run(60.0)
    assert [s for s in seen if not s.isdigit()] == ["first", "copied", "last"]


@pytest.mark.parametrize("where", ["push", "copy", "hurry"])
def test_a_failure_is_raised_when_nothing_is_under_way(where: str) -> None:
    lane = ThreadLane(4)

    def fail(group: CopyGroup) -> None:
        if group.steps[0] == 7:
            raise RuntimeError("the device is lost")

    if where == "copy":
        lane.fail = fail
    else:
        lane.refuse = fail
    reports: list[int] = []
    feed = feed_of(lane, reports=reports)
    if where == "hurry":
        assert feed.hurry(30.0), "whoever waits at the gate goes on: the save is lost anyway"
    lane.go.set()
    with pytest.raises(RuntimeError, match="the device is lost"):
        feed.run(60.0)
    assert not feed.stuck
    assert max(reports, default=0) <= 7 * len(SOURCE) // 20
    assert feed.hurry(30.0)


def test_a_report_that_fails_is_raised_when_nothing_is_under_way() -> None:
    """The slot was closed meanwhile: what is copied to may not be unlocked yet."""
    quick, slow = ThreadLane(1), ThreadLane(4)
    groups = [CopyGroup(quick if n < 5 else slow, (n,)) for n in range(20)]

    def report(front: int) -> None:
        raise RuntimeError("the slot is closed")

    feed = CopyFeed(STEPS, groups, report)
    done = running(feed)
    quick.go.set()
    until(lambda: feed.stuck)
    assert slow.pushed
    assert not done.done()
    slow.go.set()
    with pytest.raises(RuntimeError, match="the slot is closed"):
        done.result(PATIENCE_S)
    assert not feed.stuck


def test_a_lane_that_hangs_is_given_up_and_told_apart() -> None:
    lane = ThreadLane(4)
    feed = feed_of(lane)
    with pytest.raises(SaveError) as caught:
        feed.run(0.1)
    assert "the device does not finish copying" in caught.value.message
    assert feed.stuck
    lane.go.set()
    until(lambda: not feed.stuck)


def test_a_hurry_never_overtakes_the_feeding_thread() -> None:
    """Both push at once, many times: each lane gets its groups in order, and all of them."""
    for _ in range(50):
        lanes = [ThreadLane(2), ThreadLane(1)]
        feed = feed_of(*lanes)
        for lane in lanes:
            lane.go.set()
        done = running(feed)
        assert feed.hurry(30.0)
        assert [len(lane.pushed) for lane in lanes] == [10, 10]
        done.result(PATIENCE_S)
        assert all(lane.pushed == sorted(lane.pushed) for lane in lanes)


SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


def local_part(local: np.ndarray, part: Box | StridedWindow | None) -> np.ndarray:
    """Return a part of a local tensor, element by element."""
    if part is None:
        return local.reshape(-1)
    if isinstance(part, Box):
        window = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        return local[window].reshape(-1)
    places = [
        part.start + sum(i * n for i, n in zip(index, part.strides, strict=True))
        for index in np.ndindex(part.shape)
    ]
    return local.reshape(-1)[places]


@st.composite
def parts(draw: st.DrawFn) -> tuple[np.ndarray, Box | StridedWindow | None, tuple[int, ...]]:
    """Draw a local tensor, a part of it, and the shape of the part."""
    shape = draw(SHAPES)
    local = np.arange(math.prod(shape)).reshape(shape)
    if not draw(st.booleans()):
        return local, None, shape
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    inner = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    if draw(st.booleans()):
        return local, Box(offset, inner), inner
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    start = sum(o * n for o, n in zip(offset, strides, strict=True))
    return local, StridedWindow(inner, strides, start), inner


@given(parts(), st.sampled_from([1, 2, 8]), st.integers(1, 200), st.integers(0, 99))
def test_cuts_of_a_step_follow_one_another_and_cover_its_part(
    drawn: tuple[np.ndarray, Box | StridedWindow | None, tuple[int, ...]],
    itemsize: int,
    limit: int,
    start: int,
) -> None:
    local, part, shape = drawn
    step = CopyStep("w", part, start, start + math.prod(shape) * itemsize)
    found: list[int] = []
    at = start
    for cut in step.cut(shape, itemsize, limit):
        values = local_part(local, cut.part).tolist()
        assert (cut.name, cut.start, cut.end) == ("w", at, at + len(values) * itemsize)
        assert cut.end - cut.start <= max(limit, itemsize)
        found += values
        at = cut.end
    assert at == step.end
    assert found == local_part(local, part).tolist()


def test_groups_hold_neighbours_up_to_a_limit() -> None:
    lane = ThreadLane(1)
    sizes = [10, 20, 30, 500, 1, 1, 1, 1]
    ends = np.cumsum(sizes).tolist()
    steps = [CopyStep("w", None, end - n, end) for n, end in zip(sizes, ends, strict=True)]
    found = [g.steps for g in grouped(lane, steps, range(len(steps)), 60, 3)]
    assert found == [[0, 1, 2], [3], [4, 5, 6], [7]]
