"""Finds the first NaN or infinity given to a reduction (``CKPTD_FINITE=1``).

In it: names of the parameter; how many sums may be on their way.

The input of each reduction that sums is summed up before the backend takes it, which passes over it
once; on a device the sum is fetched when it is there, and nothing waits for it. Programs have such
values on purpose (a loss scale that is tried out, the mean of nothing), so none counts by itself:
only the first since all was well, once an optimizer's step has left parameters that are not finite.
"""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptd.base.torch.device import kind_of
from ckptd.base.torch.tensors import is_dtensor
from ckptd.monitor.ring import RingWriter

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MOST_PENDING = 64
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


class BadCall(NamedTuple):
    """A call whose input is not finite, on this rank.

    Attributes
    ----------
    group, seq
        Identity of its group, and its number there.
    nbytes
        Of its input.
    step
        The step being made.
    what
        The parameter whose gradient it is, or what is known of it.
    """

    group: int
    seq: int
    nbytes: int
    step: int
    what: str


def wanted() -> bool:
    """Return whether the environment asks for the look at each reduction."""
    return os.environ.get("CKPTD_FINITE", "") not in ("", "0")


def sums(operation: str) -> bool:
    """Return whether such an operation, as the ring says it, spreads what is not finite."""
    name, _, reduction = operation.partition(" ")
    return name.startswith(("all_reduce", "reduce")) and reduction in ("", "avg", "premul_sum")


def fetched(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return a number of a device on its way to the host, and the event at its end, if any."""
    kind = kind_of(value.device)
    if not kind.has_streams:
        return value, None
    stream = kind.current_stream(value.device)
    value, event = value.to("cpu", non_blocking=True), kind.make_event()
    event.record(stream)
    return value, event


class FiniteCheck:
    """The look at what this rank gives to sums. Its callers catch what a method raises."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self.ahead = True
        """Whether the step being made is one more than the ring says: it counts those made."""
        self._first: BadCall | None = None
        self._told = False
        # Calls that are not finite on purpose, by group and size, until they once are.
        self._usual: set[tuple[int, int]] = set()
        self._pending: deque[tuple[torch.Tensor, Any, BadCall]] = deque()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waited: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models: list[weakref.ref[nn.Module]] = []

    def look(self, tensors: Any, row: int, seq: int) -> None:
        """Look at the input of a call before the backend has it; `row` is that of its group."""
        if self._told:
            return
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            inputs = list(_dense(tensors))
            if not inputs:
                return
            total = _total(inputs)
            step = self._ring.current_step + self.ahead
            nbytes = sum(t.nbytes for t in inputs)
            call = BadCall(self._ring.ident(row), seq, nbytes, step, str(inputs[0].dtype))
            if total.is_cpu:
                self._found(call, float(total))
                return
        if not kind_of(total.device).is_capturing():
            self._pending.append((*fetched(total), call))
            self._poll()

    def _poll(self) -> None:
        while self._pending and (self._pending[0][1] is None or self._pending[0][1].query()):
            value, _, call = self._pending.popleft()
            self._found(call, float(value), late=True)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft()

    def _found(self, call: BadCall, total: float, *, late: bool = False) -> None:
        key = (call.group, call.nbytes)
        if math.isfinite(total):
            self._usual.discard(key)
            if self._first is not None and key == (self._first.group, self._first.nbytes):
                self._first = None
        elif self._first is None and key not in self._usual:
            # What a device has reduced since holds what others gave as well.
            what = "" if late else self._parameter()
            what = what or f"{call.nbytes:,} bytes of {call.what.removeprefix('torch.')}"
            self._first = call._replace(what=what)
            self._waited = weakref.WeakSet(self._optimizers)

    def stepped(self, optimizer: Any) -> BadCall | None:
        """Return the first bad call, if a step of `optimizer` has just spoiled its parameters."""
        self._optimizers.add(optimizer)
        self._poll()
        first = self._first
        if first is None:
            return None
        self._waited.discard(optimizer)
        tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            local = [t.to_local() if is_dtensor(t) else t for t in tensors]
            bad = not all(math.isfinite(_total([t])) for t in _dense(local))
        if bad:
            self._told, self._first = True, None
            return first
        if not self._waited:  # every optimizer has made its step with it, and all is well
            self._usual.add((first.group, first.nbytes))
            self._first = None
        return None

    def forget(self) -> bool:
        """Begin again, as an earlier state of the model was loaded; return whether one was bad."""
        told, self._told, self._first = self._told, False, None
        self._pending.clear()
        return told

    def _parameter(self) -> str:
        """Return the parameters whose gradients are not finite, the first in backward first."""
        names = [n for m in self._whole_models() for n, p in m.named_parameters() if _is_bad(p)]
        if not names:
            return ""
        first = names[-1]
        while first.startswith(_WRAPPERS):
            first = first.partition(".")[2]
        return first + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def _whole_models(self) -> Iterator[nn.Module]:
        """Yield modules that are in no other; they are looked for once."""
        models = [model for ref in self._models if (model := ref()) is not None]
        if not models:
            found = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
            inner = {id(child) for m in found for child in m.__dict__.get("_modules", {}).values()}
            models = [m for m in found if id(m) not in inner and "_parameters" in m.__dict__]
            self._models = [weakref.ref(m) for m in models]
        yield from models


def _dense(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, list | tuple):
        for tensor in tensors:
            yield from _dense(tensor)
    elif (
        type(tensors) in (torch.Tensor, nn.Parameter)
        and tensors.dtype in _FLOATS
        and tensors.layout is torch.strided
        and not tensors.is_meta
        and tensors.numel()
    ):
        yield tensors


def _total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.stack([p.double() for p in parts]).sum()


def _is_bad(parameter: nn.Parameter) -> bool:
    return any(not math.isfinite(_total([grad])) for grad in _dense(parameter.grad))
