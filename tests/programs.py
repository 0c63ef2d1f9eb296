"""Programs that import PyTorch, started as forks of the process that ranks are forked from.

An interpreter that imports PyTorch costs 2 s of CPU, a fork of one that has it a hundredth of that.
What a program sees is what it would see of its own: arguments, variables, folder, standard streams,
`__main__`, handlers at exit and an exit code. A test about how an interpreter begins, about what it
imports, or about the very end of one starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import IO, Any

from ckptd.testing.ranks import _start_server
from tests.offspring import have_them_forked, serve
from tests.processes import PATIENCE_S

__all__ = ["Program", "live", "live_forking", "run", "server", "workers", "zygote"]

STACKS_S = 5.0
"""To write them, on a busy machine."""


def zygote() -> Any:
    """Return the context of multiprocessing whose processes are forks of one that has PyTorch.

    There is one in each process of the tests: what it imports is in `RANK_IMPORTS`.
    """
    return _start_server()


def server(theirs: socket.socket) -> Any:
    """Start what forks, for this process, what it starts with its own interpreter."""
    process = zygote().Process(target=serve, args=(theirs, live_forking))
    process.start()
    return process


def workers(theirs: socket.socket) -> Any:
    """Start what forks pytest-xdist's workers, each with a process like the `zygote` of its own."""
    process = zygote().Process(target=serve, args=(theirs, _live_with_zygote))
    process.start()
    return process


class Program:
    """What ``python WORDS...`` would be; it leads a session.

    Parameters
    ----------
    together
        Its standard error is written among its standard output.
    forking
        What it starts with its own interpreter is a fork too: see `tests.offspring`.

    Attributes
    ----------
    stdout, stderr
        What it writes, as text.
    """

    def __init__(
        self,
        *words: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = ".",
        together: bool = False,
        forking: bool = False,
    ) -> None:
        self.words = [os.fspath(word) for word in words]
        context = zygote()
        out, theirs = context.Pipe(duplex=False)
        err, other = (out, theirs) if together else context.Pipe(duplex=False)
        given = (self.words, dict(os.environ if env is None else env), os.path.abspath(cwd))
        self._process = context.Process(target=_be, args=(*given, theirs, other, forking))
        self._process.start()
        self.pid: int = self._process.pid
        self.stdout = _opened(out)
        self.stderr = self.stdout if together else _opened(err)
        for end in {out, err, theirs, other}:
            end.close()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Return how it ended (negative: by a signal), as `subprocess.Popen.wait` does."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.words, timeout)
        return int(self._process.exitcode)

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Return what it still writes until it ends.

        Its session is killed when it is too late; notes of the error are what it wrote, with the
        stacks of its threads.
        """
        said = {self.stdout: "", self.stderr: ""}

        def read(file: IO[str]) -> None:
            with file:
                said[file] = file.read()

        readers = [threading.Thread(target=read, args=(file,), daemon=True) for file in said]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGABRT)  # its threads write where they are
            self._process.join(STACKS_S)
            self.kill()
            for file, reader in zip(said, readers, strict=True):
                reader.join(STACKS_S)
                error.add_note(said[file])
            raise
        finally:
            for reader in readers:
                reader.join(timeout)
        return said[self.stdout], said[self.stderr]

    def kill(self) -> None:
        """Kill its session, and return when it has ended."""
        for kill in (os.killpg, os.kill):  # the second where it does not lead a session yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self._process.join()


def run(
    *words: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ".",
    timeout: float = PATIENCE_S,
    forking: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Return how a program ended, and what it wrote."""
    program = Program(*words, env=env, cwd=cwd, forking=forking)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(program.words, program.wait(), out, err)


def _opened(end: Connection) -> IO[str]:
    return open(os.dup(end.fileno()), errors="replace")


def _be(
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    out: Connection,
    err: Connection,
    forking: bool,
) -> None:
    """Be the program, in the forked process; it ends here."""
    os.setsid()
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), number)
    out.close()
    err.close()
    faulthandler.enable(2)
    multiprocessing.set_start_method(None, force=True)  # the fork server's is no program's default
    if forking:
        have_them_forked(live_forking)
    live(words, env, cwd)


def live_forking(words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Be a program in this process, and have forked what it starts with its own interpreter."""
    have_them_forked(live_forking)
    live(words, env, cwd)


def _live_with_zygote(words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Be a program in this process, whose `zygote` is a fork of its own, and not an interpreter.

    What each would import costs 3 s of CPU.
    """
    known: Any = forkserver._forkserver
    os.close(known._forkserver_alive_fd)  # of the run's, which ends with the run
    untyped: Any = connection
    address, (alive, ours) = untyped.arbitrary_address("AF_UNIX"), os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        if (pid := os.fork()) == 0:
            try:
                os.close(ours)
                os.dup2(2, 1)  # nobody else holds the pipes to the one that has started the worker
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                forkserver.main(listener.detach(), alive, [])
            except SystemExit:  # when the worker has ended
                os._exit(0)
            except BaseException:  # noqa: BLE001 - nothing else of this process may run
                traceback.print_exc()
            os._exit(1)
    os.close(alive)
    known._forkserver_address, known._forkserver_alive_fd = address, ours
    known._forkserver_pid = pid
    live(words, env, cwd)


def live(words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Be a program in this process, which ends with it."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # so that tempfile reads the variables again
    at_once = words[0] == "-u"
    for name, number in (("stdout", 1), ("stderr", 2)):
        buffering = 1 if number == 2 or at_once else -1
        setattr(sys, name, open(number, "w", buffering, closefd=False))  # noqa: SIM115
    words = words[at_once:]
    code = 0
    try:
        _play(*words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _play(first: str, *rest: str) -> None:
    if first == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # what is imported already is run with a warning
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        main: Any = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
