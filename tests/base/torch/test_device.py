"""What devices of each kind can do; modules as torch and vendors register them, with no device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

from ckptd.base.torch.device import DeviceKind, accelerator, has_streams, is_capturing, kind_of
from ckptd.checkpoint.torch import copy
from ckptd.checkpoint.torch.copy import CopyForm
from ckptd.checkpoint.torch.feed import CopyStep
from ckptd.checkpoint.torch.state.leaves import TensorLeaf


def registered(monkeypatch: pytest.MonkeyPatch, name: str, **has: Any) -> DeviceKind:
    """Register a module as a vendor does (``torch._register_device_module``)."""
    module = ModuleType(f"torch.{name}")
    for key, value in has.items():
        setattr(module, key, value)
    monkeypatch.setattr(torch, name, module, raising=False)
    return DeviceKind(name)


QUEUES = dict.fromkeys(("Stream", "Event", "stream", "current_stream", "device"), object)


def test_the_host_is_no_device() -> None:
    for name in ("cpu", "meta"):
        kind = kind_of(name)
        assert kind.module is None
        assert not any((kind.has_streams, kind.is_available, kind.is_in_use, kind.is_capturing()))


def test_kinds_are_what_their_modules_have() -> None:
    for name in ("cuda", "xpu", "mtia"):
        assert has_streams(torch.device(name)), name
    assert not has_streams(torch.device("mps"))
    with kind_of("mps").on(torch.device("mps")):  # there is one: torch has no way to choose it
        pass
    assert kind_of("cuda").locks_in_place
    assert not kind_of("xpu").locks_in_place
    assert kind_of(torch.device("xpu", 1)) is kind_of("xpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_in_use() -> None:
    for name in ("cuda", "xpu", "mps"):
        assert not kind_of(name).is_in_use
        assert not kind_of(name).is_capturing()
    assert not is_capturing()
    assert accelerator() is None or not accelerator().is_available  # type: ignore[union-attr]


def test_what_a_vendor_left_out_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registered(monkeypatch, "newdevice", is_available=lambda: True)
    assert not kind.has_streams
    assert not kind.locks_in_place
    assert kind.is_in_use, "torch does not say whether it is"
    assert not kind.is_capturing()
    assert kind.free_bytes(torch.device("cpu")) is None
    assert kind.lock_pages(0, 1) == "torch.newdevice locks no memory in place"
    assert kind.ignore_captures(), "no capture of it is known to refuse what others ask"


def test_captures_are_asked_after_where_the_device_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    asked: list[int] = []

    def capturing() -> bool:
        asked.append(1)
        return True

    kind = registered(
        monkeypatch,
        "newdevice",
        is_available=lambda: True,
        is_initialized=lambda: bool(begun),
        is_current_stream_capturing=capturing,
    )
    assert not kind.is_capturing()
    assert not asked, "to ask would initialise the device"
    begun.append(1)
    assert kind.is_capturing()


def test_a_stream_is_used_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Entered(nullcontext[None]):
        def __init__(self, name: Any) -> None:
            super().__init__()
            self.name = name

        def __enter__(self) -> None:
            order.append(f"in {self.name}")

        def __exit__(self, *_: object) -> None:
            order.append(f"out {self.name}")

    kind = registered(monkeypatch, "newdevice", **{**QUEUES, "device": Entered, "stream": Entered})
    assert kind.has_streams
    device = torch.device("cpu")
    stream: Any = "stream"
    with kind.on_stream(device, stream):
        order.append("work")
    assert order == ["in cpu", "in stream", "work", "out stream", "out cpu"]


def test_each_thread_asks_the_runtime_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "ckptd.base.torch.device._exchange",
        lambda runtime, mode: asked.append(threading.current_thread().name) or 0,
    )
    kind = DeviceKind("cuda")
    assert kind.ignore_captures()
    assert kind.ignore_captures()
    thread = threading.Thread(target=kind.ignore_captures, name="other")
    thread.start()
    thread.join()
    assert asked == [threading.current_thread().name, "other"]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    copy._note_if_without_streams.cache_clear()
    with caplog.at_level(logging.WARNING, "ckptd"):
        yield caplog
    copy._note_if_without_streams.cache_clear()


def test_a_device_without_a_lazy_path_is_logged_once(logged: pytest.LogCaptureFixture) -> None:
    tensors = {"w": torch.empty(8, device="meta"), "v": torch.zeros(8)}
    leaves = {n: TensorLeaf(n, t, t, "model", "param", n, t) for n, t in tensors.items()}
    steps = [CopyStep("w", None, 0, 32), CopyStep("v", None, 32, 64)]
    CopyForm(steps, leaves, lambda leaf: True)
    assert not logged.messages, "of the host there is nothing to log"
    for _ in range(2):
        copy._note_if_without_streams("mps")
    copy._note_if_without_streams("xpu")
    (line,) = logged.messages
    assert line == (
        "save() waits until tensors on mps are copied: torch has no streams and events "
        "for that kind of device"
    )
