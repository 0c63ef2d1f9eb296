"""What the host does beside the copies: page locks after a recovery, two threads at the gate."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ckptd
from ckptd.checkpoint.torch import ondevice
from ckptd.errors import SaveError
from tests.checkpoint.torch.cuda_checks import settle
from tests.processes import PATIENCE_S, until
from tests.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.usefixtures("writing_thread"), *ON_SIMULATED_DEVICES]

GENERATIONS = 4
RACES = 250


def mapped(address: int) -> bool:
    """Tell whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def leave_with_copies_under_way(folder: str) -> None:
    simulator = installed()
    before = simulator.page_locked
    for generation in range(GENERATIONS):
        live = {f"w{i}": torch.randn(256, 256, device="cuda") for i in range(4)}
        ck = ckptd.Checkpointer(
            f"{folder}/{generation}",
            storage=ckptd.Storage(dedup=False),
            copy=ckptd.CopyOptions(lazy="all"),
        )
        ck.save(1, live)
        ck.wait()
        settle(ck)
        assert len(simulator.page_locked) > len(before)
        release = simulator.hold()  # the collective of a peer that is gone
        ck.save(2, live)
        ck.abandon()
        left = simulator.page_locked.keys() - before.keys()
        assert left, "the device may still copy there"
        assert all(mapped(start) for start in left), "what is locked has lost its memory"
        release()
        copier = ck._saver._copier
        copier.shutdown(wait=True)
        del ck, live, copier
        gc.collect()
        assert simulator.page_locked == before, f"generation {generation} left locks"


def test_no_page_lock_outlives_a_generation_that_was_left(tmp_path: Path) -> None:
    """A lock without its memory would make the next slot there one that cannot be locked."""
    run(leave_with_copies_under_way, str(tmp_path))


def let_go_of_what_was_saved(folder: str) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(2)
        model = torch.nn.Linear(256, 256, device="cuda")
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        optim.step()
        return {"model": model, "optim": optim, "w": torch.randn(256, 256, device="cuda")}

    allocated = torch.cuda.memory_allocated
    with ckptd.Checkpointer(
        folder, storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(lazy="all")
    ) as ck:
        state = make()
        for step in (1, 2):
            ck.save(step, state)
            ck.wait()
            settle(ck)
        before = allocated()
        # Not by `.data`: the simulated tensor itself keeps what it had.
        momenta = state["optim"].state[state["model"].weight]
        momenta["exp_avg"] = torch.zeros(1, device="cuda")
        assert allocated() <= before - 256 * 256 * 4 + 2048, "replaced memory is kept"
        del momenta
        kept = state["w"].cpu()
        state.clear()
        gc.collect()
        assert allocated() <= before - 5 * 256 * 256 * 4, "deleted memory is kept"
        state = {"w": kept.cuda()}
        for step in (3, 4):
            ck.save(step, state)  # the copies of the last one are under way when it is let go
            if step == 3:
                ck.wait()
        del state
        junk = [torch.full((256, 256), float(i), device="cuda") for i in range(8)]
        ck.wait()
        into = {"w": torch.zeros(256, 256, device="cuda")}
        ck.load(into, step=4)
        assert torch.equal(into["w"].cpu(), kept)
        del junk


def close_with_idle_buffers() -> None:
    live = {"w": torch.zeros(1000, device="cuda")}
    ck = ckptd.Checkpointer("memory://buffers", copy=ckptd.CopyOptions(lazy="all"))
    ck.save(1, live)  # into a slot that is not locked yet
    ck.wait()
    settle(ck)
    buffers = ck._saver._device_copies._buffers.values()
    idle = [StorageWeakRef(b.untyped_storage()) for kept in buffers for b in kept._idle]
    assert idle, "this is no test: nothing went through a buffer"
    ck.close()
    assert [memory.expired() for memory in idle] == [True] * len(idle)


def test_a_checkpointer_that_is_closed_keeps_no_locked_buffers() -> None:
    run(close_with_idle_buffers)


def test_between_saves_a_device_has_what_the_program_let_go(tmp_path: Path) -> None:
    run(let_go_of_what_was_saved, str(tmp_path))


def replay_between_the_copies() -> str:
    """Replay, unasked, when a save has begun on the device; return what became of the save."""
    live = {f"w{i}": torch.randn(64, 64, device="cuda") for i in range(4)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in live.values():
            tensor.add_(1.0)
    pushed: list[Callable[[], None]] = []
    push = ondevice.DeviceLane.push

    def push_and_hold(lane: ondevice.DeviceLane, group: Any) -> Any:
        mark = push(lane, group)
        if not pushed:
            pushed.append(installed().hold(lane._stream))
        return mark

    with ckptd.Checkpointer(
        "memory://between", storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(lazy="all")
    ) as ck:
        ck.save(1, live)
        ck.wait()
        ondevice.DeviceLane.push = push_and_hold  # type: ignore[method-assign]
        handle = ck.save(2, live)
        until(lambda: pushed)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        pushed[0]()
        assert handle is not None
        try:
            handle.durable(PATIENCE_S)
        except SaveError as error:
            return error.kind
    return "stored"


def test_a_replay_between_the_copies_is_found() -> None:
    assert run(replay_between_the_copies) == "mutated"


def save_and_step(seed: int) -> Counter[str]:
    """Save and step as fast as it goes; the moments between are random, and so is each call."""
    rng = random.Random(seed)
    params = [torch.nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(4)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    state = {"p": {str(i): p for i, p in enumerate(params)}, "o": optimizer}
    raised: Counter[str] = Counter()
    with ckptd.Checkpointer("memory://races", keep=1, storage=ckptd.Storage(dedup=False)) as ck:
        for step in range(1, RACES + 1):
            for p in params:
                p.grad = torch.ones_like(p)
            for call in (lambda: ck.save(step, state), optimizer.step):  # noqa: B023
                try:
                    call()
                except RuntimeError as error:
                    raised[str(error)] += 1
                time.sleep(rng.choice((0.0, 0.0005, 0.002)))
    return raised


def test_a_step_and_the_end_of_the_copies_do_not_meet() -> None:
    """What the copying thread lets go of when it is done is what the gate goes through."""
    assert run(save_and_step, 7, delays=7) == Counter()


def offload_before_the_copies() -> str:
    """Give a tensor's memory back after save, as offloading does; its first bytes are not watched.

    Torch counts no change of it.
    """
    live = {f"w{i}": torch.full((1000,), 1.0 + i, device="cuda") for i in range(70)}
    with ckptd.Checkpointer(
        "memory://offloaded", copy=ckptd.CopyOptions(lazy="all"), when_failed="warn"
    ) as ck:
        torch.cuda.synchronize()  # a kernel that fills it later would find no memory there
        release = installed().hold()
        handle = ck.save(1, live)
        storage = live["w7"].untyped_storage()
        size = storage.nbytes()
        before = storage.data_ptr()
        storage.resize_(0)
        others = [torch.zeros(1000, device="cuda") for _ in range(8)]  # what came there next
        storage.resize_(size)
        assert storage.data_ptr() != before
        release()
        with pytest.raises(SaveError) as caught:
            handle.durable(PATIENCE_S)
        del others
    assert caught.value.where == "w7"
    return caught.value.kind


def test_memory_that_is_given_back_before_the_copies_is_found() -> None:
    assert run(offload_before_the_copies, schedule="lazy") == "mutated"


def make_again(storage: torch.UntypedStorage) -> None:
    """Give memory back and take as much, once no kernel is left that writes there."""
    torch.cuda.synchronize()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)


def make_again_before_the_copies(device: str) -> str:
    """Give memory back after save and get the same again; what comes there next torch counts not.

    Neither the address nor a count says it, and what is written is not among the first bytes. The
    memory is so much that malloc has the kernel map it alone, in the highest gap: the same one
    again, unless another thread has mapped something there meanwhile.
    """
    live = {"w": torch.zeros(9 << 20, device=device), "v": torch.zeros(9, device=device)}
    storage = live["w"].untyped_storage()
    with ckptd.Checkpointer(
        f"memory://{device}", copy=ckptd.CopyOptions(lazy="all"), when_failed="warn"
    ) as ck:
        for step in range(1, 20, 2):
            make_again(storage)
            live["w"].fill_(step)
            ck.save(step, live).durable(PATIENCE_S)  # a resize before a save is no change of it
            go = threading.Event()
            ck._saver._copier.submit(go.wait, 60.0)
            handle = ck.save(step + 1, live)
            before = storage.data_ptr(), live["w"]._version
            make_again(storage)
            with torch.autograd._unsafe_preserve_version_counter(live["w"]):
                live["w"].fill_(step)
                live["w"][1000:].fill_(-1.0)
            found = storage.data_ptr(), live["w"]._version
            go.set()
            try:
                handle.durable(PATIENCE_S)
            except SaveError as error:
                if found == before:
                    return f"{error.where} {error.kind}"
            else:
                return "saved"
    return "no memory came back at its address"


def make_again_on_host_and_device() -> list[str]:
    return [make_again_before_the_copies(device) for device in ("cpu", "cuda")]


def test_memory_that_is_made_again_at_its_address_is_found() -> None:
    assert run(make_again_on_host_and_device, schedule="lazy") == ["w mutated"] * 2


def save_and_load_with_a_default_device(root: str) -> None:
    """What a program makes lies on a device unless it says otherwise; what ckptd makes does not."""
    module = torch.nn.Linear(300, 200, device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scalar = torch.ones((), device="cuda")
    state = {"m": module, "o": optimizer, "s": scalar}
    torch.set_default_device("cuda")
    try:
        with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
            for step in (1, 2):  # through buffers, and to a slot that is page-locked
                for p in module.parameters():
                    p.grad = torch.ones_like(p)
                handle = ck.save(step, state)
                wanted = module.weight.clone()
                optimizer.step()
                handle.durable(PATIENCE_S)
                settle(ck)
            scalar.zero_()
            assert ck.load(state) == 2
    finally:
        torch.set_default_device(None)
    assert torch.equal(module.weight.cpu(), wanted.cpu())
    assert scalar.item() == 1.0


def test_a_default_device_is_of_no_concern(tmp_path: Path) -> None:
    run(save_and_load_with_a_default_device, str(tmp_path / "root"))
