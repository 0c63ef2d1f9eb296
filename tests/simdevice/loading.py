"""Making the simulated devices of a process."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptd.base.runtime.torchextension import TorchExtension
from ckptd.errors import UsageError
from tests.simdevice.simulator import Moment, Simulator

__all__ = ["GUARD", "install", "installed", "lacking"]

GUARD = TorchExtension(
    "libcudart-simulated",  # where programs look for CUDA's runtime by this name, they find it
    Path(__file__).with_name("guard.cpp"),
    purpose="the simulated device",
    libraries=("c10", "torch_cpu"),
    hint="without it no test runs on the simulated device",
)
_KINDS = ("cuda", "xpu")
_known: list[Simulator] = []
_kept: list[object] = []
"""What native code has pointers to."""


def installed() -> Simulator:
    """Return the simulated devices of this process.

    Raises
    ------
    UsageError
        There are none.
    """
    if not _known:
        raise UsageError(
            "this process has no simulated device",
            wanted="a program that `python -m tests.simdevice` runs, or install() first",
            found="neither",
        )
    return _known[0]


def lacking() -> str | None:
    """Return why no device can be simulated on this machine; None where it can."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "PyTorch is not installed"
    version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    real = [kind for kind in ("cuda", "hip", "xpu") if version.get(kind)]
    if real:
        return f"this PyTorch is built for {real[0]}: only the one for CPUs leaves devices free"
    try:
        if GUARD.built() is None:
            GUARD.compiler()
    except UsageError as error:
        return error.message
    return None


def install(name: str = "cuda", devices: int = 2) -> Simulator:
    """Make simulated devices; call it before PyTorch is imported, once in a process.

    Parameters
    ----------
    name
        ``cuda`` or ``xpu``, whose modules of PyTorch then work; any other word names a device of
        PyTorch's key PrivateUse1.
    devices
        How many, at most 8.

    Raises
    ------
    UsageError
        PyTorch is imported already, or no device can be simulated: see `lacking`. Kind ``build``:
        the native part cannot be built.
    """
    if "torch" in sys.modules:
        raise UsageError(
            "a simulated device is made before PyTorch is imported",
            wanted="install() in a process without torch",
            found="torch is imported",
            hint="run the program by `python -m tests.simdevice PROGRAM`",
        )
    if why := lacking():
        raise UsageError("no device can be simulated here", found=why)
    kind = name if name in _KINDS else "privateuseone"
    library = ctypes.PyDLL(str(GUARD.built() or GUARD.build()), mode=ctypes.RTLD_GLOBAL)
    library.sim_stream.restype = ctypes.c_int64
    library.sim_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
    library.sim_dead_event.restype = ctypes.c_int64
    for call in (library.sim_lock, library.sim_is_locked):
        call.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    library.sim_unlock.argtypes = (ctypes.c_size_t,)
    library.sim_unlock.restype = library.sim_locked_count.restype = ctypes.c_size_t
    library.sim_locked.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.sim_locked.restype = ctypes.c_size_t
    if not library.sim_make(kind.encode(), devices):
        raise UsageError(
            "there can be no such number of simulated devices", wanted="1 to 8", found=devices
        )
    simulator = Simulator(name, devices, library)
    functions = _Events(simulator).functions()
    library.sim_connect(ctypes.byref(functions))
    _kept.append(functions)
    _known.append(simulator)
    names: Any = importlib.import_module("tests.simdevice.names")  # imports torch
    _kept.extend(names.replace(simulator, kind, name))
    return simulator


class _Functions(ctypes.Structure):
    """`Driver` of guard.cpp."""

    _fields_ = (
        ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)),
        ("block", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)),
        ("query_event", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("synchronize_event", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
        ("elapsed", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_int64)),
        ("new_stream", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)),
        ("query_stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)),
        ("synchronize_stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)),
        ("synchronize_device", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
        ("capturing", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)),
    )


class _Events:
    """Answers what PyTorch's streams and events ask, by their numbers."""

    def __init__(self, simulator: Simulator) -> None:
        self._sim = simulator
        self._moments: dict[int, Moment] = {}
        self._last = 0

    def functions(self) -> _Functions:
        """Return what the guard calls."""
        made = _Functions()
        for name, form in _Functions._fields_:
            setattr(made, name, form(self._answering(getattr(self, name))))
        return made

    def _answering(self, call: Callable[..., float | None]) -> Callable[..., float]:
        def answer(*arguments: int) -> float:
            try:
                return call(*arguments) or 0
            except Exception as error:  # noqa: BLE001 - the guard raises it in the caller
                self._sim.driver.sim_refuse(str(error).encode())
                return -1

        return answer

    def record(self, event: int, device: int, stream: int) -> int:
        """Record an event, a new one for 0; return its number."""
        while dead := self._sim.driver.sim_dead_event():
            self._moments.pop(dead, None)
        before = self._moments[event].queue if event else None
        if before is not None and before.device != device:
            raise RuntimeError(
                f"Event device {before.device} does not match recording stream's device {device}"
            )
        moment = self._sim.record(self._sim.queue(device, stream))
        if not event:
            with self._sim.lock:
                event = self._last = self._last + 1
        self._moments[event] = moment
        return event

    def block(self, event: int, device: int, stream: int) -> None:
        """Let a stream wait for an event."""
        self._sim.wait(self._sim.queue(device, stream), self._moments[event])

    def query_event(self, event: int) -> bool:
        """Tell whether an event has come."""
        return self._sim.query(self._moments[event])

    def synchronize_event(self, event: int) -> None:
        """Let the host wait for an event."""
        self._sim.synchronize(self._moments[event], "synchronize of an event")

    def elapsed(self, first: int, last: int) -> float:
        """Return the milliseconds between two events."""
        return max(0.0, (self._moments[last].at - self._moments[first].at) * 1e3)

    def new_stream(self, device: int) -> int:
        """Make a stream."""
        return self._sim.new_stream(device)

    def query_stream(self, device: int, stream: int) -> bool:
        """Tell whether a stream has nothing to do."""
        return self._sim.idle(self._sim.queue(device, stream))

    def synchronize_stream(self, device: int, stream: int) -> None:
        """Let the host wait for a stream."""
        moment = self._sim.mark(self._sim.queue(device, stream))
        self._sim.synchronize(moment, "synchronize of a stream")

    def synchronize_device(self, device: int) -> None:
        """Let the host wait for a device."""
        self._sim.synchronize_device(device)

    def capturing(self, device: int, stream: int) -> bool:
        """Tell whether a stream is captured."""
        return self._sim.queue(device, stream).capture is not None
