"""Calls of a checkpointer that are interrupted, or met by another one, at lines of their code."""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys

import pytest

from tests.checkpoint.torch.injected import CALLS
from tests.injecting import run, wrong
from tests.processes import PATIENCE_S

MODULE = "tests.checkpoint.torch.injected"
WAYS = ("", "thread:", "del:")
SOME = (
    ("save", "interrupt"),
    ("save", "save"),
    ("save", "durable"),
    ("save", "thread:load"),
    ("load", "del:close"),
    ("close", "thread:save"),
    ("wait", "del:durable"),
    ("abandon", "interrupt"),
)


def test_some_lines() -> None:
    pairs = itertools.chain.from_iterable(SOME)
    found = run(MODULE, "3", *pairs)
    assert len(found) > 2 * len(SOME)
    assert not wrong(found)
    within = [one["said"] for one in found if one["what"] in ("save", "durable", "del:durable")]
    assert within.count("under-way") >= len(within) - 3  # but for first lines of a wrapper


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("save", "def finish()"),
        ("load", "apply_objects("),
        ("load", "self._take((*claimed, text, newest))"),
        ("close", "self._saver.close()"),
        ("close", "self._map.close()"),
        ("abandon", "self._saver.leave(_COPY_S)"),
    ],
)
def test_lines_where_an_interrupt_was_wrong(call: str, line: str) -> None:
    found = run(MODULE, line, call, "interrupt")
    assert len(found) == 1
    assert not wrong(found)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("call", CALLS)
def test_every_line(call: str) -> None:
    found = run(MODULE, "0", call, "interrupt", timeout_s=7100.0)
    print(call, len(found), collections.Counter(x["outcome"] for x in found))
    assert not wrong(found)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_every_other(call: str) -> None:
    pairs = itertools.chain.from_iterable((call, f"{w}{c}") for c in CALLS for w in WAYS)
    found = run(MODULE, "12", *pairs, timeout_s=3500.0)
    print(call, len(found), collections.Counter((x["what"], x["said"]) for x in found))
    assert not wrong(found)


AT_EXIT = """
import atexit
from tests.checkpoint.torch.injected import Job
from tests.injecting import kind_of
job = Job("memory://exit")
calls = ("save", "load", "wait", "latest", "durable", "close")
atexit.register(lambda: print(*(kind_of(lambda: job.call(name, 7)) for name in calls)))
"""


def test_calls_at_exit_end_or_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["closed", "closed", "done", "done", "done", "done"], done.stderr
