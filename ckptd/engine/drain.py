"""One attempt of one rank, from slot to part; and, for the committer, to the commit.

This is the code that runs outside the trainer. It holds no torch and no loop: `ckptd.engine.worker`
brings the loop, the process and the channel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd import events
from ckptd.engine.commit import blob_key, witness_plan
from ckptd.engine.filewriter import FileResult, write_file
from ckptd.engine.job import Blob, Part, Save, Sealed
from ckptd.engine.structure import SavePlan
from ckptd.engine.telling import saving
from ckptd.errors import CkptdError, SaveError
from ckptd.format.container import build_header
from ckptd.format.filemap import ChunkRef
from ckptd.format.names import (
    digests_key,
    file_key,
    part_key,
    ranked_chunk_name,
    whole_name,
)
from ckptd.format.witness import gather
from ckptd.layout.region import piece_regions
from ckptd.store.base import Store
from ckptd.types import DTYPES

__all__ = ["DataFile", "RankPlan", "data_file", "drain", "put_blobs"]


class RankPlan:
    """What one rank writes under a plan: chunks, header entries, witness slots; computed once."""

    def __init__(self, plan: SavePlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.chunks: Sequence[ChunkRef] = plan.filemap.chunks(rank)
        self.entries = plan.filemap.header_entries(rank)
        self.data_bytes = self.chunks[-1].end if self.chunks else 0
        self._witness: list[tuple[int, int, int, Any, Any]] | None = None

    def witness(self, data: memoryview) -> tuple[bytes, bytes]:
        """Return the slots this rank sees and their values, for a complete data section."""
        if self._witness is None:
            self._witness = self._select()
        buffer = np.frombuffer(data, dtype=np.uint8)
        slots: list[NDArray[np.uint32]] = []
        values: list[NDArray[np.uint8]] = []
        for itemsize, start, end, where, elements in self._witness:
            slots.append(where)
            values.append(gather(buffer[start:end], itemsize, elements))
        if not slots:
            return b"", b""
        return np.concatenate(slots).tobytes(), np.concatenate(values).tobytes()

    def _select(self) -> list[tuple[int, int, int, Any, Any]]:
        witness = witness_plan(self.plan)
        out = []
        for chunk in self.chunks:
            slots, elements = witness.select(chunk.tensor, piece_regions(chunk.piece))
            if len(slots):
                itemsize = self.plan.filemap.dtypes[chunk.tensor].itemsize
                out.append((itemsize, chunk.start, chunk.end, slots.astype("<u4"), elements))
        return out


@dataclass(frozen=True, slots=True)
class DataFile:
    """What a rank's whole data file is made of, besides the bytes.

    Attributes
    ----------
    header
        Padded; its length is where the data begins.
    data_bytes
        Length of the data section.
    ends
        End of each chunk in it, rising.
    """

    header: bytes
    data_bytes: int
    ends: tuple[int, ...]


def data_file(rank_plan: RankPlan, save: Save) -> DataFile | None:
    """Return what the data file of a save is made of; None when the rank has nothing to write."""
    if not rank_plan.entries and not save.extra:
        return None
    entries = list(rank_plan.entries)
    ends = [c.end for c in rank_plan.chunks]
    for e in save.extra:
        name = ranked_chunk_name(e.name, rank_plan.rank) if e.on_change else whole_name(e.name)
        entries.append((name, DTYPES["uint8"], (e.nbytes,)))
        ends.append((ends[-1] if ends else 0) + e.nbytes)
    metadata = {
        "format": "pt",
        "ckptd": f"step {save.step} generation {save.generation} rank {rank_plan.rank}",
    }
    header, data_bytes = build_header(entries, metadata)
    return DataFile(header, data_bytes, tuple(ends))


def drain(
    store: Store,
    rank_plan: RankPlan,
    save: Save,
    data: memoryview,
    wait: Callable[[int, float], None],
    sealed: Callable[[float], Sealed],
    progress: Callable[[int, int], None],
) -> None:
    """Write this rank's bytes and report its part; both are durable on return.

    Parameters
    ----------
    data
        The slot, at least as long as what this rank writes.
    wait
        ``wait(nbytes, timeout_s)`` returns when that many bytes are staged, or raises.
    sealed
        ``sealed(timeout_s)`` returns what was said when the snapshot was whole, or raises.
    progress
        Called with bytes written and bytes in all.

    A failure is reported as a part as well, when the store still takes it, so that the committer
    learns of it at once and not by a deadline.

    Raises
    ------
    SaveError, StoreError
        What went wrong.
    """
    limit = time.monotonic() + save.timeout_s

    def left() -> float:
        return max(1.0, limit - time.monotonic())

    @cache
    def whole() -> Sealed:
        # The leader's tables go out while the last bytes are written: others then find them.
        seal = sealed(left())
        put_blobs(store, save, seal.blobs, leaders=True)
        return seal

    try:
        result = _write(store, rank_plan, save, data, lambda n: wait(n, left()), whole, progress)
        seal = whole()
        slots, values = rank_plan.witness(data)
        put_blobs(store, save, seal.blobs, leaders=False)
        part = Part(
            rank=rank_plan.rank,
            plan=save.plan,
            data_start=result.data_start,
            data_bytes=result.data_bytes,
            index=result.index,
            extra=save.extra,
            objects=save.objects,
            replicas=seal.replicas,
            slots=slots,
            values=values,
            metadata=save.metadata,
        )
    except CkptdError as error:
        _give_up(store, rank_plan.rank, save, error)
        raise
    with saving(store, save.name, save.attempt, rank_plan.rank), events.span("part"):
        store.put(part_key(save.folder, rank_plan.rank), part.encode())


def _give_up(store: Store, rank: int, save: Save, error: CkptdError) -> None:
    """Tell the committer, and free the space: a full disk must not fill up with failed attempts.

    Nobody can commit what is removed here, since this rank has not reported its part.
    """
    failed = Part(rank=rank, plan=save.plan, error=error.to_dict())
    file = file_key(save.folder, rank)
    with contextlib.suppress(CkptdError):  # the caller hears the first error, the cause
        store.delete([file, digests_key(file)])
    with contextlib.suppress(CkptdError):
        store.put(part_key(save.folder, rank), failed.encode())


def put_blobs(store: Store, save: Save, blobs: Sequence[Blob], *, leaders: bool) -> None:
    """Store the bodies that parts refer to: the group leader's, or those that are not there yet."""
    for blob in blobs:
        key = blob_key(save.folder, blob.digest)
        if blob.leader == leaders and (leaders or not store.exists(key)):
            store.put(key, blob.body)


def _write(
    store: Store,
    rank_plan: RankPlan,
    save: Save,
    data: memoryview,
    wait: Callable[[int], None],
    whole: Callable[[], Sealed],
    progress: Callable[[int, int], None],
) -> FileResult:
    file = data_file(rank_plan, save)
    if file is None:
        return FileResult(0, 0, "")
    if len(data) < file.data_bytes:
        raise SaveError("the slot is too small", kind="internal", wanted=file.data_bytes)

    def wait_for(upto: int) -> None:
        wait(upto)
        if upto == file.data_bytes:
            whole()

    key = file_key(save.folder, rank_plan.rank)
    result = write_file(
        store,
        key,
        file.header,
        data[: file.data_bytes],
        file.ends,
        wait_for,
        lambda done: progress(done, file.data_bytes),
    )
    store.sync(save.folder)
    return result
