"""The executor, between random cuts of the same tensors: rounds, budget, restarts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ckptd.base.grids.owners import Owners
from ckptd.checkpoint.format.manifest import FileEntry, GridEntry, ManifestTables, TensorEntry
from ckptd.checkpoint.load import read
from ckptd.checkpoint.load.files import PieceLocations, check_size
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CorruptError
from ckptd.reshard.execute import Budget, Executor
from ckptd.reshard.job import ReshardJob, ReshardShare
from ckptd.reshard.plan import Feed, Target, recut, share
from ckptd.reshard.reading import ValueReader
from ckptd.store import open_store
from ckptd.store.base import Store
from tests.checkpoint.load.builder import Built, Saved, build, random_grid, random_saved

MIB = 1 << 20


def values(rng: random.Random, big: int = 0) -> dict[str, np.ndarray]:
    gen = np.random.default_rng(rng.randrange(1 << 30))
    shapes = [(), (5,), (7, 3), (0, 4), (4, 5, 6), (33, 8), (64,)]
    out = {}
    for i, shape in enumerate(shapes):
        kind = rng.choice(["float32", "float64", "int16", "uint8", "complex128"])
        out[f"t{i}"] = (gen.standard_normal(shape) * 50).astype(kind)
    for i in range(big):
        rows = 300 + 7 * i
        out[f"big{i}"] = gen.standard_normal((rows, 2111)).astype(np.float32)
    return out


def recut_at_random(built: Built, rng: random.Random, world: int) -> Target:
    """Return a target with other grids, other owners and another order of tensors."""
    tables = ManifestTables()
    entries: list[TensorEntry] = []
    feeds: list[Feed] = []
    order = list(range(len(built.manifest.tensors)))
    rng.shuffle(order)
    for old in order:
        entry = built.manifest.tensors[old]
        grid = random_grid(rng, entry.shape)
        owners = Owners.from_array([rng.randrange(world) for _ in range(grid.npieces)])
        entries.append(
            TensorEntry(
                entry.name,
                entry.dtype,
                entry.shape,
                tables.grid(GridEntry.of(grid)),
                tables.owner(owners.runs),
            )
        )
        feeds.append(recut(old, built.filemap.grid_of(old), grid))
    return Target(world, tuple(entries), tables.grids, tables.owners, feeds)


def job(store: Store, built: Built, target: Target, out: Store) -> ReshardJob:
    source = PieceLocations(built.manifest, built.filemap, store)
    return ReshardJob(
        source,
        target,
        Catalogue(out),
        step=built.manifest.step,
        identity="test",
        bulk=out,
        expected={},
    )


def check(out: Store, data: Mapping[str, np.ndarray]) -> None:
    catalogue = Catalogue(out)
    latest = catalogue.latest()
    assert latest is not None
    reader = CkptdReader(catalogue, latest)
    for name, wanted in data.items():
        found = reader.tensor(name)
        assert found.dtype == wanted.dtype
        assert np.array_equal(
            found.view(np.uint8) if found.ndim else found,
            wanted.view(np.uint8) if wanted.ndim else wanted,
        )


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_becomes_any_other(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = values(rng)
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as out:
        built = build(store, {n: random_saved(rng, v, 4) for n, v in data.items()}, step=3)
        target = recut_at_random(built, rng, rng.randrange(1, 6))
        done = job(store, built, target, out).run(ReshardShare(), Budget.of(64 * MIB, store))
        assert done.state == "committed"
        check(out, data)
        again = job(store, built, target, out).run(ReshardShare(), Budget.of(64 * MIB, store))
        assert again.state == "present"


def test_many_rounds_stay_within_the_budget(tmp_path: Path) -> None:
    rng = random.Random(5)
    data = values(rng, big=12)
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as out:
        built = build(store, {n: random_saved(rng, v, 4) for n, v in data.items()}, step=3)
        target = recut_at_random(built, rng, 3)
        budget = Budget(32 * MIB, 4 * MIB, 8 * MIB, 4 * MIB, 2, 1)
        done = job(store, built, target, out).run(ReshardShare(), budget)
        assert done.rounds > 8
        assert done.peak_staged <= 8 * MIB + 3 * 4096
        assert done.bytes_written == sum(target.sizes)
        check(out, data)


def test_shares_cover_all_files_and_the_last_one_commits(tmp_path: Path) -> None:
    rng = random.Random(7)
    data = values(rng, big=3)
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as out:
        built = build(store, {n: random_saved(rng, v, 4) for n, v in data.items()}, step=3)
        target = recut_at_random(built, rng, 5)
        states = []
        for number in (2, 3, 1):
            work = job(store, built, target, out)
            states.append(work.run(ReshardShare(number, 3), Budget.of(64 * MIB, store)))
        assert [s.state for s in states] == ["waiting", "waiting", "committed"]
        assert sum(s.files for s in states) == 5
        check(out, data)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shares_are_neighbours_and_disjoint(count: int) -> None:
    sizes = [5, 0, 7, 100, 3, 3, 3, 0, 9]
    dealt = [share(sizes, i, count) for i in range(count)]
    assert [f for r in dealt for f in r] == list(range(len(sizes)))


def test_damage_in_the_source_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    rng = random.Random(9)
    data = values(rng, big=2)
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as out:
        built = build(store, {n: Saved.whole(v) for n, v in data.items()}, step=3)
        path = tmp_path / "a" / built.manifest.files[0].path
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 4
        path.write_bytes(raw)
        target = recut_at_random(built, rng, 2)
        with pytest.raises(CorruptError) as caught:
            job(store, built, target, out).run(ReshardShare(), Budget.of(64 * MIB, store))
        assert caught.value.kind == "digest"
        assert "rank 0" in (caught.value.where or "")
        assert Catalogue(out).latest() is None


def test_a_file_is_checked_once_for_all_small_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counted(store: Store, entry: FileEntry) -> None:
        looks.append(entry.path)
        check_size(store, entry)

    monkeypatch.setattr(read, "check_size", counted)
    rng = random.Random(3)
    with open_store(tmp_path / "a") as store:
        built = build(store, {n: random_saved(rng, v, 2) for n, v in values(rng).items()}, step=3)
        places = PieceLocations(built.manifest, built.filemap, store)
        for number, entry in enumerate(built.manifest.tensors):
            grid = built.filemap.grid_of(number)
            reader = ValueReader(places, [(entry.dtype, grid, recut(number, grid, grid))])
            for part in reader.parts():
                reader.read(part, np.zeros(part.hi - part.lo, np.uint8))
    assert sorted(looks) == sorted(set(looks))


def test_names_for_errors_are_listed_once(tmp_path: Path) -> None:
    """Not once for each of the target's files, of which a large job has thousands."""
    rng = random.Random(3)
    with open_store(tmp_path / "a") as store:
        built = build(store, {n: random_saved(rng, v, 2) for n, v in values(rng).items()}, step=3)
        places = PieceLocations(built.manifest, built.filemap, store)
        target = recut_at_random(built, rng, 2)
        executor = Executor(places, target, Budget.of(64 * MIB, store), {})
        assert executor.samples(0).names is executor.samples(1).names
