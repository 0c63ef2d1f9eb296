"""Findings of a verification; witness read and compared while values stream by.

In it: how many findings are kept; largest witness file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from threading import Lock

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.base.digest import Digester, digest_hex, unlike
from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import Piece
from ckptd.base.grids.owners import distinct
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.invariants import check_files
from ckptd.checkpoint.format.manifest import FileEntry, Manifest, OfCheckpoint, WitnessEntry
from ckptd.checkpoint.format.names import WITNESS, CommitName
from ckptd.checkpoint.format.witness import DATA, Witness, WitnessPlan, blind, compare, gather
from ckptd.checkpoint.load.files import blame, load_index, read_stored
from ckptd.errors import CkptdError, CorruptError, NotFoundError
from ckptd.store.base import Store

MOST = 10_000
"""Findings kept; beyond it they are only counted."""


class VerifyFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Attributes
    ----------
    kind
        Stable code: the kind of the error, or ``lost`` (a chunk in a missing or truncated file).
    message
        One sentence.
    file, rank
        The file, relative to the root, and the rank that wrote it; "" and None where there is
        none.
    tensor, chunk
        The tensor and the chunk's name in its file; "" where the finding is about more.
    where
        Anything more exact: bytes, blocks.
    wanted, found
        The two sides of the check.
    """

    kind: str
    message: str
    file: str = ""
    rank: int | None = None
    tensor: str = ""
    chunk: str = ""
    where: str = ""
    wanted: str = ""
    found: str = ""

    @staticmethod
    def of(
        error: CkptdError, file: str = "", rank: int | None = None, tensor: str = ""
    ) -> VerifyFinding:
        """Return what an error says."""
        return VerifyFinding(
            kind=error.kind,
            message=error.message,
            file=file,
            rank=rank,
            tensor=tensor,
            where=error.where or "",
            wanted=error.wanted or "",
            found=error.found or "",
        )


class VerifyReport(OfCheckpoint, frozen=True, kw_only=True):
    """The outcome of a verification.

    Attributes
    ----------
    step, generation
        The checkpoint.
    deep
        Data was read; otherwise sizes and headers only.
    files, tensors, chunks
        What the checkpoint holds; zero when not even its manifest can be read.
    data_bytes, read_bytes
        Bytes of its chunks, and bytes of data that were read and compared.
    absent
        Tensors that are incomplete on purpose.
    blind
        Tensors for which the witness can say nothing, since all its values are equal there.
    findings
        What is wrong, by file.
    more
        Further findings that were not kept.
    """

    deep: bool
    files: int = 0
    tensors: int = 0
    chunks: int = 0
    data_bytes: int = 0
    read_bytes: int = 0
    absent: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    findings: tuple[VerifyFinding, ...] = ()
    more: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @staticmethod
    def failed(name: CommitName, error: CkptdError, file: str = "", *, deep: bool) -> VerifyReport:
        """Return what is said of a checkpoint of which not even the manifest can be read."""
        found = (VerifyFinding.of(error, file),)
        return VerifyReport(step=name.step, generation=name.generation, deep=deep, findings=found)


class Findings:
    """Collects findings from threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[VerifyFinding] = []
        self._seen: set[VerifyFinding] = set()
        self.more = 0

    def add(self, finding: VerifyFinding) -> None:
        """Note a finding; the same one twice is one."""
        with self._lock:
            if finding in self._seen:
                return
            if len(self._kept) >= MOST:
                self.more += 1
                return
            self._seen.add(finding)
            self._kept.append(finding)

    def note(self, kind: str, message: str, file: FileEntry | str = "", **more: str) -> None:
        """Add a finding about a file, if any; `more` are fields of `VerifyFinding`."""
        path, rank = (file, None) if isinstance(file, str) else (file.path, file.rank)
        self.add(VerifyFinding(kind=kind, message=message, file=path, rank=rank, **more))

    def tensors(self) -> set[str]:
        """Names of the tensors that have findings."""
        with self._lock:
            return {f.tensor for f in self._kept if f.tensor}

    def all(self) -> tuple[VerifyFinding, ...]:
        """Return them: those of the whole first, then by file."""
        with self._lock:
            return tuple(sorted(self._kept, key=lambda f: f.file))


MAX_WITNESS_BYTES = 64 << 20


def read_witness(
    store: Store, manifest: Manifest, plan: WitnessPlan, filemap: FileMap | None = None
) -> Witness | None:
    """Read and check the witness of a checkpoint; None when it has none.

    `filemap` is the manifest's, where it is at hand.

    Raises
    ------
    CorruptError
        kind ``digest`` among others.
    """
    entry = manifest.witness
    if entry is None:
        return None
    if entry.kind == DATA:
        filemap = filemap or FileMap.of(manifest, manifest.files[0].path)
        return _from_data(store, manifest, plan, filemap)
    return Witness.decode(witness_file(store, manifest, entry), manifest.folder + WITNESS, plan)


def witness_file(store: Store, manifest: Manifest, entry: WitnessEntry) -> bytes:
    """Return the witness's file when it is what the manifest says."""
    key = manifest.folder + WITNESS
    try:
        size = store.stat(key).size
        if size > MAX_WITNESS_BYTES:
            raise CorruptError("the witness is too large", where=key, found=size)
        raw = store.get(key)
    except NotFoundError:
        raise CorruptError("the witness is missing", where=key) from None
    found = digest_hex(raw)
    if found != entry.digest:
        raise unlike("the witness", key, entry.digest, found)
    return raw


def _from_data(store: Store, manifest: Manifest, plan: WitnessPlan, filemap: FileMap) -> Witness:
    """Take the witness's values from the one data file, in which each tensor is one piece."""
    (file,) = manifest.files
    wanted = load_index(store, file)
    raw = np.empty(file.data_bytes, np.uint8)
    read_stored(store, file, 0, raw.data)
    witness, digester = Witness.empty(plan), Digester(())
    check_files(manifest, filemap)
    digester.update(raw.data)
    if wanted is None or digester.index().blocks != wanted.blocks:
        error = CorruptError("data corrupt: digest mismatch", kind="digest", where=file.path)
        raise blame(error, file.path)
    held, absent = plan.wholes, {n for n, o in enumerate(filemap.owners) if o.has_absent}
    if absent:
        held = tuple([h for h in held if filemap.tensors[h[0]].owners not in absent])
    tensors = np.array([tensor for tensor, _ in held], dtype=np.int64)
    sizes = np.array(plan.itemsizes, dtype=np.int64)
    for slots, elements, which in plan.select_all(held):
        of = tensors[which]
        for size in distinct(sizes[of]).tolist():
            mine = sizes[of] == size
            first = filemap.starts(0)[of[mine]] // size  # the widest come first
            witness.put(slots[mine], gather(raw, size, first + elements[mine]))
    return witness


class ChunkWitness(msgspec.Struct, frozen=True):
    """Witness values in one chunk: values `slots` at its `elements`, rising."""

    tensor: int
    slots: NDArray[np.int64]
    elements: NDArray[np.int64]


class WitnessCheck:
    """Takes the values out of chunks as they are read, and compares at the end.

    Parameters
    ----------
    deep
        Values will come; otherwise the witness file is only read.
    """

    def __init__(self, store: Store, manifest: Manifest, findings: Findings, *, deep: bool) -> None:
        self._findings = findings
        self._plan = WitnessPlan.of(manifest)
        self._lock = threading.Lock()
        self._skipped: set[str] = set()
        self._wanted: Witness | None = None
        try:
            if manifest.witness is None or manifest.witness.kind != DATA:
                self._wanted = read_witness(store, manifest, self._plan)
        except CkptdError as error:
            findings.add(VerifyFinding.of(error, manifest.folder + WITNESS))
        self._found = Witness.empty(self._plan) if self._wanted and deep else None

    @property
    def blind(self) -> tuple[str, ...]:
        """Tensors for which the witness can say nothing."""
        return tuple(blind(self._plan, self._wanted)) if self._wanted else ()

    def skip(self, tensors: Iterable[str]) -> None:
        """Do not judge these tensors: not all of their values can be had."""
        with self._lock:
            self._skipped.update(tensors)

    def begin(self, tensor: int, piece: Piece) -> ChunkWitness | None:
        """Return what to look at in a chunk, or None."""
        if self._wanted is None or not self._plan.counts[tensor] or not piece.numel:
            return None
        return ChunkWitness(tensor, *self._plan.select(tensor, piece_regions(piece)))

    def feed(self, chunk: ChunkWitness, at: int, data: NDArray[np.uint8]) -> None:
        """Look at bytes ``[at, at + len(data))`` of a chunk: whole elements."""
        itemsize = self._plan.itemsizes[chunk.tensor]
        lo, hi = at // itemsize, (at + len(data)) // itemsize
        if self._found is not None:
            i, j = chunk.elements.searchsorted((lo, hi)).tolist()
            values = gather(data, itemsize, chunk.elements[i:j] - lo)
            self._found.put(chunk.slots[i:j], values)

    def finish(self) -> None:
        """Compare what came by. Tensors with other findings are not judged again."""
        if self._wanted is None or self._found is None:
            return
        explained = self._skipped | self._findings.tensors()
        for d in compare(self._plan, self._wanted, self._found):
            if d.tensor not in explained:
                self._findings.note(
                    "corrupt",
                    "values are not at the positions where they were saved",
                    tensor=d.tensor,
                    wanted="the witness's values",
                    found=f"{d.wrong} of {d.checked} differ",
                )
