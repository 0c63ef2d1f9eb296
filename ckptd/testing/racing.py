"""Races of many writers, threads and processes, that create one key at once; their time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import IO

from ckptd.errors import ConflictError
from ckptd.store.base import Store, StoreSpec

__all__ = ["race_processes", "race_threads"]

_DEADLINE_S = 60.0


def race_threads(store: Store, key: str, racers: list[str]) -> list[str]:
    """Race one thread for each of `racers` to create `key` with its name; return the winners.

    Any error but a lost race is raised.
    """
    barrier = threading.Barrier(len(racers), timeout=_DEADLINE_S)

    def run(name: str) -> bool:
        barrier.wait()
        try:
            store.put(key, name.encode(), create_only=True)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(len(racers)) as pool:
        won = list(pool.map(run, racers))
    return [name for name, winner in zip(racers, won, strict=True) if winner]


def race_processes(
    spec: StoreSpec, keys: list[str], processes: int, threads: int
) -> list[list[str]]:
    """Race `processes` of `threads` racers each to create `keys`; return the winners of each key.

    All processes are ready before the first race begins, and each race begins when the one
    before has ended.
    """
    with ExitStack() as stack:
        children = [_Racer(stack, spec, f"p{p}", threads) for p in range(processes)]
        for child in children:
            child.answer()
        return [_race(children, key) for key in keys]


def _race(children: list[_Racer], key: str) -> list[str]:
    for child in children:
        child.begin(key)
    return [name for child in children for name in child.answer()]


class _Racer:
    def __init__(self, stack: ExitStack, spec: StoreSpec, name: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptd.testing.racing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(self._process)  # closes the pipes, at which the process ends
        # A racer that hangs is ended, and its closed pipe fails the race.
        timer = threading.Timer(_DEADLINE_S, self._process.kill)
        timer.start()
        stack.callback(timer.cancel)
        setting = {"spec": spec.to_json().decode(), "name": name, "threads": threads}
        self._say(json.dumps(setting))

    def begin(self, key: str) -> None:
        self._say(key)

    def answer(self) -> list[str]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("a racer died or took too long; its error is on stderr")
        winners: list[str] = json.loads(line)
        return winners

    def _say(self, line: str) -> None:
        pipe = _pipe(self._process.stdin)
        pipe.write(line + "\n")
        pipe.flush()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the racer has no pipe")
    return pipe


def _main() -> None:
    setting = json.loads(sys.stdin.readline())
    racers = [f"{setting['name']}t{t}" for t in range(setting["threads"])]
    with StoreSpec.from_json(setting["spec"]).open() as store:
        store.exists("race/warm-up")  # connections are open before the race
        print(json.dumps([]), flush=True)  # noqa: T201 - the answer to the parent
        for line in sys.stdin:
            winners = race_threads(store, line.strip(), racers)
            print(json.dumps(winners), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
