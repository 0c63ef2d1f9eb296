"""Cutting off the groups of a process, and destroying them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ckptd.elastic.torch.session.groups import GroupAborts, destroy_groups, groups_with_abort
from tests.elastic.torch.session import waiting_group
from tests.elastic.torch.session.waiting_group import WaitingGroup
from tests.processes import PATIENCE_S, until


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WaitingGroup]]:
    """Three groups, each in a collective that never ends by itself."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts another one in its place
    waiting_group.register()
    dist.init_process_group(waiting_group.NAME, store=dist.HashStore(), rank=0, world_size=1)
    made = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0])]
    assert WaitingGroup.groups == made
    for group in made:
        dist.all_reduce(torch.ones(1), group=group)
    yield list(WaitingGroup.groups)
    for group in made:
        for kernel in group.kernels:
            kernel.quit()
    destroy_groups()
    WaitingGroup.groups.clear()


def test_all_groups_are_aborted_at_once(hanging: list[WaitingGroup]) -> None:
    aborts = GroupAborts()
    assert not aborts.begun
    aborts.begin()
    assert aborts.begun
    assert aborts.wait(time.monotonic() + PATIENCE_S) == []
    assert all(group.aborted for group in hanging)
    destroy_groups()
    assert all(group.shut for group in hanging)
    assert not WaitingGroup.groups
    assert not dist.is_initialized()


def test_aborts_one_after_the_other_would_hang(hanging: list[WaitingGroup]) -> None:
    """The groups of these tests are such that it matters: torch's own way does not end here."""
    thread = threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
    thread.start()
    until(lambda: any(group.aborted for group in hanging))
    thread.join(0.3)
    assert thread.is_alive()
    assert sum(group.aborted for group in hanging) == 1
    for group in hanging:
        for kernel in group.kernels:
            kernel.quit()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_group_that_is_made_meanwhile_is_aborted_as_well(hanging: list[WaitingGroup]) -> None:
    aborts = GroupAborts()
    aborts.begin()
    late = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=late)
    aborts.begin()
    assert aborts.wait(time.monotonic() + PATIENCE_S) == []
    assert isinstance(late, WaitingGroup)
    assert late.aborted


def test_an_abort_that_hangs_is_named_in_time(
    hanging: list[WaitingGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging[1], "hangs", True, raising=False)
    aborts = GroupAborts()
    began = time.monotonic()
    aborts.begin()
    assert len(aborts.wait(began + 0.2)) == 1
    assert time.monotonic() - began < PATIENCE_S


def test_a_backend_that_cannot_abort_is_logged(
    hanging: list[WaitingGroup],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> None:
        raise RuntimeError("of its own")

    monkeypatch.setattr(hanging[0], "abort", fails, raising=False)
    for kernel in hanging[0].kernels:
        kernel.quit()
    aborts = GroupAborts()
    aborts.begin()
    assert aborts.wait(time.monotonic() + PATIENCE_S) == []
    assert "cannot be aborted: of its own" in caplog.text


def test_gloo_has_no_abort_though_nobody_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    waiting_group.register()
    for backend, wanted in ((None, 0), ("gloo", 0), (f"cpu:gloo,cuda:{waiting_group.NAME}", 1)):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert groups_with_abort() == [dist.group.WORLD][:wanted]
        finally:
            destroy_groups()
            WaitingGroup.groups.clear()


def test_groups_that_cannot_be_destroyed_are_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise RuntimeError("a communicator was aborted")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for destroy in (fails, dist.destroy_process_group):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        monkeypatch.setattr(dist, "destroy_process_group", destroy)
        destroy_groups()
        assert not dist.is_initialized()
