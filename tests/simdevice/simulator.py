"""Streams, events, page locks and captures of devices that do not exist, played on the host.

Nothing here knows tensors: a kernel is a function that runs when its queue comes to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.errors import UsageError

__all__ = [
    "PLENTY",
    "SCHEDULES",
    "CopyUnderWay",
    "DeviceWait",
    "Moment",
    "Simulator",
    "StreamQueue",
]

SCHEDULES = ("lazy", "eager", "starve:side", "starve:main", "random:1")
"""One schedule of each kind."""

PLENTY = 1 << 40
"""Bytes of a device that is never full."""
_DEEPEST = 200
_POLL_S = 0.0005
_DELAYS_S = (0.0, 0.0, 0.0005, 0.001, 0.002)
_QUERY_ENDS = 0.05
"""Share of the queries that find done what no schedule would have run yet: devices do go on."""
_RELAXED = 2


class Moment:
    """What an event records: done when its queue has come to it."""

    __slots__ = ("at", "capture", "done", "queue")

    def __init__(self, queue: StreamQueue | None) -> None:
        self.queue = queue
        self.done = queue is None
        self.at = 0.0
        self.capture: Capture | None = None


@dataclass(slots=True, eq=False)
class Task:
    """What a queue runs: `run`, or wait for or reach a moment, or take its time."""

    what: str
    run: Callable[[], object] | None = None
    moment: Moment | None = None
    seconds: float = 0.0
    until: float = 0.0
    held: bool = False


@dataclass(slots=True, eq=False)
class Capture:
    """The kernels of a graph, while they are captured and afterwards."""

    tasks: list[Task] = field(default_factory=list)
    queues: list[StreamQueue] = field(default_factory=list)
    thread: int = 0
    mode: str = "global"
    broken: str = ""


class StreamQueue:
    """A stream: its tasks run in order, and after those of others by events alone."""

    def __init__(self, device: int, number: int) -> None:
        self.device = device
        self.number = number
        self.tasks: deque[Task] = deque()
        self.capture: Capture | None = None

    @property
    def main(self) -> bool:
        """Whether it is a default stream and none that a program made."""
        return not self.number


@dataclass(frozen=True, slots=True)
class CopyUnderWay:
    """Page-locked memory of the host, from `start` to `end`, in a copy that `moment` ends."""

    start: int
    end: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """The host waited for a device: in which call, and where (innermost first)."""

    call: str
    where: tuple[str, ...]


class Simulator:
    """The simulated devices of this process.

    Attributes
    ----------
    name, devices
        What the devices are called, as in `torch.device`, and how many there are.
    problems
        What a real device would not forgive, as sentences.
    waits
        Where the host waited for a device.
    counts
        How often each kernel and copy was enqueued, by name.
    reuse
        Whether memory that is let go is overwritten, in the order of its stream.
    capacity
        Bytes that each device has; what is more raises `torch.OutOfMemoryError`.
    lockable
        Whether memory of the host can be page-locked.
    driver
        The native library, which has what is current in each thread.
    """

    def __init__(self, name: str, devices: int, driver: Any) -> None:
        self.name = name
        self.devices = devices
        self.problems: list[str] = []
        self.waits: list[DeviceWait] = []
        self.counts: Counter[str] = Counter()
        self.reuse = True
        self.capacity = PLENTY
        self.lockable = True
        self.allocated = [0] * devices
        self.most_allocated = [0] * devices
        self.lock = threading.RLock()
        self.random = random.Random(0)
        self.driver = driver
        self._schedule = "eager"
        self._delays: random.Random | None = None
        self._inside = threading.local()
        self._queues = {(i, 0): StreamQueue(i, 0) for i in range(devices)}
        self._busy: dict[StreamQueue, None] = {}
        self._captures: list[Capture] = []
        self._copies: list[CopyUnderWay] = []
        self._failed: dict[int, str] = {}

    # -- what a test sets ------------------------------------------------------------------------

    @property
    def schedule(self) -> str:
        """What the devices do by themselves; see the guide."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str) -> None:
        name, _, rest = schedule.partition(":")
        fits = {
            "lazy": rest == "",
            "eager": rest == "",
            "starve": rest in {"side", "main"},
            "random": rest.isdigit(),
        }
        if not fits.get(name, False):
            raise UsageError(
                "a simulated device has no such schedule",
                wanted="lazy, eager, starve:side, starve:main or random:SEED",
                found=repr(schedule),
            )
        self.random.seed(int(rest) if rest.isdigit() else 0)
        self._schedule = schedule

    def delay(self, seed: int | None) -> None:
        """Let each call of the driver take a random moment, without the GIL; None ends that."""
        self._delays = None if seed is None else random.Random(seed)

    @contextlib.contextmanager
    def test(self, schedule: str = "eager", delays: int | None = None) -> Iterator[Simulator]:
        """Begin with nothing found and nothing refused; drain the devices in the end."""
        self.drain()
        self.problems, self.waits, self.counts = [], [], Counter()
        self.reuse, self.capacity, self.lockable = True, PLENTY, True
        self._failed.clear()
        self.most_allocated = list(self.allocated)
        self.schedule = schedule
        self.delay(delays)
        try:
            yield self
        finally:
            self.delay(None)
            self.drain()

    def drain(self) -> None:
        """Run everything that is enqueued but what is held."""
        with self.lock, self._in():
            while any(self._step(queue, force=True) for queue in list(self._busy)):
                pass

    def stall(self, seconds: float, stream: Any = None) -> None:
        """Enqueue a kernel that takes so long, or until the host waits for it."""
        self.put(self._of(stream), Task("stall", seconds=seconds))

    def hold(self, stream: Any = None) -> Callable[[], None]:
        """Enqueue a kernel that does not end, also for a host that waits; return what ends it."""
        task = Task("hold", held=True)
        self.put(self._of(stream), task)

        def end() -> None:
            task.held = False
            self.tick()

        return end

    def fail(self, device: int, reason: str = "device-side assert triggered") -> None:
        """Let every call that concerns a device raise from now on, as after a sticky error."""
        self._failed[device] = reason

    # -- streams ---------------------------------------------------------------------------------

    def _of(self, stream: Any) -> StreamQueue:
        if stream is None:
            return self.current()
        return self.queue(stream.device_index, stream.stream_id)

    def queue(self, device: int, number: int) -> StreamQueue:
        """Return the stream of a number."""
        return self._queues[device, number]

    def current(self, device: int | None = None) -> StreamQueue:
        """Return the stream that is current in this thread."""
        index = self.driver.sim_device() if device is None else device
        return self._queues[index, self.driver.sim_stream(index)]

    def new_stream(self, device: int) -> int:
        """Make a stream; return its number."""
        with self.lock:
            number = len(self._queues)
            self._queues[device, number] = StreamQueue(device, number)
            return number

    def append(self, queue: StreamQueue, task: Task) -> None:
        """Enqueue a task, and let none run meanwhile. Called with `lock` held."""
        queue.tasks.append(task)
        self._busy[queue] = None

    def put(self, queue: StreamQueue, task: Task) -> None:
        """Enqueue a task."""
        self.call(task.what, queue.device)
        with self.lock:
            self.counts[task.what] += 1
            if queue.capture is not None:
                queue.capture.tasks.append(task)
                return
            self.append(queue, task)
        self.tick()

    def record(self, queue: StreamQueue) -> Moment:
        """Return the moment when everything is done that is in a stream by now."""
        self.call("record", queue.device)
        moment = self.mark(queue)
        self.tick()
        return moment

    def mark(self, queue: StreamQueue) -> Moment:
        """Do as `record`, and let no task run meanwhile."""
        moment = Moment(queue)
        with self.lock:
            if queue.capture is not None:
                moment.done, moment.capture = True, queue.capture
            else:
                self.append(queue, Task("record", moment=moment))
        return moment

    def wait(self, queue: StreamQueue, moment: Moment) -> None:
        """Let what a stream does from now on come after a moment."""
        self.call("wait", queue.device)
        with self.lock:
            if moment.capture is not None and moment.capture in self._captures:
                if queue.capture is None:  # it joins the capture
                    queue.capture = moment.capture
                    moment.capture.queues.append(queue)
            elif queue.capture is None:
                self.append(queue, Task("wait", moment=moment))
        self.tick()

    def synchronize(self, moment: Moment, call: str) -> None:
        """Let the host wait for a moment."""
        device = 0 if moment.queue is None else moment.queue.device
        self.call(call, device)
        self._no_capture(call)
        if not moment.done:
            self.waits.append(DeviceWait(call, _where()))
        while True:
            with self.lock, self._in():
                if moment.done or self._finish(moment, force=True):
                    break
            time.sleep(_POLL_S)
        self._raise_failure(device)

    def synchronize_device(self, device: int, call: str = "synchronize") -> None:
        """Let the host wait for all streams of a device."""
        self.call(call, device)
        self._no_capture(call)
        with self.lock:
            queues = [queue for queue in self._busy if queue.device == device]
        self.random.shuffle(queues)  # which is done first is nobody's promise
        for queue in queues:
            self.synchronize(self.mark(queue), call)

    def query(self, moment: Moment) -> bool:
        """Tell whether a moment has come."""
        device = 0 if moment.queue is None else moment.queue.device
        self.call("query", device)
        self._no_capture("query of an event")
        self.tick()
        with self.lock, self._in():
            if not moment.done and self.random.random() < _QUERY_ENDS:
                self._finish(moment, force=False)
            return moment.done

    def idle(self, queue: StreamQueue) -> bool:
        """Tell whether a stream has nothing to do."""
        self.call("query", queue.device)
        self._no_capture("query of a stream")
        self.tick()
        with self.lock:
            return all(task.what == "freed" for task in queue.tasks)

    # -- what runs when --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in(self) -> Iterator[None]:
        """Let no task begin another one by what it calls."""
        before = getattr(self._inside, "on", False)
        self._inside.on = True
        try:
            yield
        finally:
            self._inside.on = before

    def _step(self, queue: StreamQueue, *, force: bool = False) -> bool:
        """Run the next task of a stream; False where it cannot run yet."""
        if not queue.tasks:
            return False
        task = queue.tasks[0]
        if task.held or (task.what == "wait" and task.moment and not task.moment.done):
            return False
        if task.seconds:
            now = time.monotonic()
            task.until = task.until or now + task.seconds
            if not force and now < task.until:
                return False
            task.until = 0.0  # a graph may replay it
        queue.tasks.popleft()
        if not queue.tasks:
            self._busy.pop(queue, None)
        if task.what == "record" and task.moment is not None:
            task.moment.done, task.moment.at = True, time.monotonic()
        if task.run is not None:
            task.run()
        return True

    def _finish(self, moment: Moment, *, force: bool, depth: int = 0) -> bool:
        """Run what has to run for a moment, and nothing else; False where something is held."""
        queue = moment.queue
        while not moment.done and queue is not None:
            first = queue.tasks[0]
            if first.what == "wait" and first.moment is not None and not first.moment.done:
                if depth > _DEEPEST:
                    raise RuntimeError("simulated streams wait for each other")
                if not self._finish(first.moment, force=force, depth=depth + 1):
                    return False
            if not self._step(queue, force=force):
                return False
        return True

    def tick(self) -> None:
        """Let the devices do what the schedule lets them do by themselves."""
        if getattr(self._inside, "on", False):
            return
        with self.lock, self._in():
            name, _, starved = self._schedule.partition(":")
            if name == "lazy":
                return
            if name == "random":
                for _ in range(self.random.choice((0, 0, 1, 2, 5))):
                    if self._busy:
                        self._step(self.random.choice(list(self._busy)))
                return
            going = True
            while going:
                going = False
                for queue in list(self._busy):
                    if name == "eager" or queue.main != (starved == "main"):
                        while self._step(queue):
                            going = True

    # -- calls of the driver ---------------------------------------------------------------------

    def call(self, what: str, device: int) -> None:
        """Do what every call of the driver does: take a moment, raise what is sticky."""
        if self._delays is not None and not getattr(self._inside, "on", False):
            time.sleep(self._delays.choice(_DELAYS_S))
        self._raise_failure(device)

    def _raise_failure(self, device: int) -> None:
        if device in self._failed and not getattr(self._inside, "on", False):
            raise RuntimeError(f"CUDA error: {self._failed[device]}")

    # -- captures --------------------------------------------------------------------------------

    def begin_capture(self, queue: StreamQueue, mode: str) -> Capture:
        """Let a stream's tasks be kept from now on, and not run."""
        with self.lock:
            capture = Capture(queues=[queue], thread=threading.get_ident(), mode=mode)
            queue.capture = capture
            self._captures.append(capture)
            return capture

    def end_capture(self, capture: Capture) -> None:
        """End a capture; raises when a call that is not allowed in one has broken it."""
        with self.lock:
            self._captures.remove(capture)
            for queue in capture.queues:
                queue.capture = None
        if capture.broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture "
                f"({capture.broken})"
            )

    def replay(self, capture: Capture) -> None:
        """Enqueue the kernels of a graph on the current stream of the device of its capture."""
        queue = self.current(capture.queues[0].device) if capture.queues else self.current()
        for task in capture.tasks:
            self.put(queue, task)

    def _no_capture(self, call: str) -> None:
        """Refuse a call while a graph is captured, as the modes of capture and thread want it."""
        mode, thread = int(self.driver.sim_capture_mode()), threading.get_ident()
        for capture in self._captures:
            own = capture.thread == thread
            if mode == _RELAXED or capture.mode == "relaxed":
                continue
            if own or (mode == 0 and capture.mode == "global"):
                capture.broken = call
                name = threading.current_thread().name
                self.problems.append(f"{call} in thread {name} during a capture")
                raise RuntimeError(
                    f"CUDA error: operation not permitted when stream is capturing ({call})"
                )

    # -- page-locked memory ----------------------------------------------------------------------

    def copying(self, start: int, nbytes: int, moment: Moment) -> None:
        """Note a copy from or to page-locked memory."""
        with self.lock:
            self._copies = [c for c in self._copies if not c.moment.done]
            self._copies.append(CopyUnderWay(start, start + nbytes, moment))

    def page_lock(self, start: int, nbytes: int) -> int:
        """Lock memory of the host; return the driver's status, 0 where that was done."""
        self.call("page lock", 0)
        self._no_capture("page locking")
        if not self.lockable:
            return 2
        return 0 if self.driver.sim_lock(start, nbytes) else 712

    def page_unlock(self, start: int) -> int:
        """Unlock memory of the host; return the driver's status."""
        self.call("page unlock", 0)
        nbytes = self.driver.sim_unlock(start)
        late = [
            c
            for c in self._copies
            if not c.moment.done and c.start < start + nbytes and start < c.end
        ]
        if late:
            self.problems.append(f"{len(late)} copies were under way to memory that is unlocked")
            for copy in late:
                self.synchronize(copy.moment, "page unlock")
        return 0 if nbytes else 713

    def is_page_locked(self, start: int, nbytes: int) -> bool:
        """Tell whether all of some memory is page-locked."""
        return bool(self.driver.sim_is_locked(start, nbytes))

    @property
    def page_locked(self) -> dict[int, int]:
        """Page-locked memory: where it starts, and its bytes."""
        room = self.driver.sim_locked_count() + 64
        pairs = (ctypes.c_uint64 * (2 * room))()
        found = self.driver.sim_locked(pairs, room)
        return {pairs[2 * i]: pairs[2 * i + 1] for i in range(min(found, room))}


_SKIPPED = (str(Path(__file__).parent), "/torch/", "/contextlib.py")


def _where(most: int = 4) -> tuple[str, ...]:
    """Return the innermost lines of programs that led here."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < most:
        name = frame.f_code.co_filename
        if not any(part in name for part in _SKIPPED):
            found.append(f"{name.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)
