"""Probes of ``ckptd doctor``: create-only races, listings, ranges, space, speed, file systems.

In it: how many racers and rounds; bytes of the speed test; space wanted; what is said of tmpfs, NFS
and others.

The probes write small objects below a folder of their own and remove them again. A store that
cannot decide which writer creates an object first cannot keep checkpoints: both would believe
that they committed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from ckptd.base.runtime.host import Mount, mount_of
from ckptd.base.runtime.pool import run_all
from ckptd.errors import CkptdError, ConflictError, CorruptError, TransientStoreError, size_text
from ckptd.store.base import Store, StoreSpec

CREATE_ONLY = "create-only"
"""The check without which a store is refused."""

SCRATCH = "doctor-"
_RACERS = 8
_ROUNDS = 5
_LISTED = 16
_SMALL = 8
_PATIENCE_S = 60.0
_SPEED_BYTES = 64 << 20
_SPACE_FACTOR = 2

Status = Literal["ok", "info", "warn", "fail"]

_FILE_SYSTEMS: dict[str, tuple[Status, str]] = {
    "tmpfs": ("warn", "lies in memory: nothing survives a reboot"),
    "ramfs": ("warn", "lies in memory: nothing survives a reboot"),
    "overlay": ("warn", "the layer of a container: deleted with it, unless this is a volume"),
    "nfs": ("info", "fsync reaches the server; a lost reply to link is recognised"),
    "nfs4": ("info", "fsync reaches the server; a lost reply to link is recognised"),
    "lustre": ("info", "large files want stripes: lfs setstripe -c -1 on the root"),
    "vfat": ("warn", "has no hard links and no permissions"),
    "exfat": ("warn", "has no hard links and no permissions"),
}


class StoreCheck(msgspec.Struct, frozen=True):
    """The result of one probe.

    Attributes
    ----------
    name
        Stable.
    status
        ``ok``; ``info``: good to know; ``warn``: works, with a catch; ``fail``: does not work.
    message
        For people.
    """

    name: str
    status: Status
    message: str


def probe_store(
    spec: StoreSpec, store: Store, *, write: bool = True, speed: bool = True, size: int = 0
) -> Iterator[StoreCheck]:
    """Probe a store; yields each finding as it is made.

    What is written lies below ``doctor-<random>/`` and is removed again.

    Parameters
    ----------
    spec, store
        What it is opened from, and the open one.
    write
        Without it nothing is written, and only what can be read is looked at.
    speed
        Also write and read 64 MiB.
    size
        Bytes of a checkpoint: two of them should fit.
    """
    yield from _place(store, size)
    if not write:
        return
    here = store.local_path("x")
    fresh = here is not None and not here.parent.exists()
    try:
        yield from _writes(spec, store, speed)
    finally:
        if here is not None and fresh:
            with suppress(OSError):  # made here; no longer empty: another process uses it
                here.parent.rmdir()


def guarded(name: str, work: Callable[[], StoreCheck]) -> StoreCheck:
    """Return what `work` found, or its error as a finding."""
    try:
        return work()
    except CkptdError as error:
        where = f" ({error.where})" if error.where else ""
        found = f": {error.found}" if error.found else ""
        return StoreCheck(name, "fail", f"{error.message}{where}{found}")


# -- without writing -------------------------------------------------------------------------------


def _place(store: Store, size: int) -> Iterator[StoreCheck]:
    path = store.local_path("x")
    if path is None:
        durable = store.capabilities.durable
        text = "the store promises that acknowledged writes survive"
        yield StoreCheck(
            "durability", *(("info", text) if durable else ("warn", "does not survive"))
        )
        return
    folder = _existing(path.parent)
    mount = mount_of(folder)
    if mount is not None:
        yield _file_system(mount)
    usage = shutil.disk_usage(folder)
    yield _space(usage.free, usage.total, size)
    inodes = os.statvfs(folder)
    if inodes.f_files > 0 and inodes.f_favail < inodes.f_files // 100:
        yield StoreCheck("files", "warn", f"only {inodes.f_favail} more files fit (inodes)")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _file_system(mount: Mount) -> StoreCheck:
    fuse = mount.kind.startswith("fuse")
    default: tuple[Status, str] = (
        ("warn", "a file system in user space: see its documentation for what fsync guarantees")
        if fuse
        else ("ok", "files and their names are fsynced")
    )
    status, text = _FILE_SYSTEMS.get(mount.kind, default)
    return StoreCheck("durability", status, f"{mount.kind} at {mount.point}: {text}")


def _space(free: int, total: int, size: int) -> StoreCheck:
    text = f"{size_text(free)} of {size_text(total)} free"
    if free < _SPACE_FACTOR * size:
        return StoreCheck(
            "space", "warn", f"{text}: less than two checkpoints of {size_text(size)}"
        )
    return StoreCheck("space", "ok", text)


# -- with writing ----------------------------------------------------------------------------------


def _writes(spec: StoreSpec, store: Store, speed: bool) -> Iterator[StoreCheck]:
    folder = f"{SCRATCH}{secrets.token_hex(8)}/"
    first = guarded("write", lambda: _write(store, folder))
    yield first
    try:
        if first.status == "fail":
            return
        yield guarded(CREATE_ONLY, lambda: _race(spec, store, folder))
        yield guarded("listing", lambda: _listing(store, folder))
        yield guarded("ranges", lambda: _ranges(store, folder))
        if speed:
            yield guarded("latency", lambda: _latency(store, folder))
            yield guarded("speed", lambda: _speed(store, folder))
    finally:
        with suppress(CkptdError):
            store.delete([o.key for o in store.list(folder)])


def _write(store: Store, folder: str) -> StoreCheck:
    key = f"{folder}write"
    for body in (b"first", b"second"):
        store.put(key, body)
        if store.get(key) != body:
            return StoreCheck("write", "fail", "a get returns other bytes than the put wrote")
    store.delete([key])
    if store.exists(key):
        return StoreCheck("write", "fail", "an object that was deleted still exists")
    return StoreCheck("write", "ok", "put, replaced, read and deleted an object")


def _race(spec: StoreSpec, store: Store, folder: str) -> StoreCheck:
    """Have several writers create one object at the same moment, each through its own store."""
    if not store.capabilities.create_only:
        text = "this store has neither link(2) nor create-only puts: two writers of one step"
        return StoreCheck(CREATE_ONLY, "fail", f"{text} would both succeed")
    stores = [spec.open() for _ in range(_RACERS)]
    try:
        for number in range(_ROUNDS):
            error = _round(stores, f"{folder}race{number}")
            if error is not None:
                return StoreCheck(CREATE_ONLY, "fail", error)
    except TransientStoreError as error:
        # Says nothing about the store's promises: not a reason to refuse it.
        return StoreCheck("write", "fail", f"the race broke off: {error.message}: {error.found}")
    finally:
        for opened in stores:
            opened.close()
    return StoreCheck(CREATE_ONLY, "ok", f"{_ROUNDS} races of {_RACERS} writers: one winner each")


def _round(stores: list[Store], key: str) -> str | None:
    """Run one race; say what is wrong with its outcome, or None."""
    start = threading.Barrier(len(stores))
    winners: list[int] = []

    def run(racer: int) -> None:
        start.wait(_PATIENCE_S)
        try:
            stores[racer].put(key, f"racer {racer}".encode(), create_only=True)
        except ConflictError:
            return
        winners.append(racer)

    run_all(range(len(stores)), run, threads=len(stores), stall_s=_PATIENCE_S, what="the race")
    found = stores[0].get(key).decode(errors="replace")
    if len(winners) != 1:
        return f"{len(winners)} of {len(stores)} writers got the answer that they created an object"
    if found != f"racer {winners[0]}":
        return f"racer {winners[0]} created the object, which holds {found!r}"
    return None


def _listing(store: Store, folder: str) -> StoreCheck:
    names = [f"n{i:02d}" for i in range(_LISTED)]
    lagged = 0
    for name in names:
        store.put(f"{folder}list/{name}", b"x")
        lagged += name not in store.children(f"{folder}list/")
    store.delete([f"{folder}list/{name}" for name in names])
    stale = len(store.children(f"{folder}list/"))
    if not lagged and not stale:
        text = f"shows {_LISTED} objects at once, and none after they were deleted"
        return StoreCheck("listing", "ok", text)
    text = f"lags: {lagged} of {_LISTED} new objects hidden, {stale} deleted ones shown"
    if store.capabilities.consistent_list:
        return StoreCheck("listing", "fail", f"{text}: a store with consistent_list must not lag")
    return StoreCheck("listing", "info", f"{text}; ckptd asks by name here")


def _ranges(store: Store, folder: str) -> StoreCheck:
    body = secrets.token_bytes(256 << 10) * 5
    key = f"{folder}ranges"
    _put_large(store, key, body)
    buffer = bytearray(len(body) // 2)
    store.read_into(key, 4097, memoryview(buffer))
    if bytes(buffer) != body[4097 : 4097 + len(buffer)]:
        return StoreCheck("ranges", "fail", "a ranged read returns other bytes than were written")
    return StoreCheck("ranges", "ok", "a range in the middle of an object reads back")


def _put_large(store: Store, key: str, body: bytes) -> None:
    step = store.capabilities.block_bytes
    with store.writer(key, len(body)) as writer:
        for start in range(0, len(body), step):
            writer.write(memoryview(body)[start : start + step])
        writer.commit()


def _latency(store: Store, folder: str) -> StoreCheck:
    times = []
    for number in range(_SMALL):
        begin = time.perf_counter()
        store.put(f"{folder}small{number}", b"x" * 1024)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return StoreCheck("latency", "info", f"a small durable object takes {median * 1e3:.1f} ms")


def _speed(store: Store, folder: str) -> StoreCheck:
    body = secrets.token_bytes(1 << 20) * (_SPEED_BYTES >> 20)
    begin = time.perf_counter()
    _put_large(store, f"{folder}large", body)
    written = time.perf_counter()
    buffer = bytearray(len(body))
    store.read_into(f"{folder}large", 0, memoryview(buffer))
    read = time.perf_counter()
    if buffer != body:
        raise CorruptError("a read differs from what was written", kind="digest", where=store.url)
    rates = [size_text(len(body) / s) for s in (written - begin, read - written)]
    text = f"{size_text(_SPEED_BYTES)}: durable at {rates[0]}/s, read at {rates[1]}/s"
    return StoreCheck("speed", "info", f"{text} (one file; read possibly from a cache)")
