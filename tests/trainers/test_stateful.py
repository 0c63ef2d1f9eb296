"""torchdata's loader under `ckptd.Batches`: it goes to its position by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import ckptd
from ckptd.elastic import keyed_generator
from ckptd.errors import MismatchError
from tests.checkpoint.torch.bridge import give, take

pytestmark = [pytest.mark.filterwarnings("default")]


class Keyed(Dataset[float]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> float:
        return i + float(torch.rand((), generator=keyed_generator(1, self.epoch, i)))


class Drawing(Keyed):
    def __getitem__(self, i: int) -> float:
        return i + float(torch.rand(()))


class Flow(IterableDataset[float]):
    """Tells where it is, and its streams."""

    at = 0

    def __iter__(self) -> Iterator[float]:
        while self.at < 13:
            self.at += 1
            yield self.at + float(torch.rand(()))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": ckptd.Rng().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        ckptd.Rng().load_state_dict(state["rng"])


@pytest.mark.plugins
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", ["keyed", "drawing", "flow"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_it_goes_on_where_it_was(workers: int, data: str, ahead: int) -> None:
    if data == "drawing" and workers:
        pytest.skip(
            "workers that draw are told of, see tests/checkpoint/torch/data/test_batches.py"
        )
    from torchdata import stateful_dataloader

    def program(seed: int) -> ckptd.Batches:
        torch.manual_seed(seed)
        source: Any = {"keyed": Keyed, "drawing": Drawing, "flow": Flow}[data]()
        loader = stateful_dataloader.StatefulDataLoader(
            source, 3, shuffle=data != "flow" or None, num_workers=workers
        )
        return ckptd.Batches(loader, ahead=ahead)

    for taken in (0, 3, 5, 8) if not workers else (3, 5):
        batches = program(1)
        held = [next(batches) for _ in range(ahead)]
        for _ in range(taken):
            held = [*held, next(batches)][1:] if ahead else [next(batches)][:0]
        state = take({"data": batches, "rng": ckptd.Rng()})
        wanted = [*(b.tolist() for b in held), *(next(batches).tolist() for _ in range(8))]
        again = program(2)
        give(state, {"data": again, "rng": ckptd.Rng()})
        assert [next(again).tolist() for _ in range(8 + ahead)] == wanted
    # In loops: between epochs, and within the second one.
    for taken in () if ahead else (5, 7) if not workers else (5,):
        batches = program(1)
        loop = endless(batches)
        for _ in range(taken):
            next(loop)
        if taken == 5:
            batches = program(1)
            list(batches)
            loop = endless(batches)
        state = take({"data": batches, "rng": ckptd.Rng()})
        wanted = [next(loop) for _ in range(9)]
        again = program(2)
        give(state, {"data": again, "rng": ckptd.Rng()})
        loop = endless(again)
        assert [next(loop) for _ in range(9)] == wanted


def endless(batches: ckptd.Batches) -> Iterator[list[float]]:
    while True:
        for batch in batches:
            yield batch.tolist()


OTHERS: dict[str, dict[str, Any]] = {
    "longer": {"size": 50},
    "smaller batches": {"batch": 1},
    "larger batches": {"batch": 3},
    "shuffled": {"shuffle": True},
    "other samples": {"add": 1000},
    "shorter": {"size": 5},
    "more workers": {"num_workers": 1},
}


@pytest.mark.plugins
@pytest.mark.parametrize("what", OTHERS)
def test_a_position_in_other_data_is_refused_or_told(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    from torchdata import stateful_dataloader

    def program(size: int = 20, batch: int = 2, add: int = 0, **more: Any) -> ckptd.Batches:
        samples: Any = [i + add for i in range(size)]
        return ckptd.Batches(stateful_dataloader.StatefulDataLoader(samples, batch, **more))

    batches = program()
    for _ in range(6):
        next(batches)
    state = take({"data": batches})
    give(state, {"data": program()})
    assert not caplog.records
    other = program(**OTHERS[what])
    if what in ("shorter", "more workers"):
        with pytest.raises(MismatchError) as caught:
            give(state, {"data": other})
        assert "position" in caught.value.message
    else:
        give(state, {"data": other})
        [record] = caplog.records
        assert "the data differs from that of the saved position" in record.message
