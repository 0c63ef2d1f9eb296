"""Batches go on where they were: by a plain model, whatever makes them and whatever else draws."""

from __future__ import annotations

import logging
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import ckptd
from ckptd.checkpoint.torch.data.facts import batch_digest
from ckptd.checkpoint.torch.state.flatten import flatten
from ckptd.checkpoint.torch.state.rng import Rng, RngStreams
from ckptd.elastic import ElasticSampler, Schedule, keyed_generator
from ckptd.errors import CorruptError, MismatchError, UsageError
from tests.checkpoint.torch.bridge import give, take

Batch = list[float]


@pytest.fixture(autouse=True)
def _keep_streams() -> Iterator[None]:
    before = Rng().state_dict()
    yield
    Rng().load_state_dict(before)


class Noisy(Dataset[float]):
    """Samples with augmentation from the global streams."""

    def __init__(self, size: int = 14) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> float:
        return i + float(torch.rand(())) / 2 + random.random() / 4 + float(np.random.rand()) / 8


class Plain(Noisy):
    def __getitem__(self, i: int) -> float:
        return float(i)


class Flow(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        for i in range(11):
            yield i + float(torch.rand(()))


class DrawsEach(Sampler[int]):
    """A sampler that asks the global streams for each index."""

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        for _ in range(14):
            yield int(torch.randint(14, ()))


class Epochs(Sampler[int]):
    """Like a distributed sampler: an order that follows from the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(14, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def a_function() -> Batch:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def own_generator() -> DataLoader[float]:
    return DataLoader(Noisy(), 3, shuffle=True, generator=torch.Generator().manual_seed(5))


def weighted() -> DataLoader[float]:
    return DataLoader(Noisy(), 3, sampler=WeightedRandomSampler([1.0] * 14, 14))


def replaced() -> DataLoader[float]:
    data = Noisy()
    return DataLoader(data, 3, sampler=RandomSampler(data, replacement=True, num_samples=20))


MAKERS: dict[str, Callable[[], Any]] = {
    "function": lambda: a_function,
    "shuffled": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), 4, drop_last=True),
    "own generator": own_generator,
    "weighted": weighted,
    "with replacement": replaced,
    "sampler that draws": lambda: DataLoader(Noisy(), 3, sampler=DrawsEach()),
    "set_epoch": lambda: DataLoader(Noisy(), 3, sampler=Epochs()),
    "iterable": lambda: DataLoader(Flow(), 3),
    "without batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "list": lambda: [[1.0], [2.0], [3.0]],
}


def listed(batch: Any) -> Batch:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


class Program:
    """Trains on batches and draws besides, as dropout does; may take batches ahead."""

    def __init__(self, source: Any, ahead: int) -> None:
        self.data = ckptd.Batches(source, ahead=ahead)
        self.state = {"data": self.data, "rng": Rng()}
        self.ahead = ahead
        self.held: list[Batch] = []

    def begin(self) -> None:
        self.held = [listed(next(self.data)) for _ in range(self.ahead)]

    def step(self) -> tuple[Batch, float]:
        self.held.append(listed(next(self.data)))
        return self.held.pop(0), float(torch.rand(()))


@given(
    kind=st.sampled_from(list(MAKERS)),
    before=st.integers(0, 12),
    ahead=st.integers(0, 2),
    more=st.integers(0, 3),
    setup=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_a_program_that_is_begun_anew_goes_on_as_though_it_had_not_ended(
    kind: str, before: int, ahead: int, more: int, setup: int, seed: int
) -> None:
    Rng().reseed(seed)
    program = Program(MAKERS[kind](), ahead)
    program.begin()
    for _ in range(before):
        program.step()
    taken = take(program.state)
    wanted = [program.step() for _ in range(10)]

    Rng().reseed(seed + 1)
    again = Program(MAKERS[kind](), ahead)
    for _ in range(more):  # what a warm-up before the load takes is taken back
        next(again.data)
    give(taken, again.state)
    again.data.loaded(before, [RngStreams.now()])
    for _ in range(setup):
        iter(DataLoader(Plain()))
        torch.rand(())
    again.begin()
    assert [again.step() for _ in range(10)] == wanted


@given(
    kind=st.sampled_from([k for k in MAKERS if k != "function"]),
    at=st.integers(1, 11),
    live=st.booleans(),
)
def test_loops_over_epochs_go_on_within_an_epoch(kind: str, at: int, live: bool) -> None:
    def run(program: Program, count: int) -> Iterator[tuple[int, Batch]]:
        while True:
            epoch = program.data.epoch
            for batch in program.data:
                yield epoch, listed(batch)
                count -= 1
                if not count:
                    return

    Rng().reseed(1)
    program = Program(MAKERS[kind](), 0)
    loop = run(program, 60)
    for _ in range(at):
        next(loop)
    taken = take(program.state)
    wanted = [next(loop) for _ in range(8)]
    again = program if live else Program(MAKERS[kind](), 0)
    give(taken, again.state)
    # A loop under way is led back as well; the numbers of its epochs are its own.
    goes_on = loop if live else run(again, 60)
    found = [next(goes_on) for _ in range(8)]
    assert [b for _, b in found] == [b for _, b in wanted]
    assert live or found == wanted


def test_what_else_is_drawn_changes_no_batch() -> None:
    def batches(others: int) -> list[Batch]:
        Rng().reseed(3)
        data = ckptd.Batches(DataLoader(Noisy(), 3, shuffle=True))
        found = []
        for _ in range(12):
            found.append(listed(next(data)))
            torch.rand(others)
            random.random()
        return found

    assert batches(0) == batches(5)


def test_making_batches_draws_nothing_else() -> None:
    Rng().reseed(3)
    data = ckptd.Batches(DataLoader(Noisy(), 3, shuffle=True))
    next(data)
    before = take({"rng": Rng()})
    for _ in range(12):
        next(data)
    assert take({"rng": Rng()}).per_rank == before.per_rank


def test_two_of_the_same_take_different_batches() -> None:
    Rng().reseed(3)
    one, other = ckptd.Batches(a_function), ckptd.Batches(a_function)
    assert next(one) != next(other)


@pytest.mark.parametrize("begins", [2, 3, 5, 8])
@pytest.mark.parametrize("killed", [1, 3, 4])
def test_batches_that_begin_later_leave_what_was_drawn(
    begins: int, killed: int, tmp_path: Path
) -> None:
    """Of several, the first batch of one alone follows the load; a step was made before others."""

    def run(seed: int, root: Path, last: int) -> list[Any]:
        Rng().reseed(seed)
        train, late = (ckptd.Batches(DataLoader(Noisy(), 3, shuffle=True)) for _ in range(2))
        state = {"train": train, "late": late, "rng": Rng()}
        found = []
        with ckptd.Checkpointer(root, every=1, keep=1) as ck:
            start = ck.load(state) if ck.latest() is not None else 0
            torch.rand(start if begins != 8 else 0)  # a warm-up shifts nothing if a batch follows
            for step in range(start + 1, last + 1):
                made = [listed(next(train))] if begins != 8 else []
                drawn = float(torch.rand(())), random.random(), float(np.random.rand())
                if step >= begins and step % begins != 1:
                    made.append(listed(next(late)))
                found.append((made, drawn))
                ck.save(step, state)
        return found

    wanted = run(3, tmp_path / "whole", 10)
    assert run(3, tmp_path / "root", killed) == wanted[:killed]
    assert run(4, tmp_path / "root", 10) == wanted[killed:]


def test_the_streams_come_back_when_a_function_fails() -> None:
    def fails() -> Batch:
        torch.rand(3)
        raise RuntimeError("no data")

    data = ckptd.Batches(fails)
    with pytest.raises(RuntimeError):
        next(data)
    before = take({"rng": Rng()})
    with pytest.raises(RuntimeError):
        next(data)
    assert take({"rng": Rng()}).per_rank == before.per_rank


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __getitem__(self, i: int) -> float:
        self.made.append(i)
        return float(i)


@pytest.mark.parametrize("batch_size", [3, None])
def test_without_refetching_what_was_taken_is_not_made(batch_size: int | None) -> None:
    def program() -> tuple[Counted, ckptd.Batches]:
        data = Counted()
        loader = DataLoader(data, batch_size, shuffle=True)
        return data, ckptd.Batches(loader, refetch=False)

    Rng().reseed(1)
    _, batches = program()
    for _ in range(3):
        next(batches)
    taken = take({"data": batches})
    wanted = [listed(next(batches)) for _ in range(20)]
    data, batches = program()
    give(taken, {"data": batches})
    found = listed(next(batches))
    assert found == wanted[0]
    assert data.made == np.atleast_1d(found).tolist()
    assert [listed(next(batches)) for _ in range(19)] == wanted[1:]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_augment_go_on(persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    def program() -> ckptd.Batches:
        data = Plain() if persistent else Noisy()
        loader: Any = DataLoader(
            data, 2, shuffle=True, num_workers=2, persistent_workers=persistent, prefetch_factor=3
        )
        return ckptd.Batches(loader)

    Rng().reseed(1)
    batches = program()
    for _ in range(9):
        next(batches)
    taken = take({"data": batches})
    wanted = [listed(next(batches)) for _ in range(7)]
    batches = program()
    give(taken, {"data": batches})
    assert [listed(next(batches)) for _ in range(7)] == wanted
    assert not caplog.records


@pytest.mark.parametrize("data", [Noisy(), Plain()], ids=["draws", "draws nothing"])
def test_workers_that_draw_for_ever_are_told_of(data: Noisy, tmp_path: Path) -> None:
    # Workers outlive the epoch: what they draw in the second depends on the first.
    loader: Any = DataLoader(data, 2, num_workers=1, persistent_workers=True)
    batches = ckptd.Batches(loader)
    log = tmp_path / "log"  # what a worker logs stays in its process, but for files
    handler = logging.FileHandler(log)
    logging.getLogger("ckptd").addHandler(handler)
    try:
        for _ in range(8):
            next(batches)
    finally:
        logging.getLogger("ckptd").removeHandler(handler)
        handler.close()
    assert ("keyed_generator" in log.read_text()) == (type(data) is Noisy)


class Keyed(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int) -> float:
        return i + float(torch.rand((), generator=keyed_generator(1, self.epoch, i)))


def test_the_data_set_hears_of_the_epoch_in_its_workers() -> None:
    batches = ckptd.Batches(DataLoader(Keyed(3), 3, num_workers=1), refetch=False)
    one, two = listed(next(batches)), listed(next(batches))
    assert one != two
    taken = take({"data": batches})
    three = listed(next(batches))
    batches = ckptd.Batches(DataLoader(Keyed(3), 3, num_workers=1), refetch=False)
    give(taken, {"data": batches})
    assert listed(next(batches)) == three


def test_an_elastic_sampler_is_the_position() -> None:
    def program() -> tuple[ElasticSampler, ckptd.Batches, dict[str, Any]]:
        sampler = ElasticSampler(Schedule(size=40, microbatch=2, microbatches=2, seed=1))
        batches = ckptd.Batches(DataLoader(Noisy(40), batch_sampler=sampler))
        return sampler, batches, {"sampler": sampler, "data": batches}

    def step(sampler: ElasticSampler, batches: ckptd.Batches) -> list[Batch]:
        found = [listed(next(batches)) for _ in sampler.indices]
        sampler.advance()
        return found

    sampler, batches, state = program()
    for _ in range(7):
        step(sampler, batches)
    taken = take(state)
    wanted = [step(sampler, batches) for _ in range(8)]
    sampler, batches, state = program()
    give(taken, state)
    assert [step(sampler, batches) for _ in range(8)] == wanted


def test_another_number_of_ranks_goes_on_after_as_many_samples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches = ckptd.Batches(DataLoader(Plain(32), 2))
    for _ in range(6):
        next(batches)
    taken = take({"data": batches})
    assert not caplog.records
    now = ckptd.Batches(DataLoader(Plain(32), 4))
    give(taken, {"data": now}, saved_world=2, world=1)
    assert "ElasticSampler" in caplog.text
    # 2 ranks took 6 batches of 2, which are 6 of 4.
    assert listed(next(now)) == [24.0, 25.0, 26.0, 27.0]


def test_another_number_of_ranks_draws_other_streams() -> None:
    Rng().reseed(1)
    batches = ckptd.Batches(a_function)
    next(batches)
    states = [batches.state_dict(), {**batches.state_dict(), "seed": 7}]
    assert batches.shared_out(states)["seed"] not in (7, states[0]["seed"])
    assert batches.shared_out(states[:1] * 2) == states[0]


def test_a_position_that_cannot_be_shared_out_is_an_error() -> None:
    class Whole:
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    batches = ckptd.Batches(Whole())
    next(batches)
    with pytest.raises(MismatchError) as caught:
        give(take({"data": batches}), {"data": batches}, saved_world=2, world=1)
    assert (
        "the position in the data cannot be split over another number of ranks"
        in caught.value.message
    )
    assert "ElasticSampler" in str(caught.value.hint)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("said", [0, 1, 2])
@pytest.mark.parametrize("origin", [0, 40])
def test_batches_ahead_that_are_not_said_are_told_of(
    ahead: int, said: int, origin: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = ckptd.Batches(a_function, ahead=said)
    data.loaded(origin, [])
    for _ in range(ahead):
        next(data)
    for step in range(origin + 1, origin + 12):
        for _ in range(3):
            next(data)
        if step % 2:
            flatten({"data": data})
            data.saved(step)
    assert len(caplog.records) == (ahead != said)
    assert ahead == said or f"until it says ahead={ahead}" in caplog.text


def test_irregular_programs_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    data = ckptd.Batches(a_function)
    for step in range(1, 40):
        for _ in range(random.Random(step).choice([1, 2, 5])):
            next(data)
        data.saved(step)
    assert not caplog.records


def test_batches_that_a_program_holds_over_a_load_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = ckptd.Batches(a_function, ahead=1)
    taken = take({"data": data})
    next(data)
    give(taken, {"data": data})
    assert "after the load" in caplog.text


class Hidden(Sampler[int]):
    """A sampler with a stream that nobody can know."""

    def __init__(self, seed: int) -> None:
        self.stream = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        yield from self.stream.permutation(14).tolist()


@pytest.mark.parametrize("seed", [1, 2])
def test_batches_that_come_out_otherwise_are_told_of(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    batches = ckptd.Batches(DataLoader(Plain(), 3, sampler=Hidden(1)))
    for _ in range(3):
        next(batches)
    again = ckptd.Batches(DataLoader(Plain(), 3, sampler=Hidden(seed)))
    give(take({"data": batches}), {"data": again})
    next(again)
    assert ("batches differ when they are fetched again" in caplog.text) == (seed == 2)


@dataclass
class Held:
    """A batch as a program of its own may have it."""

    values: Any
    later: Any = field(init=False)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": torch.tensor,
    "numpy": np.array,
    "objects": lambda b: np.array([str(x) for x in b], dtype=object),
    "scalars": lambda b: [np.int64(x) for x in b],
    "text": lambda b: [f"text {x}" for x in b],
    "long text": lambda b: [f"{'.' * 9000}{x}" for x in b],
    "numbers": list,
    "number": lambda b: float(sum(b)),
    "bytes": bytes,
    "like a dictionary": lambda b: UserDict(x=torch.tensor(b)),
    "dataclass": lambda b: Held(torch.tensor(b)),
    "dictionaries of text": lambda b: [{"t": str(x)} for x in b],
    "beside a constant": lambda b: (torch.ones(3), [str(x) for x in b]),
    "the tenth": lambda b: (*[torch.zeros(1)] * 9, torch.tensor(b)),
    "the last of many": lambda b: {**dict.fromkeys(map(str, range(60)), 0), "x": np.array(b)},
    "deep": lambda b: {"a": {"b": {"c": [torch.tensor(b)]}}},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_samples_of_any_form_are_told(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """A digest that sees tensors alone says of text and arrays that they are the same."""

    def batches(first: int) -> ckptd.Batches:
        return ckptd.Batches(DataLoader(Offset(first), 3, collate_fn=FORMS[form], shuffle=True))

    data, rng = batches(0), ckptd.Rng()
    next(data), next(data)
    saved = take({"data": data, "rng": rng})
    for first in (0, 50):
        again = batches(first)
        give(saved, {"data": again, "rng": ckptd.Rng()})
        next(again)
        assert ("batches differ when they are fetched again" in caplog.text) == (first == 50)


class Offset(Dataset[int]):
    """Numbers from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index + self.first


def test_a_position_of_before_is_not_compared_with_what_its_digest_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = ckptd.Batches(DataLoader(Offset(0), 3))
    next(data)
    state = data.state_dict()
    assert state["last"]
    again = ckptd.Batches(DataLoader(Offset(0), 3))
    again.load_state_dict({**state, "last": "0123456789abcdef"})
    next(again)
    assert "fetched again" not in caplog.text


def test_a_batch_that_holds_itself_or_objects_is_no_obstacle() -> None:
    round_: list[Any] = [1]
    round_.append(round_)
    assert batch_digest(round_) == batch_digest(round_) != ""
    assert batch_digest([object(), {1, 2}, None.__class__]) == ""
    assert batch_digest([]) == batch_digest({}) == batch_digest(np.zeros((0, 3))[:0].tolist()) == ""


class Shard(Sampler[list[int]]):
    """Batches of another sampler of batches, as accelerate shares them out."""

    def __init__(self, inner: Any) -> None:
        self.batch_sampler = inner

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batch_sampler


def test_generators_are_found_within_samplers_of_samplers() -> None:
    def program(seed: int) -> ckptd.Batches:
        stream = torch.Generator().manual_seed(seed)
        inner = BatchSampler(RandomSampler(Plain(), generator=stream), 3, drop_last=False)
        return ckptd.Batches(DataLoader(Plain(), batch_sampler=Shard(inner)))

    batches = program(1)
    for _ in range(7):
        next(batches)
    taken = take({"data": batches})
    wanted = [listed(next(batches)) for _ in range(9)]
    again = program(2)
    give(taken, {"data": again})
    assert [listed(next(again)) for _ in range(9)] == wanted


def test_data_that_ended_earlier_is_another() -> None:
    batches = ckptd.Batches(DataLoader(Plain(14), 2))
    for _ in range(5):
        next(batches)
    taken = take({"data": batches})
    shorter = ckptd.Batches(DataLoader(Plain(8), 2))
    with pytest.raises(MismatchError) as caught:
        give(taken, {"data": shorter})
    assert "the data ends before the batch that was saved" in caught.value.message


def test_data_that_does_not_tell_its_length_and_ended_earlier_is_another() -> None:
    class Lines(IterableDataset[int]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.count))

    batches = ckptd.Batches(DataLoader(Lines(14), 2))
    for _ in range(5):
        next(batches)
    shorter = ckptd.Batches(DataLoader(Lines(8), 2))
    give(take({"data": batches}), {"data": shorter})
    with pytest.raises(MismatchError) as caught:
        next(shorter)
    assert "the data ends before the batch that was saved" in caught.value.message


def test_the_position_in_something_else_is_refused() -> None:
    batches = ckptd.Batches(a_function)
    next(batches)
    with pytest.raises(MismatchError) as caught:
        ckptd.Batches([1, 2]).load_state_dict(batches.state_dict())
    assert "the saved position belongs to another kind of data" in caught.value.message


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("epoch"),
        lambda s: s.update(drawn=-1),
        lambda s: s.update(taken="3"),
        lambda s: s.update(streams={"torch": b"1"}),
    ],
)
def test_a_position_that_is_none_is_corrupt(damage: Callable[[dict[str, Any]], None]) -> None:
    batches = ckptd.Batches(a_function)
    next(batches)
    state = batches.state_dict()
    damage(state)
    with pytest.raises(CorruptError) as caught:
        batches.load_state_dict(state)
    assert caught.value.message in (
        "not the state of random streams",
        "the saved position in the data cannot be read",
    )


@pytest.mark.parametrize("source", [3, iter([1, 2]), (i for i in range(3))])
def test_what_gives_no_batches_is_refused(source: Any) -> None:
    with pytest.raises(UsageError) as caught:
        ckptd.Batches(source)
    assert caught.value.message in (
        "an iterator cannot be restarted, so its position cannot be restored",
        "the source of batches is not iterable",
    )


@pytest.mark.parametrize("ahead", [-1, 1.5, True])
def test_ahead_is_a_number(ahead: Any) -> None:
    with pytest.raises(UsageError):
        ckptd.Batches([1], ahead=ahead)


def test_no_batches_at_all_end() -> None:
    data = ckptd.Batches([])
    with pytest.raises(StopIteration):
        next(data)
    assert list(data) == []


def test_a_loop_that_was_left_is_not_gone_on_with() -> None:
    data = ckptd.Batches([1, 2, 3])
    left = iter(data)
    assert next(left) == 1
    assert list(data) == [1, 2, 3]
    with pytest.raises(UsageError, match="has ended"):
        next(left)


@pytest.mark.parametrize("wrap", [lambda x: x, ckptd.PerRank])
def test_a_loader_without_a_position_is_refused_with_the_way_out(wrap: Any) -> None:
    with pytest.raises(UsageError) as caught:
        flatten({"data": wrap(DataLoader(Plain()))})
    assert caught.value.kind == "unsavable"
    assert "ckptd.Batches(loader)" in str(caught.value.hint)


class Telling(DataLoader[float]):
    """A loader that tells its position, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator = None


def test_an_iterator_that_a_load_does_not_reach_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    loader: Any = Telling(Plain(), 2)
    taken = take({"data": ckptd.PerRank(loader)})
    give(taken, {"data": ckptd.PerRank(loader)})
    assert not caplog.records
    loader._iterator = iter(loader)
    give(taken, {"data": ckptd.PerRank(loader)})
    assert "created before the load" in caplog.text


@pytest.mark.parametrize("taken", [3, 5])
def test_an_epoch_that_is_ended_does_not_come_back(taken: int) -> None:
    """A loop that counts its batches never asks for the one after the last."""

    def made() -> ckptd.Batches:
        torch.manual_seed(3)
        return ckptd.Batches(DataLoader(Noisy(10), batch_size=2, shuffle=True))

    data = made()
    data.end_epoch()  # there is none under way
    loop = iter(data)
    for _ in range(taken):
        next(loop)
    data.end_epoch()
    saved = data.state_dict()
    wanted = [batch.tolist() for batch in data]
    again = made()
    again.load_state_dict(saved)
    assert again.epoch == 1
    assert [batch.tolist() for batch in again] == wanted
    assert len(wanted) == 5
