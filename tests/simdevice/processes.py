"""Functions in processes that have simulated devices, for tests whose own process has none.

One process for each kind of device has everything imported, and forks one for each call.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any, TypedDict, TypeVar, Unpack, cast

from ckptd.errors import CkptdError, DeadlineError
from ckptd.testing.rank_main import RankSpec
from ckptd.testing.ranks import (
    FROZEN,
    RANK_IMPORTS,
    RankOutcome,
    play_world,
    rank_outcomes,
    result_of,
)
from tests.simdevice.loading import installed

__all__ = ["run", "run_simulated_ranks", "servers", "simulated_play"]

T = TypeVar("T")
_LENGTH = struct.Struct("<Q")
_MORE_S = 60.0
"""Beyond the deadline of a call: the start of the process, and what is taken of a world that hangs.
"""


class _Settings(TypedDict, total=False):
    """See `run`."""

    name: str
    devices: int
    schedule: str
    delays: int | None
    deadline_s: float
    env: Mapping[str, str] | None


def run(function: Callable[..., T], *args: object, **settings: Unpack[_Settings]) -> T:
    """Call ``function(*args)`` in a process with simulated devices; return what it returned.

    Parameters
    ----------
    function
        A function of a module: the process imports it by name.
    args
        Pickled.
    settings
        ``name`` (``cuda``) and ``devices`` (2): see `install`. ``schedule`` (``eager``) and
        ``delays`` (None): see `Simulator.test`, in which the function is called. ``deadline_s``
        (120): seconds for everything; then the process writes its stacks and is killed. ``env``:
        further environment variables.

    Raises
    ------
    BaseException
        What the function raised; `AssertionError` where the simulator has found problems.
    DeadlineError
        Kind ``rank-deadline``.
    """
    return _run(1, function, args, group=False, **settings)[0]


def run_simulated_ranks(
    ranks: int, function: Callable[..., T], *args: object, **settings: Unpack[_Settings]
) -> list[T]:
    """Do as `run` in some gloo ranks, each with devices of its own; see `run_ranks`."""
    return _run(ranks, function, args, group=True, **settings)


def _run(
    ranks: int,
    function: Callable[..., T],
    args: tuple[object, ...],
    *,
    group: bool,
    name: str = "cuda",
    devices: int = 2,
    schedule: str = "eager",
    delays: int | None = None,
    deadline_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    asked = (function, schedule, delays, *args)
    play = simulated_play(name, devices)
    outcomes = rank_outcomes(
        ranks, _tested, *asked, deadline_s=deadline_s, env=env, group=group, play=play
    )
    return cast("list[T]", result_of(outcomes, deadline_s))


def _tested(function: Callable[..., T], schedule: str, delays: int | None, *args: object) -> T:
    simulator = installed()
    with simulator.test(schedule, delays):
        value = function(*args)
    if simulator.problems:
        raise AssertionError("; ".join(simulator.problems))
    return value


_servers: list[_Server] = []


def servers() -> list[int]:
    """Return the ids of the processes that fork ranks with devices."""
    return [server.process.pid for server in _servers if server.process is not None]


@cache
def simulated_play(name: str = "cuda", devices: int = 2) -> Callable[..., list[RankOutcome[Any]]]:
    """Return what starts ranks that have devices, for `ckptd.testing.ranks.rank_outcomes`."""
    return _Server(name, devices).play


class _Server:
    """The process that forks others."""

    def __init__(self, name: str, devices: int) -> None:
        self._asked = json.dumps([name, devices, RANK_IMPORTS, sys.path])
        self.process: subprocess.Popen[bytes] | None = None
        _servers.append(self)
        atexit.register(self.close)

    def close(self) -> None:
        """End it."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # what it forked has its output open
                process.communicate(timeout=_MORE_S)

    def play(
        self, specs: Sequence[RankSpec], deadline: float, grace_s: float
    ) -> list[RankOutcome[Any]]:
        """Do as `play_world` there."""
        if self.process is None:
            # The limits must be there before numpy and torch are imported.
            limits = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", self._asked],
                env={**os.environ, **limits, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, (list(specs), deadline, grace_s))
        if not select.select([process.stdout], [], [], deadline - time.monotonic() + _MORE_S)[0]:
            self.close()
            raise DeadlineError("the process with simulated devices does not answer")
        answer = _receive(process.stdout)
        if answer is None:
            self.close()
            raise CkptdError("the process with simulated devices died", kind="rank-died")
        if isinstance(answer, BaseException):
            raise answer
        return cast("list[RankOutcome[Any]]", answer)


def _send(file: IO[bytes], value: object) -> None:
    raw = pickle.dumps(value)
    file.write(_LENGTH.pack(len(raw)) + raw)
    file.flush()


def _receive(file: IO[bytes]) -> Any:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(file.read(_LENGTH.unpack(head)[0]))


def serve() -> None:
    """Be the process that forks others, until its input ends."""
    import importlib

    from tests.simdevice.loading import install

    name, devices, preloaded, path = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = path
    try:
        install(name, devices)
    except Exception as error:  # noqa: BLE001 - the one that asks raises it
        while _receive(sys.stdin.buffer) is not None:
            _send(answers, error)
        return
    for module in (*preloaded, FROZEN):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    while (asked := _receive(sys.stdin.buffer)) is not None:
        specs, deadline, grace_s = asked
        _send(answers, play_world(specs, deadline, grace_s, context))
