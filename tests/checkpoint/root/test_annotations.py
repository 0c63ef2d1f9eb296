"""Metadata that is added after the commit: what readers and retention see of it, and when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import pytest

from ckptd.checkpoint.format.codec import MAX_METADATA_BYTES
from ckptd.checkpoint.format.names import CommitName, annotation_key, commit_key
from ckptd.checkpoint.format.records import Annotation
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, apply_retention, plan_gc, run_gc
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.root.leases import hold
from ckptd.checkpoint.root.policy import Keep
from ckptd.errors import (
    CkptdError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
    UsageError,
)
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from tests.checkpoint.root.checkpoints import (
    Visited,
    error_of,
    memory,
    relied_on_at_each_operation,
    save,
)
from tests.checkpoint.root.test_index import Lagging
from tests.processes import PATIENCE_S

BEST = Keep(last=1, best=("loss", "min", 1))


def rooted(*at: int, store: Store | None = None) -> tuple[Catalogue, list[CommitName]]:
    """Return a root's catalogue and its checkpoints of one generation, which have no metric."""
    catalogue = Catalogue(store or memory())
    catalogue.create_or_open()
    generation = catalogue.claim(None, 1).generation
    return catalogue, [save(catalogue, step, generation) for step in at]


def said(index: Index, name: CommitName) -> dict[str, object]:
    return index.annotated(index.records([name]))[name].metadata


def contents(store: Store, *folders: str) -> dict[str, bytes]:
    return {o.key: store.get(o.key) for folder in folders for o in store.list(folder)}


# -- what is seen ----------------------------------------------------------------------------------


def test_each_key_has_its_newest_value_and_the_checkpoint_its_bytes(
    catalogue: Catalogue, store: Store
) -> None:
    generation = catalogue.claim(None, 1).generation
    name = save(catalogue, 10, generation, metadata={"loss": 3.0, "epoch": 1})
    before = contents(store, "commits/", "data/")
    assert said(catalogue, name) == {"loss": 3.0, "epoch": 1}
    catalogue.annotate(name, {"loss": 2.0, "exact": (1, "a")})
    other = Catalogue(store)
    assert said(other, name) == {"loss": 2.0, "epoch": 1, "exact": [1, "a"]}
    other.annotate(name, {"loss": float("nan")})
    assert said(catalogue, name) == {"loss": None, "epoch": 1, "exact": [1, "a"]}
    assert contents(store, "commits/", "data/") == before
    assert catalogue.commit(name).metadata == {"loss": 3.0, "epoch": 1}


def test_what_changes_nothing_writes_nothing(catalogue: Catalogue) -> None:
    name = save(catalogue, 10, catalogue.claim(None, 1).generation, metadata={"loss": 1})
    catalogue.annotate(name, {"loss": 1})
    assert catalogue.annotations() == {}
    catalogue.annotate(name, {"loss": True})  # equal to 1, and not the same
    catalogue.annotate(name, {"loss": True})
    assert catalogue.annotations() == {name: (1,)}
    assert said(catalogue, name) == {"loss": True}


@pytest.mark.parametrize(
    "metadata", [{"a": object()}, {1: 2}, {"a": "x" * MAX_METADATA_BYTES}], ids=["a", "b", "c"]
)
def test_what_cannot_be_kept_is_refused(metadata: dict[str, object]) -> None:
    catalogue, [name] = rooted(10)
    catalogue.annotate(name, {"old": "y" * 100})
    error_of(lambda: catalogue.annotate(name, metadata), UsageError)
    assert said(catalogue, name) == {"old": "y" * 100}


def test_metadata_has_its_limit_however_often_it_is_added_to() -> None:
    catalogue, [name] = rooted(10)
    for key in "abc":
        catalogue.annotate(name, {key: "x" * (MAX_METADATA_BYTES // 4)})
    assert (
        "too large"
        in error_of(
            lambda: catalogue.annotate(name, {"d": "x" * (MAX_METADATA_BYTES // 4)}), UsageError
        ).message
    )


def test_another_attempt_of_the_name_has_nothing_of_it(catalogue: Catalogue, store: Store) -> None:
    generation = catalogue.claim(None, 1).generation
    name = save(catalogue, 10, generation)
    catalogue.annotate(name, {"loss": 1.0})
    store.delete([commit_key(name)])
    save(catalogue, 10, generation, "b")
    assert said(Catalogue(store), name) == {}
    Catalogue(store).annotate(name, {"loss": 2.0})
    assert said(Catalogue(store), name) == {"loss": 2.0}


def test_of_many_at_once_none_is_lost(store: Store) -> None:
    _, [name] = rooted(10, store=store)

    def evaluate(worker: int) -> None:
        mine = Catalogue(store)
        for k in range(6):
            mine.annotate(name, {f"{worker}.{k}": k, "last": [worker, k]})

    threads = [threading.Thread(target=evaluate, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Catalogue(store)
    assert found.annotations() == {name: tuple(range(1, 25))}
    last = found.read(annotation_key(name, 24), Annotation).metadata["last"]
    assert said(found, name) == {
        **{f"{w}.{k}": k for w in range(4) for k in range(6)},
        "last": last,
    }


@pytest.mark.parametrize("action", ["error", "lost", "die", "die-after"])
def test_a_death_leaves_the_old_value_or_the_new_one(action: str) -> None:
    """At every operation; and a reply that is lost makes no second record."""
    number = 0
    while True:
        number += 1
        catalogue, [name] = rooted(10)
        catalogue.annotate(name, {"loss": 2.0, "kept": "yes"})
        fault = Fault(catalogue.store, FaultSpec((FaultRule(action, number=number),)))  # type: ignore[arg-type]
        told = None
        try:
            Catalogue(fault).annotate(name, {"loss": 1.0})
        except CkptdError as error:
            told = error
        found = said(Catalogue(catalogue.store), name)
        assert found in ({"loss": 2.0, "kept": "yes"}, {"loss": 1.0, "kept": "yes"})
        if told is None:
            assert found["loss"] == 1.0
        elif action in ("error", "lost"):
            assert isinstance(told, StoreError)
            Catalogue(catalogue.store).annotate(name, {"loss": 1.0})
            assert catalogue.annotations() == {name: (1, 2)}
        if told is None and len(fault.operations) < number:
            return


def test_a_number_costs_no_more_than_what_is_there() -> None:
    inner = memory()
    catalogue, [name] = rooted(10, store=(store := Visited(inner, 0, lambda: None)))
    catalogue.annotate(name, {"loss": 1.0})
    key = annotation_key(name, 1)
    inner.put(annotation_key(name, 99_999_999), inner.get(key))
    store.count = 0
    assert said(Catalogue(store), name) == {"loss": 1.0}
    assert store.count < 20
    error = error_of(lambda: catalogue.annotate(name, {"loss": 2.0}), ConflictError)
    assert error.kind == "busy"  # no record that no listing would find
    assert len(list(inner.list("annotations/"))) == 2


def test_a_listing_that_lags_hides_no_value() -> None:
    store = Lagging(memory(), set())
    catalogue, [first, second] = rooted(10, 20, store=store)
    for number, loss in enumerate((3.0, 2.0, 1.0), 1):
        catalogue.annotate(first, {"loss": loss})
        store.hidden.add(annotation_key(first, number))
        assert said(Catalogue(store), first) == {"loss": loss}
    catalogue.annotate(second, {"loss": 2.0})
    apply_retention(Catalogue(store), BEST)
    assert catalogue.commits() == [first, second]


def test_damage_is_named_and_retention_deletes_nothing() -> None:
    catalogue, [first, second] = rooted(10, 20)
    catalogue.annotate(first, {"loss": 2.0})
    catalogue.annotate(second, {"loss": 1.0})
    key = annotation_key(first, 1)
    raw = catalogue.store.get(key)
    catalogue.store.put(key, raw.replace(b"2.0", b"4.0"))
    fresh = Catalogue(catalogue.store)
    assert error_of(lambda: said(fresh, first), CorruptError).kind == "digest"
    error = error_of(lambda: apply_retention(fresh, BEST), CorruptError)
    assert error.where is not None
    assert key in error.where
    assert fresh.commits() == [first, second]
    catalogue.store.put(annotation_key(first, 1), catalogue.store.get(annotation_key(second, 1)))
    assert "another object" in error_of(lambda: said(fresh, first), CorruptError).message


def test_what_is_not_there_cannot_be_annotated() -> None:
    catalogue, _ = rooted(10)
    error_of(lambda: catalogue.annotate(CommitName(20, 1), {"loss": 1.0}), NotFoundError)
    assert catalogue.annotations() == {}


# -- retention -------------------------------------------------------------------------------------


def test_the_later_best_is_kept_as_evaluations_come() -> None:
    """Evaluations are three saves behind, and the second one turns out to be the best."""
    catalogue, _ = rooted()
    job = Catalogue(catalogue.store)
    losses = [5.0, 1.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0]
    for number, _ in enumerate(losses):
        save(job, number, 1)
        apply_retention(job, BEST)
        if number >= 3:
            Catalogue(job.store).annotate(CommitName(number - 3, 1), {"loss": losses[number - 3]})
    assert [n.step for n in job.commits()] == [1, 4, 5, 6, 7]
    for number in (5, 6, 7):
        Catalogue(job.store).annotate(CommitName(number, 1), {"loss": losses[number]})
    apply_retention(job, BEST)
    assert [n.step for n in job.commits()] == [1, 7]


def test_a_new_value_for_what_was_evaluated_counts() -> None:
    catalogue, names = rooted(10, 20, 30)
    for name, loss in zip(names, (1.0, 2.0, 3.0), strict=True):
        catalogue.annotate(name, {"loss": loss})
    plan_gc(catalogue, BEST)  # has read the first values
    Catalogue(catalogue.store).annotate(names[1], {"loss": 0.5})
    apply_retention(catalogue, BEST)
    assert catalogue.commits() == names[1:]


def test_metrics_that_come_after_the_plan_stop_it() -> None:
    """Of the deleted one, or of another by which it becomes the best."""
    for late, loss in ((0, 0.1), (1, 9.0)):
        catalogue, names = rooted(10, 20, 30)
        for name, value in zip(names, (2.0, 1.0, 3.0), strict=True):
            catalogue.annotate(name, {"loss": value})
        plan = plan_gc(catalogue, BEST)
        assert commit_key(names[0]) in [item.key for item in plan.items]
        Catalogue(catalogue.store).annotate(names[late], {"loss": loss})
        report = run_gc(catalogue.store, plan)
        assert [why for _, why in report.skipped] == [
            "a checkpoint was annotated since the plan",
            f"{names[0]} refers to it",
        ]
        assert catalogue.commits() == names
    by_number = plan_gc(catalogue, 1)
    catalogue.annotate(names[0], {"note": "seen"})
    assert not run_gc(catalogue.store, by_number).skipped  # a rule that looks at no metric
    assert catalogue.commits() == names[2:]


def test_nobody_is_told_yes_of_a_checkpoint_that_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody annotates it before each operation of a clean-up, and gets an error or keeps it."""
    monkeypatch.setattr(marks, "WAIT_S", 0.0)

    def planned() -> tuple[Catalogue, CommitName, GcPlan]:
        catalogue, names = rooted(10, 20, 30)
        for name, loss in zip(names, (2.0, 1.0, 3.0), strict=True):
            catalogue.annotate(name, {"loss": loss})
        return catalogue, names[0], plan_gc(catalogue, BEST)

    for _ in relied_on_at_each_operation(planned, lambda c, n: c.annotate(n, {"loss": 0.1})):
        pass


@pytest.mark.parametrize("how", ["annotate", "pin", "hold", "rollback"])
def test_who_waits_for_a_clean_up_is_told_that_it_deleted(how: str) -> None:
    """The mark goes when the commit is gone; it was taken for the end of a clean-up that let be."""
    catalogue, names = rooted(10, 20, 30)
    store, told = catalogue.store, []
    acts: dict[str, Callable[[Catalogue], object]] = {
        "annotate": lambda c: c.annotate(names[0], {"loss": 1.0}),
        "pin": lambda c: c.pin(names[0]),
        "hold": lambda c: hold(c, names[0]),
        "rollback": lambda c: c.rollback(10),
    }
    waits = threading.Event()

    class Slow(Visited):
        """Says when the mark is seen."""

        def children(self, prefix: str = "") -> list[str]:
            found = self.inner.children(prefix)
            if "/deleting/" in prefix and found:
                waits.set()
            return found

    def rely() -> None:
        told.append(error_of(lambda: acts[how](Catalogue(Slow(store, 0, lambda: None)))))

    thread = threading.Thread(target=rely)

    class Deleting(Visited):
        """Deletes the commit once somebody waits for its mark to go."""

        def delete(self, keys: Iterable[str]) -> None:
            keys = list(keys)
            if commit_key(names[0]) in keys:
                thread.start()
                assert waits.wait(PATIENCE_S)
            self.inner.delete(keys)

    run_gc(Deleting(store, 0, lambda: None), plan_gc(catalogue, 2))
    thread.join()
    assert isinstance(told[0], NotFoundError)
    assert not store.exists(commit_key(names[0]))


def test_annotations_go_a_day_after_their_checkpoint(catalogue: Catalogue, store: Store) -> None:
    generation = catalogue.claim(None, 1).generation
    names = [save(catalogue, step, generation) for step in (10, 20)]
    for name in names:
        catalogue.annotate(name, {"loss": 1.0})
    apply_retention(catalogue, 1)
    assert catalogue.annotations() == dict.fromkeys(names, (1,))
    plan = plan_gc(catalogue, 1, now=time.time() + 2 * 86_400.0, thorough=False)
    assert [i.key for i in plan.items] == [annotation_key(names[0], 1)]
    save(catalogue, 10, generation, "b")  # brought back meanwhile
    assert [why for _, why in run_gc(store, plan).skipped] == [f"{names[0]} exists"]
    store.delete([commit_key(names[0])])
    assert run_gc(store, plan).deleted
    assert catalogue.annotations() == {names[1]: (1,)}


def test_retention_without_metrics_looks_at_no_annotation() -> None:
    catalogue, names = rooted(10, 20)
    catalogue.annotate(names[0], {"loss": 1.0})
    catalogue.store.put(annotation_key(names[0], 1), b"damage")
    apply_retention(catalogue, 1)
    assert catalogue.commits() == names[1:]


def test_annotations_are_durable(tmp_path: object) -> None:
    """Each is created once, whole, under a name of its own."""
    with LocalStore(os.fspath(str(tmp_path))) as store:
        catalogue, [name] = rooted(10, store=store)
        catalogue.annotate(name, {"loss": 1.0})
        raw = store.get(annotation_key(name, 1))
        record = msgspec.json.decode(raw)
        assert record["step"] == 10
        assert record["metadata"] == {"loss": 1.0}
        assert record["manifest_digest"] == catalogue.commit(name).manifest_digest
