"""The Chrome trace: one JSON array, whatever the events."""

from __future__ import annotations

import io
import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from ckptd.events.event import AnyEvent, SaveSkipped, Span
from ckptd.events.timeline import Timeline
from tests.events.test_profile import events


def written(some: list[AnyEvent], most: int = 1000) -> tuple[list[dict[str, Any]], Timeline]:
    out = io.StringIO()
    timeline = Timeline(out, 0, most)
    for event in some:
        timeline.add("host", event)
    timeline.finish()
    return json.loads(out.getvalue()), timeline


@given(st.lists(events, max_size=30))
def test_every_event_is_there_once_in_a_lane_with_a_name(some: list[AnyEvent]) -> None:
    items, timeline = written(some)
    shown = [i for i in items if i["ph"] != "M"]
    assert len(shown) == len(some)
    assert timeline.written == len(items)
    named = {(i["pid"], i["tid"]) for i in items if i["name"] == "thread_name"}
    for item, event in zip(shown, some, strict=True):
        assert (item["pid"], item["tid"]) in named
        assert item["pid"] == event.rank
        assert item["ts"] * 1000 == event.time_ns
        assert ("dur" in item) == isinstance(event, Span)


@given(st.lists(events, max_size=40), st.integers(0, 10))
def test_it_is_bounded(some: list[AnyEvent], most: int) -> None:
    items, timeline = written(some, most)
    assert len(items) <= most + 3
    assert len([i for i in items if i["ph"] != "M"]) + timeline.left_out == len(some)


def test_reasons_are_shown() -> None:
    items, _ = written([SaveSkipped(step=1, generation=1, rank=0, at_ns=5, reason="no slot")])
    assert items[-1]["args"]["reason"] == "no slot"
