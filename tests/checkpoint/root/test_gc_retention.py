"""Retention: the inventory, the decision, and the deletions of a job after a save."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, generation_key
from ckptd.checkpoint.format.records import Commit, Generation, Parent
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import (
    ABANDONED_S,
    abandoned_by,
    apply_retention,
    decide,
    missing_files,
    take,
)
from ckptd.checkpoint.root.leases import hold
from ckptd.checkpoint.root.policy import Keep
from ckptd.errors import ConflictError, CorruptError
from ckptd.store.memory import MemoryStore
from tests.checkpoint.root.checkpoints import Visited, assert_whole, put_attempt, save, steps

_names = itertools.count()


@pytest.fixture
def catalogue() -> Catalogue:
    made = Catalogue(MemoryStore(f"retention-{next(_names)}"))
    made.create_or_open()
    return made


def run(catalogue: Catalogue, *at: int, parent: CommitName | None = None) -> list[CommitName]:
    """Claim a generation and save these steps in it."""
    generation = catalogue.claim(parent, 1).generation
    return [save(catalogue, s, generation) for s in at]


def reasons(catalogue: Catalogue, keep: Keep | int | None, **options: float) -> dict[int, str]:
    chosen = decide(take(catalogue, time.time()), Keep.of(keep), time.time(), **options)
    return {n.step: "; ".join(r) for n, r in chosen.kept.items()}


# -- the decision ----------------------------------------------------------------------------------


def test_the_rule_decides_about_the_line(catalogue: Catalogue) -> None:
    run(catalogue, 10, 20, 30, 40)
    assert list(reasons(catalogue, 2)) == [30, 40]
    assert list(reasons(catalogue, Keep(last=1, every_steps=20))) == [20, 40]
    assert list(reasons(catalogue, None)) == [10, 20, 30, 40]


def test_pins_and_leases_stay(catalogue: Catalogue) -> None:
    a, b, *_ = run(catalogue, 10, 20, 30, 40)
    catalogue.pin(a)
    with hold(catalogue, b, holder="eval"):
        kept = reasons(catalogue, 1)
        assert kept[10] == "pinned"
        assert kept[20].startswith("leased by eval ")
        assert list(kept) == [10, 20, 40]
    catalogue.unpin(a)
    assert list(reasons(catalogue, 1)) == [40]


def test_a_lease_that_ran_out_protects_nothing(catalogue: Catalogue) -> None:
    a, _ = run(catalogue, 10, 20)
    hold(catalogue, a, seconds=-1000.0)
    assert list(reasons(catalogue, 1)) == [20]


def test_the_newest_complete_checkpoint_stays(catalogue: Catalogue) -> None:
    """The newest one lost a file: the one before it is all that a job could load."""
    names = run(catalogue, 10, 20, 30, 40)
    for name in names[2:]:
        record = catalogue.commit(name)
        catalogue.store.delete([record.folder + "r00001.safetensors"])
    inventory = take(catalogue, time.time())
    assert inventory.anchor == names[1]
    assert {n.step for n in inventory.broken} == {30, 40}
    assert "r00001.safetensors" in inventory.broken[names[3]]
    kept = reasons(catalogue, 1)
    assert list(kept) == [20, 30, 40]
    assert kept[20] == "the newest complete checkpoint"
    assert kept[30] == "later than the newest complete checkpoint"


def test_nothing_goes_when_nothing_is_complete(catalogue: Catalogue) -> None:
    names = run(catalogue, 10, 20)
    for name in names:
        catalogue.store.delete([catalogue.commit(name).folder + "r00001.digests"])
    assert list(reasons(catalogue, 1, grace_s=0.0)) == [10, 20]


def test_nothing_goes_before_a_new_run_has_saved(catalogue: Catalogue) -> None:
    run(catalogue, 10, 20)
    fresh = catalogue.claim(None, 1).generation
    assert list(reasons(catalogue, 1, grace_s=0.0)) == [10, 20]
    save(catalogue, 5, fresh)
    assert list(reasons(catalogue, 1, grace_s=0.0)) == [5, 10, 20]
    assert "another run" in reasons(catalogue, 1, grace_s=0.0)[10]
    assert list(reasons(catalogue, 1, grace_s=0.0, other_runs=True)) == [5]


@pytest.mark.parametrize("what", ["manifest", "data", "short", "digests"])
def test_what_is_missing(catalogue: Catalogue, what: str) -> None:
    [name] = run(catalogue, 10)
    record = catalogue.commit(name)
    assert missing_files(catalogue, record) is None
    data = record.folder + "r00001.safetensors"
    if what == "short":
        catalogue.store.put(data, catalogue.store.get(data)[:-1])
    else:
        end = {"manifest": record.manifest, "data": data, "digests": "r00001.digests"}[what]
        catalogue.store.delete([record.folder + end.rpartition("/")[2]])
    assert str(missing_files(catalogue, record)).startswith(
        "the manifest" if what == "manifest" else record.folder
    )


# -- abandoned lines -------------------------------------------------------------------------------


def test_abandoned_commits_have_their_grace(catalogue: Catalogue) -> None:
    a, b, c = run(catalogue, 10, 20, 30)
    catalogue.rollback(10)
    inventory = take(catalogue, time.time())
    assert inventory.line == (a,)
    assert {n: x.generation for n, x in inventory.abandoned.items()} == {b: 2, c: 2}
    assert reasons(catalogue, 1)[20] == "abandoned by generation 2, in its grace period"
    later = time.time() + ABANDONED_S + 10
    assert list(decide(inventory, Keep(1), later).kept) == [a]
    assert decide(inventory, Keep(1), later).dropped[b] == ("abandoned by generation 2",)


def test_a_zombies_grace_begins_when_it_commits(catalogue: Catalogue) -> None:
    run(catalogue, 10)
    now = time.time()
    catalogue.rollback(10)
    late = put_attempt(catalogue.store, CommitName(20, 1), created=now + 5000.0)
    catalogue.store.put(commit_key(late.name), _raw(late))
    inventory = take(catalogue, now)
    assert inventory.abandoned[late.name].since == pytest.approx(now + 5000.0, abs=0.01)


def _raw(commit: Commit) -> bytes:
    from ckptd.checkpoint.format.records import encode_record

    return encode_record(commit)


def generations(*parents: tuple[int, int] | None) -> dict[int, Generation]:
    return {
        g: Generation(g, "", Parent(*p) if p else None, "", 1) for g, p in enumerate(parents, 1)
    }


@pytest.mark.parametrize(
    ("parents", "name", "left"),
    [
        ([None], (10, 1), None),
        ([None, (10, 1)], (10, 1), None),
        ([None, (10, 1)], (20, 1), 2),
        ([None, (10, 1), (15, 2)], (20, 1), 2),
        ([None, (10, 1), (30, 1)], (20, 1), None),  # taken up again
        ([None, (10, 1), (30, 1), (10, 1)], (20, 1), 4),  # and left again
        ([None, None], (10, 1), 2),
        ([None, None, (10, 1)], (10, 1), None),
        ([None, (10, 1), None, (40, 2)], (10, 1), None),
        ([None, (10, 1), None, (40, 2)], (50, 2), 3),
    ],
)
def test_since_when_a_commit_is_abandoned(
    parents: list[tuple[int, int] | None], name: tuple[int, int], left: int | None
) -> None:
    claimed = generations(*parents)
    assert abandoned_by(CommitName(*name), sorted(claimed), claimed.__getitem__) == left


def test_a_commit_of_a_generation_that_is_gone(catalogue: Catalogue) -> None:
    [name] = run(catalogue, 10)
    lost, _ = (catalogue.claim(name, 1).generation for _ in range(2))
    catalogue.store.delete([generation_key(lost)])
    catalogue = Catalogue(catalogue.store)
    stray = put_attempt(catalogue.store, CommitName(99, lost), created=1000.0)
    catalogue.store.put(commit_key(stray.name), _raw(stray))
    inventory = take(catalogue, time.time())
    assert inventory.abandoned[stray.name].another_run
    assert list(reasons(catalogue, 1)) == [10, 99]  # nobody knows whose it is


def test_a_bad_time_is_named(catalogue: Catalogue) -> None:
    import msgspec

    run(catalogue, 10, 20)
    catalogue.rollback(10)
    stray = catalogue.commit(CommitName(20, 1))
    catalogue.store.put(
        commit_key(stray.name), _raw(msgspec.structs.replace(stray, created="soon"))
    )
    with pytest.raises(CorruptError) as info:
        take(Catalogue(catalogue.store), time.time())
    assert commit_key(stray.name) in str(info.value.where)


# -- after a save ----------------------------------------------------------------------------------


def test_a_job_keeps_its_newest(catalogue: Catalogue) -> None:
    generation = catalogue.claim(None, 1).generation
    for step in range(1, 11):
        save(catalogue, step, generation)
        apply_retention(catalogue, 3)
        assert steps(catalogue.line()) == list(range(max(1, step - 2), step + 1))
        assert len(catalogue.store.children("data/")) == len(catalogue.line())
    assert_whole(catalogue.store, catalogue.line())


def test_unchanged_chunks_outlive_their_checkpoint(catalogue: Catalogue) -> None:
    """A folder stays as long as a kept commit refers to it, however old its own commit was."""
    generation = catalogue.claim(None, 1).generation
    base = catalogue.commit(save(catalogue, 1, generation))
    last = base
    for step in range(2, 7):
        last = catalogue.commit(save(catalogue, step, generation, reuse=last))
        apply_retention(catalogue, 1)
        assert steps(catalogue.commits()) == [step]
        assert_whole(catalogue.store, catalogue.commits())
        assert len(catalogue.store.children("data/")) == 2
    save(catalogue, 7, generation)
    apply_retention(catalogue, 1)
    assert len(catalogue.store.children("data/")) == 1


def test_what_an_older_life_left_goes_with_the_next_save(catalogue: Catalogue) -> None:
    [a] = run(catalogue, 10)
    put_attempt(catalogue.store, CommitName(20, 1), "dead")
    generation = catalogue.claim(a, 1).generation
    save(catalogue, 20, generation)
    put_attempt(catalogue.store, CommitName(30, generation), "flying")
    apply_retention(catalogue, 5)
    assert [f.rpartition("-")[2] for f in catalogue.store.children("data/")] == [
        "a/",
        "a/",
        "flying/",
    ]


def test_a_superseded_job_deletes_nothing(catalogue: Catalogue) -> None:
    names = run(catalogue, 10, 20, 30)

    told = 0
    for number in range(1, 30):
        inner = MemoryStore(f"retention-{next(_names)}")
        for o in catalogue.store.list():
            inner.put(o.key, catalogue.store.get(o.key))

        def newer(inner: MemoryStore = inner) -> None:
            Catalogue(inner).claim(names[2], 1, "load")

        try:
            apply_retention(Catalogue(Visited(inner, number, newer)), 1)
        except ConflictError as error:
            told += error.kind == "stale-plan"
            assert Catalogue(inner).commits() == names
        assert Catalogue(inner).latest() == names[2]
        assert_whole(inner, Catalogue(inner).commits())
    assert told


def test_time_and_best(catalogue: Catalogue) -> None:
    generation = catalogue.claim(None, 1).generation
    day = 86_400.0
    start = day * 20_000
    for step in range(1, 9):
        save(
            catalogue,
            step,
            generation,
            created=start + step * day / 4,
            metadata={"loss": abs(step - 4.1)},
        )
    keep = Keep(last=1, every=timedelta(days=1), best=("loss", "min", 2))
    apply_retention(catalogue, keep)
    assert steps(catalogue.line()) == [1, 4, 5, 8]
