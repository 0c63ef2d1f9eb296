"""The first save of a structure: few calls a tensor, and nothing kept that is of another one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ckptd
from ckptd.checkpoint.save.client import EARLY_BYTES
from ckptd.testing.ranks import run_ranks
from tests.processes import until

pytestmark = pytest.mark.usefixtures("writing_thread")

PARAMETERS = 250


def _trained() -> dict[str, Any]:
    model = nn.ParameterList([nn.Parameter(torch.ones(4, 1 + i % 9)) for i in range(PARAMETERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_the_first_save_makes_few_calls_for_each_tensor(tmp_path: Path) -> None:
    live = _trained()
    calls = [0]
    threads = (threading.main_thread().name, "ckptd-copy")

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and threading.current_thread().name.startswith(threads):
            calls[0] += 1

    with ckptd.Checkpointer(str(tmp_path)) as ck:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            handle = ck.save(1, live)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        handle.durable()
    # The counter itself is called by the interpreter, and not counted.
    assert calls[0] / (4 * PARAMETERS) <= 60


def test_saves_of_mere_tensors_make_few_calls(tmp_path: Path) -> None:
    live = {f"layer.{i}": torch.full((4,), float(i)) for i in range(4 * PARAMETERS)}
    calls: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        calls[-1] += event == "call"

    with ckptd.Checkpointer(str(tmp_path)) as ck:
        for step in (1, 2):
            calls.append(0)
            sys.setprofile(note)
            try:
                handle = ck.save(step, live)
            finally:
                sys.setprofile(None)
            handle.durable()
            live["layer.7"] += 1.0
        live["layer.7"].zero_()
        ck.load(live)
    assert live["layer.7"].tolist() == [8.0] * 4
    assert all(live[f"layer.{i}"].tolist() == [float(i)] * 4 for i in range(900) if i != 7)
    assert calls[0] / (4 * PARAMETERS) <= 35
    assert calls[1] / (4 * PARAMETERS) <= 2  # one of them to fill a slot that is new


def _others() -> Iterator[dict[str, torch.Tensor]]:
    """Yield states of two names that differ in one thing from the one before."""
    a, b = torch.arange(16.0).view(4, 4), torch.arange(8.0)
    yield {"a": a, "b": b}
    yield {"a": a.view(2, 8), "b": b}  # the same memory in another shape
    yield {"a": a.view(2, 8) + 1, "b": b}  # another tensor of that shape
    yield {"a": (a + 2).t(), "b": b}  # of other strides
    yield {"a": (a + 3)[:, 1:3], "b": b}  # a window
    yield {"a": b, "b": a}
    yield {"a": b, "b": b}  # one memory under both names
    yield {"a": b.to(torch.float64), "b": b.to(torch.bfloat16)}
    yield {"a": b.view(torch.int32), "b": torch.tensor(5.0)}
    yield {"a": torch.empty(0, 3), "b": torch.empty(3, 0)}
    yield {"b": b + 1, "a": a + 4}  # in another order


@pytest.mark.parametrize("lazy", ["off", "all"])
def test_each_save_is_of_what_is_there_now(tmp_path: Path, lazy: Any) -> None:
    with ckptd.Checkpointer(str(tmp_path), copy=ckptd.CopyOptions(lazy=lazy)) as ck:
        for step, live in enumerate(_others(), 1):
            wanted = {name: tensor.clone() for name, tensor in live.items()}
            ck.save(step, live).durable()
            found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            ck.load(found, step)
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), (step, name)


def _save_other_cuts(root: str) -> list[bool]:
    rows, square = torch.arange(21.0).view(7, 3), torch.arange(16.0).view(4, 4)
    one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(n,)) for n in ("dp", "tp"))
    split, tall = (
        init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")) for sizes in ((1, 2), (2, 1))
    )
    cuts = [
        (rows, one, [Shard(0)]),
        (rows, one, [Shard(1)]),
        (rows, other, [Shard(1)]),
        (rows, one, [Replicate()]),
        (square, one, [Shard(0)]),
        (square, split, [Shard(0), Shard(0)]),
        (square, split, [Replicate(), Shard(1)]),
        (square, split, [Shard(1), Replicate()]),
        (square, split, [Shard(0), Shard(1)]),
        (square, tall, [Shard(0), Shard(1)]),
    ]
    right = []
    with ckptd.Checkpointer(root) as ck:
        for step, (whole, mesh, placements) in enumerate(cuts, 1):
            live = {n: distribute_tensor(whole + i, mesh, placements) for i, n in enumerate("ab")}
            ck.save(step, live).durable()
            found = {n: torch.zeros_like(whole) for n in "ab"}
            ck.load(found, step)
            right.append(all(torch.equal(found[n], whole + i) for i, n in enumerate("ab")))
    dist.barrier()
    return right


@pytest.mark.dist
def test_each_save_is_cut_as_its_tensors_are_now(tmp_path: Path) -> None:
    for right in run_ranks(2, _save_other_cuts, str(tmp_path)):
        assert right == [True] * 10


def _slots(ck: ckptd.Checkpointer) -> dict[int, tuple[int, int]]:
    """Return the size of each slot's data, and the bytes of memory behind it."""
    arena = {} if ck._client is None else ck._client._slots._arena
    return {n: (s.nbytes, 512 * os.fstat(s.fd).st_blocks) for n, s in arena.items()}


@pytest.mark.usefixtures("writing_process")
def test_the_first_save_after_a_load_finds_its_memory_there(tmp_path: Path) -> None:
    live = {"w": torch.ones(EARLY_BYTES // 4), "s": torch.tensor(1.0)}
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, live).durable()
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load(live, weights_only=False, only="w")
        assert not _slots(ck)  # one that evaluates takes nothing
        ck.load(live)
        # The writing process maps it: nobody waits for that, and this one has written nothing.
        until(lambda: _slots(ck)[0][1] > EARLY_BYTES + 4)
        assert _slots(ck)[0][0] == EARLY_BYTES + 4
        live["w"] += 1
        ck.save(2, live).durable()
        assert list(_slots(ck)) == [0]
        assert _slots(ck)[0][0] == EARLY_BYTES + 4
        found = {"w": torch.zeros_like(live["w"]), "s": torch.tensor(0.0)}
        ck.load(found, 2)
        assert torch.equal(found["w"], live["w"])


@pytest.mark.parametrize("times", [0.5, 1.5])
def test_a_first_save_of_another_size_than_was_loaded_is_whole(
    tmp_path: Path, times: float
) -> None:
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.save(1, {"w": torch.ones(EARLY_BYTES // 4)}).durable()
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        ck.load({"w": torch.zeros(EARLY_BYTES // 4)})
        other = torch.arange(float(int(times * EARLY_BYTES // 4)))
        ck.save(2, {"w": other}).durable()
        found = torch.zeros_like(other)
        ck.load({"w": found}, 2)
        assert torch.equal(found, other)
