"""Pieces of files that somebody else laid out: at given places, unaligned, without digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import CorruptError
from ckptd.format.filemap import FileMap
from ckptd.format.manifest import FileEntry, GridEntry, Manifest, ManifestTables, TensorEntry
from ckptd.layout.block import box_region
from ckptd.layout.grid import Axis, Grid, whole
from ckptd.layout.owners import Owners, single_owner
from ckptd.load.files import PieceLocations
from ckptd.load.plan import Want, read_plan
from ckptd.load.read import execute
from ckptd.store import open_store
from ckptd.store.base import Store
from ckptd.types import Box

RNG = np.random.default_rng(1)
CUT = RNG.normal(size=(5, 3)).astype(np.float32)
OTHER = RNG.normal(size=(4, 6))
ENDS = {"a.bin": 200, "b.bin": 300}


def write(folder: Path) -> None:
    """Write two files: rows of a tensor in both, and another tensor in one."""
    a, b = bytearray(RNG.bytes(ENDS["a.bin"])), bytearray(RNG.bytes(ENDS["b.bin"]))
    a[7 : 7 + 24] = CUT[:2].tobytes()
    b[100 : 100 + 36] = CUT[2:].tobytes()
    a += OTHER.tobytes()
    (folder / "a.bin").write_bytes(a)
    (folder / "b.bin").write_bytes(b)


def places(store: Store, starts: tuple[tuple[int, ...], ...], size: int = 392) -> PieceLocations:
    """Describe them."""
    tables = ManifestTables()
    cut = Grid((Axis.from_sizes([2, 3]), Axis.from_sizes([3])))
    tensors = (
        TensorEntry(
            "cut",
            "float32",
            (5, 3),
            tables.grid(GridEntry.of(cut)),
            tables.owner(Owners.from_array([0, 1]).runs),
        ),
        TensorEntry(
            "other",
            "float64",
            (4, 6),
            tables.grid(GridEntry.of(whole((4, 6)))),
            tables.owner(single_owner(0).runs),
        ),
    )
    files = (FileEntry("a.bin", 0, 0, size), FileEntry("b.bin", 1, 10, ENDS["b.bin"] - 10))
    manifest = Manifest(0, 1, "foreign", 2, files, tables.grids, tables.owners, tensors)
    return PieceLocations(manifest, FileMap.of(manifest, "foreign"), store, starts)


STARTS = ((7, 90), (200,))


def read(found: PieceLocations, number: int, box: Box, dtype: str) -> np.ndarray:
    out = np.zeros(box.numel, dtype=dtype)
    wants = [Want(number, (box_region(box),), out)]
    plan = read_plan(found.manifest, found.filemap, wants, places=found)
    execute(plan, found.store)
    return out.reshape(box.shape)


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_pieces_are_read_where_the_table_says(tmp_path: Path, url: str) -> None:
    write(tmp_path)
    where = tmp_path if url == "folder" else f"memory://{tmp_path.name}-pieces"
    with open_store(where) as store:
        if url == "memory":
            for name in ENDS:
                store.put(name, (tmp_path / name).read_bytes())
        found = places(store, STARTS)
        assert np.array_equal(read(found, 0, Box.whole((5, 3)), "float32"), CUT)
        assert np.array_equal(read(found, 1, Box.whole((4, 6)), "float64"), OTHER)
        part = Box((1, 2), (2, 3))
        assert np.array_equal(read(found, 1, part, "float64"), OTHER[1:3, 2:5])
        assert not found.is_own(0)
        assert found.indexes[0] is None
        assert found.holders(0, 0, 400) == "tensor cut (chunk cut@0,0), tensor other"
        assert found.holders(1, 0, 10) == ""


@pytest.mark.parametrize("starts", [((7, 90), (201,)), ((7, 255), (200,)), ((-1, 90), (200,))])
def test_a_piece_that_reaches_out_of_its_file_is_refused(
    tmp_path: Path, starts: tuple[tuple[int, ...], ...]
) -> None:
    write(tmp_path)
    with open_store(tmp_path) as store:
        found = places(store, starts)
        with pytest.raises(CorruptError) as caught:
            read(found, 0, Box.whole((5, 3)), "float32")
            read(found, 1, Box.whole((4, 6)), "float64")
    assert caught.value.kind == "truncated"


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with open_store(tmp_path) as store:
        found = places(store, STARTS, size=400)
        with pytest.raises(CorruptError) as caught:
            read(found, 1, Box.whole((4, 6)), "float64")
    assert caught.value.kind == "truncated"
