"""Generations, commits and pins: races, their winners and errors, deaths at every operation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from ckptd.checkpoint.format.manifest import TensorEntry
from ckptd.checkpoint.format.names import CommitName, pin_key
from ckptd.checkpoint.format.records import Generation
from ckptd.checkpoint.format.witness import WitnessPlan
from ckptd.checkpoint.root.catalogue import Catalogue, write_witness
from ckptd.checkpoint.save.messages import RankPart
from ckptd.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    RefusedError,
    StoreError,
)
from ckptd.store.base import FaultRule, FaultSpec, RetrySpec, Store, Wrapper
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.wrap import Retry
from tests.checkpoint.root.checkpoints import (
    Visited,
    assert_whole,
    error_of,
    manifest_key,
    memory,
    one,
    put_attempt,
    save,
    steps,
)
from tests.processes import PATIENCE_S

# -- generations -----------------------------------------------------------------------------------


def test_claims_race_for_numbers(store: Store) -> None:
    Catalogue(store).create_or_open()
    won: list[Generation] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait(PATIENCE_S)
        won.append(Catalogue(store).claim(None, 1))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_S)
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
        assert "new_run=True" in str(error.hint)
    catalogue.claim(None, 1, "fresh")
    assert catalogue.continue_line(3) is None


def test_rollback(catalogue: Catalogue, store: Store) -> None:
    g1 = catalogue.claim(None, 1).generation
    a, b, c = (save(catalogue, s, g1) for s in (10, 20, 30))
    before = {o.key for o in store.list("data/")} | {o.key for o in store.list("commits/")}
    claimed = catalogue.rollback(10)
    assert (claimed.reason, claimed.world_size) == ("rollback", 0)
    assert catalogue.line() == [a]
    assert (
        "no checkpoint of step" in error_of(lambda: catalogue.rollback(20), NotFoundError).message
    )
    catalogue.rollback(20, all=True)
    assert catalogue.line() == [a, b]
    assert c in catalogue.commits()
    assert {o.key for o in store.list("data/")} | {o.key for o in store.list("commits/")} == before
    assert list(store.list("leases/")) == []


def test_rollback_to_something_broken_changes_nothing(catalogue: Catalogue, store: Store) -> None:
    record = one(catalogue)
    save(catalogue, 9, 1)
    store.delete([manifest_key(record)])
    assert "the manifest" in error_of(lambda: catalogue.rollback(7), CorruptError).message
    assert catalogue.newest_generation() == 1
    assert list(store.list("leases/")) == []


# -- publishing ------------------------------------------------------------------------------------


def test_a_superseded_writer_is_told(catalogue: Catalogue) -> None:
    g1 = catalogue.claim(None, 1).generation
    a = save(catalogue, 10, g1)
    catalogue.check_not_superseded(g1)
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
    """The claim may come anywhere in a publish: the zombie gets an error, or was in time."""
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
    assert "was committed by this run already, in an earlier save" in error.message
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


def test_what_no_reader_would_take_is_not_published(catalogue: Catalogue, store: Store) -> None:
    g = catalogue.claim(None, 1).generation
    attempt = put_attempt(store, CommitName(10, g))
    for change in ({"folders": ()}, {"world_size": -1}, {"manifest": "../manifest.json"}):
        bad = msgspec.structs.replace(attempt, **change)
        error = error_of(lambda b=bad: catalogue.publish(b), CorruptError)  # type: ignore[misc]
        assert "record breaks a rule" in error.message
    assert catalogue.commits() == []


def test_nothing_hollow_is_published(catalogue: Catalogue, store: Store) -> None:
    g = catalogue.claim(None, 1).generation
    attempt = put_attempt(store, CommitName(10, g))
    raw = store.get(manifest_key(attempt))
    store.delete([manifest_key(attempt)])
    assert (
        "refers to a missing file"
        in error_of(lambda: catalogue.publish(attempt), CorruptError).message
    )
    store.put(manifest_key(attempt), raw + b" ")
    assert (
        "refers to a missing file"
        in error_of(lambda: catalogue.publish(attempt), CorruptError).message
    )
    store.put(manifest_key(attempt), raw)
    gone = msgspec.structs.replace(
        attempt, folders=(attempt.folder, "data/000000000001-g00000001-a/")
    )
    error = error_of(lambda: catalogue.publish(gone), CorruptError)
    assert "refers to a missing file" in error.message
    assert "000000000001" in str(error.where)
    assert catalogue.commits() == []


def test_an_unclaimed_generation_cannot_publish(catalogue: Catalogue) -> None:
    error_of(lambda: save(catalogue, 1, 1), NotFoundError)
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


class Stammering(Wrapper):
    """A store that repeats a creation by itself and then reports its own success as a conflict."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        self.inner.put(key, data, create_only=create_only)
        self.inner.put(key, data, create_only=create_only)


def test_a_conflict_with_oneself_is_found_out() -> None:
    inner = memory()
    life(Stammering(inner, FaultSpec()))
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
            rule = FaultRule(action, number=number)
            life(Retry(Fault(inner, FaultSpec((rule,))), RetrySpec(first_s=0.0001)))
            c = Catalogue(inner)
            assert c.generations() == [1, 2, 3]
            assert steps(c.commits()) == [10, 20]
            assert c.latest() == CommitName(10, 1)


KILLED = """
import sys
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.base import FaultRule, FaultSpec
from tests.checkpoint.root.test_catalogue import life
action, op, skip = sys.argv[2], sys.argv[3], int(sys.argv[4])
life(Fault(LocalStore(sys.argv[1]), FaultSpec((FaultRule(action, op=op, skip=skip),))))
"""


@pytest.mark.parametrize("action", ["kill", "kill-after"])
@pytest.mark.parametrize("skip", range(6))
def test_sigkill_around_creations(action: str, skip: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, root, action, "put-new", str(skip)],
        timeout=PATIENCE_S,
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


# -- the witness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "values"), [(bytes(4), bytes(7)), (bytes(3), bytes(6)), (b"\2" + bytes(3), bytes(8))]
)
def test_the_rank_whose_checksums_are_malformed_is_named(slots: bytes, values: bytes) -> None:
    """Those of all ranks are looked at together."""
    plan = WitnessPlan.over([TensorEntry("t", "float32", (2,), 0, 0)])
    assert plan.total == 2
    parts = [RankPart(0, "p", slots=bytes(4), values=bytes(8)), RankPart(2, "p")]
    parts.insert(1, RankPart(1, "p", slots=slots, values=values))
    with pytest.raises(CorruptError) as caught:
        write_witness(memory(), "data/x/", plan, parts, lambda part: f"rank {part.rank}")
    assert caught.value.where == "rank 1"
