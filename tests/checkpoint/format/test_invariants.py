from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.digest import DigestIndex, digest_hex
from ckptd.checkpoint.format import invariants
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.invariants import (
    check_coverage,
    check_files,
    check_index,
    check_manifest,
)
from ckptd.checkpoint.format.manifest import (
    INLINE,
    INLINE_BYTES,
    FileEntry,
    GridEntry,
    Manifest,
    MeshEntry,
    ObjectEntry,
    TensorEntry,
    WitnessEntry,
)
from ckptd.checkpoint.format.witness import DATA
from ckptd.errors import CorruptError
from tests.checkpoint.format.strategies import Sample, manifests

FOLDER = "data/000000001200-g00000003-a1/"
OLDER = "data/000000001100-g00000003-a9/"
DIGEST = "0f" * 16


def file(rank: int, nbytes: int = 24, folder: str = FOLDER) -> FileEntry:
    return FileEntry(f"{folder}r{rank:05d}.safetensors", rank, 4096, nbytes, DIGEST)


GOOD = Manifest(
    step=1200,
    generation=3,
    attempt="a1",
    world_size=2,
    files=(file(0, 29), file(1, 31)),
    grids=(GridEntry((((2, 2),), ((3, 1),))), GridEntry((((5, 1), (7, 1)),))),
    owners=(((0, 1, 2),),),
    tensors=(
        TensorEntry("w", "float32", (4, 3), 0, 0, aliases=("tied",)),
        TensorEntry("rng", "uint8", (12,), 1, 0),
    ),
    objects=(ObjectEntry("rng", tensor="rng", per_rank="reseed"), ObjectEntry("lr", value=0.1)),
    meshes=(MeshEntry(("dp",), (2,), ((0, 1, 2),)),),
    witness=WitnessEntry("sample-1", DIGEST),
    metadata={"loss": 1.0},
)


def check(
    manifest: Manifest, nbytes: int = 1000, known: tuple[Manifest, FileMap] | None = None
) -> FileMap:
    return check_manifest(manifest, "manifest.json", nbytes, known)


def with_tensor(**changes: Any) -> Manifest:
    first = msgspec.structs.replace(GOOD.tensors[0], **changes)
    return msgspec.structs.replace(GOOD, tensors=(first, GOOD.tensors[1]))


def with_file(**changes: Any) -> Manifest:
    first = msgspec.structs.replace(GOOD.files[0], **changes)
    return msgspec.structs.replace(GOOD, files=(first, GOOD.files[1]))


def with_object(*entries: ObjectEntry) -> Manifest:
    return msgspec.structs.replace(GOOD, objects=entries)


def replace(**changes: Any) -> Manifest:
    return msgspec.structs.replace(GOOD, **changes)


def test_a_good_manifest_passes() -> None:
    filemap = check(GOOD)
    check_files(GOOD, filemap)
    assert check_coverage(GOOD, filemap) == []


DEEP: Any = {}  # which Python 3.13 and newer encode
for _ in range(3000):
    DEEP = {"a": DEEP}
HUGE = 2**62

BROKEN: list[tuple[str, Manifest]] = [
    ("step, generation, attempt or world size out of range", replace(step=-1)),
    ("step, generation, attempt or world size out of range", replace(step=10**12)),
    ("step, generation, attempt or world size out of range", replace(generation=10**8)),
    ("step, generation, attempt or world size out of range", replace(attempt="A/..")),
    ("step, generation, attempt or world size out of range", replace(world_size=0)),
    ("a data file must lie directly in a folder below data/", with_file(path="../r.safetensors")),
    ("a data file must lie directly in a folder below data/", with_file(path="/etc/passwd")),
    (
        "a data file must lie directly in a folder below data/",
        with_file(path=FOLDER + "manifest.json"),
    ),
    ("two entries name one file", with_file(path=GOOD.files[1].path)),
    ("impossible sizes, rank or digest", with_file(rank=-1)),
    ("impossible sizes, rank or digest", with_file(data_start=4095)),
    ("impossible sizes, rank or digest", with_file(data_start=-4096)),
    ("impossible sizes, rank or digest", with_file(data_start=1 << 40)),
    ("impossible sizes, rank or digest", with_file(data_start=0)),
    ("impossible sizes, rank or digest", with_file(data_bytes=-1)),
    ("impossible sizes, rank or digest", with_file(data_bytes=1 << 62)),
    ("impossible sizes, rank or digest", with_file(index="")),
    ("impossible sizes, rank or digest", with_file(index="x" * 32)),
    ("too many dimensions", replace(grids=(GridEntry((((1, 1),),) * 65), GOOD.grids[1]))),
    ("too many dimensions", replace(grids=(*GOOD.grids, GridEntry((((HUGE, HUGE),),) * 100_000)))),
    ("manifest breaks a rule", replace(grids=(GridEntry((((0, 3),),)), GOOD.grids[1]))),
    ("manifest breaks a rule", replace(grids=(GridEntry((((-1, 3),),)), GOOD.grids[1]))),
    ("manifest breaks a rule", replace(grids=(GridEntry((((HUGE, HUGE),),)), GOOD.grids[1]))),
    ("manifest breaks a rule", replace(grids=(GridEntry((((HUGE, 1),),) * 64), GOOD.grids[1]))),
    (
        "manifest breaks a rule",
        replace(grids=(GridEntry((((2, 2),), ((3, 1),)), (((7, 1),),)), GOOD.grids[1])),
    ),
    ("manifest breaks a rule", replace(grids=(GridEntry(((),)), GOOD.grids[1]))),
    ("manifest breaks a rule", replace(owners=(((0, 1, 0),),))),
    ("manifest breaks a rule", replace(owners=(((-2, 1, 2),),))),
    ("manifest breaks a rule", replace(owners=(((0, -1, 2),),))),
    ("manifest breaks a rule", replace(owners=(((0, 10**30, 2),),))),
    ("unknown dtype", with_tensor(dtype="float33")),
    ("grid, owners or base out of range", with_tensor(grid=2)),
    ("grid, owners or base out of range", with_tensor(grid=-1)),
    ("grid, owners or base out of range", with_tensor(owners=1)),
    ("grid, owners or base out of range", with_tensor(owners=-1)),
    ("grid, owners or base out of range", with_tensor(base=-1)),
    ("an owner that is not a file", with_tensor(base=1)),
    ("grid, owners or base out of range", with_tensor(base=10**30)),
    ("not the shape of its grid", with_tensor(shape=(3, 4))),
    ("not the shape of its grid", with_tensor(shape=(12,))),
    ("not one owner for each piece", replace(owners=(((0, 1, 3),),))),
    ("not one owner for each piece", replace(owners=(((0, 0, 3),),))),
    ("not one owner for each piece", replace(owners=(((0, 0, 1),),))),
    ("an owner that is not a file", replace(owners=(((0, 2, 2),),))),
    ("an owner that is not a file", replace(files=GOOD.files[:1])),
    ("invalid name", with_tensor(name="")),
    ("invalid name", with_tensor(name="a\nb")),
    ("invalid name", with_tensor(name="x" * 5000)),
    ("have one name", with_tensor(name="rng")),
    ("have one name", with_tensor(aliases=("w",))),
    ("have one name", with_tensor(aliases=("rng",))),
    ("have one name", with_tensor(aliases=("a", "a"))),
    ("invalid name", with_tensor(aliases=("\x00",))),
    ("have one name", with_object(ObjectEntry("a"), ObjectEntry("a"))),
    ("invalid name", with_object(ObjectEntry(""))),
    ("not in a 1-d uint8 tensor", with_object(ObjectEntry("a", tensor="gone"))),
    ("not in a 1-d uint8 tensor", with_object(ObjectEntry("a", tensor="w"))),
    ("both a value and a tensor", with_object(ObjectEntry("a", tensor="rng", value=1))),
    ("unknown per_rank or kind", with_object(ObjectEntry("a", tensor="rng", per_rank="maybe"))),
    (
        "a per-rank object must lie in a tensor",
        with_object(ObjectEntry("a", value=1, per_rank="drop")),
    ),
    ("unknown per_rank or kind", with_object(ObjectEntry("a", kind="pickle"))),
    ("its cells are not one a rank", replace(world_size=1, meshes=())),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp",), (3,), ((0, 1, 3),)),))),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp",), (2,), ((0, 1, 1),)),))),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp",), (2,), ((1, 1, 2),)),))),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp", "tp"), (2,), ((0, 1, 2),)),))),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp",), (-2,), ((0, 1, 2),)),))),
    ("a mesh breaks a rule", replace(meshes=(MeshEntry(("dp",), (2,), ((-1, 0, 2),)),))),
    ("unknown kind of witness, or no digest", replace(witness=WitnessEntry("sample-9", DIGEST))),
    ("unknown kind of witness, or no digest", replace(witness=WitnessEntry("sample-1", "short"))),
    ("layout program too long", replace(lay="x" * (1 << 21))),
    ("metadata too large", replace(metadata={"x": "y" * (1 << 19)})),
    *([("metadata is not JSON", replace(metadata=DEEP))] if sys.version_info < (3, 13) else []),
    ("metadata is not JSON", replace(metadata={"x": "\ud800"})),
]


@pytest.mark.parametrize(
    ("words", "manifest"), BROKEN, ids=[f"{i}-{words}" for i, (words, _) in enumerate(BROKEN)]
)
def test_broken_manifests(words: str, manifest: Manifest) -> None:
    for known in (None, (GOOD, check(GOOD))):
        with pytest.raises(CorruptError) as caught:
            check(manifest, known=known)
        assert words in caught.value.message
        assert "manifest.json" in (caught.value.where or "")
        assert len(str(caught.value)) < 2000


def test_only_the_same_tables_are_known() -> None:
    known = GOOD, check(GOOD)
    later = replace(step=1300, attempt="a2", tensors=(*GOOD.tensors,))
    assert check(later, known=known) is known[1]
    for other in (
        with_tensor(name="v"),
        replace(grids=(*GOOD.grids, GOOD.grids[0])),
        replace(owners=(*GOOD.owners, ((0, 0, 2),))),
        with_file(rank=5),
        replace(files=(*GOOD.files, file(2))),
        with_object(GOOD.objects[1]),
    ):
        found, wanted = check(other, known=known), check(other)
        assert found is not known[1]
        assert (found.ranked, found.tensors) == (wanted.ranked, wanted.tensors)


INLINE_RAW = b"digests of its chunks"
SMALL_FILE = FileEntry(
    f"{FOLDER}r00000.safetensors", 0, 4096, 48, digest_hex(INLINE_RAW), INLINE_RAW
)
SMALL = Manifest(
    step=1200,
    generation=3,
    attempt="a1",
    world_size=1,
    files=(SMALL_FILE,),
    grids=(GridEntry((((4, 1),), ((3, 1),))),),
    owners=(((0, 0, 1),),),
    tensors=(TensorEntry("w", "float32", (4, 3), 0, 0),),
    witness=WitnessEntry(DATA, ""),
    requires=(INLINE,),
)


def test_a_small_file_is_its_own_witness() -> None:
    check(SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (msgspec.structs.replace(SMALL_FILE, digests=b"", index=DIGEST),)},
        {"files": (msgspec.structs.replace(SMALL_FILE, data_bytes=INLINE_BYTES + 1),)},
        {"files": (msgspec.structs.replace(SMALL_FILE, path=f"{OLDER}r00000.safetensors"),)},
        {"files": (SMALL_FILE, file(1))},
        {"grids": (GridEntry((((2, 2),), ((3, 1),))),), "owners": (((0, 0, 2),),)},
    ],
    ids=["no digests", "large", "of an older folder", "two files", "two pieces"],
)
def test_what_is_not_one_small_file_has_another_witness(changes: dict[str, Any]) -> None:
    """The data vouch for themselves only where a load reads and digests all of them."""
    with pytest.raises(CorruptError, match="one small file with tensors in one piece"):
        check(msgspec.structs.replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1 << 59,), "float64"), ((0, 1 << 40, 1 << 40), "uint8")]
)
def test_tensors_that_int64_cannot_count_in_bytes(shape: tuple[int, ...], dtype: str) -> None:
    grid = GridEntry(tuple(((n, 1),) for n in shape))
    tensor = TensorEntry("w", dtype, shape, 0, 0)
    manifest = replace(grids=(grid,), owners=(((0, 0, 1),),), tensors=(tensor,), objects=())
    with pytest.raises(CorruptError) as caught:
        check(manifest)
    assert "too large" in caught.value.message


def pieces(count: int, tensors: int, bases: int = 1) -> Manifest:
    """Tensors of `count` one-byte pieces each, spread over `bases` bases."""
    grid = GridEntry((((1, count),),))
    entries = tuple(
        TensorEntry(f"t{i}", "uint8", (count,), 0, 0, base=i % bases) for i in range(tensors)
    )
    files = tuple(file(i) for i in range(bases))
    return replace(
        files=files, grids=(grid,), owners=(((0, 0, count),),), tensors=entries, objects=()
    )


def test_pieces_are_in_proportion_to_the_file() -> None:
    check(pieces((1 << 20) + 64_000, tensors=1))
    check(pieces((1 << 20) + 64_000, tensors=100))
    for manifest in (pieces((1 << 20) + 64_001, 1), pieces(1 << 20, 2, bases=2)):
        for known in (None, (manifest, check(manifest, 20_000))):
            with pytest.raises(CorruptError) as caught:
                check(manifest, known=known)
            assert "more pieces than elements" in caught.value.message


def test_nothing_of_the_size_of_the_pieces_is_allocated_to_find_that_out() -> None:
    manifest = pieces(1 << 60, tensors=3)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            check(manifest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(manifests())
def test_honest_manifests_pass(sample: Sample) -> None:
    filemap = check(sample.manifest, 2000)
    check_files(sample.manifest, filemap)


@given(manifests(), st.data())
def test_a_file_of_another_length_is_found(sample: Sample, data: st.DataObject) -> None:
    held = [i for i, f in enumerate(sample.manifest.files) if f.data_start]
    if not held:
        return
    i = data.draw(st.sampled_from(held))
    files = list(sample.manifest.files)
    wrong = files[i].data_bytes + data.draw(st.sampled_from([1, -1, 1 << 20]))
    files[i] = msgspec.structs.replace(files[i], data_bytes=max(0, wrong))
    manifest = msgspec.structs.replace(sample.manifest, files=tuple(files))
    if files[i] == sample.manifest.files[i]:
        return
    filemap = check(sample.manifest, 2000)
    check_files(sample.manifest, filemap)
    with pytest.raises(CorruptError) as caught:
        check_files(manifest, check(manifest, 2000, (sample.manifest, filemap)))
    assert "files have another length than their chunks" in caught.value.message
    assert files[i].path in (caught.value.where or "")


def test_a_file_of_an_older_folder_holds_more() -> None:
    older = replace(files=(file(0, 1 << 30, OLDER), GOOD.files[1]))
    check_files(older, check(older))
    short = replace(files=(file(0, 28, OLDER), GOOD.files[1]))
    with pytest.raises(CorruptError):
        check_files(short, check(short))


@given(manifests())
def test_absent_pieces_are_listed(sample: Sample) -> None:
    found = check_coverage(sample.manifest, check(sample.manifest, 2000))
    wanted = []
    for number, t in enumerate(sample.manifest.tensors):
        absent = sample.model.absent.get(number, [])
        if absent:
            walked = sample.cuts[number].pieces
            wanted.append((t.name, absent, sum(len(walked[p]) for p in absent)))
    listed = [
        (a.tensor, [p for i, n in a.runs for p in range(i, i + n)], a.elements) for a in found
    ]
    assert listed == wanted


def test_an_index_belongs_to_its_file() -> None:
    entry = file(0, 29)
    index = DigestIndex.build(29, [b"b" * 16], [b"c" * 16] * 2)
    check_index(entry, index)
    check_index(entry, index, 2)
    for other, chunks in ((file(0, 30), 2), (entry, 3)):
        with pytest.raises(CorruptError) as caught:
            check_index(other, index, chunks)
        assert caught.value.message in (
            "digest index of a file of another length",
            "digest index of other chunks",
        )
    assert check(GOOD).nchunks(0) == 2


def test_limits_are_those_of_the_page() -> None:
    # The normative text states them; who changes one changes both.
    assert invariants.MAX_DIMS == 64
    assert invariants.FREE_PIECES == 1 << 20
    assert invariants.PIECES_PER_BYTE == 64
    assert invariants.MAX_METADATA_BYTES == 1 << 18
