"""What is done to a rank, by itself, at its moment."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import torch

from tests.monitor.faults.case import Case

__all__ = ["DOES_NOT_RETURN", "Threads", "burn", "flip_bit", "harm"]

_FOR_EVER_S = 3600
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: keep 0 bytes of each packet

_kept: list[object] = []


class Threads:
    """Threads of this process that were not there before: those of a backend."""

    def __init__(self) -> None:
        self._before = _tasks()

    def new(self) -> set[int]:
        """Return the ids of threads that are neither old nor Python's."""
        return _tasks() - self._before - {t.native_id or 0 for t in threading.enumerate()}


def _tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _stop(threads: Threads) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(threads: Threads) -> None:
    time.sleep(_FOR_EVER_S)


def _hold_gil(threads: Threads) -> None:
    ctypes.PyDLL(None).sleep(_FOR_EVER_S)


def _spin(threads: Threads) -> None:
    while True:
        pass


def _kill(threads: Threads) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segv(threads: Threads) -> None:
    ctypes.string_at(8)


def _exit(threads: Threads) -> None:
    os._exit(7)


def _raise(threads: Threads) -> None:
    raise RuntimeError("a planted error")


def _partition(threads: Threads) -> None:
    """Let nothing in any more over the connections to other ranks; they stay open."""
    code = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError:
            continue  # closed meanwhile, or not a socket of this kind


def _freeze_backend(threads: Threads) -> None:
    """Stop the backend's own threads within the process; Python runs on."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    pause = ctypes.cast(libc.pause, ctypes.c_void_p)
    _kept.append(pause)
    libc.signal(signal.SIGUSR2, pause)
    for thread in threads.new():
        libc.tgkill(os.getpid(), thread, signal.SIGUSR2)


_HARMS: dict[str, Callable[[Threads], None]] = {
    "stop": _stop,
    "node": _stop,
    "sleep": _sleep,
    "gil": _hold_gil,
    "spin": _spin,
    "kill": _kill,
    "segv": _segv,
    "exit": _exit,
    "raise": _raise,
    "partition": _partition,
    "frozen-comm": _freeze_backend,
}
DOES_NOT_RETURN = frozenset(_HARMS) - {"partition", "frozen-comm"}


def harm(case: Case, threads: Threads) -> None:
    """Do what the kind of `case` says, if it is done by the rank at a moment."""
    if (act := _HARMS.get(case.kind)) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        act(threads)


def burn(seconds: float) -> None:
    """Compute for so long, by the clock of the wall."""
    end = time.perf_counter() + seconds
    square = torch.ones(32, 32)
    while time.perf_counter() < end:
        square = square @ square * 1e-2


def flip_bit(parameter: torch.Tensor) -> None:
    """Flip one bit of the first number of `parameter`, silently."""
    with torch.no_grad():
        raw = parameter.detach().view(-1)[:1].view(torch.int32)
        raw ^= 1 << 20
