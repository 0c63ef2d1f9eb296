"""Two clean-ups at once, and somebody who comes to rely on what they delete, in a forced order.

Each party has its own turn and makes its store operations until a certain one is before it; then
the next party goes on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, missing_files, run_gc
from ckptd.checkpoint.root.leases import hold
from ckptd.errors import ConflictError, CorruptError, NotFoundError
from ckptd.store.base import Store
from ckptd.store.fault import Fault
from ckptd.store.memory import MemoryStore
from tests.checkpoint.root.checkpoints import assert_whole
from tests.checkpoint.root.test_gc import Reckless, Scene, set_scene
from tests.processes import PATIENCE_S

ONE, TWO, THIRD = range(3)
Act = Callable[[Scene, Store], None]
Turn = tuple[int, str]
"""A party, and what it must not do yet, as ``"put commits/"``; "" lets it come to its end."""

_names = itertools.count()


class Order:
    """The party that has the turn."""

    def __init__(self, turns: list[Turn]) -> None:
        self._turns: Iterator[Turn] = iter(turns)
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._turn = next(self._turns, None)

    def step(self, party: int, operation: str) -> None:
        """Wait for the party's turn; end it when this is the operation that it must not do yet."""
        with self._changed:
            self._wait(party)
            if self._turn is not None and self._turn[1] and operation.startswith(self._turn[1]):
                self._advance()
                self._wait(party)

    def _wait(self, party: int) -> None:
        assert self._changed.wait_for(
            lambda: self._turn is None or self._turn[0] == party, timeout=60
        )

    def leave(self, party: int) -> None:
        with self._changed:
            self._gone.add(party)
            if self._turn is not None and self._turn[0] == party:
                self._advance()

    def _advance(self) -> None:
        self._turn = next((t for t in self._turns if t[0] not in self._gone), None)
        self._changed.notify_all()


class Taking(Fault):
    """A store that waits for its party's turn before each operation."""

    def __init__(self, inner: Store, order: Order, party: int) -> None:
        super().__init__(inner)
        self._order = order
        self._party = party

    def step(self, op, key, nbytes, act):  # type: ignore[no-untyped-def]
        self._order.step(self._party, f"{op} {key}")
        return super().step(op, key, nbytes, act)


def play(store: Store, turns: list[Turn], works: list[Callable[[Store], None]]) -> None:
    order = Order(turns)
    problems: list[BaseException] = []

    def run(party: int) -> None:
        try:
            works[party](Taking(store, order, party))
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)
        finally:
            order.leave(party)

    threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_S)
    assert not problems, problems


def publish(scene: Scene, store: Store) -> None:
    """An attempt of an older life is committed, of which nothing was heard for long."""
    Reckless(store).publish(scene.zombie)


def read(_: Scene, store: Store) -> None:
    hold(Catalogue(store), CommitName(40, 2))


def pin(_: Scene, store: Store) -> None:
    Catalogue(store).pin(CommitName(40, 2), "good")


def roll_back(_: Scene, store: Store) -> None:
    Catalogue(store).rollback(40)


def only(plan: GcPlan, name: CommitName) -> GcPlan:
    """Keep of a plan what concerns one checkpoint."""
    items = tuple(i for i in plan.items if i.name == name)
    assert items
    return msgspec.structs.replace(plan, items=items, sweep_s=None)


LOOK, DELETE, COMMITTED = "children commits/", "delete data/", "sync commits/"
COMMIT, LEASE, PIN = "put-new commits/", "stat commits/", "put-new pins/"
# The second clean-up has looked and is about to delete when the third party says that it relies on
# the checkpoint. The first one sees that and lets it live, so that the third party sees nothing
# amiss. Where it says "taken", a clean-up that takes the manifest away before it looks comes so
# far; where it says "marked", one that says first what it is about to do.
CASES: dict[str, tuple[Act, CommitName, list[Turn]]] = {
    "publish, taken": (
        publish,
        CommitName(35, 1),
        [
            *((THIRD, COMMIT), (ONE, DELETE), (ONE, LOOK), (TWO, DELETE)),
            *((THIRD, COMMITTED), (ONE, ""), (THIRD, ""), (TWO, "")),
        ],
    ),
    "publish, marked": (
        publish,
        CommitName(35, 1),
        [
            *((THIRD, COMMIT), (ONE, "put data/"), (ONE, LOOK), (TWO, DELETE)),
            *((THIRD, COMMITTED), (ONE, ""), (THIRD, ""), (TWO, "")),
        ],
    ),
    "read, taken": (
        read,
        CommitName(40, 2),
        [
            *((ONE, COMMITTED), (TWO, DELETE), (TWO, LOOK), (TWO, DELETE)),
            *((THIRD, LEASE), (ONE, ""), (THIRD, ""), (TWO, "")),
        ],
    ),
    "read, marked": (
        read,
        CommitName(40, 2),
        [(ONE, COMMITTED), (TWO, DELETE), (THIRD, LEASE), (ONE, ""), (THIRD, ""), (TWO, "")],
    ),
    "pin, taken": (
        pin,
        CommitName(40, 2),
        [
            *((THIRD, PIN), (ONE, COMMITTED), (TWO, DELETE), (TWO, LOOK), (TWO, DELETE)),
            *((THIRD, LEASE), (ONE, ""), (THIRD, ""), (TWO, "")),
        ],
    ),
    "pin, marked": (
        pin,
        CommitName(40, 2),
        [
            *((THIRD, PIN), (ONE, COMMITTED), (TWO, DELETE)),
            *((THIRD, LEASE), (ONE, ""), (THIRD, ""), (TWO, "")),
        ],
    ),
    "rollback, taken": (
        roll_back,
        CommitName(40, 2),
        [
            *((ONE, "delete commits/"), (THIRD, "put-new generations/"), (ONE, COMMITTED)),
            *((TWO, LOOK), (TWO, LOOK), (THIRD, ""), (TWO, DELETE), (TWO, LOOK), (TWO, DELETE)),
            *((ONE, ""), (TWO, "")),
        ],
    ),
    "rollback, marked": (
        roll_back,
        CommitName(40, 2),
        [
            *((ONE, "delete commits/"), (THIRD, "put-new generations/"), (ONE, COMMITTED)),
            *((TWO, LOOK), (TWO, LOOK), (THIRD, ""), (TWO, DELETE), (ONE, ""), (TWO, "")),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nobody_relies_on_what_two_clean_ups_delete(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "WAIT_S", 0.0)
    act, name, turns = CASES[case]
    scene = set_scene(MemoryStore(f"gc-twice-{next(_names)}"))
    plan = only(scene.plan(), name)
    relied: list[bool] = []

    def clean(store: Store) -> None:
        try:
            run_gc(store, plan)
        except ConflictError as error:
            assert error.kind == "stale-plan"  # noqa: PT017

    def company(store: Store) -> None:
        try:
            act(scene, store)
        except (NotFoundError, CorruptError, ConflictError):
            return  # an honest answer
        relied.append(True)

    play(scene.store, turns, [clean, clean, company])
    catalogue = Catalogue(scene.store)
    assert_whole(scene.store, catalogue.commits())
    if relied:
        assert missing_files(catalogue, catalogue.commit(name)) is None
