"""Writes to memory that is not copied yet are found, counted by torch or not."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptd
from ckptd.base.runtime import memory
from ckptd.base.runtime.memory import PAGE, Pages, mappings
from ckptd.base.torch.memorywatch import (
    SAMPLED_BYTES,
    WHOLE_BYTES,
    MemorySpan,
    Resizes,
    SpanWatch,
)
from ckptd.checkpoint.save import arena
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.torch import copy as copying
from ckptd.errors import SaveError
from ckptd.testing.ranks import run_ranks
from ckptd.types import Box
from tests.processes import PATIENCE_S

KERNEL = Pages.of_this_process() is not None
"""Whether this machine's kernel has an eye."""


def eyes() -> list[Pages | None]:
    """Return the kernel's eye on this process, where there is one, and none."""
    return [Pages.of_this_process(), None] if KERNEL else [None]


@pytest.fixture(params=["kernel", "blind"] if KERNEL else ["blind"])
def pages(request: pytest.FixtureRequest) -> Pages | None:
    return eyes()[-1 if request.param == "blind" else 0]


def watch(tensors: dict[str, torch.Tensor], pages: Pages | None) -> SpanWatch:
    spans = [MemorySpan(n, t.data_ptr(), t.nbytes, None) for n, t in tensors.items()]
    return SpanWatch(spans, mappings(), pages)


def test_one_byte_is_found_wherever_it_is(pages: Pages | None) -> None:
    tensors = {f"t{n}": torch.zeros(n, dtype=torch.uint8) for n in (1, 700, 5 * PAGE, 1 << 20)}
    watched = watch(tensors, pages)
    assert watched.odds == 1.0
    assert bool(watched.ranges) == (pages is not None)
    assert not watched.begin().changed(0)
    for name, tensor in tensors.items():
        for at in {0, 1, 100, PAGE, 3 * PAGE, tensor.numel() // 2, tensor.numel() - 1}:
            if at < tensor.numel():
                look = watched.begin()
                tensor.numpy()[at] += 1
                assert look.changed(0) == [name], (name, at)
    assert not watched.begin().changed(0)


def test_neighbours_in_a_page_are_not_taken_for_one_another(pages: Pages | None) -> None:
    memory = torch.zeros(20 * PAGE, dtype=torch.uint8)
    one, other = memory[100 : 8 * PAGE + 50], memory[8 * PAGE + 50 : 16 * PAGE]
    look = watch({"one": one}, pages).begin()
    other.data.add_(1)
    memory.data[:100].add_(1)
    assert not look.changed(0)


@pytest.mark.skipif(not KERNEL, reason="this kernel counts no writes")
def test_neighbours_are_counted_at_once_with_what_lies_between() -> None:
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = {f"t{n}": whole[10 * n * PAGE : (10 * n + 8) * PAGE] for n in range(6)}
    watched = watch(tensors, Pages.of_this_process())
    between = whole.data_ptr() + 8 * PAGE

    def changed(*offsets: int) -> list[str]:
        look = watched.begin()
        for at in offsets:
            whole.numpy()[at] += 1
        return look.changed(0)

    for lies in ("as it was", "mapped anew"):
        assert changed() == [], lies
        assert changed(8 * PAGE, 19 * PAGE) == [], "what lies between is not watched"
        assert changed(3 * PAGE, 8 * PAGE, 33 * PAGE + 5) == ["t0", "t3"]
        assert len(watched.ranges) == 6
        look = watched.begin()
        assert look._count is not None
        assert len(look._count.ranges) == (1 if lies == "as it was" else 6)
        _mapped_anew(between, PAGE)  # while it is counted, too
        assert look.changed(0) == []


def _mapped_anew(at: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert libc.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == at


def test_a_value_that_is_put_back_was_written_all_the_same() -> None:
    if Pages.of_this_process() is None:
        pytest.skip("this kernel does not count writes")
    tensor = torch.zeros(1 << 20)
    look = watch({"w": tensor}, Pages.of_this_process()).begin()
    tensor.data[5000] = 1
    tensor.data[5000] = 0
    assert look.changed(0) == ["w"]


def test_what_does_not_write_is_no_change(pages: Pages | None) -> None:
    """Reads, reads of memory that nobody has touched yet, forks, and what children write."""
    fresh = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensors = {
        "untouched": torch.frombuffer(fresh, dtype=torch.uint8),
        "touched": torch.ones(1 << 20),
        "used": torch.ones(512, 512, requires_grad=True),
    }
    for _ in range(2):
        look = watch(tensors, pages).begin()
        child = os.fork()
        if not child:
            tensors["touched"].numpy()[:] = 7
            os._exit(0)
        os.waitpid(child, 0)
        assert not bool(tensors["untouched"].any())
        os.pwrite(os.memfd_create("any"), tensors["touched"].numpy().data, 0)
        (tensors["used"] @ tensors["used"]).sum().backward()
        assert not look.changed(0)


def test_of_more_than_fits_there_are_samples_of_each_tensor() -> None:
    large = torch.zeros(WHOLE_BYTES + (1 << 20), dtype=torch.uint8)
    tensors = {"large": large, "small": torch.zeros(1 << 18)}
    watched = watch(tensors, None)
    assert watched.odds == pytest.approx(SAMPLED_BYTES / sum(t.nbytes for t in tensors.values()))
    assert not watched.begin().changed(0)
    for name, tensor in tensors.items():
        look = watched.begin()
        tensor.data.add_(1)
        assert look.changed(0) == [name]
    found = 0
    for at in range(64):
        look = watched.begin()
        large.data[at * 7919] += 1
        found += bool(look.changed(0))
    assert 5 <= found <= 60  # each with the odds that are told, a little less than a half


@pytest.mark.skipif(not KERNEL, reason="this kernel counts no writes")
@pytest.mark.parametrize("ends_first", [0, 1])
def test_watches_of_the_same_memory_do_not_blind_one_another(ends_first: int) -> None:
    pages = Pages.of_this_process()
    memory = torch.zeros(40 * PAGE, dtype=torch.uint8)
    parts = {"all": memory, "left": memory[: 20 * PAGE], "right": memory[15 * PAGE :]}
    whole, again = (watch({"all": memory}, pages) for _ in range(2))
    halves = watch({n: parts[n] for n in ("left", "right")}, pages)
    for pair in (whole, halves), (halves, whole), (whole, again):
        first = pair[0].begin()
        second = pair[1].begin()
        looks = [first, second]
        assert not looks.pop(ends_first).changed(0)
        assert not looks.pop().changed(0), "the end of one is no write for the other"
        first = pair[0].begin()
        memory.numpy()[33 * PAGE] += 1
        second = pair[1].begin()
        assert not second.changed(0), "it was written before"
        assert first.changed(0), "the beginning of another hides no write"
        first, second = pair[0].begin(), pair[1].begin()
        looks = [first, second]
        assert not looks.pop(ends_first).changed(0)
        memory.numpy()[33 * PAGE] += 1
        assert looks.pop().changed(0)


def test_two_checkpointers_save_the_same_state_at_once(tmp_path: Path) -> None:
    state = {"model": nn.Linear(512, 512)}
    state["optimizer"] = torch.optim.Adam(state["model"].parameters())
    with (
        ckptd.Checkpointer(str(tmp_path / "near")) as near,
        ckptd.Checkpointer(str(tmp_path / "far")) as far,
    ):
        for step in range(1, 4):
            state["model"](torch.ones(1, 512)).sum().backward()
            state["optimizer"].step()
            handles = near.save(step, state), far.save(step, state)
            for handle in handles:
                handle.durable(PATIENCE_S)


def test_memory_that_is_gone_is_a_change_and_no_crash() -> None:
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = ctypes.c_char.from_buffer(memory)
    at = ctypes.addressof(held)
    memory[:] = b"x" * len(memory)
    for pages in eyes():
        span = MemorySpan("gone", at + 10, 60 * PAGE, None)
        watched = SpanWatch([span], mappings(), pages)
        look = watched.begin()
        if pages is eyes()[-1]:
            del held
            memory.close()
            assert look.changed(0) == ["gone"]
        else:
            assert not look.changed(0)


def test_the_copy_counts_and_not_what_is_there_afterwards() -> None:
    """A swap that is undone before the end leaves the copy of what was swapped in."""
    live = torch.zeros(100, dtype=torch.uint8)
    copy = np.zeros(100, np.uint8)
    look = SpanWatch([MemorySpan("w", live.data_ptr(), 100, 0)], mappings(), None).begin()
    live.data.add_(1)
    copy[:] = live.numpy()
    live.data.sub_(1)
    assert look.changed(copy.ctypes.data) == ["w"]


# --- whole saves ----------------------------------------------------------------------------------


class Late:
    """Lets the late copies of all saves wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        whole = copying.Snapshot.copy_rest

        def wait_first(snapshot: copying.Snapshot) -> None:
            assert self.go.wait(PATIENCE_S)
            whole(snapshot)

        monkeypatch.setattr(copying.Snapshot, "copy_rest", wait_first)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    found = Late(monkeypatch)
    yield found
    found.go.set()


def foreach(weight: torch.Tensor) -> None:
    torch._foreach_mul_([weight.data], 2)


def numpy_element(weight: torch.Tensor) -> None:
    weight.detach().numpy()[200, 100] = 7.0


def dlpack(weight: torch.Tensor) -> None:
    np.from_dlpack(weight.detach())  # a view that others would write to
    torch.from_dlpack(weight.detach()).data.zero_()


def storage_copy(weight: torch.Tensor) -> None:
    other = weight.detach().clone().fill_(3.0)
    weight.untyped_storage().copy_(other.untyped_storage())


def swap_and_back(weight: torch.Tensor) -> None:
    kept = weight.detach().clone()
    weight.data.copy_(kept + 1)
    weight.data.copy_(kept)


def fused(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    alike = nn.Parameter(weight.detach())
    alike.grad = weight.grad
    torch.optim.AdamW([alike], fused=True).step()


def by_address(weight: torch.Tensor) -> None:
    ctypes.memset(weight.data_ptr() + 70_000, 1, 3)


def freed(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_(0)


WAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.data.clamp_(-0.01, 0.01),
    lambda w: w.data.add_(1),
    foreach,
    numpy_element,
    dlpack,
    storage_copy,
    fused,
    by_address,
    swap_and_back,
    freed,
]


@pytest.mark.parametrize("blind", [False, True])
def test_what_torch_does_not_count_is_found(
    blind: bool, tmp_path: Path, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blind:
        monkeypatch.setattr(Pages, "of_this_process", staticmethod(lambda: None))
    elif Pages.of_this_process() is None:
        pytest.skip("this kernel does not count writes")
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        for step, way in enumerate(WAYS, 1):
            if blind and way is swap_and_back:
                continue  # before anything is copied: what is stored is of the step
            model = nn.Linear(256, 256)
            state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
            late.go.clear()
            handle = ck.save(step, state)
            way(model.weight)
            late.go.set()
            with pytest.raises(SaveError) as caught:
                handle.durable(PATIENCE_S)
            assert (caught.value.kind, caught.value.where) == ("mutated", "model.weight"), step
        assert ck.latest() is None
        model = nn.Linear(256, 256)
        ck.save(50, {"model": model, "optim": torch.optim.AdamW(model.parameters())})
        ck.wait()
        assert ck.latest() == 50


def write_for_ever(weight: torch.Tensor, ready: Any) -> None:
    while True:
        weight.data.add_(1)
        ready.set()


def test_what_other_processes_write_is_copied_at_once_and_compared(tmp_path: Path) -> None:
    """Several processes train one model in shared memory; no gate of this process holds them."""
    context = torch.multiprocessing.get_context("spawn")
    ready = context.Event()
    model = nn.Linear(2048, 2048)
    model.share_memory()
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, state).durable(PATIENCE_S)
        other = context.Process(target=write_for_ever, args=(model.weight, ready), daemon=True)
        other.start()
        try:
            assert ready.wait(PATIENCE_S)
            with pytest.raises(SaveError) as caught:
                for step in range(2, 1000):  # on a busy machine it leaves some of them alone
                    ck.save(step, state).durable(PATIENCE_S)
            assert (caught.value.kind, caught.value.where) == ("mutated", "model.weight")
        finally:
            other.kill()
            other.join()
        ck.save(1000, state).durable(PATIENCE_S)
        wanted = model.weight.detach().clone()
        ck.load(state, 1000)
    assert torch.equal(model.weight, wanted)


def test_what_nobody_counted_between_two_saves_is_written_anew(tmp_path: Path) -> None:
    """Nothing that spares copying or writing may ask torch what has changed."""
    weight = torch.zeros(256, 256)
    state = {"w": weight}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state).durable(PATIENCE_S)
            weight.numpy()[step, step] = step
        wanted = weight.clone()
        ck.save(5, state).durable(PATIENCE_S)
        weight.data.zero_()
        ck.load(state, 5)
    assert torch.equal(weight, wanted)


# --- DTensors -------------------------------------------------------------------------------------


def change_in_all_ways(root: str) -> list[tuple[str, str | None]]:
    mesh = init_device_mesh("cpu", (1,))
    patch = pytest.MonkeyPatch()
    late = Late(patch)
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda w: w.clamp_(-0.01, 0.01),
        lambda w: w.mul_(2),
        lambda w: torch._foreach_mul_([w], 2),
        lambda w: w.data.add_(1),
        lambda w: w._local_tensor.add_(1),
        lambda w: w.to_local().zero_(),
    ]
    found = []
    with ckptd.Checkpointer(root) as ck:
        for step, way in enumerate(ways, 1):
            model = nn.Linear(64, 64, bias=False)
            model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
            state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
            late.go.clear()
            handle = ck.save(step, state)
            with torch.no_grad():
                way(model.weight)
            late.go.set()
            try:
                handle.durable(PATIENCE_S)
                found.append(("committed", None))
            except SaveError as error:
                found.append((error.kind, error.where))
    patch.undo()
    return found


@pytest.mark.dist
def test_a_change_of_a_dtensor_is_found(tmp_path: Path) -> None:
    found = run_ranks(1, change_in_all_ways, str(tmp_path / "root"), deadline_s=180.0)[0]
    assert found == [("mutated", "model.weight")] * 6


# --- storages -------------------------------------------------------------------------------------


def test_storages_stay_resizable(tmp_path: Path) -> None:
    """An engine frees what is not needed for a while, and fills it again."""
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    state = {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters()),
        "plain": torch.ones(70_000),
        "inside": [torch.ones(3)],
    }
    model(torch.randn(4, 300)).sum().backward()
    state["optim"].step()
    held = [*model.parameters(), *model.buffers(), state["plain"], state["inside"][0]]
    held += [t for s in state["optim"].state.values() for t in s.values()]
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        for step in (1, 2, 3):
            handle = ck.save(step, state)
            handle.staged(PATIENCE_S)
            assert all(t.untyped_storage().resizable() for t in held)
            for tensor in held:
                storage = tensor.untyped_storage()
                kept = storage.clone()
                storage.resize_(0)
                storage.resize_(kept.nbytes())
                storage.copy_(kept)
            with torch.no_grad():
                model[0].weight.fill_(step)
            handle.durable(PATIENCE_S)
        ck.save(4, state).durable(PATIENCE_S)
        model[0].weight.data.zero_()
        ck.load(state, 4)
        assert all(t.untyped_storage().resizable() for t in held)
    assert bool((model[0].weight == 3).all())


def test_memory_that_is_freed_while_the_kernel_copies_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel finds no memory there, and not none to put it into."""
    state = {"w": torch.ones(10 << 20)}
    read = Slot.read

    def late(slot: Slot, runs: Any) -> None:
        state["w"].untyped_storage().resize_(0)
        read(slot, runs)

    monkeypatch.setattr(Slot, "read", late)
    with ckptd.Checkpointer(
        str(tmp_path), copy=ckptd.CopyOptions(lazy="all"), when_failed="warn"
    ) as ck:
        handle = ck.save(1, state)
        assert handle is not None
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
    assert (caught.value.kind, caught.value.where) == ("mutated", "w")


def test_resizes_are_found_from_the_look_on() -> None:
    tensor, other = torch.zeros(100), torch.zeros(100)
    identity = tensor.untyped_storage()._cdata
    first = Resizes()
    tensor.untyped_storage().resize_(0)
    second = Resizes()
    assert first.storages() == {identity}
    assert not second.storages()
    tensor.untyped_storage().resize_(400)
    assert first.storages() == second.storages() == {identity}
    other.detach().untyped_storage().resize_(800)
    assert second.storages() == {identity, other.untyped_storage()._cdata}
    with pytest.raises(RuntimeError):
        torch.from_numpy(np.zeros(4)).untyped_storage().resize_(0)


def test_resizes_are_found_beside_others_that_look_for_them(monkeypatch: Any) -> None:
    """`torch.distributed._tools.mem_tracker` replaces the same method, and puts it back."""
    tensor = torch.zeros(100)
    plain = torch.UntypedStorage.resize_
    Resizes()
    seen = []

    def theirs(storage: torch.UntypedStorage, size: int) -> Any:
        seen.append(size)
        return plain(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", theirs)
    for _ in range(2):
        resizes = Resizes()
        tensor.untyped_storage().resize_(0)
        assert resizes.storages()
        monkeypatch.undo()  # as if it never was
    assert seen == [0]


# -- memory that is freed meanwhile ----------------------------------------------------------------


def read(tensor: torch.Tensor, part: Box | None = None) -> torch.Tensor:
    shape = tensor.shape if part is None else part.shape
    into = torch.empty(shape, dtype=tensor.dtype)
    target = into.view(-1).view(torch.uint8).numpy() if into.numel() else np.empty(0, np.uint8)
    copying._copy_guarded(tensor, tensor.data_ptr(), part, target)
    return into


def test_strided_memory_is_read_as_it_lies() -> None:
    draw = random.Random(8)
    for number in range(60):
        shape = [draw.randrange(1, 9) for _ in range(draw.randrange(0, 4))]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
        tensor = torch.randint(0, 100, shape).to(dtype)
        if shape:
            tensor = tensor.permute(draw.sample(range(len(shape)), len(shape)))
        if dtype.is_complex:
            tensor = (tensor * 1j).conj()
        if number % 3 == 0 and shape:
            tensor = torch.cat([tensor] * 3, -1).narrow(-1, 1, 2)[..., ::2]
        assert torch.equal(read(tensor), tensor), (number, shape, dtype)
        if shape:
            part = Box((1,) * len(shape), tuple(n - 1 for n in tensor.shape))
            wanted = tensor[tuple(slice(1, None) for _ in shape)]
            assert torch.equal(read(tensor, part), wanted)


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_large_strided_memory_is_read_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_GUARDED_BYTES", 5_000)
    monkeypatch.setattr(copying, "_FEW_BYTES", 1_000)
    whole = torch.arange(700 * 40, dtype=torch.int32).reshape(700, 40)
    for tensor in (whole.t(), whole[:, 3:5], whole[:rows, ::7], whole.reshape(70, 10, 40).mT):
        assert torch.equal(read(tensor), tensor)


@pytest.mark.parametrize("lies", ["dense", "strided"])
def test_memory_that_is_freed_under_a_later_copy_has_changed(
    lies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is memory in the slot already, too: a plain copy would end the process."""
    base = torch.ones(2000, 1500)
    state = {"w": base if lies == "dense" else base.t()}
    plain = memory.read_memory

    def late(runs: Any) -> None:
        base.untyped_storage().resize_(0)
        plain(runs)

    with ckptd.Checkpointer(
        "memory://freed-" + lies,
        copy=ckptd.CopyOptions(lazy="all", slots=1),
        when_failed="warn",
    ) as ck:
        ck.save(1, state).durable(PATIENCE_S)
        ck.wait()
        for module in (copying, arena):
            monkeypatch.setattr(module, "read_memory", late)
        handle = ck.save(2, state)
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
    assert (caught.value.kind, caught.value.where) == ("mutated", "w")


def test_many_runs_are_read_in_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel takes at once, empty ones, and calls that end within one."""
    source = np.random.default_rng(1).integers(0, 256, 3_000 * 40, np.uint8)
    sizes = [(n * 7) % 40 for n in range(3_000)]
    starts = np.cumsum([0, *sizes])
    plain = memory._read
    calls: list[int] = []

    def short(pid: int, here: Any, count: Any, *there: Any) -> int:
        """Take fewer runs than are asked for; the last of them cut off."""
        calls.append(count.value)
        if count.value > 900:
            ctypes.cast(here, ctypes.POINTER(ctypes.c_size_t))[2 * 899 + 1] = 3
            count.value = 900
        return int(plain(pid, here, count, *there))

    for way in (plain, short, None):
        target = np.zeros(starts[-1], np.uint8)
        monkeypatch.setattr(memory, "_read", way)
        memory.read_memory(
            np.array(
                [
                    (source.ctypes.data + 40 * n, target.ctypes.data + starts[n], size)
                    for n, size in enumerate(sizes)
                ]
            )
        )
        wanted = [source[40 * n : 40 * n + size] for n, size in enumerate(sizes)]
        assert np.array_equal(target, np.concatenate(wanted))
    assert 3 <= len(calls) < 9


def test_one_run_of_many_is_not_there() -> None:
    import mmap

    source, target = mmap.mmap(-1, 3 * mmap.PAGESIZE), np.zeros(3, np.uint8)
    at = ctypes.addressof(ctypes.c_char.from_buffer(source))
    runs = np.array([(at + n * mmap.PAGESIZE, target.ctypes.data + n, 1) for n in range(3)])
    memory.read_memory(runs)
    runs[1, 0] = 4096  # no process has memory there
    with pytest.raises(OSError, match="Bad address"):
        memory.read_memory(runs)


FREED = """
import sys, time, torch, ckptd
lies, pause = sys.argv[1], float(sys.argv[2])
base = torch.ones(6000, 6000)
state = {"w": base if lies == "dense" else base.t()}
late = ckptd.CopyOptions(lazy="all")
with ckptd.Checkpointer("memory://freed", copy=late, when_failed="warn") as ck:
    ck.save(1, state).durable(100)
    ck.wait()
    handle = ck.save(2, state)
    time.sleep(pause)
    base.untyped_storage().resize_(0)
    try:
        handle.durable(100)
    except ckptd.CkptdError as error:
        assert error.kind == "mutated", error
    base.untyped_storage().resize_(4 * 6000 * 6000)
"""


@pytest.mark.long
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.02, 0.03, 0.04, 0.06])
@pytest.mark.parametrize("lies", ["dense", "strided"])
def test_freeing_memory_ends_no_process(lies: str, pause: float) -> None:
    program = [sys.executable, "-c", FREED, lies, str(pause)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
