from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.grid import Axis, Grid, whole
from ckptd.base.grids.owners import ABSENT, Owners
from ckptd.checkpoint.format import container
from ckptd.checkpoint.format.container import (
    FileMap,
    build_header,
    is_home,
    parse_header,
    piece_numels,
)
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    GridEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
)
from ckptd.errors import CorruptError, UsageError
from ckptd.types import DTYPES
from tests.base.grids.cutting import even_axis
from tests.base.grids.strategies import Cut, cuts, shapes
from tests.checkpoint.format.strategies import Sample, manifests


@given(manifests())
def test_offsets_are_those_of_a_walk_over_all_pieces(sample: Sample) -> None:
    filemap = FileMap.of(sample.manifest, "manifest.json")
    for file, wanted in enumerate(sample.model.chunks):
        found = [(c.tensor, c.piece.index, c.start, c.end) for c in filemap.chunks(file)]
        assert found == wanted
        assert filemap.nchunks(file) == len(wanted)
        assert filemap.data_bytes(file) == (wanted[-1][3] if wanted else 0)
    nfiles = len(sample.manifest.files)
    assert filemap.all_data_bytes(nfiles).tolist() == [filemap.data_bytes(i) for i in range(nfiles)]
    for number in range(len(sample.manifest.tensors)):
        for piece in range(filemap.grid_of(number).npieces):
            place = sample.model.places.get((number, piece), (ABSENT, 0, 0))
            assert filemap.locate(number, piece) == place
            assert filemap.owner(number, piece) == place[0]
    sizes = [math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in sample.manifest.tensors]
    assert filemap.total_bytes == sum(sizes)


@given(manifests())
def test_headers_agree_with_the_map(sample: Sample) -> None:
    filemap = FileMap.of(sample.manifest, "manifest.json")
    for file in range(len(sample.manifest.files)):
        entries = filemap.header_entries(file)
        header, nbytes = build_header(entries, {})
        assert nbytes == filemap.data_bytes(file)
        parsed, _ = parse_header(header, "x", nbytes)
        for chunk in filemap.chunks(file):
            there = parsed[filemap.chunk_name(file, chunk)]
            assert (there.start, there.end) == (chunk.start, chunk.end)


def refuses(filemap: FileMap, file: int) -> None:
    """Look that a header that is one byte too large is refused, whether it is built or not."""
    header, _ = build_header(filemap.header_entries(file), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "MAX_HEADER_BYTES", len(header) - 9)
        with pytest.raises(UsageError, match="too many chunks"):
            filemap.check_header(file)


@given(manifests())
def test_no_header_that_is_too_large_passes(sample: Sample) -> None:
    filemap = FileMap.of(sample.manifest, "manifest.json")
    for file in range(len(sample.manifest.files)):
        refuses(filemap, file)
        filemap.check_header(file)


@pytest.mark.parametrize("name", ["%@" * 1000, '"' * 2000, "\\" * 2000, "\u00e9" * 2000, "w"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fnuz", "complex128"])
def test_no_name_makes_a_header_larger_than_is_thought(name: str, dtype: str) -> None:
    """What is escaped is three times as long; many chunks leave no room in the padding."""
    shape = (1 << 40, *[1] * 63)
    tensors = [TensorEntry(f"{name}{i}", dtype, shape, 0, 0) for i in range(300)]
    refuses(FileMap(tensors, [whole(shape)], [Owners(((0, 0, 1),))]), 0)


@given(shapes().flatmap(cuts))
def test_piece_numels(cut: Cut) -> None:
    assert piece_numels(cut.grid).tolist() == [len(p) for p in cut.pieces]


runs = st.lists(
    st.tuples(st.integers(-1, 6), st.integers(-2, 2), st.integers(1, 5)), min_size=1, max_size=40
)


@given(runs)
def test_pieces_of_a_file_are_those_of_the_owner_map(raw: list[tuple[int, int, int]]) -> None:
    kept = [r if r[0] >= 0 and r[0] + r[1] * (r[2] - 1) >= 0 else (-1, 0, r[2]) for r in raw]
    owners = Owners(tuple(kept))
    grid = Grid((Axis(((1, owners.npieces),)),))
    tensor = TensorEntry("t", "uint8", grid.shape, 0, 0, 2)
    filemap = FileMap([tensor], [grid], [owners])
    for file in range(20):
        wanted = list(owners.pieces_of(file, 2))
        assert [c.piece.index for c in filemap.chunks(file)] == wanted
        assert filemap.nchunks(file) == len(wanted)


def test_many_pieces_in_one_file_are_found_without_a_walk() -> None:
    grid = Grid((even_axis(1 << 20, 1 << 20),))
    tensors = [TensorEntry(f"t{i}", "int16", grid.shape, 0, 0) for i in range(3)]
    filemap = FileMap(tensors, [grid], [Owners(((0, 0, grid.npieces),))])
    for piece in range(0, grid.npieces, 997):
        start = (1 << 21) + 2 * piece
        assert filemap.locate(1, piece) == (0, start, start + 2)


def test_one_tensor_of_each_item_size_in_canonical_order() -> None:
    names = ["uint8", "float16", "complex128", "float32", "bool", "int64"]
    tensors = [TensorEntry(n, n, (3,), 0, 0) for n in names]
    filemap = FileMap(tensors, [whole((3,))], [Owners(((0, 0, 1),))])
    order = [tensors[c.tensor].name for c in filemap.chunks(0)]
    assert order == ["complex128", "int64", "float32", "float16", "uint8", "bool"]


def test_chunks_of_per_rank_objects_are_named_by_the_rank_of_their_file() -> None:
    grid = Grid((Axis(((5, 1), (7, 1))),))
    manifest = Manifest(
        step=1,
        generation=1,
        attempt="a",
        world_size=2,
        files=(FileEntry("x", 8), FileEntry("y", 5)),
        grids=(GridEntry.of(grid),),
        owners=(((0, 1, 2),),),
        tensors=(TensorEntry("rng", "uint8", (12,), 0, 0),),
        objects=(ObjectEntry("rng", tensor="rng", per_rank="reseed"),),
    )
    filemap = FileMap.of(manifest, "m")
    assert [filemap.header_entries(i)[0][0] for i in range(2)] == ["rng@r8", "rng@r5"]


def test_a_broken_table_is_corrupt() -> None:
    manifest = Manifest(1, 1, "a", 1, (), (GridEntry((((0, 2),),)),), (), ())
    with pytest.raises(CorruptError) as caught:
        FileMap.of(manifest, "manifest.json")
    assert "manifest breaks a rule" in caught.value.message


def test_threads_may_share_a_map() -> None:
    grid = Grid((even_axis(999, 64),))
    tensors = [TensorEntry(f"t{i}", "float32", grid.shape, 0, 0) for i in range(50)]
    owners = [Owners.from_array(np.arange(grid.npieces) % 7)]
    filemap, alone = FileMap(tensors, [grid], owners), FileMap(tensors, [grid], owners)
    places = [(t, p) for t in range(50) for p in range(grid.npieces)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: filemap.locate(*x), places))
    assert found == [alone.locate(*x) for x in places]


def test_home_files() -> None:
    folder = "data/000000000012-g00000003-a1/"
    assert is_home(folder + "r00000.safetensors", folder)
    assert not is_home("data/000000000012-g00000003-a12/r00000.safetensors", folder)
    assert not is_home("data/000000000011-g00000003-a1/r00000.safetensors", folder)
