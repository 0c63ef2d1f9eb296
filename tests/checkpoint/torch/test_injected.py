"""Calls that are interrupted, or met by another one, at lines of their own code."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.checkpoint.torch.injected import CALLS, WHATS
from tests.processes import PATIENCE_S


def injected(
    call: str, what: str, step: int, timeout_s: float = PATIENCE_S
) -> list[dict[str, Any]]:
    program = [
        sys.executable,
        "-m",
        "tests.checkpoint.torch.injected",
        "t",
        call,
        what,
        "1",
        str(step),
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what hung, mixed steps, or kept a later save from being right without being closed."""
    out = []
    for one in found:
        closed = one["call"] == "close" or one["what"] == "close"
        after = ("done done done", "done closed done") if closed else ("done done done",)
        if one["after"] not in after or "mixture" in one["disk"]:
            out.append(one)
    return out


@pytest.mark.parametrize(
    ("call", "what", "step"),
    [("save", "interrupt", 611), ("save", "save", 901), ("close", "interrupt", 67)],
)
def test_some_lines(call: str, what: str, step: int) -> None:
    found = injected(call, what, step)
    assert len(found) > 2
    assert not wrong(found)
    if what == "save":  # from the first line on that is not of a wrapper
        assert {one["said"] for one in found[1:]} == {"under-way"}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("call", CALLS)
def test_every_line(call: str, what: str) -> None:
    step = 1 if what == "interrupt" else 11
    found = injected(call, what, step, 3500.0)
    print(call, what, len(found), collections.Counter((x["outcome"], x["said"]) for x in found))
    assert not wrong(found)
