"""Programs that fail for real on rank 1 of three: ``python -m tests.monitor.said.real FOLDER``.

Ranks are forks, so that PyTorch is imported once; each prints into ``rank N`` of the folder.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.processes import free_port

RANKS, BAD = 3, 1
_FAIL_S, _TIMEOUT_S = 30.0, 4
PROGRAMS: dict[str, tuple[Callable[[], None], str, tuple[int, ...]]] = {}


def program(kind: str, *ranks: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register what rank 1 does in its third step, the class and the ranks that are right."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[function.__name__] = (function, kind, ranks)
        return function

    return register


@program("program", BAD)
def a_key_is_missing() -> None:
    print({"a": 1}["b"])


@program("program", BAD)
def shapes_do_not_fit() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


@program("peer gone", BAD)
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@program("native crash", BAD)
def segmentation_fault() -> None:
    faulthandler.enable()
    ctypes.string_at(0)


@program("heap damaged", BAD)
def freed_twice() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    block = libc.malloc(64)
    for _ in range(3):
        libc.free(block)


@program("host memory", BAD)
def no_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


@program("disk full", BAD)
def disk_full() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)


@program("missing file", BAD)
def no_checkpoint() -> None:
    torch.load("checkpoints/step-100.pt")


@program("damaged checkpoint", BAD)
def garbage_as_checkpoint() -> None:
    Path("bad.pt").write_bytes(b"PK\x03\x04" + b"garbage" * 100)
    torch.load("bad.pt")


@program("checkpoint of another model", BAD)
def another_model() -> None:
    torch.nn.Linear(3, 3).load_state_dict(torch.nn.Linear(4, 4).state_dict())


@program("environment", BAD)
def module_is_missing() -> None:
    __import__("flash_attn_of_another_name")


@program("too many files", BAD)
def too_many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = [Path("/dev/null").open() for _ in range(100)]  # noqa: SIM115
    del kept


@program("port taken")
def port_taken() -> None:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(one.getsockname())


@program("not finite", BAD)
def loss_is_nan() -> None:
    raise ValueError("loss is nan at step 3")


@program("call timed out", BAD)
def sleeps() -> None:
    time.sleep(_TIMEOUT_S + 3)
    os._exit(0)


@program("left at a barrier", BAD)
def misses_a_barrier() -> None:
    time.sleep(_TIMEOUT_S + 3)
    os._exit(0)


@program("calls differ")
def another_size() -> None:
    dist.all_reduce(torch.ones(5000))


class _Dies(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


@program("loader worker", BAD)
def a_loader_worker_is_killed() -> None:
    list(DataLoader(_Dies(), num_workers=1))


@program("not all came")
def no_such_host() -> None:
    socket.create_connection(("no-such-host.invalid", 1))


def rank(name: str, number: int, port: int, folder: Path) -> None:
    file = os.open(folder / f"rank {number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            f"tcp://127.0.0.1:{port}",
            rank=number,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        )
        for step in range(4):
            if step == 2 and number == BAD:
                PROGRAMS[name][0]()
            if step == 2 and name == "misses_a_barrier":
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=_TIMEOUT_S - 2))
            dist.all_reduce(torch.ones(1000))
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def play(folder: Path, name: str) -> dict[str, str]:
    """Run one program; return what each rank has printed."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    pids = []
    for number in range(RANKS):
        pid = os.fork()
        if not pid:
            rank(name, number, port, folder)
        pids.append(pid)
    end = threading.Timer(_FAIL_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    end.start()
    for pid in pids:
        os.waitpid(pid, 0)
    end.cancel()
    return {f"rank {n}": (folder / f"rank {n}").read_text() for n in range(RANKS)}


def main() -> None:
    for name in sys.argv[2:] or PROGRAMS:
        play(Path(sys.argv[1]) / name, name)


if __name__ == "__main__":
    main()
