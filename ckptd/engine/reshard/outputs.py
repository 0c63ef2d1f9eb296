"""Target files under way: written front to back, digested as they grow."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.digester import Digester
from ckptd.format.digest import DigestIndex
from ckptd.store.base import Store, Writer

__all__ = ["FileDraft", "Output", "Outputs"]

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileDraft:
    """A file to write.

    Attributes
    ----------
    number
        In the target's file table.
    key
        Where it goes.
    header
        Padded header.
    data_bytes
        Length of the data section.
    ends
        End of each chunk in it.
    """

    number: int
    key: str
    header: bytes
    data_bytes: int
    ends: Sequence[int]


class Output:
    """One file; used by one thread."""

    def __init__(self, store: Store, draft: FileDraft) -> None:
        self.draft = draft
        self._digester = Digester(draft.ends)
        self._written = 0
        self._writer: Writer = store.writer(draft.key, len(draft.header) + draft.data_bytes)
        self._writer.write(_aligned(draft.header))

    def append(self, data: U8) -> bool:
        """Write the next stretch; tells whether the file is full."""
        view = data.data
        self._writer.write(view)
        self._digester.update(view)
        self._written += len(view)
        return self._written == self.draft.data_bytes

    def commit(self) -> DigestIndex:
        """Return the digests when every byte is durable."""
        self._writer.commit()
        return self._digester.index()

    def abort(self) -> None:
        """Give the file up."""
        self._writer.abort()


class Outputs:
    """The files of one group: each is opened when its first bytes come, and closed when full.

    Parameters
    ----------
    store
        Where they go, without a `Retry` around it (which would keep whole files in memory).
    drafts
        The files, by number.
    on_done
        Called for each when it is durable.
    """

    def __init__(
        self, store: Store, drafts: dict[int, FileDraft], on_done: Callable[..., None]
    ) -> None:
        self._store = store
        self._drafts = drafts
        self._on_done = on_done
        self._open: dict[int, Output] = {}

    def append(self, file: int, data: U8) -> None:
        """Write the next stretch of a file."""
        output = self._open.get(file)
        if output is None:
            output = self._open[file] = Output(self._store, self._drafts[file])
        if output.append(data):
            self._finish(file)

    def finish_empty(self) -> None:
        """Write the files that have chunks and no bytes."""
        for number, draft in self._drafts.items():
            if not draft.data_bytes:
                self._open[number] = Output(self._store, draft)
                self._finish(number)

    def _finish(self, file: int) -> None:
        output = self._open[file]
        index = output.commit()
        del self._open[file]
        self._on_done(output.draft, index)

    def abort(self) -> None:
        """Give up what is not complete. Never raises."""
        for output in self._open.values():
            output.abort()
        self._open.clear()


def _aligned(header: bytes) -> memoryview:
    """Copy the header into page-aligned memory, so that it does not break direct I/O."""
    buffer = mmap.mmap(-1, len(header))
    buffer[:] = header
    return memoryview(buffer)
