"""Zygote: a process with PyTorch imported that forks workers; what it preloads; unsafe to fork.

In it: the list of modules imported ahead; which threads or initialised devices forbid forks.

Importing takes longer than all else of a restart together. The zygote never has a second thread nor
a device, which a fork would break: where it finds one it runs commands instead. Its launcher starts
it, and tells it over a socket what to start; see `ckptd.elastic.launchers.zygotewire`.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from ckptd.base.runtime.accelerators import device_file
from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.host import mapped_files
from ckptd.base.runtime.pauses import spare
from ckptd.crashes import report_crashes
from ckptd.elastic.launchers import zygotewire
from ckptd.elastic.torch.session.zygote_child import become, die_with
from ckptd.errors import ProcessError
from ckptd.parts import part

PRELOADED = (
    "torch",
    "torch.distributed",
    # What follows is imported by optimizers and wrappers on first use: a second of each rank.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    # Each rank makes a checkpointer: a tenth of a second.
    "ckptd.checkpoint.torch.checkpointer",
    "ckptd.checkpoint.torch.saver",
    "ckptd.checkpoint.torch.loader",
    "ckptd.elastic.torch.session.elastichooks",
)
_READ_S = 1e-4


def unsafe_to_fork() -> str:
    """Return why this process cannot be forked from; empty if it can."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"importing PyTorch has left {threads} threads"
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one through which they are listed
            target = os.readlink(f"/proc/self/fd/{name}")
            if device_file(target):
                return f"importing PyTorch has opened {target}"
    if target := next(filter(device_file, mapped_files()), ""):
        return f"importing PyTorch has mapped {target}"
    for kind in ("cuda", "xpu", "mtia"):
        module = getattr(sys.modules.get("torch"), kind, None)
        if module is not None and module.is_initialized():
            return f"importing PyTorch has initialised a device of {kind}"
    return ""


class Zygote:
    """Takes orders until the launcher is gone, and then ends what it has started.

    Parameters
    ----------
    sock
        To the launcher.
    unsafe
        See `Ready`.
    """

    def __init__(self, sock: socket.socket, unsafe: str) -> None:
        self._channel = SocketChannel(sock, zygotewire.ToZygote)
        self._commands = bool(unsafe)
        self._pids: dict[int, int] = {}
        self._fds: dict[int, int] = {}
        """Numbers of processes that have not ended, by their pidfd."""
        self._poll = select.epoll()  # which returns what is ready in the order of that
        self._poll.register(sock, select.EPOLLIN)
        self._terminated = signal.signal(signal.SIGTERM, self._end)
        self._mine = _open_descriptors()
        """Of the interpreter and of what it has imported; a fork keeps no other."""
        self._tell(zygotewire.Ready(unsafe))

    def serve(self) -> Callable[[], None]:
        """Serve, and end the process; in a fork, return what that is to run."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._fds:
                    self._exited(fd)
            try:
                while (item := self._channel.receive(_READ_S)) is not None:
                    message, given = item
                    if isinstance(message, zygotewire.Reap):
                        os.waitpid(self._pids.pop(message.number), 0)
                    elif given is not None and (inner := self._fork(message, given)) is not None:
                        return inner
            except EOFError:
                self._end()

    def _tell(self, message: zygotewire.FromZygote) -> None:
        try:
            self._channel.send(message)
        except ProcessError:
            self._end()

    def _fork(self, order: zygotewire.Fork, given: int) -> Callable[[], None] | None:
        sys.stdout.flush()
        sys.stderr.flush()
        mother = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(given)
            self._tell(zygotewire.NotForked(order.number, str(error)))
            return None
        if pid == 0:
            signal.signal(signal.SIGTERM, self._terminated)
            die_with(mother, signal.SIGKILL)
            self._channel.close()
            self._poll.close()
            self._close_others(given)
            return become(order, given, self._commands)
        os.close(given)
        fd = os.pidfd_open(pid)
        self._pids[order.number], self._fds[fd] = pid, order.number
        self._poll.register(fd, select.EPOLLIN)
        self._tell(zygotewire.Forked(order.number, pid))
        return None

    def _close_others(self, given: int) -> None:
        """Close the descriptors of other forks."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in self._mine and int(name) != given:
                with suppress(OSError):  # the one through which they were listed
                    os.close(int(name))

    def _exited(self, fd: int) -> None:
        number = self._fds.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        # It stays a zombie: until the launcher says Reap, no other process can get its id.
        info = os.waitid(os.P_PID, self._pids[number], os.WEXITED | os.WNOWAIT)
        if info is None:  # not without WNOHANG
            return
        killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        self._tell(zygotewire.Exited(number, -info.si_status if killed else info.si_status))

    def _end(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Kill all workers and their groups: the launcher is gone."""
        for pid in self._pids.values():
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        os._exit(0)


def _open_descriptors() -> set[int]:
    out = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one through which they were listed
            os.fstat(int(name))
            out.add(int(name))
    return out


def _preload() -> str:
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        part("recorder")  # with its modules, for ranks that are watched
    except Exception as error:  # noqa: BLE001 - a program that needs none of this can run
        return f"PyTorch cannot be imported: {type(error).__name__}: {error}"
    # What is never looked at again need not be copied for each fork, nor torn down at its end.
    gc.collect()
    spare()
    return unsafe_to_fork()


def main(arguments: list[str]) -> Callable[[], None]:
    """Be a zygote, which does not return; return in each fork, with what that is to run.

    Parameters
    ----------
    arguments
        Descriptor of the socket; process id of the launcher; ``preload``, or ``plain`` if nothing
        is to be imported and commands are to be run. What follows is only to be seen by people.
    """
    report_crashes()  # also of the ranks, which are its forks
    launcher = int(arguments[1])
    die_with(launcher, signal.SIGKILL)
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    unsafe = "as ordered" if arguments[2] == "plain" else _preload()
    zygote = Zygote(sock, unsafe)
    # From now on there may be workers, which the handler takes along.
    die_with(launcher, signal.SIGTERM)
    return zygote.serve()
