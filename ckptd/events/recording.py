"""Folders that this process writes its events to: `record`, ``CKPTD_EVENTS``."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path

from ckptd.errors import StoreError
from ckptd.events.bus import Subscription, at_first_event, subscribe
from ckptd.events.event import AnyEvent
from ckptd.events.sink import JsonlSink
from ckptd.version import __version__

FOLDER_VARIABLE = "CKPTD_EVENTS"
"""Environment variable that names a folder: processes that find it there write their events."""

_open: dict[Path, Recording] = {}
_lock = threading.RLock()  # an event in a signal handler may be the first, and record


class Recording:
    """A folder that gets this process's events until `close`; made by `record`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users = 0
        self._sink = JsonlSink(folder, version=__version__, dropped=self._count_dropped)
        self._subscription: Subscription = subscribe(self._write)

    def _count_dropped(self) -> int:
        return self._subscription.dropped

    def _write(self, event: AnyEvent) -> None:
        self._sink.write(event)

    def flush(self) -> bool:
        """Wait until what was emitted is in the file; False when that takes too long."""
        return self._subscription.flush()

    def close(self) -> None:
        """Write the events so far and stop, unless another user of this folder still records."""
        with _lock:
            if _open.get(self.folder) is not self:
                return  # closed, or of the process that this one was forked from
            self.users -= 1
            last = self.users <= 0
            if last:
                _open.pop(self.folder, None)
                if os.environ.get(FOLDER_VARIABLE) == str(self.folder):
                    del os.environ[FOLDER_VARIABLE]
        if last:
            self._subscription.close()
            self._sink.close()
        else:
            self.flush()


def record(folder: str | os.PathLike[str]) -> Recording:
    """Write the events of this process to `folder`, made where it is missing.

    Sets ``CKPTD_EVENTS``, so that processes that are started from now on write there too. The files
    are described in ``docs/reference/events.md``.

    Raises
    ------
    StoreError
        The folder cannot be made or written to.
    """
    path = Path(os.path.abspath(folder))
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    if not usable:
        raise _unusable(path, "not writable")
    with _lock:
        recording = _open.get(path)
        if recording is None:
            recording = _open[path] = Recording(path)
            if os.environ.get(FOLDER_VARIABLE) == str(path):
                recording.users += 1  # the environment's own: it lasts as long as the process
            os.environ[FOLDER_VARIABLE] = str(path)
        recording.users += 1
        return recording


def _unusable(path: Path, found: str) -> StoreError:
    return StoreError(
        "events cannot be written here",
        where=str(path),
        wanted="a folder that this process may write to",
        found=found,
    )


def _from_environment() -> None:
    """Record where the environment says, unless `record` put it there before the first event."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and Path(os.path.abspath(folder)) not in _open:
        record(folder)


def _close_all() -> None:
    for recording in list(_open.values()):
        recording.users = 0
        recording.close()


def _after_fork() -> None:
    """Start afresh in a child: files and threads are the parent's."""
    global _lock
    _lock = threading.RLock()
    _open.clear()
    at_first_event(_from_environment)


at_first_event(_from_environment)
atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
