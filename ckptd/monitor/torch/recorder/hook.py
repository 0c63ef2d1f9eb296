"""Dispatcher hook on every operator of c10d, in Python; its self test.

All traffic of PyTorch's process groups passes there: eager, asynchronous, functional and compiled
calls, DTensor, DDP, FSDP2, objects and point-to-point, on every backend, and on groups that exist
already. Not seen: replays of CUDA graphs, symmetric-memory kernels, libraries that call NCCL
themselves.

The key stays in force below the hook: it is taken out of the set that the call goes on with.
Excluding it for the thread instead breaks tensors that a backend makes within the call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ckptd.monitor.torch.recorder.calls import CallKind, call_kinds

_BACKWARD = str(Path(torch.autograd.__file__).parent)


class HookTarget(Protocol):
    """Receiver of calls. None of its methods may raise or wait."""

    on: bool

    def begin(self, kind: CallKind, args: tuple[Any, ...]) -> Any:
        """Take note of a call; what this returns comes back at its end."""

    def launched(self, call: Any, kind: CallKind, result: Any) -> None:
        """The backend has taken the call; `result` is what the caller gets."""

    def failed(self, call: Any) -> None:
        """The backend has refused the call."""


class DispatcherHook:
    """Tells `target` of every call, from `install` until `remove`."""

    def __init__(self, target: HookTarget) -> None:
        self.target = target
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        """Register the hook; raises whatever a PyTorch that is too different raises."""
        library = torch.library.Library("c10d", "IMPL")
        try:
            for kind in call_kinds():
                library.impl(kind.operator, self._kernel(kind), "BackendSelect", with_keyset=True)
        except BaseException:
            library._destroy()
            raise
        self._library = library

    def remove(self) -> None:
        """Take the hook away. No call may be under way in another thread."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()

    def _kernel(self, kind: CallKind) -> Callable[..., Any]:
        # What `redispatch` calls, without a frame of its own where this PyTorch has it so.
        handle = getattr(kind.overload, "_handle", None)
        redispatch = getattr(handle, "redispatch_boxed", kind.overload.redispatch)
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keyset: Any, *args: Any, **more: Any) -> Any:
            target = self.target
            if not target.on:
                return redispatch(keyset & below, *args, **more)
            call = target.begin(kind, args)
            try:
                result = redispatch(keyset & below, *args, **more)
            except BaseException:
                target.failed(call)
                raise
            target.launched(call, kind, result)
            return result

        return kernel


def no_call_under_way(others: Collection[int]) -> bool:
    """Whether no thread can be in a call, nor begin one, while this one goes on.

    Only true where no thread runs Python but this one and `others`, identifiers of threads that
    make no calls, and this one is neither below the hook nor in a backward pass: PyTorch's own
    threads make calls only for a thread that waits in one.
    """
    if not set(sys._current_frames()) <= {threading.get_ident(), *others}:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith((__file__, _BACKWARD)):
            return False
        frame = frame.f_back
    return True


class _Probe:
    """Takes note of what the self-test does."""

    def __init__(self) -> None:
        self.on = True
        self.seen: list[str] = []

    def begin(self, kind: CallKind, args: tuple[Any, ...]) -> Any:
        group = dist.ProcessGroup.unbox(args[kind.group])
        self.seen.append(f"{kind.name} {args[kind.tensors][0].nbytes} {group.size()}")

    def launched(self, call: Any, kind: CallKind, result: Any) -> None:
        dist.Work.unbox(result[-1])
        self.seen.append("launched")

    def failed(self, call: Any) -> None:
        self.seen.append("failed")


def hook_works(hook: DispatcherHook) -> bool:
    """Whether the hook sees a call and lets it through.

    Raises whatever a PyTorch that is too different raises.
    """
    before, probe = hook.target, _Probe()
    hook.target = probe
    try:
        tensor = one_call()
    finally:
        hook.target = before
    return probe.seen == ["all_reduce 12 1", "launched"] and tensor.tolist() == [5.0] * 3


def one_call() -> torch.Tensor:
    """Return three fives, after a call of one rank that reaches no network."""
    group, tensor = idle_group()
    group.allreduce([tensor]).wait()
    return tensor


def idle_group() -> tuple[dist.ProcessGroup, torch.Tensor]:
    """Return a group whose calls do nothing, and a tensor for them: three fives.

    PyTorch's own group for tests, which the flight recorder does not see.
    """
    kind: Any = torch._C._distributed_c10d.FakeProcessGroup
    fake = getattr(kind, "_create_internal", kind)(0, 1)  # PyTorch 2.9 makes it by its class
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group, torch.full((3,), 5.0)
