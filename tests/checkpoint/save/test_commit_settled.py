"""A committer that waits for parts learns that another one was faster, of its own attempt alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue, remove_parts
from ckptd.checkpoint.save import commit, writer
from ckptd.checkpoint.save.commit import commit_attempt
from ckptd.checkpoint.save.messages import SaveRequest
from ckptd.errors import ConflictError, SaveError, StoreError
from ckptd.store import StoreSpec
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.root.checkpoints import put_attempt
from tests.checkpoint.save.saving import Job, plan_of, values
from tests.processes import PATIENCE_S

_numbers = itertools.count()
PLAN = plan_of({"w": (4, 4)}, world=2)


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalogue]:
    monkeypatch.setattr(commit, "_ASK_S", 0.0)
    name = f"settled{next(_numbers)}"
    found = Catalogue(MemoryStore(name))
    found.create_or_open()
    found.claim(None, 2, "test")
    done = put_attempt(found.store, CommitName(1, 1), "0001")
    found.publish(done)
    remove_parts(found.store, done.folder)
    yield found
    forget_memory(name)


def attempt(number: str) -> SaveRequest:
    return SaveRequest(1, 1, number, 1, PLAN.digest, (), (), {}, None, 1.0)


def stop_at(call: int) -> Iterator[str | None]:
    yield from itertools.repeat(None, call)
    yield from itertools.repeat("enough")


def test_the_commit_of_another_survivor_is_the_answer(catalogue: Catalogue) -> None:
    """It has removed the parts already, so that they never come."""
    asked = stop_at(50)
    done = commit_attempt(catalogue, PLAN, attempt("0001"), lambda: next(asked), 20.0)
    assert done == catalogue.commit(CommitName(1, 1))


def test_the_commit_of_another_attempt_is_none(catalogue: Catalogue) -> None:
    """It holds other bytes: this save must not count as saved by it."""
    asked = stop_at(5)
    with pytest.raises(SaveError) as caught:
        commit_attempt(catalogue, PLAN, attempt("0002"), lambda: next(asked), 20.0)
    assert (caught.value.kind, caught.value.message) == ("aborted", "enough")


def test_nothing_is_committed_for_another_life_of_the_root(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is made again at the same place has generations of the same numbers."""
    given: list[Any] = []

    def keep(*more: object) -> None:
        given[:] = more
        raise StoreError("not now")

    monkeypatch.setattr(writer, "commit_attempt", keep)
    job = Job(StoreSpec(catalogue.store.url), store=catalogue.store)
    job.save(2, values(2)).wait_done(PATIENCE_S)
    job.close()
    _, plan, save, *more = given
    for life in ({"root_id": "0" * 32}, {"claim_id": "0" * 32}):
        with pytest.raises(ConflictError):
            other = msgspec.structs.replace(save, **life)
            commit_attempt(Catalogue(catalogue.store), plan, other, *more)
    assert catalogue.latest() == CommitName(1, 1)
    commit_attempt(catalogue, plan, save, *more)
    assert catalogue.latest() == CommitName(2, 2)
