"""Verification names everything that is bad, goes on after errors, and is else silent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.base.digest import BLOCK_BYTES, digest_hex
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.checkpoint.format.manifest import ObjectEntry, encode_manifest
from ckptd.checkpoint.format.names import WITNESS, CommitName, commit_key, digests_key
from ckptd.checkpoint.format.records import encode_record
from ckptd.checkpoint.load.witnesses import VerifyFinding, VerifyReport
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools import verify as scan
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import NotFoundError
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.load.builder import Built, Saved, build

_numbers = itertools.count()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore(tmp_path)
        return
    name = f"verify{next(_numbers)}"
    yield MemoryStore(name)
    forget_memory(name)


def tensors() -> dict[str, Saved]:
    rng = np.random.default_rng(5)
    flat = Grid((Axis(((90, 1),)), Axis(((7, 1),))), (Axis(((200, 3), (30, 1))),))
    return {
        "big": Saved.rows(rng.standard_normal((24, 65536)).astype(np.float32), 2),
        "flat": Saved(rng.standard_normal((90, 7)), flat, [2, 0, 1, 2]),
        "tail": Saved.whole(np.arange(5, dtype=np.uint8), file=1),
        "nothing": Saved.whole(np.zeros((0, 4), np.float32)),
        "one": Saved.whole(np.array(3.5, np.float64), file=2),
    }


def check(store: Store, built: Built, **options: Any) -> VerifyReport:
    return verify(Catalogue(store), built.name, **options)


@pytest.mark.parametrize("deep", [True, False])
def test_a_good_checkpoint(store: Store, deep: bool) -> None:
    built = build(store, tensors())
    progress: list[tuple[int, int]] = []
    report = check(store, built, deep=deep, progress=lambda d, t: progress.append((d, t)))
    assert report.findings == ()
    assert report.ok
    assert (report.files, report.tensors, report.chunks) == (3, 5, 9)
    assert report.blind == ()
    assert report.absent == ()
    total = built.commit.data_bytes
    assert report.read_bytes == (total if deep else 0)
    assert not deep or progress[-1] == (total, total)


def test_small_windows_and_segments_change_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(store, tensors())
    monkeypatch.setattr(scan, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(scan, "WINDOW_BLOCKS", 1)
    assert check(store, built).findings == ()


def flip(store: Store, key: str, at: int) -> None:
    raw = bytearray(store.get(key))
    raw[at] ^= 0x40
    store.put(key, bytes(raw))


def only(report: VerifyReport) -> VerifyFinding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def test_every_flipped_bit_is_pinned_to_its_chunk(store: Store) -> None:
    built = build(store, tensors())
    for number, entry in enumerate(built.manifest.files):
        for chunk in built.filemap.chunks(number):
            if chunk.start == chunk.end:
                continue
            for at in {chunk.start, (chunk.start + chunk.end) // 2, chunk.end - 1}:
                flip(store, entry.path, entry.data_start + at)
                found = only(check(store, built))
                assert found.kind == "digest"
                assert found.file == entry.path
                assert found.rank == entry.rank
                assert found.tensor == built.filemap.tensors[chunk.tensor].name
                assert found.chunk == built.filemap.chunk_name(number, chunk)
                assert f"bad blocks {at // BLOCK_BYTES}" in found.where
                flip(store, entry.path, entry.data_start + at)
    assert check(store, built).ok


def test_several_damages_are_all_listed(store: Store) -> None:
    built = build(store, tensors())
    files = built.manifest.files
    store.delete([files[0].path])
    flip(store, files[1].path, files[1].data_start + 5)
    raw = store.get(files[2].path)
    store.put(files[2].path, raw[:-8])
    report = check(store, built)
    by_file = {f.path: [x for x in report.findings if x.file == f.path] for f in files}
    kinds = {path: [x.kind for x in found] for path, found in by_file.items()}
    assert "a data file of the checkpoint is missing" in {x.message for x in by_file[files[0].path]}
    assert (len(kinds[files[0].path]), kinds[files[0].path].count("lost")) == (4, 3)
    assert kinds[files[1].path] == ["digest"]
    assert sorted(kinds[files[2].path]) == ["lost", "truncated"]
    lost = {(x.tensor, x.chunk) for x in by_file[files[0].path] if x.kind == "lost"}
    assert lost == {("big", "big@0,0"), ("flat", "flat@0,0:200"), ("nothing", "nothing")}
    assert {x.tensor for x in by_file[files[2].path] if x.kind == "lost"} == {"one"}
    assert {x.rank for x in report.findings} == {0, 1, 2}


Damage = Callable[[Store, Built], None]
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "data too long": (
        lambda s, b: s.put(b.manifest.files[1].path, s.get(b.manifest.files[1].path) + b"!"),
        "a data file has the wrong size",
        "r00001.safetensors",
    ),
    "header: a name": (
        lambda s, b: s.put(
            b.manifest.files[1].path,
            s.get(b.manifest.files[1].path).replace(b'"tail"', b'"fail"', 1),
        ),
        "disagree on a chunk",
        "r00001.safetensors",
    ),
    "header: no JSON": (
        lambda s, b: flip(s, b.manifest.files[1].path, 8),
        "header is not JSON",
        "r00001.safetensors",
    ),
    "header: its length": (
        lambda s, b: flip(s, b.manifest.files[1].path, 1),
        "the length of a data file's header differs from the manifest",
        "r00001.safetensors",
    ),
    "index: a block": (
        lambda s, b: flip(s, digests_key(b.manifest.files[1].path), 33),
        "a digest index is corrupt: digest mismatch",
        "r00001.digests",
    ),
    "index: gone": (
        lambda s, b: s.delete([digests_key(b.manifest.files[1].path)]),
        "a digest index of the checkpoint is missing",
        "r00001.digests",
    ),
    "index: short": (
        lambda s, b: s.put(digests_key(b.manifest.files[1].path), b"CKPTDIG1"),
        "a digest index has the wrong size",
        "r00001.digests",
    ),
    "witness: flipped": (
        lambda s, b: flip(s, b.commit.folder + WITNESS, -1),
        "the witness is corrupt: digest mismatch",
        WITNESS,
    ),
    "witness: gone": (
        lambda s, b: s.delete([b.commit.folder + WITNESS]),
        "the witness is missing",
        WITNESS,
    ),
    "manifest: flipped": (
        lambda s, b: flip(s, b.commit.folder + b.commit.manifest, 30),
        "the manifest is corrupt: size or digest mismatch",
        "manifest.json",
    ),
    "manifest: gone": (
        lambda s, b: s.delete([b.commit.folder + b.commit.manifest]),
        "is missing",
        "manifest.json",
    ),
    "record: no JSON": (
        lambda s, b: s.put(commit_key(b.name), b"{"),
        "not JSON",
        "",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_everything_around_the_data(store: Store, name: str) -> None:
    damage, words, file = DAMAGES[name]
    built = build(store, tensors())
    damage(store, built)
    report = check(store, built)
    assert any(words in f.message for f in report.findings), report.findings
    assert {f.file.rpartition("/")[2] for f in report.findings} == {file}


def test_quick_mode_sees_sizes_and_headers_and_no_data(store: Store) -> None:
    built = build(store, tensors())
    entry = built.manifest.files[1]
    flip(store, entry.path, entry.data_start + 5)
    assert check(store, built, deep=False).ok
    store.put(entry.path, store.get(entry.path)[:-1])
    report = check(store, built, deep=False)
    assert {f.kind for f in report.findings} == {"truncated", "lost"}


def test_no_such_checkpoint(store: Store) -> None:
    build(store, tensors())
    with pytest.raises(NotFoundError):
        verify(Catalogue(store), CommitName(99, 1))


def republish(store: Store, built: Built, **changes: Any) -> None:
    """Change the manifest, with a commit record that fits."""
    manifest = msgspec.structs.replace(built.manifest, **changes)
    name, raw = encode_manifest(manifest)
    store.put(built.commit.folder + name, raw)
    commit = msgspec.structs.replace(
        built.commit, manifest_digest=digest_hex(raw), manifest_bytes=len(raw)
    )
    store.put(commit_key(built.name), encode_record(commit))


def test_a_wrong_layout_of_the_right_shape_is_seen_by_the_witness(store: Store) -> None:
    """Halves changed places before they were written: every digest is right."""
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    other = Saved.whole(np.arange(8, dtype=np.int16))
    true = build(store, {"qkv": Saved.rows(values, 2), "good": other}, step=1)
    raw = store.get(true.commit.folder + WITNESS)
    swapped = np.concatenate((values[2:], values[:2]))
    built = build(store, {"qkv": Saved.rows(swapped, 2), "good": other}, step=2)
    store.put(built.commit.folder + WITNESS, raw)
    republish(store, built, witness=true.manifest.witness)
    found = only(check(store, built))
    assert (found.tensor, found.found) == ("qkv", "64 of 64 differ")
    assert "values are not at the positions where they were saved" in found.message


def test_pieces_that_change_places_in_the_manifest_are_seen_in_the_headers(store: Store) -> None:
    built = build(store, {"qkv": Saved.rows(np.arange(8), 2)})
    republish(store, built, owners=(((1, -1, 2),),))
    report = check(store, built)
    assert {(f.message, f.tensor) for f in report.findings} == {
        ("the header and the manifest disagree on a chunk", "qkv")
    }
    assert len(report.findings) == 2


def test_blind_and_absent_tensors_are_reported(store: Store) -> None:
    grid = Grid((Axis(((3, 2),)),))
    built = build(
        store,
        {
            "zeros": Saved.whole(np.zeros(100, np.float32)),
            "lora": Saved(np.arange(6, dtype=np.int32), grid, [0, ABSENT]),
        },
    )
    report = check(store, built)
    assert report.ok
    assert report.blind == ("zeros",)
    assert report.absent == ("lora",)


def older_and_newer(store: Store) -> tuple[Built, Built]:
    rng = np.random.default_rng(0)
    gone = Saved.whole(rng.standard_normal(400_000).astype(np.float32))
    frozen = Saved.whole(rng.standard_normal(300_000).astype(np.float32))
    first = build(store, {"gone": gone, "frozen": frozen})
    moving = Saved.whole(np.arange(9), file=1)
    kept = Saved(frozen.values, frozen.grid, [0])
    second = build(store, {"frozen": kept, "moving": moving}, step=2, older=first.manifest.files)
    return first, second


def test_chunks_of_older_files(store: Store) -> None:
    first, second = older_and_newer(store)
    report = check(store, second)
    assert report.ok
    assert report.read_bytes == 300_000 * 4 + 72
    entry = first.manifest.files[0]
    flip(store, entry.path, -1)
    found = only(check(store, second))
    assert (found.kind, found.tensor, found.file) == ("digest", "frozen", entry.path)


def test_a_bad_block_outside_the_chunks_referred_to(store: Store) -> None:
    """`frozen` begins inside a block whose first bytes are `gone`'s: reading it would fail."""
    first, second = older_and_newer(store)
    entry = first.manifest.files[0]
    flip(store, entry.path, entry.data_start + 400_000 * 4 - 1)
    found = only(check(store, second))
    assert found.kind == "digest"
    assert "block 1" in found.where
    assert "a block is corrupt" in found.message
    flip(store, entry.path, entry.data_start + 400_000 * 4 - 1)
    flip(store, entry.path, entry.data_start)
    assert check(store, second).ok


def test_an_older_file_that_lost_its_header(store: Store) -> None:
    first, second = older_and_newer(store)
    flip(store, first.manifest.files[0].path, 8)
    found = only(check(store, second))
    assert ("header is not JSON" in found.message, found.file) == (
        True,
        first.manifest.files[0].path,
    )


def test_a_folder_that_the_record_forgets(store: Store) -> None:
    _, second = older_and_newer(store)
    commit = msgspec.structs.replace(second.commit, folders=(second.commit.folder,))
    store.put(commit_key(second.name), encode_record(commit))
    found = only(check(store, second))
    assert "gc would delete it" in found.message


def test_a_store_that_fails_is_a_finding(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    built = build(store, tensors())
    broken = Fault(
        store, FaultSpec((FaultRule("error", op="stat", key="*r00001.safetensors", times=0),))
    )
    report = verify(Catalogue(broken), built.name)
    assert {f.file for f in report.findings} == {built.manifest.files[1].path}


def test_objects_in_tensors_are_checked_like_tensors(store: Store) -> None:
    raw = np.frombuffer(b'{"a":[1,2,3]}', np.uint8)
    built = build(
        store,
        {"@obj": Saved.whole(raw), "w": Saved.whole(np.arange(3))},
        objects=[ObjectEntry("state", tensor="@obj")],
    )
    report = check(store, built)
    assert report.ok
    assert report.tensors == 1
    entry = built.manifest.files[0]
    flip(store, entry.path, entry.data_start + 26)
    assert only(check(store, built)).tensor == "@obj"
