"""A root that is made again, or vanishes, under a job that writes there, at every moment.

The old life's writes are refused, and all that it leaves (it may die at any later moment) does not
count at the new root and damages nothing of it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ckptd.checkpoint.format.names import CommitName, commit_key
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import plan_gc, run_gc
from ckptd.checkpoint.root.leases import hold
from ckptd.checkpoint.tools.copy import Transfer
from ckptd.errors import CkptdError, ConflictError, CorruptError, NotFoundError, StoreError
from ckptd.store.local import LocalStore
from tests.checkpoint.root.checkpoints import (
    Visited,
    assert_whole,
    memory,
    put_attempt,
    save,
    steps,
)
from tests.checkpoint.root.test_gc_death import DiedError, Dying
from tests.sampling import sampled

OLD, NEW = CommitName(9, 1), CommitName(3, 1)
Act = Callable[[Catalogue], object]


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs prove nothing here."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "WAIT_S", 0.0)


class Place:
    """A folder with a root of an old life in it; `swap` puts a new one there."""

    def __init__(self, ram: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=ram))
        self.root = self.folder / "root"
        old = Catalogue(LocalStore(self.root))
        self.old_id = old.create_or_open().root_id
        self.claim = old.claim(None, 1)
        for step in (5, 6, 7):
            save(old, step, self.claim.generation)
        attempt = put_attempt(LocalStore(self.root), OLD, "old")
        self.commit = replace(attempt, root=self.old_id, claim=self.claim.claim_id)

    def vanish(self) -> None:
        os.rename(self.root, self.folder / "away")

    def swap(self) -> None:
        self.vanish()
        new = Catalogue(LocalStore(self.root))
        new.create_or_open()
        generation = new.claim(None, 1).generation
        for step in (1, 2, 3):
            save(new, step, generation, "new")
        # The same step as the old life is about to commit, in flight.
        put_attempt(new.store, OLD, "new")

    def assert_new(self) -> None:
        """The new root has what its own life wrote, and nothing else counts."""
        new = Catalogue(LocalStore(self.root))
        assert new.open().root_id != self.old_id
        assert new.latest() == NEW
        assert_whole(new.store, [CommitName(s, 1) for s in (1, 2, 3)])
        with pytest.raises((NotFoundError, CorruptError)):
            new.commit(OLD)
        with pytest.raises(NotFoundError):
            new.find(OLD.step)
        kinds = {i.kind for i in plan_gc(new, 1).items if i.name == NEW}
        assert kinds <= {"parts"}
        generation = new.claim(NEW, 1).generation
        save(new, 4, generation, "new")
        assert steps(new.line()) == [1, 2, 3, 4]

    def close(self) -> None:
        shutil.rmtree(self.folder)


def publish(old: Catalogue, place: Place) -> None:
    old.publish(place.commit)


def pin(old: Catalogue, _: Place) -> None:
    old.pin(CommitName(5, 1))


def claim(old: Catalogue, _: Place) -> None:
    old.claim(CommitName(7, 1), 1)


def collect(old: Catalogue, _: Place) -> None:
    run_gc(old.store, plan_gc(old, 1))


ACTS = {"publish": publish, "pin": pin, "claim": claim, "gc": collect}


def count(ram: Path, act: Callable[[Catalogue, Place], None]) -> int:
    place = Place(ram)
    store = Visited(LocalStore(place.root), 0, lambda: None)
    old = Catalogue(store)
    old.open()
    store.count = 0
    act(old, place)
    place.close()
    return store.count


@sampled(3)
@pytest.mark.parametrize("name", ACTS)
def test_a_root_made_anew_at_every_operation(name: str, every: int, ram: Path) -> None:
    act = ACTS[name]
    total = count(ram, act)
    refused = 0
    for at in range(1 + list(ACTS).index(name) % every, total + 1, every):
        for dies in sorted({at, at + 1 + at % 3, total + 40}):
            place = Place(ram)
            store = Dying(LocalStore(place.root), 0, place.swap, 10**9)
            old = Catalogue(store)
            old.open()
            store.count, store._at, store._dies = 0, at, dies
            try:
                act(old, place)
            except (StoreError, ConflictError, NotFoundError, CorruptError):
                refused += 1
            except DiedError:
                pass
            else:
                assert name != "publish", (at, dies)
            place.assert_new()
            place.close()
    assert refused


@sampled(2)
@pytest.mark.parametrize("name", ACTS)
def test_a_root_that_vanishes_is_not_made_again(name: str, every: int, ram: Path) -> None:
    act = ACTS[name]
    for at in range(1 + list(ACTS).index(name) % every, count(ram, act) + 1, every):
        place = Place(ram)
        store = Visited(LocalStore(place.root), 0, place.vanish)
        old = Catalogue(store)
        old.open()
        store.count, store._at = 0, at
        try:
            act(old, place)
        except CkptdError:
            pass
        else:
            assert name != "publish", at
        assert os.listdir(place.folder) == ["away"]
        place.close()


def test_each_verb_says_why(ram: Path) -> None:
    for happens, kind in (("vanish", "root-gone"), ("swap", "other-root")):
        for act in ACTS.values():
            place = Place(ram)
            old = Catalogue(LocalStore(place.root))
            old.open()
            getattr(place, happens)()
            with pytest.raises(CkptdError) as caught:
                act(old, place)
            assert caught.value.kind == kind
            place.close()


def test_a_copy_into_a_root_that_vanishes_makes_no_folder(ram: Path) -> None:
    place, source = Place(ram), memory()
    origin = Catalogue(source)
    origin.create_or_open()
    name = save(origin, 9, origin.claim(None, 1).generation)
    bulk = LocalStore(place.root)
    copy = Transfer(origin, Catalogue(LocalStore(place.root)), bulk=bulk)
    place.vanish()
    with pytest.raises(CkptdError):
        copy.copy(origin.commit(name))
    with pytest.raises(StoreError) as caught:
        bulk.writer("data/000000000009-g00000002-cp/r00000.safetensors", 10)
    assert caught.value.kind == "root-gone"
    assert os.listdir(place.folder) == ["away"]
    place.close()


def test_a_generation_that_another_life_claimed_again(ram: Path) -> None:
    """Brought back from an older copy, a root lacks a claim, and the next life takes its number."""
    place = Place(ram)
    old = Catalogue(LocalStore(place.root))
    old.open()
    (place.root / "generations/00000001.json").unlink()
    with pytest.raises(ConflictError) as caught:
        publish(old, place)
    assert "no longer belongs to this job" in caught.value.message
    assert not (place.root / commit_key(OLD)).exists()
    place.close()


def test_a_commit_of_another_claim_does_not_count_and_is_not_deleted(ram: Path) -> None:
    """As a death leaves it that came between the commit and the second look at the root."""
    place = Place(ram)
    away = place.folder / "away"
    old = Catalogue(LocalStore(place.root))
    old.open()
    publish(old, place)
    place.swap()
    for part in ("commits", "data"):
        shutil.copytree(away / part, place.root / part, dirs_exist_ok=True)
    for step in (5, 6, 7):  # of these nobody knows: their records carry no life
        (place.root / commit_key(CommitName(step, 1))).unlink()
    place.assert_new()
    new = Catalogue(LocalStore(place.root))
    new.open()
    run_gc(new.store, plan_gc(new, 1, abandoned_s=0.0, leftover_s=0.0, other_runs=True))
    assert (place.root / commit_key(OLD)).exists()
    assert list((place.root / "data").glob("*-old/manifest.json"))
    with pytest.raises(CorruptError) as caught:
        hold(new, OLD)
    assert "was written by another life of the job" in caught.value.message
    place.close()
