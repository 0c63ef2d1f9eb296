"""A checkpoint as a read-only Zarr store: one array a tensor, read where it lies.

Nothing is converted. Metadata are made of the manifest; a chunk is a box of a tensor, whose blocks
are compared with their digests as they are read. Chunks follow the checkpoint's own cuts, and are
cut further where those are large.
"""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.metadata import v3

from ckptd.base.grids import Axis, Grid, strides_of
from ckptd.checkpoint.load import open_direct
from ckptd.types import Box, DType
from ckptd_zarr.kinds import EXTENSIONS, register_types

CHUNK_BYTES = 8 << 20
"""No chunk is larger, unless a single element is: for one row a whole chunk is read."""
_MOST_CONSOLIDATED = 10_000
"""Most arrays whose metadata the group repeats: to open the group is to parse all of them."""
_METADATA = "zarr.json"
_CHUNKS = "c"

ByteRequest: TypeAlias = RangeByteRequest | OffsetByteRequest | SuffixByteRequest


def zarr_store(
    url: str, step: int | str | None = None, *, store_options: Mapping[str, Any] | None = None
) -> CkptdStore:
    """Open a checkpoint as a read-only store of Zarr (format 3).

    Each tensor is an array in the root group, under its own name; of "/", and of what else no node
    of Zarr may be called, characters are percent-encoded. A tied tensor is there under each of its
    names. Plain values are not shown. What is read is compared with its digests, where there are
    any; what the checkpoint leaves out is a missing chunk, which Zarr shows as zeros.

    Parameters
    ----------
    url
        A root, or a checkpoint of another format that ckptd reads: a folder or a file.
    step
        Which checkpoint of a root, by step or tag; None takes the newest that counts. It is kept
        from being deleted until the store is closed, or nothing refers to the store any more.
    store_options
        As for `ckptd.Checkpointer`.

    Raises
    ------
    NotFoundError
        There is no checkpoint, or not of that step.
    ConflictError
        Kind ``busy``: could not lease a checkpoint: each candidate was deleted first.
    MismatchError, CorruptError, RefusedError
        It is damaged, or of a kind that is not read.
    ImportError
        zarr is not installed: ``pip install 'ckptd[zarr]'``.

    Examples
    --------
    ::

        with ckptd_zarr.zarr_store("checkpoints/run7", step=1000) as store:
            group = zarr.open_group(store, mode="r")
            rows = group["model.embed.weight"][:16]
    """
    return CkptdStore(url, step, store_options=store_options)


class CkptdStore(Store):
    """A checkpoint as a store of Zarr. Threads may share it; a copy that is pickled opens it again.

    Parameters
    ----------
    url, step, store_options
        See `zarr_store`.
    generation
        That of the checkpoint, wherever it is; None: on the line that counts.
    rectilinear
        Use grids of uneven chunks; None: where zarr has them and ``array.rectilinear_chunks`` is
        set in its configuration.

    Attributes
    ----------
    url
        As given.
    commit
        Record of the checkpoint.
    """

    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = True

    def __init__(
        self,
        url: str,
        step: int | str | None = None,
        generation: int | None = None,
        *,
        store_options: Mapping[str, Any] | None = None,
        rectilinear: bool | None = None,
    ) -> None:
        super().__init__(read_only=True)
        register_types()
        self.url = url
        self._options = dict(store_options or {})
        self._rectilinear = _rectilinear() if rectilinear is None else rectilinear
        opened = ExitStack()
        self._direct = opened.enter_context(
            open_direct(url, step, generation, store_options=self._options, holder="zarr")
        )
        # A store that is dropped and not closed is closed when it is collected.
        self._release = weakref.finalize(self, opened.close)
        self._reader = self._direct.reader
        self.commit = self._reader.commit
        self._grids: dict[tuple[Grid, int], _ChunkGrid] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the same checkpoint with the same chunks, in whichever process unpickles this."""
        name = self.commit.name
        return _opened_again, (
            self.url,
            name.step,
            name.generation,
            self._options,
            self._rectilinear,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CkptdStore) and self.__reduce__() == other.__reduce__()

    def __repr__(self) -> str:
        return f"CkptdStore({self.url!r}, {self.commit.step})"

    def close(self) -> None:
        """Close files and end the lease. Idempotent; reading a chunk afterwards is an error."""
        super().close()
        self._release()

    def with_read_only(self, read_only: bool = False) -> Store:
        """Return this store, which is read-only already.

        Raises
        ------
        ValueError
            A store that can be written was wanted.
        """
        if not read_only:
            raise ValueError("a checkpoint is never written through Zarr")
        return self

    # -- nodes and their metadata --------------------------------------------------------------

    @cached_property
    def _nodes(self) -> Mapping[str, str]:
        """Names of tensors, aliases among them, by the names of their nodes."""
        infos = self._reader.infos.values()
        return {_node(name): name for info in infos for name in (info.name, *info.aliases)}

    def _grid(self, number: int) -> _ChunkGrid:
        filemap = self._reader.filemap
        key = filemap.grid_of(number), filemap.dtypes[number].itemsize
        found = self._grids.get(key)
        if found is None:
            found = self._grids[key] = _ChunkGrid.of(*key, rectilinear=self._rectilinear)
        return found

    def _array(self, name: str) -> dict[str, Any]:
        """Return the metadata of an array."""
        number, info = self._reader.number(name), self._reader.info(name)
        kind = _stored_type(info.dtype)
        about: dict[str, Any] = {"name": info.name, "dtype": info.dtype.name}
        about["pieces"] = self._reader.grid(name).npieces
        if name != info.name:
            about["alias"] = name
        absent = self._reader.absent_elements(info.name)
        if absent:
            about["absent_elements"] = absent
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": info.shape,
            # One name is one length in a group to xarray, and no array: so each array has its own.
            "dimension_names": [f"{_node(info.name)}/{d}" for d in range(len(info.shape))],
            "data_type": kind,
            "fill_value": _zero(kind),
            "attributes": {"ckptd": about},
            "chunk_grid": self._grid(number).metadata,
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }

    @cached_property
    def _group(self) -> bytes:
        """The metadata of the root group, and of all arrays unless there are very many."""
        about = {
            "url": self.url,
            "step": self.commit.step,
            "generation": self.commit.generation,
            "format": self._direct.format or "ckptd",
        }
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ckptd": about}}
        if len(self._nodes) <= _MOST_CONSOLIDATED:
            arrays = {node: self._array(name) for node, name in self._nodes.items()}
            group["consolidated_metadata"] = {
                "kind": "inline",
                "must_understand": False,
                "metadata": arrays,
            }
        return json.dumps(group).encode()

    # -- keys ----------------------------------------------------------------------------------

    def _metadata(self, key: str) -> bytes | None:
        """Return what a key of metadata holds; None for another key."""
        if key == _METADATA:
            return self._group
        node, _, rest = key.partition("/")
        if rest == _METADATA and node in self._nodes:
            return json.dumps(self._array(self._nodes[node])).encode()
        return None

    def _chunk(self, key: str) -> tuple[int, tuple[int, ...]] | None:
        """Return tensor and coordinates of a chunk that is there; None for another key."""
        node, _, rest = key.partition("/")
        first, *words = rest.split("/")
        if first != _CHUNKS or node not in self._nodes:
            return None
        number = self._reader.number(self._nodes[node])
        counts = self._grid(number).counts
        if len(words) != len(counts) or not all(w.isdecimal() and w.isascii() for w in words):
            return None
        at = tuple(map(int, words))
        inside = all(i < n and str(i) == w for i, n, w in zip(at, counts, words, strict=True))
        return (number, at) if inside and self._is_there(number, at) else None

    def _is_there(self, number: int, at: tuple[int, ...]) -> bool:
        return not self._direct.is_absent(number, self._grid(number).box(at))

    def _read(self, number: int, at: tuple[int, ...]) -> memoryview:
        grid = self._grid(number)
        box, shape = grid.box(at), grid.stored_shape(at)
        size = self._reader.filemap.dtypes[number].itemsize
        # What is beyond the edge, and what no file holds, stays zero.
        out = np.zeros(math.prod(shape) * size, dtype=np.uint8)
        self._direct.read_into(number, box, out, strides_of(shape))
        return out.data

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return what a key holds, or a part of it; None where there is no such key."""
        raw: bytes | memoryview | None = self._metadata(key)
        if raw is None:
            chunk = self._chunk(key)
            if chunk is None:
                return None
            raw = await asyncio.to_thread(self._read, *chunk)
        return prototype.buffer.from_bytes(_part(raw, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return what several keys hold, or parts of it; None for a key that is not there."""
        return list(
            await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))
        )

    async def exists(self, key: str) -> bool:
        """Return whether there is such a key."""
        return self._metadata(key) is not None or self._chunk(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the bytes that a key holds, without reading a chunk."""
        raw = self._metadata(key)
        if raw is not None:
            return len(raw)
        chunk = self._chunk(key)
        if chunk is None:
            raise FileNotFoundError(key)
        number, at = chunk
        size = self._reader.filemap.dtypes[number].itemsize
        return math.prod(self._grid(number).stored_shape(at)) * size

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys: those of chunks that the checkpoint leaves out are missing."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin so; for the name of an array, its own."""
        if _METADATA.startswith(prefix):
            yield _METADATA
        # What a node is called in full is that node, as in a store of files: zarr asks for the
        # keys of an array without a "/", and takes no other's.
        wanted, below, _ = prefix.partition("/")
        one = below or wanted in self._nodes
        for node in [wanted] if one else [n for n in self._nodes if n.startswith(wanted)]:
            for key in self._keys(node):
                if key.startswith(prefix):
                    yield key

    def _keys(self, node: str) -> Iterator[str]:
        """Yield all keys of an array."""
        if node not in self._nodes:
            return
        yield f"{node}/{_METADATA}"
        number = self._reader.number(self._nodes[node])
        for at in product(*map(range, self._grid(number).counts)):
            if self._is_there(number, at):
                yield "/".join((node, _CHUNKS, *map(str, at)))

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a node, or below a part of a chunk's key."""
        prefix = prefix.rstrip("/")
        if not prefix:
            for name in (_METADATA, *self._nodes):
                yield name
            return
        seen = dict.fromkeys(
            key[len(prefix) + 1 :].partition("/")[0]
            for key in self._keys(prefix.partition("/")[0])
            if key.startswith(prefix + "/")
        )
        for name in seen:
            yield name

    # -- what is not done ----------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse: a checkpoint is never written through Zarr."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse, as `set` does."""
        self._check_writable()


class _ChunkGrid:
    """How an array is cut into chunks.

    Parameters
    ----------
    axes
        The cuts; an array without elements along a dimension has no chunk there.
    regular
        Size of a chunk, where all have one: those at the edges are stored whole.
    """

    def __init__(self, axes: Sequence[Axis], regular: tuple[int, ...] | None) -> None:
        self.axes = tuple(axes)
        self.regular = regular
        self.counts = tuple(a.ncells if a.extent else 0 for a in axes)

    @staticmethod
    def of(grid: Grid, itemsize: int, *, rectilinear: bool) -> _ChunkGrid:
        """Return the chunks of a tensor: its pieces, cut so that none is above `CHUNK_BYTES`."""
        regular = all(map(_is_regular, grid.axes)) or not math.prod(grid.shape)
        largest = [max(size for size, _ in a.runs) for a in grid.axes]
        if regular or rectilinear:
            cells = largest
        else:
            cells = list(grid.shape)  # slabs of rows: no chunk can be a piece
        steps = _steps(cells, max(1, CHUNK_BYTES // itemsize))
        if rectilinear and not regular:
            axes = [_cut(a, step) for a, step in zip(grid.axes, steps, strict=True)]
            return _ChunkGrid(axes, None)
        for d, (axis, step) in enumerate(zip(grid.axes, steps, strict=True)):
            if regular and axis.ncells > 1:
                steps[d] = _divisor(axis.runs[0][0], step)
        axes = [_cut(Axis(((n, 1),)), step) for n, step in zip(grid.shape, steps, strict=True)]
        return _ChunkGrid(axes, tuple(steps))

    @property
    def metadata(self) -> dict[str, Any]:
        """The grid as metadata have it."""
        if self.regular is not None:
            return {"name": "regular", "configuration": {"chunk_shape": self.regular}}
        runs = [[n if count == 1 else [n, count] for n, count in a.runs] for a in self.axes]
        return {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": runs}}

    def box(self, at: tuple[int, ...]) -> Box:
        """Return what a chunk holds of the tensor."""
        cells = [axis.cell(i) for axis, i in zip(self.axes, at, strict=True)]
        return Box(tuple(start for start, _ in cells), tuple(size for _, size in cells))

    def stored_shape(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a chunk has in the store."""
        return self.box(at).shape if self.regular is None else self.regular


def _is_regular(axis: Axis) -> bool:
    """Return whether all cells are of one size, but for a smaller one at the end."""
    (size, _), *rest = axis.runs
    return not rest or (len(rest) == 1 and rest[0][1] == 1 and rest[0][0] < size)


def _steps(sizes: Sequence[int], most: int) -> list[int]:
    """Return the shape of a part of at most `most` elements whose inner dimensions are whole."""
    steps, inner = [], 1
    for size in reversed(sizes):
        step = max(1, min(size, most // inner))
        inner *= step
        steps.append(step)
    return steps[::-1]


def _divisor(size: int, most: int) -> int:
    """Return a size that cuts cells without a rest, unless that makes many small ones."""
    found = next(n for n in range(most, 0, -1) if size % n == 0)
    return found if found * 4 >= most else most


def _cut(axis: Axis, step: int) -> Axis:
    """Return the cut of an axis whose cells are cut further into `step`."""
    runs: list[tuple[int, int]] = []
    for size, count in axis.runs:
        whole, rest = divmod(size, step)
        if whole <= 1 and not rest:
            runs.append((size, count))
        elif not rest:
            runs.append((step, whole * count))
        else:
            runs += [(n, k) for n, k in ((step, whole), (rest, 1)) if k] * count
    return Axis(tuple(runs))


def _rectilinear() -> bool:
    """Return whether zarr reads grids of uneven chunks, and was asked to."""
    known = hasattr(v3, "RectilinearChunkGridMetadata")
    return known and bool(zarr.config.get("array.rectilinear_chunks", False))


def _node(name: str) -> str:
    """Return what the node of a tensor is called: its name, as far as Zarr allows it.

    `urllib.parse.unquote` gives the name back.
    """
    text = name.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")
    if text.startswith("__") or not text.strip(".") or text == _METADATA:
        text = f"%{ord(text[0]):02X}{text[1:]}"
    return text


def _stored_type(dtype: DType) -> str:
    """Return the name of a type in Zarr: of its bits where numpy has no such type."""
    return dtype.name if dtype.name in EXTENSIONS else dtype.numpy.name


def _zero(kind: str) -> Any:
    """Return the fill value whose bits are zero."""
    if kind in EXTENSIONS:
        return "0x0000" if kind == EXTENSIONS[0] else "0x00"
    if kind == "bool":
        return False
    return [0.0, 0.0] if kind.startswith("complex") else 0


def _part(raw: bytes | memoryview, wanted: ByteRequest | None) -> bytes | memoryview:
    match wanted:
        case RangeByteRequest(start=start, end=end):
            return raw[start:end]
        case OffsetByteRequest(offset=start):
            return raw[start:]
        case SuffixByteRequest(suffix=size):
            return raw[max(0, len(raw) - size) :]
    return raw


def _opened_again(
    url: str, step: int, generation: int, options: dict[str, Any], rectilinear: bool
) -> CkptdStore:
    return CkptdStore(url, step, generation, store_options=options, rectilinear=rectilinear)
