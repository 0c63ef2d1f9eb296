"""The catalogue: roots, generations, commits, and every error it can raise."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckptd.engine.catalogue import Catalogue
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
    UsageError,
)
from ckptd.format.names import CommitName, commit_key, generation_key, pin_key
from ckptd.format.records import Commit, Generation, RootMarker, encode_record
from ckptd.store.base import Names, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore
from ckptd.store.retry import Retry
from ckptd.store.spec import FaultRule, FaultSpec, RetrySpec
from ckptd.store.wrap import Wrapper
from tests.engine.checkpoints import Visited, assert_whole, put_attempt, save, steps

_names = itertools.count()


def memory() -> MemoryStore:
    return MemoryStore(f"catalogue-{next(_names)}")


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = memory() if request.param == "memory" else LocalStore(str(tmp_path / "root"))
    with made:
        yield made


@pytest.fixture
def catalogue(store: Store) -> Catalogue:
    made = Catalogue(store)
    made.create_or_open()
    return made


def error_of(act: Callable[[], object], kind: type[CkptdError] = CkptdError) -> CkptdError:
    with pytest.raises(kind) as info:
        act()
    return info.value


# -- the root --------------------------------------------------------------------------------------


def test_a_root_is_created_once(store: Store) -> None:
    first = Catalogue(store).create_or_open()
    assert Catalogue(store).create_or_open() == first
    assert Catalogue(store).open() == first
    assert len(first.root_id) == 32
    assert store.children() == ["ckptd.json"]


def test_opening_nothing(store: Store) -> None:
    error = error_of(Catalogue(store).open, NotFoundError)
    assert error.kind == "no-root"
    assert store.children() == []


def test_opening_foreign_content(store: Store) -> None:
    store.put("model.safetensors", b"x")
    error = error_of(Catalogue(store).open, NotFoundError)
    assert (error.kind, error.found) == ("not-a-root", "model.safetensors")
    assert error.hint


def test_a_root_may_begin_in_a_folder_with_other_things(store: Store) -> None:
    store.put("train.log", b"x")
    marker = Catalogue(store).create_or_open()
    assert Catalogue(store).open() == marker


@pytest.mark.parametrize("key", [generation_key(1), commit_key(CommitName(1, 1))])
def test_a_root_without_marker_is_not_continued(store: Store, key: str) -> None:
    store.put(key, b"{}")
    assert error_of(Catalogue(store).create_or_open, RefusedError).kind == "no-marker"
    assert error_of(Catalogue(store).open, NotFoundError).kind == "not-a-root"


def test_a_root_of_a_newer_version(store: Store) -> None:
    store.put("ckptd.json", b'{"version": 2, "fields": "that nobody knows yet"}')
    for act in (Catalogue(store).create_or_open, Catalogue(store).open):
        error = error_of(act, CorruptError)
        assert error.kind == "version"
        assert "ckptd.json" in str(error.where)


def test_a_damaged_marker(store: Store) -> None:
    store.put("ckptd.json", b"\x00\x01")
    assert error_of(Catalogue(store).create_or_open, CorruptError).kind == "bad-json"


def test_two_who_create_one_root_agree(store: Store) -> None:
    markers: list[RootMarker] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait(30)
        markers.append(Catalogue(store).create_or_open())

    threads = [threading.Thread(target=create) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(markers) == 8
    assert len(set(markers)) == 1


class Undecided(Wrapper):
    """A store that cannot decide a race."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultSpec())
        self.capabilities = replace(inner.capabilities, create_only=False)


def test_stores_without_create_only_are_refused() -> None:
    inner = memory()
    weak = Catalogue(Undecided(inner))
    error = error_of(weak.create_or_open, RefusedError)
    assert error.kind == "no-create-only"
    assert error.hint == f"ckptd doctor {inner.url}"
    strong = Catalogue(inner)
    strong.create_or_open()
    generation = strong.claim(None, 1).generation
    name = save(strong, 1, generation)
    attempt = put_attempt(inner, CommitName(2, generation))
    acts: list[Callable[[], object]] = [
        lambda: weak.claim(None, 1),
        lambda: weak.publish(attempt),
        lambda: weak.pin(name),
        lambda: weak.rollback(1),
    ]
    for act in acts:
        assert error_of(act, RefusedError).kind == "no-create-only"
    assert weak.latest() == name
    assert weak.line() == [name]


# -- reading ---------------------------------------------------------------------------------------


def test_an_empty_root(catalogue: Catalogue) -> None:
    assert catalogue.latest() is None
    assert catalogue.line() == catalogue.commits() == catalogue.generations() == []
    assert catalogue.newest_generation() == 0
    assert catalogue.continue_line(0) is None
    error = error_of(lambda: catalogue.find(1), NotFoundError)
    assert (error.kind, error.found) == ("no-step", "no checkpoint")


def test_a_line_through_generations(catalogue: Catalogue) -> None:
    g1 = catalogue.claim(None, 4, "start").generation
    a, b, c = (save(catalogue, s, g1) for s in (10, 20, 30))
    g2 = catalogue.claim(b, 2, "load").generation
    assert (g1, g2) == (1, 2)
    assert catalogue.latest() == b
    d = save(catalogue, 25, g2)
    assert catalogue.line() == [a, b, d]
    assert catalogue.latest() == d
    assert catalogue.commits() == [a, b, d, c]
    assert catalogue.generation(2).parent == msgspec.convert(
        {"step": 20, "generation": 1}, type(catalogue.generation(2).parent)
    )
    assert catalogue.manifest(d).step == 25


def test_find(catalogue: Catalogue) -> None:
    g1 = catalogue.claim(None, 1).generation
    a, b = save(catalogue, 10, g1), save(catalogue, 20, g1)
    g2 = catalogue.claim(a, 1).generation
    c = save(catalogue, 20, g2)
    g3 = catalogue.claim(a, 1).generation
    assert catalogue.find(10) == a
    error = error_of(lambda: catalogue.find(20), NotFoundError)
    assert error.found == "steps 10"
    assert "--all" in str(error.hint)
    assert catalogue.find(20, all=True) == c
    assert catalogue.find(20, all=True, generation=g1) == b
    d = save(catalogue, 20, g3)
    assert catalogue.find(20) == catalogue.find(20, all=True) == d
    assert error_of(lambda: catalogue.find(20, generation=g1)).kind == "no-step"
    assert error_of(lambda: catalogue.find(-1), UsageError).kind == "bad-step"


def test_foreign_names_are_not_seen(catalogue: Catalogue, store: Store) -> None:
    g = catalogue.claim(None, 1).generation
    name = save(catalogue, 1, g)
    for key in ("commits/notes.txt", "commits/1-g1.json", "commits/x/y.json"):
        store.put(key, b"?")
    for key in ("generations/9.json", "generations/00000009.json.bak"):
        store.put(key, b"?")
    assert catalogue.commits() == [name]
    assert catalogue.generations() == [1]
    assert catalogue.latest() == name


def test_latest_reads_few_records() -> None:
    inner = memory()
    c = Catalogue(inner)
    c.create_or_open()
    g1 = c.claim(None, 1).generation
    for step in range(1, 20):
        save(c, step, g1)
    c.claim(c.latest(), 1)
    fault = Fault(inner)
    assert Catalogue(fault).latest() == CommitName(19, 1)
    assert [o.key for o in fault.operations if o.op == "get"] == [generation_key(2)]
    assert len(fault.operations) == 5


def test_records_are_read_once(catalogue: Catalogue, store: Store) -> None:
    g = catalogue.claim(None, 1).generation
    names = [save(catalogue, s, g) for s in (1, 2, 3)]
    fault = Fault(store)
    other = Catalogue(fault)
    assert steps(other.records(names)) == [1, 2, 3]
    before = len(fault.operations)
    store.delete([commit_key(names[0])])
    assert steps(other.records(names[1:])) == [2, 3]
    assert len(fault.operations) == before
    assert steps(Catalogue(store).records(names)) == [2, 3]


def test_a_generation_claimed_between_two_listings_hides_no_zombie() -> None:
    """Listing generations, then commits, must not show what came with a claim in between."""
    for number in range(1, 8):
        inner = memory()
        live = Catalogue(inner)
        live.create_or_open()
        g1 = live.claim(None, 1).generation
        first = save(live, 10, g1)
        late = put_attempt(inner, CommitName(20, g1))

        def visit(live: Catalogue = live, first: CommitName = first, late: Commit = late) -> None:
            live.claim(first, 1, "load")
            live.store.put(commit_key(late.name), encode_record(late))  # the zombie

        assert Catalogue(Visited(inner, number, visit)).latest() == first


class Lagging(Wrapper):
    """A store whose listings hide what was put last."""

    def __init__(self, inner: Store, hidden: set[str]) -> None:
        super().__init__(inner, FaultSpec())
        self.capabilities = replace(inner.capabilities, consistent_list=False)
        self.hidden = hidden

    def children(self, prefix: str = "") -> Names:
        return [n for n in self.inner.children(prefix) if prefix + n not in self.hidden]


def test_a_listing_that_lags() -> None:
    store = Lagging(memory(), set())
    job = Catalogue(store)
    job.create_or_open()
    g1 = job.claim(None, 1).generation
    a, b = save(job, 10, g1), save(job, 20, g1)
    store.hidden |= {generation_key(g1), commit_key(b)}
    assert job.latest() == b  # it published b itself
    g2 = job.claim(b, 1).generation
    store.hidden |= {generation_key(g2)}
    stranger = Catalogue(store)
    assert stranger.newest_generation() == g2
    assert stranger.latest() == b  # the newest generation names it
    assert stranger.line() == [a, b]
    assert error_of(lambda: save(job, 30, g1)).kind == "superseded"


# -- damage ----------------------------------------------------------------------------------------


def one(catalogue: Catalogue) -> Commit:
    return catalogue.commit(save(catalogue, 7, catalogue.claim(None, 1).generation))


@pytest.mark.parametrize(
    "change",
    [
        {"step": 8},
        {"generation": 2},
        {"folder": "data/000000000008-g00000001-a/"},
        {"folder": "data/../../etc/"},
        {"folders": ()},
        {"folders": ("data/000000000007-g00000001-a/", "../outside/")},
        {"folders": ("data/000000000007-g00000001-a/", "data/../x/")},
        {"folders": ("data/000000000007-g00000001-a/", "commits/000000000007-g00000001-a/")},
        {"folders": ("data/000000000007-g00000001-a/", "data/000000000006-g00000001-a")},
        {"manifest": "../manifest.json"},
        {"manifest": "witness"},
        {"manifest_bytes": 0},
        {"manifest_bytes": 1 << 50},
        {"data_bytes": -1},
        {"attempt": "b"},
        {"step": -1},
        {"generation": 10**9},
    ],
)
def test_a_commit_record_that_breaks_a_rule(change: dict[str, object]) -> None:
    store = memory()
    c = Catalogue(store)
    record = one(c)
    bad = msgspec.structs.replace(record, **change)
    store.put(commit_key(record.name), encode_record(bad))
    error = error_of(lambda: c.commit(record.name), CorruptError)
    assert error.kind == "bad-record"
    assert commit_key(record.name) in str(error.where)
    assert error_of(lambda: c.manifest(record.name), CorruptError).kind == "bad-record"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "bad-json"),
        (b"[]", "bad-json"),
        (b"{}", "bad-record"),
        (b'{"version": 99}', "version"),
        (b" " * ((1 << 20) + 1), "limits"),
    ],
)
def test_a_commit_record_that_is_none(raw: bytes, kind: str) -> None:
    store = memory()
    c = Catalogue(store)
    record = one(c)
    store.put(commit_key(record.name), raw)
    assert error_of(lambda: c.commit(record.name), CorruptError).kind == kind


def test_a_huge_record_is_not_fetched() -> None:
    store = memory()
    c = Catalogue(store)
    record = one(c)
    store.put(commit_key(record.name), bytes(2 << 20))
    fault = Fault(store)
    assert error_of(lambda: Catalogue(fault).commit(record.name)).kind == "limits"
    assert "get" not in {o.op for o in fault.operations}


def test_no_such_commit(catalogue: Catalogue) -> None:
    for act in (catalogue.commit, catalogue.manifest, catalogue.pin):
        error = error_of(lambda act=act: act(CommitName(3, 1)), NotFoundError)  # type: ignore[misc]
        assert error.kind == "no-commit"
    error = error_of(lambda: catalogue.claim(CommitName(3, 1), 1), NotFoundError)
    assert error.kind == "no-commit"
    assert catalogue.generations() == []


def manifest_key(record: Commit) -> str:
    return record.folder + record.manifest


def test_a_manifest_that_is_gone_or_changed(catalogue: Catalogue, store: Store) -> None:
    record = one(catalogue)
    key = manifest_key(record)
    raw = store.get(key)
    store.put(key, raw[:-2] + b" \n")
    error = error_of(lambda: catalogue.manifest(record.name), CorruptError)
    assert (error.kind, error.where) == ("digest", catalogue.where(key))
    store.put(key, raw + b" ")
    fault = Fault(store)
    error = error_of(lambda: Catalogue(fault).manifest_of(record), CorruptError)
    assert error.kind == "digest"
    assert "get" not in {o.op for o in fault.operations}  # the size was enough
    store.delete([key])
    error = error_of(lambda: catalogue.manifest(record.name), CorruptError)
    assert (error.kind, error.where) == ("missing-file", catalogue.where(key))


def test_a_manifest_of_another_checkpoint() -> None:
    store = memory()
    c = Catalogue(store)
    first = one(c)
    other = c.commit(save(c, 9, 1))
    store.put(manifest_key(other), store.get(manifest_key(first)))
    forged = msgspec.structs.replace(
        other, manifest_digest=first.manifest_digest, manifest_bytes=first.manifest_bytes
    )
    store.put(commit_key(other.name), encode_record(forged))
    assert error_of(lambda: c.manifest(other.name), CorruptError).kind == "bad-manifest"


def test_a_generation_of_another_number(catalogue: Catalogue, store: Store) -> None:
    catalogue.claim(None, 1)
    store.put(generation_key(2), store.get(generation_key(1)))
    error = error_of(lambda: Catalogue(store).latest(), CorruptError)
    assert error.kind == "bad-record"
    assert generation_key(2) in str(error.where)


def test_a_line_through_a_generation_that_is_gone(catalogue: Catalogue, store: Store) -> None:
    name = save(catalogue, 1, catalogue.claim(None, 1).generation)
    catalogue.claim(name, 1)
    catalogue.claim(name, 1)
    store.delete([generation_key(1), commit_key(name)])
    error = error_of(lambda: Catalogue(store).latest(), CorruptError)
    assert error.kind == "missing-record"
    assert generation_key(1) in str(error.where)
    assert error_of(lambda: Catalogue(store).generation(1), NotFoundError)


# -- generations -----------------------------------------------------------------------------------


def test_claims_race_for_numbers(store: Store) -> None:
    Catalogue(store).create_or_open()
    won: list[Generation] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait(30)
        won.append(Catalogue(store).claim(None, 1))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(g.generation for g in won) == list(range(1, 9))
    for g in won:
        assert Catalogue(store).generation(g.generation) == g


def test_claims_give_up_when_others_are_always_faster() -> None:
    inner = memory()
    Catalogue(inner).create_or_open()

    class Crowded(Wrapper):
        def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            if key.startswith("generations/"):
                Catalogue(inner).claim(None, 1)
            self.inner.put(key, data, create_only=create_only)

    error = error_of(lambda: Catalogue(Crowded(inner, FaultSpec())).claim(None, 1), ConflictError)
    assert error.kind == "busy"


def test_continue_line(catalogue: Catalogue) -> None:
    g = catalogue.claim(None, 1).generation
    name = save(catalogue, 10, g)
    assert catalogue.continue_line(11) == name
    for step in (10, 3):
        error = error_of(lambda s=step: catalogue.continue_line(s), RefusedError)  # type: ignore[misc]
        assert error.kind == "behind"
        assert "load()" in str(error.hint)
        assert "fresh line" in str(error.hint)
    catalogue.claim(None, 1, "fresh")
    assert catalogue.continue_line(3) is None


def test_rollback(catalogue: Catalogue, store: Store) -> None:
    g1 = catalogue.claim(None, 1).generation
    a, b, c = (save(catalogue, s, g1) for s in (10, 20, 30))
    before = {o.key for o in store.list("data/")} | {o.key for o in store.list("commits/")}
    claimed = catalogue.rollback(10)
    assert (claimed.reason, claimed.world_size) == ("rollback", 0)
    assert catalogue.line() == [a]
    assert error_of(lambda: catalogue.rollback(20), NotFoundError).kind == "no-step"
    catalogue.rollback(20, all=True)
    assert catalogue.line() == [a, b]
    assert c in catalogue.commits()
    assert {o.key for o in store.list("data/")} | {o.key for o in store.list("commits/")} == before
    assert list(store.list("leases/")) == []


def test_rollback_to_something_broken_changes_nothing(catalogue: Catalogue, store: Store) -> None:
    record = one(catalogue)
    save(catalogue, 9, 1)
    store.delete([manifest_key(record)])
    assert error_of(lambda: catalogue.rollback(7), CorruptError).kind == "missing-file"
    assert catalogue.newest_generation() == 1
    assert list(store.list("leases/")) == []


# -- publishing ------------------------------------------------------------------------------------


def test_a_superseded_writer_is_told(catalogue: Catalogue) -> None:
    g1 = catalogue.claim(None, 1).generation
    a = save(catalogue, 10, g1)
    assert catalogue.superseded(g1) is None
    attempt = put_attempt(catalogue.store, CommitName(20, g1))
    catalogue.claim(a, 8, "load")
    error = error_of(lambda: catalogue.publish(attempt), ConflictError)
    assert error.kind == "superseded"
    assert "generation 2" in str(error)
    assert "8 ranks (load)" in str(error.found)
    assert catalogue.commits() == [a]
    assert error_of(lambda: catalogue.check_not_superseded(g1)).kind == "superseded"
    catalogue.check_not_superseded(2)


def test_a_zombie_at_every_operation_of_publish() -> None:
    """The claim may come anywhere in a publish: the zombie is told, or was in time."""
    number, landed, refused = 0, 0, 0
    while True:
        number += 1
        inner = memory()
        live = Catalogue(inner)
        live.create_or_open()
        g1 = live.claim(None, 1).generation
        first = save(live, 10, g1)
        attempt = put_attempt(inner, CommitName(20, g1))
        parents: list[CommitName | None] = []

        def visit(live: Catalogue = live, out: list[CommitName | None] = parents) -> None:
            out.append(live.latest())
            live.claim(out[0], 1, "load")

        store = Visited(inner, number, visit)
        try:
            Catalogue(store).publish(attempt)
        except ConflictError as error:
            told = error.kind
        else:
            told = ""
        if not parents:
            assert told == ""
            break
        # Told, or the claim came after the last look and goes on from this commit.
        assert told == "superseded" or parents == [attempt.name]
        assert Catalogue(inner).latest() == parents[0]
        assert parents[0] in (first, attempt.name)
        landed += attempt.name in live.commits()
        refused += attempt.name not in live.commits()
    print(f"claims at {number - 1} places of a publish: {refused} kept it out, {landed} after it")
    assert landed
    assert refused


def test_another_attempt_won(catalogue: Catalogue) -> None:
    g = catalogue.claim(None, 1).generation
    mine = put_attempt(catalogue.store, CommitName(10, g), "mine")
    theirs = put_attempt(catalogue.store, CommitName(10, g), "theirs")
    catalogue.publish(theirs)
    error = error_of(lambda: catalogue.publish(mine), ConflictError)
    assert error.kind == "committed"
    for part in (theirs.attempt, theirs.write_id, theirs.created):
        assert part in str(error.found)
    assert catalogue.commit(mine.name) == theirs


def test_publishing_twice_is_publishing_once(catalogue: Catalogue) -> None:
    g = catalogue.claim(None, 1).generation
    attempt = put_attempt(catalogue.store, CommitName(10, g))
    catalogue.publish(attempt)
    catalogue.publish(attempt)
    survivor = msgspec.structs.replace(attempt, write_id="another", created="2030-01-01")
    catalogue.publish(survivor)
    assert catalogue.commit(attempt.name) == attempt


def test_a_step_before_the_parent_is_refused(catalogue: Catalogue) -> None:
    a = save(catalogue, 10, catalogue.claim(None, 1).generation)
    g2 = catalogue.claim(a, 1).generation
    for step in (10, 9):
        error = error_of(lambda s=step: save(catalogue, s, g2), RefusedError)  # type: ignore[misc]
        assert error.kind == "behind"
    assert catalogue.commits() == [a]


def test_nothing_hollow_is_published(catalogue: Catalogue, store: Store) -> None:
    g = catalogue.claim(None, 1).generation
    attempt = put_attempt(store, CommitName(10, g))
    raw = store.get(manifest_key(attempt))
    store.delete([manifest_key(attempt)])
    assert error_of(lambda: catalogue.publish(attempt), CorruptError).kind == "missing-file"
    store.put(manifest_key(attempt), raw + b" ")
    assert error_of(lambda: catalogue.publish(attempt), CorruptError).kind == "missing-file"
    store.put(manifest_key(attempt), raw)
    gone = msgspec.structs.replace(
        attempt, folders=(attempt.folder, "data/000000000001-g00000001-a/")
    )
    error = error_of(lambda: catalogue.publish(gone), CorruptError)
    assert error.kind == "missing-file"
    assert "000000000001" in str(error.where)
    assert catalogue.commits() == []


def test_an_unclaimed_generation_cannot_publish(catalogue: Catalogue) -> None:
    assert error_of(lambda: save(catalogue, 1, 1), NotFoundError)
    assert catalogue.commits() == []


# -- lost replies and deaths -----------------------------------------------------------------------


def life(store: Store) -> None:
    """Create a root, claim twice, publish twice, roll back, pin and unpin."""
    c = Catalogue(store)
    c.create_or_open()
    a = save(c, 10, c.claim(None, 1, "start").generation)
    g = c.claim(a, 1, "load").generation
    b = save(c, 20, g, reuse=c.commit(a))
    c.pin(b)
    c.rollback(10)
    c.unpin(b)


def test_lost_replies_of_creations_are_found_out() -> None:
    """The object was created and the answer got lost: claims and commits must not be doubled."""
    for skip in range(12):
        inner = memory()
        rule = FaultRule("lost", op="put-new", skip=skip)
        life(Fault(inner, FaultSpec((rule,))))
        assert Catalogue(inner).generations() == [1, 2, 3]
        assert_whole(inner, Catalogue(inner).commits())


@pytest.mark.parametrize("action", ["die", "die-after", "error", "lost"])
def test_a_failure_at_every_operation(action: str) -> None:
    plain = Fault(memory())
    life(plain)
    total, failures = len(plain.operations), 0
    for number in range(1, total + 1):
        inner = memory()
        rule = FaultRule(action, number=number)  # type: ignore[arg-type]
        try:
            life(Fault(inner, FaultSpec((rule,))))
        except StoreError:
            failures += 1
        c = Catalogue(inner)
        c.create_or_open()
        assert_whole(inner, c.commits())
        latest = c.latest()
        assert latest in (None, CommitName(10, 1), CommitName(20, 2))
        g = c.claim(latest, 1, "load").generation
        assert c.latest() == latest
        assert save(c, 30, g) == c.latest()
    print(f"{total} operations, {failures} failures by {action!r}")
    assert failures > total // 2


def test_retries_heal_every_operation() -> None:
    plain = Fault(memory())
    life(plain)
    for number in range(1, len(plain.operations) + 1):
        for action in ("error", "lost"):
            inner = memory()
            rule = FaultRule(action, number=number)  # type: ignore[arg-type]
            life(Retry(Fault(inner, FaultSpec((rule,))), RetrySpec(first_s=0.0001)))
            c = Catalogue(inner)
            assert c.generations() == [1, 2, 3]
            assert steps(c.commits()) == [10, 20]
            assert c.latest() == CommitName(10, 1)


KILLED = """
import sys
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.spec import FaultRule, FaultSpec
from tests.engine.test_catalogue import life
action, op, skip = sys.argv[2], sys.argv[3], int(sys.argv[4])
life(Fault(LocalStore(sys.argv[1]), FaultSpec((FaultRule(action, op=op, skip=skip),))))
"""


@pytest.mark.parametrize("action", ["kill", "kill-after"])
@pytest.mark.parametrize("skip", range(6))
def test_sigkill_around_creations(action: str, skip: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, root, action, "put-new", str(skip)],
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with LocalStore(root) as store:
        c = Catalogue(store)
        c.create_or_open()
        assert_whole(store, c.commits())
        assert save(c, 30, c.claim(c.latest(), 1).generation) == c.latest()


# -- pins ------------------------------------------------------------------------------------------


def test_pins(catalogue: Catalogue, store: Store) -> None:
    name = save(catalogue, 1, catalogue.claim(None, 1).generation)
    assert catalogue.pins() == set()
    catalogue.pin(name, "the paper's")
    catalogue.pin(name, "again")
    assert catalogue.pins() == {name}
    assert b"the paper's" in store.get(pin_key(name))
    assert catalogue.unpin(name)
    assert not catalogue.unpin(name)
    assert catalogue.pins() == set()
