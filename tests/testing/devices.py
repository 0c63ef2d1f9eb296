"""What the simulated device plays, as programs that run on it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.simdevice import SCHEDULES, Simulator, installed

__all__ = ["OF_CUDA", "OF_EVERY_KIND", "reduced"]


def module() -> Any:
    return torch.get_device_module(installed().name)


def filled(value: float, n: int = 8, **more: Any) -> torch.Tensor:
    return torch.full((n,), value, device=installed().name, **more)


def under(schedule: str) -> Any:
    return installed().test(schedule)


# -- order -----------------------------------------------------------------------------------------


def doubled_elsewhere(*, wait: bool) -> list[float]:
    """Make a tensor on the current stream, double it on another one; return what that finds."""
    m = module()
    made = filled(0.0).add_(3.0)
    side = m.Stream()
    if wait:
        side.wait_stream(m.current_stream())
    with m.stream(side):
        twice = made * 2
        host = twice.cpu()
    return host.tolist()


def a_missing_wait_shows(sim: Simulator) -> None:
    wrong = set()
    for schedule in SCHEDULES:
        with under(schedule):
            assert doubled_elsewhere(wait=True) == [6.0] * 8, schedule
            if doubled_elsewhere(wait=False) != [6.0] * 8:
                wrong.add(schedule)
    assert {"lazy", "starve:main"} <= wrong
    assert "eager" not in wrong  # which is why the others are there


def read_behind_its_release(*, named: bool) -> list[float]:
    """Let a slow stream read a tensor that the program lets go; return what it read."""
    m = module()
    made = filled(7.0)
    side = m.Stream()
    side.wait_stream(m.current_stream())
    with m.stream(side):
        installed().stall(30.0)
        read = made + 0
    if named:
        made.record_stream(side)
    del made
    filled(1.0)  # gets the memory
    m.current_stream().synchronize()
    side.synchronize()
    return read.tolist()


def memory_is_used_again_in_the_order_of_its_stream(sim: Simulator) -> None:
    for schedule in SCHEDULES:
        with under(schedule):
            assert read_behind_its_release(named=True) == [7.0] * 8, schedule
    for schedule in ("eager", "starve:side"):
        with under(schedule):
            assert read_behind_its_release(named=False) != [7.0] * 8, schedule
    with under("eager"):
        sim.reuse = False
        assert read_behind_its_release(named=False) == [7.0] * 8


def what_nothing_has_written_has_no_value(sim: Simulator) -> None:
    assert torch.empty(4, dtype=torch.uint8, device=sim.name).tolist() == [0xDB] * 4


def kernels_run_in_their_order_and_take_their_time(sim: Simulator) -> None:
    m = module()
    for schedule in SCHEDULES:
        with under(schedule):
            x = filled(1.0)
            sim.stall(30.0)
            x.mul_(2).add_(1)
            event = m.Event()
            event.record()
            assert not event.query() or schedule == "random:1", schedule
            before = time.monotonic()
            event.synchronize()  # which waits for no clock
            assert time.monotonic() - before < 20
            assert event.query()
            assert x.tolist() == [3.0] * 8


# -- host memory -----------------------------------------------------------------------------------


def a_copy_to_page_locked_memory_comes_later(sim: Simulator) -> None:
    with under("lazy"):
        x = filled(5.0)
        host = torch.zeros(8, pin_memory=True)
        assert host.is_pinned()
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [0.0] * 8
        assert not sim.waits
        module().synchronize()
        assert host.tolist() == [5.0] * 8


def a_copy_to_pageable_memory_waits(sim: Simulator) -> None:
    with under("lazy"):
        x = filled(5.0)
        host = torch.zeros(8)
        assert not host.is_pinned()
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [5.0] * 8
        assert [w.call for w in sim.waits] == ["copy to pageable memory"]
        assert sim.waits[0].where[0].startswith("devices.py:")


def page_locked_memory_is_read_when_the_copy_runs(sim: Simulator) -> None:
    with under("lazy"):
        for locked, seen in ((True, 2.0), (False, 1.0)):
            host = torch.ones(8, pin_memory=locked)
            x = torch.empty(8, device=sim.name)
            x.copy_(host, non_blocking=True)
            host.fill_(2.0)
            assert x.tolist() == [seen] * 8


def page_locked_memory_goes_with_its_tensor(sim: Simulator) -> None:
    before = sim.page_locked
    host = torch.zeros(1000, pin_memory=True)
    assert sim.page_locked == {**before, host.data_ptr(): 4000}
    del host
    assert sim.page_locked == before


def memory_is_locked_in_place_once(sim: Simulator) -> None:
    cudart = torch.cuda.cudart()
    array = np.zeros(1 << 16, dtype=np.uint8)
    at = array.ctypes.data
    assert cudart.cudaHostRegister(at, array.nbytes, 1) == 0
    assert torch.from_numpy(array)[100:].is_pinned()
    assert cudart.cudaHostRegister(at + 4096, 4096, 1) == 712
    assert cudart.cudaHostUnregister(at) == 0
    assert cudart.cudaHostUnregister(at) == 713
    sim.lockable = False
    assert cudart.cudaHostRegister(at, array.nbytes, 1) == 2
    assert not sim.problems


def unlocking_what_is_copied_to_is_a_problem(sim: Simulator) -> None:
    with under("lazy"):
        array = np.zeros(1 << 16, dtype=np.uint8)
        assert torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 1) == 0
        torch.from_numpy(array[:8]).copy_(filled(5, dtype=torch.uint8), non_blocking=True)
        torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)
        assert len(sim.problems) == 1
        sim.problems.clear()


# -- graphs ----------------------------------------------------------------------------------------


def a_graph_runs_at_its_replays(sim: Simulator) -> None:
    for schedule in SCHEDULES:
        with under(schedule):
            x, graph = filled(0.0), torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            with torch.cuda.graph(graph):
                x.add_(1.0)
                assert torch.cuda.is_current_stream_capturing()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # joins the capture
                    x.mul_(2.0)
                torch.cuda.current_stream().wait_stream(side)
            assert not torch.cuda.is_current_stream_capturing()
            assert x.tolist() == [0.0] * 8
            for _ in range(3):
                graph.replay()
            assert x.tolist() == [14.0] * 8, schedule


def asked_elsewhere(relaxed: bool, mode: str) -> BaseException | None:
    """Ask an event in another thread during a capture; return what that raised here."""
    event = torch.cuda.Event()
    event.record()
    answers = []

    def ask() -> None:
        if relaxed:
            import ctypes

            thread_local = ctypes.c_int(1)
            installed().driver.cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
        try:
            answers.append(event.query())
        except RuntimeError as error:
            answers.append(error)

    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    except RuntimeError as error:
        assert isinstance(answers[0], RuntimeError)
        return error
    assert isinstance(answers[0], bool), answers
    return None


def a_question_during_a_capture_breaks_it(sim: Simulator) -> None:
    assert "previous error" in str(asked_elsewhere(False, "global"))
    assert len(sim.problems) == 1
    sim.problems.clear()
    assert asked_elsewhere(True, "global") is None
    assert asked_elsewhere(False, "thread_local") is None
    assert asked_elsewhere(False, "relaxed") is None


# -- what fails ------------------------------------------------------------------------------------


def a_kernel_that_does_not_end_holds_the_host(sim: Simulator) -> None:
    m = module()
    end = sim.hold()
    event = m.Event()
    event.record()
    ended = []
    thread = threading.Thread(target=lambda: (event.synchronize(), ended.append(time.monotonic())))
    thread.start()
    time.sleep(0.05)
    assert not event.query()
    assert not ended
    before = time.monotonic()
    end()
    thread.join(30)
    assert ended[0] >= before


def a_sticky_error_is_raised_by_every_call(sim: Simulator) -> None:
    m = module()
    x = filled(1.0)
    sim.fail(0)
    for call in (m.synchronize, lambda: x.add_(1), x.cpu, m.Event().record):
        with pytest.raises(RuntimeError, match="device-side assert"):
            call()
    with m.device(1):
        assert filled(2.0).tolist() == [2.0] * 8


def a_device_is_full(sim: Simulator) -> None:
    m = module()
    before = m.memory_allocated()
    sim.capacity = before + 1000
    x = torch.empty(200, device=sim.name)
    with pytest.raises(torch.OutOfMemoryError):
        x.clone()
    assert m.memory_allocated() == before + 800
    assert m.mem_get_info()[0] == 200
    del x
    assert m.memory_allocated() == before
    assert m.max_memory_allocated() >= before + 800


def calls_take_random_moments(sim: Simulator) -> None:
    def seconds() -> float:
        before = time.monotonic()
        x = filled(1.0)
        for _ in range(40):
            x.add_(1)
        return time.monotonic() - before

    sim.delay(3)
    slow = seconds()
    sim.delay(None)
    assert slow > 0.01
    assert min(seconds() for _ in range(9)) < slow


# -- tensors ---------------------------------------------------------------------------------------


def training_gives_what_the_host_gives(sim: Simulator) -> None:
    kinds: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
    for schedule, kind in zip(SCHEDULES, [*kinds, *kinds], strict=False):
        with under(schedule):
            trained = []
            for device in ("cpu", sim.name):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()).to(device)
                inputs = torch.arange(32.0).view(4, 8).to(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)
                for _ in range(2):
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                trained.append({n: t.cpu() for n, t in model.state_dict().items()})
            for name, value in trained[0].items():
                torch.testing.assert_close(trained[1][name], value, msg=f"{schedule} {name}")


def random_numbers_do_not_depend_on_the_schedule(sim: Simulator) -> None:
    m = module()
    drawn = []
    for schedule in SCHEDULES:
        with under(schedule):
            torch.manual_seed(3)
            host = torch.get_rng_state()
            state = m.get_rng_state()
            x = torch.rand(8, device=sim.name)
            noise = nn.functional.dropout(x)
            m.set_rng_state(state)
            again = torch.rand(8, device=sim.name)
            assert again.tolist() == x.tolist()
            assert noise.tolist() != x.tolist()
            assert torch.equal(host, torch.get_rng_state())
            own = torch.Generator(sim.name).manual_seed(3)
            assert torch.rand(8, device=sim.name, generator=own).tolist() == x.tolist()
            drawn.append(x.tolist())
    assert drawn == [drawn[0]] * len(SCHEDULES)


def factories_and_views(sim: Simulator) -> None:
    x = torch.arange(12, device=sim.name).view(3, 4)
    assert x.t()[1].tolist() == [1, 5, 9]
    x[1].zero_()
    assert x.sum().item() == 44
    assert x.t().contiguous().view(-1)[:3].tolist() == [0, 0, 8]
    assert copy.deepcopy(x).tolist() == x.tolist()
    assert x.untyped_storage().data_ptr() == x[2].untyped_storage().data_ptr()
    assert torch.tensor([1 + 2j], device=sim.name).conj().resolve_conj().tolist() == [1 - 2j]
    assert torch.linspace(0, 1, 3, device=sim.name).tolist() == [0.0, 0.5, 1.0]
    assert sorted(torch.randperm(4, device=sim.name).tolist()) == [0, 1, 2, 3]


def devices_are_apart(sim: Simulator) -> None:
    for schedule in SCHEDULES:
        with under(schedule):
            first, second = filled(1.0), torch.full((8,), 2.0, device=f"{sim.name}:1")
            with pytest.raises(RuntimeError, match="same device"):
                first + second
            with pytest.raises(RuntimeError, match="same device"):
                torch.add(first, 1.0, out=torch.empty(8))
            assert (first.to(second.device) + second).tolist() == [3.0] * 8
            assert second.device.index == 1


def what_torch_has_for_all_kinds(sim: Simulator) -> None:
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device(sim.name)
    assert accelerator.device_count() == 2
    stream = torch.Stream(device=f"{sim.name}:0")
    event = torch.Event(device=sim.name, enable_timing=True)
    x = filled(1.0)
    stream.wait_stream(accelerator.current_stream())
    with stream:
        assert accelerator.current_stream() == stream
        assert module().current_stream() == stream
        x.add_(1)
        event.record()
    accelerator.current_stream().wait_event(event)
    later = torch.Event(device=sim.name, enable_timing=True)
    later.record()
    assert x.tolist() == [2.0] * 8
    accelerator.synchronize()
    assert event.query()
    assert stream.query()
    assert event.elapsed_time(later) >= 0


OF_EVERY_KIND: dict[str, Callable[[Simulator], None]] = {
    program.__name__: program
    for program in (
        a_missing_wait_shows,
        memory_is_used_again_in_the_order_of_its_stream,
        what_nothing_has_written_has_no_value,
        kernels_run_in_their_order_and_take_their_time,
        a_copy_to_page_locked_memory_comes_later,
        a_copy_to_pageable_memory_waits,
        page_locked_memory_is_read_when_the_copy_runs,
        page_locked_memory_goes_with_its_tensor,
        a_kernel_that_does_not_end_holds_the_host,
        a_sticky_error_is_raised_by_every_call,
        a_device_is_full,
        calls_take_random_moments,
        training_gives_what_the_host_gives,
        random_numbers_do_not_depend_on_the_schedule,
        factories_and_views,
        devices_are_apart,
        what_torch_has_for_all_kinds,
    )
}
OF_CUDA: dict[str, Callable[[Simulator], None]] = {
    program.__name__: program
    for program in (
        memory_is_locked_in_place_once,
        unlocking_what_is_copied_to_is_a_problem,
        a_graph_runs_at_its_replays,
        a_question_during_a_capture_breaks_it,
    )
}


def reduced() -> list[float]:
    """Add up over ranks what each has on its device."""
    x = filled(float(dist.get_rank() + 1))
    x.mul_(2)
    dist.all_reduce(x)
    return x.tolist()
