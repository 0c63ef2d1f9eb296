"""What a program calls: streams, events, graphs, and the module of a kind of device."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from tests.simdevice import tensors
from tests.simdevice.simulator import Capture, Simulator

__all__ = ["SimEvent", "SimGraph", "SimStream", "replace"]

_CYCLES_PER_S = 1.5e9
_TYPES = {"cuda": 1, "xpu": 12, "privateuseone": 20}
_KEYS = {"cuda": "CUDA", "xpu": "XPU", "privateuseone": "PrivateUse1"}
_sim: Simulator
_type: str
_number: int


class SimStream(torch.Stream):
    """A stream of a simulated device; what torch.Stream does goes through the guard."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Self:
        """Make a stream, or name the one of a ``stream_id`` and ``device_index``."""
        if "stream_id" not in known:
            index = tensors.index_of(device)
            known = {"stream_id": _sim.new_stream(index), "device_index": index}
        made: Self = super().__new__(
            cls,
            stream_id=known["stream_id"],
            device_index=known["device_index"],
            device_type=_number,
        )
        return made

    def wait_event(self, event: torch.Event) -> None:
        """Let what comes after this here come after an event."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let what comes after this here come after what is in another stream by now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event, a new one where none is given."""
        event = SimEvent() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        """A number that other streams do not have."""
        return self.stream_id

    sycl_queue = cuda_stream


class SimEvent(torch.Event):
    """An event of a simulated device."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Self:
        """Make an event that nothing is waited for at until it is recorded."""
        made: Self = super().__new__(cls, device=_type, enable_timing=enable_timing)
        return made

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record what is in a stream by now."""
        super().record(_current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let a stream wait for this."""
        super().wait(_current_stream() if stream is None else stream)


def _current_stream(device: Any = None) -> SimStream:
    queue = _sim.current(tensors.index_of(device))
    return SimStream(stream_id=queue.number, device_index=queue.device)


def _default_stream(device: Any = None) -> SimStream:
    return SimStream(stream_id=0, device_index=tensors.index_of(device))


def _set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    device, index = _sim.driver.sim_device(), stream.device_index
    before = _sim.driver.sim_stream(index)
    _sim.driver.sim_set_stream(index, stream.stream_id)
    _sim.driver.sim_set_device(index)
    try:
        yield
    finally:
        _sim.driver.sim_set_stream(index, before)
        _sim.driver.sim_set_device(device)


class _Device:
    """Makes a device current in a block."""

    def __init__(self, device: Any) -> None:
        self._index = tensors.index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = _sim.driver.sim_device()
        _sim.driver.sim_set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _sim.driver.sim_set_device(self._before)


class SimGraph:
    """A graph: kernels that are captured once, and enqueued at each replay."""

    def __init__(self, **_: Any) -> None:
        self._capture = Capture()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin to capture the current stream."""
        self._capture = _sim.begin_capture(_sim.current(), capture_error_mode)

    def capture_end(self) -> None:
        """End the capture; raises where a call meanwhile has broken it."""
        _sim.end_capture(self._capture)

    def replay(self) -> None:
        """Enqueue the kernels on the current stream."""
        _sim.replay(self._capture)

    def reset(self) -> None:
        """Let go of the kernels."""
        self._capture = Capture()


@contextlib.contextmanager
def _graph(
    graph: SimGraph,
    pool: Any = None,
    stream: torch.Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    _synchronize()
    with _stream(SimStream() if stream is None else stream):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was raised in the block counts
                graph.capture_end()
            raise
        graph.capture_end()


def _synchronize(device: Any = None) -> None:
    _sim.synchronize_device(tensors.index_of(device))


class Cudart:
    """The calls of CUDA's runtime that page-lock memory of the host."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock memory; return CUDA's status."""
        return _sim.page_lock(address, nbytes)

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock memory; return CUDA's status."""
        return _sim.page_unlock(address)


def _generator(device: Any = None) -> torch.Generator:
    return tensors.generators()[tensors.index_of(device)]


def _seed_all(seed: int) -> None:
    for generator in tensors.generators():
        generator.manual_seed(seed)


def _rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


def _set_rng_states(states: Sequence[torch.Tensor]) -> None:
    for i, state in enumerate(states):
        _set_rng_state(state, i)


def _common() -> dict[str, Any]:
    """Return what the module of every kind has."""
    sim, index_of = _sim, tensors.index_of

    def reset_peak(device: Any = None) -> None:
        sim.most_allocated[index_of(device)] = sim.allocated[index_of(device)]

    return {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: sim.devices,
        "current_device": lambda: sim.driver.sim_device(),
        "set_device": lambda device: sim.driver.sim_set_device(index_of(device)),
        "get_device_name": lambda device=None: "simulated",
        "device": _Device,
        "Stream": SimStream,
        "Event": SimEvent,
        "stream": _stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": _set_stream,
        "synchronize": _synchronize,
        "is_current_stream_capturing": lambda: _sim.current().capture is not None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (
            sim.capacity - sim.allocated[index_of(device)],
            sim.capacity,
        ),
        "memory_allocated": lambda device=None: sim.allocated[index_of(device)],
        "memory_reserved": lambda device=None: sim.allocated[index_of(device)],
        "max_memory_allocated": lambda device=None: sim.most_allocated[index_of(device)],
        "reset_peak_memory_stats": reset_peak,
        "manual_seed": lambda seed: _generator().manual_seed(seed),
        "manual_seed_all": _seed_all,
        "initial_seed": lambda: _generator().initial_seed(),
        "default_generators": tensors.generators(),
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_rng_state(i) for i in range(sim.devices)],
        "set_rng_state_all": _set_rng_states,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }


def _of_cuda() -> dict[str, Any]:
    """Return what CUDA's module has besides."""
    return {
        "cudart": Cudart,
        "CUDAGraph": SimGraph,
        "graph": _graph,
        "_sleep": lambda cycles: _sim.stall(cycles / _CYCLES_PER_S),
    }


def replace(sim: Simulator, kind: str, name: str) -> list[object]:
    """Put the simulated devices in the place of a kind that this PyTorch has none of.

    Parameters
    ----------
    kind
        ``cuda``, ``xpu`` or ``privateuseone``.
    name
        What the devices are called; a program's own for ``privateuseone`` alone.

    Returns
    -------
    list of object
        What must live as long as the devices do.
    """
    global _sim, _type, _number
    _sim, _type, _number = sim, name, _TYPES[kind]
    if kind == "privateuseone":
        torch.utils.rename_privateuse1_backend(name)
    library = tensors.register(sim, name, _KEYS[kind])
    more = _common() | (_of_cuda() if kind == "cuda" else {})
    if kind == "privateuseone":
        module = types.ModuleType(f"torch.{name}")
        torch._register_device_module(name, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    else:
        module = getattr(torch, kind)
    for attribute, value in more.items():
        setattr(module, attribute, value)
    # A parameter that moves to a device becomes a tensor of another class.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    return [library]
