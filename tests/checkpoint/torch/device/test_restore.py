"""Loading to devices: right values whatever is enqueued when, and little memory of the host."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptd
from ckptd.base.grids.block import Block
from ckptd.base.torch.device import kind_of
from ckptd.checkpoint.torch import filling, loader, upload
from ckptd.errors import CkptdError, CorruptError, DeadlineError, UsageError
from ckptd.store import open_store
from tests.processes import PATIENCE_S
from tests.reshard.torch.layout.jobs import Tree
from tests.simdevice import SCHEDULES, installed, run, run_simulated_ranks
from tests.simdevice.simulator import PLENTY
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.usefixtures("writing_thread"), *ON_SIMULATED_DEVICES]

Values = dict[str, torch.Tensor]


def values(seed: int) -> Values:
    """Return tensors of the host of every form that a load has to cope with."""
    torch.manual_seed(seed)
    c = torch.complex(torch.rand(3, 4), torch.rand(3, 4))
    return {
        "large": torch.rand(1700, 1001),
        "strided": torch.rand(401, 300).t(),
        "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "column": torch.rand(50, 7)[:, 2],
        "half": torch.rand(7).to(torch.bfloat16),
        "eighth": torch.rand(9).to(torch.float8_e4m3fn),
        "packed": torch.randint(0, 255, (6,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "flag": torch.rand(5) > 0.5,
        "number": torch.rand(()),
        "none": torch.empty(0, 3),
        "complex": c,
        "double": c.to(torch.complex128).t(),
        **{f"small.{i}": torch.rand(3) for i in range(20)},
    }


def on_devices(state: Values) -> Values:
    """Return them on two devices, strides kept, and some on the host."""
    out: Values = {}
    for number, (name, value) in enumerate(state.items()):
        device = "cpu" if name in ("small.1", "small.2") else f"cuda:{number % 2}"
        out[name] = torch.empty_like(value, device=device)
        if name == "column":
            out[name] = torch.empty(50, 7, device=device)[:, 2]
        out[name].copy_(value)
    out["lazy"] = torch.empty(4, 3, dtype=torch.complex64, device="cuda").conj()
    out["lazy"].copy_(state["complex"].t())
    out["tied"] = out["large"]
    return out


def as_integers(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, for a comparison that knows no NaN."""
    plain = tensor.detach().cpu().resolve_conj().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def different(found: Values, wanted: Values) -> list[str]:
    return [n for n in wanted if as_integers(found[n]) != as_integers(wanted[n])]


def save(root: str, state: Values, **options: Any) -> Values:
    with ckptd.Checkpointer(root, **options) as ck:
        ck.save(1, state).durable(PATIENCE_S)
    return {n: t.detach().clone() for n, t in state.items()}


# -- order ---------------------------------------------------------------------------------------


def loads_in_order(root: str) -> None:
    """Load between kernels that are enqueued and may not have run."""
    wanted = save(root, on_devices(values(1)))
    live = on_devices(values(2))
    with ckptd.Checkpointer(root) as ck:
        for tensor in live.values():
            if tensor.dtype == torch.float32:
                tensor.mul_(3.0)  # comes before what the load writes
        ck.load(live)
        # Any stream may use what was loaded, and waits for nothing.
        for device in ("cuda:0", "cuda:1"):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                names = [n for n, t in live.items() if t.device == torch.device(device)]
                found = {n: live[n].clone() for n in names}
                assert different(found, {n: wanted[n] for n in names}) == []
        assert different(live, wanted) == []


def keeps_what_was_read_before(root: str) -> None:
    """Clones that the program had enqueued get the values from before the load."""
    save(root, {"w": torch.full((1 << 20,), 1.0, device="cuda")})
    live = {"w": torch.full((1 << 20,), 2.0, device="cuda")}
    torch.cuda.synchronize()
    clone = live["w"].clone()
    # A comparison with the witness would wait for the copies too; not every checkpoint has one.
    with pytest.MonkeyPatch.context() as patch, ckptd.Checkpointer(root) as ck:
        patch.setattr(loader, "check_witness", lambda *_: None)
        ck.load(live)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bool((live["w"] == 1.0).all())
    assert bool((clone == 2.0).all())


def loads_from_its_own_arena(root: str) -> None:
    """What the process has saved itself is copied from the page-locked slot as it lies there."""
    live = on_devices(values(1))
    wanted = {n: t.clone() for n, t in live.items()}
    made = buffers()
    with ckptd.Checkpointer(root, copy=ckptd.CopyOptions(slots=1)) as ck:
        ck.save(1, live).durable(PATIENCE_S)
        for name, other in on_devices(values(2)).items():
            live[name].copy_(other)
        made.clear()
        ck.load(live)
        report = ck.last_load
    assert report is not None
    assert report.tier == "memory"
    assert report.read.bytes_in_memory >= wanted["large"].nbytes
    assert different(live, wanted) == []
    # Strided ones alone go through a buffer.
    assert len(made) <= 2, made


def buffers() -> list[int]:
    """Return a list that gets the size of each buffer that a ring makes from now on."""
    made: list[int] = []
    genuine = upload.BufferRing._make

    def make(ring: upload.BufferRing) -> torch.Tensor:
        made.append(ring.nbytes)
        return genuine(ring)

    upload.BufferRing._make = make  # type: ignore[method-assign]
    return made


def checked(folder: str, schedule: str) -> None:
    # Memory of the process is a store without files, and starts no process that writes.
    roots = ["memory://" + schedule] + [f"{folder}/root"] * (schedule == "lazy")
    for root in roots:
        for check in (loads_in_order, keeps_what_was_read_before, loads_from_its_own_arena):
            with installed().test(schedule) as simulator:
                check(f"{root}/{check.__name__}")
                assert not simulator.problems, (root, check, simulator.problems)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_right_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    run(checked, str(tmp_path), schedule, schedule=schedule)


# -- what a device has not -----------------------------------------------------------------------


def loads_without(root: str) -> None:
    wanted = save(root, on_devices(values(1)))
    kind, simulator = kind_of("cuda"), installed()
    with ckptd.Checkpointer(root) as ck:
        for lockable in (True, False):
            kind.has_streams, simulator.lockable = not lockable, lockable
            live = on_devices(values(2))
            simulator.waits.clear()
            ck.load(live)
            assert {w.call for w in simulator.waits} >= {"blocking copy to the device"}
            assert different(live, wanted) == []


def test_devices_without_streams_or_page_locks(tmp_path: Path) -> None:
    """Each copy is waited for, through the same ring."""
    run(loads_without, str(tmp_path / "root"), schedule="lazy")


# -- what a load promises ------------------------------------------------------------------------


def leaves_the_state_alone(folder: str) -> None:
    """A digest of the last chunk that is wrong is found before the first value is written."""
    state = {f"w{i}": torch.rand(1 << 20, device=f"cuda:{i % 2}") for i in range(3)}
    state["host"] = torch.rand(1 << 20)
    counts = installed().counts
    for root in (f"{folder}/root", "memory://damaged"):
        save(root, state)
        damage_the_last_chunk(root)
        live = {n: torch.full_like(t, 7.0) for n, t in state.items()}
        counts.clear()
        with ckptd.Checkpointer(root) as ck, pytest.raises(CorruptError) as caught:
            ck.load(live)
        assert not caught.value.state_corrupted
        assert not counts["copy to the device"]
        assert all(bool((t == 7.0).all()) for t in live.values())


def damage_the_last_chunk(root: str) -> None:
    store = open_store(root)
    (key,) = [info.key for info in store.list() if info.key.endswith(".safetensors")]
    raw = bytearray(store.get(key))
    raw[-1] ^= 1
    store.put(key, bytes(raw))


def says_where_values_are_wrong(root: str) -> None:
    """The witness is compared with what arrived on the device."""
    save(root, on_devices(values(1)))
    genuine = upload.DeviceBuffer.place

    def misplaced(self: upload.DeviceBuffer, block: Any, itemsize: int) -> torch.Tensor:
        return genuine(self, replace(block, target_start=0), itemsize)

    upload.DeviceBuffer.place = misplaced  # type: ignore[method-assign]
    live = on_devices(values(2))
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(CorruptError) as caught:
            ck.load(live)
        assert "values arrived at the wrong places" in caught.value.message
        assert caught.value.state_corrupted
        assert "large" in str(caught.value)
        upload.DeviceBuffer.place = genuine  # type: ignore[method-assign]
        ck.load(live)


def a_device_that_hangs_ends_the_load(root: str) -> None:
    save(root, {"w": torch.ones(1 << 20, device="cuda")})
    live = {"w": torch.zeros(1 << 20, device="cuda")}
    genuine = loader.execute
    loader.execute = partial(genuine, stall_s=0.5)
    end = installed().hold()
    with ckptd.Checkpointer(root) as ck:
        with pytest.raises(DeadlineError) as caught:
            ck.load(live)
        assert caught.value.kind == "stalled"
        assert caught.value.state_corrupted
        assert len(filling._kept) == 1
        end()
        ck.load(live)
    loader.execute = genuine
    assert bool((live["w"] == 1.0).all())


def a_device_that_fails_poisons_the_state(root: str) -> None:
    save(root, {"w": torch.ones(1 << 20, device="cuda")})
    live = {"w": torch.zeros(1 << 20, device="cuda")}
    genuine = loader.execute

    def execute(*args: Any, **options: Any) -> Any:
        installed().fail(0, "an illegal memory access was encountered")
        return genuine(*args, **options)

    with installed().test(), ckptd.Checkpointer(root) as ck:
        loader.execute = execute
        with pytest.raises(CkptdError) as caught:
            ck.load(live)
        loader.execute = genuine
        assert "a device failed while a checkpoint was copied" in caught.value.message
        assert caught.value.state_corrupted
        assert "illegal memory access" in str(caught.value)
        installed()._failed.clear()
        ck.load(live)
    assert bool((live["w"] == 1.0).all())


def reads_in_waves(_: str) -> None:
    """Memory between the passes is filled anew while copies of the wave before are under way."""
    wanted = save("memory://waves", on_devices(values(1)))
    genuine = loader.execute
    loader.execute = partial(genuine, budget_bytes=4 << 20)
    with installed().test("lazy"), ckptd.Checkpointer("memory://waves") as ck:
        live = on_devices(values(2))
        ck.load(live)
        loader.execute = genuine
        assert ck.last_load is not None
        assert ck.last_load.read.waves > 1
        assert different(live, wanted) == []


def loads_from_near_memory(root: str) -> None:
    """The agent's segment, mapped to be read, is no memory that a device copies from."""
    state, near = on_devices(values(1)), {"tiers": [ckptd.Memory(every=1)], "every": 100}
    with ckptd.Checkpointer(root, **near) as ck:
        ck.save(1, state).durable(PATIENCE_S)
        live = on_devices(values(2))
        with installed().test("lazy") as simulator, ckptd.Checkpointer(root, **near) as other:
            other.load(live)
            assert other.last_load is not None
            assert other.last_load.tier == "memory"
            assert other.last_load.read.bytes_in_memory == 0
            assert not simulator.problems
        assert different(live, state) == []


def keeps_buffers_that_are_copied_from(_: str) -> None:
    """A buffer that is page-locked is waited for, also where there is no such memory for others."""
    target = torch.zeros(64, dtype=torch.uint8, device="cuda")
    limits = upload.MOST_BUFFERS, upload.STALL_S
    with installed().test("lazy") as simulator:
        upload.MOST_BUFFERS, upload.STALL_S = 2, 0.1
        ring = upload.BufferRing(64)
        writer = upload.Upload(target.device, ring)
        end = simulator.hold()
        writer.begin()
        batch = writer.batch()
        room = batch.room(64)
        room[:] = 1
        place = upload.DeviceBuffer(target, writer)
        place.send(Block((64,), 0, (1,), 0, (1,)), 1, room, locked=batch.locked)
        ring.locked = False  # as where another thread's buffer could not be page-locked
        ring.take()
        batch.close()
        with pytest.raises(DeadlineError):
            ring.take()
        end()
        writer.settle(10.0)
        assert ring.take().data_ptr() == room.__array_interface__["data"][0]
    upload.MOST_BUFFERS, upload.STALL_S = limits
    assert bool((target == 1).all())


def breaks_no_capture(_: str) -> None:
    """Threads of a load ask for events and lock memory while another one captures a graph."""
    target, raised = torch.zeros(64, dtype=torch.uint8, device="cuda"), []

    def loads() -> None:
        try:
            writer = upload.Upload(target.device, upload.BufferRing(64))
            batch = writer.batch()
            for value in (1, 2):
                room = batch.room(64)
                room[:] = value
                place = upload.DeviceBuffer(target, writer)
                place.send(Block((64,), 0, (1,), 0, (1,)), 1, room, locked=batch.locked)
            batch.close()
            writer.settle(10.0)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            raised.append(error)

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        thread = threading.Thread(target=loads)
        thread.start()
        thread.join()
    if raised:
        raise raised[0]
    assert bool((target == 2).all())


def is_refused_in_a_capture(root: str) -> None:
    save(root, {"w": torch.ones(8, device="cuda")})
    live = {"w": torch.zeros(8, device="cuda")}
    with ckptd.Checkpointer(root) as ck:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UsageError) as caught:
            ck.load(live)
        assert "cannot be part of a graph" in caught.value.message
        ck.load(live)
    assert bool((live["w"] == 1.0).all())


def test_what_a_load_promises(tmp_path: Path) -> None:
    run(promised, str(tmp_path))


def promised(folder: str) -> None:
    for check in (
        leaves_the_state_alone,
        says_where_values_are_wrong,
        a_device_that_hangs_ends_the_load,
        a_device_that_fails_poisons_the_state,
        reads_in_waves,
        loads_from_near_memory,
        keeps_buffers_that_are_copied_from,
        breaks_no_capture,
        is_refused_in_a_capture,
    ):
        check(f"{folder}/{check.__name__}")


# -- memory of the host --------------------------------------------------------------------------

MB = 1 << 20
_M_MMAP_THRESHOLD = -3


def most_resident(act: Callable[[], None]) -> int:
    """Return the bytes that the process had more than before, while it called `act`."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def is_bounded_by_the_ring(root: str) -> None:
    upload.BUFFER_BYTES, upload.MOST_BUFFERS = 4 * MB, 4
    filling.BUFFER_BYTES = upload.BUFFER_BYTES
    # What is freed goes: malloc keeps more for itself the larger what was freed before.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, MB)
    state = {f"w{i}": torch.rand(6 * MB, device="cuda") for i in range(5)}
    state["strided"] = torch.rand(2000, 3000, device="cuda").t()
    wanted = save(root, state)
    for tensor in state.values():
        tensor.zero_()
    torch.cuda.synchronize()
    made = buffers()
    with ckptd.Checkpointer(root) as ck:
        most = most_resident(lambda: ck.load(state))
    assert different(state, wanted) == []
    assert len(made) <= 4
    # The ring, and two windows of 4 MiB in each of the threads that read.
    assert most < 64 * MB < sum(t.nbytes for t in state.values()) // 2


def test_the_host_holds_the_ring_and_not_the_state(tmp_path: Path) -> None:
    run(is_bounded_by_the_ring, str(tmp_path / "root"))


# -- ranks, and devices by other names -----------------------------------------------------------


def loads_other_shards(root: str) -> None:
    """Rows are saved and columns loaded: blocks are spread out on the device."""
    mesh = init_device_mesh("cuda", (2,))
    whole = torch.arange(600 * 700, dtype=torch.float32).reshape(600, 700)
    rows = distribute_tensor(whole.to("cuda"), mesh, [Shard(0)], src_data_rank=None)
    odd = torch.empty(350, 600, device="cuda").t()
    with torch.no_grad():
        columns = DTensor.from_local(odd, mesh, [Shard(1)], run_check=False)
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"w": rows}).durable(PATIENCE_S)
    with ckptd.Checkpointer(root) as ck:
        ck.load({"w": columns})
    wanted = whole.chunk(2, 1)[dist.get_rank()]
    assert torch.equal(columns.to_local().cpu(), wanted)


def fails_on_all_ranks(root: str) -> None:
    """A device that fails behind the last copy, on one rank, fails the load of each."""
    live = {"w": torch.ones(1 << 20, device="cuda")}
    genuine = loader.execute

    def execute(*args: Any, **options: Any) -> Any:
        report = genuine(*args, **options)
        if dist.get_rank() == 1:
            installed().fail(0, "an illegal memory access was encountered")
        return report

    with ckptd.Checkpointer(root, timeout_s=30.0) as ck:
        ck.save(1, live).durable(PATIENCE_S)
        loader.execute = execute
        with pytest.raises(CkptdError) as caught:
            ck.load(live)
        loader.execute = genuine
        installed()._failed.clear()
        assert "a device failed while a checkpoint was copied" in caught.value.message
        assert caught.value.state_corrupted
        ck.load(live)
    assert bool((live["w"] == 1.0).all())


def test_a_device_that_fails_last_is_known_to_all_ranks(tmp_path: Path) -> None:
    run_simulated_ranks(2, fails_on_all_ranks, str(tmp_path / "root"))


def test_other_shards_come_to_their_places(tmp_path: Path) -> None:
    run_simulated_ranks(2, loads_other_shards, str(tmp_path / "root"), schedule="random:1")


def loads_on(kind: str, root: str) -> None:
    state = {"w": torch.rand(300, 200, device=kind), "t": torch.rand(40, 30, device=kind).t()}
    wanted = save(root, state)
    for tensor in state.values():
        tensor.mul_(2.0)
    with ckptd.Checkpointer(root) as ck:
        ck.load(state)
    assert different(state, wanted) == []


@pytest.mark.parametrize("kind", ["xpu", "newdevice"])
def test_devices_by_other_names(kind: str) -> None:
    run(loads_on, kind, "memory://restored", name=kind, schedule="lazy")


# -- layouts -------------------------------------------------------------------------------------

PROGRAM = """
mesh O = x:1
let v = 20
space tiny {
  E[v h] W[h f] N[h]
}
layout disk of tiny on none {
  embed.weight = E[v h]
  down.weight = W[h f]
  norm.weight = N[h]
}
layout live of tiny on O {
  words.weight = E[pad(v, 16, -1) h]
  down.weight = W[h f] cast(bfloat16)
  norm.weight = N[h]
}
"""


def loads_another_layout(root: str) -> None:
    """Values are cast and padded on their way, and strided targets filled."""
    torch.manual_seed(0)
    full = {
        "embed.weight": torch.rand(20, 16),
        "down.weight": torch.rand(16, 4096),
        "norm.weight": torch.rand(16),
    }
    with ckptd.Checkpointer(root, layout=f"# layout disk\n{PROGRAM}") as ck:
        ck.save(1, {"model": Tree(full).to("cuda")}).durable(PATIENCE_S)
    wanted = {
        "words.weight": torch.cat([full["embed.weight"], torch.full((12, 16), -1.0)]),
        "down.weight": full["down.weight"].to(torch.bfloat16),
        "norm.weight": full["norm.weight"],
    }
    simulator = installed()
    with ckptd.Checkpointer(root, layout=f"# layout live\n{PROGRAM}") as ck:
        # A strided tensor has a buffer beside it: on its device, or on the host where that is full.
        for more in (1 << 20, 1 << 16):
            live = Tree(
                {
                    "words.weight": torch.zeros(32, 16),
                    "down.weight": torch.zeros(4096, 16, dtype=torch.bfloat16).t(),
                    "norm.weight": torch.zeros(16),
                }
            ).to("cuda")
            simulator.capacity = simulator.allocated[0] + more
            ck.load({"model": live})
            simulator.capacity = PLENTY
            found = dict(live.state_dict())
            assert found["down.weight"].stride() == (1, 16)
            assert different(found, wanted) == []


def test_layouts_on_a_device(tmp_path: Path) -> None:
    run(loads_another_layout, str(tmp_path / "root"), schedule="lazy")
