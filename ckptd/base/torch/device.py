"""`DeviceKind`: what each kind of device can do: streams, free memory, page locks, random state.

In it: the libraries of drivers by kind; graph captures.

A kind is a type of `torch.device`: ``cuda`` (of NVIDIA, and of AMD under ROCm), ``xpu``, ``npu``,
``mtia``, ``mps``, or the name under which a vendor registered PrivateUse1. What torch has alike for
all kinds is asked of the module of a kind (``torch.get_device_module``); what differs stands here:
which calls page-lock memory in place, and which one lets a thread ask the driver while another
captures a graph.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple, cast

import torch

from ckptd.base.runtime.host import mapped_files

_log = logging.getLogger("ckptd")
_HOSTS = frozenset(("cpu", "meta"))
_QUEUES = ("Stream", "Event", "stream", "current_stream", "device")
"""Names of a module whose tensors can be copied behind a program's back."""
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, not only for the current one."""
_THREAD_LOCAL = 1
"""StreamCaptureModeThreadLocal, the same number in all runtimes."""


class _Runtime(NamedTuple):
    """The library of a driver, and what of it this thread asks to disregard others' captures."""

    library: str
    exchange: str


_RUNTIMES = {
    "cuda": _Runtime("libcudart", "cudaThreadExchangeStreamCaptureMode"),
    "hip": _Runtime("libamdhip64", "hipThreadExchangeStreamCaptureMode"),
    "npu": _Runtime("libascendcl", "aclmdlRICaptureThreadExchangeMode"),
}
"""Where a capture in mode "global" refuses calls of other threads, and is broken by them."""


class DeviceKind:
    """The abilities of devices of one kind.

    Parameters
    ----------
    type
        As in `torch.device`.

    Attributes
    ----------
    module
        What torch has for the kind; None for the host, and for a kind that registered nothing.
    has_streams
        Whether there are streams and events, so that copies may be enqueued and asked after.
    locks_in_place
        Whether memory that is there already can be page-locked.
    """

    def __init__(self, type: str) -> None:
        self.type = type
        found = None if type in _HOSTS else getattr(torch, type, None)
        self.module: ModuleType | None = found
        self.has_streams = found is not None and all(hasattr(found, name) for name in _QUEUES)
        self.locks_in_place = hasattr(found, "cudart")
        self._of_thread = threading.local()

    def __repr__(self) -> str:
        return f"DeviceKind({self.type!r})"

    @property
    def _module(self) -> ModuleType:
        if self.module is None:
            raise RuntimeError(f"torch has no module for devices of kind {self.type}")
        return self.module

    # -- what the process has of it --------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        """Whether there is a device; initialises nothing."""
        return self.module is not None and bool(self.module.is_available())

    @property
    def is_in_use(self) -> bool:
        """Whether this process has begun to use devices; where torch does not say: may have."""
        if self.module is None:
            return False
        begun = getattr(self.module, "is_initialized", None)
        if begun is not None and not begun():
            return False  # asked first: to look for devices may begin with the driver
        return self.is_available

    def current_device(self) -> torch.device:
        """Return the device that tensors are made on where only the kind is named."""
        current = getattr(self._module, "current_device", None)
        return torch.device(self.type, 0 if current is None else int(current()))

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        count = getattr(self._module, "device_count", None)
        return 1 if count is None else int(count())

    def free_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that can still be allocated; None where torch does not say."""
        m = self._module
        if not all(hasattr(m, n) for n in ("mem_get_info", "memory_reserved", "memory_allocated")):
            return None
        free = int(m.mem_get_info(device)[0])
        return free + int(m.memory_reserved(device)) - int(m.memory_allocated(device))

    # -- streams and events ----------------------------------------------------------------------

    def make_stream(self, device: torch.device) -> torch.Stream:
        """Return a stream of its own."""
        return cast(torch.Stream, self._module.Stream(device))

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream that this thread's work on a device goes to."""
        return cast(torch.Stream, self._module.current_stream(device))

    def make_event(self, *, timing: bool = False) -> torch.Event:
        """Return an event that is not recorded yet."""
        if timing:
            return cast(torch.Event, self._module.Event(enable_timing=True))
        return cast(torch.Event, self._module.Event())

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a device the current one of this thread, where there may be several of the kind."""
        entered = getattr(self._module, "device", None)
        return nullcontext() if entered is None else entered(device)

    @contextmanager
    def on_stream(self, device: torch.device, stream: torch.Stream) -> Iterator[None]:
        """Send this thread's work on a device to a stream of it."""
        with ExitStack() as stack:
            stack.enter_context(self.on(device))
            stack.enter_context(self._module.stream(stream))
            yield

    # -- graphs ----------------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        """Tell whether this thread's current stream is being captured into a graph."""
        asked = getattr(self.module, "is_current_stream_capturing", None)
        return asked is not None and self.is_in_use and bool(asked())

    def ignore_captures(self, device: torch.device | None = None) -> bool:
        """Allow this thread to ask the driver while other threads capture graphs.

        Without that a question, such as whether an event has happened, is refused, and breaks a
        capture in mode "global" (torch's default) of any thread.

        Parameters
        ----------
        device
            What to make the current device of the thread, for good, where none was entered. A
            thread begins on the first device, and a question makes a context on the current one:
            hundreds of megabytes there, of each process that uses another device.

        Returns
        -------
        bool
            False: this cannot be had, and asking may break a capture.
        """
        if not hasattr(self._of_thread, "free"):
            choose = getattr(self.module, "set_device", None)
            if device is not None and choose is not None:
                choose(device)
            runtime = self._runtime
            free = runtime is None or _exchange(runtime, _THREAD_LOCAL) is not None
            self._of_thread.free = free
        return bool(self._of_thread.free)

    @contextmanager
    def captures_ignored(self) -> Iterator[None]:
        """Do as `ignore_captures` does, until the context is left."""
        runtime = self._runtime
        before = None if runtime is None else _exchange(runtime, _THREAD_LOCAL)
        try:
            yield
        finally:
            if runtime is not None and before is not None:
                _exchange(runtime, before)

    @property
    def _runtime(self) -> _Runtime | None:
        return _RUNTIMES.get("hip" if self.type == "cuda" and torch.version.hip else self.type)

    # -- page-locked memory ----------------------------------------------------------------------

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        """Page-lock memory for all devices of the kind; return what kept that from being done."""
        if not self.locks_in_place:
            return f"torch.{self.type} locks no memory in place"
        status = int(self._module.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        return None if not status else self._refused(status)

    def unlock_pages(self, address: int) -> str | None:
        """Unlock what `lock_pages` locked; return what kept that from being done."""
        status = int(self._module.cudart().cudaHostUnregister(address))
        return None if not status else self._refused(status)

    def _refused(self, status: int) -> str:
        """Take back what a refused call leaves behind: torch would blame the next kernel for it."""
        try:
            torch.zeros(1, device=self.type)
        except RuntimeError as error:
            _log.debug("taken back after a refused call: %s", error)
        return f"CUDA error {status}"

    # -- random numbers --------------------------------------------------------------------------

    def rng_state(self, index: int) -> torch.Tensor:
        """Return where the random stream of a device stands."""
        where = () if self.device_count == 1 else (index,)  # MPS has one, and takes none
        return cast(torch.Tensor, self._module.get_rng_state(*where))

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Set the random stream of a device."""
        where = () if self.device_count == 1 else (index,)
        self._module.set_rng_state(state, *where)

    def seeded_state(self, seed: int) -> torch.Tensor:
        """Return where a stream of its own stands that begins at a seed."""
        return torch.Generator(self.type).manual_seed(seed).get_state()


@cache
def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device, or the kind of that name: one object a kind."""
    if isinstance(device, torch.device):
        return kind_of(device.type)
    return DeviceKind(device)


def accelerator() -> DeviceKind | None:
    """Return the kind of the accelerator that torch is built for; None where there is none.

    Initialises nothing, and says nothing about whether a device is there.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None else kind_of(device.type)


def has_streams(device: torch.device) -> bool:
    """Tell whether copies of what is on a device can be enqueued, and asked after by an event."""
    return kind_of(device.type).has_streams


def is_capturing() -> bool:
    """Tell whether this thread's current stream is being captured into a graph."""
    kind = accelerator()
    return kind is not None and kind.is_capturing()


_loaded: dict[str, ctypes.CDLL] = {}


def _exchange(runtime: _Runtime, mode: int) -> int | None:
    """Set how far captures concern this thread; return how far they did, None if it cannot be set.

    By the library of the runtime that this process has loaded: another copy has other threads.
    """
    value = ctypes.c_int(mode)
    try:
        library = _loaded.get(runtime.library)
        if library is None:
            library = ctypes.CDLL(_mapped(runtime.library))
        status = int(getattr(library, runtime.exchange)(ctypes.byref(value)))
        _loaded[runtime.library] = library  # to look for it takes milliseconds
    except (OSError, AttributeError):
        return None
    return None if status else value.value


def _mapped(library: str) -> str | None:
    """Return the path of a library that this process has; None: it may be linked statically."""
    found = (path for path in mapped_files() if path.rpartition("/")[2].startswith(library))
    return next(found, None)
