"""One training on each kind of device: saves are lazy, its random stream goes on, its calls end.

The kinds are simulated: what PyTorch calls ``cuda`` and ``xpu``, and a name of a vendor's own.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptd
import ckptd.monitor
from ckptd.checkpoint.torch.state.rng import OwnStreams
from ckptd.errors import DeadlineError
from ckptd.monitor.job import CallFlag, Phase, RankView, join
from ckptd.monitor.ring import read
from ckptd.monitor.rules.hang import hangs
from ckptd.monitor.rules.limits import HangLimits, Learned, learn
from ckptd.monitor.torch.recorder.native import build
from tests.checkpoint.torch.device.backend import StreamBackend
from tests.processes import until
from tests.simdevice import installed, run, run_simulated_ranks
from tests.simulated import ON_SIMULATED_DEVICES

pytestmark = [pytest.mark.usefixtures("writing_thread"), *ON_SIMULATED_DEVICES]

KINDS = {"cuda": "CUDA", "xpu": "XPU", "newdevice": "PrivateUse1"}
"""Names of kinds of devices, and the dispatcher's key of each."""


class Training:
    """A model that draws on its device in each step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.device = torch.device(name, 0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "rng": ckptd.Rng(),
        }

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        x = torch.randn(8, 64, device=self.device)
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> torch.Tensor:
        loss = self.loss()
        self.optimizer.step()
        return loss


def trains(root: str, name: str) -> None:
    """Save lazily in the midst of a training; another one goes on from there bit for bit."""
    device, first = installed(), Training(name)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False)) as ck:
        first.step()
        ck.save(1, first.state)  # makes the memory that later saves find
        ck.wait()
        first.step()
        let_go = device.hold()  # what the device computes by now does not end
        try:
            handle = ck.save(2, first.state)
            later = [first.step() for _ in range(2)]  # the host goes on
            with pytest.raises(DeadlineError):
                handle.staged(0.0)
        finally:
            let_go()
        handle.durable()
        later += [first.step() for _ in range(2)]
    second = Training(name)
    torch.rand(3, device=second.device)
    with ckptd.Checkpointer(root) as ck:
        assert ck.load(second.state) == 2
    again = [second.step() for _ in range(4)]
    assert [x.tolist() for x in again] == [x.tolist() for x in later]
    assert len({float(x) for x in again}) == 4


@pytest.mark.parametrize("name", KINDS)
def test_saves_are_lazy_and_the_random_stream_goes_on(name: str, tmp_path: Path) -> None:
    run(trains, str(tmp_path / "root"), name, name=name, deadline_s=60.0)


def draws_on_two(root: str) -> None:
    """Save streams of two devices; load them where the first is current, and where another is."""

    def draw(index: int) -> list[float]:
        return list(torch.rand(4, device=f"cuda:{index}").tolist())

    torch.manual_seed(3)
    draw(0), draw(1), draw(1)
    own = OwnStreams.fork()
    state = {"rng": ckptd.Rng(), "x": torch.zeros(4)}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state).durable()
        later = [draw(0), draw(1)]
        assert later[0] != later[1]
        draw(1)
        assert ck.load(state) == 1
        assert [draw(0), draw(1)] == later
        torch.cuda.set_device(1)
        assert ck.load(state) == 1
        assert draw(1) == later[0]  # counted from the current device; there is none behind it
        torch.cuda.set_device(0)
        ck.load(state)
        with own.in_use():
            torch.cuda.set_device(1)
            draw(0), draw(1)
        assert [draw(0), draw(1)] == later


def test_streams_of_all_devices_of_a_process_go_on(tmp_path: Path) -> None:
    run(draws_on_two, str(tmp_path / "root"), deadline_s=60.0)


def records(folder: str, name: str, source: str) -> None:
    """Record calls whose devices have come to them, are in them and have ended them."""
    os.environ["CKPTD_RECORDER"] = source
    tensor = torch.ones(8, device=name)
    device, backend = installed(), StreamBackend(installed(), KINDS[name])
    with backend.installed():
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        recorder = ckptd.monitor.attach(folder)
        assert recorder.source == source

        def shows(*wanted: tuple[bool, bool]) -> bool:
            """Whether calls are queued, and whether they have ended, as the ring says."""
            calls = read(recorder.ring.path).calls
            queued = (calls["flags"] & CallFlag.QUEUED) != 0
            assert not (calls["flags"] & CallFlag.UNSEEN).any()
            return list(zip(queued.tolist(), (calls["end"] > 0).tolist(), strict=True)) == [*wanted]

        dist.all_reduce(tensor)
        until(lambda: shows((False, True)))
        let_go = device.hold()
        backend.hold = True
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()  # holds the stream up, and not the host
        assert shows((False, True), (True, False), (True, False))
        let_go()  # the kernel before the second call has ended
        until(lambda: shows((False, True), (False, False), (True, False)))
        backend.ends[0]()
        until(lambda: shows((False, True), (False, True), (False, False)))
        backend.ends[1]()
        until(lambda: shows((False, True), (False, True), (False, True)))
        backend.hold, backend.within = False, lambda: dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        until(lambda: shows(*[(False, True)] * 5))
        assert recorder.on
        ckptd.monitor.detach()
        dist.destroy_process_group()


@pytest.mark.timeout(1200)  # a build of PyTorch's headers, on a machine with other work
@pytest.mark.parametrize("source", ["python", "native"])
@pytest.mark.parametrize("name", KINDS)
def test_calls_are_before_inside_and_over(name: str, source: str, tmp_path: Path) -> None:
    if source == "native":
        build()  # once for a machine
    run(records, str(tmp_path), name, source, name=name, deadline_s=60.0)


def natively(folder: str) -> None:
    """Record calls that nobody waits for, that are waited for by memory, and coalesced ones."""
    os.environ["CKPTD_RECORDER"] = "native"
    backend = StreamBackend(installed(), "CUDA")
    tensors = [torch.ones(8, device=f"cuda:{index}") for index in range(2)]
    ran: set[str] = set()

    def runs(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/train/recorder/" in frame.f_code.co_filename:
            ran.add(frame.f_code.co_qualname)

    with backend.installed():
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        recorder = ckptd.monitor.attach(folder)
        found = dist.Work.wait

        def calls() -> Any:
            return read(recorder.ring.path).calls

        def ended() -> bool:
            return bool((calls()["end"] > 0).all())

        def call() -> None:
            for tensor in tensors:  # an event that has done its work serves again on its own device
                dist.all_reduce(tensor)

        call()
        assert dist.Work.wait is not found
        until(ended)
        sys.setprofile(runs)
        call()
        dist.all_reduce(tensors[0], async_op=True)  # that nobody waits for
        sys.setprofile(None)
        assert not ran, "of the recorder nothing of Python runs in a call"
        until(ended)
        work = dist.all_reduce(tensors[0], async_op=True)
        torch.ops._c10d_functional.wait_tensor(tensors[0])
        until(work.is_completed)
        until(ended)
        state: Any = dist.distributed_c10d._world.pg_coalesce_state
        state[None] = []
        try:
            dist.all_reduce(tensors[0])
        finally:
            state.clear()
        assert ended(), "it counts as ended"
        assert recorder.on
        unseen = (calls()["flags"] & CallFlag.UNSEEN) != 0
        assert unseen.tolist() == [False] * 6 + [True]
        ckptd.monitor.detach()
        assert dist.Work.wait is found
        dist.destroy_process_group()


def test_a_call_on_a_device_runs_nothing_of_python(tmp_path: Path) -> None:
    build()
    run(natively, str(tmp_path), deadline_s=60.0)


def captures(folder: str, source: str) -> list[tuple[bool, bool]]:
    """Capture a call into a graph and replay it; return if each call is queued, and unseen."""
    os.environ["CKPTD_RECORDER"] = source
    tensor = torch.ones(8, device="cuda")
    with StreamBackend(installed(), "CUDA").installed():
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        recorder = ckptd.monitor.attach(folder)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor.mul_(2))
            time.sleep(0.3)  # events are looked at meanwhile, which breaks no capture
        dist.all_reduce(tensor)
        for _ in range(3):
            graph.replay()
        until(lambda: not np.isnan(read(recorder.ring.path).calls["end"]).any())
        calls = read(recorder.ring.path).calls
        assert recorder.on
        ckptd.monitor.detach()
        dist.destroy_process_group()
    assert tensor.tolist() == [8.0] * 8
    flags = [CallFlag(int(flags)) for flags in calls["flags"]]
    return [(CallFlag.QUEUED in f, CallFlag.UNSEEN in f) for f in flags]


@pytest.mark.parametrize("source", ["python", "native"])
def test_the_end_of_a_captured_call_is_not_known_and_replays_leave_nothing(
    source: str, tmp_path: Path
) -> None:
    if source == "native":
        build()
    found = run(captures, str(tmp_path), source, deadline_s=60.0)
    assert found == [(False, True), (False, False)]


def hung(folder: str, late: int) -> tuple[RankView, RankView]:
    """Make a call that does not end; the device of rank `late` does not come to it.

    Return how it looks after one of the kind that ended, and then.
    """
    os.environ["CKPTD_RECORDER"] = "python"
    device, backend = installed(), StreamBackend(installed(), "CUDA")
    tensor = torch.ones(8, device="cuda")
    with backend.installed():
        recorder = ckptd.monitor.attach(folder)
        views, ends = [], []
        for backend.hold in (False, True):
            if backend.hold and dist.get_rank() == late:
                ends.append(device.hold())
            dist.all_reduce(tensor)
            if not backend.hold:
                until(lambda: not np.isnan(read(recorder.ring.path).calls["end"]).any())
                views.append(read(recorder.ring.path))
        ends += backend.ends
        time.sleep(1.0)  # for longer than anything may take by the limits of the test
        views.append(read(recorder.ring.path))
        dist.monitored_barrier()  # both have looked
        for end in ends:
            end()
        assert recorder.on
        ckptd.monitor.detach()
    return views[0], views[1]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("late", "kind"),
    [(1, "non-communication hang"), (-1, "communication hang")],
    ids=["before", "inside"],
)
def test_a_hang_before_a_call_is_told_from_one_inside_it(
    late: int, kind: str, tmp_path: Path
) -> None:
    found = run_simulated_ranks(2, hung, str(tmp_path), late, deadline_s=120.0)
    before, views = zip(*found, strict=True)
    limits = HangLimits(floors=dict.fromkeys(Phase, 0.2), factor=0.0, warm_steps=0)
    [verdict] = hangs(join(views), limits, learn(Learned(), join(before)), np.zeros(2, bool))
    assert verdict.kind == kind
    assert verdict.names() == (("1",) if late == 1 else ("0", "1"))
    assert verdict.numbers["since last arrival s"] < 30
