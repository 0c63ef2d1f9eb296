"""Real ranks: a checkpoint of any layout loads into any other, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CkptdError, CorruptError, SaveError
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.networks import build, step, whole
from tests.checkpoint.torch.test_save_left import be_patient

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist, pytest.mark.timeout(400)]
PATIENCE_S = 300.0

Tensors = dict[str, torch.Tensor]


def save(root: str, kind: str) -> Tensors:
    model, optim = build(kind, seed=1)
    step(model, optim, 2)
    state = {
        "model": model,
        "optim": optim,
        "n": 3,
        "rng": ckptd.Rng(),
        "own": ckptd.PerRank(dist.get_rank(), on_change="reduce", reduce=sum),
    }
    with ckptd.Checkpointer(root) as ck:
        handle = ck.save(2, state)
        assert handle is not None
        handle.durable(200)
    return whole(model, optim)


def load(root: str, kind: str) -> tuple[Tensors, Any, Any]:
    model, optim = build(kind, seed=9)
    own = ckptd.PerRank(-1, on_change="reduce", reduce=sum)
    state = {"model": model, "optim": optim, "n": 0, "rng": ckptd.Rng(), "own": own}
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(state) == 2
        assert state["n"] == 3
        loaded = whole(model, optim)
        step(model, optim)
        ck.save(3, state)
        report = ck.last_load
    assert report is not None
    return loaded, own.value, (report.read.bytes_needed, report.read.bytes_fetched)


def save_and_load(
    root: str, kind: str, copies: dict[str, str]
) -> tuple[Tensors, dict[str, tuple[Tensors, Any, Any]]]:
    """Save, and load a copy of it into each of some layouts."""
    saved = save(root, kind)
    dist.barrier()
    found = {}
    for other, copy in copies.items():
        if dist.get_rank() == 0:
            shutil.copytree(root, copy)
        dist.barrier()
        found[other] = load(copy, other)
    return saved, found


CASES = [
    ("fsdp+tp", 4, [("fsdp", 3), ("tp", 2), ("hsdp", 4)]),
    ("fsdp", 3, [("fsdp+tp", 4), ("replicated", 2)]),
    ("hsdp", 4, [("unnamed", 2)]),
    ("unnamed", 2, []),
    ("replicated", 2, [("fsdp+tp", 4)]),
    ("tp", 4, [("fsdp", 3)]),
]
SHORT = ("fsdp+tp", "unnamed", "replicated")
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "world", "others"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case[0] in SHORT else LONG)
        for case in CASES
    ],
)
def test_any_layout_loads_into_any_other(
    tmp_path: Path, kind: str, world: int, others: list[tuple[str, int]]
) -> None:
    """Into jobs of as many ranks in the processes that saved, and into others of other ones."""
    root = str(tmp_path / "root")
    copies = {(o, n): str(tmp_path / f"{o}-{n}") for o, n in [(kind, world), *others]}
    mine = {other: copy for (other, count), copy in copies.items() if count == world}
    played = run_ranks(world, save_and_load, root, kind, mine, deadline_s=PATIENCE_S)
    saved = played[0][0]
    for (other, count), copy in copies.items():
        if count == world:
            loads = [found[other] for _, found in played]
        else:
            shutil.copytree(root, copy)
            loads = run_ranks(count, load, copy, other, deadline_s=PATIENCE_S)
        for loaded, own, _ in loads:
            for name, value in saved.items():
                assert torch.equal(loaded[name], value), (other, count, name)
            assert count == world or own == sum(range(world))
        assert [n.step for n in Catalogue(open_store(copy)).line()] == [2, 3]


def save_failing(root: str) -> str:
    model, optim = build("fsdp", seed=1)
    step(model, optim)
    state: dict[str, Any] = {"model": model, "n": 3}
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        ck.save(1, state)
        ck.wait()
        state["n"] = dist.get_rank()
        handle = ck.save(2, state)
        assert handle is not None
        try:
            handle.durable(100)
        except CkptdError as error:
            message = f"{error.kind} {error.where}"
        state["n"] = 3
        ck.save(3, state)
    return message


def test_a_value_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for message in run_ranks(2, save_failing, root, deadline_s=PATIENCE_S):
        assert message == "replicas-differ n"
    assert [n.step for n in Catalogue(open_store(root)).line()] == [1, 3]


def save_drifted(root: str) -> str:
    model, _ = build("replicated", seed=1)
    with torch.no_grad():
        model.blocks[1].up.weight[3, 3] += 0.5 * dist.get_rank()
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        handle = ck.save(1, {"model": model})
        assert handle is not None
        try:
            handle.durable(100)
        except SaveError as error:
            return f"{error.kind} {error.where}"
    return ""


def test_replicas_that_drifted_apart_are_named(tmp_path: Path) -> None:
    for message in run_ranks(2, save_drifted, str(tmp_path / "r"), deadline_s=PATIENCE_S):
        assert message == "replicas-differ model.blocks.1.up.weight"


def load_damaged(root: str) -> tuple[str, bool]:
    save(root, "fsdp")
    dist.barrier()
    if dist.get_rank() == 0:
        path = next(Path(root).glob("data/*/r00002.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 1
        path.write_bytes(raw)
    dist.barrier()
    model, optim = build("fsdp", seed=9)
    step(model, optim)
    before = whole(model, optim)
    with ckptd.Checkpointer(root, timeout_s=100.0) as ck:
        try:
            ck.load({"model": model, "optim": optim}, 2, only=["model*", "optim*"])
        except CorruptError as error:
            after = whole(model, optim)
            untouched = all(torch.equal(before[n], after[n]) for n in before)
            return error.kind, untouched
    return "", False


def test_damage_that_one_rank_finds_stops_all_of_them_untouched(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for kind, untouched in run_ranks(3, load_damaged, root, deadline_s=PATIENCE_S):
        assert kind == "digest"
        assert untouched


def save_unevenly(root: str) -> str:
    tensors = {"a": torch.ones(3)}
    with ckptd.Checkpointer(root, timeout_s=PATIENCE_S) as ck:
        ck.save(1, {"t": tensors})
        ck.wait()
        if dist.get_rank() == 1:
            tensors["b"] = torch.ones(4)
        be_patient(ck, 6.0)
        try:
            handle = ck.save(2, {"t": tensors})
            assert handle is not None
            handle.durable(100)
        except CkptdError as error:
            message = error.message
        be_patient(ck, PATIENCE_S)
        tensors["b"] = torch.ones(4)
        ck.save(3, {"t": tensors})
    return message


def test_a_structure_that_changes_on_one_rank_only_fails_and_heals(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    assert run_ranks(2, save_unevenly, root, deadline_s=PATIENCE_S) == [
        "ranks did not write their part in time",
        "a rank made no progress",
    ]
    assert [n.step for n in Catalogue(open_store(root)).line()] == [1, 3]


def save_in_groups(root: str) -> int | None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = root + ("/actor" if rank < 2 else "/critic")
    state = {"w": torch.full((4,), float(rank // 2)), "r": ckptd.PerRank(rank)}
    with ckptd.Checkpointer(own, process_group=groups[rank // 2]) as ck:
        ck.save(1, state)
        ck.wait()
        state["w"].zero_()
        ck.load(state)
        assert state["w"][0] == rank // 2
        assert state["r"].value == rank
        return ck.latest()


def test_two_groups_of_one_job_save_apart(tmp_path: Path) -> None:
    assert run_ranks(4, save_in_groups, str(tmp_path), deadline_s=PATIENCE_S) == [1] * 4


def save_stages(root: str) -> dict[str, torch.Tensor]:
    """Pipeline stages as users write them: each rank has its own layers, plain tensors."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = {str(i): torch.nn.Linear(5, 5) for i in (2 * rank, 2 * rank + 1)}
    model = torch.nn.ModuleDict(layers)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(m(torch.ones(5)).sum() for m in model.values()).backward()
    optim.step()
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": model, "optim": optim, "step": 1})
    return {n: p.detach() for n, p in model.named_parameters()}


def load_stages(root: str, world: int) -> tuple[dict[str, torch.Tensor], int]:
    rank = dist.get_rank()
    mine = range(rank * 4 // world, (rank + 1) * 4 // world)
    model = torch.nn.ModuleDict({str(i): torch.nn.Linear(5, 5) for i in mine})
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": model, "optim": optim, "step": 0}, strict=False)
    return {n: p.detach() for n, p in model.named_parameters()}, len(optim.state)


def test_pipeline_stages_are_dealt_out_anew(tmp_path: Path) -> None:
    root = str(tmp_path / "r")
    saved: dict[str, torch.Tensor] = {}
    for part in run_ranks(2, save_stages, root, deadline_s=PATIENCE_S):
        saved |= part
    for world in (1, 4):
        loaded: dict[str, torch.Tensor] = {}
        for part, states in run_ranks(world, load_stages, root, world, deadline_s=PATIENCE_S):
            loaded |= part
            assert states == len(part)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[n], saved[n]) for n in saved)
