"""Ten defects found in other checkpoint engines; none of them is in this one.

One test each, in the order of the list; a docstring says which engine had it and where. States
change right after a save as training changes them: by an optimizer's step.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName, commit_key, data_folder, file_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.structure import SavePlan
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CkptdError, ConflictError, SaveError, StoreError
from ckptd.store import StoreSpec, open_store, osio
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.store.fault import Fault
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.checkpoint.crash.places import LocalPlace
from tests.checkpoint.save.saving import Job, fill, plan_of, values
from tests.processes import PATIENCE_S, stop, wait_for_end

__all__ = ["tmpfs"]

pytestmark = pytest.mark.usefixtures("writing_thread")

EIGHT = {f"t{i}": (2048, 64) for i in range(8)}  # 4 MiB in all


@pytest.fixture
def place(ram: Path) -> Iterator[LocalPlace]:
    place = LocalPlace(ram)
    yield place
    place.close()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def data_of(store_place: LocalPlace, name: CommitName, rank: int = 0) -> bytes:
    """Verify a checkpoint and return a rank's bytes."""
    catalogue = Catalogue(store_place.store)
    assert verify(catalogue, name).findings == ()
    file = catalogue.manifest(name).files[rank]
    return store_place.store.get(file.path)[file.data_start :]


def expected(plan: SavePlan, arrays: dict[str, np.ndarray], rank: int = 0) -> bytes:
    data = bytearray(plan.filemap.data_bytes(rank))
    fill(plan, rank, arrays, memoryview(data))
    return bytes(data)


def two_ranks(spec: StoreSpec, plan: SavePlan, second: StoreSpec | None = None) -> list[Job]:
    board = LocalBoard(0, 2)
    job = Job(spec, board=board, plan=plan)
    other = LocalBoard(1, 2, board)
    return [job, Job(second or spec, board=other, plan=plan, generation=job.generation)]


class Training:
    """A model whose optimizer changes every value at every step, and what it was at each save."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optim": self.optim}
        self.wanted: dict[int, list[torch.Tensor]] = {}

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optim.step()

    def live(self) -> list[torch.Tensor]:
        moments = [t for s in self.optim.state.values() for t in s.values()]
        return [*self.model.parameters(), *moments]

    def save(self, ck: ckptd.Checkpointer, step: int) -> ckptd.SaveHandle:
        self.wanted[step] = [t.detach().clone() for t in self.live()]
        handle = ck.save(step, self.state)
        assert handle is not None
        return handle

    def assert_stored(self, ck: ckptd.Checkpointer) -> None:
        """Newest first: going back to a step leaves the later ones beside the line."""
        for step, wanted in sorted(self.wanted.items(), reverse=True):
            self.train()
            ck.load(self.state, step)
            assert all(torch.equal(a, b) for a, b in zip(self.live(), wanted, strict=True)), step


def test_an_error_in_a_helper_thread_is_not_swallowed(
    tmpfs: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 1, DCP, ``filesystem.py``: a helper thread that meets a full disk ends in silence.

    Of eight tensors four are stored, all are described, and the save has succeeded. Here the disk
    is really full; where space is not reserved beforehand, a thread of the pool finds out; then
    there is no space for one block alone, which nobody else finds out. The save fails, the earlier
    checkpoint stays, and a checkpointer says it unasked.
    """
    place = LocalPlace(tmpfs.path)
    store = StoreSpec(str(place.root), {"block_bytes": 1 << 18}).open()
    job = Job(StoreSpec("memory://unused"), store=store, plan=plan_of(EIGHT))
    job.save(1, values(1, EIGHT)).durable(PATIENCE_S)
    for leave in (1 << 17, 3 << 20):  # full at the first block, and later
        with monkeypatch.context() as patch:
            patch.setattr(osio, "_fallocate", lambda fd, size: None)  # as on NFS
            ballast = tmpfs.fill(leave=leave)
            with pytest.raises(StoreError) as caught:
                job.save(2, values(2, EIGHT), attempt=f"{leave:04}").durable(PATIENCE_S)
        assert caught.value.kind == "no-space"
        assert "ENOSPC" in (caught.value.found or "")
        assert [n.step for n in Catalogue(place.store).commits()] == [1]
    job.close()
    ballast.unlink()
    for nth in (0, 7, 15):  # of the 17 blocks
        rule = FaultRule("error", op="os.pwrite", key="*.safetensors", errno=errno.ENOSPC, skip=nth)
        store = StoreSpec(str(place.root), {"block_bytes": 1 << 18}).open()
        faulty = Fault(store, FaultSpec((rule,), inner=True))
        job = Job(StoreSpec("memory://unused"), store=faulty, plan=plan_of(EIGHT))
        with pytest.raises(StoreError) as caught:
            job.save(2, values(2, EIGHT), attempt=f"{nth:04}").durable(PATIENCE_S)
        assert caught.value.kind == "no-space"
        assert [n.step for n in Catalogue(place.store).commits()] == [1]
        job.close()
    ballast = tmpfs.fill(leave=1 << 20)
    state = {n: torch.zeros(shape) for n, shape in EIGHT.items()}
    with pytest.raises(StoreError, match="no space left"):  # nobody asked the handle
        with ckptd.Checkpointer(str(place.root), new_run=False) as ck:
            ck.save(2, state)
    ballast.unlink()
    with ckptd.Checkpointer(str(place.root)) as ck:
        assert ck.load(state) == 1
    wanted = values(1, EIGHT)
    assert all(np.array_equal(state[n].numpy(), wanted[n]) for n in EIGHT)
    place.close()


def test_a_save_does_not_overwrite_the_buffer_of_the_one_before(root: str) -> None:
    """Defect 2, DCP, ``_state_dict_stager.py``: a reused stager writes over what is being read.

    Of two overlapping saves both hold the second's values. Here each save takes longer to write
    than the training between two of them, and the state changes right after each.
    """
    training = Training(150)
    overlapped = 0
    with ckptd.Checkpointer(root, storage=ckptd.Storage(throttle=1e6)) as ck:  # 0.3 s for each save
        handles: list[ckptd.SaveHandle] = []
        for step in range(1, 7):
            training.train()
            overlapped += bool(handles) and not handles[-1].done
            handles.append(training.save(ck, step))
        training.train()
        ck.wait(PATIENCE_S)
        assert overlapped
        training.assert_stored(ck)


def save_two_pieces(root: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(48, dtype=torch.float32).view(8, 6)
    rows = [0, 1, 4, 5] if dist.get_rank() == 0 else [2, 3, 6, 7]
    placement = _StridedShard(0, split_factor=2)
    fused = DTensor.from_local(
        whole[rows].clone(), mesh, [placement], shape=whole.shape, stride=whole.stride()
    )
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"gate_up": fused})


@pytest.mark.dist
def test_two_chunks_of_one_tensor_on_one_rank_are_both_stored(root: str) -> None:
    """Defect 3, DCP, ``hf_storage.py``: what a file holds is keyed by the tensor's name alone.

    A rank with two chunks of one tensor stores the last. Here each of two ranks has a part of the
    gate and a part of the up projection of one fused tensor.
    """
    run_ranks(2, save_two_pieces, root)
    (folder,) = (Path(root) / "data").iterdir()
    for rank, first_rows in enumerate(((0, 4), (2, 6))):
        with safe_open(Path(root) / file_key(f"data/{folder.name}/", rank), "np") as file:
            assert set(file.keys()) == {f"gate_up@{row},0" for row in first_rows}
    live = {"gate_up": torch.zeros(8, 6)}
    with ckptd.Checkpointer(root) as ck:
        ck.load(live)
    assert live["gate_up"].flatten().tolist() == list(range(48))


def save_what_is_still_reduced(root: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    with ckptd.Checkpointer(root) as ck:
        part = DTensor.from_local(torch.full((128, 1000), rank + 1.0), mesh, [Partial()])
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)  # rank 0's reduction cannot be complete at its save
        reduced = part.redistribute(placements=[Shard(0)], async_op=True)
        assert isinstance(reduced._local_tensor, AsyncCollectiveTensor)
        ck.save(1, {"w": reduced})
        ck.wait(PATIENCE_S)
        live = {"w": torch.zeros(128, 1000)}
        ck.load(live)
    return live["w"][:, ::999].flatten().tolist()


@pytest.mark.dist
def test_values_that_are_still_computed_are_waited_for(root: str) -> None:
    """Defect 4, DCP, ``staging.py``: the copy's stream does not wait for the computing one.

    What an unfinished kernel has yet to write is copied as it was before. What computes beside
    the caller on a CPU is a collective: here a reduction that cannot be complete when it is saved.
    """
    for read in run_ranks(2, save_what_is_still_reduced, root):
        assert read == [3.0] * 256


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA: no stream is raced here")
@pytest.mark.parametrize("side_stream", [False, True])
def test_kernels_that_still_run_are_waited_for(root: str, side_stream: bool) -> None:
    """Defect 4 on the device that it is about, on the default stream and on another."""
    w = nn.Parameter(torch.full((4096, 4096), 1.0 / 4096, device="cuda"))
    optim = torch.optim.SGD([w], lr=1.0)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with ckptd.Checkpointer(root) as ck, torch.cuda.stream(stream):
        for step in range(1, 4):
            optim.zero_grad()
            with torch.no_grad():
                for _ in range(100):
                    w.copy_(w @ w)  # a fixed point, and a second of work for the device
                w.add_(float(step))
            ck.save(step, {"w": w, "optim": optim})
            w.grad = torch.full_like(w, 2.0 * step)
            optim.step()
            got = {"w": torch.zeros(4096, 4096), "optim": optim}
            ck.load(got, step, only=["w"])
            assert torch.allclose(got["w"], torch.full((), step + 1.0 / 4096)), step
            with torch.no_grad():
                w.fill_(1.0 / 4096)


def test_nothing_is_truncated_freed_or_promised_too_early(place: LocalPlace, root: str) -> None:
    """Defect 5, DataStates, ``llm/checkpointing.py``: writes, and then truncates the same file.

    Its native side keeps addresses and no references, so a tensor that is dropped after the call
    is read when others own its memory; and a commit waits for copies, not for the disk.
    """
    left = place.root / file_key(data_folder(CommitName(1, 1), "0001"), 0)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"somebody has this mapped")
    os.link(left, place.root / "mapped")
    watching = Fault(place.spec.open(), FaultSpec(inner=True))
    job = Job(StoreSpec("memory://unused"), store=watching, plan=plan_of(EIGHT))
    job.save(1, values(1, EIGHT)).durable(PATIENCE_S)
    assert (place.root / "mapped").read_bytes() == b"somebody has this mapped"
    assert data_of(place, CommitName(1, 1)) == expected(job.plan, values(1, EIGHT))
    # Every byte, and the names, are durable before the record that says so exists.
    order = [f"{o.op} {o.key}" for o in watching.operations]
    record = str(place.root / commit_key(CommitName(1, 1)))
    made = order.index(f"os.link {record}")
    assert order.index(f"os.fdatasync {left}") < made
    assert max(i for i, o in enumerate(order) if o == f"os.pwrite {left}") < made
    assert order.index(f"os.fsync-folder {left.parent}") < made
    job.close()
    with ckptd.Checkpointer(root, storage=ckptd.Storage(throttle=1e7)) as ck:
        # Small ones come back from the allocator's lists at once, large ones are unmapped.
        for step, sizes in enumerate(([512] * 500, [1 << 20]), start=1):
            state = {str(i): torch.full((n,), 7.0 * step) for i, n in enumerate(sizes)}
            shapes = {name: t.shape for name, t in state.items()}
            ck.save(step, state)
            del state
            live = {name: torch.zeros(shape) for name, shape in shapes.items()}
            ck.load(live)
            assert all((t == 7.0 * step).all() for t in live.values())


def test_a_cached_plan_publishes_nothing_early_and_is_not_mixed_up(
    place: LocalPlace, root: str
) -> None:
    """Defect 6, ByteCheckpoint, ``save_state_dict.py``: with a cached plan, metadata comes first.

    It stands there before the data is written; and its cache evicts the entry just made. Here
    two structures alternate, one rank is late, and each checkpoint is by its own structure.
    """
    other: dict[str, tuple[int, ...]] = {"c": (512, 512), "d": (99,)}
    shapes: list[dict[str, tuple[int, ...]]] = [{**EIGHT}, other]
    plans = [plan_of(s, world=2) for s in shapes]
    jobs = two_ranks(place.spec, plans[0])
    for step in (1, 2, 3, 4, 6):  # the last with the plan of the one before
        plan, shape = plans[step % 2], shapes[step % 2]
        for job in jobs:
            job.plan = plan
        handles = [jobs[0].save(step, values(step, shape))]
        limit = time.monotonic() + PATIENCE_S
        while handles[0].progress.phase != "committing":  # rank 0's bytes and part are durable
            assert time.monotonic() < limit
            time.sleep(0.005)
        time.sleep(0.1)  # for a commit that does not wait
        assert not place.store.exists(commit_key(CommitName(step, 1)))
        handles.append(jobs[1].save(step, values(step, shape)))
        for handle in handles:
            handle.durable(PATIENCE_S)
        for rank in (0, 1):
            wanted = expected(plan, values(step, shape), rank)
            assert data_of(place, CommitName(step, 1), rank) == wanted
    for job in jobs:
        job.close()
    # Names and sizes alone do not tell structures apart.
    structures = [{"a": (4, 6), "b": (5,)}, {"a": (6, 4), "b": (5,)}, {"a": (4, 6), "c": (5,)}]
    states = [{n: torch.rand(s) for n, s in structures[i % 3].items()} for i in range(7)]
    with ckptd.Checkpointer(root) as ck:
        for step, state in enumerate(states, start=1):
            ck.save(step, state)
        ck.wait(PATIENCE_S)
        for step in range(len(states), 0, -1):
            live = {n: torch.zeros_like(t) for n, t in states[step - 1].items()}
            ck.load(live, step)
            assert all(torch.equal(live[n], t) for n, t in states[step - 1].items())


def all_dtypes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
    saved = {
        str(d): torch.randint(0, 2, (257, 33), generator=generator).to(torch.float32).to(d)
        for d in kinds
    }
    return saved | {"one": torch.tensor([3.0])}


def stage_and_die(root: str, pid_file: str) -> None:
    ck = ckptd.Checkpointer(root)
    assert ck.writer_pid is not None
    Path(pid_file).write_text(str(ck.writer_pid))
    ck.save(1, {"one": torch.tensor([1.0])})
    ck.wait(PATIENCE_S)
    stop(ck.writer_pid)  # nothing is written while the trainer lives
    handle = ck.save(2, all_dtypes())
    assert handle is not None
    handle.staged(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.dist
@pytest.mark.usefixtures("writing_process")
def test_what_survives_in_memory_holds_the_bytes(root: str, tmp_path: Path) -> None:
    """Defect 7, DLRover, ``engine.py``: a replica's memory is made and announced, never filled.

    The copy that outlives a trainer is the arena, which the writing process holds: the trainer is
    killed before a byte of it is written. What is restored from it, into targets full of other
    values, is every byte. Replicas on another node: tests/checkpoint/agent/test_peers.py.
    """
    pid_file = tmp_path / "pid"
    (outcome,) = rank_outcomes(1, stage_and_die, root, str(pid_file))
    worker = int(pid_file.read_text())
    try:
        assert outcome.exit_code == -signal.SIGKILL, outcome.trace
        assert [n.step for n in Catalogue(open_store(root)).commits()] == [1]
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for_end(worker)
    saved = all_dtypes()
    with ckptd.Checkpointer(root) as ck:
        for poison in (0, 1):
            live = {n: torch.full(t.shape, float(poison)).to(t.dtype) for n, t in saved.items()}
            assert ck.load(live) == 2
            for name, tensor in saved.items():
                assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.usefixtures("writing_process")
def test_a_killed_writing_process_hangs_nobody(root: str) -> None:
    """Defect 8, NVRx, ``core.py``: a poll of the worker's queue that never asks if it lives.

    A killed worker hangs training. No wait here is given a time-out: the handle, the next save,
    a save that waits for a slot, and `close` all end; another worker has written everything. One
    whose workers are killed each time ends with the error: tests/checkpoint/save/test_takeover.py.
    A stopped one: tests/checkpoint/crash/test_hung_worker.py.
    """
    state = {"w": torch.zeros(100_000)}

    def begin(step: int) -> tuple[ckptd.Checkpointer, ckptd.SaveHandle, int]:
        ck = ckptd.Checkpointer(root, storage=ckptd.Storage(throttle=400_000.0), new_run=False)
        handle = ck.save(step, state)
        assert handle is not None
        assert ck.writer_pid is not None
        return ck, handle, ck.writer_pid

    def ended(act: Callable[[], object]) -> None:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it hangs"

    def steps() -> list[int]:
        return [n.step for n in Catalogue(open_store(root)).line()]

    ck, handle, worker = begin(1)
    os.kill(worker, signal.SIGKILL)
    ended(handle.durable)
    ck.save(2, {"w": torch.zeros(10)})
    finished = threading.Thread(target=ck.close, daemon=True)
    finished.start()
    finished.join(PATIENCE_S)
    assert not finished.is_alive()
    assert steps() == [1, 2]

    ck, _, worker = begin(3)
    killer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
    killer.start()
    more = range(4, 7)  # soon one of them waits for a slot
    ended(lambda: [ck.save(step, state) for step in more])
    killer.join()
    ck.close()
    assert steps() == [1, 2, 3, 4, 5, 6]

    ck, _, worker = begin(11)
    os.kill(worker, signal.SIGKILL)
    ended(ck.close)
    assert steps()[-1] == 11


def test_new_values_at_old_addresses_are_saved_anew(root: str) -> None:
    """Defect 9, NVRx: handles to memory, cached by address, bring the first step's weights.

    They did so for ever. Here parameters are written in place, swapped for new memory of the same
    structure, and swapped back; each save looks at the tensors anew.
    """
    training = Training(64)
    weight = training.model.weight
    addresses: list[int] = []
    with ckptd.Checkpointer(root) as ck:
        first = weight.data
        for step in range(1, 9):
            training.train()
            if step in (3, 5):
                weight.data = first if step == 5 else first.clone()
                moments = training.optim.state[weight]
                moments["exp_avg"] = moments["exp_avg"].clone()
            addresses.append(weight.data_ptr())
            training.save(ck, step)
        training.train()
        assert addresses[0] == addresses[1] == addresses[4] == addresses[7]
        assert addresses[2] == addresses[3] != addresses[0]
        training.assert_stored(ck)


def save_again_and_again(root: str) -> None:
    """Save step 2 of one root three times, each time with another rank late."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    store = open_store(root)

    def save(ck: ckptd.Checkpointer, step: int, value: float, late: int) -> None:
        w = DTensor.from_local(torch.full((8,), value + rank), mesh, [Shard(0)])
        dist.barrier()
        if rank == late:
            time.sleep(0.3)
        handle = ck.save(step, {"w": w})
        assert handle is not None
        handle.durable(PATIENCE_S)
        assert store.exists(commit_key(CommitName(step, ck.generation)))  # durable where it says so
        live = {"w": torch.zeros(16)}
        assert ck.load(live, step) == step
        assert live["w"].tolist() == [value] * 8 + [value + 1] * 8

    with ckptd.Checkpointer(root) as ck:
        save(ck, 1, 10.0, 0)
        save(ck, 2, 20.0, 0)
        ck.load({"w": torch.zeros(16)}, 1)
        save(ck, 2, 30.0, 0)
        ck.load({"w": torch.zeros(16)}, 1)
        save(ck, 2, 40.0, 1)
    for late, value in ((0, 50.0), (1, 60.0)):
        with ckptd.Checkpointer(root, new_run=True) as ck:
            save(ck, 2, value, late)


@pytest.mark.dist
def test_saving_a_path_again_does_not_meet_the_keys_of_the_save_before(
    place: LocalPlace, root: str
) -> None:
    """Defect 10, torchsnapshot, ``dist_store.py``: barrier keys hold the path and nothing else.

    A path that is saved again in one job meets the keys of the first time. Here one job saves one
    step of one root again after going back, and by other checkpointers; and again after an
    attempt that failed on one rank and left its keys, parts and outcome behind.
    """
    run_ranks(2, save_again_and_again, root)
    plan = plan_of(EIGHT, world=2)
    rule = FaultRule("error", op="writer", key="*-0001/r00001*")
    jobs = two_ranks(place.spec, plan, place.spec.wrapped(FaultSpec((rule,))))
    errors: list[CkptdError] = []
    for handle in [j.save(1, values(1, EIGHT)) for j in jobs]:
        with pytest.raises(CkptdError) as caught:
            handle.durable(PATIENCE_S)
        errors.append(caught.value)
    assert all("injected fault" in str(e) for e in errors)
    assert isinstance(errors[0], SaveError)
    assert jobs[0].board.peek("save/1/0001/failed") is not None
    for handle in [j.save(1, values(2, EIGHT), attempt="0002") for j in jobs]:
        handle.durable(PATIENCE_S)
    assert data_of(place, CommitName(1, 1), 1) == expected(plan, values(2, EIGHT), 1)
    for handle in [j.save(1, values(3, EIGHT), attempt="0003") for j in jobs]:
        with pytest.raises(ConflictError, match="committed by this run already"):
            handle.durable(PATIENCE_S)
    assert data_of(place, CommitName(1, 1), 1) == expected(plan, values(2, EIGHT), 1)
    for job in jobs:
        job.close()
