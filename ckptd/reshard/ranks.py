"""Files of ranks as a source (``mp_rank_{tp}_{pp}.safetensors``): replicas compared, combined.

In it: errors for files or tensors that are missing or not described.

Each rank's file holds its local tensors under local names. The stored tensors that the layout makes
of them exist nowhere; a piece of one is a box of a local tensor, and copies out of it become copies
out of that. Replicas are compared, combined or chosen, as the rules say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.base.grids.block import Block, flat_regions
from ckptd.base.grids.clip import clip, restride
from ckptd.base.grids.grid import Axis, Grid, strides_of
from ckptd.checkpoint.format.manifest import UNORDERED, foreign_sizes
from ckptd.checkpoint.load.files import PieceLocations
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.index import Index
from ckptd.errors import CorruptError, MismatchError, NotFoundError, UsageError, first_few
from ckptd.lay.bind import bind_ranks
from ckptd.lay.check import order_findings
from ckptd.lay.indexes import write_name
from ckptd.lay.local import LocalPiece, local_tensors
from ckptd.lay.matching import Matcher, NameTemplates
from ckptd.lay.replicated import ReplicatedPart, ReplicatedParts
from ckptd.lay.resolve import MeshShape, Resolved
from ckptd.lay.ruleform import RuleForm
from ckptd.lay.stored import StoredForm, StoredTensor, TensorKey, local_cells
from ckptd.lay.syntax import show_name
from ckptd.lay.syntax.tree import Average, NameIndex, Text
from ckptd.readers.base import Listing
from ckptd.readers.find import bucket_root, rank_files
from ckptd.readers.hints import config_hints
from ckptd.reshard.buckets import Bucket, check_bounds, join_buckets, place_pieces
from ckptd.reshard.plan import ChunkFeed, Take
from ckptd.reshard.reading import ValueReader
from ckptd.reshard.source import SourceTensors, StockTensor, unequal_copy
from ckptd.store.base import Store
from ckptd.types import DType

_MOST_COMPARED = 4096
"""Parts of tensors that are read and compared side by side; each costs a few hundred bytes."""
_MAX_FILES = 1 << 20
_COMBINED = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types whose values are averaged and summed: of integers each term would be cut to a whole number,
of complex numbers a half lost, and packed ones are no numbers by themselves."""

_Where = tuple[tuple[int, int, tuple[LocalPiece, ...]], ...]
"""Numbers of tensors of the source and of pieces of them, and what each holds of a tensor."""


@dataclass(frozen=True, slots=True)
class Combine:
    """``target += source / count``: the further replicas of what is averaged or summed."""

    count: int

    def put(self, target: NDArray[Any], source: NDArray[Any], block: Block, shift: int) -> None:
        """Add the values, in double precision."""
        total = target.astype(np.float64) + source.astype(np.float64) / self.count
        target[...] = total.astype(target.dtype)


@dataclass(frozen=True, slots=True)
class First:
    """``target = source / count``: the first replica of what is averaged."""

    count: int

    def put(self, target: NDArray[Any], source: NDArray[Any], block: Block, shift: int) -> None:
        """Write the values."""
        target[...] = (source.astype(np.float64) / self.count).astype(target.dtype)


@dataclass(eq=False)
class _Ranks:
    """Local tensors of the ranks, as a source of copies."""

    form: StoredForm
    source: PieceLocations
    places: Sequence[Mapping[TensorKey, _Where]]
    keys: Mapping[str, TensorKey]

    def locate(self, name: str, piece: int, blocks: Sequence[Block], target: DType) -> list[Take]:
        """Return copies out of a stored piece as copies out of local tensors."""
        key = self.keys[name]
        tensor = self.form.tensor(*key)
        rule = self.form.rules[key[0]]
        owner = tensor.owners.owner(piece, tensor.base)
        average = next((m for m in rule.equation.modifiers if isinstance(m, Average)), None)
        if average is None:
            return self._takes(key, tensor, rule, piece, blocks, owner)
        if target.name not in _COMBINED:
            raise UsageError(
                "replicas of this dtype cannot be combined",
                where=name,
                wanted=f"one of {', '.join(_COMBINED)}",
                found=target.name,
                hint="write `any` in the rule to take one of them",
            )
        extent = self.form.mesh.extents[average.axis]
        stride = self.form.mesh.strides[average.axis]
        count = extent if average.kind == "avg" else 1
        first = owner - self.form.mesh.coordinates(owner)[average.axis] * stride
        takes = []
        for i in range(extent):
            change = Combine(count) if i else First(count)
            takes += [
                Take(found.tensor, found.piece, found.blocks, change, i)
                for found in self._takes(key, tensor, rule, piece, blocks, first + i * stride)
            ]
        return takes

    def _takes(
        self,
        key: TensorKey,
        tensor: StoredTensor,
        rule: RuleForm,
        piece: int,
        blocks: Sequence[Block],
        rank: int,
    ) -> list[Take]:
        who = rule.who(self.form.mesh.coordinates(rank))
        shape = rule.local_shape(who)
        found = tensor.grid.piece(piece)
        boxes = {rule.grid.cell_box(c): box for c, box in local_cells(rule, who)}
        box = boxes[found.box]
        strides = strides_of(shape)
        base = sum(o * s for o, s in zip(box.offset, strides, strict=True))
        skip = found.flat[0] if found.flat else 0
        moved = [
            one
            for block in blocks
            for one in restride(block.moved(skip), found.box.shape, strides, base)
        ]
        return self._in_files(moved, self.places[rank][key])

    def _in_files(self, blocks: Sequence[Block], places: _Where) -> list[Take]:
        """Return copies out of a rank-local tensor as copies out of what files hold."""
        out = []
        for number, piece, parts in places:
            inside = tuple(b for block in blocks for b in self._in_file(block, parts))
            if inside:
                out.append(Take(number, piece, inside))
        return out or [Take(*places[0][:2], ())]

    def _in_file(self, block: Block, parts: Sequence[LocalPiece]) -> list[Block]:
        """Return a copy out of a rank-local tensor as copies out of the tensor of a file."""
        return [
            inside.moved(part.at - part.lo)
            for part in parts
            for inside in clip(block, "source", part.lo, part.hi)
        ]

    # -- replicas ------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Compare what several files hold of one tensor, a whole one or a part.

        Raises
        ------
        CorruptError
            kind ``replicas-differ``: names the tensor and two of its ranks.
        """
        held: list[_Replica] = []
        for found in self._replicas():
            held += found
            if len(held) >= _MOST_COMPARED:
                self._compare(held)
                held = []
        self._compare(held)

    def _replicas(self) -> Iterator[list[_Replica]]:
        """Yield what files hold of a part of a tensor, where several files hold it."""
        parts = ReplicatedParts(self.form)
        for key in dict.fromkeys(k for held in self.places for k in held):
            # Copies that are cut alike are compared with the tensor.
            for part in () if key[0] in parts.originals else parts.of_tensor(key):
                # A file may be that of several ranks, and a buffer may have a copy as well.
                found = {
                    (self.places[rank][mine][0][0], rule): (mine, rank)
                    for rule, ranks in reversed(part.holders)
                    for mine in [(rule, *key[1:])]
                    for rank in reversed(ranks.tolist())
                    if mine in self.places[rank]
                }
                if len(found) > 1:
                    yield [self._replica(parts, key, part, *found[n]) for n in sorted(found)]

    def _replica(
        self,
        parts: ReplicatedParts,
        key: TensorKey,
        part: ReplicatedPart,
        mine: TensorKey,
        rank: int,
    ) -> _Replica:
        places = self.places[rank][mine]
        rule = self.form.rules[mine[0]]
        who = rule.who(self.form.mesh.coordinates(rank))
        strides = strides_of(rule.local_shape(who))
        blocks = []
        for region in flat_regions(parts.boxes(rule, who)[part.cell], part.lo, part.hi):
            start = sum(o * s for o, s in zip(region.box.offset, strides, strict=True))
            block = Block(region.box.shape, start, strides, region.start, region.strides)
            blocks.append(block)
        what, takes = (key, part.cell, part.lo), tuple(self._in_files(blocks, places))
        return _Replica(what, mine, rank, part.hi - part.lo, takes)

    def _compare(self, held: Sequence[_Replica]) -> None:
        first: dict[object, tuple[_Replica, bytes]] = {}
        for mine, digest in zip(held, self._digests(held), strict=True):
            other, wanted = first.setdefault(mine.what, (mine, digest))
            if digest != wanted and mine.of[0] != other.of[0]:
                raise unequal_copy(self._shown(mine), self._shown(other), "other values")
            if digest != wanted:
                raise CorruptError(
                    "replicas differ between ranks",
                    kind="replicas-differ",
                    where=self._shown(mine),
                    wanted=f"what rank {other.rank} holds",
                    found=f"other values on rank {mine.rank}",
                    hint="if they may differ, write `any` or `avg(axis)` in the rule",
                )

    def _shown(self, replica: _Replica) -> str:
        name = self.source.filemap.tensors[replica.takes[0].tensor].name
        (number, indexes, state), (_, cell, _) = replica.of, replica.what
        rule = self.form.rules[number]
        of = self.form.name(rule.global_name(indexes), state)
        inside = "" if name.endswith(f": {of}") else f", in it {of}"
        if rule.grid.ncells > 1:
            box = rule.grid.cell_box(cell)
            ranges = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True))
            inside = f", in it {of}[{ranges}]"
        return name + inside

    def _digests(self, held: Sequence[_Replica]) -> Iterator[bytes]:
        """Yield the digest of each replica's bytes, reading all of them in the order of files."""
        if not held:
            return
        reader = ValueReader(
            self.source,
            [
                (
                    self.source.filemap.dtypes[r.takes[0].tensor].name,
                    Grid((Axis(((r.numel, 1),)),)),
                    partial(_feed, ChunkFeed(r.takes)),
                )
                for r in held
            ],
        )
        states = [xxhash.xxh3_128() for _ in held]
        chunks = reader.chunks
        starts = np.array([c.start for c in chunks], dtype=np.int64)
        for part in reader.parts():
            memory = np.zeros(part.hi - part.lo, dtype=np.uint8)
            reader.read(part, memory)
            first = max(0, int(np.searchsorted(starts, part.lo, "right")) - 1)
            for chunk in chunks[first : int(np.searchsorted(starts, part.hi, "left"))]:
                lo, hi = max(chunk.start, part.lo), min(chunk.end, part.hi)
                if lo < hi:
                    states[chunk.tensor].update(memory[lo - part.lo : hi - part.lo].data)
        for state in states:
            yield state.digest()


class _Replica(NamedTuple):
    """A rank's replica of a part of a tensor: tensor, cell and where in it; how to read it.

    `of` is the tensor, or a copy of it.
    """

    what: tuple[TensorKey, int, int]
    of: TensorKey
    rank: int
    numel: int
    takes: tuple[Take, ...]


def _feed(found: ChunkFeed, _: int) -> ChunkFeed:
    return found


@dataclass(frozen=True, slots=True)
class RankShapes:
    """Shapes and sizes that the files of ranks state.

    Attributes
    ----------
    of_rank
        Shapes by name, by rank.
    sizes
        Sizes of axes, from a ``config.json`` beside the files, that the layout does not say.
    """

    of_rank: Mapping[int, Mapping[str, tuple[int, ...]]]
    sizes: Mapping[str, int]


def rank_shapes(store: Store, layout: Resolved) -> RankShapes:
    """Read the headers of files of ranks.

    Raises
    ------
    CorruptError, MismatchError, NotFoundError
        As `open_ranks`, but for the layout's fit.
    """
    return _open(store, layout, 0).shapes


@dataclass(frozen=True, slots=True)
class _Opened:
    """Files of ranks: `files` has the number of each rank's in `paths` and `headers`."""

    source: PieceLocations
    identity: str
    paths: list[str]
    headers: list[dict[str, _Local]]
    files: list[int]
    shapes: RankShapes
    left_out: tuple[int, Sequence[str]]


def _open(store: Store, layout: Resolved, step: int) -> _Opened:
    buckets = bucket_root(store, step)
    paths = [] if buckets else _files_of(store, layout)
    root = buckets or rank_files(store, paths, step)
    index = Index(root)
    reader = CkptdReader(index, index.commit(root.name), listed=False)
    if buckets:
        paths = sorted({name.partition(": ")[0] for name in reader.infos})
    headers = _bucket_headers(reader, paths) if buckets else _headers(reader, paths)
    mesh = layout.mesh or MeshShape(1, {}, {})
    files = [_file_of(layout, mesh, rank, paths) for rank in range(mesh.world)]
    shapes = {r: {n: t.shape for n, t in headers[f].items()} for r, f in enumerate(files)}
    axes = {a for e in layout.equations for f in e.families.values() for a in f.axes}
    here = Listing(store, seen=root.seen)
    config = foreign_sizes(reader.manifest) if buckets else config_hints(here)[1]
    sizes = {a: n for a, n in config.items() if a in axes and a not in layout.sizes}
    identity = reader.commit.manifest_digest
    return _Opened(
        reader.places, identity, paths, headers, files, RankShapes(shapes, sizes), root.left_out
    )


def open_ranks(store: Store, layout: Resolved, step: int) -> SourceTensors:
    """Describe the files of ranks as the stored tensors that a layout makes of them.

    Parameters
    ----------
    store
        The folder.
    layout
        Has ``files``.
    step
        Of the checkpoint that it becomes.

    Raises
    ------
    CorruptError
        A file is missing or is no safetensors file; kind ``replicas-differ``.
    MismatchError
        ``lay-fit``: the layout does not fit what the files hold.
    """
    opened = _open(store, layout, step)
    source, keys_of, headers, files = opened.source, opened.paths, opened.headers, opened.files
    form = StoredForm(bind_ranks(layout, opened.shapes.of_rank, opened.shapes.sizes))
    places: list[dict[TensorKey, _Where]] = []
    dtypes: dict[TensorKey, DType] = {}
    absent: dict[TensorKey, tuple[int, str]] = {}
    described: set[int] = set()
    for rank, file in enumerate(files):
        held: dict[TensorKey, _Where] = {}
        for key, where, local in _held(form, rank, headers[file], absent, described):
            held[key] = where
            dtype = dtypes.setdefault(key, local.dtype)
            if dtype is not local.dtype:
                raise MismatchError(
                    "ranks hold a tensor in different dtypes",
                    kind="lay-fit",
                    where=f"{local.name} of rank {rank}",
                    wanted=dtype.name,
                    found=local.dtype.name,
                )
        places.append(held)
    _check_none_absent(absent, places, [keys_of[f] for f in files])
    keys = {name: key for name, key in _names(form) if key in dtypes}
    ranks = _Ranks(form, source, places, keys)
    ranks.check_replicas()
    _check_all_described(headers, keys_of, files, described, layout)
    return replace(_stock(ranks, dtypes, step, opened.identity), left_out=opened.left_out)


@dataclass(frozen=True, slots=True)
class _Local:
    """A tensor of a file: its name there, and its number in the manifest.

    A buffer that is made of `buckets` has the number of the first one.
    """

    name: str
    number: int
    dtype: DType
    shape: tuple[int, ...]
    buckets: tuple[Bucket, ...] = ()

    def place(self, pieces: Sequence[LocalPiece]) -> _Where:
        """Return where a tensor's pieces lie."""
        if self.buckets:
            return place_pieces(self.buckets, pieces)
        return ((self.number, 0, tuple(pieces)),)


def _headers(reader: CkptdReader, files: Sequence[str]) -> list[dict[str, _Local]]:
    """Return the tensors of each file by their names in it."""
    out: dict[str, dict[str, _Local]] = {file: {} for file in files}
    for number, info in enumerate(reader.infos.values()):
        file, _, name = info.name.partition(": ")
        out[file][name] = _Local(name, number, info.dtype, info.shape)
    return list(out.values())


def _bucket_headers(reader: CkptdReader, groups: Sequence[str]) -> list[dict[str, _Local]]:
    """Return the buffers that the buckets of each group of ranks make."""
    found: dict[tuple[str, str], dict[str, dict[int, int]]] = {}
    infos = list(reader.infos.values())
    for number, info in enumerate(infos):
        group, _, name = info.name.partition(": ")
        buffer, index, state = name.split(".")
        states = found.setdefault((group, buffer), {})
        states.setdefault(state, {})[int(index)] = number
    out: dict[str, dict[str, _Local]] = {group: {} for group in groups}
    lengths = reader.objects()
    for (group, buffer), states in found.items():
        padded = lengths[f"{group}: {buffer}"]
        for state, numbers in states.items():
            name = f"{buffer}.{state}"
            cuts = {i: (n, reader.filemap.grid_of(n)) for i, n in numbers.items()}
            buckets = join_buckets(cuts, padded, f"{group}.{name}")
            dtypes = {infos[b.number].dtype for b in buckets}
            if len(dtypes) != 1:
                raise MismatchError(
                    "buckets of one state are of different types",
                    kind="lay-fit",
                    where=f"{group}.{name}",
                    found=", ".join(sorted(d.name for d in dtypes)),
                )
            number, shape = buckets[0].number, (buckets[-1].end,)
            out[group][name] = _Local(name, number, infos[number].dtype, shape, buckets)
    return list(out.values())


def _names(form: StoredForm) -> Iterator[tuple[str, TensorKey]]:
    """Yield the stored tensors, and the copies that ranks hold of them under other names."""
    yield from form.by_name.items()
    for rule in form.rules:
        if rule.number not in form.stored_numbers:
            for indexes in rule.tensors():
                name = form.name(rule.global_name(indexes), "")
                if name not in form.by_name:  # else another stage has its copy under the same name
                    yield name, (rule.number, indexes, "")


@dataclass(frozen=True, slots=True)
class RankFilePattern:
    """The names that files of ranks have: a regular expression a folder, and one for the file."""

    folders: tuple[str, ...]
    file: str

    def matches(self, name: str) -> bool:
        """Tell whether a file may be a rank's."""
        *folders, file = name.split("/")
        return len(folders) == len(self.folders) and all(
            re.fullmatch(expression, part, re.ASCII)
            for expression, part in zip((*self.folders, self.file), (*folders, file), strict=True)
        )

    def may_hold(self, folder: str) -> bool:
        """Tell whether files of ranks may lie in a folder, which ends in "/"."""
        parts = folder[:-1].split("/")
        return len(parts) <= len(self.folders) and all(
            re.fullmatch(expression, part, re.ASCII)
            for expression, part in zip(self.folders, parts, strict=False)
        )


def rank_file_pattern(layout: Resolved) -> RankFilePattern:
    """Return the names that the files of a layout's ranks have."""
    expression = "".join(
        re.escape(p.text)
        if isinstance(p, Text)
        else "[0-9]+"
        if isinstance(p, NameIndex)
        else "[^/]*"
        for p in (layout.files.parts if layout.files else ())
    )
    *folders, file = expression.split("/")
    return RankFilePattern(tuple(folders), file)


def _files_of(store: Store, layout: Resolved) -> list[str]:
    """Return the files whose names are like those of ranks, in folders as well."""
    pattern = rank_file_pattern(layout)
    folders, last = pattern.folders, pattern.file
    found = [""]
    for part in folders:
        found = [
            f"{at}{name}"
            for at in found
            for name in store.children(at)
            if name.endswith("/") and re.fullmatch(part, name[:-1], re.ASCII)
        ]
    keys = [
        f"{at}{n}" for at in found for n in store.children(at) if re.fullmatch(last, n, re.ASCII)
    ]
    if len(keys) > _MAX_FILES:
        raise UsageError("too many files", where=store.url, found=len(keys))
    if not keys:
        raise NotFoundError(
            "no file of a rank found",
            kind="no-root",
            where=store.url,
            wanted=show_name(layout.files, quoted=True) if layout.files else None,
        )
    return sorted(keys)


def _check_all_described(
    headers: Sequence[Mapping[str, _Local]],
    paths: Sequence[str],
    files: Sequence[int],
    described: Collection[int],
    layout: Resolved,
) -> None:
    """Every file is some rank's, and every tensor of it is what the layout says or leaves out.

    A mesh that is too small makes smaller tensors of what its ranks hold, and would leave out
    what the others hold without a word.
    """
    over = [path for n, path in enumerate(paths) if n not in files]
    if over:
        raise MismatchError(
            "files of ranks that the mesh does not have",
            kind="lay-fit",
            where=first_few(over, 4),
            wanted=f"{len(files)} ranks, in {len(set(files))} files",
            found=f"{len(headers)} files",
            hint="make the mesh as large as the job was: -e 'from: mesh ...'",
        )
    drops, templates = Matcher(layout, stored=False), NameTemplates(layout)
    mesh = layout.mesh or MeshShape(1, {}, {})
    lost = []
    for file, local in ((f, t) for f, tensors in enumerate(headers) for t in tensors.values()):
        if local.number in described:
            continue
        undressed = templates.take(local.name)
        ranks = [r for r, f in enumerate(files) if f == file]
        found = [
            drops.match(undressed.name if undressed else local.name, mesh.coordinates(r))
            for r in ranks
        ]
        if 0 in local.shape or any(m is not None and m.equation == -1 for m in found):
            continue
        lost.append(f"{paths[file]}: {local.name}")
    if lost:
        raise MismatchError(
            "the layout has no place for tensors of the ranks",
            kind="lay-cover",
            where=first_few(lost, 4),
            found=f"{len(lost)} tensors",
            hint="to drop it, write in the source's layout: -e 'from: NAME = drop'",
        )


def _check_none_absent(
    absent: Mapping[TensorKey, tuple[int, str]],
    places: Sequence[Mapping[TensorKey, _Where]],
    paths: Sequence[str],
) -> None:
    """A tensor is in the files of all ranks that hold it by the layout, or in none."""
    for rank, held in enumerate(places):
        for key in held.keys() & absent.keys():
            lacking, name = absent[key]
            raise MismatchError(
                "a tensor is missing in the file of a rank that holds it by the layout",
                kind="lay-cover",
                where=f"{paths[lacking]}: {name}",
                wanted=f"what rank {lacking} holds of it; rank {rank} has its own in {paths[rank]}",
                hint="if this rank does not hold it, write in the rule: on AXIS=NUMBER",
            )


def _file_of(layout: Resolved, mesh: MeshShape, rank: int, paths: Sequence[str]) -> int:
    if layout.files is None:
        raise UsageError("the layout lacks a 'files' line", kind="lay-rule")
    name = write_name(layout.files, mesh.coordinates(rank))
    if name in paths:
        return paths.index(name)
    raise CorruptError(
        "the file of a rank is missing",
        where=name,
        wanted=f"rank {rank}",
        found=first_few(paths, 4),
    )


def _held(
    form: StoredForm,
    rank: int,
    tensors: Mapping[str, _Local],
    absent: dict[TensorKey, tuple[int, str]],
    described: set[int],
) -> Iterator[tuple[TensorKey, _Where, _Local]]:
    """Yield what a rank holds of each stored tensor.

    What it lacks of them is put into `absent`, and into `described` the numbers of all tensors of
    its file that the layout knows: some are nothing but padding.
    """
    found: dict[TensorKey, tuple[_Local, list[LocalPiece]]] = {}
    for tensor in local_tensors(form, rank):
        local = tensors.get(tensor.name)
        if local is None:
            for piece in tensor.pieces:
                if piece.hi > piece.lo:
                    key = (piece.rule, piece.indexes, tensor.state)
                    absent.setdefault(key, (rank, tensor.name))
            continue
        described.add(local.number)
        if local.shape != tensor.shape:
            raise MismatchError(
                "a rank's tensor has another shape than the layout says",
                kind="lay-fit",
                where=f"{tensor.name} of rank {rank}",
                wanted=tensor.shape,
                found=local.shape,
            )
        if local.buckets:
            names = [form.rules[p.rule].local_name(p.indexes) for p in tensor.pieces]
            check_bounds(local.buckets, tensor.pieces, names, f"{tensor.name} of rank {rank}")
        for piece in tensor.pieces:
            key = (piece.rule, piece.indexes, tensor.state)
            found.setdefault(key, (local, []))[1].append(piece)
    for key, (local, pieces) in found.items():
        yield key, local.place(pieces), local


def _stock(
    ranks: _Ranks, dtypes: Mapping[TensorKey, DType], step: int, identity: str
) -> SourceTensors:
    tensors = []
    for number, (name, key) in enumerate(ranks.keys.items()):
        tensor = ranks.form.tensor(*key)
        tensors.append(StockTensor(number, name, dtypes[key], tensor.shape, tensor.grid))
    return SourceTensors(
        ranks.source,
        identity=identity,
        tensors=tensors,
        values=_no_values,
        step=step,
        metadata={UNORDERED: "not verified"} if _shares_buffers(ranks.form) else {},
        witness_note=_note(ranks.form),
        sizes=ranks.form.bound.sizes,
        locate=ranks.locate,
    )


def _shares_buffers(form: StoredForm) -> bool:
    """Whether only the order of the rules says which tensor lies where in a buffer."""
    return any(f.group.kind != "each" for f in form.bound.layout.flats)


def _note(form: StoredForm) -> str:
    """Return the note that it is not verified that values lie where the layout has them."""
    if _shares_buffers(form):
        parting = "".join(f"; {f.where}: {f.message}" for f in order_findings(form.bound.layout))
        return f"order not verified: the buffers do not say which tensor lies where{parting}"
    return "the source has no witness"


def _no_values(names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    raise UsageError(
        "per-parameter numbers and scales cannot be read from files of ranks",
        where=", ".join(names[:4]),
        hint="drop them in the source's layout",
    )
