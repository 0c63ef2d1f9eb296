"""Programs that a test, or a program that it started, starts with its own interpreter: as forks.

Each would import what another one has: 0.2 s of CPU for a process that writes, 1 to 3 s for one
that has PyTorch. A server without threads forks them and hands them over to the process that wanted
them: that is their parent, waits for them and kills them as ever. What they see is what
`tests.programs` says, and the kernel shows the command line and the environment that they would
have.

The marker `forks` says what: "small", as without it, what has no PyTorch and is a process of ckptd
or a verb; "all"; or nothing, for a test about how an interpreter begins or about what it imports.
What a verb starts that is small is forked as well. What is to be called in the new process
(`preexec_fn`) is called in the fork, if it has a name in its module.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Play", "close", "have_them_forked", "serve", "set_wanted", "small"]

Play = Callable[[Sequence[str], Mapping[str, str], str], None]
"""Is a program in this process, by arguments, variables and folder; does not return."""
Makers = Mapping[str, Callable[[socket.socket], object]]
Start = Callable[[Mapping[str, Any]], int]

_MODULES = (
    "ckptd.checkpoint.agent",
    "ckptd.checkpoint.save.writer",
    "ckptd.monitor.agent.watched",
    "ckptd.publish.server",
    "ckptd.testing.racing",
    "tests.store.netserver",
)
_VERBS = (
    "from ckptd.cli.main import main; main()",
    "import sys; from ckptd.cli.main import main; main(sys.argv[1:])",
)
_STARTING = ("demo", "run", "watch")
"""Verbs that start what has PyTorch, and processes of ckptd beside it."""
_SMALL = (
    "numpy",
    "psutil",
    "rich.console",
    "ckptd.cli.main",
    "ckptd.checkpoint.agent.node",
    "ckptd.checkpoint.tools.verify",
    "ckptd.elastic.launchers.node",
    "ckptd.monitor.daemon.app",
    *_MODULES[1:],
)
"""What the server without PyTorch has imported: forks of it cost a fifth of those of the other."""
_SET_CHILD_SUBREAPER = 36
_MOST_BYTES, _MOST_FDS, _HIGH = 1 << 18, 32, 512
_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
"""Variables that an interpreter reads when it begins; some can be made up for, or matter little."""
_MADE_UP_FOR = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
_ROOM = 4000
"""Bytes of a command line: what is shown of a fork is no longer than that of its server."""
_KNOWN = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
"""Not these two, which `subprocess` lets no child ignore and Python ignores."""
_libc = ctypes.CDLL(None)
_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_wanted: set[str] = set()
_made: dict[str, Start] = {}
_makers: dict[str, Callable[[socket.socket], object]] = {}
_ends: list[Callable[[], object]] = []
_making = threading.RLock()


def have_them_forked(play: Play, which: str = "all") -> None:
    """Let this process, which has no thread yet, fork what it starts, by a child of its own."""
    ours, theirs = _pair()
    if os.fork() == 0:
        ours.close()
        serve(theirs, play)
    theirs.close()
    _made.clear()
    _made[which] = _starter(ours)
    _wanted.add(which)


def set_wanted(*which: str, makers: Makers | None = None) -> None:
    """Let this process have forked what it starts, by servers that are started when needed.

    Parameters
    ----------
    which
        ``small``: what has no PyTorch, and is one of the processes of ckptd or of its verbs.
        ``all``: everything.
    makers
        How each server is started, with the socket at which it serves.
    """
    _wanted.clear()
    _wanted.update(which)
    _makers.update(makers or {})


def close() -> None:
    """End the servers that were started."""
    _wanted.clear()
    _made.clear()
    while _ends:
        _ends.pop()()


def small(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the server without PyTorch."""
    before = set(_wanted)
    _wanted.clear()
    try:
        code = f"from {__name__} import _be_small; _be_small({theirs.fileno()})"
        return subprocess.Popen(
            [sys.executable, "-c", code, " " * _ROOM],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=os.path.dirname(os.path.dirname(__file__)),
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    finally:
        _wanted.update(before)


def _be_small(fd: int) -> None:
    from tests.programs import live

    def play(words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        if _starts(words):
            have_them_forked(live, "small")
        live(words, env, cwd)

    for module in _SMALL:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=fd), play)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _starter(ours: socket.socket) -> Start:
    lock = threading.Lock()

    def in_child() -> None:
        ours.close()
        _wanted.clear()
        _made.clear()

    os.register_at_fork(after_in_child=in_child)

    def start(order: Mapping[str, Any]) -> int:
        with lock:
            _libc.prctl(_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(ours, [pickle.dumps(order)], order["fds"])
            pid = int(ours.recv(32))
            _libc.prctl(_SET_CHILD_SUBREAPER, 0)
        return pid

    return start


def _started(which: str) -> Start:
    with _making:
        if which not in _made:
            ours, theirs = _pair()
            own = {name: os.environ.pop(name) for name in set(os.environ) if "CKPTD_" in name}
            try:
                server: Any = _makers[which](theirs)  # which outlives the test: no process of its
            finally:
                os.environ.update(own)
            theirs.close()
            _made[which] = _starter(ours)
            _ends.extend((getattr(server, "join", None) or server.wait, ours.close))
        return _made[which]


_INTERPRETER = sys.executable  # a test may set another one


def _fork_exec(words: Sequence[Any], executables: Sequence[Any], *more: Any) -> int:
    order = _order(words, executables, more) if _wanted else None
    if order is not None:
        small = _is_small(order["words"]) and not (_starts(order["words"]) and "all" in _wanted)
        which = "small" if small and "small" in _wanted else "all"
        if which in _wanted:
            return _started(which)(order)
    return int(_exec(words, executables, *more))


def _is_small(words: Sequence[str]) -> bool:
    first, second = [*words, ""][:2]
    return second in (_MODULES if first == "-m" else _VERBS if first == "-c" else ())


def _starts(words: Sequence[str]) -> bool:
    return words[0] == "-c" and [*words, ""][2] in _STARTING


subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


def _order(
    words: Sequence[Any], executables: Sequence[Any], more: Sequence[Any]
) -> dict[str, Any] | None:
    """Return what is to be forked; None for what is to be a process of its own."""
    (_, keep, cwd, env, stdin, _, _, stdout, _, stderr, _, told, _, session, group) = more[:15]
    wanted = [os.fsdecode(word) for word in words[1:]]
    rest = wanted[wanted[:1] == ["-u"] :]
    here = dict(os.environ)
    environ = here if env is None else dict(os.fsdecode(line).split("=", 1) for line in env)
    if (
        [os.fsdecode(path) for path in executables] != [_INTERPRETER]
        or not rest
        or (rest[0].startswith("-") and rest[0] not in ("-c", "-m"))
        or any(x is not None for x in more[15:18])  # groups and users
        or "<" in getattr(more[19], "__qualname__", "")  # no other process has what it refers to
        or _at_start(environ) != _at_start(here)
    ):
        return None
    given = {number: fd for number, fd in enumerate((stdin, stdout, stderr)) if fd != -1}
    given |= {fd: fd for fd in keep if fd > 2 and fd != told}
    return {
        "words": wanted,
        "env": environ,
        "cwd": os.path.abspath(os.fsdecode(cwd or ".")),
        "numbers": list(given),
        "fds": list(given.values()),
        "session": session,
        "group": group,
        "call": more[19],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "ignored": [n for n in _KNOWN if signal.getsignal(n) == signal.SIG_IGN],
    }


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_AT_START) and name not in _MADE_UP_FOR
    }


def serve(sock: socket.socket, play: Play) -> None:
    """Fork what is ordered until the process that orders has ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _KNOWN)  # of a fork, until it has its own
    while True:
        try:
            raw, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, _MOST_FDS)
        except ConnectionResetError:  # it was killed while it waited for an answer
            raw = b""
        if not raw:
            os._exit(0)
        read, write = os.pipe()
        # Twice: the child of one that ends is of the nearest above it that takes orphans.
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (pid := os.fork()) == 0:
                for fd in (sock.detach(), read, write):
                    os.close(fd)
                while os.getppid() == between:
                    time.sleep(0.001)
                _become(pickle.loads(raw), fds, play)
            os.write(write, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        sock.send(os.read(read, 32))
        for fd in (*fds, read, write):
            os.close(fd)


def _become(order: Mapping[str, Any], fds: Sequence[int], play: Play) -> None:
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, order["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if order["session"]:
        os.setsid()
    if order["group"] >= 0:
        os.setpgid(0, order["group"])
    os.environ.clear()
    os.environ.update(order["env"])
    _show([sys.executable, *order["words"]], order["env"])
    if order["env"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable(file=2)
    multiprocessing.set_start_method(None, force=True)  # the fork server's is no program's default
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number in _KNOWN:
        if number in order["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    if order["call"] is not None:
        order["call"]()
    play(order["words"], order["env"], order["cwd"])


def _show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Let the kernel show these, as far as there is room where those of the server were.

    The C library knows of the old environment no more.
    """
    with open("/proc/self/stat") as file:
        places = list(map(int, file.read().rpartition(")")[2].split()[45:49]))
    own_first = sorted(env.items(), key=lambda item: not item[0].startswith("CKPTD_"))
    for lines, start, end in (
        (words, *places[:2]),
        ([f"{name}={value}" for name, value in own_first], *places[2:]),
    ):
        raw = b"\0".join(map(os.fsencode, lines))[: end - start - 1]
        ctypes.memmove(start, raw.ljust(end - start, b"\0"), end - start)
