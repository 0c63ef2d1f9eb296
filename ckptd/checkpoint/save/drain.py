"""A rank's share from its slot to a store: data file, digests, part; failed ones removed.

In it: what is removed and reported where a disk is full.

`drain` writes to the root while the slot is still filled; `stage_shard` and `put_shard` digest a
share once and copy it to near tiers. This code runs outside the trainer: it has no torch and no
loop. `ckptd.checkpoint.save.writer` has the loop, the process and the channel.
"""

from __future__ import annotations

import contextlib
import mmap
import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd import events
from ckptd.base.digest import Digester, digest_hex
from ckptd.checkpoint.format.container import build_header, encode_entries
from ckptd.checkpoint.format.manifest import FileEntry
from ckptd.checkpoint.format.names import (
    digests_key,
    file_key,
    part_key,
    ranked_chunk_name,
    whole_name,
)
from ckptd.checkpoint.root.index import saving
from ckptd.checkpoint.save.arena import Slot, half_staged
from ckptd.checkpoint.save.commit import blob_key, plan_key, reported_key, signer_of
from ckptd.checkpoint.save.dedup import (
    SLICE_BYTES,
    ChunkDedup,
    Search,
    after,
    digest_chunks,
    digest_table,
    refers,
    same_as,
)
from ckptd.checkpoint.save.messages import Base, Blob, RankPart, Refer, SaveRequest, Sealed
from ckptd.checkpoint.save.structure import RankPlan
from ckptd.errors import CkptdError, ProcessError, SaveError, UsageError
from ckptd.store.base import Store
from ckptd.types import DTYPES


class WrittenShare(msgspec.Struct, frozen=True):
    """Where a rank's share lies: in its own file, and `referred` bytes of it in older ones.

    Attributes
    ----------
    file
        As it will stand in the manifest.
    digests
        Of the chunks in it, joined.
    base, refers
        See `RankPart`.
    """

    file: FileEntry
    digests: bytes = b""
    base: Base | None = None
    refers: tuple[Refer, ...] = ()
    referred: int = 0


class _PackedRanges:
    """Ranges of a buffer as one data section; each slice is a copy of its own, page-aligned.

    Parameters
    ----------
    ranges
        ``(start, end)``, rising, not empty.
    """

    def __init__(self, data: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        self._data = data
        self._ranges = ranges
        self._ends = list(accumulate(end - start for start, end in ranges))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, wanted: slice) -> memoryview:
        start, end, _ = wanted.indices(len(self))
        # Direct I/O wants aligned memory, and stores keep what they are given until the commit.
        out = memoryview(mmap.mmap(-1, end - start))
        at = bisect_right(self._ends, start)
        done = 0
        while start + done < end:
            last = self._ranges[at][1]
            here = last - (self._ends[at] - (start + done))
            take = min(last - here, end - start - done)
            out[done : done + take] = self._data[here : here + take]
            done, at = done + take, at + 1
        return out


def _write_data(
    store: Store,
    key: str,
    header: bytes,
    data: memoryview | _PackedRanges,
    digester: Digester | None,
    wait: Callable[[int], None],
    progress: Callable[[int], None] = lambda _: None,
    span: str = "write",
) -> None:
    """Write a data file; durable on return but for its folder. None digests nothing."""
    digesting, writing = events.Activity("digest"), events.Activity(span)

    def add(part: memoryview) -> None:
        if digester is not None:
            with digesting.piece(len(part)):
                digester.update(part)

    error: BaseException | None = None
    try:
        with (
            ThreadPoolExecutor(1, thread_name_prefix="ckptd-digest") as pool,
            store.writer(key, len(header) + len(data)) as writer,
        ):
            with writing.piece(len(header)):
                # Page-aligned like the data, so that it does not break direct I/O.
                aligned = mmap.mmap(-1, len(header))
                aligned[:] = header
                writer.write(memoryview(aligned))
            for start in range(0, len(data), SLICE_BYTES):
                end = min(start + SLICE_BYTES, len(data))
                wait(end)
                part = data[start:end]
                done = pool.submit(add, part)
                with writing.piece(len(part)):
                    writer.write(part)
                done.result()
                progress(end)
            wait(len(data))
            with events.span("sync"):
                writer.commit()
    except BaseException as caught:
        error = caught
        raise
    finally:
        if digester is not None:
            digesting.emit(error)
        writing.emit(error)


class DataFile(msgspec.Struct, frozen=True):
    """Layout of a rank's whole data file: its header, its length and its chunks.

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


def data_file(
    rank_plan: RankPlan, save: SaveRequest, same: NDArray[np.bool_] | None = None
) -> DataFile | None:
    """Return what the data file of a save is made of; None when the rank has nothing to write.

    Parameters
    ----------
    same
        The chunks of the plan that are left out.
    """
    sizes, before = rank_plan.sizes, rank_plan.header
    if same is not None:
        left = np.flatnonzero(~same)
        sizes, before = sizes[left], encode_entries([rank_plan.entries[i] for i in left])
    ends = np.cumsum([*sizes.tolist(), *(e.nbytes for e in save.extra)], dtype=np.int64).tolist()
    if not ends:
        return None
    extra = []
    for e in save.extra:
        name = ranked_chunk_name(e.name, rank_plan.rank) if e.on_change else whole_name(e.name)
        extra.append((name, DTYPES["uint8"], (e.nbytes,)))
    if extra and not {e[0] for e in extra}.isdisjoint(e[0] for e in rank_plan.entries):
        raise UsageError("two chunks have one name", where=save.folder)
    metadata = {
        "format": "pt",
        "ckptd": f"step {save.step} generation {save.generation} rank {rank_plan.rank}",
    }
    header, data_bytes = build_header(extra, metadata, before)
    return DataFile(header, data_bytes, tuple(ends))


def drain(
    store: Store,
    rank_plan: RankPlan,
    save: SaveRequest,
    data: memoryview,
    wait: Callable[[int], None],
    sealed: Callable[[], Sealed],
    progress: Callable[[int, int], None],
    unchanged: ChunkDedup | None = None,
    beside: dict[str, bytes] | None = None,
) -> RankPart:
    """Write this rank's bytes and report its part; both are durable on return.

    The part of a rank that is alone is only returned: no other process waits for it.

    Parameters
    ----------
    data
        The slot, at least as long as what this rank writes.
    wait
        ``wait(nbytes)`` returns when that many bytes are staged, or raises.
    sealed
        Returns the seal of the whole snapshot, or raises.
    progress
        Called with bytes written and bytes in all.
    unchanged
        Finds what need not be written again; None: everything is.
    beside
        Gets what is little, by key, in place of the store: to be written with the manifest.

    A failure is reported as a part as well, when the store still takes it, so that the committer
    finds it at once and not by a deadline.

    Raises
    ------
    SaveError, StoreError
        What went wrong.
    """
    total = rank_plan.data_bytes + sum(e.nbytes for e in save.extra)
    small = total <= rank_plan.small_bytes
    # To find what did not change in so little costs more than to write it.
    unchanged = None if small else unchanged

    @cache
    def whole() -> Sealed:
        # The leader's tables go out while the last bytes are written: others then find them.
        seal = sealed()
        _put_blobs(store, save, seal.blobs, leaders=True)
        return seal

    def wait_for(upto: int) -> None:
        wait(upto)
        if upto == total:
            whole()

    with saving(store, save.name, save.attempt, rank_plan.rank):
        try:
            signer = signer_of(store, save)
            store = signer or store
            if len(data) < total:
                raise SaveError("the state is larger than its slot", wanted=total)
            search = None
            if unchanged is not None:
                search = unchanged.begin(save, rank_plan, lambda: wait(0))
            writing = _Writing(store, rank_plan, save, data[:total], wait_for, progress, beside)
            wrote = writing.write(unchanged, search)
            seal = whole()
            _put_blobs(store, save, seal.blobs, leaders=False)
            seeks = unchanged is not None and unchanged.seeks(rank_plan)
            part = share_part(rank_plan, save, data, wrote, seal, seeks=seeks, small=small)
            if signer is not None:
                part = msgspec.structs.replace(part, hashes=signer.hashes)
        except CkptdError as error:
            _give_up(store, rank_plan.rank, save, error)
            raise
        with events.span("part") as span:
            span.referred = wrote.referred
            if not rank_plan.is_alone:
                store.put(reported_key(save.folder, rank_plan.rank), part.encode())
    return part


def share_part(
    rank_plan: RankPlan,
    save: SaveRequest,
    data: memoryview,
    wrote: WrittenShare,
    seal: Sealed,
    *,
    seeks: bool = False,
    small: bool = False,
    root: str = "",
) -> RankPart:
    """Return what a rank reports of its share, which lies whole in `data`."""
    slots, values = (b"", b"") if small else rank_plan.witness(data)
    return RankPart(
        rank=rank_plan.rank,
        plan=save.plan,
        data_start=wrote.file.data_start,
        data_bytes=wrote.file.data_bytes,
        index=wrote.file.index,
        extra=save.extra,
        objects=save.objects,
        replicas=seal.replicas,
        slots=slots,
        values=values,
        digests=wrote.file.digests,
        metadata=save.metadata,
        base=wrote.base,
        refers=wrote.refers,
        seeks=seeks,
        root=root,
    )


def _give_up(store: Store, rank: int, save: SaveRequest, error: CkptdError) -> None:
    """Tell the committer, which looks here first, and free the space: a full disk must not fill up.

    No process can commit the removed files, since this rank has not reported its part.
    """
    failed = RankPart(rank=rank, plan=save.plan, error=error.to_dict())
    remove_file(store, rank, save)
    with contextlib.suppress(CkptdError):  # the caller gets the first error, the cause
        store.put(part_key(save.folder, rank), failed.encode())


def remove_file(store: Store, rank: int, save: SaveRequest) -> None:
    """Remove what `write_file` wrote, as far as that is possible."""
    file = file_key(save.folder, rank)
    with contextlib.suppress(CkptdError):  # as above
        store.delete([file, digests_key(file)])


def _put_blobs(store: Store, save: SaveRequest, blobs: Sequence[Blob], *, leaders: bool) -> None:
    """Store the bodies that parts refer to: the group leader's, or those that are not there yet."""
    for blob in blobs:
        key = blob_key(save.folder, blob.digest)
        if blob.leader == leaders and (leaders or not store.exists(key)):
            store.put(key, blob.body)


class _Writing(msgspec.Struct, frozen=True):
    """The writing of a rank's data file to the root.

    Attributes
    ----------
    data
        The data section with every chunk of the plan, which may still be filling up.
    wait
        ``wait(nbytes)`` returns when that many bytes are staged, or raises.
    progress, beside
        See `drain`.
    """

    store: Store
    plan: RankPlan
    save: SaveRequest
    data: memoryview
    wait: Callable[[int], None]
    progress: Callable[[int, int], None]
    beside: dict[str, bytes] | None

    def write(self, unchanged: ChunkDedup | None, search: Search | None) -> WrittenShare:
        """Write every chunk, or what the search does not find; remember digests for later saves."""
        if unchanged is None or search is None:
            wrote = self._file()
            if unchanged is not None and wrote.file.data_start:
                table = digest_table(wrote.digests)[: len(self.plan.chunks)]
                unchanged.wrote(self.save, after(self.save.plan, wrote.file, table))
            return wrote
        # All is digested as it is staged.
        digesting = events.Activity("digest")
        table = digest_chunks(self.data, self.plan.chunks, self.wait, digesting)
        self.wait(len(self.data))
        digesting.emit()
        held, plan = search.held, self.save.plan
        same = same_as(held, table, self.plan.sizes, search.folders)
        referred = int(self.plan.sizes[same].sum())
        unchanged.switch.found(referred, len(self.data))
        wrote = self._file(same if referred else None)
        if not referred:
            unchanged.wrote(self.save, after(plan, wrote.file, table))
            return wrote
        unchanged.wrote(self.save, after(plan, wrote.file, table, held, same))
        return WrittenShare(wrote.file, wrote.digests, search.base, refers(held, same), referred)

    def _file(self, same: NDArray[np.bool_] | None = None) -> WrittenShare:
        data = self.data
        file = data_file(self.plan, self.save, same)
        if file is None:
            return WrittenShare(
                FileEntry(file_key(self.save.folder, self.plan.rank), self.plan.rank)
            )
        source: memoryview | _PackedRanges = data
        if same is not None:
            source = _PackedRanges(data, _ranges(self.plan, same, len(data)))
        # The search has seen all of it.
        wait = self.wait if same is None else lambda upto: None
        elsewhere = len(data) - file.data_bytes

        def progress(done: int) -> None:
            self.progress(done + elsewhere, len(data))

        how = self.store, self.save, self.plan.rank, file, source, wait, progress
        return write_file(*how, small=len(data) <= self.plan.small_bytes, beside=self.beside)


def write_file(
    store: Store,
    save: SaveRequest,
    rank: int,
    file: DataFile,
    data: memoryview | _PackedRanges,
    wait: Callable[[int], None],
    progress: Callable[[int], None] = lambda _: None,
    *,
    small: bool = False,
    beside: dict[str, bytes] | None = None,
) -> WrittenShare:
    """Write header and data front to back, then the digest index; durable on return.

    Digesting runs one slice ahead of writing in another thread, both release the interpreter
    lock, so the digest costs nothing while the disk is the limit.

    Parameters
    ----------
    data
        The data section, which may still be filling up.
    wait
        ``wait(nbytes)`` returns when the data before that is in place, or raises.
    progress
        Called with the bytes written so far.
    small
        Return the digest index in the entry of the file, and write none. The file's name is durable
        when the caller has put something into its folder.
    beside
        See `drain`; of what is `small`.

    Raises
    ------
    StoreError, ConflictError
        As the store says. What is written by then may stay: see `remove_file`.
    """
    key = file_key(save.folder, rank)
    digester = Digester(file.ends)
    if small and beside is not None:
        wait(len(data))
        with events.span("digest", nbytes=len(data)):
            digester.update(data[: len(data)])
        with events.span("write", nbytes=len(file.header) + len(data)):
            beside[key] = file.header + data[: len(data)]
        progress(len(data))
    else:
        _write_data(store, key, file.header, data, digester, wait, progress)
    index = digester.index()
    raw = index.encode()
    if not small:
        store.put(digests_key(key), raw)
        store.sync(save.folder)
    inline = raw if small else b""
    entry = FileEntry(key, rank, len(file.header), file.data_bytes, digest_hex(raw), inline)
    return WrittenShare(entry, index.chunks)


def _ranges(rank_plan: RankPlan, same: NDArray[np.bool_], total: int) -> list[tuple[int, int]]:
    """Return the byte ranges that are written: of changed chunks, and of what is not the plan's."""
    out: list[tuple[int, int]] = []
    pieces = [(c.start, c.end) for c, s in zip(rank_plan.chunks, same, strict=True) if not s]
    for start, end in [*pieces, (rank_plan.data_bytes, total)]:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        elif end > start:
            out.append((start, end))
    return out


class StagedShard(msgspec.Struct, frozen=True):
    """A rank's share that lies whole in a slot: what near tiers keep, and the root is written from.

    Attributes
    ----------
    save, plan, seal
        What it is of, by which plan, and its seal.
    slot
        Where the data section lies, from the front; valid while `Slot.sealed` names the job.
    header
        What precedes the data section in the file; empty when the rank has nothing to write.
    data_bytes
        Length of the data section.
    small
        The other objects by key, the part last: where the part is, everything is.
    """

    save: SaveRequest
    plan: RankPlan
    seal: Sealed
    slot: Slot
    header: bytes
    data_bytes: int
    small: dict[str, bytes]

    @property
    def key(self) -> str:
        """Key of the data file."""
        return file_key(self.save.folder, self.plan.rank)

    @property
    def is_whole(self) -> bool:
        """Whether the slot still holds this very snapshot."""
        return self.slot.fd >= 0 and self.slot.sealed == self.save.job

    def check_whole(self) -> None:
        """Raise `SaveError`, where another snapshot has the slot."""
        if not self.is_whole:
            raise half_staged(f"the snapshot of step {self.save.step}", self.slot.staged)


def stage_shard(
    plan: RankPlan,
    save: SaveRequest,
    slot: Slot,
    wait: Callable[[int], None],
    sealed: Callable[[], Sealed],
    root: str = "",
) -> StagedShard:
    """Digest what a slot gets as it gets it, and return the share once the slot is sealed.

    Parameters
    ----------
    wait
        ``wait(nbytes)`` returns when so many bytes are staged, or raises.
    sealed
        Returns the seal of the whole snapshot, or raises.
    root
        See `RankPart`.

    Raises
    ------
    SaveError
        The snapshot will never be whole.
    """
    file = data_file(plan, save) or DataFile(b"", 0, ())
    digester = Digester(file.ends)
    with events.span("digest", nbytes=file.data_bytes):
        for start in range(0, file.data_bytes, SLICE_BYTES):
            end = min(start + SLICE_BYTES, file.data_bytes)
            wait(end)
            digester.update(slot.data[start:end])
    raw = digester.index().encode() if file.header else b""
    seal = sealed()
    key, index = file_key(save.folder, plan.rank), digest_hex(raw) if raw else ""
    entry = FileEntry(key, plan.rank, len(file.header), file.data_bytes, index)
    part = share_part(plan, save, slot.data, WrittenShare(entry), seal, root=root)
    small = {digests_key(key): raw} if raw else {}
    small[plan_key(save.folder)] = msgspec.msgpack.encode(plan.plan)
    small |= {blob_key(save.folder, b.digest): b.body for b in seal.blobs}
    small[part_key(save.folder, plan.rank)] = part.encode()
    return StagedShard(save, plan, seal, slot, file.header, file.data_bytes, small)


def put_shard(
    store: Store, shard: StagedShard, span: str = "upload", *, may_delete: bool = True
) -> None:
    """Write a share to a near tier: the bytes and digests that memory has. Its part goes last.

    Durable on return, where the store is. While the bytes are written, and after a failure, there
    is no part: a snapshot counts as complete by its parts, and one that was left by an agent that
    died would speak for bytes that are gone.

    Parameters
    ----------
    span
        What events call the writing of the data file.
    may_delete
        Whether the store lets this process delete; the memory of another node does not, and a
        request that it refuses would keep the slot for as long as a hung node takes to answer.

    Raises
    ------
    SaveError
        The slot was taken for another snapshot meanwhile.
    StoreError, TransientStoreError
        As the store says. What was written of it is removed as far as that is possible.
    """
    shard.check_whole()
    data = shard.slot.data[: shard.data_bytes]
    part = part_key(shard.save.folder, shard.plan.rank)
    try:
        if may_delete:
            store.delete([part])
        if shard.header:
            still: Callable[[int], None] = lambda _: shard.check_whole()  # noqa: E731
            _write_data(store, shard.key, shard.header, data, None, still, span=span)
            store.sync(shard.save.folder)
        for key, body in shard.small.items():
            store.put(key, body)
    except CkptdError:
        if may_delete:
            with contextlib.suppress(CkptdError):
                store.delete([part])
                remove_file(store, shard.plan.rank, shard.save)
        raise


def as_document(error: Exception) -> dict[str, str | None]:
    """Return what failed as it is sent; an error that is none of ckptd's is a bug, and named so."""
    if isinstance(error, CkptdError):
        return error.to_dict()
    where = "".join(traceback.format_exception(error)[-3:])
    return ProcessError(
        "the writing process failed unexpectedly", where=where, found=repr(error)
    ).to_dict()
