"""``ckptd inspect``: what one checkpoint holds."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ckptd.cli.address import Address, Where, opened
from ckptd.cli.contents import InspectDocument, TensorRow, describe
from ckptd.cli.ls import metadata_text
from ckptd.cli.output import Json, Reply, flag, print_rows, print_table, shorten, size_text
from ckptd.cli.output import time_text as when
from ckptd.cli.tree import tree_rows

__all__ = ["inspect"]

_TEXT_WIDTH = 100


def inspect(
    where: Where,
    /,
    *,
    tensor: Annotated[
        str,
        Parameter(
            help="Only tensors whose name matches this shell pattern, or begins with it.",
            show_default=False,
        ),
    ] = "",
    depth: Annotated[
        int | None, Parameter(help="Levels of names to show.", show_default=False)
    ] = None,
    full: Annotated[bool, flag("Show repeated layers one by one.")] = False,
    chunks: Annotated[bool, flag("Show where each chunk lies.")] = False,
    json: Json = False,
) -> Reply:
    """Show what a checkpoint holds: tensors, layouts, objects, files."""
    address = Address.of(where)
    with opened(address.root) as catalogue:
        document = describe(catalogue, address.find(catalogue), tensor, chunks)
    return Reply(document, lambda d: _show(d, depth, full, objects=not tensor))


# -- for people ------------------------------------------------------------------------------------


def _show(document: InspectDocument, depth: int | None, full: bool, *, objects: bool) -> None:
    d = document
    print(
        f"step {d.step} of generation {d.generation}, {when(d.created)}, {d.world_size} ranks,"
        f" {size_text(d.data_bytes)}"
    )
    if d.metadata:
        print(f"metadata: {metadata_text(d.metadata, _TEXT_WIDTH)}")
    total = size_text(sum(t.bytes for t in d.tensors))
    print(f"\ntensors: {len(d.tensors)}, {total}")
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
