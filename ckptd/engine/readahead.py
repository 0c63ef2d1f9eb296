"""Asking the disk for a checkpoint's files while the load is still being planned.

A cold load is bound by the disk. Between the manifest and the first planned read lie tenths of a
second in which the live state is walked and matched; the disk would idle. It is a hint and nothing
more: bytes go to the page cache only, nothing is verified or kept, and failures are left to the
reads that follow, which report them properly.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptd.engine.localfiles import LocalFiles
from ckptd.engine.memory import available_bytes
from ckptd.errors import CkptdError
from ckptd.format.manifest import FileEntry
from ckptd.store.base import Store

__all__ = ["read_ahead"]

_STEP_BYTES = 4 << 20
_JOIN_S = 5.0


@contextmanager
def read_ahead(store: Store, files: Sequence[FileEntry]) -> Iterator[None]:
    """Have the start of `files` read into the page cache until the block ends.

    Does nothing for stores without local files, and stops at half of the memory that is available.
    The block's end waits for the step under way, at most a few seconds: its thread ends by itself.
    """
    if not store.capabilities.local_files or not files:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_read, args=(store, files, stop), name="ckptd-read-ahead", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_JOIN_S)


def _read(store: Store, files: Sequence[FileEntry], stop: threading.Event) -> None:
    left = available_bytes() // 2
    # Reads, not advice: advice fills the disk's queue, and the load's own small reads stand behind.
    view = memoryview(bytearray(_STEP_BYTES))
    with LocalFiles(store, files) as opened:
        for number, entry in enumerate(files):
            try:
                with opened.use(number) as fd:
                    if fd < 0:
                        continue  # packed: what the page cache would hold is not what is read
            except CkptdError:
                return
            for at in range(0, entry.data_bytes, _STEP_BYTES):
                left -= _STEP_BYTES
                if stop.is_set() or left < 0:
                    return
                try:
                    opened.read(number, at, view[: min(_STEP_BYTES, entry.data_bytes - at)])
                except CkptdError:
                    return  # the load's own reads meet the same failure and name it
