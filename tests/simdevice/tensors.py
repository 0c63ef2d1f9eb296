"""Tensors on simulated devices: wrappers around memory of the host, whose kernels are enqueued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch

from tests.simdevice.simulator import Simulator, StreamQueue, Task

__all__ = ["DeviceMemory", "SimTensor", "generators", "index_of", "register"]

_GARBAGE = 0xDB
_sim: Simulator
_type: str
_generators: tuple[torch.Generator, ...]


class DeviceMemory:
    """A block of device memory.

    Once nobody has it any more it is overwritten, in the order of its stream, as the next tensor
    that gets it would do: what another stream still reads is garbage then, unless that stream was
    named by `Tensor.record_stream`. What is `shared` with other processes has values when it comes,
    and keeps them.
    """

    def __init__(self, raw: torch.Tensor, queue: StreamQueue, *, shared: bool = False) -> None:
        self.raw = raw
        self.queue = queue
        self.used_on: set[StreamQueue] = set()
        self._private = shared or queue.capture is not None
        self._sim = _sim
        self._nbytes = raw.untyped_storage().nbytes()
        device = queue.device
        if _sim.allocated[device] + self._nbytes > _sim.capacity:
            self._nbytes = 0
            raise torch.OutOfMemoryError(f"{_type} out of memory: simulated device {device}")
        with _sim.lock:
            _sim.allocated[device] += self._nbytes
            _sim.most_allocated[device] = max(_sim.most_allocated[device], _sim.allocated[device])
        if _sim.reuse and not self._private:
            _overwrite(raw)  # what nothing has written yet has no value

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        raw, queue, sim = self.raw, self.queue, self._sim
        with sim.lock:
            sim.allocated[queue.device] -= self._nbytes
            if self._private or not sim.reuse:
                return
            for other in self.used_on - {queue}:
                sim.append(queue, Task("wait", moment=sim.mark(other)))
            sim.append(queue, Task("freed", run=lambda: _overwrite(raw)))


def _overwrite(raw: torch.Tensor) -> None:
    with torch.no_grad():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(raw.untyped_storage()).fill_(_GARBAGE)


class SimTensor(torch.Tensor):
    """A tensor on a simulated device; `_raw` is its memory, which runs behind the program."""

    _raw: torch.Tensor
    _memory: DeviceMemory

    @staticmethod
    def __new__(cls, raw: torch.Tensor, memory: DeviceMemory) -> Self:
        """Wrap a tensor of the host that lies in `memory`."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(_type, memory.queue.device),
        )
        made._raw, made._memory = raw, memory
        if raw.is_conj():
            torch._C._set_conj(made, True)
        if raw.is_neg():
            torch._C._set_neg(made, True)
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override] # torch annotates nothing
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    __str__ = __repr__

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("a tensor on a simulated device is not pickled: copy it to the host first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def data_ptr(self) -> int:
        """Return an address that no other tensor has, which is not the host's business."""
        return self._raw.data_ptr()

    def tolist(self) -> Any:
        """Return the values, as the host waits for them."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return what tensors share that lie in the same memory."""
        return self._raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as no classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Enqueue the kernel of an operator."""
        return _dispatch(func, args, kwargs or {})


def _raw_of(x: Any) -> Any:
    return x._raw if isinstance(x, SimTensor) else x


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what an operator is called with, or returns: values, and lists and dicts of them.

    PyTorch's own trees, which know every container, would take half of the time of a simulation.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([_mapped(change, x) for x in value])
    if kind is list:
        return [_mapped(change, x) for x in value]
    if kind is dict:
        return {name: _mapped(change, x) for name, x in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, value)
    return found


def _raws(value: Any) -> Any:
    return _mapped(_raw_of, value)


def _new(raw: torch.Tensor, device: int) -> SimTensor:
    return SimTensor(raw, DeviceMemory(raw, _sim.current(device)))


def index_of(device: Any) -> int:
    """Return the number of a device; of the current one where none is named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(_sim.driver.sim_device()) if index is None else index


_WAITS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
}
"""Operators whose result the host needs before it can go on."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the schema of an operator says.

    Attributes
    ----------
    views
        It returns nothing but views.
    makes
        It returns something new.
    writes
        Number and name of each argument that it writes to.
    returns
        Number and name of each argument that it returns.
    draws
        It draws random numbers.
    """

    name: str
    views: bool
    makes: bool
    writes: tuple[tuple[int, str], ...]
    returns: tuple[tuple[int, str], ...]
    draws: bool


@cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    back = [r.alias_info for r in schema.returns]
    aliases = [(i, x.name, x.alias_info) for i, x in enumerate(schema.arguments) if x.alias_info]
    found = [
        next(((i, name) for i, name, a in aliases if a.before_set == info.before_set), None)
        for info in back
        if info is not None
    ]
    return _Facts(
        name=schema.name,
        views=bool(back) and all(info is not None and not info.is_write for info in back),
        makes=None in back,
        writes=tuple((i, name) for i, name, alias in aliases if alias.is_write),
        returns=tuple(place for place in found if place is not None),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    facts = _facts(func)
    name = facts.name
    if name in _SPECIAL:
        return _SPECIAL[name](*args, **kwargs)
    sims = [x for x in _leaves((args, kwargs)) if isinstance(x, SimTensor)]
    if not sims:
        raise NotImplementedError(f"{func} makes no tensor of a simulated device")
    if func.namespace == "c10d":
        return _collective(func, args, kwargs, sims)
    device = _device_of(func, sims)
    if kwargs.get("device") is not None:  # of what is made like another
        place = torch.device(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if place.type != _type:
            return func(*_raws(args), **_raws(kwargs))
        device = index_of(place)
    if facts.views:
        views = func(*_raws(args), **_raws(kwargs))
        memory = sims[0]._memory
        return _mapped(lambda x: SimTensor(x, memory) if isinstance(x, torch.Tensor) else x, views)
    if name in _WAITS:
        queue = _sim.current(device)
        _sim.synchronize(_sim.record(queue), name)
        out = func(*_raws(args), **_raws(kwargs))
        return _mapped(lambda x: _placed(x, device), out)
    return _enqueue(func, facts, args, kwargs, device)


def _device_of(func: Any, sims: Sequence[SimTensor]) -> int:
    devices = {x.device.index for x in sims if x.dim()} or {sims[0].device.index}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} found at least two: "
            + " and ".join(f"{_type}:{i}" for i in sorted(devices))
        )
    return int(devices.pop())


def _placed(value: Any, device: int) -> Any:
    """Put what the host has waited for on the device."""
    if not isinstance(value, torch.Tensor):
        return value
    out = _new(torch.empty_like(value), device)
    out._raw.copy_(value)
    return out


_INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "index_select", "gather", "take", "embedding")
)


def _enqueue(func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any], device: int) -> Any:
    """Enqueue a kernel that writes into its arguments, into new tensors, or both."""
    seed = _drawn(func, kwargs, device)
    written = [x for at in facts.writes for x in _leaves(_argument(at, args, kwargs))]
    written = [x for x in written if isinstance(x, torch.Tensor)]
    if any(not isinstance(x, SimTensor) for x in written):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} writes to the host"
        )
    # Values of the host are taken now; those of the device when the kernel runs.
    frozen = _mapped(_taken, (args, kwargs))
    made: list[Any] = []
    if facts.makes:
        # The shapes of what is made: from a run on what is there, which changes nothing.
        changes = {id(x._raw) for x in written}
        every = "batch_norm" in facts.name  # its statistics are not marked as written
        indexing = facts.name in _INDEXING  # by numbers that the device may not have made yet

        def probed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if indexing and x.dtype in (torch.int32, torch.int64):
                return torch.zeros_like(x)
            return x.clone() if every or id(x) in changes else x

        found = _run(func, _mapped(probed, frozen), seed)

        def fresh(x: Any) -> Any:
            made.append(_alone(x))
            return _new(made[-1], device) if isinstance(x, torch.Tensor) else x

        result = _mapped(fresh, found)
    else:
        given = [_argument(at, args, kwargs) for at in facts.returns]
        result = tuple(given) if len(given) > 1 else (given[0] if given else None)

    def run() -> None:
        out = _leaves(_run(func, frozen, seed))
        for to, value in zip(made, out, strict=False):  # what was an argument is written already
            if isinstance(to, torch.Tensor):
                to.copy_(value)

    _sim.put(_sim.current(device), Task(facts.name, run=_ungraded(run)))
    return result


def _argument(at: tuple[int, str], args: Any, kwargs: dict[str, Any]) -> Any:
    number, name = at
    return args[number] if number < len(args) else kwargs.get(name)


def _taken(x: Any) -> Any:
    if isinstance(x, SimTensor):
        return x._raw
    return x.clone() if isinstance(x, torch.Tensor) else x


def _ungraded(run: Callable[[], object]) -> Callable[[], None]:
    def without() -> None:
        with torch.no_grad():
            run()

    return without


def _run(func: Any, call: tuple[Any, Any], seed: int | None) -> Any:
    args, kwargs = call
    with torch.no_grad():
        if seed is None:
            return func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return func(*args, **kwargs)


def _alone(x: Any) -> Any:
    """Return a tensor that has its memory for itself."""
    if not isinstance(x, torch.Tensor) or not x.is_contiguous():
        return x
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)


# -- copies ----------------------------------------------------------------------------------------


def _copy(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(dst, SimTensor) and isinstance(src, SimTensor):
        _copy_between(dst, src)
    elif isinstance(dst, SimTensor):
        _copy_to_device(dst, src, non_blocking)
    elif isinstance(src, SimTensor):
        _copy_to_host(dst, src, non_blocking)
    else:
        dst.copy_(src)
    return dst


def _copy_between(dst: SimTensor, src: SimTensor) -> None:
    to, of = dst._raw, src._raw
    queue, other = _sim.current(src.device.index), _sim.current(dst.device.index)
    run = _ungraded(lambda: to.copy_(of))
    if queue is other:
        _sim.put(queue, Task("copy on the device", run=run))
        return
    _sim.wait(queue, _sim.record(other))
    _sim.put(queue, Task("copy to a peer", run=run))
    _sim.wait(other, _sim.record(queue))


def _copy_to_device(dst: SimTensor, src: torch.Tensor, non_blocking: bool) -> None:
    to, queue = dst._raw, _sim.current(dst.device.index)
    at, nbytes = _reach(src)
    direct = non_blocking and _sim.is_page_locked(at, nbytes)
    of = src.detach() if direct else src.detach().clone()
    _sim.put(queue, Task("copy to the device", run=_ungraded(lambda: to.copy_(of))))
    if direct:
        _sim.copying(at, nbytes, _sim.record(queue))
    elif not non_blocking:
        _sim.synchronize(_sim.record(queue), "blocking copy to the device")


def _copy_to_host(dst: torch.Tensor, src: SimTensor, non_blocking: bool) -> None:
    to, of, queue = dst.detach(), src._raw, _sim.current(src.device.index)
    at, nbytes = _reach(dst)
    locked = _sim.is_page_locked(at, nbytes)
    _sim.put(queue, Task("copy to the host", run=_ungraded(lambda: to.copy_(of))))
    if non_blocking and locked:
        _sim.copying(at, nbytes, _sim.record(queue))
    else:
        why = "copy to pageable memory" if non_blocking else "blocking copy to the host"
        _sim.synchronize(_sim.record(queue), why)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor of the host begins, and how many bytes further it ends."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    to = tensor.device if device is None else torch.device(device)
    form = memory_format or torch.preserve_format
    like = _raw_of(tensor).detach()
    pinned = bool(pin_memory) and to.type == "cpu"
    raw = torch.empty_like(like, dtype=dtype, memory_format=form, pin_memory=pinned)
    out = _new(raw, index_of(to)) if to.type == _type else raw
    return _copy(out, tensor, non_blocking)


def _foreach_copy(
    to: Sequence[torch.Tensor], of: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    for a, b in zip(to, of, strict=True):
        _copy(a, b, non_blocking)


def _record_stream(tensor: SimTensor, stream: Any) -> None:
    tensor._memory.used_on.add(_sim.queue(stream.device_index, stream.stream_id))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::copy_": _copy,
    "aten::_to_copy": _to_copy,
    "aten::_foreach_copy_": _foreach_copy,
    "aten::record_stream": _record_stream,
}


def _collective(func: Any, args: Any, kwargs: Any, sims: Sequence[SimTensor]) -> Any:
    """Let a backend of the host carry a collective out, behind the streams of its tensors."""
    for device in {x.device.index for x in sims}:
        _sim.synchronize(_sim.record(_sim.current(device)), func._schema.name)
    out = func(*_raws(args), **_raws(kwargs))
    for work in _leaves(out):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]
    back = {id(x._raw): x for x in sims}
    return _mapped(lambda x: back.get(id(x), x), out)


# -- factories -------------------------------------------------------------------------------------

_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)
"""Operators that would resize what they write to."""


def register(sim: Simulator, device_type: str, key: str) -> torch.library.Library:
    """Let PyTorch make tensors on the simulated devices.

    Parameters
    ----------
    device_type, key
        How the devices are called, and the dispatcher's key of theirs.
    """
    global _sim, _type, _generators
    _sim, _type = sim, device_type
    _generators = tuple(torch.Generator(f"{device_type}:{i}") for i in range(sim.devices))
    library = torch.library.Library("aten", "IMPL")

    def empty(
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        raw = torch.empty(size, dtype=dtype, memory_format=memory_format, device="cpu")
        return _new(raw, index_of(device))

    def empty_strided(
        size: Any,
        stride: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> torch.Tensor:
        raw = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        return _new(raw, index_of(device))

    library.impl("empty.memory_format", empty, key)
    library.impl("empty_strided", empty_strided, key)
    library.impl("copy_", _copy, key)
    for name in _FACTORIES:
        library.impl(name, _factory(name), key)
    return library


def _factory(name: str) -> Callable[..., torch.Tensor]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **more: Any) -> torch.Tensor:
        index = index_of(device)
        seed = _drawn(func, more, index)
        value = _run(func, (args, {**more, "device": "cpu"}), seed)
        out = _new(torch.empty_like(value), index)
        raw = out._raw
        task = Task(func._schema.name, run=_ungraded(lambda: raw.copy_(value)))
        _sim.put(_sim.current(index), task)
        return out

    return make


def generators() -> tuple[torch.Generator, ...]:
    """Return the generator of each device."""
    return _generators


def _drawn(func: Any, kwargs: dict[str, Any], device: int) -> int | None:
    """Return what seeds a kernel that draws random numbers; None for one that does not.

    The host advances the generator when it enqueues the kernel, as CUDA does: kernels that run
    late draw what they would have drawn at once.
    """
    if not _facts(func).draws:
        return None
    generator = kwargs.get("generator") or _generators[device]
    if "generator" in kwargs:
        kwargs["generator"] = None  # what is drawn is drawn on the host
    state = generator.get_state().view(torch.int64)
    state[1] += 4
    generator.set_state(state.view(torch.uint8))
    return hash(tuple(state.tolist())) & 0x7FFF_FFFF_FFFF_FFFF
