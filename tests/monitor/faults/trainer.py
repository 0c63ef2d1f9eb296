"""One rank of a watched job: an ordinary loop, and at its moment the fault of the case."""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.monitor import check_replicas, injection
from ckptd.monitor.ring import RingReader
from ckptd.monitor.torch.recorder import recorder
from tests.monitor.faults.case import Case
from tests.monitor.faults.harm import Threads, burn, flip_bit, harm
from tests.monitor.faults.loops import Training

__all__ = ["PLANTED", "RESULT", "STOP", "Result", "train"]

PLANTED = "planted"
STOP = "stop"
RESULT = "result-{}.json"
CHECK_EVERY = 5
COMPUTE_S = 0.004
SLOWER_S = 0.020
TIMEOUT = datetime.timedelta(minutes=20)


class Result(msgspec.Struct, frozen=True):
    """What a rank says when it is done: digest of its parameters, steps made, calls made."""

    digest: str
    steps: int
    calls: int


def train(case: Case, rank: int, folder: Path) -> None:
    """Be a rank of `case` until its steps are made or somebody asks to stop."""
    torch.set_num_threads(1)
    if case.watched:
        injection.autoload()  # as in a program that knows nothing of it
    threads = Threads()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=case.world,
        timeout=TIMEOUT,
    )
    _Rank(case, rank, folder, threads).run()
    dist.destroy_process_group()


class _Rank:
    def __init__(self, case: Case, rank: int, folder: Path, threads: Threads) -> None:
        self.case, self.rank, self.folder, self.threads = case, rank, folder, threads
        self.number = 0
        self.training = Training(case.loop)
        half = case.world // 2
        self.pair = _mine(rank, [[i, i + half] for i in range(half)])
        self.side = _mine(rank, [list(range(half)), list(range(half, case.world))])
        self.both = [dist.new_group(list(range(case.world))) for _ in range(2)]

    def run(self) -> None:
        while self.number < self.case.steps and not self.step():
            pass
        dist.barrier()
        result = Result(self.training.digest(), self.number, _calls())
        path = self.folder / RESULT.format(self.rank)
        path.write_bytes(msgspec.json.encode(result))

    def step(self) -> bool:
        """Make one step; return whether it was the last."""
        self.number += 1
        recorder.step(self.number)
        self.point("before")
        burn(COMPUTE_S)
        if self.is_slow():
            burn(SLOWER_S)
        loss = self.training.step(self.number)
        if self.case.kind == "corrupt" and self.is_now():
            self.planted()
            flip_bit(self.training.first())
        if self.case.loop != "pipe":  # whose stages are all different
            check_replicas(self.training.model, every=CHECK_EVERY)
        self.point("between")
        self.exchange()
        self.opposite()
        last = self.share(loss)
        self.point("after")
        self.now_and_then()
        return last

    # --- faults ---------------------------------------------------------------------------------

    def is_now(self) -> bool:
        """Whether this rank's fault is due in this step."""
        return self.number == self.case.step and self.hits(self.rank)

    def hits(self, rank: int) -> bool:
        if self.case.kind == "node":
            return self.case.node(rank) == self.case.node(self.case.victim)
        return rank == self.case.victim

    def is_slow(self) -> bool:
        slow = self.case.kind == "slow" and self.rank == self.case.victim
        if slow and self.number == self.case.step:
            self.planted()
        return slow and self.number >= self.case.step

    def planted(self) -> None:
        """Say when the fault began, before it does."""
        path = self.folder / PLANTED
        part = path.with_suffix(f".{self.rank}")
        part.write_text(repr(time.time()))
        os.rename(part, path)

    def point(self, name: str) -> None:
        """Come by one of the places where a fault may be."""
        case = self.case
        if case.kind == "all-pause" and case.step == self.number and case.point == name:
            self.planted()
            time.sleep(case.pause_s)
        if case.point != name or not self.is_now() or case.kind in _IN_CALLS:
            return
        self.planted()
        harm(case, self.threads)

    # --- communication --------------------------------------------------------------------------

    def exchange(self) -> None:
        """Talk in two groups at once, and to a neighbour on either side."""
        world = self.case.world
        ones = torch.ones(16)
        dist.all_reduce(ones, group=self.pair)
        work = dist.all_reduce(ones, group=self.side, async_op=True)
        got = torch.empty(4)
        ends = [
            dist.P2POp(dist.isend, ones[:4].clone(), (self.rank + 1) % world),
            dist.P2POp(dist.irecv, got, (self.rank - 1) % world),
        ]
        for end in dist.batch_isend_irecv(ends):
            end.wait()
        if work is not None:
            work.wait()

    def opposite(self) -> None:
        """Call in two groups; a planted rank takes them the other way round."""
        if self.case.kind != "opposite" or self.number < self.case.step:
            return
        first, second = self.both
        if self.is_now():
            self.planted()
            first, second = second, first
        dist.all_reduce(torch.ones(2), group=first)
        dist.all_reduce(torch.ones(2), group=second)

    def share(self, loss: float) -> bool:
        """Tell each other the loss, and whether rank 0 was asked to stop."""
        stop = self.rank == 0 and (self.folder / STOP).exists()
        tensor = torch.tensor([loss, float(stop)])
        kind = self.case.kind
        if kind in _WRONG and self.is_now():
            self.planted()
            _WRONG[kind](tensor, self.case.world)
            return False
        if kind == "wrong-root" and self.number == self.case.step:
            dist.broadcast(tensor, 0)
            return False
        dist.all_reduce(tensor)
        return bool(tensor[1] > 0)

    # --- what else happens in a job -------------------------------------------------------------

    def now_and_then(self) -> None:
        """Collect garbage, checkpoint, evaluate, compile: rightful pauses of one rank or all."""
        case, number = self.case, self.number
        if number % 15 == 0:
            gc.collect()
        if case.compile and number % 50 == 10:
            self.compile()
        due = number == case.step and case.kind in _PAUSES
        paused = due and self.rank == case.victim
        if due or (case.every and number % case.every == 0):
            with recorder.phase("ckpt"):
                if self.rank == 0:
                    torch.save(self.training.first().detach().clone(), self.folder / "state.pt")
                if paused and case.kind == "checkpoint-pause":
                    self.planted()
                    time.sleep(case.pause_s)
                dist.barrier()
            with recorder.phase("eval"):
                if paused and case.kind == "evaluation-pause":
                    self.planted()
                    time.sleep(case.pause_s)
                dist.all_reduce(torch.ones(1))

    def compile(self) -> None:
        """Compile something small anew, on this rank alone if its turn has come."""
        if self.number // 50 % self.case.world == self.rank:
            torch._dynamo.reset()
            with torch.no_grad():
                torch.compile(_double, backend="aot_eager")(torch.ones(self.number))


def _calls() -> int:
    recorded = recorder.recorder()
    if recorded is None:
        return 0
    with RingReader(recorded.ring.path) as reader:
        return reader.header().written


def _double(x: Tensor) -> Tensor:
    return x * 2 + 1


def _mine(rank: int, groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all `groups` and return the one with `rank` in it."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


def _skip(tensor: Tensor, world: int) -> None:
    pass


_WRONG: dict[str, Callable[[Tensor, int], object]] = {
    "skip": _skip,
    "wrong-op": lambda tensor, world: dist.broadcast(tensor, 0),
    "wrong-size": lambda tensor, world: dist.all_reduce(torch.ones(len(tensor) + 3)),
    "wrong-root": lambda tensor, world: dist.broadcast(tensor, 1 % world),
    "wrong-reduce": lambda tensor, world: dist.all_reduce(tensor, dist.ReduceOp.MAX),
}
_PAUSES = frozenset({"checkpoint-pause", "evaluation-pause"})
_IN_CALLS = frozenset(_WRONG) | _PAUSES | {"opposite", "slow", "corrupt", "all-pause"}
