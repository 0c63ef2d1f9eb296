"""What a process leaves of its end: in processes that end in each way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.elastic.exitreport import FOLDER, ExitReport, last_words_of
from tests.processes import PATIENCE_S

RUN = """\
import sys
from ckptd.elastic.exitreport import first_to_say, note_end, note_step
try:
    exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {"note_step": note_step})
    note_end(None)
except BaseException as error:
    note_end(error)
    print(first_to_say(repr(error)))
    raise
"""


def left(folder: Path, body: str) -> tuple[ExitReport | None, bool, str]:
    """Run a program; return what it left, and what it printed."""
    (folder / FOLDER).mkdir(exist_ok=True)
    script = folder / "program.py"
    script.write_text(body)
    environ = {**os.environ, "CKPTD_LAUNCHER": str(folder / "launcher.sock")}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(script)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    words, stepped = last_words_of(folder / FOLDER, process.pid, forget=True)
    assert last_words_of(folder / FOLDER, process.pid) == (None, False)
    return words, stepped, out


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("import sys\nsys.exit(7)", 7, "SystemExit: 7 (program.py:2)"),
        ("import sys\nsys.exit('why')", 1, "SystemExit: why (program.py:2)"),
        ("import sys\nsys.exit(263)", 7, "SystemExit: 263 (program.py:2)"),
        ("import nosuch", 1, "ModuleNotFoundError: No module named 'nosuch' (program.py:1)"),
        ("\n\n1 / 0", 1, "ZeroDivisionError: division by zero (program.py:3)"),
        ("e = OSError('why')\ne.add_note('and more')\nraise e", 1, "OSError: why (program.py:3)"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt (program.py:1)"),
        ("pass", 0, ""),
        ("import sys\nsys.exit()", 0, ""),
    ],
)
def test_ends_are_told_with_their_place(tmp_path: Path, body: str, code: int, text: str) -> None:
    words, _, _ = left(tmp_path, body)
    assert words is not None
    assert (words.code, words.text) == (code, text)


def test_the_same_lines_are_the_same_place(tmp_path: Path) -> None:
    body = "import sys\ndef f(x):\n    sys.exit(x)\n"
    places = [left(tmp_path, body + tail)[0] for tail in ("f(7)", "f(8)", "\nf(7)")]
    found = [words.place for words in places if words is not None]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("body", ["import os\nos._exit(3)", "import os\nos.kill(os.getpid(), 9)"])
def test_who_has_no_last_word_leaves_none(tmp_path: Path, body: str) -> None:
    assert left(tmp_path, "note_step()\n" + body)[:2] == (None, True)


def test_a_program_that_goes_on_in_a_thread_has_not_ended(tmp_path: Path) -> None:
    body = "import threading, time\nthreading.Thread(target=time.sleep, args=(0.2,)).start()"
    assert left(tmp_path, body)[0] is None


def test_an_error_is_shown_once_until_a_step_was_made(tmp_path: Path) -> None:
    shown = [left(tmp_path, "raise ValueError(1)")[2] for _ in range(3)]
    assert shown == ["True\n", "False\n", "False\n"]
    assert left(tmp_path, "raise ValueError(2)")[2] == "True\n"
    assert left(tmp_path, "note_step()\nraise ValueError(1)")[2] == "True\n"


def test_what_somebody_else_left_there_is_not_read(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"[1]", b'{"code": "x"}', b"\xff" * 10):
        (tmp_path / "5.json").write_bytes(content)
        assert last_words_of(tmp_path, 5) == (None, False)
