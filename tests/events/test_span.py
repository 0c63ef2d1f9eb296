"""Spans: whose they are, what they measure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ckptd import events
from ckptd.errors import StoreError
from ckptd.events.event import AnyEvent, SaveId, Span

SAVE = SaveId(7, 2, "0001", 3)


@pytest.fixture
def heard() -> Iterator[list[AnyEvent]]:
    found: list[AnyEvent] = []
    subscription = events.subscribe(found.append, inline=True)
    yield found
    subscription.close()


def only(heard: list[AnyEvent]) -> Span:
    (span,) = heard
    assert isinstance(span, Span)
    return span


def test_a_span_belongs_to_the_save_around_it(heard: list[AnyEvent]) -> None:
    before = events.now_ns()
    with events.about(SAVE, tier="local"), events.span("digest", nbytes=3) as span:
        span.nbytes += 4
        time.sleep(0.01)
    found = only(heard)
    assert (found.step, found.generation, found.attempt, found.rank) == (7, 2, "0001", 3)
    assert (found.name, found.tier, found.bytes, found.error) == ("digest", "local", 7, "")
    assert found.busy_ns == found.duration_ns >= 10_000_000
    assert before <= found.start_ns <= events.now_ns() - found.duration_ns


def test_nothing_is_told_outside_of_a_save(heard: list[AnyEvent]) -> None:
    with events.span("digest"):
        pass
    assert heard == []


def test_an_inner_scope_changes_what_it_names_and_nothing_else(heard: list[AnyEvent]) -> None:
    with events.about(SAVE, tier="local"):
        with events.about(tier="remote"):
            assert events.current() == (SAVE, "remote")
        with events.about(SaveId(8, 2, "0002", 3)):
            assert events.current() == (SaveId(8, 2, "0002", 3), "local")
        assert events.current() == (SAVE, "local")
    assert events.current() == (None, "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(StoreError("full", kind="no-space"), "no-space"), (KeyError("x"), "KeyError")],
)
def test_a_span_that_ends_in_an_error_says_which(
    heard: list[AnyEvent], error: Exception, kind: str
) -> None:
    with pytest.raises(type(error)):
        with events.span("write", save=SAVE):
            raise error
    assert only(heard).error == kind


def test_a_span_may_have_begun_before(heard: list[AnyEvent]) -> None:
    since = time.monotonic_ns() - 10**9
    with events.span("call", save=SAVE, since_ns=since):
        pass
    assert only(heard).duration_ns >= 10**9


def test_an_activity_is_one_span_with_the_sum_of_its_pieces(heard: list[AnyEvent]) -> None:
    activity = events.Activity("write", save=SAVE, tier="local")
    now = time.monotonic_ns()
    activity.add(now - 900, now - 800, 5)
    activity.add(now - 700, now - 600, 6)
    activity.add(now - 650, now - 500, 7)
    activity.emit()
    found = only(heard)
    assert (found.duration_ns, found.busy_ns, found.bytes) == (400, 350, 18)
    assert found.start_ns < events.now_ns() - 900


def test_an_activity_without_pieces_is_not_told(heard: list[AnyEvent]) -> None:
    events.Activity("upload", save=SAVE).emit()
    assert heard == []


def test_a_piece_that_fails_counts(heard: list[AnyEvent]) -> None:
    activity = events.Activity("upload", save=SAVE)
    with pytest.raises(OSError), activity.piece(9):
        raise OSError
    activity.emit(OSError())
    assert (only(heard).bytes, only(heard).error) == (9, "OSError")
