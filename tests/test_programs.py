"""A forked program is what an interpreter of its own would be to the test."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests import programs

ENDS = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread", __name__))).start()
print(sys.argv, os.getcwd(), os.environ["MINE"])
print("wrong", file=sys.stderr)
sys.exit(int(sys.argv[1]) or "said")
"""


def test_what_it_is_given_and_what_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 5")
    (tmp_path / "it.py").write_text("from beside import x\n" + ENDS)
    here = {"MINE": "mine"}
    for words in (("-c", ENDS), (tmp_path / "it.py",)):
        done = programs.run(*words, "3", env=here, cwd=tmp_path)
        first, *rest = done.stdout.splitlines()
        assert first == f"['{words[0]}', '3'] {tmp_path} mine"
        assert rest == ["thread __main__", "at exit"]
        assert (done.returncode, done.stderr) == (3, "wrong\n")
    done = programs.run("-c", ENDS, "0", env=here, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "wrong\nsaid\n")


def test_how_it_ends() -> None:
    done = programs.run("-c", "import torch; torch.ones(3).sum() / 0; 1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    done = programs.run("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run("-c", "import time; time.sleep(600)", timeout=0.1)
