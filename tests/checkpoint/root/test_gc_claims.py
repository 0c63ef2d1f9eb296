"""A job that goes on from a snapshot without a commit, and gc beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.format.records import Lease, decode_record
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, plan_gc, run_gc
from ckptd.errors import NotFoundError, RefusedError
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.root.checkpoints import Visited, assert_whole, error_of, memory, save
from tests.checkpoint.root.test_gc import run_unless_stale, set_scene

_names = itertools.count()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "WAIT_S", 0.0)


def test_what_cannot_be_continued() -> None:
    catalogue = Catalogue(memory())
    catalogue.create_or_open()
    first = catalogue.claim(None, 1).generation
    save(catalogue, 10, first)
    second = catalogue.claim(CommitName(15, first), 1, committed=False).generation
    error = error_of(lambda: catalogue.claim(CommitName(15, 9), 1, committed=False), NotFoundError)
    assert "cannot be continued" in error.message
    error = error_of(
        lambda: catalogue.claim(CommitName(15, second), 1, committed=False), RefusedError
    )
    assert error.kind == "behind"
    assert (
        "is not committed" in error_of(lambda: catalogue.claim(CommitName(16, second), 1)).message
    )
    assert catalogue.newest_generation() == second
    assert catalogue.line() == [CommitName(10, first)]


def test_nothing_is_deleted_while_the_line_has_no_commit() -> None:
    store = memory()
    catalogue = Catalogue(store)
    catalogue.create_or_open()
    first = catalogue.claim(None, 1).generation
    save(catalogue, 10, catalogue.claim(CommitName(5, first), 1, committed=False).generation)
    catalogue.claim(CommitName(5, first), 1, committed=False)
    assert catalogue.latest() is None
    run_gc(store, plan_gc(catalogue, 1, abandoned_s=0.0))
    assert catalogue.commits() == [CommitName(10, 2)]


@pytest.mark.parametrize("company", ["claim", "gc"])
def test_a_claim_from_a_snapshot_and_gc(company: str) -> None:
    """A checkpoint on the line when such a claim returns stays on it, wherever gc is by then."""
    snapshot, base = CommitName(45, 2), CommitName(40, 2)
    number = held = 0
    while True:
        number += 1
        store = MemoryStore(f"gc-claims-{next(_names)}")
        scene = set_scene(store)
        plan = scene.plan()
        seen: list[CommitName | None] = []

        def claim(s: Store, found: list[CommitName | None] = seen) -> None:
            Catalogue(s).claim(snapshot, 2, "snapshot", committed=False)
            found.append(Catalogue(s).latest())

        if company == "claim":
            visited = Visited(store, number, partial(claim, store))
            run_unless_stale(visited, plan)
        else:
            leased: list[bool] = []

            def collect(s: Store = store, p: GcPlan = plan, out: list[bool] = leased) -> None:
                out.append(base in map(_lease_of(s), s.children("leases/")))
                run_unless_stale(s, p)

            visited = Visited(store, number, collect)
            claim(visited)
            if leased == [True]:
                held += 1
                assert Catalogue(store).latest() == base
        forget_memory(store.url.partition("://")[2])
        if visited.count < number:
            break
        c = Catalogue(store)
        assert c.line() == [n for n in c.line() if n <= snapshot]
        assert_whole(store, c.commits())
        assert seen[0] is None or seen[0] <= (c.latest() or CommitName(0, 0)), number
        save(c, 46, 3)
        run_gc(store, scene.plan())
        assert c.latest() == CommitName(46, 3)
        assert_whole(store, c.commits())
    assert number > 3
    assert (held > 0) == (company == "gc")


def _lease_of(store: Store) -> Callable[[str], CommitName]:
    def read(name: str) -> CommitName:
        lease = decode_record(store.get("leases/" + name), Lease, name)
        return CommitName(lease.step, lease.generation)

    return read
