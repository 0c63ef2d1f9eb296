"""Times of calls on accelerators; what needs a device is skipped without one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptd.monitor.torch.recorder.ends import DeviceClock, DeviceEnds, Ends, _work_has_failed
from tests.monitor.torch.recorder.cuda_checks import CHECKS
from tests.simdevice import installed, run
from tests.simulated import ON_SIMULATED_DEVICES


def test_the_least_delay_ever_seen_is_nearest_to_the_truth() -> None:
    clock = DeviceClock()
    # The device's zero is at 1000 ms of the host's; events are seen 80, 5 and 60 ms late.
    assert clock.host_ns(10.0, 1_090_000_000) == 1_090_000_000
    assert clock.host_ns(20.0, 1_025_000_000) == 1_025_000_000
    assert clock.host_ns(30.0, 1_090_000_000) == 1_035_000_000


def test_nothing_ends_after_it_was_seen() -> None:
    clock = DeviceClock()
    clock.host_ns(0.0, 500_000_000)
    assert clock.host_ns(90.0, 580_000_000) == 580_000_000


class _Call:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def reached(self) -> None:
        self.said.append("reached")

    def ended(self, failed: bool, at: int | None = None, *, seen: bool = True) -> None:
        self.said.append((failed, seen))


def test_a_kind_of_device_without_events_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    broken: list[BaseException] = []
    ends = DeviceEnds(Ends(broken.append))
    with caplog.at_level(logging.WARNING, "ckptd.monitor"):
        for _ in range(2):
            assert ends.enqueue(torch.device("mps", 0), _Call()) is None  # no streams to queue on
    [record] = caplog.records
    assert "cannot see when collectives on mps tensors end" in record.getMessage()
    ends.poll()
    assert not broken


def _raised(error: BaseException) -> None:
    raise error


class _Work:
    """A work that a device carries out."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def get_future_result(self) -> None:
        raise NotImplementedError

    get_future = get_future_result


def several_devices() -> None:
    broken: list[BaseException] = []
    ends = Ends(broken.append)
    devices = DeviceEnds(ends)
    calls = []
    for index in (0, 1, 0, 1):  # an event that has done its work is used again on its own device
        call = _Call()
        calls.append(call)
        queued = devices.enqueue(torch.device("cuda", index), call)
        assert queued is not None
        devices.taken(queued, _Work(), None)
        devices._waited(queued, False)
        devices.poll()
    assert [call.said for call in calls] == [["reached", (False, True)]] * 4
    assert not broken


def coalesced() -> None:
    devices = DeviceEnds(Ends(_raised))
    completed = _Work()
    completed.completed = True
    for work in (None, completed):  # a send or receive has none; NCCL's other one has no event yet
        call = _Call()
        dist.distributed_c10d._world.pg_coalesce_state.update({object(): []})  # type: ignore[dict-item]
        try:
            queued = devices.enqueue(torch.device("cuda", 0), call)
            assert queued is not None
            devices.taken(queued, work, None)
        finally:
            dist.distributed_c10d._world.pg_coalesce_state.clear()
        devices.poll()
        assert call.said == [(False, False)]
    assert not devices._pending


def nobody_waits() -> None:
    ends = Ends(_raised)
    devices, call, work = DeviceEnds(ends), _Call(), _Work()
    known = weakref.ref(work)
    queued = devices.enqueue(torch.device("cuda", 0), call)
    assert queued is not None
    devices.taken(queued, work, None)
    work.completed = True
    devices.poll()
    assert call.said == ["reached", (False, True)]
    del work, queued
    assert known() is None, "its tensors live as long as it does"


def waits_for_another() -> None:
    """Memory that a call has written is waited for when that call is over and forgotten."""
    ends = Ends(_raised)
    devices = DeviceEnds(ends)
    output, device = torch.ones(3, device="cuda"), torch.device("cuda", 0)
    first, work = devices.enqueue(device, _Call()), _Work()
    assert first is not None
    devices.taken(first, work, output)
    work.completed = True
    devices.poll()
    # What has the same number as that work, as soon as it is let go of.
    call = _Call()
    second = devices.enqueue(device, call)
    assert second is not None
    work.completed = False
    devices.taken(second, work, None)
    ends._written(output)
    devices.poll()
    assert call.said == ["reached"], "nobody has waited for it"
    work.completed = True
    devices.poll()
    assert call.said == ["reached", (False, True)]


def made_meanwhile() -> None:
    """A call is enqueued while events are looked at, behind one that hangs."""
    sim, devices = installed(), DeviceEnds(Ends(_raised))
    first, second = _Call(), _Call()
    device = torch.device("cuda", 0)
    queued = devices.enqueue(device, first)
    assert queued is not None
    work = _Work()
    devices.taken(queued, work, None)
    let_go, is_completed = sim.hold(), work.is_completed

    def looked_at() -> bool:
        if len(devices._pending) == 0:
            devices.enqueue(device, second)
        return is_completed()

    work.is_completed = looked_at  # type: ignore[method-assign]
    devices.poll()
    assert first.said == ["reached"]
    work.completed = True
    devices.poll()
    assert first.said == ["reached", (False, True)]
    assert not second.said
    let_go()


def threads_on_their_device() -> None:
    devices = DeviceEnds(Ends(_raised))
    torch.cuda.set_device(1)
    assert devices.enqueue(torch.device("cuda", 1), _Call()) is not None
    found: list[int] = []

    def looks() -> None:
        devices.poll()
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=looks)
    thread.start()
    thread.join()
    assert found == [1], "a question on another device makes a context there"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=ON_SIMULATED_DEVICES)
        for program in (
            several_devices,
            coalesced,
            nobody_waits,
            waits_for_another,
            made_meanwhile,
            threads_on_their_device,
        )
    ],
)
def test_on_simulated_devices(program: Callable[[], None]) -> None:
    run(program)


def test_a_look_at_an_end_that_fails_is_not_the_programs() -> None:
    broken: list[BaseException] = []
    ends = Ends(broken.append)
    ends.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        error = RuntimeError("no event")

        def fails(failed: bool, *, seen: bool = True) -> None:
            raise error

        ends.at_its_wait(work, fails)
        work.wait()
        assert broken == [error]
    finally:
        ends.remove()
        dist.destroy_process_group()


class _Ended(dist._Work):
    """A work of a backend that says by its future how it ended."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


@pytest.mark.parametrize("error", [None, RuntimeError("the peer is gone")])
def test_how_a_work_ended_is_asked_without_a_word_to_the_user(
    error: Exception | None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _work_has_failed(_Ended(error)) == (error is not None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        assert not _work_has_failed(work)
    finally:
        dist.destroy_process_group()
    assert "deprecated" not in capfd.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or not torch.distributed.is_nccl_available(),
    reason="NO CUDA DEVICE: ends of calls on CUDA tensors are NOT tested here",
)
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_device(check: str, tmp_path: Path) -> None:
    CHECKS[check](str(tmp_path))
    torch.cuda.synchronize()
