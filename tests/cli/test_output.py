"""Nothing that others wrote acts on the terminal, whatever verb shows it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ckptd.cli.output import json_text, print_table
from ckptd.cli.screen import screen
from ckptd.cli.terminal import printing, unfiltered
from ckptd.errors import CkptdError, one_line, printable
from tests.cli.running import COMMAND, Cli
from tests.processes import PATIENCE_S

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\x7f\r"


@given(st.text())
def test_what_is_printed_prints(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert all(a in (b, "\N{REPLACEMENT CHARACTER}") for a, b in zip(shown, text, strict=True))
    assert one_line(text).isprintable()


@given(st.recursive(st.text() | st.integers(-9, 9), lambda x: st.dictionaries(st.text(), x)))
def test_json_says_the_same_in_characters_that_print(value: Any) -> None:
    for indent in (None, 1):
        try:
            text = json_text(value, indent)
        except UnicodeEncodeError:  # a lone surrogate is no JSON
            return
        assert json.loads(text) == msgspec.json.decode(text) == value
        assert all(c.isprintable() or c == "\n" for c in text)


def test_streams_are_filtered_and_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with printing():
        for stream in (sys.stdout, sys.stderr):
            print(f"a{EVIL}b\tc", file=stream)
            stream.writelines(["x\n", f"{EVIL}\n"])
            assert unfiltered(stream) in before
            assert stream.isatty() is False
    assert (sys.stdout, sys.stderr) == before
    for text in capsys.readouterr():
        assert "a\N{REPLACEMENT CHARACTER}]0;title" in text
        assert all(c.isprintable() or c in "\n\t" for c in text)


def test_a_cell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["NAME", ">SIZE"], [["a\nb", "1"], [EVIL, "22"]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines[1:]}) == 1


def everywhere(value: Any) -> Any:
    """Put escapes into all texts of a document that are not ckptd's own words."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {key: everywhere(item) for key, item in value.items()}
    return [everywhere(item) for item in value] if isinstance(value, list) else value


def test_a_daemon_does_not_reach_the_terminal_through_top() -> None:
    job = {
        "job": "j",
        "state": "ok",
        "step": None,
        "ranks_reporting": 1,
        "world": 1,
        "agents": {"up": 1, "silent": 0},
        "goodput": None,
        "phases": {f"TRAIN{EVIL}": 1},
    }
    ranks = {
        "rank": [0],
        "status": [0],
        "nodes": ["n"],
        "node": [0],
        "pid": [1],
        "step": [1],
        "score": [None],
        "progress_age_s": [1.0],
        "self_s": [1.0],
        "pending": ["all_reduce"],
    }
    incident = {
        "id": "i",
        "opened_at": 0.0,
        "headline": "rank 0 hangs",
        "verdict": {
            "kind": "hang",
            "suspects": [{"target": "rank", "name": "0"}],
            "evidence": ["it hangs"],
        },
    }
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system=None)
    console.print(screen(everywhere(job), everywhere(ranks), [everywhere(incident)], 5))
    assert "evil" in out.getvalue()
    assert not {"\x1b", "\x9b", "\x07", "\u202e", "\x7f", "\r"} & set(out.getvalue())


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_an_error_does_not_reach_the_terminal(cli: Cli, flag: tuple[str, ...]) -> None:
    for verb in ("ls", "inspect", "verify", "gc", "pin", "trace"):
        result = cli(verb, f"/nowhere/{EVIL}", *flag)
        assert result.code != 0
        assert "evil" in result.err
        assert all(c.isprintable() or c in "\n\t" for c in result.out + result.err), verb


def test_on_a_terminal_only_our_own_colours_are_escapes(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    command = [*COMMAND, "ls", f"/nowhere/{EVIL}"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(PATIENCE_S) != 0
    text = said.decode().replace("\x1b[1;31merror:\x1b[0m", "error:", 1)
    assert text.startswith("error:")
    assert "evil" in text
    assert all(c.isprintable() or c in "\r\n\t" for c in text)


def test_errors_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from ckptd.cli.output import print_error

    print_error(CkptdError("no", where="here", hint="do this"), as_json=False)
    text = capsys.readouterr().err
    assert text.startswith("error: no\n")
    assert len(text.splitlines()) == 3
