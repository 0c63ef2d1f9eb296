"""`Slot`, `Slots`: shared memory that a snapshot is copied into; how many, reuse, out of memory.

In it: the most slots; how long a save waits for a free one, and the error; sizes of pieces; slots
that keep snapshots in memory.

It has one or more slots, a segment each. A new one is filled by system calls (`Slot.put`): the
kernel takes a page and copies into it, in one pass, where touching a fresh page fills it with zeros
first; and memory that is not there is an error, where touching a page without memory behind it is a
SIGBUS. What was filled once is warm, and later snapshots are copied straight into it.

A slot is filled front to back under a counter, so that writing begins while copying still goes on,
and then sealed: a snapshot is whole if and only if its slot carries the seal of its job. Slots of
their own grow one by one, while the others keep what is sealed in them.

A memfd on Linux (containers give ``/dev/shm`` 64 MB), an unlinked temporary file elsewhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ckptd.base.runtime.host import available_bytes, limit_of
from ckptd.base.runtime.memory import anonymous_file, copy_memory, gather, map_pages, read_memory
from ckptd.base.runtime.ownership import in_child
from ckptd.errors import CkptdError, SaveError, size_text

CONTROL_BYTES = 4096
MOST_SLOTS = 8
_JOB, _STAGED, _SEAL = range(3)
_WORDS = 3
_POLL_S = 0.0005
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10


class Slot:
    """A shared segment for one snapshot: its bytes behind one control page.

    Every word of the control page is an aligned store of 8 bytes, which is atomic on every
    platform that torch runs on; x86 and the barriers inside the interpreter's own locks keep it
    behind the copies that came before it.

    Parameters
    ----------
    number
        Which of the arena's slots.
    nbytes
        Size of the data.
    fd
        Descriptor of an existing segment (the writing process); a new one is made without it.

    Raises
    ------
    SaveError
        kind ``no-memory``: the memory cannot be had.
    """

    def __init__(self, number: int, nbytes: int, fd: int | None = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.before_close: Callable[[], None] | None = None
        """Called once before the memory goes; set by code that page-locks it."""
        size = CONTROL_BYTES + max(nbytes, 1)
        self.fd = _reserve(size) if fd is None else fd
        self._fresh = fd is None
        """Whether there may be no memory behind some of it."""
        try:
            # Not populated: what is not filled yet would be filled with zeros by this process,
            # while the other one copies.
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        except OSError as error:  # a limit on addresses, or a segment that is too small
            os.close(self.fd)
            raise _no_memory(size, error) from error
        self._control = (ctypes.c_uint64 * _WORDS).from_buffer(self._map)
        self.data = memoryview(self._map)[CONTROL_BYTES : CONTROL_BYTES + nbytes]
        in_child(self._leave_to_parent)

    def begin(self, job: int) -> None:
        """Empty it for a job (from 1). What was sealed in it is gone before anything else."""
        self._control[_SEAL] = 0
        self._control[_STAGED] = 0
        self._control[_JOB] = job

    @property
    def staged(self) -> int:
        """Bytes of data that are in place, from the front."""
        return self._control[_STAGED]

    @staged.setter
    def staged(self, nbytes: int) -> None:
        try:
            self._control[_STAGED] = nbytes
        except AttributeError:
            raise _closed() from None

    def put(self, start: int, source: NDArray[np.uint8]) -> None:
        """Copy bytes to their place.

        Raises
        ------
        SaveError
            kind ``no-memory``: there is none for them. Kind ``aborted``: the slot is closed.
        """
        if self._fresh:
            self._write(start, source.data)
        else:
            np.copyto(self.place(start, start + len(source)), source)

    def fill(self, runs: NDArray[np.int64]) -> None:
        """Copy runs of bytes that nobody frees meanwhile; the kernel need not be able to read them.

        Parameters
        ----------
        runs
            As of `read`.

        Raises
        ------
        SaveError
            As of `put`.
        """
        if self._fresh:
            self.read(runs)
            return
        copy_memory(runs + np.array((0, self.place(0, self.nbytes).ctypes.data, 0)))

    def read(self, runs: NDArray[np.int64]) -> None:
        """Copy runs of bytes that another thread may free meanwhile: an error then, and no signal.

        Parameters
        ----------
        runs
            A row each: the address, the place, and the length in bytes.

        Raises
        ------
        SaveError
            As of `put`.
        """
        if self._fresh:
            small, ends = runs[:, 2] <= _SMALL_BYTES, runs[:, 1] + runs[:, 2]
            joined = small[1:] & small[:-1] & (runs[1:, 1] == ends[:-1])
            for some in np.split(runs, np.flatnonzero(~joined) + 1):
                self._write_runs(some)
            return
        place = self.place(0, self.nbytes)
        try:
            read_memory(runs + np.array((0, place.ctypes.data, 0)))
        except OSError as error:
            raise self._unfilled(error) from error

    def _write_runs(self, runs: NDArray[np.int64]) -> None:
        """Write runs that follow one another; small ones by one call for many."""
        if len(runs) > 1:
            with suppress(OSError):  # below one of them says what is wrong
                gather(self.fd, CONTROL_BYTES + int(runs[0, 1]), runs[:, 0], runs[:, 2])
                return
        for at, start, nbytes in runs.tolist():
            self._write(start, memoryview((ctypes.c_ubyte * nbytes).from_address(at)).cast("B"))

    def _write(self, start: int, view: memoryview) -> None:
        at = CONTROL_BYTES + start
        while len(view):
            try:
                done = os.pwrite(self.fd, view[:_PIECE_BYTES], at)
            except OSError as error:
                raise self._unfilled(error) from error
            view, at = view[done:], at + done

    def place(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return a part of the data, with memory behind it, to be written to.

        Raises
        ------
        SaveError
            As of `put`.
        """
        if end <= start:
            return np.empty(0, np.uint8)
        if self._fresh:
            try:
                _allocate(self.fd, CONTROL_BYTES + start, end - start)
            except OSError as error:
                raise self._unfilled(error) from error
        return np.frombuffer(self.data, np.uint8, end - start, start)

    def _unfilled(self, error: OSError) -> SaveError:
        return _closed() if self.fd < 0 else _no_memory(self.nbytes, error)

    def allocate(self) -> None:
        """Have memory behind all of it, for what fills it where it lies.

        Raises
        ------
        SaveError
            kind ``no-memory``.
        """
        if self._fresh:
            self.place(0, self.nbytes)
            self._warm()

    def touch(self) -> None:
        """Have memory behind it, in huge pages where there are such, until a job begins in it.

        What is left after that is at least as much again: more is not taken ahead of need.
        """
        control, size = self._control, CONTROL_BYTES + self.nbytes  # keeps the mapping
        with suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(control)
        for at in range(0, size, _PIECE_BYTES):
            wanted = not control[_JOB] and available_bytes() >= self.nbytes
            if not (wanted and map_pages(start + at, min(_PIECE_BYTES, size - at), write=True)):
                break

    def seal(self) -> None:
        """Say that the snapshot is whole. Comes last."""
        self._control[_SEAL] = self._control[_JOB]

    def warm_up(self) -> None:
        """Map what was filled, so that the next snapshot is copied without page faults.

        Called once a snapshot is whole, by a thread that is not waited for.
        """
        if self._fresh and self.sealed:
            with suppress(SaveError):  # it was made for more than there is
                self.place(self.staged, self.nbytes)
                self._warm()

    def _warm(self) -> None:
        start = ctypes.addressof(self._control)
        size = CONTROL_BYTES + self.nbytes
        for at in range(0, size, _PIECE_BYTES):  # a page fault finds what this could not do
            # Read, since what is there is mapped with its neighbours then, and can be written to.
            map_pages(start + at, min(_PIECE_BYTES, size - at))
        self._fresh = False

    @property
    def sealed(self) -> int:
        """The job whose whole snapshot this is; 0 while it is being filled."""
        seal, job = self._control[_SEAL], self._control[_JOB]
        return seal if seal == job else 0

    def wait(self, job: int, nbytes: int, alive: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the first `nbytes` bytes of a job's snapshot are in place.

        Raises
        ------
        SaveError
            The trainer died, or stopped for `timeout_s`, in mid-copy; what is staged is no
            consistent state and must not be written.
        """
        end = time.monotonic() + timeout_s
        while not self._has(job, nbytes):
            if (not alive() and not self._has(job, nbytes)) or time.monotonic() > end:
                raise half_staged(f"{nbytes} bytes staged", self.staged)
            time.sleep(_POLL_S)

    def _leave_to_parent(self) -> None:
        """Unmap the memory in a forked child; the lock for devices stays the parent's."""
        self.before_close = None
        self.close()

    def _has(self, job: int, nbytes: int) -> bool:
        return self._control[_JOB] == job and self._control[_STAGED] >= nbytes

    def close(self) -> None:
        """Release the mapping and the descriptor; views of `data` must be gone. Idempotent."""
        if self.fd < 0:
            return
        if self.before_close is not None:
            self.before_close()
        try:
            self.data.release()
            vars(self).pop("_control", None)  # an interrupt may have come after this
            self._map.close()
        except BufferError:  # an exported view still lives: the mapping goes when it does
            pass
        # First: a thread that still fills it must not write to what gets the number next.
        fd, self.fd = self.fd, -1
        os.close(fd)


def _closed() -> SaveError:
    return SaveError("the slot was closed while it was filled", kind="aborted")


def half_staged(wanted: str, staged: int) -> SaveError:
    """Return the error for a snapshot that will never be complete."""
    found = f"{staged} bytes staged"
    return SaveError("the trainer died before its state was copied", wanted=wanted, found=found)


def slots_for(nbytes: int, wanted: int | None, room: int) -> int:
    """Return how many slots of `nbytes` to have.

    Parameters
    ----------
    wanted
        What the user asked for; None leaves it to the memory: two where a quarter of what is
        available holds both, else one.
    room
        Bytes that may still be allocated.
    """
    if wanted is not None:
        return max(1, min(wanted, MOST_SLOTS))
    return 2 if 2 * nbytes <= room // 4 else 1


def _reserve(size: int) -> int:
    """Return the descriptor of a new segment, with memory behind its control page only."""
    # Beyond a container's limit nothing fails: the kernel kills the trainer in mid-allocation.
    if size > (room := available_bytes()):
        raise _no_memory(size, f"{size_text(room)} available")
    try:
        fd = anonymous_file("ckptd-slot")
    except OSError as error:
        raise _no_memory(size, error) from error
    try:
        os.ftruncate(fd, size)
        _allocate(fd, 0, CONTROL_BYTES if hasattr(os, "memfd_create") else size)
        if hasattr(os, "memfd_create"):
            # A reader maps what it is sure of: touching what was cut off would kill it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        os.close(fd)
        raise _no_memory(size, error) from error
    return fd


def _allocate(fd: int, start: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)


def _no_memory(size: int, found: object) -> SaveError:
    limit = limit_of(found)
    return SaveError(
        f"no memory to stage the state in{'' if limit is None else ': a limit of this process'}",
        kind="no-memory",
        wanted=f"{size_text(size)} of shared memory",
        found=found,
        hint=limit
        or "save less per rank (shard over more ranks), or raise the container's memory limit",
    )


KEEPING = ("memory", "peer")
"""Near tiers whose newest complete snapshot lies, wholly or in part, in slots of the trainers."""

_log = logging.getLogger("ckptd")


class Slots:
    """The arena of one rank, as the trainer sees it. Thread-safe.

    A slot is *taken* by a save until it is read no more and what became of the snapshot is
    known; it is *kept* while it holds the newest complete snapshot of a near tier: that one is not
    overwritten by a half-made one, as long as there is memory for another slot.

    Parameters
    ----------
    wanted
        How many; None leaves it to the memory there is.
    announce
        Tells the writing process of a new slot.
    withdraw
        Called before the memory of a slot goes.
    """

    def __init__(
        self,
        wanted: int | None,
        announce: Callable[[Slot], None],
        withdraw: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self._wanted = wanted
        self._announce = announce
        self._withdraw = withdraw
        self._free = threading.Condition()
        self._arena: dict[int, Slot] = {}
        self._taken: dict[int, int] = {}
        self._kept: dict[str, int] = {}
        self._most = 1
        self._sacrificed: set[str] = set()
        self._dead: CkptdError | None = None

    @property
    def kept(self) -> dict[str, int]:
        """The job whose snapshot is the newest complete one of each near tier that keeps one."""
        with self._free:
            return {tier: self._arena[number].sealed for tier, number in self._kept.items()}

    @property
    def full(self) -> bool:
        """Whether a save that began now would wait for a slot."""
        with self._free:
            return self._is_full()

    def acquire(self, nbytes: int, timeout_s: float) -> Slot:
        """Wait until a slot is free and return it, at least `nbytes` large.

        Raises
        ------
        SaveError
            Earlier saves did not leave a slot within `timeout_s`; kind ``no-memory``.
        CkptdError
            What `fail` was given.
        """
        with self._free:
            free = self._free.wait_for(lambda: not self._is_full() or self._dead, timeout_s)
            if self._dead is not None:
                raise self._dead
            if not free:
                raise SaveError(
                    "earlier saves still occupy the arena",
                    wanted=f"a free slot within {timeout_s:.0f} s",
                    found=f"{len(self._taken)} saves under way",
                    hint="save less often, or give the store more bandwidth",
                )
            number = self._choose(nbytes)
            slot = self._arena.get(number)
            if slot is not None and slot.nbytes >= nbytes:
                return slot
            try:
                return self._make(number, nbytes)
            except SaveError:
                if not self._taken or slot is not None:
                    raise
            _log.info("no memory for another slot: saves wait for one of %d slots", number)
            self._most = self._wanted = len(self._arena)
        return self.acquire(nbytes, timeout_s)

    def prepare(self, nbytes: int) -> None:
        """Make the first slot, where there is none, ahead of the save that needs it.

        Raises
        ------
        SaveError
            kind ``no-memory``: there is less than twice as much.
        """
        with self._free:
            if self._arena or self._dead is not None:
                return
            if 2 * nbytes > (room := available_bytes()):
                raise _no_memory(nbytes, f"{size_text(room)} available")
            self._make(0, nbytes)

    def _is_full(self) -> bool:
        # Where every slot is kept and no save is under way, one must be given up.
        grown = bool(self._arena) and len(self._arena) >= self._most
        return bool(self._taken) and grown and not self._idle()

    def _idle(self) -> list[Slot]:
        held = {*self._taken, *self._kept.values()}
        return [s for s in self._arena.values() if s.number not in held]

    def _choose(self, nbytes: int) -> int:
        """Return the number of the slot for the next save: an idle one, else a new one."""
        if idle := self._idle():
            return max(idle, key=lambda s: s.nbytes).number
        if len(self._arena) < self._most or not self._kept or self._may_grow(nbytes):
            # Never one that is taken: numbers have gaps where a larger slot could not be had.
            return next(n for n in range(MOST_SLOTS + 1) if n not in self._arena)
        tier = next(t for t in KEEPING if t in self._kept)
        if tier not in self._sacrificed:
            self._sacrificed.add(tier)
            _log.warning(
                "no memory for a second slot: while a snapshot is copied the %s tier holds no "
                "complete one",
                tier,
            )
        return self._kept[tier]

    def _may_grow(self, nbytes: int) -> bool:
        """Tell whether there is memory for one more: near tiers may each keep another snapshot."""
        needed = 1 + len({*self._kept.values()})
        if self._wanted is not None or len(self._arena) >= min(needed, MOST_SLOTS):
            return False
        return nbytes <= available_bytes() // 4

    def _make(self, number: int, nbytes: int) -> Slot:
        old = self._arena.pop(number, None)
        if old is not None:  # first, so that both need not fit
            self._kept = {t: n for t, n in self._kept.items() if n != number}
            self._withdraw(old)
            old.close()
        slot = Slot(number, nbytes)
        try:
            self._most = slots_for(nbytes, self._wanted, available_bytes() + nbytes)
            # First: one that is interrupted before the writing process knows it is of no use.
            self._announce(slot)
        except BaseException:
            slot.close()
            raise
        self._arena[number] = slot
        return slot

    def take(self, slot: Slot, job: int) -> None:
        """Give a slot to a job: what lay in it is gone."""
        with self._free:
            self._kept = {t: n for t, n in self._kept.items() if n != slot.number}
            self._taken[slot.number] = job

    def keep(self, tier: str, job: int) -> None:
        """Say that a job's snapshot is the newest complete one of a near tier."""
        with self._free:
            number = next((n for n, j in self._taken.items() if j == job), None)
            if tier in KEEPING and number is not None:
                self._kept[tier] = number
                self._free.notify_all()

    def release(self, job: int) -> None:
        """Say that a job needs its slot no more."""
        with self._free:
            self._taken = {n: j for n, j in self._taken.items() if j != job}
            self._free.notify_all()

    def fail(self, error: CkptdError) -> None:
        """Make every `acquire` from now on raise `error`; a first error stays."""
        with self._free:
            self._dead = self._dead or error
            self._free.notify_all()

    def close(self) -> None:
        """Free all slots of this process. Idempotent."""
        with self._free:
            for slot in self._arena.values():
                slot.close()
            self._arena.clear()
