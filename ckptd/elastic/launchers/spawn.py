"""Launcher's end of its zygote: starts it, orders processes, hears of their ends.

In it: the zygote's command line and variables; how long it has to end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from ckptd.base.runtime.channel import SocketChannel
from ckptd.elastic.launchers.zygotewire import Fork, FromZygote, Ready, ToZygote
from ckptd.errors import ProcessError

_READ_S = 1e-4
_END_S = 5.0
# The current folder may hold anything: it is looked at last, and not by what is forked.
_CODE = """\
import sys
if sys.path and not sys.path[0]:
    sys.path.append(sys.path.pop(0))
try:
    import torch.distributed  # which serves the job store
except (ImportError, OSError) as error:  # OSError: a shared library of PyTorch is not there
    from ckptd.elastic.launchers.spawn import tell_broken
    tell_broken(int(sys.argv[1]), error)
    sys.exit(1)
from ckptd.elastic.torch.session.zygote import main
rest = main(sys.argv[1:])
if sys.path and not sys.path[-1]:
    sys.path.pop()
rest()
"""
_MOST_SHOWN = 4096
"""Of the characters of the command that are shown: an argument list has a limit."""
_ONLY_THERE = {"OPENBLAS_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""No thread may be started in the zygote; device back-ends are loaded by its forks."""


class Spawner:
    """A zygote. It ends when this is closed, or this process dies, and takes its forks along.

    Parameters
    ----------
    environ
        Of a worker, as far as it is the same for all.
    plain
        Import nothing, and run commands.
    shown
        What its forks will run: it stands behind its own command line, for ``ps`` and ``pgrep``.

    Raises
    ------
    ProcessError
        It cannot be started.
    """

    def __init__(
        self, environ: Mapping[str, str], *, plain: bool, shown: Sequence[str] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-c", _CODE, str(theirs.fileno()), str(os.getpid())]
        command += ["plain" if plain else "preload", *_beginning(shown)]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    env={**environ, **_ONLY_THERE},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise ProcessError("the zygote cannot be started", found=str(error)) from error
        self.began = time.monotonic()
        self._listens = False
        self._sock = ours
        self._channel = SocketChannel(ours, FromZygote)

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for."""
        return self._sock.fileno()

    def order(self, message: ToZygote, fd: int | None = None) -> None:
        """Send an order, with a descriptor beside a `Fork`, which is closed here.

        Nothing happens when the zygote is gone: `take` tells of that.
        """
        try:
            with suppress(ProcessError):
                self._channel.send(message, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def fork(self, order: Fork) -> int:
        """Order a worker; return the gate through which it gets the rest of its environment."""
        read, write = os.pipe()
        self.order(order, read)
        return write

    def take(self) -> list[FromZygote]:
        """Return what has arrived.

        Raises
        ------
        EOFError
            The zygote is gone.
        """
        out: list[FromZygote] = []
        try:
            while (item := self._channel.receive(_READ_S)) is not None:
                out.append(item[0])
                self._listens = True
        except (EOFError, msgspec.MsgspecError) as error:
            if out:  # it is found again the next time
                return out
            raise EOFError(str(error)) from error
        return out

    def end(self) -> int:
        """End it, and with it what it has forked; return its exit code."""
        self._channel.close()
        if not self._listens:  # it imports, and has forked nothing
            self.process.kill()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def tell_broken(fd: int, error: Exception) -> None:
    """Tell the launcher, in the zygote's place, that there can be none."""
    with socket.socket(fileno=fd) as sock:
        broken = f"PyTorch cannot be imported: {type(error).__name__}: {error}"
        SocketChannel(sock, ToZygote).send(Ready(broken=broken[:_MOST_SHOWN]))


def _beginning(words: Sequence[str]) -> list[str]:
    """Return the words that are shown of a command, the last one perhaps shortened."""
    out: list[str] = []
    left = _MOST_SHOWN
    for word in words:
        if left <= 0:
            break
        out.append(word[:left])
        left -= len(word) + 1
    return out
