"""``ckptd inspect``: tensors as a tree, layouts, objects, files, chunks of a checkpoint.

In it: patterns of ``--tensor`` and names that are near; the most chunks; how alike layers are
folded into one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec

from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.cli.address import CheckpointAddress, CheckpointDocument, Where, opened
from ckptd.checkpoint.cli.ls import metadata_text, told
from ckptd.checkpoint.format.manifest import FileEntry, ObjectEntry, foreign_sizes
from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.words import TensorLayout, hint_text, object_text, ranks_text
from ckptd.checkpoint.load.foreign import ForeignStore
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.load.source import CheckpointReader, SectionReader, TensorInfo
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.cli.options import Section
from ckptd.cli.output import (
    Json,
    Reply,
    counted,
    flag,
    option,
    print_rows,
    print_table,
    print_text,
    shorten,
)
from ckptd.cli.output import time_text as when
from ckptd.errors import NotFoundError, UsageError, size_text

_MOST_CHUNKS = 100_000
_MOST_NEAR = 5


class ChunkRow(msgspec.Struct, frozen=True):
    """One chunk.

    Attributes
    ----------
    offset, shape
        Its cell, in elements of the tensor.
    flat
        First element and end of the range inside the cell, row-major; null for the whole cell.
    file, rank
        The file that holds it and the rank that wrote it; null when it is absent.
    start, end
        Bytes of the file's data section; of a foreign checkpoint, of the file.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    file: str | None
    rank: int | None
    start: int
    end: int


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One logical tensor.

    Attributes
    ----------
    name, aliases
        Its name, and those of tensors that are the same one.
    bytes
        Of the whole tensor, absent chunks included.
    layout
        How it is cut: words, cells, flat, chunks, absent, ranks.
    chunk_list
        With ``--chunks``; else null.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    layout: TensorLayout
    aliases: tuple[str, ...] = ()
    chunk_list: tuple[ChunkRow, ...] | None = None


class ObjectRow(msgspec.Struct, frozen=True):
    """One value that is no tensor.

    Attributes
    ----------
    kind
        ``value``, or ``groups`` for an optimizer's groups.
    per_rank
        What happens to it when the world changes; empty for a value that all ranks share.
    text
        The value in few words.
    value
        The value in the encoding of the format (spec section 7); null when it lies in a file.
    bytes
        Bytes in a file, 0 when it lies in the manifest.
    """

    name: str
    kind: str
    per_rank: str
    text: str
    value: Any
    bytes: int


class FileRow(msgspec.Struct, frozen=True):
    """One data file: path below the root, the rank that wrote it, length of data and header.

    Of a foreign checkpoint it is the file itself, all of its bytes data.
    """

    path: str
    rank: int
    bytes: int
    header_bytes: int


class MeshRow(msgspec.Struct, frozen=True):
    """One device mesh of the job that saved."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: str


class InspectDocument(CheckpointDocument, frozen=True, kw_only=True, tag="inspect"):
    """The document that ``ckptd inspect --json`` prints.

    Attributes
    ----------
    root, step, generation, attempt, created, world_size, data_bytes, folder, metadata
        As in ``ckptd ls``.
    tensors
        In the order of the checkpoint; with ``--tensor`` only those that match.
    objects, files, meshes
        The rest of the checkpoint.
    witness
        Kind of the witness; null when there is none.
    layout
        Name of the layout whose program it keeps, or which foreign files hint at, with the sizes
        that these hint at; empty for none.
    """

    attempt: str
    created: str
    world_size: int
    data_bytes: int
    folder: str
    metadata: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    objects: tuple[ObjectRow, ...]
    files: tuple[FileRow, ...]
    meshes: tuple[MeshRow, ...]
    witness: str | None
    layout: str = ""


def matches(name: str, pattern: str) -> bool:
    """Tell whether a tensor is meant by a pattern: a shell pattern, or the beginning of names."""
    return not pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def no_tensor(pattern: str, names: Sequence[str], where: str) -> NotFoundError:
    """Return the error for a pattern that no tensor matches."""
    near = difflib.get_close_matches(pattern, names, _MOST_NEAR, 0.3) or list(names[:_MOST_NEAR])
    return NotFoundError(
        "no tensor matches",
        where=where,
        wanted=pattern,
        found=f"{len(names)} tensors, such as {', '.join(near)}" if near else "no tensor at all",
    )


def describe(
    catalogue: Catalogue, name: CommitName, pattern: str, with_chunks: bool, section: str | None
) -> InspectDocument:
    """Return what a checkpoint holds.

    Parameters
    ----------
    pattern
        Only tensors that match it (`matches`); "" is all of them.
    with_chunks
        Also say where each chunk lies.
    section
        Only what is below this name, without it.

    Raises
    ------
    NotFoundError
        No tensor has that name, or matches that pattern.
    UsageError
        There are too many chunks to list.
    """
    reader = CkptdReader(catalogue, name, listed=False)
    part: CheckpointReader = SectionReader(reader, section) if section else reader
    above = f"{section}." if section else ""
    chosen = [
        info
        for info in part.infos.values()
        if any(matches(n, pattern) for n in (info.name, *info.aliases))
    ]
    if pattern and not chosen:
        raise no_tensor(pattern, part.names, catalogue.where(reader.commit.folder))
    total = sum(part.grid(info.name).npieces for info in chosen) if with_chunks else 0
    if total > _MOST_CHUNKS:
        raise UsageError(
            "too many chunks to list",
            wanted=f"at most {_MOST_CHUNKS}",
            found=total,
            hint="choose tensors with --tensor PATTERN",
        )
    manifest = reader.manifest
    return InspectDocument(
        **told(reader.commit) | {"metadata": dict(reader.metadata)},
        root=reader.url,
        tensors=tuple(_tensor(reader, info, above, with_chunks=with_chunks) for info in chosen),
        objects=tuple(_object(reader, entry) for entry in part.entries),
        files=tuple(_file(catalogue, f) for f in manifest.files if f.data_start),
        meshes=tuple(
            MeshRow(m.names, m.shape, ranks_text(sorted(Owners(m.ranks).array().tolist())))
            for m in manifest.meshes
        ),
        witness=manifest.witness.kind if manifest.witness else None,
        layout=hint_text(manifest.lay, foreign_sizes(manifest)),
    )


def _file(catalogue: Catalogue, file: FileEntry) -> FileRow:
    if isinstance(catalogue.store, ForeignStore):
        path, size = catalogue.store.foreign_file(file.path)
        return FileRow(path, file.rank, size, 0)
    return FileRow(file.path, file.rank, file.data_bytes, file.data_start)


def _tensor(reader: CkptdReader, info: TensorInfo, above: str, *, with_chunks: bool) -> TensorRow:
    name, size = above + info.name, info.dtype.itemsize
    return TensorRow(
        name=info.name,
        dtype=info.dtype.name,
        shape=info.shape,
        bytes=info.nbytes,
        layout=reader.layout(name),
        aliases=info.aliases,
        chunk_list=tuple(_chunks(reader, name, size)) if with_chunks else None,
    )


def _object(reader: CkptdReader, entry: ObjectEntry) -> ObjectRow:
    nbytes = reader.nbytes(entry.tensor) if entry.tensor else 0
    ranks = reader.layout(entry.tensor).ranks if entry.tensor else ""
    text = object_text(entry, nbytes, ranks)
    return ObjectRow(entry.name, entry.kind, entry.per_rank, text, entry.value, nbytes)


def _chunks(reader: CkptdReader, name: str, itemsize: int) -> Iterator[ChunkRow]:
    tensor, grid = reader.number(name), reader.grid(name)
    for number in range(grid.npieces):
        piece = grid.piece(number)
        file, start = reader.places.of(tensor, number)
        here = None if file == ABSENT else reader.manifest.files[file]
        path = here.path if here else None
        end = start + (piece.numel * itemsize if here else 0)
        store = reader.places.store
        if path and isinstance(store, ForeignStore):
            start, end = store.foreign_range(path, start)
            path, _ = store.foreign_file(path)
        yield ChunkRow(
            offset=piece.box.offset,
            shape=piece.box.shape,
            flat=piece.flat,
            file=path,
            rank=here.rank if here else None,
            start=start,
            end=end,
        )


_TEXT_WIDTH = 100


def inspect(
    where: Where,
    /,
    *,
    tensor: Annotated[
        str, option("Only tensors whose name matches this shell pattern, or begins with it.")
    ] = "",
    section: Section = None,
    depth: Annotated[int | None, option("Levels of names to show.")] = None,
    full: Annotated[bool, flag("Show repeated layers one by one.")] = False,
    chunks: Annotated[bool, flag("Show where each chunk lies.")] = False,
    json: Json = False,
) -> Reply:
    """Show what a checkpoint holds: tensors, layouts, objects, files."""
    address = CheckpointAddress.of(where)
    with opened(address.root) as catalogue:
        document = describe(catalogue, address.find(catalogue), tensor, chunks, section)
    return Reply(document, lambda d: _show(d, depth, full, objects=not tensor))


# -- for people ------------------------------------------------------------------------------------


def _show(document: InspectDocument, depth: int | None, full: bool, *, objects: bool) -> None:
    d = document
    print(
        f"step {d.step} of generation {d.generation}, {when(d.created)},"
        f" {counted(d.world_size, 'rank')}, {size_text(d.data_bytes)}"
    )
    if d.metadata:
        print_text(f"metadata: {metadata_text(d.metadata, _TEXT_WIDTH)}", 10)
    if d.layout:
        print(f"layout: {d.layout}")
    print(f"\ntensors: {len(d.tensors)}, {size_text(sum(t.bytes for t in d.tensors))}")
    if d.tensors:
        print_table(
            ("NAME", "DTYPE", "SHAPE", "LAYOUT", "RANKS", ">SIZE"),
            tree_rows(d.tensors, depth, full=full),
        )
    for t in d.tensors:
        if t.chunk_list is not None:
            _show_chunks(t)
    if objects:
        _show_rest(d)


def _show_chunks(tensor: TensorRow) -> None:
    print(f"\nchunks of {tensor.name}")
    print_rows(
        tensor.chunk_list or (),
        {
            "OFFSET": lambda c: list(c.offset),
            "SHAPE": lambda c: list(c.shape),
            "RANGE": lambda c: None if c.flat is None else f"{c.flat[0]}-{c.flat[1]}",
            ">RANK": lambda c: c.rank,
            "FILE": lambda c: c.file or "absent",
            ">BYTES FROM": lambda c: c.start,
            ">TO": lambda c: c.end,
        },
    )


def _show_rest(document: InspectDocument) -> None:
    if document.objects:
        print(f"\nobjects: {len(document.objects)}")
        print_rows(
            document.objects,
            {"NAME": lambda o: o.name, "VALUE": lambda o: shorten(o.text, _TEXT_WIDTH)},
        )
    print(f"\nfiles: {len(document.files)}")
    print_rows(
        document.files,
        {
            "PATH": lambda f: f.path,
            ">RANK": lambda f: f.rank,
            ">SIZE": lambda f: size_text(f.bytes + f.header_bytes),
        },
    )
    if document.meshes:
        print("\nmeshes")
    for mesh in document.meshes:
        sizes = " x ".join(
            f"{name or 'dim'}={n}" for name, n in zip(mesh.names, mesh.shape, strict=True)
        )
        print(f"{sizes}: ranks {mesh.ranks}")


Cells = tuple[str, ...]
_MOST_LEVELS = 64
"""A name may be 4,096 characters of "a.a.a."; recursion must not follow all of them."""


@dataclass
class _Node:
    """The names below one prefix; `count` and `nbytes` cover all of them."""

    leaf: TensorRow | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    count: int = 0
    nbytes: int = 0
    kind: int = 0


def tree_rows(tensors: Sequence[TensorRow], depth: int | None, *, full: bool) -> list[Cells]:
    """Return ``(name, dtype, shape, layout, ranks, size)`` of each line of the tree.

    Parameters
    ----------
    depth
        Levels to show; None shows all.
    full
        Draw layers that are alike one by one.
    """
    root = _Node()
    for tensor in tensors:
        _insert(root, tensor)
    if not full:
        _number_kinds(root, {})
    return list(_lines(root, None, depth, full=full))


def _insert(root: _Node, tensor: TensorRow) -> None:
    node = root
    for segment in tensor.name.split(".", _MOST_LEVELS):
        node = node.children.setdefault(segment, _Node())
        node.count += 1
        node.nbytes += tensor.bytes
    node.leaf = tensor


def _number_kinds(node: _Node, kinds: dict[Hashable, int]) -> None:
    """Give nodes that look alike (names below, dtypes, shapes, cuts) one number."""
    for child in node.children.values():
        _number_kinds(child, kinds)
    leaf = node.leaf
    own = None if leaf is None else (leaf.dtype, leaf.shape, leaf.layout.words, len(leaf.aliases))
    look = (own, tuple((name, child.kind) for name, child in node.children.items()))
    node.kind = kinds.setdefault(look, len(kinds) + 1)


def _lines(node: _Node, indent: str | None, depth: int | None, *, full: bool) -> Iterator[Cells]:
    """Yield what is below a node; `indent` is None at the top, where no branches are drawn."""
    groups = _groups(node, full=full)
    for i, (label, members) in enumerate(groups):
        shown, levels = members[0], 1
        while len(members) == 1 and shown.leaf is None and len(shown.children) == 1:
            name, shown = next(iter(shown.children.items()))
            members, label, levels = [shown], f"{label}.{name}", levels + 1
        last = i == len(groups) - 1
        branch = "" if indent is None else indent + ("└─ " if last else "├─ ")
        yield _line(branch + label, members)
        left = None if depth is None else depth - levels
        if left is None or left > 0:
            below = "" if indent is None else indent + ("   " if last else "│  ")
            yield from _lines(shown, below, left, full=full)


def _groups(node: _Node, *, full: bool) -> list[tuple[str, list[_Node]]]:
    """Return the children with their labels; neighbouring numbers that look alike are one."""
    out: list[tuple[list[str], list[_Node]]] = []
    for name, child in node.children.items():
        if not full and out and _continues(out[-1], name, child):
            out[-1][0].append(name)
            out[-1][1].append(child)
        else:
            out.append(([name], [child]))
    return [
        (names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}", nodes) for names, nodes in out
    ]


def _continues(group: tuple[list[str], list[_Node]], name: str, child: _Node) -> bool:
    before = group[0][-1]
    return (
        name.isdecimal()
        and before.isdecimal()
        and int(name) == int(before) + 1
        and group[1][0].kind == child.kind
    )


def _line(label: str, members: list[_Node]) -> Cells:
    first = members[0]
    size = size_text(first.nbytes)
    if len(members) > 1:
        label += f"  ({len(members)} alike)"
        size = f"{len(members)} x {size}"
    if first.leaf is None:
        return (label, "", "", counted(first.count, "tensor"), "", size)
    if first.leaf.aliases:
        label += f"  = {', '.join(first.leaf.aliases)}"
    layout = first.leaf.layout
    ranks = layout.ranks if len(members) == 1 else ""
    return (label, first.leaf.dtype, str(list(first.leaf.shape)), layout.words, ranks, size)
