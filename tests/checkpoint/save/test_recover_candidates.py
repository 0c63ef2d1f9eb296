"""Candidates of a load: commits and complete snapshots of the line, newest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.names import CommitName, commit_key, data_folder, part_key
from ckptd.checkpoint.load.union import UnionStore
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.commit import plan_key
from ckptd.checkpoint.save.messages import RankPart
from ckptd.checkpoint.save.recover import LoadCandidate, find_candidates
from ckptd.errors import CkptdError, CorruptError, NotFoundError, TransientStoreError, UsageError
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.load.test_union import Node
from tests.checkpoint.root.checkpoints import error_of, save
from tests.checkpoint.root.test_lineage_machine import Model
from tests.checkpoint.save.saving import plan_of

PLAN = plan_of()
_numbers = itertools.count()
Made = tuple[Catalogue, MemoryStore]


@pytest.fixture
def made() -> Iterator[Made]:
    """A root with a marker, and a near store."""
    names = [f"candidates{next(_numbers)}" for _ in range(2)]
    root = Catalogue(MemoryStore(names[0]))
    root.create_or_open()
    yield root, MemoryStore(names[1])
    for name in names:
        forget_memory(name)


def snapshot(store: Store, step: int, generation: int, attempt: str = "0001") -> None:
    """Put what makes a snapshot complete; nobody reads its files here."""
    folder = data_folder(CommitName(step, generation), attempt)
    store.put(plan_key(folder), msgspec.msgpack.encode(PLAN))
    store.put(part_key(folder, 0), RankPart(0, PLAN.digest).encode())


def found(candidates: Sequence[LoadCandidate]) -> list[tuple[int, int, str]]:
    """Step, generation and attempt; an empty attempt for a commit."""
    return [(c.step, c.generation, c.snapshot.attempt if c.snapshot else "") for c in candidates]


def look(made: Made, **options: object) -> list[tuple[int, int, str]]:
    root, near = made
    return found(find_candidates(Catalogue(root.store), UnionStore([near]), **options))  # type: ignore[arg-type]


def test_newest_first_and_nothing_beside_the_line(made: Made) -> None:
    root, near = made
    assert look(made) == []
    first = root.claim(None, 1).generation
    save(root, 10, first)
    save(root, 20, first)
    for step in (5, 12, 20, 25):
        snapshot(near, step, first, "a")
    assert look(made) == [
        (25, 1, "a"),
        (20, 1, "a"),
        (20, 1, ""),
        (12, 1, "a"),
        (10, 1, ""),
        (5, 1, "a"),
    ]
    second = root.claim(CommitName(12, first), 1, committed=False).generation
    snapshot(near, 12, second)  # not after its generation's parent
    snapshot(near, 14, second)
    snapshot(near, 99, second + 7)  # nobody claimed that
    assert look(made) == [(14, 2, "0001"), (12, 1, "a"), (10, 1, ""), (5, 1, "a")]
    assert found(find_candidates(root)) == [(10, 1, "")]
    root.claim(None, 1)
    assert look(made) == []


def test_of_a_commit_only_the_attempt_that_was_committed(made: Made) -> None:
    root, near = made
    save(root, 10, root.claim(None, 1).generation, "b")
    for attempt in ("a", "b", "c"):
        snapshot(near, 10, 1, attempt)
        snapshot(near, 9, 1, attempt)
    newest = [(9, 1, "c"), (9, 1, "b"), (9, 1, "a")]
    assert look(made) == [(10, 1, "b"), (10, 1, ""), *newest]
    root.store.put(commit_key(CommitName(10, 1)), b"damaged")
    assert look(made)[:4] == [(10, 1, "c"), (10, 1, "b"), (10, 1, "a"), (10, 1, "")]


def test_one_step(made: Made) -> None:
    root, near = made
    save(root, 10, root.claim(None, 1).generation, "a")
    snapshot(near, 11, 1)
    assert look(made, step=10) == [(10, 1, "")]
    assert look(made, step=11) == [(11, 1, "0001")]
    error = error_of(lambda: look(made, step=12), NotFoundError)
    assert "no checkpoint of step" in error.message
    assert "invalid step" in error_of(lambda: look(made, step=-1), UsageError).message


def test_no_root_and_no_near_tier(made: Made) -> None:
    root, near = made
    gone = Node(near, TransientStoreError)
    save(root, 10, root.claim(None, 1).generation)
    snapshot(near, 11, 1)
    assert found(find_candidates(root, UnionStore([gone]))) == [(10, 1, "")]
    assert error_of(lambda: find_candidates(Catalogue(MemoryStore("none")))).kind == "no-root"


def test_a_root_that_cannot_be_read(made: Made) -> None:
    root, near = made
    root.claim(None, 1)
    snapshot(near, 10, 1)
    unreachable = Catalogue(Node(root.store, TransientStoreError))
    error_of(lambda: find_candidates(unreachable, UnionStore([near])), TransientStoreError)
    root.store.put("generations/00000001.json", b"{}")
    error_of(lambda: look(made), CorruptError)


lives = st.lists(
    st.tuples(
        st.sampled_from(["fresh", "commit", "snapshot"]),
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from("csb")), max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@given(lives, st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=4))
def test_what_counts_equals_the_model(
    lives: list[tuple[str, int, list[tuple[int, str]]]], strays: list[tuple[int, int]]
) -> None:
    """Lives that begin anywhere, each with commits, snapshots and both; and stray snapshots."""
    names = [f"candidates{next(_numbers)}" for _ in range(2)]
    root, near = Catalogue(MemoryStore(names[0])), MemoryStore(names[1])
    root.create_or_open()
    model, snapshots = Model(), set[CommitName]()
    for how, pick, saves in lives:
        known = sorted(model.commits if how == "commit" else snapshots)
        parent = known[pick % len(known)] if known and how != "fresh" else None
        try:
            generation = root.claim(parent, 1, committed=how == "commit").generation
        except CkptdError:
            continue
        model.parents[generation] = parent
        step = model.floor(generation)
        for gap, what in saves:
            step += gap
            name = CommitName(step, generation)
            if what in "cb":
                save(root, step, generation, "0001")
                model.commits.add(name)
            if what in "sb":
                snapshot(near, step, generation)
                snapshots.add(name)
    for step, generation in strays:
        snapshot(near, step, generation)
        snapshots.add(CommitName(step, generation))
    newest = model.newest
    counting = {
        s
        for s in snapshots
        if s.generation in model.parents
        and s.step > model.floor(s.generation)
        and model.counts(s, newest)
    }
    expected = []
    for name in sorted({*model.line, *counting}, reverse=True):
        expected += [(name.step, name.generation, "0001")] if name in counting else []
        expected += [(name.step, name.generation, "")] if name in model.commits else []
    assert found(find_candidates(Catalogue(root.store), UnionStore([near]))) == expected
    for name in names:
        forget_memory(name)
