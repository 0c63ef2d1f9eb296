"""Calls of a publisher and a subscriber that are interrupted, or met by another one."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import pytest

from tests.injecting import run, wrong
from tests.publish.injected import PUBLISHER, SUBSCRIBER

MODULE = "tests.publish.injected"
WAYS = ("", "thread:", "del:")
PAIRS = [
    (call, f"{way}{other}")
    for calls in (PUBLISHER, SUBSCRIBER)
    for call in calls
    for other in calls
    for way in WAYS
]


def test_some_lines(tmp_path: Path) -> None:
    some = [("publish", "publish"), ("publish", "whole"), ("update", "thread:update")]
    found = run(MODULE, str(tmp_path), "2", *itertools.chain.from_iterable(some))
    assert len(found) == 2 * len(some)
    assert not wrong(found)
    assert {one["said"] for one in found} == {"under-way"}


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("publish", "publication = Publication(step"),
        ("publish", "self._slots[choice.slot] = slot"),
        ("publish", "self._sent.extend(map(self._out.sendmsg"),
        ("end", "self._gate.release()"),
    ],
)
def test_lines_where_an_interrupt_was_wrong(tmp_path: Path, call: str, line: str) -> None:
    found = run(MODULE, str(tmp_path), line, call, "interrupt")
    assert len(found) == 1
    assert not wrong(found)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("call", PUBLISHER + SUBSCRIBER)
def test_every_line(tmp_path: Path, call: str) -> None:
    found = run(MODULE, str(tmp_path), "0", call, "interrupt", timeout_s=7100.0)
    print(call, len(found), collections.Counter(x["outcome"] for x in found))
    assert not wrong(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_call_in_every_other(tmp_path: Path) -> None:
    found = run(MODULE, str(tmp_path), "4", *itertools.chain.from_iterable(PAIRS), timeout_s=3500.0)
    print(len(found), collections.Counter((x["call"], x["what"], x["said"]) for x in found))
    assert not wrong(found)
