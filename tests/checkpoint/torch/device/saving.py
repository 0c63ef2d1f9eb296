"""Saves from a device, as programs that run on it: what is asked of the driver, and when.

`tests/checkpoint/torch/device/test_saving.py` runs them under every schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ckptd
from ckptd.checkpoint.torch import ondevice, replicas
from ckptd.checkpoint.torch.ondevice import DeviceSamples
from ckptd.checkpoint.torch.replicas import Samples, sample_digest
from ckptd.errors import SaveError
from tests.checkpoint.torch.cuda_checks import settle
from tests.simdevice import Simulator, installed

__all__ = ["OF_CUDA", "OF_EVERY_KIND"]

Values = dict[str, torch.Tensor]
COPY = "copy to the host"


def module() -> Any:
    return torch.get_device_module(installed().name)


def weights(n: int = 6) -> Values:
    return {f"w{i}": torch.randn(65, 64, device=installed().name) for i in range(n)}


def cloned(live: Values) -> Values:
    return {n: t.detach().clone() for n, t in live.items()}


def warm(root: str, state: Any, **options: Any) -> ckptd.Checkpointer:
    """Make a checkpointer whose memory is there and locked already, by a save of step 1."""
    ck = ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False), **options)
    ck.save(1, state)
    ck.wait()
    settle(ck)
    return ck


def stall_copies(ck: ckptd.Checkpointer, seconds: float = 0.3) -> None:
    """Let what is copied next come later than all that the program enqueues."""
    for stream in ck._saver._device_copies._streams.values():
        installed().stall(seconds, stream)


def assert_holds(ck: ckptd.Checkpointer, live: Any, tensors: Values, wanted: Values) -> None:
    ck.load(live, 2)
    different = [n for n in wanted if not torch.equal(tensors[n], wanted[n])]
    assert not different, different


def failure_of(handle: ckptd.SaveHandle | None) -> SaveError:
    assert handle is not None
    try:
        handle.durable(30.0)
    except SaveError as error:
        return error
    raise AssertionError("the save is stored")


# -- graphs ----------------------------------------------------------------------------------------


def a_capture_and_a_save_meet(sim: Simulator) -> None:
    """Another thread's question whether a copy is done broke the capture, and failed the save."""
    live = weights()
    x = torch.zeros(8, device=sim.name)
    with warm("memory://meet", live, copy=ckptd.CopyOptions(lazy="all")) as ck:
        wanted = cloned(live)
        stall_copies(ck)
        handle = ck.save(2, live)
        assert handle is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in mode "global"
            x.add_(1.0)
            sim.drain()
            handle.durable(30.0)  # so that all of it happens meanwhile
        graph.replay()
        assert x.tolist() == [1.0] * 8
        assert_holds(ck, live, live, wanted)


def the_first_save_and_a_capture_meet(sim: Simulator) -> None:
    """The first save makes its memory, and locks it: both are refused to other threads."""
    live = weights()
    with ckptd.Checkpointer(
        "memory://first", storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(lazy="all")
    ) as ck:
        wanted = cloned(live)
        stall = torch.zeros(8, device=sim.name)
        sim.stall(0.3)
        handle = ck.save(2, live)
        assert handle is not None
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            stall.add_(1.0)
            sim.drain()
            handle.durable(30.0)
            settle(ck)
        assert ck._saver._device_copies.pins.locked
        assert_holds(ck, live, live, wanted)


def trained(capturable: bool = True) -> tuple[Values, torch.optim.Optimizer, Any]:
    model = torch.nn.ParameterDict(weights())
    live: Values = {n: p.detach() for n, p in model.items()}
    parameters = list(model.values())
    optimizer = torch.optim.AdamW(parameters, lr=0.1, capturable=capturable, foreach=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return live, optimizer, {"p": model, "o": optimizer}


def captured_step(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    with captured() as graph:
        optimizer.step()
    return graph


@contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture as `torch.cuda.graph` does, but for its wait for the device."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)


def a_step_is_captured_while_its_state_is_copied(sim: Simulator) -> None:
    """Captured, it changes nothing, though torch counts it: the save is that of the step before."""
    live, optimizer, state = trained()
    with warm("memory://captured", state) as ck:
        wanted = cloned(live)
        held = sim.hold(next(iter(ck._saver._device_copies._streams.values())))
        handle = ck.save(2, state)
        graph = captured_step(optimizer)  # would not return if it waited for the copies
        ck.before_mutation()
        graph.replay()
        held()
        assert handle is not None
        handle.durable(30.0)
        assert not torch.equal(live["w0"], wanted["w0"])
        assert_holds(ck, state, live, wanted)


def a_change_before_a_captured_step_is_named(sim: Simulator) -> None:
    _live, optimizer, state = trained()
    with warm("memory://before", state) as ck:
        held = sim.hold(next(iter(ck._saver._device_copies._streams.values())))
        handle = ck.save(2, state)
        with torch.no_grad():
            state["p"]["w3"].clamp_(-0.01, 0.01)
        captured_step(optimizer)
        held()
        error = failure_of(handle)
        assert error.kind == "mutated"
        assert error.where == "p.w3", error.where


def a_captured_change_of_the_program_is_refused_by_name(sim: Simulator) -> None:
    """`before_mutation` has no end that would say what was captured after it."""
    live = weights()
    with warm("memory://asked", live, copy=ckptd.CopyOptions(lazy="all")) as ck:
        held = sim.hold(next(iter(ck._saver._device_copies._streams.values())))
        handle = ck.save(2, live)
        with captured():
            ck.before_mutation()
            live["w2"].add_(1.0)
        held()
        error = failure_of(handle)
        assert error.kind == "mutated"
        assert error.where == "w2", error.where
        ck.save(3, live)
        ck.wait()


# -- the memory of the first save ------------------------------------------------------------------


def slots_are_locked_by_a_thread_of_their_own(sim: Simulator) -> None:
    """The first save of each slot waited for seconds of page locking, in the program's thread."""
    cudart = torch.cuda.cudart()
    threads: list[str] = []
    go_on = threading.Event()
    plain = cudart.cudaHostRegister

    class Slow:
        cudaHostUnregister = staticmethod(cudart.cudaHostUnregister)

        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            threads.append(threading.current_thread().name)
            assert go_on.wait(60.0)
            return int(plain(address, nbytes, flags))

    before, torch.cuda.cudart = torch.cuda.cudart, Slow  # type: ignore[assignment]
    try:
        live, optimizer, state = trained()
        with ckptd.Checkpointer(
            "memory://slots", storage=ckptd.Storage(dedup=False), copy=ckptd.CopyOptions(slots=1)
        ) as ck:
            for step in (1, 2):
                wanted = cloned(live)
                handle = ck.save(step, state)
                optimizer.step()
                assert handle is not None
                handle.durable(30.0)  # while the slot is being locked
            assert ck._saver._device_copies.pins.locked == 0
            go_on.set()
            settle(ck)
            assert ck._saver._device_copies.pins.locked > 0
            assert_holds(ck, state, live, wanted)
            ck.save(3, state)
            ck.wait()
        assert threads == ["ckptd-lock_0"]
        assert not ck._saver._device_copies.pins.locked
    finally:
        torch.cuda.cudart = before


def the_first_save_waits_for_nothing(sim: Simulator) -> None:
    live, _, state = trained(capturable=False)
    samples = DeviceSamples()
    with ckptd.Checkpointer("memory://nothing", storage=ckptd.Storage(dedup=False)) as ck:
        replicas._positions.cache_clear()
        sim.waits.clear()
        held = sim.hold()
        try:
            handle = ck.save(2, state)
            # As ranks that hold the same do, each for the first time.
            samples.take(list(live.values()))
            assert not sim.waits, sim.waits
        finally:
            held()
        assert handle is not None
        handle.durable(30.0)


# -- many small tensors ----------------------------------------------------------------------------


def many() -> Values:
    """Neighbours of all kinds, with counters of the host between them, as optimizers keep them."""
    name = installed().name
    out: Values = {}
    for i in range(30):
        out[f"{i:03}.a"] = torch.randn(7 + i, device=name)
        out[f"{i:03}.b"] = torch.randn(5, 3 + i, device=name).t()
        out[f"{i:03}.step"] = torch.tensor(float(i))
    for i in range(30, 36):
        out[f"{i:03}.bf16"] = torch.randn(33, device=name).bfloat16()
        out[f"{i:03}.byte"] = torch.tensor([i, 2, 3], dtype=torch.uint8)
        out[f"{i:03}.conj"] = torch.randn(9, 4, dtype=torch.complex64, device=name).conj()
        out[f"{i:03}.bool"] = torch.randn(11, device=name) > 0
    out["scalar"] = torch.tensor(3.0, device=name)
    out["wide"] = torch.randn(3, 100_001, device=name)
    return out


def small_tensors_are_copied_together(sim: Simulator) -> None:
    for locked in (True, False):
        live = many()
        sim.lockable = locked
        with warm(
            f"memory://many-{sim.schedule}-{locked}", live, copy=ckptd.CopyOptions(lazy="all")
        ) as ck:
            wanted = cloned(live)
            stall_copies(ck, 0.05)
            sim.counts.clear()
            handle = ck.save(2, live)
            ck.before_mutation()
            copies = sim.counts[COPY]
            for tensor in live.values():
                tensor.zero_()
            assert handle is not None
            handle.durable(30.0)
            # Of 80 tensors: runs of neighbours, pieces of what is larger, what is watched.
            assert copies <= 10, copies
            assert_holds(ck, live, live, wanted)


def small_tensors_are_copied_one_by_one_without_memory(sim: Simulator) -> None:
    live = many()
    plain = ondevice._flatten_dense_tensors

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory to pack")

    with warm(f"memory://full-{sim.schedule}", live, copy=ckptd.CopyOptions(lazy="all")) as ck:
        wanted = cloned(live)
        ondevice._flatten_dense_tensors = full
        try:
            handle = ck.save(2, live)
            assert handle is not None
            handle.durable(30.0)
        finally:
            ondevice._flatten_dense_tensors = plain
        assert_holds(ck, live, live, wanted)


# -- samples ---------------------------------------------------------------------------------------


class _Lane:
    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


def samples_are_those_of_the_host(sim: Simulator) -> None:
    square = torch.randn(70, 71)
    tensors = {
        "sampled": torch.arange(1025.0),
        "transposed": square.t(),
        "columns": torch.randn(70, 5, 71).bfloat16()[3:, 1:4, 7:],
        "every other": torch.randn(9000)[::2],
        "whole": torch.arange(9.0),
    }
    replicas._positions.cache_clear()
    taken = DeviceSamples()
    on_device = {n: t.to(sim.name) for n, t in tensors.items()}
    on_device["transposed"] = square.to(sim.name).t()
    on_device["every other"] = torch.zeros(9000, device=sim.name)[::2].copy_(tensors["every other"])
    taken.take(list(on_device.values()))
    taken.fetch(_Lane())  # type: ignore[arg-type]
    samples = Samples()
    taken.give(samples)
    for name, tensor in tensors.items():
        assert samples(on_device[name]) == sample_digest(tensor), name


OF_EVERY_KIND: dict[str, Callable[[Simulator], None]] = {
    check.__name__: check
    for check in (
        the_first_save_waits_for_nothing,
        small_tensors_are_copied_together,
        small_tensors_are_copied_one_by_one_without_memory,
        samples_are_those_of_the_host,
    )
}
OF_CUDA: dict[str, Callable[[Simulator], None]] = OF_EVERY_KIND | {
    check.__name__: check
    for check in (
        a_capture_and_a_save_meet,
        the_first_save_and_a_capture_meet,
        a_step_is_captured_while_its_state_is_copied,
        a_change_before_a_captured_step_is_named,
        a_captured_change_of_the_program_is_refused_by_name,
        slots_are_locked_by_a_thread_of_their_own,
    )
}
