"""A committer that waits for parts learns that another one was faster, of its own attempt alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root.catalogue import Catalogue, remove_parts
from ckptd.checkpoint.save import commit
from ckptd.checkpoint.save.commit import commit_attempt
from ckptd.checkpoint.save.messages import SaveRequest
from ckptd.errors import SaveError
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.root.checkpoints import put_attempt
from tests.checkpoint.save.saving import plan_of

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
