"""Reading: any layout into any other, equal to numpy slicing; waves; what goes wrong."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.digest import BLOCK_BYTES
from ckptd.base.grids.block import Region, box_region
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import ABSENT
from ckptd.base.runtime.spare import SpareMemory
from ckptd.checkpoint.format.names import digests_key
from ckptd.checkpoint.load import read
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.load.read import ReadReport, execute
from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.store.base import FaultSpec, OpenFile, Store, Wrapper
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.types import Box
from tests.checkpoint.load.builder import (
    Array,
    Built,
    Saved,
    build,
    random_box,
    random_region,
    random_saved,
    seen_through,
    take,
)

DTYPES = ["uint8", "float16", "int32", "float64", "complex128", "bfloat16", "float8_e4m3fn", "bool"]
_numbers = itertools.count()


class Segments(Wrapper):
    """Gives objects as sealed files in memory, behind a page of something else."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultSpec())
        self._made: dict[tuple[str, bytes], int] = {}

    def open_file(self, key: str) -> OpenFile | None:
        data = self.inner.get(key)
        fd = self._made.get((key, data))
        if fd is None:
            fd = self._made[key, data] = os.memfd_create(key, os.MFD_ALLOW_SEALING)
            os.pwrite(fd, data, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return OpenFile(os.dup(fd), 4096)

    def close(self) -> None:
        for fd in self._made.values():
            os.close(fd)
        super().close()


@pytest.fixture(params=["local", "memory", "segments"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore(tmp_path)
        return
    name = f"read{next(_numbers)}"
    memory = MemoryStore(name)
    if request.param == "memory":
        yield memory
    else:
        with Segments(memory) as segments:
            yield segments
    forget_memory(name)


def random_values(rng: random.Random, shape: tuple[int, ...], dtype: str) -> Array:
    kind = np.dtype(getattr(np, dtype, None) or getattr(ml_dtypes, dtype))
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if dtype == "bool":
        return np.frombuffer(rng.randbytes(size), np.uint8).reshape(shape) % 2 == 1
    return np.frombuffer(rng.randbytes(size), kind).reshape(shape)


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def read_whole(built: Built, store: Store, **options: Any) -> tuple[dict[str, Array], ReadReport]:
    """Read every tensor whole."""
    targets, wants = {}, []
    for number, entry in enumerate(built.manifest.tensors):
        dtype = built.filemap.dtypes[number].numpy
        targets[entry.name] = np.full(entry.shape, 0, dtype=dtype)
        region = box_region(Box((0,) * len(entry.shape), entry.shape))
        wants.append(Want(number, (region,), targets[entry.name].reshape(-1)))
    plan = read_plan(built.manifest, built.filemap, wants, store=store)
    return targets, execute(plan, store, **options)


class Scenario:
    """Random tensors in random layouts, random regions wanted of them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.tensors: dict[str, Saved] = {}
        for i in range(rng.randrange(1, 4)):
            shape = tuple(rng.choice([1, 2, 3, 5, 8, 0]) for _ in range(rng.randrange(4)))
            values = random_values(rng, shape, rng.choice(DTYPES))
            self.tensors[f"t{i}.w"] = random_saved(rng, values, files=3)
        self.wanted: list[tuple[str, Array, list[Region]]] = []
        for name, saved in self.tensors.items():
            regions, end = [], 0
            for _ in range(rng.randrange(1, 3)):
                box = random_box(rng, saved.values.shape)
                region, end = random_region(rng, box, end)
                regions.append(region)
            target = np.frombuffer(bytearray(b"\xee" * (end * saved.values.itemsize)), np.uint8)
            self.wanted.append((name, target.view(saved.values.dtype), regions))

    def check(self, store: Store, **options: Any) -> ReadReport:
        built = build(store, self.tensors, publish=False)
        wants = [
            Want(built.number(name), tuple(regions), target)
            for name, target, regions in self.wanted
        ]
        report = execute(read_plan(built.manifest, built.filemap, wants), store, **options)
        for name, target, regions in self.wanted:
            touched = np.zeros(len(target), dtype=bool)
            for region in regions:
                expected = take(self.tensors[name].values, region.box)
                assert same_bits(seen_through(target, region), expected)
                seen_through(touched, region)
                mark = np.lib.stride_tricks.as_strided(
                    touched[region.start :], region.box.shape, region.strides
                )
                mark[...] = True
            untouched = target.view(np.uint8).reshape(len(target), target.itemsize)[~touched]
            assert (untouched == 0xEE).all()
        return report


@given(st.integers(0, 1 << 48))
def test_any_layout_into_any_region_equals_slicing(seed: int) -> None:
    store = MemoryStore(f"property{next(_numbers)}")
    try:
        report = Scenario(seed).check(store)
    finally:
        forget_memory(store.url.partition("://")[2])
    assert report.bytes_copied == report.bytes_needed


@pytest.mark.parametrize("seed", range(12))
def test_local_files_too(seed: int, tmp_path: Path) -> None:
    Scenario(seed).check(LocalStore(tmp_path))


def big(rows: int = 24, columns: int = 65536) -> Array:
    """6 MiB by default: rows of 256 KiB, all different."""
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


@pytest.mark.parametrize(
    ("box", "strides"),
    [
        (Box((0, 0), (24, 65536)), (65536, 1)),  # everything: one run
        (Box((3, 0), (5, 65536)), (65536, 1)),  # rows: one run
        (Box((0, 100), (24, 9000)), (9000, 1)),  # columns, runs 256 KiB apart: one by one
        (Box((0, 7), (24, 60000)), (60000, 1)),
        (Box((0, 0), (24, 65536)), (1, 24)),  # transposed: through a window
        (Box((2, 5), (20, 11)), (1, 20)),
    ],
)
@pytest.mark.parametrize("parts", [1, 5])
def test_large_blocks(store: Store, parts: int, box: Box, strides: tuple[int, int]) -> None:
    values = big()
    built = build(store, {"w": Saved.rows(values, parts)}, publish=False)
    target = np.zeros(box.numel, np.float32)
    region = Region(box, 0, strides)
    plan = read_plan(built.manifest, built.filemap, [Want(0, (region,), target)])
    report = execute(plan, store)
    assert same_bits(seen_through(target, region), take(values, box))
    assert report.waves == 1
    assert report.bytes_fetched <= report.bytes_needed + 24 * 2 * BLOCK_BYTES


def test_only_needed_blocks_are_fetched(store: Store) -> None:
    values = big(64)
    built = build(store, {"w": Saved.whole(values)}, publish=False)
    target = np.zeros(1000, np.float32)
    box = Box((33, 50), (1, 1000))
    plan = read_plan(built.manifest, built.filemap, [Want(0, (box_region(box),), target)])
    report = execute(plan, store)
    assert report.bytes_fetched == BLOCK_BYTES
    assert same_bits(target.reshape(1, -1), take(values, box))


def test_far_columns_skip_the_blocks_between(store: Store) -> None:
    values = np.arange(4 * (1 << 20), dtype=np.float32).reshape(4, 1 << 20)  # rows of 4 MiB
    built = build(store, {"w": Saved.whole(values)}, publish=False)
    target = np.zeros(4 * 10, np.float32)
    box = Box((0, 5), (4, 10))
    plan = read_plan(built.manifest, built.filemap, [Want(0, (box_region(box),), target)])
    assert execute(plan, store).bytes_fetched == 4 * BLOCK_BYTES
    assert same_bits(target.reshape(4, 10), take(values, box))


@pytest.mark.parametrize("budget", [0, 4 << 20, 7 << 20, 12 << 20])
def test_waves_with_a_tiny_budget(store: Store, budget: int) -> None:
    rng = random.Random(3)
    tensors = {
        "a": Saved.rows(big(48), 3),
        "b": Saved.whole(random_values(rng, (700_001,), "bfloat16"), file=1),
        "c": Saved.rows(np.asfortranarray(big(16, 30_000)), 2, first=1),
    }
    built = build(store, tensors, publish=False)
    progress: list[tuple[int, int]] = []
    found, report = read_whole(
        built,
        store,
        budget_bytes=budget,
        progress=lambda done, total: progress.append((done, total)),
    )
    for name, saved in tensors.items():
        assert same_bits(found[name], np.ascontiguousarray(saved.values))
    assert report.waves > 1
    assert report.bytes_fetched <= built.commit.data_bytes + report.waves * 5 * BLOCK_BYTES
    total = progress[-1][1]
    assert progress[-1] == (total, total)
    assert {t for _, t in progress} == {total}
    assert [d for d, _ in progress] == sorted(d for d, _ in progress)


def test_transposed_in_waves(store: Store) -> None:
    values = big(32)
    built = build(store, {"w": Saved.rows(values, 2)}, publish=False)
    target = np.zeros(values.size, np.float32)
    region = Region(Box((0, 0), values.shape), 0, (1, 32))
    plan = read_plan(built.manifest, built.filemap, [Want(0, (region,), target)])
    assert execute(plan, store, budget_bytes=4 << 20).waves > 1
    assert same_bits(target.reshape(values.shape[::-1]), np.ascontiguousarray(values.T))


def test_no_wants_and_empty_tensors(store: Store) -> None:
    built = build(store, {"e": Saved.whole(np.zeros((0, 3), np.int64))}, publish=False)
    found, report = read_whole(built, store)
    assert found["e"].shape == (0, 3)
    assert (report.bytes_needed, report.bytes_fetched, report.waves) == (0, 0, 0)


def test_unchanged_chunks_of_an_older_file(store: Store) -> None:
    rng = random.Random(0)
    frozen = random_values(rng, (300_000,), "float32")
    gone = random_values(rng, (17, 5), "float64")
    first = build(store, {"gone": Saved.whole(gone), "frozen": Saved.whole(frozen)}, publish=False)
    moving = random_values(rng, (40, 3), "int32")
    second = build(
        store,
        {"frozen": Saved.whole(frozen, file=0), "moving": Saved.rows(moving, 2, first=1)},
        step=2,
        older=first.manifest.files,
        publish=False,
    )
    found, _ = read_whole(second, store)
    assert same_bits(found["frozen"], frozen)
    assert same_bits(found["moving"], moving)


def test_an_older_file_without_the_chunk(store: Store) -> None:
    first = build(store, {"other": Saved.whole(np.zeros(9, np.float32))}, publish=False)
    second = build(
        store,
        {"frozen": Saved.whole(np.zeros(9, np.float32))},
        step=2,
        older=first.manifest.files,
        publish=False,
    )
    with pytest.raises(CorruptError, match="frozen") as caught:
        read_whole(second, store)
    assert "a file of an older checkpoint lacks a chunk" in caught.value.message


# --- errors --------------------------------------------------------------------------------------


def absent_checkpoint(store: Store) -> tuple[Built, Array]:
    values = np.arange(12, dtype=np.int32).reshape(6, 2)
    grid = Grid((Axis(((2, 3),)), Axis(((2, 1),))))
    return build(store, {"lora": Saved(values, grid, [0, ABSENT, 1])}, publish=False), values


def test_absent_pieces_are_named(store: Store) -> None:
    built, _ = absent_checkpoint(store)
    with pytest.raises(MismatchError, match=r"lora \[2, 2\] at \[2, 0\]") as caught:
        read_whole(built, store)
    assert "the checkpoint lacks parts of tensors that the state needs" in caught.value.message


def test_absent_pieces_that_nobody_wants(store: Store) -> None:
    built, values = absent_checkpoint(store)
    target = np.zeros(4, np.int32)
    wants = [Want(0, (box_region(Box((4, 0), (2, 2))),), target)]
    execute(read_plan(built.manifest, built.filemap, wants), store)
    assert (target == values[4:].reshape(-1)).all()


def test_absent_pieces_allowed(store: Store) -> None:
    built, values = absent_checkpoint(store)
    target = np.full(12, -1, np.int32)
    wants = [Want(0, (box_region(Box((0, 0), (6, 2))),), target)]
    execute(read_plan(built.manifest, built.filemap, wants, allow_absent=True), store)
    expected = values.copy()
    expected[2:4] = -1
    assert (target == expected.reshape(-1)).all()


@pytest.mark.parametrize(
    "target",
    [
        np.zeros((3, 4), np.float32),
        np.zeros(24, np.float32)[::2],
        np.zeros(12, np.float64),
        np.zeros(11, np.float32),
        np.frombuffer(bytes(48), np.float32),
    ],
    ids=["2-d", "strided", "item size", "small", "read-only"],
)
def test_a_bad_target_is_refused(target: Array, store: Store) -> None:
    built = build(store, {"w": Saved.whole(np.zeros((3, 4), np.float32))}, publish=False)
    region = box_region(Box((0, 0), (3, 4)))
    with pytest.raises(UsageError, match="tensor w"):
        read_plan(built.manifest, built.filemap, [Want(0, (region,), target)])


def test_a_region_outside_the_tensor(store: Store) -> None:
    built = build(store, {"w": Saved.whole(np.zeros((3, 4), np.float32))}, publish=False)
    region = box_region(Box((2, 0), (2, 4)))
    with pytest.raises(MismatchError, match="tensor w"):
        read_plan(built.manifest, built.filemap, [Want(0, (region,), np.zeros(8, np.float32))])


def flip(store: Store, key: str, at: int) -> None:
    raw = bytearray(store.get(key))
    raw[at] ^= 0x10
    store.put(key, bytes(raw))


def cut(store: Store, key: str, keep: int) -> None:
    store.put(key, store.get(key)[:keep])


def victims() -> dict[str, Saved]:
    """Two files; the second holds blocks of `w` (0 to 2) and then `tail`."""
    return {
        "w": Saved.rows(big(24), 2),
        "tail": Saved.whole(np.arange(5, dtype=np.uint8), file=1),
    }


Damage = Callable[[Store, Built], None]


def _entry(built: Built, file: int) -> Any:
    return built.manifest.files[file]


DAMAGES: dict[str, tuple[Damage, str, list[str]]] = {
    "bit of the first block": (
        lambda s, b: flip(s, _entry(b, 1).path, _entry(b, 1).data_start),
        [
            "digest mismatch",
            "block 0 of",
            "r00001.safetensors",
            "rank 1",
            "tensor w (chunk w@12,0)",
        ],
    ),
    "bit of a middle block": (
        lambda s, b: flip(s, _entry(b, 0).path, _entry(b, 0).data_start + BLOCK_BYTES + 77),
        [
            "digest mismatch",
            "block 1 of",
            "r00000.safetensors",
            "rank 0",
            "tensor w (chunk w@0,0)",
        ],
    ),
    "last bit": (
        lambda s, b: flip(s, _entry(b, 1).path, -1),
        ["digest mismatch", "block 3 of", "rank 1", "tensor tail"],
    ),
    "truncated": (
        lambda s, b: cut(s, _entry(b, 1).path, -1),
        ["has the wrong size", "r00001.safetensors", "rank 1"],
    ),
    "too long": (
        lambda s, b: s.put(_entry(b, 1).path, s.get(_entry(b, 1).path) + b"x"),
        ["has the wrong size", "r00001.safetensors"],
    ),
    "missing": (
        lambda s, b: s.delete([_entry(b, 0).path]),
        ["is missing", "r00000.safetensors", "rank 0"],
    ),
    "index flipped": (
        lambda s, b: flip(s, digests_key(_entry(b, 0).path), 40),
        ["digest mismatch", "r00000.digests", "rank 0"],
    ),
    "index truncated": (
        lambda s, b: cut(s, digests_key(_entry(b, 0).path), 33),
        ["has the wrong size", "r00000.digests"],
    ),
    "index missing": (
        lambda s, b: s.delete([digests_key(_entry(b, 1).path)]),
        ["is missing", "r00001.digests", "rank 1"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_written(store: Store, name: str) -> None:
    damage, words = DAMAGES[name]
    built = build(store, victims(), publish=False)
    damage(store, built)
    targets = [np.full(24 * 65536, -7, np.float32), np.full(5, 9, np.uint8)]
    wants = [
        Want(0, (box_region(Box((0, 0), (24, 65536))),), targets[0]),
        Want(1, (box_region(Box((0,), (5,))),), targets[1]),
    ]
    with pytest.raises(CorruptError) as caught:
        execute(read_plan(built.manifest, built.filemap, wants), store)
    for word in words:
        assert word in str(caught.value)
    assert not caught.value.state_corrupted
    assert (targets[0] == -7).all()
    assert (targets[1] == 9).all()


def test_damage_that_nobody_reads_is_no_error(store: Store) -> None:
    built = build(store, victims(), publish=False)
    flip(store, _entry(built, 1).path, -1)
    target = np.zeros((12, 65536), np.float32)
    wants = [Want(0, (box_region(Box((0, 0), (12, 65536))),), target.reshape(-1))]
    execute(read_plan(built.manifest, built.filemap, wants), store)
    assert (target == big(24)[:12]).all()


def test_a_bad_block_read_along_is_no_error() -> None:
    """Remote reads bridge a hole of one block; what lies in it is nobody's business."""
    store = MemoryStore(f"bridge{next(_numbers)}")
    values = big(12)  # three blocks
    built = build(store, {"w": Saved.whole(values)}, publish=False)
    flip(store, _entry(built, 0).path, _entry(built, 0).data_start + BLOCK_BYTES + 5)
    boxes = [Box((0, 0), (1, 65536)), Box((11, 0), (1, 65536))]
    targets = [np.zeros(65536, np.float32) for _ in boxes]
    wants = [Want(0, (box_region(b),), t) for b, t in zip(boxes, targets, strict=True)]
    report = execute(read_plan(built.manifest, built.filemap, wants), store)
    assert report.bytes_fetched == 3 * BLOCK_BYTES
    for box, target in zip(boxes, targets, strict=True):
        assert (target == take(values, box).reshape(-1)).all()


def test_a_failure_after_the_first_wave_poisons(store: Store) -> None:
    built = build(store, victims(), publish=False)
    flip(store, _entry(built, 1).path, -1)
    with pytest.raises(CorruptError) as caught:
        read_whole(built, store, budget_bytes=4 << 20)
    assert caught.value.kind == "digest"
    assert caught.value.state_corrupted


def test_reads_receive_into_the_memory_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not into that of a read that failed: a thread of it may hang, and write there later."""
    spare = SpareMemory()
    monkeypatch.setattr(read, "SPARE", spare)
    with MemoryStore(f"read{next(_numbers)}") as store:
        built = build(store, victims(), publish=False)
        read_whole(built, store)
        kept, memory = spare.take(24 << 20)
        memory[:] = 0xEE
        spare.give_back(kept, len(memory))
        targets, _ = read_whole(built, store)
        assert same_bits(targets["w"], big(24))
        again, _ = spare.take(1)
        assert again is kept
        spare.give_back(again, 1)
        flip(store, _entry(built, 1).path, -1)
        with pytest.raises(CorruptError):
            read_whole(built, store)
        assert spare.take(1)[0] is not kept


def test_what_later_waves_miss_is_found_before_the_first_write(store: Store) -> None:
    built = build(store, victims(), publish=False)
    store.delete([_entry(built, 1).path])
    with pytest.raises(CorruptError) as caught:
        read_whole(built, store, budget_bytes=4 << 20)
    assert "of the checkpoint is missing" in caught.value.message
    assert not caught.value.state_corrupted


def test_a_file_cut_between_the_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No SIGBUS: the process lives and says what happened."""
    from ckptd.checkpoint.load import read

    store = LocalStore(tmp_path)
    built = build(store, victims(), publish=False)
    copy = read._Run._copy_files

    def cut_first(*args: Any, **options: Any) -> None:
        os.truncate(tmp_path / _entry(built, 1).path, 8192)
        copy(*args, **options)

    monkeypatch.setattr(read._Run, "_copy_files", cut_first)
    with pytest.raises(CorruptError) as caught:
        read_whole(built, store)
    assert caught.value.kind == "truncated"
    assert caught.value.state_corrupted


def test_a_fifo_in_place_of_a_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    built = build(store, victims(), publish=False)
    path = tmp_path / _entry(built, 1).path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptError) as caught:
        read_whole(built, store)
    assert "of the checkpoint is missing" in caught.value.message


def test_a_manifest_with_another_size_than_its_tables(store: Store) -> None:
    import msgspec

    built = build(store, victims(), publish=False)
    files = (
        msgspec.structs.replace(_entry(built, 0), data_bytes=10),
        *built.manifest.files[1:],
    )
    wrong = Built(msgspec.structs.replace(built.manifest, files=files), built.filemap, built.commit)
    with pytest.raises(CorruptError) as caught:
        read_whole(wrong, store)
    assert "the manifest's tables and its file size disagree" in caught.value.message
