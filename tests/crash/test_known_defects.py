"""Ten defects found in other checkpoint engines; each stays out of this one.

Named after the engine and the defect. Where a broader test lives elsewhere, the docstring says so.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import ckptd
from ckptd.engine.board import LocalBoard
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.structure import Group, LocalTensor, SavePlan, Structure, build_plan
from ckptd.engine.verify import verify
from ckptd.errors import CkptdError, ConflictError, SaveError, StoreError, WorkerError
from ckptd.format.manifest import MeshEntry
from ckptd.format.names import CommitName, commit_key, data_folder, file_key
from ckptd.store import StoreSpec
from ckptd.store.fault import Fault
from ckptd.store.spec import FaultRule, FaultSpec
from tests.crash.places import LocalPlace
from tests.engine.saving import Job, fill, plan_of, values

FOLDER = data_folder(CommitName(1, 1), "0001")
EIGHT = {f"t{i}": (1024, 64) for i in range(8)}


@pytest.fixture
def place(ram: Path) -> Iterator[LocalPlace]:
    place = LocalPlace(ram)
    yield place
    place.close()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def data_of(place: LocalPlace, name: CommitName, rank: int = 0) -> bytes:
    """Verify a checkpoint and return a rank's bytes."""
    catalogue = Catalogue(place.store)
    assert verify(catalogue, name).findings == ()
    file = catalogue.manifest(name).files[rank]
    return place.store.get(file.path)[file.data_start :]


def expected(plan: SavePlan, arrays: dict[str, np.ndarray], rank: int = 0) -> bytes:
    data = bytearray(plan.filemap.data_bytes(rank))
    fill(plan, rank, arrays, memoryview(data))
    return bytes(data)


def two_ranks(spec: StoreSpec, plan: SavePlan) -> list[Job]:
    first = LocalBoard(0, 2)
    job = Job(spec, board=first, plan=plan)
    return [job, Job(spec, board=LocalBoard(1, 2, first), plan=plan, generation=job.generation)]


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_1_dcp_swallows_no_space_in_a_helper_thread(nth: int, place: LocalPlace) -> None:
    """DCP: a save of eight tensors succeeds with four of them stored.

    With a disk that is really full: tests/crash/test_full_disk.py.
    """
    rule = FaultRule("error", op="os.pwrite", key="*.safetensors", errno=errno.ENOSPC, skip=nth)
    store = Fault(
        StoreSpec(str(place.root), {"block_bytes": 1 << 20}).open(),
        FaultSpec((rule,), inner=True),
    )
    job = Job(StoreSpec("memory://unused"), store=store, plan=plan_of(EIGHT))
    with pytest.raises(StoreError) as caught:
        job.save(1, values(1, EIGHT)).durable(60.0)
    assert caught.value.kind == "no-space"
    assert Catalogue(place.store).commits() == []
    job.save(2, values(2, EIGHT)).durable(60.0)
    assert data_of(place, CommitName(2, 1)) == expected(job.plan, values(2, EIGHT))
    job.close()


def test_2_dcp_overwrites_the_buffer_of_the_previous_save(root: str) -> None:
    """DCP: with one stager, two overlapping async saves both hold the second's values.

    Commits that overlap too: tests/crash/test_store_errors.py, overlapping saves.
    """
    live = {"w": torch.empty(100_000)}
    with ckptd.Checkpointer(root, throttle=2e6) as ck:  # each takes 0.2 s to write
        for step in range(1, 6):
            live["w"].fill_(float(step))
            assert ck.save(step, live) is not None
        live["w"].fill_(-1.0)
        ck.wait(60.0)
        for step in range(5, 0, -1):  # going back leaves later steps beside the line
            ck.load(live, step)
            assert (live["w"] == float(step)).all()


def test_3_dcp_keys_chunks_by_name_only(place: LocalPlace) -> None:
    """DCP's HF writer: two chunks of one tensor on one rank collapse to the last."""
    mesh = MeshEntry(("tp",), (2,), ((0, 1, 2),))
    tensor = LocalTensor("gate_up", "float32", (8, 6), 0, (("strided", 0, 2),))
    plan = build_plan([Group(Structure((mesh,), (tensor,)), (0, 1))], 2)
    arrays = {"gate_up": np.arange(48, dtype=np.float32).reshape(8, 6)}
    jobs = two_ranks(place.spec, plan)
    for handle in [j.save(1, arrays) for j in jobs]:
        handle.durable(60.0)
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        assert data_of(place, CommitName(1, 1), rank) == arrays["gate_up"][rows].tobytes()
        with safe_open(place.root / file_key(FOLDER, rank), "np") as file:
            assert set(file.keys()) == {f"gate_up@{row},0" for row in (rows[0], rows[2])}
    for job in jobs:
        job.close()


def test_4_dcp_copies_before_the_values_are_computed(root: str) -> None:
    """DCP: the staging stream does not wait for the compute stream.

    On a CPU: what counts is the value at the call, whatever happens right after it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w = torch.ones(512, 512, device=device)
    state = {"w": w, "view": w[:, 1::3]}
    with ckptd.Checkpointer(root) as ck:
        for step in range(1, 4):
            for _ in range(1 if device == "cpu" else 200):  # still under way at the save
                w.copy_((w @ w).clamp(0.0, 1.0) * (step / 3.0))
            wanted = w.clone()
            ck.save(step, state)
            w.fill_(-1.0)
            got = {"w": torch.zeros(512, 512), "view": torch.zeros(512, 171)}
            ck.load(got, step)
            assert torch.equal(got["w"], wanted.cpu())
            assert torch.equal(got["view"], wanted.cpu()[:, 1::3])
            w.copy_(wanted)


def test_5_datastates_truncates_under_writes_and_keeps_no_references(
    place: LocalPlace, root: str
) -> None:
    """DataStates: truncates a file that is being written; uses freed tensors; commits too early."""
    left = place.root / file_key(FOLDER, 0)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"somebody has this mapped")
    os.link(left, place.root / "mapped")
    watching = Fault(place.spec.open(), FaultSpec(inner=True))
    job = Job(StoreSpec("memory://unused"), store=watching, plan=plan_of(EIGHT))
    job.save(1, values(1, EIGHT)).durable(60.0)
    assert (place.root / "mapped").read_bytes() == b"somebody has this mapped"
    assert data_of(place, CommitName(1, 1)) == expected(job.plan, values(1, EIGHT))
    # Every byte, and the names, are durable before the record that says so exists.
    order = [f"{o.op} {o.key}" for o in watching.operations]
    data, record = str(left), str(place.root / commit_key(CommitName(1, 1)))
    made = order.index(f"os.link {record}")
    assert order.index(f"os.fdatasync {data}") < made
    assert max(i for i, o in enumerate(order) if o.startswith("os.pwrite") and data in o) < made
    assert order.index(f"os.fsync-folder {left.parent}") < made
    job.close()
    with ckptd.Checkpointer(root) as ck:
        state = {"w": torch.full((1 << 20,), 7.0)}
        ck.save(1, state)
        del state["w"]
        fresh = {"w": torch.zeros(1 << 20)}  # likely in the freed memory
        ck.load(fresh)
        assert (fresh["w"] == 7.0).all()


def test_6_bytecheckpoint_publishes_before_the_data_is_written(place: LocalPlace) -> None:
    """ByteCheckpoint: when the plan is cached, metadata appears before the data is there.

    And its cache loses entries: here structures alternate, and each save is by its own.
    """
    other: dict[str, tuple[int, ...]] = {"c": (512, 512), "d": (99,)}
    shapes: list[dict[str, tuple[int, ...]]] = [{**EIGHT}, other]
    plans = [plan_of(s, world=2) for s in shapes]
    jobs = two_ranks(place.spec, plans[0])
    for step in range(1, 7):
        plan, shape = plans[step % 2], shapes[step % 2]
        for job in jobs:
            job.plan = plan
        handles = [jobs[0].save(step, values(step, shape))]
        jobs[0].client.acquire(1, 60.0)  # rank 0 has written all of it; rank 1 has not begun
        assert not place.store.exists(commit_key(CommitName(step, 1)))
        handles.append(jobs[1].save(step, values(step, shape)))
        for handle in handles:
            handle.durable(60.0)
        for rank in (0, 1):
            wanted = expected(plan, values(step, shape), rank)
            assert data_of(place, CommitName(step, 1), rank) == wanted
    for job in jobs:
        job.close()


def test_7_dlrover_restores_memory_that_nobody_filled(root: str) -> None:
    """DLRover: a replica's memory is allocated and announced, its bytes are never copied.

    Every byte of every target is written, whatever was in it; more in tests/engine/test_read.py.
    """
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
    saved = {
        str(d): torch.randint(0, 2, (257, 33)).to(torch.uint8).to(torch.float32).to(d)
        for d in dtypes
    }
    saved["one"] = torch.tensor([3.0])
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, saved)
        for poison in (0, 1):
            live = {
                n: torch.full_like(t.to(torch.float32), poison).to(t.dtype)
                for n, t in saved.items()
            }
            ck.load(live)
            for name, tensor in saved.items():
                assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_8_nvrx_waits_for_a_dead_worker_for_ever(root: str) -> None:
    """NVRx: a killed worker hangs training. No wait here has a time-out of its own.

    Hung and unstartable workers: tests/crash/test_hung_worker.py.
    """
    ck = ckptd.Checkpointer(root, throttle=10_000.0)
    handle = ck.save(1, {"w": torch.zeros(100_000)})
    assert handle is not None
    assert ck.worker_pid is not None
    os.kill(ck.worker_pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        ck.wait()
    ck.save(2, {"w": torch.zeros(10)})
    ck.close()
    assert [n.step for n in Catalogue(StoreSpec(root).open()).line()] == [2]


def test_9_nvrx_saves_the_first_steps_weights_for_ever(root: str) -> None:
    """NVRx: cached handles to memory; here every save looks at the tensors anew.

    Parameters are swapped for new memory, written in place, and moved between saves.
    """
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "free": torch.zeros(8)}
    wanted: dict[int, list[torch.Tensor]] = {}
    with ckptd.Checkpointer(root) as ck:
        for step in range(1, 7):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            state["free"] = torch.full((8,), float(step))
            if step % 3 == 0:  # the same structure, other memory
                model.weight.data = model.weight.data.clone() + step
                for moments in optimizer.state.values():
                    moments["exp_avg"] = moments["exp_avg"].clone() * step
            live = [model.weight, optimizer.state[model.weight]["exp_avg"], state["free"]]
            wanted[step] = [t.detach().clone() for t in live]
            ck.save(step, state)
        for step, tensors in reversed(wanted.items()):
            ck.load(state, step)
            live = [model.weight, optimizer.state[model.weight]["exp_avg"], state["free"]]
            assert all(torch.equal(a, b) for a, b in zip(live, tensors, strict=True)), step


def test_10_torchsnapshot_sees_keys_of_an_older_save_of_the_path(place: LocalPlace) -> None:
    """torchsnapshot: barrier keys hold only the path; saving it again meets stale keys.

    The first attempt of a step fails on one rank and leaves keys, parts and outcomes behind; the
    second, of the same job, is decided by its own.
    """
    plan = plan_of(EIGHT, world=2)
    rule = FaultRule("error", op="writer", key="*-0001/r00001*")
    first = LocalBoard(0, 2)
    jobs = [Job(place.spec, board=first, plan=plan)]
    broken = place.spec.wrapped(FaultSpec((rule,)))
    jobs.append(Job(broken, board=LocalBoard(1, 2, first), plan=plan, generation=1))
    errors: list[CkptdError] = []
    for handle in [j.save(1, values(1, EIGHT)) for j in jobs]:
        with pytest.raises(CkptdError) as caught:
            handle.durable(60.0)
        errors.append(caught.value)
    assert all("injected fault" in str(e) for e in errors)
    assert isinstance(errors[0], SaveError)
    assert first.peek("save/1/0001/failed") is not None
    for handle in [j.save(1, values(2, EIGHT), attempt="0002") for j in jobs]:
        handle.durable(60.0)
    assert data_of(place, CommitName(1, 1), 1) == expected(plan, values(2, EIGHT), 1)
    for handle in [j.save(1, values(3, EIGHT), attempt="0003") for j in jobs]:
        with pytest.raises(ConflictError, match="committed by another"):
            handle.durable(60.0)
    assert data_of(place, CommitName(1, 1), 1) == expected(plan, values(2, EIGHT), 1)
    for job in jobs:
        job.close()
