"""`open_direct`: reads single boxes of tensors, verified, from many threads; cached blocks.

In it: how many blocks are kept, bytes of one read, after which stall it fails.

Of a file without digests just the bytes of the box are read.

`ckptd.checkpoint.load.read.execute` reads for a whole job: it agrees with other ranks and starts
threads. A program that reads thousands of small boxes, one after the other or from many threads,
reads here: files stay open, and a box costs its blocks and a few dozen microseconds.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.base.closing import Closing
from ckptd.base.grids.block import Region, box_region
from ckptd.base.grids.owners import ABSENT
from ckptd.base.grids.plan import PieceCopy, plan_once
from ckptd.checkpoint.load.files import LocalFiles, check_size
from ckptd.checkpoint.load.foreign import split_file
from ckptd.checkpoint.load.opening import foreign_format, nothing_counts, open_catalogue
from ckptd.checkpoint.load.plan import BlockLine, PlannedCopy, put, split
from ckptd.checkpoint.load.read import Fetcher, Windows
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.leases import hold_step, reading
from ckptd.checkpoint.root.opening import root_spec, trusting
from ckptd.errors import UsageError
from ckptd.types import Box

_log = logging.getLogger("ckptd")

_SPAN_BYTES = 8 << 20
"""Most bytes that one read spans, before it is rounded to whole blocks."""
_KEPT_BLOCKS = 16
"""Blocks that are kept: small tensors lie many in one, and are read one after the other."""
_STALL_S = 300.0


@contextmanager
def open_direct(
    url: str,
    step: int | str | None = None,
    generation: int | None = None,
    *,
    store_options: Mapping[str, Any] | None = None,
    holder: str = "",
) -> Iterator[DirectReader]:
    """Open a checkpoint, and keep it from being deleted meanwhile.

    Parameters
    ----------
    url
        A root, or a checkpoint of another format: a folder or a file.
    step
        Which checkpoint of a root, by step or tag; None takes the newest that counts.
    generation
        That of the checkpoint, wherever it is; None: on the line that counts.
    store_options
        As for `ckptd.Checkpointer`.
    holder
        What reads it, for the lease.

    Raises
    ------
    NotFoundError
        There is no checkpoint, or not of that step.
    ConflictError
        Kind ``busy``: each checkpoint was deleted before it could be leased.
    MismatchError, CorruptError, RefusedError
        It is damaged, or of a kind that is not read.
    """
    folder, file = split_file(url)
    with trusting(root_spec(folder, store_options)).open() as store:
        catalogue = open_catalogue(store, url, file, step if isinstance(step, int) else 0)
        lease = hold_step(catalogue, step, generation, holder=holder)
        if lease is None:
            raise nothing_counts(url)
        with (
            reading(lease, _log.warning) as commit,
            DirectReader(CkptdReader(catalogue, commit)) as boxes,
        ):
            boxes.format = foreign_format(catalogue)
            yield boxes


class DirectReader(Closing):
    """Reads boxes of one checkpoint's tensors. Threads may share it.

    Parameters
    ----------
    reader
        The checkpoint.

    Attributes
    ----------
    reader
        As given.
    format
        Of a foreign checkpoint; empty for ckptd's own.
    """

    format = ""

    def __init__(self, reader: CkptdReader) -> None:
        self.reader = reader
        self._filemap = reader.filemap
        store, files = reader.store, reader.manifest.files
        self._line = BlockLine([f.data_bytes for f in files])
        self._files = LocalFiles(store, files) if store.capabilities.local_files else None
        self._fetcher = Fetcher(
            store, reader.places, self._line, self._files, threads=1, stall_s=_STALL_S
        )
        self._checking = threading.Lock()
        self._checked: set[int] = set()
        self._windows = Windows()
        self._kept: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._keeping = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the files; a read that is under way ends first."""
        self._closed = True
        if self._files is not None:
            self._files.__exit__()

    def is_absent(self, tensor: int, box: Box) -> bool:
        """Return whether no file holds any element of a box; an empty box is not absent."""
        entry = self._filemap.tensors[tensor]
        if not self._filemap.owners[entry.owners].has_absent:
            return False
        places = self.reader.places
        found = [places.of(tensor, c.piece)[0] for c in self._copies(tensor, box_region(box))]
        return bool(found) and all(file == ABSENT for file in found)

    def read_into(
        self, tensor: int, box: Box, target: NDArray[np.uint8], strides: tuple[int, ...]
    ) -> None:
        """Write a box of a tensor into memory; what no file holds stays as it is there.

        Parameters
        ----------
        tensor
            Its number in the manifest.
        box
            What is read, in tensor coordinates.
        target
            The memory: one-dimensional, writable.
        strides
            Of the box in `target`, in elements; its first element is the first there.

        Raises
        ------
        CorruptError
            kinds ``digest``, ``truncated`` or ``replaced`` among others.
        UsageError
            kind ``closed``.
        """
        if self._closed:
            raise UsageError("the checkpoint was closed", kind="closed", where=self.reader.url)
        if not box.numel:
            return
        size = self._filemap.dtypes[tensor].itemsize
        loose: set[int] = set()
        for found in self._copies(tensor, box_region(box, strides)):
            file, start = self.reader.places.of(tensor, found.piece)
            if file == ABSENT:
                continue
            self._check(file)
            if not self.reader.places.is_digested(file):
                loose.add(file)
            for block in found.blocks:
                for part in split(block, size, _SPAN_BYTES):
                    self._read(PlannedCopy(file, start, size, part, 0), target)
        # Other programs write theirs again under the same name: what was read would be of two.
        for file in loose:
            check_size(self.reader.store, self.reader.manifest.files[file])

    def _copies(self, tensor: int, region: Region) -> list[PieceCopy]:
        # Not `plan`: boxes of this kind rarely come twice, and would push out the plans that do.
        return plan_once(self._filemap.grid_of(tensor), [region])

    def _check(self, file: int) -> None:
        """Check the size and the digest index of a file before its first byte is read."""
        if file in self._checked:
            return
        with self._checking:
            if file not in self._checked:
                self._fetcher.check_files([file], lambda: None, anywhere=self._files is None)
                self._checked.add(file)

    def _read(self, copy: PlannedCopy, target: NDArray[np.uint8]) -> None:
        if not self.reader.places.is_digested(copy.file):
            start, end = copy.span
            window = self._windows.get(end - start)
            self._fetcher.bring_bytes(copy.file, start, window.data)
            put(copy, copy.block, window, copy.start - start, target)
            return
        lo, hi = self._line.positions(copy.file, *copy.span)
        start, end = self._line.byte_range(copy.file, lo, hi)
        if hi - lo == 1:
            window = self._block(copy.file, lo, end - start)
        else:
            window = self._windows.get(end - start)
            self._fetcher.bring(copy.file, lo, window.data)
        put(copy, copy.block, window, copy.start - start, target)

    def _block(self, file: int, position: int, size: int) -> NDArray[np.uint8]:
        """Return one block of the line, which is good."""
        with self._keeping:
            found = self._kept.get(position)
            if found is not None:
                self._kept.move_to_end(position)
                return found
        found = np.empty(size, dtype=np.uint8)
        self._fetcher.bring(file, position, found.data)
        with self._keeping:
            self._kept[position] = found
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return found
