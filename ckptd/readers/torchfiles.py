"""Reads torch.save files: one, shards, a file a rank (DTensor, ShardedTensor); rank in file names.

In it: files beside that are left out; replicas compared, and up to which size.

A DTensor says which box of the whole its local tensor is: its mesh, the rank's place in it, and how
each dimension is split over it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from ckptd.checkpoint.format.codec import parse_json
from ckptd.checkpoint.load.foreign import SHARD
from ckptd.errors import CorruptError, MismatchError, RefusedError
from ckptd.readers.base import Foreign, ForeignPiece, KeptValues, Listing, damaged, missing, step_of
from ckptd.readers.hints import config_hints
from ckptd.readers.pickles import (
    PickledObject,
    PickledTensor,
    check_read,
    counts,
    named_values,
    unread_kind,
)
from ckptd.readers.zips import Extent, TorchZip, extent_of, open_zip
from ckptd.types import DTYPES, Box

_ENDS = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
_MODEL = "pytorch_model"
"""Begins the names of files that transformers writes beside ``config.json``."""
_BESIDE = re.compile(
    r"training_args\.bin|rng_state.*|scheduler\.(pt|bin)|random_states_.*|.*_rng.*"
    r"|extra_state_(world_size_[0-9]+_)?rank_[0-9]+\.pt"
)
_RANK = re.compile(r"(?:^|[_.-])rank[_-]?([0-9]{1,6})(?=[_.-])")
_ITEM = re.compile(r"(.+)_(0|[1-9][0-9]{0,5})\.pt")
METADATA = "metadata.pkl"
"""File that torch_checkpointing writes where a load may cut tensors in other ways."""
_OPTIMIZER = re.compile(r"(?:^|[_.-])optim(?:izer)?(?=[_.-])")
_WORLD = re.compile(r"world_?size[_-]?([0-9]{1,6})")
PART = re.compile(r"^shard-([0-9]{5})-")
"""How names begin where DCP tells the ranks' parts of one shard apart."""
_MAX_INDEX_BYTES = 1 << 28
_MAX_AXES = 64
_CHECKSUM_BYTES = 4
"""Storages of this length differ where their CRC does, and only there."""
_BLOCK = 1 << 22
_MAX_SPAN = 1 << 28


class TorchReader:
    """Reads files of torch.save."""

    name = "torch"

    def recognise(self, names: Listing) -> int:
        """Return 40 where there are such files, beside those of a trainer."""
        return 40 if candidates(names) else 0

    def open(self, names: Listing) -> Foreign:
        """Read the pickles of all files."""
        files, unread = _chosen(names)
        ranks = {f: int(match[1]) for f in files if (match := _RANK.search(f))}
        _check_ranks(ranks, names)
        items = {} if ranks else _items(files, names)
        ranks |= {file: rank for file, (_, rank) in items.items()}
        sections = _sections(ranks) if not items else {f: f"{i}." for f, (i, _) in items.items()}
        has_sections = False
        pieces: list[ForeignPiece] = []
        values = KeptValues()
        unread_tensors: dict[str, str] = {}
        for file in files:
            found = load_torch(names, file)
            for own, value in named_values(found.value, names.key(file)):
                name = sections.get(file, "") + own
                if items and value is found.value:
                    name = items[file][0]
                parts = _parts(names, file, found, name, value, ranks.get(file))
                if parts is None:
                    kind = unread_kind(value)
                    if kind is None:
                        values.add(name, value)
                    else:
                        unread_tensors.setdefault(name, kind[0])
                    continue
                pieces += parts
                top = isinstance(found.value, dict) and own in found.value
                has_sections |= bool(items) or (file not in sections and not top)
        _check_replicas(names, pieces, bool(ranks))
        step = step_of(names, *files[:1])
        of_model = all(f.startswith(_MODEL) for f in files)
        lay, sizes = config_hints(names) if of_model else ("", {})
        left_out = list(values.left_out)
        return Foreign(
            pieces,
            values.objects(),
            left_out,
            unread,
            step,
            lay,
            sizes,
            has_sections=has_sections,
            unread_tensors=unread_tensors,
        )


def _items(files: Sequence[str], names: Listing) -> dict[str, tuple[str, int]]:
    """Return item and rank of each file, where all are of torch_checkpointing; else nothing.

    Each item has a file of each rank, ``model_0.pt``. So may files be called that one program saved
    in each epoch; tensors that are no parts are refused there, as they are in two files.
    """
    found = {f: match for f in files if (match := _ITEM.fullmatch(f))}
    by_item: dict[str, set[int]] = {}
    for match in found.values():
        by_item.setdefault(match[1], set()).add(int(match[2]))
    world = max(map(len, by_item.values()), default=0)
    complete = all(ranks == set(range(world)) for ranks in by_item.values())
    if len(found) < len(files) or not complete or (world < 2 and METADATA not in names.names):
        return {}
    return {file: (match[1], int(match[2])) for file, match in found.items()}


def _sections(ranks: Iterable[str]) -> Mapping[str, str]:
    """Return what names begin with in the optimizer's files, where each rank has others beside.

    Else states by number, ``state.0.exp_avg``, were taken for weights of the model.
    """
    if len({_RANK.sub("", file) for file in ranks}) < 2:
        return {}
    return {file: "optimizer." for file in ranks if _OPTIMIZER.search(file)}


def candidates(names: Listing) -> list[str]:
    """Return the files that may be of torch.save, but for those that trainers put beside."""
    return [n for n in names.ending(*_ENDS) if not _BESIDE.fullmatch(n)]


def load_torch(names: Listing, file: str) -> TorchZip:
    """Return a file of torch.save, its pickle read; errors as `open_zip`."""
    return open_zip(names.reads(file), 0, names.size(file), names.key(file))


def local_tensors(names: Listing, file: str, left_out: list[str]) -> Iterator[ForeignPiece]:
    """Yield the tensors of one file of a rank, as they are there; raises as `check_read`.

    The names of other values go into `left_out`.
    """
    found, key = load_torch(names, file), names.key(file)
    for name, value in named_values(found.value, key):
        local = value.get("_local_tensor") if isinstance(value, PickledObject) else value
        if isinstance(local, PickledTensor):
            yield whole_piece(name, found, local, key)
        else:
            check_read(value, f"{key}: {name}")
            left_out.append(f"{file}: {name}")


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Finds a tensor of a file when its bytes are wanted."""

    found: TorchZip
    tensor: PickledTensor
    where: str
    part: tuple[Any, ...] | None = None
    """Which part of a DTensor it is: coordinates in the mesh and rank; None for a plain tensor."""

    def __call__(self) -> Extent:
        return extent_of(self.found, self.tensor, self.where)


def whole_piece(name: str, found: TorchZip, tensor: PickledTensor, key: str) -> ForeignPiece:
    """Return a tensor of a file as a whole one."""
    at = TensorAt(found, tensor, f"{key}: {name}")
    return ForeignPiece(name, tensor.dtype, tensor.shape, Box.whole(tensor.shape), key, at)


def file_index(names: Listing, end: str) -> tuple[str, Mapping[str, str]]:
    """Return the name of the one index of a sharded model, and each tensor's file; or "".

    Raises
    ------
    CorruptError
        What is there breaks a rule of the format for a file that it names.
    """
    found = names.ending(end + _INDEX)
    if len(found) != 1:
        return "", {}
    try:
        document = parse_json(names.read(found[0], _MAX_INDEX_BYTES))
        weights = {str(k): str(v) for k, v in document["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = "invalid index of a sharded model"
        raise damaged(what, names.key(found[0]), error) from None
    there = set(names.names)
    for file in sorted(set(weights.values())):
        if file not in there:
            raise missing(names.key(file))
    return found[0], weights


def _chosen(names: Listing) -> tuple[list[str], list[str]]:
    """Return the files that are read, and those that are not."""
    found = candidates(names)
    _, weights = file_index(names, ".bin")
    files = sorted(set(weights.values())) or found
    check_shards(names, files)
    return files, [n for n in names.ending(*_ENDS) if n not in files]


def check_shards(names: Listing, files: Sequence[str]) -> None:
    """Check that all of ``...-00001-of-00003...`` are there;.

    A shard that a user names is read alone.
    """
    if names.is_chosen:
        return
    shards: dict[tuple[str, int], set[int]] = {}
    for file in files:
        found = SHARD.search(file)
        if found:
            beside = PART.sub("", file[: found.start()]), int(found[2])
            shards.setdefault(beside, set()).add(int(found[1]))
    for (_, of), numbers in shards.items():
        gone = set(range(1, of + 1)) - numbers
        if gone:
            raise missing(names.key(f"shard {min(gone)} of {of}"))


def _check_ranks(ranks: Mapping[str, int], names: Listing) -> None:
    """Check that the files of all ranks are there, as far as names tell."""
    groups: dict[str, set[int]] = {}
    for file, rank in ranks.items():
        groups.setdefault(_RANK.sub("", file), set()).add(rank)
    for name, found in groups.items():
        world = _WORLD.search(name)
        size = int(world[1]) if world else max(found) + 1
        gone = sorted(set(range(size)) - found)
        if gone or max(found) >= size:
            raise CorruptError(
                "files of ranks are missing, or of another number of ranks",
                where=f"{names.where}: {name}",
                wanted=f"ranks 0 to {size - 1}",
                found=f"{len(found)} files; the first that is missing is rank {gone[:1]}",
            )


def _parts(
    names: Listing, file: str, found: TorchZip, name: str, value: Any, rank: int | None
) -> list[ForeignPiece] | None:
    """Return the parts of a tensor that a value is; None for what is no tensor."""
    where = f"{names.key(file)}: {name}"
    key = names.key(file)
    if isinstance(value, PickledObject) and _is_sharded(value):
        shape, shards = _shards(value, rank, where)
        return [
            ForeignPiece(name, t.dtype, shape, box, key, TensorAt(found, t, where, part))
            for box, t, part in shards
        ]
    if isinstance(value, PickledObject):
        local = value.get("_local_tensor")
        if not isinstance(local, PickledTensor):
            return None
        shape, box, part = _box(value, rank, where)
        if box.shape != local.shape:
            raise MismatchError(
                "a rank's part has another shape than its placements say",
                where=where,
                wanted=box.shape,
                found=local.shape,
            )
    elif isinstance(value, PickledTensor):
        local, shape, box, part = value, value.shape, Box.whole(value.shape), None
    else:
        return None
    at = TensorAt(found, local, where, part)
    return [ForeignPiece(name, local.dtype, shape, box, key, at)]


def _check_replicas(names: Listing, pieces: Sequence[ForeignPiece], ranks: bool) -> None:
    """Refuse what two files hold and nothing says that it is the same.

    A DTensor says so. A plain tensor beside DTensors is one that every rank has whole, a buffer:
    the bytes of all ranks are compared. Where no tensor of a file says which part it is, plain ones
    may be parts, so that only single elements are compared: counters of steps.
    """
    plain: dict[str, ForeignPiece] = {}
    parts: dict[tuple[Any, ...], ForeignPiece] = {}
    parted = {p.file for p in pieces if isinstance(p.at, TensorAt) and p.at.part is not None}
    for piece in pieces:
        at = piece.at
        if not isinstance(at, TensorAt):
            continue
        if at.part is not None:
            first = parts.setdefault((piece.name, *at.part), piece)
            if first is not piece:
                raise _twice(first, piece, "the same part of a tensor", *_ONE_FILE)
            continue
        first = plain.setdefault(piece.name, piece)
        if first is piece:
            continue
        alike = (first.dtype, first.shape) == (piece.dtype, piece.shape)
        both = first.file in parted and piece.file in parted
        if not ranks or not alike or (piece.numel > 1 and not both):
            remedy = _LAYOUT if ranks else _RENAME if parted else _ONE_FILE
            raise _twice(first, piece, "tensors of one name", *remedy)
        if not _same(names, first, piece):
            raise CorruptError(
                "ranks hold different values of a tensor that is not marked as sharded",
                kind="replicas-differ",
                where=f"{first.file} and {piece.file}: {piece.name}"[:400],
                wanted="equal bytes on all ranks",
                found=f"other values of {piece.shape}",
                hint=f"if they are parts: {_LAYOUT[1]}",
            )


def _same(names: Listing, first: ForeignPiece, piece: ForeignPiece) -> bool:
    """Whether two tensors of one type and shape have the same bytes.

    Checksums of files tell it for storages that are no longer than one.
    """
    ats = [p.at for p in (first, piece) if isinstance(p.at, TensorAt)]
    sums = [(a.found.checksum(a.tensor.storage.key), a.tensor.offset) for a in ats]
    if sums[0] == sums[1] and sums[0][0][0] and sums[0][0][1] <= _CHECKSUM_BYTES:
        return True
    blocks = [_blocks(names, p) for p in (first, piece)]
    return all(a == b for a, b in zip_longest(*blocks))


def _blocks(names: Listing, piece: ForeignPiece) -> Iterator[bytes]:
    """Yield the elements of a tensor of a file in row-major order, as many at a time as fit."""
    at = piece.at if isinstance(piece.at, Extent) else piece.at()
    read, item = names.reads(piece.file.removeprefix(names.prefix)), DTYPES[piece.dtype].itemsize
    if at.strides is not None:
        span = 1 + sum((n - 1) * s for n, s in zip(piece.shape, at.strides, strict=True))
        if max(span, piece.numel) * item > _MAX_SPAN:
            raise RefusedError(
                "a view is too large to compare with other ranks'",
                kind="unreadable-format",
                where=f"{piece.file}: {piece.name}"[:400],
                wanted=f"at most {_MAX_SPAN} bytes",
                found=f"{piece.shape}, strides {at.strides}",
                hint="save it with .contiguous()",
            )
        raw = read(at.start, at.start + span * item)
        steps = tuple(s * item for s in at.strides)
        gathered = np.ndarray(piece.shape, np.dtype(f"V{item}"), raw, 0, steps).tobytes()
    size = piece.numel * item
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        if at.strides is not None:
            yield gathered[start:end]
        else:
            yield read(at.start + start, at.start + end)


_ONE_FILE = "one file", "give the path of one file"
_LAYOUT = (
    "DTensors, or a layout that assigns files to ranks",
    "ckptd reshard --from LAYOUT, with a line 'files' in the layout",
)
_RENAME = (
    "file names with the rank, such as model_rank_0.pt and optim_rank_0.pt",
    "rename them to NAME_rank_N.pt; if they are not of one job, give the path of one file",
)
"""Each: what is wanted where two files hold a name, and what to do."""


def _twice(
    first: ForeignPiece, piece: ForeignPiece, what: str, wanted: str, hint: str
) -> MismatchError:
    return MismatchError(
        f"two files hold {what}, and it is unknown which one is current",
        where=f"{first.file} and {piece.file}: {piece.name}"[:400],
        wanted=wanted,
        found=f"{piece.shape} in both",
        hint=hint,
    )


# -- sharded tensors, of FSDP1 ---------------------------------------------------------------------


def _is_sharded(value: PickledObject) -> bool:
    """Whether a value is a `ShardedTensor`, which torch pickles as a subclass with a state."""
    made = value.args[0] if value.short == "_rebuild_wrapper_subclass" and value.args else value.cls
    return isinstance(made, str) and made.rpartition(".")[2] == "ShardedTensor"


def _shards(
    value: PickledObject, rank: int | None, where: str
) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor, tuple[Any, ...]]]]:
    """Return the shape of a sharded tensor, and each shard of this rank with its place."""
    try:
        local, metadata, group, *_ = value.fields["state"]
        shape = counts(metadata.fields["size"])
        said = group.fields["global_rank"]
        counts((said,))
        shards = []
        for shard in local:
            about, tensor = shard.fields["metadata"], shard.fields["tensor"]
            box = Box(counts(about.fields["shard_offsets"]), counts(about.fields["shard_sizes"]))
            check_read(tensor, where)
            if not isinstance(tensor, PickledTensor) or tensor.shape != box.shape:
                raise ValueError(f"a shard of another shape than {box.shape}")
            if len(box.offset) != len(shape) or len(box.shape) != len(shape):
                raise ValueError("a shard of another number of dimensions")
            shards.append((box, tensor, (box.offset, said)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged("unsupported sharded tensor", where, error) from None
    _check_rank(said, rank, where)
    return shape, shards


def _check_rank(said: int, rank: int | None, where: str) -> None:
    """Check that a file is of the rank that its name says."""
    if rank is not None and said != rank:
        raise MismatchError(
            "a file was renamed or belongs to another job: its tensors are another rank's",
            where=where,
            wanted=f"rank {rank}, as its name says",
            found=f"rank {said}",
        )


# -- DTensors --------------------------------------------------------------------------------------


def _box(
    value: PickledObject, rank: int | None, where: str
) -> tuple[tuple[int, ...], Box, tuple[Any, ...]]:
    """Return the shape of a DTensor, which box of it its rank has, and which part that is."""
    try:
        spec = value.fields["_spec"]
        meta, mesh = spec.fields["tensor_meta"], spec.fields["mesh"]
        shape = counts(meta.args[0] if meta.args else meta.fields["shape"])
        extents, here = _extents(mesh), counts(mesh.fields["_coordinate_on_dim"])
        splits = [_split(p) for p in spec.fields["placements"]]
        orders = [counts(entry.args[1]) for entry in spec.get("shard_order") or ()]
        ascend = _ascend(mesh, extents)
        said = mesh.fields.get("_rank")
        good = len(extents) == len(here) == len(splits) and all(
            type(c) is int and 0 <= c < n for c, n in zip(here, extents, strict=True)
        )
        if said is not None:
            counts((said,))
        if not good or any(d is not None and not 0 <= d < len(shape) for d, _ in splits):
            raise ValueError("mesh, coordinates and placements do not fit each other")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged("unsupported DTensor", where, error) from None
    turned = all(factor == 1 for _, factor in splits) and any(o != tuple(sorted(o)) for o in orders)
    if turned or not ascend:
        raise RefusedError(
            "unsupported order of ranks or splits in a DTensor's mesh",
            kind="unreadable-format",
            where=where,
            found=f"splits from right to left, {orders}" if turned else "ranks do not ascend",
        )
    if said is not None:
        _check_rank(said, rank, where)
    rank = said if rank is None else rank
    return shape, _cut(shape, extents, here, splits, where), (*here, rank)


def _cut(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    here: tuple[int, ...],
    splits: list[tuple[int | None, int]],
    where: str,
) -> Box:
    """Split each dimension over the axes of the mesh.

    Axes split one after the other, but a strided split comes after the `factor` parts that axes
    to its right make: FSDP over tensor parallel.
    """
    offset, size = [0] * len(shape), list(shape)
    for axis in sorted(range(len(splits)), key=lambda a: splits[a][1] > 1):
        d, factor = splits[axis]
        if d is None:
            continue
        others = [
            n
            for (other, _), n in zip(splits[axis + 1 :], extents[axis + 1 :], strict=True)
            if other == d and n > 1
        ]
        right = math.prod(others)
        # Over several axes that do not divide it, torch's own two ways of splitting differ.
        unclear = factor > 1 and len(others) > 1 and shape[d] % right
        late = factor == 1 and size[d] != shape[d] and _late(splits, axis)
        if factor not in (1, right) or unclear or late:
            raise RefusedError(
                "unsupported order of splits in a DTensor",
                kind="unreadable-format",
                where=where,
                found=f"splits {splits} of {shape[d]} over {extents}",
            )
        part = -(-size[d] // extents[axis])
        low = min(part * here[axis], size[d])
        offset[d] += low
        size[d] = min(part, size[d] - low)
    return Box(tuple(offset), tuple(size))


def _late(splits: list[tuple[int | None, int]], axis: int) -> bool:
    """Whether a strided split of the same dimension stands to the right of a plain one."""
    return any(d == splits[axis][0] and factor > 1 for d, factor in splits[axis + 1 :])


def _split(placement: Any) -> tuple[int | None, int]:
    """Return ``(dimension, factor)`` of a placement; no dimension for a replica."""
    match placement.short:
        case "Replicate":
            return None, 1
        case "Shard":
            return placement.fields["dim"], 1
        case "_StridedShard":
            (factor,) = counts((placement.fields["split_factor"],))
            return placement.fields["dim"], factor
    raise ValueError(f"placement {placement.short}")


def _extents(mesh: PickledObject) -> tuple[int, ...]:
    layout = mesh.get("_layout")
    if isinstance(layout, PickledObject):
        axes = layout.get("axes")
        if (
            axes is None
        ):  # PyTorch 2.10 to 2.12: a tuple has what each axis has, a number is the one
            shape = layout.fields["shape"]
            sizes = shape if isinstance(shape, tuple) else (shape,)
        else:
            sizes = tuple(a.fields["shape"] for a in axes)
        if len(sizes) > _MAX_AXES:
            raise ValueError("a mesh of too many axes")
        return tuple(math.prod(_flat(size)) for size in sizes)
    whole = mesh.get("mesh", mesh.get("_mesh"))
    if isinstance(whole, PickledTensor):
        return whole.shape
    raise ValueError("a mesh without its extents")


def _ascend(mesh: PickledObject, extents: tuple[int, ...]) -> bool:
    """Whether ranks ascend along each axis; in the whole, where the mesh is a part of another.

    Groups are sorted: by them FSDP2 says whose a part is, but DCP goes by the coordinates.
    """
    ranks = tuple(mesh.get("_flatten_rank_map", mesh.get("_flatten_mesh_list", ())))
    if set(map(type, ranks)) - {int}:
        raise ValueError("ranks of a mesh that are not numbers")
    grid = np.array(ranks).reshape(extents if len(ranks) == math.prod(extents) else -1)
    return all((np.diff(grid, axis=axis) > 0).all() for axis in range(grid.ndim))


def _flat(value: Any) -> Iterator[int]:
    """Yield the numbers of nested tuples; `ValueError` for too many, or for anything else."""
    left, stack = _MAX_AXES, [value]
    while stack:
        item = stack.pop()
        left -= 1
        if isinstance(item, tuple | list) and len(item) <= left:
            stack += item
        elif left < 0 or type(item) is not int or not 0 < item < 1 << 31:
            raise ValueError("an axis of a mesh without its size")
        else:
            yield item
