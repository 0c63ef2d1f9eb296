"""A position that is loaded for other data: the log says what differs, or the load refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

import ckptd
from ckptd.checkpoint.torch.data.facts import batch_form, changes, facts_of
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.elastic import ElasticSampler, Schedule
from ckptd.errors import MismatchError
from tests.checkpoint.torch.bridge import give, take


@pytest.fixture(autouse=True)
def _keep_streams() -> Iterator[None]:
    before = Rng().state_dict()
    yield
    Rng().load_state_dict(before)


class Own(Dataset[int]):
    """A data set of the program's own: what it makes is dear, and is not made to look at it."""

    def __init__(self, size: int = 20, add: int = 0) -> None:
        self.size, self.add, self.made = size, add, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        self.made += 1
        return i + self.add


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Other(DataLoader[int]):
    pass


class Stateful(DataLoader[int]):
    """Goes to its position by itself, as torchdata's loader does."""

    at = 0

    def __iter__(self) -> Any:
        begun, self.at = self.at, 0
        for n, batch in enumerate(super().__iter__()):
            if n >= begun:
                self.at = n + 1
                yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader(
    kind: Any = DataLoader, size: int = 20, batch: int = 2, add: int = 0, **more: Any
) -> Any:
    return kind([i + add for i in range(size)], batch_size=batch, **more)


NUMBERS: Any = range(9)


def sharded(seed: int) -> Any:
    sampler: Any = DistributedSampler(Own(), num_replicas=2, rank=0, seed=seed)
    return DataLoader(Own(), 2, sampler=sampler)


def resumed(before: Any, now: Any, taken: int = 6) -> ckptd.Batches:
    """Take batches of one source, and load the position for another."""
    first = ckptd.Batches(before)
    for _ in range(taken):
        next(first)
    again = ckptd.Batches(now)
    give(take({"data": first}), {"data": again})
    return again


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "longer": (loader, lambda: loader(size=50), "the number of samples was 20 and is 50"),
    "smaller batches": (loader, lambda: loader(batch=1), "the batch size was 2 and is 1"),
    "larger batches": (loader, lambda: loader(batch=3), "the batch size was 2 and is 3"),
    "shuffled": (loader, lambda: loader(shuffle=True), "RandomSampler"),
    "whole batches": (loader, lambda: loader(drop_last=True), "drop_last was False and is True"),
    "other samples": (loader, lambda: loader(add=1000), "sampled items differ"),
    "another seed": (lambda: sharded(1), lambda: sharded(2), "seed=2"),
    "another loader": (loader, lambda: loader(Other), "the loader was DataLoader and is Other"),
    "another data set": (loader, lambda: DataLoader(Own(), 2), "the data set was list and is Own"),
    "more workers": (
        lambda: DataLoader(Flow(), 2),
        lambda: DataLoader(Flow(), 2, num_workers=1),
        "the number of workers was 0 and is 1",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_said_at_the_load(what: str, caplog: pytest.LogCaptureFixture) -> None:
    before, now, phrase = CHANGES[what]
    again = resumed(before(), now(), taken=4)
    [record] = caplog.records
    assert phrase in record.message
    assert "epoch 0 goes on after the first 4 batches of what is here now" in record.message
    if what != "more workers":
        next(again)
    assert len(caplog.records) == 1  # nor are random streams blamed besides


@pytest.mark.parametrize("what", ["longer", "smaller batches", "shuffled", "other samples"])
def test_a_stateful_loader_is_looked_at_as_well(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = {
        "longer": loader(Stateful, size=50),
        "smaller batches": loader(Stateful, batch=1),
        "shuffled": loader(Stateful, shuffle=True),
        "other samples": loader(Stateful, add=1000),
    }[what]
    resumed(loader(Stateful), now)
    [record] = caplog.records
    assert CHANGES[what][2] in record.message
    assert "by its own state, which is that after 6 batches" in record.message


@pytest.mark.parametrize("kind", [DataLoader, Stateful])
def test_data_that_is_too_short_is_refused(kind: Any) -> None:
    with pytest.raises(MismatchError) as caught:
        resumed(loader(kind), loader(kind, size=5))
    assert "the data ends before the batch that was saved" in caught.value.message
    assert "the number of samples was 20 and is 5" in (caught.value.found or "")


def test_a_stateful_loader_that_gives_nothing_any_more_is_refused() -> None:
    class Ending(IterableDataset[int]):
        def __init__(self, rounds: int) -> None:
            self.rounds = rounds

        def __iter__(self) -> Iterator[int]:
            self.rounds -= 1
            return iter(range(20) if self.rounds >= 0 else ())

    again = resumed(Stateful(Ending(9), 2), Stateful(Ending(0), 2))
    with pytest.raises(MismatchError) as caught:
        next(again)
    assert "the data ends before the batch that was saved" in caught.value.message


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: loader(shuffle=True),
        lambda: loader(Stateful),
        lambda: sharded(3),
        lambda: DataLoader(Flow(), 2),
        lambda: DataLoader(Subset(TensorDataset(torch.arange(40)), range(20)), 2),
        lambda: [1, 2, 3, 4, 5, 6, 7],
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_the_same_data_is_not_told_of(
    make: Callable[[], Any], old: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = ckptd.Batches(make())
    for _ in range(5):
        next(first)
    state = first.state_dict()
    if old:  # a checkpoint of before has neither
        del state["facts"], state["form"]
    again = ckptd.Batches(make())
    again.load_state_dict(state)
    assert repr(next(again)) == repr(next(first))
    assert not caplog.records


def test_other_data_between_epochs_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    first = ckptd.Batches(loader())
    assert len(list(first)) == 10
    again = ckptd.Batches(loader(size=30))
    again.load_state_dict(first.state_dict())
    assert "epoch 1 begins with what is here now" in caplog.text
    assert len(list(again)) == 15


def test_an_order_that_follows_from_the_epoch_is_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Seeded(torch.utils.data.Sampler[int]):
        seed = 0

        def set_epoch(self, epoch: int) -> None:
            self.seed = 100 + epoch

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[int]:
            stream = np.random.default_rng(self.seed)
            return iter(stream.permutation(6).tolist())

    again = resumed(
        DataLoader(Own(6), 2, sampler=Seeded()), DataLoader(Own(6), 2, sampler=Seeded())
    )
    next(again)
    assert not caplog.records


def test_a_function_that_makes_other_batches_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    again = resumed(lambda: torch.rand(2, 8), lambda: torch.rand(4, 8))
    next(again)
    next(again)
    [record] = caplog.records
    assert "float32[2, 8]" in record.message
    assert "float32[4, 8]" in record.message


def test_a_function_whose_batches_differ_anyway_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def varied() -> torch.Tensor:
        return torch.rand(int(torch.randint(1, 50, ())))

    torch.manual_seed(1)
    again = resumed(varied, lambda: torch.rand(99))
    next(again)
    assert not caplog.records


SCHEDULE = Schedule(size=23, microbatch=2, microbatches=5, seed=1)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"size": 29}, "size was 23 and is 29"),
        ({"microbatches": 6}, "batch was 10 and is 12"),
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"microbatch": 5, "microbatches": 2}, ""),
    ],
)
def test_a_position_in_another_schedule_is_told_of(
    change: dict[str, Any], phrase: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ElasticSampler(SCHEDULE, rank=0, world=1)
    sampler.advance()
    other = Schedule(**{f: getattr(SCHEDULE, f) for f in SCHEDULE.__struct_fields__} | change)
    again = ElasticSampler(other, rank=0, world=1)
    again.load_state_dict({"consumed": 10})  # as of before
    assert not caplog.records
    again.load_state_dict(sampler.state_dict())
    assert again.consumed == 10
    assert [phrase in r.message for r in caplog.records] == ([True] if phrase else [])


@pytest.mark.parametrize(
    ("data", "other"),
    [
        (list(range(99)), [7, *range(1, 99)]),
        ([torch.ones(3), torch.zeros(3)], [torch.ones(3), torch.ones(3)]),
        ([{"x": 1, "y": "a"}], [{"x": 1, "y": "b"}]),
        ([(b"a", None, 1.5)], [(b"a", None, 2.5)]),
        (np.arange(50.0), np.arange(50.0) + 1),
        (np.arange(50).reshape(10, 5)[:, ::2], np.arange(50).reshape(10, 5)[:, 1::2]),
        (TensorDataset(torch.arange(9)), TensorDataset(torch.arange(9) + 1)),
        (Subset(NUMBERS, [1, 2]), Subset(NUMBERS, [1, 3])),
    ],
)
def test_samples_in_memory_are_looked_at(data: Any, other: Any) -> None:
    def facts(of: Any) -> dict[str, Any]:
        return facts_of(DataLoader(of), [], workers=False)

    assert facts(data)["samples"]
    assert changes(facts(data), facts(data)) == []
    assert changes(facts(data), facts(other)) == ["sampled items differ"]


def test_samples_that_would_have_to_be_made_are_not() -> None:
    data = Own()
    several: Any = [data]
    assert "samples" not in facts_of(DataLoader(data), [], workers=False)
    assert "samples" not in facts_of(DataLoader(several), [], workers=False)
    assert data.made == 0


def test_the_form_of_a_batch() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int32), "rest": [np.zeros(4), "text"]}
    assert batch_form(batch) == "(int32[2, 3], (float64[4], str))"
