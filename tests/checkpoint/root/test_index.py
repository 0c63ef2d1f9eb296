"""Reading a root: listings, the line, records and manifests, whole or damaged."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, generation_key
from ckptd.checkpoint.format.records import Commit, encode_record
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import (
    CorruptError,
    NotFoundError,
    UsageError,
)
from ckptd.store.base import FaultSpec, Names, Store, Wrapper
from ckptd.store.fault import Fault
from tests.checkpoint.root.checkpoints import (
    Visited,
    error_of,
    manifest_key,
    memory,
    one,
    put_attempt,
    save,
    steps,
)

# -- listing and finding ---------------------------------------------------------------------------


def test_an_empty_root(catalogue: Catalogue) -> None:
    assert catalogue.latest() is None
    assert catalogue.line() == catalogue.commits() == []
    assert catalogue.generations() == []
    assert catalogue.newest_generation() == 0
    assert catalogue.continue_line(0) is None
    error = error_of(lambda: catalogue.find(1), NotFoundError)
    assert (error.message, error.found) == ("no checkpoint of step 1", "no checkpoint")


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
    assert "no checkpoint of step" in error_of(lambda: catalogue.find(20, generation=g1)).message
    assert "invalid step" in error_of(lambda: catalogue.find(-1), UsageError).message


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
    gets = [o.key for o in fault.operations if o.op == "get"]
    assert gets == [generation_key(2), commit_key(CommitName(19, 1))]
    assert len(fault.operations) == 7


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
    assert "record breaks a rule" in error.message
    assert commit_key(record.name) in str(error.where)
    assert "record breaks a rule" in error_of(lambda: c.manifest(record.name), CorruptError).message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "not a Commit"),
        (b'{"version": 99}', "written by a newer ckptd"),
        (b" " * ((1 << 20) + 1), "record too large"),
    ],
)
def test_a_commit_record_that_is_none(raw: bytes, words: str) -> None:
    store = memory()
    c = Catalogue(store)
    record = one(c)
    store.put(commit_key(record.name), raw)
    assert words in error_of(lambda: c.commit(record.name), CorruptError).message


def test_a_huge_record_is_not_fetched() -> None:
    store = memory()
    c = Catalogue(store)
    record = one(c)
    store.put(commit_key(record.name), bytes(2 << 20))
    fault = Fault(store)
    assert "record too large" in error_of(lambda: Catalogue(fault).commit(record.name)).message
    assert "get" not in {o.op for o in fault.operations}


def test_no_such_commit(catalogue: Catalogue) -> None:
    for act in (catalogue.commit, catalogue.manifest, catalogue.pin):
        error = error_of(lambda act=act: act(CommitName(3, 1)), NotFoundError)  # type: ignore[misc]
        assert "is not committed" in error.message
    error = error_of(lambda: catalogue.claim(CommitName(3, 1), 1), NotFoundError)
    assert "is not committed" in error.message
    assert catalogue.generations() == []


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
    assert (error.message, error.where) == (
        "the manifest of step 7 of generation 1 is missing",
        catalogue.where(key),
    )


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
    assert (
        "the manifest belongs to another checkpoint"
        in error_of(lambda: c.manifest(other.name), CorruptError).message
    )


def test_a_generation_of_another_number(catalogue: Catalogue, store: Store) -> None:
    catalogue.claim(None, 1)
    store.put(generation_key(2), store.get(generation_key(1)))
    error = error_of(lambda: Catalogue(store).latest(), CorruptError)
    assert "a record names another object" in error.message
    assert generation_key(2) in str(error.where)


def test_a_commit_of_another_step(catalogue: Catalogue, store: Store) -> None:
    record, other = one(catalogue), CommitName(8, 1)
    store.put(commit_key(other), encode_record(record))
    error = error_of(lambda: Catalogue(store).commit(other), CorruptError)
    assert "a record names another object" in error.message
    assert commit_key(other) in str(error.where)


def test_a_line_through_a_generation_that_is_gone(catalogue: Catalogue, store: Store) -> None:
    name = save(catalogue, 1, catalogue.claim(None, 1).generation)
    catalogue.claim(name, 1)
    catalogue.claim(name, 1)
    store.delete([generation_key(1), commit_key(name)])
    error = error_of(lambda: Catalogue(store).latest(), CorruptError)
    assert error.kind == "missing-record"
    assert generation_key(1) in str(error.where)
    error_of(lambda: Catalogue(store).generation(1), NotFoundError)


def test_a_name_that_came_back_is_read_again(catalogue: Catalogue, store: Store) -> None:
    first = one(catalogue)
    reader = Catalogue(store)
    assert reader.records(reader.commits())[first.name].attempt == "a"
    store.delete([commit_key(first.name)])
    assert reader.records(reader.commits()) == {}
    save(catalogue, first.step, first.generation, "b")
    assert reader.records(reader.commits())[first.name].attempt == "b"
