"""Random programs that save, on simulated devices; each byte of each save is compared.

The judge is a second program that makes the same moves at the same time on the host alone: what it
has when `save` is called is what the checkpoint must hold. Nothing of a device, a stream or a save
reaches it.

One seed again, from the top of the repository:
``.venv/bin/python -m tests.simdevice -m tests.checkpoint.torch.device.fuzz SEED``.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.torch import ondevice
from ckptd.checkpoint.torch.ondevice import Pins
from ckptd.errors import CkptdError, SaveError, UsageError
from tests.simdevice import Simulator, installed
from tests.simdevice.simulator import PLENTY

__all__ = ["fuzz", "tally_line"]

Values = dict[str, torch.Tensor]
_CHUNK = 8192
_SCHEDULES = ("lazy", "eager", "starve:side", "starve:main", "random", "random")
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
}
_KINDS: dict[str, Callable[[random.Random], torch.Tensor]] = {
    "flat": lambda rng: torch.randn(rng.choice((1, 7, 1000, 5000))),
    "matrix": lambda rng: torch.randn(33, 65),
    "transposed": lambda rng: torch.randn(40, 70).t(),
    "every other": lambda rng: torch.randn(60, 50)[::2, 1::3],
    "scalar": lambda rng: torch.tensor(3.0),
    "bfloat16": lambda rng: torch.randn(300).bfloat16(),
    "wide": lambda rng: torch.randn(3, 4001),
}


class Plan:
    """What a seed decides before anything runs; both programs are made by it."""

    def __init__(self, seed: int, ranks: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.seed = seed
        self.schedule = rng.choice(_SCHEDULES)
        if self.schedule == "random":
            self.schedule = f"random:{seed}"
        self.delays = seed if rng.random() < 0.1 else None
        self.devices = rng.choice((["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0", "cpu"]))
        self.lazy = rng.choice(("auto", "auto", "auto", "all", "off"))
        self.slots = rng.choice((1, 2, 3))
        self.own_streams = rng.random() < 0.4
        self.lockable = rng.random() > 0.25
        self.memory = rng.choice(("enough", "enough", "none known", "full"))
        self.pinned = rng.random() < 0.5
        self.tensors = [self._tensor(rng) for _ in range(rng.randint(1, 10))]
        self.places = [rng.choice(self.devices) for _ in self.tensors]
        self.parts = self._parts(rng)
        self.averages = [self._tensor(rng) for _ in range(rng.randint(0, 4))]
        self.average_places = [rng.choice(self.devices) for _ in self.averages]
        self.graph = rng.random() < 0.3 and "cuda:0" in self.places
        self.rounds = rng.randint(3, 6)
        self.moves = random.Random(rng.random())
        self.ranks = ranks

    @staticmethod
    def _tensor(rng: random.Random) -> torch.Tensor:
        return _KINDS[rng.choice(list(_KINDS))](rng)

    def _parts(self, rng: random.Random) -> list[tuple[str, list[int]]]:
        """Divide the parameters among optimizers; some may be left without one."""
        numbers = list(range(len(self.tensors)))
        cuts = sorted(rng.sample(range(len(numbers) + 1), min(2, len(numbers))))
        parts = [numbers[: cuts[0]], numbers[cuts[0] : cuts[-1]]]
        return [(rng.choice(list(_OPTIMIZERS)), part) for part in parts if part]


class Program:
    """One of the two programs.

    Parameters
    ----------
    real
        On the simulated devices; else everything is on the host.
    """

    def __init__(self, plan: Plan, *, real: bool) -> None:
        self.real = real
        self._plan = plan
        self.params = [
            torch.nn.Parameter(self._at(t, where))
            for t, where in zip(plan.tensors, plan.places, strict=True)
        ]
        self.optimizers = [
            _OPTIMIZERS[kind]([self.params[i] for i in part]) for kind, part in plan.parts
        ]
        self.averages = [
            self._at(t, where) for t, where in zip(plan.averages, plan.average_places, strict=True)
        ]
        self.streams = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        if real:
            self.streams = {d: torch.cuda.Stream(d) for d in plan.devices if d != "cpu"}
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            if plan.graph:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self._captured()

    def _at(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if not self.real:
            return tensor.clone()
        if where == "cpu":
            return tensor.clone().pin_memory() if self._plan.pinned else tensor.clone()
        return tensor.to(where)

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "params": {str(i): p for i, p in enumerate(self.params)},
            "optimizers": self.optimizers,
            "averages": {str(i): t for i, t in enumerate(self.averages)},
        }

    def values(self) -> Values:
        """Return every tensor of the state, as it is: live."""
        out = {f"params.{i}": p.detach() for i, p in enumerate(self.params)}
        out |= {f"averages.{i}": t for i, t in enumerate(self.averages)}
        for i, optimizer in enumerate(self.optimizers):
            for k, p in enumerate(q for g in optimizer.param_groups for q in g["params"]):
                for name, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor):
                        out[f"optimizers.{i}.{k}.{name}"] = value
        return out

    @contextmanager
    def on_own_streams(self) -> Iterator[None]:
        """Let the program run on streams of its own, if it does."""
        with ExitStack() as stack:
            if self._plan.own_streams:
                for stream in self.streams.values():
                    stack.enter_context(torch.cuda.stream(stream))
            yield

    # -- moves, which both make ------------------------------------------------------------------

    def step(self, gradient: float) -> None:
        for p in self.params:
            p.grad = torch.full_like(p, gradient)
        for optimizer in self.optimizers:
            optimizer.step()

    def average(self) -> None:
        for tensor in self.averages:
            tensor.mul_(0.5).add_(1)

    def shrink(self) -> None:
        with torch.no_grad():
            for p in self.params:
                p.mul_(0.9)

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif not self.real and self._plan.graph:
            self._captured()

    def _captured(self) -> None:
        with torch.no_grad():
            for p, where in zip(self.params, self._plan.places, strict=True):
                if where == "cuda:0":
                    p.add_(0.25)


class Match:
    """One seed: both programs, the saves of the one and what the other had then."""

    def __init__(self, plan: Plan, root: str, simulator: Simulator) -> None:
        self.plan = plan
        self.tally: Counter[str] = Counter()
        self.faults: list[str] = []
        self._simulator = simulator
        self._root = root
        self._judge = Program(plan, real=False)
        self._program = Program(plan, real=True)
        self._wanted: dict[int, Values] = {}
        self._handles: dict[int, Any] = {}
        self._rude: set[int] = set()

    def both(self, move: str, *args: object) -> None:
        """Let both programs make a move."""
        for program in (self._judge, self._program):
            getattr(program, move)(*args)

    def play(self) -> None:
        """Play the rounds, then load what was saved, newest first."""
        ck = ckptd.Checkpointer(
            self._root,
            storage=ckptd.Storage(dedup=False),
            copy=ckptd.CopyOptions(lazy=self.plan.lazy, slots=self.plan.slots),
            timeout_s=60.0,
        )
        moves = self.plan.moves
        left = False
        try:
            self._simulator.lockable = self.plan.lockable
            if not self.plan.lockable and moves.random() < 0.5:
                ck._saver._device_copies.pins = Pins(budget=1)
            for number in range(1, self.plan.rounds + 1):
                self._round(ck, number, moves)
            left = self.plan.ranks == 1 and moves.random() < 0.1
            if left:
                ck.abandon()
                ck._saver._copier.shutdown(wait=True)
                ck = ckptd.Checkpointer(
                    self._root, storage=ckptd.Storage(dedup=False), timeout_s=60.0
                )
        finally:
            self._simulator.lockable, self._simulator.capacity = True, PLENTY
            if sys.exc_info()[0] is not None:
                ck.abandon()
        with ck:
            self._compare(ck, left)

    def _round(self, ck: ckptd.Checkpointer, number: int, moves: random.Random) -> None:
        simulator = self._simulator
        with self._program.on_own_streams():
            if moves.random() < 0.3:
                simulator.stall(0.02)
            self.both("step", moves.random())
            if moves.random() > 0.75:
                return
            self._wanted[number] = {n: t.clone() for n, t in self._judge.values().items()}
            self._save(ck, number, moves)
            lanes = ck._saver._device_copies._streams.values()
            if moves.random() < 0.3:
                for stream in lanes:
                    simulator.stall(0.01, stream)
            if self.plan.ranks == 1 and self.plan.lazy != "off" and moves.random() < 0.08:
                self._rude.add(number)  # a change that did not ask
                self.both("shrink")
            if moves.random() < 0.7:
                if self.plan.lazy == "all":
                    ck.before_mutation()
                self.both("average")
            if moves.random() < 0.3:
                ck.before_mutation()
                self.both("shrink")
            if moves.random() < 0.4:
                ck.before_mutation()
                self.both("replay")

    def _save(self, ck: ckptd.Checkpointer, number: int, moves: random.Random) -> None:
        if self.plan.ranks == 1 and moves.random() < 0.05:
            self._save_in_a_capture(ck, number)
        if self.plan.memory == "full" and self.plan.ranks == 1:  # samples of replicas need some
            self._simulator.capacity = max(self._simulator.allocated) + (64 << 10)
        while number not in self._handles:
            try:
                self._handles[number] = ck.save(number, self._program.state)
            except SaveError as error:
                # That an earlier save was refused is raised once, before anything of this one.
                if error.kind != "mutated" or not self._rude:
                    raise
        self._simulator.capacity = PLENTY

    def _save_in_a_capture(self, ck: ckptd.Checkpointer, number: int) -> None:
        with suppress(CkptdError):  # a save that was refused is looked at in the end
            ck.wait()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ck.save(number, self._program.state)
        except UsageError as error:
            if "cannot be part of a graph" not in error.message:
                raise
            self.tally["refused"] += 1
        else:
            self.faults.append(f"save {number} was captured")

    def _compare(self, ck: ckptd.Checkpointer, left: bool) -> None:
        committed = set()
        for number, handle in self._handles.items():
            try:
                handle.durable(0.0 if left else 60.0)
                committed.add(number)
            except CkptdError as error:
                if number in self._rude and error.kind == "mutated":
                    self.tally["refused"] += 1
                elif left:
                    self.tally["aborted"] += 1
                else:
                    raise
        for number in sorted(committed, reverse=True):
            with self._program.on_own_streams():
                ck.load(self._program.state, number)
                found = self._program.values()
                wrong = [n for n, t in self._wanted[number].items() if not alike(found.get(n), t)]
            self.tally["saves"] += 1
            if wrong or found.keys() != self._wanted[number].keys():
                self.tally["wrong"] += 1
                self.faults.append(f"save {number}: {wrong[:4]}")


def alike(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    """Compare bytes; a tensor on a device is read by the host."""
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    raw = found.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(raw, wanted.detach().contiguous().view(-1).view(torch.uint8))


@contextmanager
def settings(plan: Plan) -> Iterator[None]:
    """Make chunks of some kilobytes, and clones impossible where the plan says so."""
    before = ondevice.CHUNK_BYTES, ondevice.CLONE_ALWAYS, ondevice._free_bytes
    ondevice.CHUNK_BYTES = _CHUNK
    if plan.memory == "none known":
        ondevice.CLONE_ALWAYS, ondevice._free_bytes = 0, lambda device: 0
    try:
        yield
    finally:
        ondevice.CHUNK_BYTES, ondevice.CLONE_ALWAYS, ondevice._free_bytes = before


def fuzz(
    first: int, *, seconds: float, programs: int, root: str = "memory://fuzz"
) -> tuple[Counter[str], list[str]]:
    """Play programs from a seed on, until the time is over or there are so many.

    Returns
    -------
    Counter
        programs, saves, refused, aborted, wrong, raised.
    list of str
        What was wrong, with the seeds.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tally: Counter[str] = Counter()
    faults: list[str] = []
    end = time.monotonic() + seconds
    simulator = installed()
    for seed in range(first, first + programs):
        if time.monotonic() > end and ranks == 1:
            break
        plan = Plan(seed, ranks)
        with simulator.test(plan.schedule, plan.delays), settings(plan):
            match: Match | None = None
            try:
                match = Match(plan, f"{root}-{seed}", simulator)
                match.play()
            except Exception:  # noqa: BLE001 - what any program raises is counted
                tally["raised"] += 1
                faults.append(f"seed {seed}: {traceback.format_exc()[-1500:]}")
        if match is not None:
            tally += match.tally
            faults += [f"seed {seed}, {plan.schedule}, {plan.lazy}: {f}" for f in match.faults]
        faults += [f"seed {seed}: {problem}" for problem in simulator.problems]
        tally["programs"] += 1
    return tally, faults


def tally_line(tally: Mapping[str, int]) -> str:
    """Return the counts as a line."""
    names = ("programs", "saves", "refused", "aborted", "wrong", "raised")
    return ", ".join(f"{tally.get(name, 0)} {name}" for name in names)


def main() -> None:
    """Play one seed, or as many as are asked for."""
    first, programs = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    tally, faults = fuzz(first, seconds=3600.0, programs=programs)
    print(*faults, tally_line(tally), sep="\n")


if __name__ == "__main__":
    main()
