"""Ranks that write rings, as processes of their own; no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITER = """
import os, select, signal, sys, threading, time
from pathlib import Path
from ckptd.monitor.ring import RingIdentity, RingWriter
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.job import Phase

folder, rank, world, rate, generation, job = sys.argv[1:]
rank, world, rate = int(rank), int(world), float(rate)
identity = RingIdentity(rank=rank, world=world, job=job, node="n", generation=int(generation))
ring = RingWriter(Path(folder) / f"x-{rank}-{os.getpid()}.ring", identity)
group = ring.add_group(7, world, rank, range(world), "world", "dp")
op, site = ring.text("all_reduce"), ring.text("train.py:1")
ring.phase = Phase.TRAIN
ring.state(RecorderState.CALLS)

def beat():
    while True:
        ring.beat()
        time.sleep(0.1)

threading.Thread(target=beat, daemon=True).start()
print("ready", flush=True)
word, step, calls = "", 0, 0
# A call lasts 1 ms, a step has ten calls, and a pause of 1/rate s is before each.
while True:
    if select.select([0], [], [], 0 if rate else None)[0]:
        line = os.read(0, 100)
        if not line:
            sys.exit(0)
        word, _, rest = line.decode().strip().partition(" ")
    if word == "exit":
        ring.phase = Phase.EXIT
        sys.exit(int(rest))
    if word == "stop":  # in no call, where SIGSTOP from outside may find it
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "spin":
        while True:
            pass
    if word == "gil":
        import ctypes
        ctypes.PyDLL(None).sleep(600)
    if word == "wait":
        ring.enter(group, op, 4, 0, -1, 0, site)
        time.sleep(600)
    if word == "hold":
        time.sleep(600)
    if word == "more":
        for _ in range(int(rest)):
            number, seq = ring.enter(group, op, 4, 0, -1, 0, site)
            ring.leave(group, number, seq)
        word = ""
        print("done", flush=True)
    if not rate:
        continue
    if calls % 10 == 0:
        ring.step(step)
        step += 1
    calls += 1
    time.sleep(1 / rate)
    number, seq = ring.enter(group, op, 4, 0, -1, 0, site)
    time.sleep(0.001)
    ring.leave(group, number, seq)
"""


class Writer:
    """One rank; `say` makes it do what the script knows."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        rate: float = 50.0,
        generation: int = 0,
        job: str = "",
    ) -> None:
        args = [str(folder), *map(str, (rank, world, rate, generation)), job]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid
        self.path = folder / f"x-{rank}-{self.pid}.ring"

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def say(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        self.process.stdin.flush()

    def more(self, calls: int) -> None:
        """Have it make so many calls at once; returns when they are made."""
        self.say(f"more {calls}")
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def writers(folder: Path, world: int, **more: object) -> Iterator[list[Writer]]:
    """Give the ranks of a world, all ready."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [Writer(folder, rank, world, **more) for rank in range(world)]  # type: ignore[arg-type]
    try:
        for writer in made:
            writer.ready()
        yield made
    finally:
        for writer in made:
            writer.close()
