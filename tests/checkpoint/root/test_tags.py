"""Names for checkpoints: they move at one moment, and what has one is not deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, tag_key
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, apply_retention, guarded, plan_gc
from ckptd.checkpoint.root.leases import hold
from ckptd.errors import CkptdError, CorruptError, NotFoundError, UsageError
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from tests.checkpoint.root.checkpoints import Visited, error_of, relied_on_at_each_operation, save
from tests.checkpoint.root.test_annotations import rooted


def test_a_tag_names_and_keeps_and_moves(catalogue: Catalogue, store: Store) -> None:
    generation = catalogue.claim(None, 1).generation
    names = [save(catalogue, step, generation) for step in (10, 20, 30, 40)]
    catalogue.tag(names[0], "prod")
    catalogue.tag(names[1], "v1.2_rc-3")
    assert Catalogue(store).tags() == {"prod": names[0], "v1.2_rc-3": names[1]}
    assert catalogue.find("prod") == names[0]
    assert catalogue.pins() == set()
    apply_retention(catalogue, 1)
    assert catalogue.commits() == [names[0], names[1], names[3]]
    catalogue.tag(names[3], "prod")
    catalogue.untag("v1.2_rc-3")
    apply_retention(catalogue, 1)
    assert catalogue.commits() == names[3:]
    assert catalogue.find("prod") == names[3]
    assert list(store.list("leases/")) == []


def test_a_tag_names_one_commit_wherever_it_is(catalogue: Catalogue) -> None:
    first = catalogue.claim(None, 1).generation
    names = [save(catalogue, step, first) for step in (10, 20)]
    catalogue.tag(names[1], "before")
    second = catalogue.claim(names[0], 1).generation
    again = save(catalogue, 20, second)
    assert catalogue.find(20) == again
    assert catalogue.find("before") == names[1]


@pytest.mark.parametrize(
    "tag", ["", "1", "120", "120-g3", "latest", "a/b", "../x", "a b", "-a", "\u00e4", "x" * 65]
)
def test_what_is_no_name(tag: str) -> None:
    catalogue, [name] = rooted(10)
    error_of(lambda: catalogue.tag(name, tag), UsageError)
    error_of(lambda: catalogue.find(tag), UsageError)
    assert catalogue.tags() == {}


def test_what_is_not_there_is_named() -> None:
    catalogue, [name, _] = rooted(10, 20)
    error = error_of(lambda: catalogue.find("prod"), NotFoundError)
    assert (error.message, error.found) == ("no checkpoint is tagged prod", "no tags")
    catalogue.tag(name, "prod")
    assert error_of(lambda: catalogue.untag("rod"), NotFoundError).found == "prod"
    error_of(lambda: catalogue.tag(CommitName(15, 1), "prod"), NotFoundError)
    assert catalogue.find("prod") == name
    catalogue.store.delete([commit_key(name)])
    assert "no checkpoint of step 10" in error_of(lambda: catalogue.find("prod")).message
    assert "pin" not in [item.kind for item in plan_gc(catalogue, 1).items]  # somebody wants it


def test_a_damaged_tag_stops_retention() -> None:
    catalogue, names = rooted(10, 20)
    catalogue.tag(names[0], "prod")
    raw = catalogue.store.get(tag_key("prod"))
    catalogue.store.put(tag_key("prod"), raw.replace(b"10", b"20"))
    error_of(lambda: apply_retention(catalogue, 1), CorruptError)
    error_of(lambda: catalogue.find("prod"), CorruptError)
    assert catalogue.commits() == names


@pytest.mark.parametrize("action", ["error", "lost", "die", "die-after"])
def test_a_death_leaves_the_tag_here_or_there(action: str) -> None:
    number = 0
    while True:
        number += 1
        catalogue, names = rooted(10, 20)
        catalogue.tag(names[0], "prod")
        fault = Fault(catalogue.store, FaultSpec((FaultRule(action, number=number),)))  # type: ignore[arg-type]
        failed = True
        with suppress(CkptdError):
            Catalogue(fault).tag(names[1], "prod")
            failed = False
        found = Catalogue(catalogue.store).find("prod")
        assert found in names
        assert failed or found == names[1]
        if len(fault.operations) < number:
            return


@pytest.mark.parametrize("how", ["tag", "pin", "hold"])
def test_nobody_keeps_a_checkpoint_that_is_deleted(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each operation of a clean-up; a tag that moves keeps where it was, or where it is."""
    monkeypatch.setattr(marks, "WAIT_S", 0.0)
    acts: dict[str, Callable[[Catalogue, CommitName], object]] = {
        "tag": lambda c, n: c.tag(n, "prod"),
        "pin": lambda c, n: c.pin(n),
        "hold": lambda c, n: hold(c, n),
    }

    def planned() -> tuple[Catalogue, CommitName, GcPlan]:
        catalogue, names = rooted(10, 20, 30, 40)
        catalogue.tag(names[1], "prod")
        return catalogue, names[0], plan_gc(catalogue, 1)

    for catalogue in relied_on_at_each_operation(planned, acts[how]):
        assert catalogue.store.exists(commit_key(catalogue.tagged("prod")))


def test_a_tag_is_seen_though_its_lease_ends_while_guards_are_read() -> None:
    """The tag is put, and its lease released, after tags were listed and before leases were."""
    number = 0
    while True:
        number += 1
        catalogue, names = rooted(10, 20)

        def move(c: Catalogue = catalogue, n: CommitName = names[0]) -> None:
            Catalogue(c.store).tag(n, "prod")

        with hold(catalogue, names[0]) as held:

            def end(act: Callable[[], None] = move, lease: object = held) -> None:
                act()
                lease.release()  # type: ignore[attr-defined]

            visited = Visited(catalogue.store, number, end)
            found = guarded(Catalogue(visited), 0.0)
            if visited.count < number:
                return
            assert names[0] in found


def test_many_move_one_tag(store: Store) -> None:
    catalogue, names = rooted(*range(10, 18), store=store)

    def move(name: CommitName) -> None:
        for _ in range(4):
            Catalogue(store).tag(name, "prod")

    threads = [threading.Thread(target=move, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert catalogue.find("prod") in names
    assert list(store.list("leases/")) == []
