"""A trainer and workers on hosts of their own, with links of limited bandwidth between them.

A host is a network namespace. ``python -m tests.publish.linked SPEC`` is one of the processes: SPEC
is JSON of `Party`. Each writes a line when it is ready; a trainer then publishes as often as it is
told to, and a worker writes one of `Used` for each version. All stay until they are killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

import ckptd
from ckptd.publish import pull
from ckptd.publish.passing import Passing, _Taker
from ckptd.publish.torch.subscriber import tensor_digest
from tests.monitor.cluster.namespaces import Network, enter
from tests.processes import PATIENCE_S, until
from tests.programs import Program

__all__ = ["FAULTS", "LinkedWorld", "Used"]

LAYOUT = """# layout all
mesh P = x:1
space s { A[v h] }
layout all of s on P { a = A[v h] }
"""
WIDTH = 1024
FAULTS = ("killed as it gives", "stopped as it gives", "killed as it takes", "stopped as it takes")
_AT = 3
"""The answer at which a fault comes."""
_MESSAGE_BYTES = 1 << 18
"""So that a version comes in many messages, as a large one does."""


class Party(msgspec.Struct):
    """What a process is; `rows` are those of its tensor."""

    at: str
    rows: int
    worker: bool
    pass_on: bool = False
    fault: str = ""
    versions: int = 1


class Used(msgspec.Struct):
    """A version that a worker has: its digest, when it had it, and what came how."""

    values: str
    at: float
    received: int
    passed: int


class LinkedWorld:
    """One trainer, and some workers, over a router; see the module.

    Parameters
    ----------
    folder
        Of this world, new.
    hosts, a_host
        Workers are on so many hosts, and so many on each.
    mbit
        What each host can send, and receive, in a second.
    rows
        Of the tensor, 2 KiB each.
    fault
        One of `FAULTS`: of the first worker that comes so far.
    """

    def __init__(
        self,
        folder: Path,
        hosts: int,
        a_host: int,
        *,
        mbit: float,
        rows: int,
        pass_on: bool,
        fault: str = "",
    ) -> None:
        self.folder = folder
        self._ends = ExitStack()
        folder.mkdir()
        try:
            self.network = self._ends.enter_context(Network(1 + hosts))
            for host in range(1 + hosts):
                self.network.shape(host, mbit)
                self.network.shape_received(host, mbit)
            party = Party(str(folder / "at"), rows, worker=False)
            self.trainer = self._start(0, party)
            party = Party(party.at, rows, worker=True, pass_on=pass_on, fault=fault, versions=9)
            self.workers = [self._start(1 + i % hosts, party) for i in range(hosts * a_host)]
            for program in (self.trainer, *self.workers):
                _line(program)
        except BaseException:
            self._ends.close()
            raise

    def _start(self, host: int, party: Party) -> Program:
        run = self.folder / f"run-{host}"
        run.mkdir(mode=0o700, exist_ok=True)
        env = {
            **os.environ,
            "CKPTD_RUN_DIR": str(run),
            "CKPTD_NODE": f"host-{host}",
            "CKPTD_BIND": self.network.address(host),
            "LINKED_SPACE": self.network.spaces[host],
        }
        raw = msgspec.json.encode(party).decode()
        found = Program("-m", "tests.publish.linked", raw, env=env)
        for end in (found.stdout.close, found.stderr.close, found.kill):
            self._ends.callback(end)
        return found

    def publish(self, step: int) -> str:
        """Have a version published; return the digest of its values."""
        (self.folder / f"at.publish-{step}").touch()
        return _line(self.trainer)

    def used(self, worker: Program) -> Used:
        """Return the next version that a worker has."""
        return msgspec.json.decode(_line(worker), type=Used)

    def survivors(self) -> list[Program]:
        """Return the workers but the one that comes to its fault, once it has."""
        mark = self.folder / "at.fault"
        pid = int(until(lambda: mark.exists() and mark.read_text(), "a fault"))
        return [w for w in self.workers if w.pid != pid]

    def sent(self) -> int:
        """Return the bytes that the trainer's host has sent, with all headers."""
        return self.network.sent(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ends.close()


def _line(program: Program) -> str:
    line = program.stdout.readline().strip()
    assert line, program.stderr.read()
    return line


def _break(party: Party) -> None:
    """Put a fault where it comes to the first worker only that comes there."""
    how, _, place = party.fault.partition(" as it ")
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP

    def before(inner: Callable[..., Any], at: Callable[..., int]) -> Callable[..., Any]:
        def faulty(*args: Any) -> Any:
            if at(*args) == _AT:
                try:
                    fd = os.open(f"{party.at}.fault", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    return inner(*args)
                os.write(fd, str(os.getpid()).encode())
                os.kill(os.getpid(), number)
            return inner(*args)

        return faulty

    if place == "gives":
        setattr(_Taker, "_give", before(_Taker._give, lambda taker, at: at))  # noqa: B010
    elif place:
        note = before(Passing._note, lambda _, share, *__: len(share.answers))
        setattr(Passing, "_note", note)  # noqa: B010


def main() -> None:
    party = msgspec.json.decode(sys.argv[1], type=Party)
    enter(os.environ["LINKED_SPACE"])
    pull._MESSAGE_BYTES = _MESSAGE_BYTES
    weights = torch.zeros(party.rows, WIDTH, dtype=torch.bfloat16)
    if party.worker:
        _break(party)
        pass_on = party.pass_on
        with ckptd.Subscriber(LAYOUT, {"a": weights}, party.at, pass_on=pass_on) as subscriber:
            print("ready", flush=True)
            for _ in range(party.versions):
                report = subscriber.update(wait_s=PATIENCE_S)
                at = time.monotonic()
                assert report is not None, subscriber.last_error
                found = tensor_digest(weights).hex()
                used = Used(found, at, report.bytes_received, report.bytes_passed)
                print(msgspec.json.encode(used).decode(), flush=True)
            signal.pause()
    with ckptd.Publisher(LAYOUT, party.at, linger_s=1.0) as publisher:
        print("ready", flush=True)
        for step in range(1, 1 << 30):
            until(Path(f"{party.at}.publish-{step}").exists, "word to publish", within_s=1e9)
            weights.view(torch.int16).random_()
            assert publisher.publish(step, {"a": weights}, wait_s=PATIENCE_S).wait(PATIENCE_S)
            print(tensor_digest(weights).hex(), flush=True)


if __name__ == "__main__":
    main()
