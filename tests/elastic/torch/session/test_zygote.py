"""A fork of the zygote runs a program as a Python of its own would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.elastic.launchers.spawn import Spawner
from ckptd.elastic.launchers.zygotewire import Exited, Fork, Forked, Ready, Reap
from ckptd.elastic.torch.session.zygote import unsafe_to_fork
from tests.processes import PATIENCE_S, lives, until, wait_for_stop

# All in one test process: the zygote that they share imports PyTorch, which takes long.
pytestmark = [pytest.mark.dist, pytest.mark.forks("small", "all")]

SCRIPT = """\
import atexit, multiprocessing, os, pickle, signal, sys, threading, time
print(__name__, __file__, __spec__, sys.argv, sys.path[0], os.getcwd())
print(sorted(k for k in globals() if k.startswith("__") and k != "__cached__"))
print([signal.getsignal(n) for n in (2, 13, 15, 17)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sys.orig_argv[1:], sys.stdout.write_through, threading.active_count())
print(os.getpgid(0) == os.getpid(), threading.current_thread() is threading.main_thread())
print(sorted(os.environ.items()), multiprocessing.current_process().name)
import torch
print(torch.get_num_threads(), torch.cuda.is_initialized())
class Here: pass
print(type(pickle.loads(pickle.dumps(Here()))) is Here)
def inner(sender): sender.send(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=inner, args=(sender,))
    process.start(); print(receiver.recv()); process.join()
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    atexit.register(print, "atexit")
    left = open(sys.argv[1], "w"); left.write("not closed")
"""

ENDS = {
    "uncaught": "def f():\n    1 / 0\nf()\n",
    "exit": "import sys\nsys.exit(7)\n",
    "words": "import sys\nsys.exit('words')\n",
    "none": "raise SystemExit\n",
    "syntax": "x = = 1\n",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\n1 / 0\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 9)\n",
}


class Mother:
    """A zygote, and what it says."""

    def __init__(self, *, plain: bool = False) -> None:
        self.spawner = Spawner(os.environ, plain=plain)
        self._said: list[Any] = []
        self._number = 0
        self.ready = self.wait(Ready)

    def wait(self, kind: type) -> Any:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for said in self._said:
                if isinstance(said, kind):
                    self._said.remove(said)
                    return said
            self._said += self.spawner.take()
            time.sleep(0.005)
        raise AssertionError(f"no {kind.__name__} comes: {self._said}")

    def start(self, mode: str, argv: list[str], out: Path, *, let: bool = True) -> tuple[int, int]:
        """Return the process and its gate, which is open if it is let go on."""
        self._number += 1
        order = Fork(
            number=self._number,
            mode=mode,  # type: ignore[arg-type]
            argv=tuple(argv),
            environ=dict(os.environ),
            stdout=str(out),
            stderr=str(out.with_suffix(".err")),
        )
        gate = self.spawner.fork(order)
        pid = self.wait(Forked).pid
        if let:
            with os.fdopen(gate, "wb") as file:
                file.write(msgspec.msgpack.encode({"LATE": "known"}))
        return pid, gate

    def end(self) -> int:
        """Wait for the end of the process that was started; return its code."""
        exited = self.wait(Exited)
        self.spawner.order(Reap(exited.number))
        code: int = exited.code
        return code

    def run(self, mode: str, argv: list[str], out: Path) -> tuple[int, str, str]:
        self.start(mode, argv, out)
        return self.end(), out.read_text(), out.with_suffix(".err").read_text()


@pytest.fixture(scope="module")
def mother() -> Iterator[Mother]:
    mother = Mother()
    yield mother
    mother.spawner.end()


def by_itself(argv: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-u", *argv],
        env={**os.environ, "LATE": "known"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        start_new_session=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_ends_are_told_in_their_order(mother: Mother, tmp_path: Path) -> None:
    """Of what has failed first: the others follow it, and are not its cause."""
    pids = [mother.start("exec", ["sleep", "600"], tmp_path / f"{n}", let=False)[0] for n in "abc"]
    first, last = mother._number - 2, mother._number
    zygote = mother.spawner.process.pid
    os.kill(zygote, signal.SIGSTOP)  # it is late, as on a busy machine
    wait_for_stop(zygote)
    for pid, number in ((pids[2], signal.SIGKILL), (pids[0], signal.SIGTERM)):
        os.kill(pid, number)
        until(lambda pid=pid: not lives(pid), f"process {pid} ends")
    os.kill(zygote, signal.SIGCONT)
    told = [mother.wait(Exited) for _ in range(2)]
    assert [(one.number, one.code) for one in told] == [(last, -9), (first, -15)]
    os.kill(pids[1], signal.SIGKILL)
    told.append(mother.wait(Exited))
    for one in told:
        mother.spawner.order(Reap(one.number))


@pytest.mark.forks
def test_a_script_sees_what_it_would_see_by_itself(mother: Mother, tmp_path: Path) -> None:
    assert mother.ready.unsafe == ""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    left = tmp_path / "left"
    found = mother.run("script", [str(script), str(left), "--flag"], tmp_path / "out")
    assert left.read_text() == "not closed"
    wanted = by_itself([str(script), str(left), "--flag"])
    assert found[1].splitlines() == wanted[1].splitlines()
    assert (found[0], found[2]) == (wanted[0], wanted[2]) == (0, "")
    assert found[1].splitlines()[-2:] == ["thread", "atexit"]


def test_a_fork_has_what_a_rank_imports(mother: Mother, tmp_path: Path) -> None:
    """A rank that imports them itself is late by a tenth of a second, and seconds for torch."""
    code = "import sys; print(sorted({'torch._dynamo', 'torch.distributed.fsdp', "
    code += "'ckptd.checkpoint.torch.checkpointer', "
    code += "'ckptd.monitor.torch.recorder.recorder'} - set(sys.modules)))"
    script = tmp_path / "script.py"
    script.write_text(code)
    assert mother.run("script", [str(script)], tmp_path / "out") == (0, "[]\n", "")


@pytest.mark.parametrize("name", [*ENDS, "missing"])
@pytest.mark.long
def test_ends(mother: Mother, tmp_path: Path, name: str) -> None:
    script = tmp_path / "script.py"
    if name in ENDS:
        script.write_text(ENDS[name])
    found = mother.run("script", [str(script)], tmp_path / "out")
    wanted = by_itself([str(script)])
    if name == "missing":  # the interpreter says its own full path
        assert "No such file or directory" in found[2]
        assert found[0] == wanted[0] == 2
    else:
        assert found == wanted


def test_an_error_is_shown_without_frames_of_ours(mother: Mother, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS["uncaught"])
    code, _, err = mother.run("script", [str(script)], tmp_path / "out")
    assert code == 1
    assert err.count("File") == 2
    assert err.startswith(f'Traceback (most recent call last):\n  File "{script}", line 3')


@pytest.mark.long
def test_modules_folders_and_commands(mother: Mother, tmp_path: Path) -> None:
    assert (
        mother.run("module", ["json.tool", "--help"], tmp_path / "a")[:2]
        == by_itself(["-m", "json.tool", "--help"])[:2]
    )
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    assert mother.run("script", [str(folder), "x"], tmp_path / "b") == by_itself([str(folder), "x"])
    assert mother.run("exec", ["echo", "hi"], tmp_path / "c") == (0, "hi\n", "")
    assert mother.run("exec", ["/no/such/command"], tmp_path / "d")[0] == 127


@pytest.mark.long
def test_modules_beside_a_script_hide_those_of_the_zygote(mother: Mother, tmp_path: Path) -> None:
    (tmp_path / "sympy.py").write_text("name = 'the script has its own'")
    script = tmp_path / "script.py"
    script.write_text("import sympy; print(sympy.name)")
    assert mother.run("script", [str(script)], tmp_path / "out")[:2] == (
        0,
        "the script has its own\n",
    )


def test_forks_draw_their_own_numbers(mother: Mother, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(1))"
    )
    drawn = [mother.run("script", [str(script)], tmp_path / f"out{i}")[1] for i in range(2)]
    assert not set(drawn[0].split()) & set(drawn[1].split())


def test_a_gate_that_is_closed_lets_nobody_through(mother: Mother, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    _, gate = mother.start("script", [str(script)], tmp_path / "out", let=False)
    os.close(gate)
    assert mother.end() == 1
    assert (tmp_path / "out").read_text() == ""


def test_a_job_store_listens_and_is_reached(mother: Mother) -> None:
    read, write = os.pipe()
    order = Fork(number=1000, mode="store", argv=("127.0.0.1",), environ=dict(os.environ))
    mother.spawner.order(order, write)
    pid = mother.wait(Forked).pid
    with open(read) as told:
        port = int(told.readline())
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    store.set("a", "b")
    assert store.get("a") == b"b"
    os.kill(pid, signal.SIGKILL)
    assert mother.end() == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dies", ["zygote", "launcher"])
def test_workers_die_with_whoever_is_above(tmp_path: Path, plain: bool, dies: str) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from tests.elastic.torch.session.test_zygote import Mother;"
        f"m = Mother(plain={plain}); p = Path(sys.argv[1]);"
        "pid, _ = m.start('script', [str(p / 's.py')], p / 'out');"
        "print(m.spawner.process.pid, pid, flush=True); time.sleep(600)"
    )
    (tmp_path / "s.py").write_text(
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher.stdout as out:
        zygote, worker = map(int, out.readline().split())
    until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text())
    child = int((tmp_path / "out").read_text())
    os.kill(zygote if dies == "zygote" else launcher.pid, signal.SIGKILL)
    until(lambda: not lives(worker))
    until(lambda: not lives(zygote))
    if dies == "zygote":  # a launcher that lives sweeps their groups; this one is none
        os.kill(child, signal.SIGKILL)
    until(lambda: not lives(child))
    launcher.kill()
    launcher.wait(PATIENCE_S)


def test_one_that_does_not_listen_yet_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import time\ntime.sleep({PATIENCE_S})\n")
    environ = dict(os.environ, PYTHONPATH=str(tmp_path))
    assert Spawner(environ, plain=True).end() == -signal.SIGKILL


FORKS = """
import mmap, sys, threading
from ckptd.base.runtime import accelerators
from ckptd.elastic.torch.session.zygote import unsafe_to_fork

print(unsafe_to_fork())
path = sys.argv[1] + "/accelerator0"
accelerators.DEVICE_FILES = (accelerators.DeviceFiles("tests", (sys.argv[1],), ""),)
with open(path, "w+b") as file:
    file.truncate(4096)
    print(unsafe_to_fork())
    mapped = mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
# A mapping stays when its file is closed; Python's keeps a descriptor of its own.
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}") == path:
        os.close(int(name))
print(unsafe_to_fork())
accelerators.DEVICE_FILES = ()
e = threading.Event()
threading.Thread(target=e.wait).start()
print(unsafe_to_fork(), flush=True)
e.set()
os._exit(0)
"""


@pytest.mark.long
def test_what_a_fork_would_break_is_seen(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # as its launcher starts it
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.splitlines() == [
        "",
        f"importing PyTorch has opened {tmp_path}/accelerator0",
        f"importing PyTorch has mapped {tmp_path}/accelerator0",
        "importing PyTorch has left 2 threads",
    ], done
    assert "threads" in unsafe_to_fork() or unsafe_to_fork() == ""


PRELOADS = """
import importlib, torch
from ckptd.elastic.torch.session.zygote import PRELOADED
from ckptd.parts import part

def refuse(name):
    def asked(*_, **__):
        raise AssertionError(f"the zygote asks for {name}: a fork after that has no device")
    return asked

for module in (torch.cuda, torch.xpu, torch.mtia):
    for name in ("_lazy_init", "init", "device_count", "is_available", "current_device"):
        if hasattr(module, name):
            setattr(module, name, refuse(f"{module.__name__}.{name}"))
for name in PRELOADED:
    importlib.import_module(name)
part("recorder")
print("none")
"""


@pytest.mark.long
def test_no_device_is_touched_before_the_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELOADS], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "none\n", done
