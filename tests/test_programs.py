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
    late = programs.Program("-c", "import time; print('up', flush=True); time.sleep(600)")
    assert late.stdout.readline() == "up\n"
    with pytest.raises(subprocess.TimeoutExpired) as found:
        late.communicate(0.1)
    assert "in _play" in found.value.__notes__[1]


STARTS = """
import os, signal, subprocess, sys, time
with open("given", "w+") as given:
    child = subprocess.Popen(
        [sys.executable, "-u", *sys.argv[1:], str(given.fileno()), "7"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=[given.fileno()], env={"CKPTD_MINE": "child"}, cwd="there", start_new_session=True,
    )
    out, _ = child.communicate(b"heard")
    given.seek(0)
    print(child.returncode, out, given.read() == f"{os.getpid()} {child.pid} {child.pid}")
forever = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
forever.send_signal(signal.SIGTERM)
print(forever.wait(), subprocess.run(["echo", "other"], capture_output=True).stdout)
assert "torch" in sys.modules
"""
STARTED = """
import os, sys
os.write(int(sys.argv[1]), f"{os.getppid()} {os.getpid()} {os.getsid(0)}".encode())
here = os.path.basename(os.getcwd())
print(sys.stdin.read(), os.environ["CKPTD_MINE"], here, "torch" in sys.modules)
for name, shown in (("cmdline", "\\0".join(sys.argv[1:])), ("environ", "CKPTD_MINE=child")):
    with open(f"/proc/self/{name}") as file:
        assert shown in file.read()
print("wrong", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_what_it_starts_is_its_child_and_a_fork(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "it.py").write_text(STARTED)
    (tmp_path / "there" / "its.py").write_text(STARTED)
    for words in (("-c", STARTED), (str(tmp_path / "it.py"),), ("-m", "its")):
        done = programs.run("-c", STARTS, *words, cwd=tmp_path, forking=True)
        assert not done.stderr
        first, second = done.stdout.splitlines()
        assert first == r"7 b'heard child there True\nwrong\n' True"
        assert second == r"-15 b'other\n'"
