"""Files of ranks as the source of a reshard: ``files "mp_rank_{tp}_{pp}.safetensors"`` in a layout.

Each rank's file holds its local tensors under local names. The stored tensors that the layout makes
of them exist nowhere; a piece of one is a box of a local tensor, and copies out of it become copies
out of that. Replicas are compared, combined or chosen, as the rules say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptd.errors import CorruptError, MismatchError, NotFoundError, UsageError
from ckptd.layout.block import Block
from ckptd.layout.clip import clip, restride
from ckptd.layout.grid import strides_of
from ckptd.layout.lay.bind import bind_ranks
from ckptd.layout.lay.indexes import write_name
from ckptd.layout.lay.local import LocalPiece, local_tensors
from ckptd.layout.lay.matching import Matcher, NameTemplates
from ckptd.layout.lay.resolve import MeshShape, Resolved
from ckptd.layout.lay.ruleform import RuleForm, Who
from ckptd.layout.lay.stored import StoredForm, StoredTensor, TensorKey, local_cells
from ckptd.layout.lay.syntax import Average, NameIndex, Replicas, Text, show_name
from ckptd.load.files import PieceLocations
from ckptd.load.reader import CkptdReader
from ckptd.readers.find import rank_files
from ckptd.reshard.plan import Take
from ckptd.reshard.source import Stock, StockTensor
from ckptd.root.index import Index
from ckptd.store.base import Store
from ckptd.types import ByteRange, DType

__all__ = ["RankFilePattern", "open_ranks", "rank_file_pattern"]

_SLAB_BYTES = 16 << 20
_MAX_FILES = 1 << 20

_Where = tuple[int, tuple[LocalPiece, ...]]
"""Number of a local tensor of the source, and what of rank-local tensors it holds."""


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
    """What the ranks hold."""

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
            return [self._take(key, tensor, rule, piece, blocks, owner)]
        if average.kind == "sum" and target.name.startswith(("int", "uint", "bool")):
            raise UsageError("replicas of this type are not combined", where=name)
        extent = self.form.mesh.extents[average.axis]
        stride = self.form.mesh.strides[average.axis]
        count = extent if average.kind == "avg" else 1
        first = owner - self.form.mesh.coordinates(owner)[average.axis] * stride
        takes = []
        for i in range(extent):
            found = self._take(key, tensor, rule, piece, blocks, first + i * stride)
            change = Combine(count) if i else First(count)
            takes.append(Take(found.tensor, 0, found.blocks, change, i))
        return takes

    def _take(
        self,
        key: TensorKey,
        tensor: StoredTensor,
        rule: RuleForm,
        piece: int,
        blocks: Sequence[Block],
        rank: int,
    ) -> Take:
        number, parts = self.places[rank][key]
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
            for one in restride(_shifted(block, skip), found.box.shape, strides, base)
        ]
        out = [
            _shifted(inside, part.at - part.lo)
            for one in moved
            for part in parts
            for inside in clip(one, "source", part.lo, part.hi)
        ]
        return Take(number, 0, tuple(out))

    # -- replicas ------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Compare local tensors that different files hold as replicas of one another.

        Raises
        ------
        CorruptError
            kind ``replicas-differ``: names the tensor and two of its ranks.
        """
        groups: dict[tuple[TensorKey, Who], dict[int, int]] = {}
        for rank, held in enumerate(self.places):
            for key, (number, _) in held.items():
                rule = self.form.rules[key[0]]
                free = (Average, Replicas)
                if any(
                    isinstance(m, free) and getattr(m, "kind", "") != "same"
                    for m in rule.equation.modifiers
                ):
                    continue
                flat = self.form.packing.flat_of(*key)
                who = rule.who(self.form.mesh.coordinates(rank))
                if flat is None:
                    groups.setdefault((key, who), {}).setdefault(number, rank)
        for found in groups.values():
            if len(found) > 1:
                self._compare(found)

    def _compare(self, found: Mapping[int, int]) -> None:
        numbers = list(found)
        digests = {n: _digest(self.source, n) for n in numbers}
        for number in numbers[1:]:
            if digests[number] != digests[numbers[0]]:
                raise CorruptError(
                    "replicas differ between ranks",
                    kind="replicas-differ",
                    where=self.source.filemap.tensors[number].name,
                    wanted=f"what rank {found[numbers[0]]} holds",
                    found=f"other values on rank {found[number]}",
                    hint="if they may differ, say so in the rule: any, or avg(axis)",
                )


def _shifted(block: Block, shift: int) -> Block:
    return Block(
        block.shape,
        block.source_start + shift,
        block.source_strides,
        block.target_start,
        block.target_strides,
    )


def _digest(source: PieceLocations, number: int) -> bytes:
    file, start = source.of(number, 0)
    entry, tensor = source.files[file], source.manifest.tensors[number]
    state = xxhash.xxh3_128()
    begin = entry.data_start + start
    end = begin + math.prod(tensor.shape) * source.filemap.dtypes[number].itemsize
    for at in range(begin, end, _SLAB_BYTES):
        slab = ByteRange(at, min(at + _SLAB_BYTES, end))
        state.update(source.store.get(entry.path, slab))
    return state.digest()


def open_ranks(store: Store, layout: Resolved, step: int) -> Stock:
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
    keys_of = _files_of(store, layout)
    root = rank_files(store, keys_of, step)
    index = Index(root)
    reader = CkptdReader(index, index.commit(root.name), listed=False)
    source = reader.places
    headers = _headers(reader, keys_of)
    mesh = layout.mesh or MeshShape(1, {}, {})
    files = [_file_of(layout, mesh, rank, keys_of) for rank in range(mesh.world)]
    shapes = {r: {n: t.shape for n, t in headers[f].items()} for r, f in enumerate(files)}
    form = StoredForm(bind_ranks(layout, shapes))
    places: list[dict[TensorKey, _Where]] = []
    dtypes: dict[TensorKey, DType] = {}
    for rank, file in enumerate(files):
        held: dict[TensorKey, _Where] = {}
        for key, where, local in _held(form, rank, headers[file]):
            held[key] = where
            dtype = dtypes.setdefault(key, local.dtype)
            if dtype is not local.dtype:
                raise MismatchError(
                    "ranks hold a tensor in different types",
                    kind="lay-fit",
                    where=f"{local.name} of rank {rank}",
                    wanted=dtype.name,
                    found=local.dtype.name,
                )
        places.append(held)
    keys = {name: key for name, key in _names(form) if key in dtypes}
    ranks = _Ranks(form, source, places, keys)
    ranks.check_replicas()
    _check_all_held(headers, keys_of, files, places, layout)
    return _stock(ranks, dtypes, step, reader.commit.manifest_digest)


@dataclass(frozen=True, slots=True)
class _Local:
    """A tensor of a file: its name there, and its number in the manifest."""

    name: str
    number: int
    dtype: DType
    shape: tuple[int, ...]


def _headers(reader: CkptdReader, files: Sequence[str]) -> list[dict[str, _Local]]:
    """Return the tensors of each file by their names in it."""
    out: dict[str, dict[str, _Local]] = {file: {} for file in files}
    for number, info in enumerate(reader.infos.values()):
        file, _, name = info.name.partition(": ")
        out[file][name] = _Local(name, number, info.dtype, info.shape)
    return list(out.values())


def _names(form: StoredForm) -> Iterator[tuple[str, TensorKey]]:
    """Yield the stored tensors, and the copies that ranks hold of them under other names."""
    yield from form.by_name.items()
    stored = {r.number for r in form.stored_rules}
    for rule in form.rules:
        if rule.number not in stored:
            for indexes in rule.tensors():
                yield form.name(rule.global_name(indexes), ""), (rule.number, indexes, "")


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
        raise UsageError("too many files", kind="too-many-files", where=store.url, found=len(keys))
    if not keys:
        raise NotFoundError(
            "no file of a rank is here",
            kind="no-root",
            where=store.url,
            wanted=show_name(layout.files, quoted=True) if layout.files else None,
        )
    return sorted(keys)


def _check_all_held(
    headers: Sequence[Mapping[str, _Local]],
    paths: Sequence[str],
    files: Sequence[int],
    places: Sequence[Mapping[TensorKey, _Where]],
    layout: Resolved,
) -> None:
    """Every file is some rank's, and every tensor of it is what the layout says or leaves out.

    A mesh that is too small makes smaller tensors of what its ranks hold, and would leave out
    what the others hold without a word.
    """
    over = [path for n, path in enumerate(paths) if n not in files]
    if over:
        more = f" and {len(over) - 4} more" if len(over) > 4 else ""
        raise MismatchError(
            "there are files of ranks that the mesh does not have",
            kind="lay-fit",
            where=", ".join(over[:4]) + more,
            wanted=f"{len(files)} ranks, in {len(set(files))} files",
            found=f"{len(headers)} files",
            hint="make the mesh as large as the job was: -e 'from: mesh ...'",
        )
    held = {number for mine in places for number, _ in mine.values()}
    drops, templates = Matcher(layout, stored=False), NameTemplates(layout)
    mesh = layout.mesh or MeshShape(1, {}, {})
    lost = []
    for file, local in ((f, t) for f, tensors in enumerate(headers) for t in tensors.values()):
        if local.number in held:
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
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        raise MismatchError(
            "the layout has no place for what ranks hold",
            kind="lay-cover",
            where=", ".join(lost[:4]) + more,
            found=f"{len(lost)} tensors",
            hint="to leave it out, say so in the source's layout: -e 'from: NAME = drop'",
        )


def _file_of(layout: Resolved, mesh: MeshShape, rank: int, paths: Sequence[str]) -> int:
    if layout.files is None:
        raise UsageError("the layout does not say which file is whose", kind="lay-rule")
    name = write_name(layout.files, mesh.coordinates(rank))
    if name in paths:
        return paths.index(name)
    raise CorruptError(
        "the file of a rank is missing", kind="missing-file", where=name, wanted=f"rank {rank}"
    )


def _held(
    form: StoredForm, rank: int, tensors: Mapping[str, _Local]
) -> Iterator[tuple[TensorKey, _Where, _Local]]:
    """Yield what a rank holds of each stored tensor. A tensor that is not there is passed over."""
    found: dict[TensorKey, tuple[_Local, list[LocalPiece]]] = {}
    for tensor in local_tensors(form, rank):
        local = tensors.get(tensor.name)
        if local is None:
            continue
        if local.shape != tensor.shape:
            raise MismatchError(
                "a rank's tensor has another shape than the layout says",
                kind="lay-fit",
                where=f"{tensor.name} of rank {rank}",
                wanted=tensor.shape,
                found=local.shape,
            )
        for piece in tensor.pieces:
            key = (piece.rule, piece.indexes, tensor.state)
            found.setdefault(key, (local, []))[1].append(piece)
    for key, (local, pieces) in found.items():
        yield key, (local.number, tuple(pieces)), local


def _stock(ranks: _Ranks, dtypes: Mapping[TensorKey, DType], step: int, identity: str) -> Stock:
    tensors = []
    for number, (name, key) in enumerate(ranks.keys.items()):
        tensor = ranks.form.tensor(*key)
        tensors.append(StockTensor(number, name, dtypes[key], tensor.shape, tensor.grid))
    return Stock(
        ranks.source,
        identity=identity,
        tensors=tensors,
        values=_no_values,
        step=step,
        witness_note=_note(ranks.form),
        sizes=ranks.form.bound.sizes,
        locate=ranks.locate,
    )


def _note(form: StoredForm) -> str:
    """Say what nobody can check: that values lie where the layout has them."""
    if any(f.group.kind != "each" for f in form.bound.layout.flats):
        # A buffer does not say which tensor lies where: only the order of the rules does.
        return "order not verified: the buffers do not say which tensor lies where"
    return "the source has no witness"


def _no_values(names: Sequence[str]) -> Mapping[str, NDArray[Any]]:
    raise UsageError(
        "numbers that follow parameters, and scales, are not read from files of ranks",
        where=", ".join(names[:4]),
        hint="drop them in the source's layout",
    )
