"""A worker whose modules take their state by code of their own has what their load would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S
from tests.reshard.torch.test_relayout_words import (
    MAKE,
    ONE,
    Counted,
    Engine,
    Plain,
    contents,
    pair,
    same,
    wanted,
)


def change(source: Any, step: int) -> None:
    """Give the trainer's weight other values."""
    new = torch.rand(3, 3, generator=torch.Generator().manual_seed(step))
    if isinstance(source, Engine):
        source.weights["lin.weight"] = new
    else:
        source.lin.weight.data = new


def live(place: str) -> list[str]:
    """Rank 0 publishes each kind three times, rank 1 compares what it has with its own load."""
    rank = dist.get_rank()
    groups = [dist.new_group([r]) for r in (0, 1)]
    wrong = []
    for name in MAKE:
        at = f"{place}-{name.replace(' ', '-')}"
        (source, into), twin = pair(name), pair(name)[1]
        if rank == 0:
            with ckptd.Publisher(ONE, at, process_group=groups[0]) as publisher:
                for step in (1, 2, 2):
                    change(source, step)
                    assert publisher.publish(step, {"model": source}).wait(PATIENCE_S)
                    dist.barrier()
                    dist.barrier()
            continue
        with ckptd.Subscriber(ONE, {"model": into}, at, group=groups[1]) as subscriber:
            for step in (1, 2, 2):
                change(source, step)
                dist.barrier()
                assert subscriber.update(wait_s=60) is not None
                want = wanted(source, twin)
                if not same(contents(into), want):
                    wrong.append(f"{name}, version of {step}")
                dist.barrier()
    return wrong


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_workers_have_what_their_own_load_would_bring(tmp_path: Path) -> None:
    assert run_ranks(2, live, str(tmp_path / "at"), deadline_s=PATIENCE_S) == [[], []]


def test_extra_state_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    into = Counted()
    into.count = 3
    with pytest.raises(UsageError) as caught:
        ckptd.Subscriber(ONE, into, tmp_path / "at")
    assert (caught.value.message, caught.value.where) == (
        "a module has extra state, which a live move cannot fill",
        "model._extra_state",
    )
    into.count = None
    before = contents(into)
    with (
        ckptd.Publisher(ONE, tmp_path / "at") as publisher,
        ckptd.Subscriber(ONE, into, tmp_path / "at") as subscriber,
    ):
        publisher.publish(1, {"model": Plain()}).wait(PATIENCE_S)
        into.count = 4  # it came later
        with pytest.raises(UsageError) as caught:
            subscriber.update(wait_s=30)
        assert caught.value.where == "model._extra_state"
        assert same(contents(into), before | {"count": 4})
        assert subscriber.version is None


def test_a_hook_that_fails_leaves_no_version(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("not today")

    into = Plain()
    into.register_load_state_dict_post_hook(fails)
    with (
        ckptd.Publisher(ONE, tmp_path / "at") as publisher,
        ckptd.Subscriber(ONE, into, tmp_path / "at") as subscriber,
    ):
        publisher.publish(1, {"model": Plain()}).wait(PATIENCE_S)
        with pytest.raises(UsageError) as caught:
            subscriber.update(wait_s=30)
        assert caught.value.state_corrupted
        assert "an object did not take its saved state" in caught.value.message
        assert subscriber.version is None


def test_weights_that_lie_over_one_another_are_refused(tmp_path: Path) -> None:
    text = "mesh M = dp:1\nspace s { A[a b] B[a b] }\n"
    layout = text + "layout two of s on M { a = A[a b]\nb = B[a b] }\n"
    memory = torch.zeros(18)
    state = {"model": {"a": memory[:9].view(3, 3), "b": memory[8:17].view(3, 3)}}
    with pytest.raises(UsageError) as caught:
        ckptd.Subscriber(layout, state, tmp_path / "at")
    assert (caught.value.message, caught.value.where) == (
        "tensors to fill share memory",
        "model.a, model.b",
    )
