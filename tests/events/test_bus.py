"""The bus: everybody hears, nobody disturbs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptd import events
from ckptd.events import SaveBegun
from ckptd.events.event import AnyEvent
from tests.processes import PATIENCE_S


def begun(step: int = 1) -> SaveBegun:
    return SaveBegun(step=step, generation=1, attempt="a", rank=0, at_ns=events.now_ns())


def test_every_subscriber_hears_every_event_in_order() -> None:
    heard: list[list[AnyEvent]] = [[], []]
    subscriptions = [events.subscribe(h.append) for h in heard]
    sent = [begun(i) for i in range(100)]
    for event in sent:
        events.emit(event)
    assert all(s.flush() for s in subscriptions)
    assert heard == [sent, sent]
    for s in subscriptions:
        s.close()
        s.close()
    events.emit(begun())
    assert heard == [sent, sent]


def test_inline_is_heard_in_the_thread_that_emits() -> None:
    heard: list[threading.Thread] = []
    subscription = events.subscribe(lambda _: heard.append(threading.current_thread()), inline=True)
    events.emit(begun())
    subscription.close()
    assert heard == [threading.current_thread()]


@pytest.mark.parametrize("inline", [False, True])
def test_a_subscriber_that_fails_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, inline: bool
) -> None:
    def fail(event: AnyEvent) -> None:
        raise RuntimeError("mine")

    subscription = events.subscribe(fail, inline=inline)
    events.emit(begun())
    events.emit(begun())
    subscription.close()
    assert subscription.failed == 2
    assert caplog.text.count("a subscriber of events failed") == 1


def test_a_slow_subscriber_loses_events_and_they_are_counted() -> None:
    go, heard = threading.Event(), []

    def slow(event: AnyEvent) -> None:
        go.wait(PATIENCE_S)
        heard.append(event.step)

    subscription = events.subscribe(slow, capacity=5)
    for i in range(50):
        events.emit(begun(i))
    go.set()
    subscription.close()
    assert len(heard) + subscription.dropped == 50
    assert 5 <= len(heard) <= 6
    assert heard == list(range(len(heard)))


def test_only_those_who_asked_hear_of_other_processes() -> None:
    own: list[AnyEvent] = []
    all_: list[AnyEvent] = []
    first = events.subscribe(own.append, inline=True)
    second = events.subscribe(all_.append, inline=True, relayed=True)
    events.emit(begun(1))
    events.relay(begun(2))
    first.close()
    second.close()
    assert [e.step for e in own] == [1]
    assert [e.step for e in all_] == [1, 2]


WITHIN_RECORD = """
import sys
from ckptd import events
from ckptd.events import SaveBegun, bus, recording

def emit():
    events.emit(SaveBegun(step=1, generation=1, attempt="a", rank=0, at_ns=events.now_ns()))

def trace(frame, event, _):
    global left
    if frame.f_code.co_filename not in (bus.__file__, recording.__file__):
        return None
    left -= event == "line"
    if event == "line" and left == 0:
        emit()
    return trace

for line in range(1, 200):
    bus._first.append(recording._from_environment)  # as in a new process
    left = line
    sys.settrace(trace)
    found = events.record(sys.argv[1])
    sys.settrace(None)
    found.close()
    for each in list(recording._open.values()):
        each.users = 0
        each.close()
    recording.os.environ["CKPTD_EVENTS"] = sys.argv[2]
    if left > 0:
        break
else:
    raise SystemExit("an event came within record() to the last")
"""


def test_the_first_event_may_come_at_any_line_of_what_begins_to_record(tmp_path: Path) -> None:
    """As from a signal handler: it begins to record as well, and waited for the frame below it."""
    folders = [str(tmp_path / name) for name in ("a", "b")]
    subprocess.run(
        [sys.executable, "-c", WITHIN_RECORD, *folders],
        check=True,
        timeout=PATIENCE_S,
        env={**os.environ, "CKPTD_EVENTS": folders[1]},
    )
