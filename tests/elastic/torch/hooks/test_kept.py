"""A step goes on with what its ranks have kept, here without any fault: see
tests/elastic/torch/session."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckptd.base.runtime import launched
from ckptd.elastic import CanonicalGradients, ElasticSampler, KeptGradients, Schedule, keyed_rng
from ckptd.elastic.torch.session.interrupt import Interrupted, Interrupter
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks
from tests.simdevice import installed, lacking, run

SCHEDULE = Schedule(size=23, microbatch=2, microbatches=6, seed=1)
DATA = torch.randn(SCHEDULE.size, 3, generator=torch.Generator().manual_seed(1))


class Program:
    """A generation of a job, and where it is."""

    group: dist.ProcessGroup | None = None
    has_loss = True

    def __init__(self, kept: KeptGradients | None, *extra: torch.nn.Module) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 5), *extra, torch.nn.Linear(5, 2))
        self.sampler = ElasticSampler(SCHEDULE)
        self.kept = kept
        self.begin()

    def begin(self) -> None:
        self.canonical = (
            CanonicalGradients(self.model.parameters(), microbatches=SCHEDULE.microbatches)
            if self.kept is None
            else self.kept.resume(self.model, self.sampler, group=self.group)
        )
        self.batches = iter(self.sampler)

    def compute(self, most: int = SCHEDULE.microbatches) -> list[int]:
        """Compute micro-batches of the step; return which."""
        indices = list(self.sampler.indices)[:most]
        for index in indices:
            with keyed_rng(3, self.sampler.step, index):
                loss = self.model(DATA[next(self.batches)]).square().sum()
                loss.backward()
            self.canonical.add(index, *((2, loss) if self.has_loss else ()))
        return indices

    def step(self) -> tuple[float, ...]:
        """End the step; return its sums and what its parameters are then."""
        sums = self.canonical.reduce()
        with torch.no_grad():
            for p in self.model.parameters():
                assert p.grad is not None
                p.sub_(p.grad.mul_(0.01))
                p.grad = None
        self.sampler.advance()
        return (*sums, *(x for p in self.model.parameters() for x in p.flatten().tolist()))

    def again(self, *extra: torch.nn.Module) -> Program:
        """The next generation, with the state as it is."""
        new = Program(None, *extra)
        new.model.load_state_dict(self.model.state_dict())
        new.sampler.load_state_dict(self.sampler.state_dict())
        new.kept = self.kept
        new.begin()
        return new


def uninterrupted(steps: int, *extra: torch.nn.Module) -> list[tuple[float, ...]]:
    program = Program(None, *extra)
    out = []
    for _ in range(steps):
        program.compute()
        out.append(program.step())
    return out


def test_a_step_goes_on_where_it_was_left() -> None:
    kept = KeptGradients()
    program = Program(kept, torch.nn.Dropout(0.5))
    program.compute()
    one = program.step()
    program.compute(most=2)
    program = program.again(torch.nn.Dropout(0.5))
    assert kept.found == 2
    assert program.compute(most=3) == [2, 3, 4]
    program = program.again(torch.nn.Dropout(0.5))
    assert (kept.found, program.compute()) == (5, [5])
    two = program.step()
    assert program.compute() == list(range(6)), "the next step is one as any"
    assert [one, two, program.step()] == uninterrupted(3, torch.nn.Dropout(0.5))


def test_a_step_whose_save_is_lost_is_not_computed_again() -> None:
    kept = KeptGradients()
    first = Program(kept)
    state = {name: t.clone() for name, t in first.model.state_dict().items()}
    first.compute()
    one = first.step()
    first.compute(most=1)
    first.model.load_state_dict(state)
    first.sampler.load_state_dict({"consumed": 0})
    program = first.again()
    assert (kept.found, program.compute()) == (6, [])
    assert program.step() == one


@pytest.mark.parametrize("what", ["parameters", "an earlier step"])
def test_what_is_of_something_else_is_dropped(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptd.elastic")
    kept = KeptGradients(steps=1)
    program = Program(kept)
    if what == "an earlier step":
        program.compute()
        program.step()
    program.compute(most=2)
    if what == "parameters":
        with torch.no_grad():
            program.model[0].weight[0, 0] += 1
    else:
        program.sampler.load_state_dict({"consumed": 0})
    program = program.again()
    assert kept.found == 0
    assert list(program.sampler.indices) == list(range(6))
    said = (
        "parameters other than the loaded ones"
        if what == "parameters"
        else "the kept sums are of step 2"
    )
    assert said in caplog.text
    program.compute()
    program.step()


@pytest.mark.parametrize("change", [{"microbatches": 8}, {"microbatch": 3}, {"seed": 2}])
def test_what_is_of_another_schedule_is_dropped(
    change: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptGradients()
    program = Program(kept)
    program.compute()
    program.sampler = ElasticSampler(msgspec.structs.replace(SCHEDULE, **change))
    program.begin()
    assert kept.found == 0
    assert len(program.sampler.indices) == change.get("microbatches", 6)
    assert "another schedule" in caplog.text


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "python": random.random,
}


@pytest.mark.parametrize("what", ["buffers", *DRAWS])
def test_what_depends_on_the_rank_is_not_kept(what: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptGradients()
    program = Program(kept, *([torch.nn.BatchNorm1d(5)] if what == "buffers" else []))
    for index in range(3):
        program.model(DATA[:2]).sum().backward()
        if what in DRAWS:
            DRAWS[what]()
        program.canonical.add(index)
    said = "BatchNorm" if what == "buffers" else "outside of ckptd.elastic.keyed_rng"
    assert caplog.text.count(said) == 1
    assert kept.refused
    program.canonical.add(3)
    again = program.again(*([torch.nn.BatchNorm1d(5)] if what == "buffers" else []))
    assert kept.found == 0
    again.compute()
    again.step()


def test_what_is_no_use_is_refused() -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        KeptGradients(steps=0)
    canonical = CanonicalGradients(torch.nn.Linear(1, 1).parameters(), microbatches=2)
    canonical.add(0, 1, 2)
    with pytest.raises(UsageError, match="a different count of numbers"):
        canonical.add(1, 1)
    sampler = ElasticSampler(SCHEDULE)
    with pytest.raises(UsageError, match="micro-batch out of range"):
        sampler.assign([6])


class Interrupting(torch.Tensor):
    """Gradients, the first look at which ends the generation."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        current = launched.current
        assert current is not None
        current.interrupt()
        signal.raise_signal(signal.SIGURG)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@pytest.fixture
def interrupter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupter]:
    made = Interrupter()
    monkeypatch.setattr(launched, "current", made)
    yield made
    made.close()


def test_a_micro_batch_is_kept_whole_or_not_at_all(interrupter: Interrupter) -> None:
    kept = KeptGradients()
    program = Program(kept)
    program.compute(most=1)

    def generation() -> None:
        try:
            interrupter.enter()
            program.model(DATA[:2]).sum().backward()
            weight = program.model[-1].weight
            weight.grad = weight.grad.as_subclass(Interrupting)
            program.canonical.add(1, 2, 0.5)
            signal.raise_signal(signal.SIGURG)
        finally:
            interrupter.leave()

    with pytest.raises(Interrupted):
        generation()
    program.again()
    assert kept.found == 2


# -- on a device -------------------------------------------------------------------------------


def behind_an_aborted_collective() -> tuple[int, list[float]]:
    """Lose a peer in the backward of the second micro-batch; return what was kept, and the sums."""
    interrupter = launched.current = Interrupter()
    kept = KeptGradients()
    model = torch.nn.Linear(1, 1, bias=False, device=installed().name)
    sampler = ElasticSampler(Schedule(size=4, microbatch=1, microbatches=4))

    def add(gradient: float, index: int) -> None:
        model.weight.grad = torch.full_like(model.weight, gradient)
        canonical.add(index, gradient)

    def generation() -> None:
        try:
            interrupter.enter()
            add(1.0, 0)
            end = installed().hold()
            Timer(0.05, lambda: (interrupter.interrupt(), end())).start()
            add(
                float("nan"), 1
            )  # what a kernel leaves that was told to quit, and what is behind it
            add(1.0, 2)
        finally:
            interrupter.leave()

    canonical = kept.resume(model, sampler)
    with pytest.raises(Interrupted):
        generation()
    interrupter.close()
    launched.current = None
    canonical = kept.resume(model, sampler)
    found = kept.found
    for index in sampler.indices:
        add(1.0, index)
    (total,) = canonical.reduce()
    assert model.weight.grad is not None
    return found, [total, *model.weight.grad.flatten().tolist()]


@pytest.mark.skipif(lacking() is not None, reason=f"NO SIMULATED DEVICE: {lacking()}")
@pytest.mark.xdist_group("simdevice")
def test_what_ran_behind_an_aborted_collective_is_not_kept() -> None:
    assert run(behind_an_aborted_collective, schedule="lazy") == (1, [4.0, 4.0])


# -- several ranks -------------------------------------------------------------------------------


def ranks_come_and_go(folder: Path) -> list[tuple[float, ...]]:
    """Train three steps in five generations; what a rank lacks at times, it has kept."""
    me = dist.get_rank()
    program = Program(KeptGradients())
    out = []

    def regroup(generation: int, *members: int, found: int) -> None:
        nonlocal program
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / str(generation)), len(members))
        where = {"rank": members.index(me), "world_size": len(members)}
        dist.init_process_group("gloo", store=store, **where)
        program = program.again()
        assert program.kept is not None
        assert program.kept.found == found

    program.compute()
    out.append(program.step())
    assert program.compute(most=1) == [[0], [2], [4]][me]
    if me != 2:  # which takes its 4 along
        regroup(2, 0, 1, found=2)
        assert program.compute(most=1) == [[1], [4]][me]
    # It comes back with the 4 that another rank has computed as well, and nothing is left for it:
    # it computes what another rank does, since forward may be collective.
    regroup(3, 0, 1, 2, found=4)
    assert program.compute() == [[3], [5], [3]][me]
    out.append(program.step())
    assert program.compute() == [[0, 1], [2, 3], [4, 5]][me]
    if me != 1:
        regroup(4, 2, 0, found=4)
        assert program.compute() == [[3], [], [2]][me]
    else:
        program.kept = KeptGradients()  # another process in its place
    regroup(5, 1, 0, 2, found=6)
    assert program.compute() == []
    out.append(program.step())
    return out


@pytest.mark.dist
def test_ranks_come_and_go(tmp_path: Path) -> None:
    for out in run_ranks(3, ranks_come_and_go, tmp_path):
        assert out == uninterrupted(3)


def ranks_of_a_replica() -> tuple[float, ...]:
    """Leave a step in which the two ranks of each replica have not come equally far.

    As in a pipeline the second one alone has numbers.
    """
    me = dist.get_rank()
    groups = [dist.new_group([place, place + 2]) for place in range(2)]
    program = Program(None)
    program.kept, program.group, program.has_loss = KeptGradients(), groups[me % 2], me % 2 == 1
    program.sampler = ElasticSampler(SCHEDULE, rank=me // 2, world=2)
    program.begin()
    assert program.compute(most=[3, 2, 1, 2][me]) == [[0, 1, 2], [0, 1], [3], [3, 4]][me]
    program.begin()
    assert program.kept.found == 3
    assert program.compute() == [[2, 4], [5]][me // 2]
    return program.step()


@pytest.mark.dist
def test_ranks_of_a_replica_have_kept_what_all_of_them_have() -> None:
    (whole,) = uninterrupted(1)
    assert run_ranks(4, ranks_of_a_replica) == [whole[2:], whole] * 2


def draw_with_a_single_micro_batch() -> int:
    """Draw unkeyed numbers where one of the ranks has a single micro-batch and cannot see it."""
    torch.manual_seed(0)
    model, sampler = (
        torch.nn.Linear(3, 1),
        ElasticSampler(Schedule(size=9, microbatch=1, microbatches=3)),
    )
    kept = KeptGradients()
    canonical = kept.resume(model, sampler)
    for index in sampler.indices:
        model(DATA[torch.randint(len(DATA), (1,))]).sum().backward()
        canonical.add(index)
    assert kept.refused == (len(sampler.indices) == 2)
    kept.resume(model, sampler)
    assert kept.refused
    return kept.found


def let_ddp_reduce() -> list[bool]:
    """Forget `no_sync` in the second micro-batch, but not in the first."""
    model = torch.nn.Linear(3, 1)
    sampler = ElasticSampler(Schedule(size=9, microbatch=1, microbatches=4))
    kept = KeptGradients()
    canonical = kept.resume(model, sampler)
    ddp = DistributedDataParallel(model)
    refused = []
    for number, index in enumerate(sampler.indices):
        with ddp.no_sync() if number == 0 else nullcontext():
            ddp(DATA[:1]).sum().backward()
        canonical.add(index)
        refused.append(kept.refused)
    assert kept.step(0) is None
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(DATA), model(DATA)), "it goes with the hook"
    return refused


@pytest.mark.dist
def test_what_ddp_has_reduced_is_not_kept() -> None:
    assert run_ranks(2, let_ddp_reduce) == [[False, True]] * 2


def shard_by_fsdp1() -> list[str]:
    found = []
    for original in (False, True):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu")
        )
        with pytest.raises(UsageError) as refused:
            CanonicalGradients(model.parameters(), microbatches=2)
        found.append(refused.value.found or "")
    return found


@pytest.mark.dist
def test_parameters_that_fsdp1_has_sharded_are_refused() -> None:
    assert run_ranks(2, shard_by_fsdp1) == [["FullyShardedDataParallel"] * 2] * 2


@pytest.mark.dist
def test_what_one_rank_refuses_none_keeps() -> None:
    assert run_ranks(2, draw_with_a_single_micro_batch) == [0, 0]
