"""Another process relies on a checkpoint that a clean-up deletes, and then the clean-up dies.

At every operation of a clean-up another process pins, leases or goes back to a checkpoint that
it deletes; at every later operation the clean-up dies. If that process succeeded, the checkpoint
is there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest

from ckptd.checkpoint.format.names import CommitName
from ckptd.checkpoint.root import index as marks
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import missing_files, run_gc
from ckptd.checkpoint.root.leases import hold
from ckptd.errors import CkptdError, NotFoundError
from ckptd.store.base import Store
from ckptd.store.memory import MemoryStore
from tests.checkpoint.root.checkpoints import Visited
from tests.checkpoint.root.test_gc import Scene, set_scene
from tests.checkpoint.root.test_gc_twice import only
from tests.sampling import sampled

NAME = CommitName(10, 1)
_names = itertools.count()


class DiedError(BaseException):
    """Nothing handles it: a killed process runs no handler."""


class Dying(Visited):
    """Calls `visit` before operation `at`, and dies before operation `dies`."""

    def __init__(self, inner: Store, at: int, visit: Callable[[], None], dies: int) -> None:
        super().__init__(inner, at, visit)
        self._dies = dies

    def _step(self) -> None:
        super()._step()
        if self.count >= self._dies:
            raise DiedError


def pin(scene: Scene) -> None:
    Catalogue(scene.store).pin(NAME, "best")


def lease(scene: Scene) -> None:
    hold(Catalogue(scene.store), NAME)


def go_back(scene: Scene) -> None:
    Catalogue(scene.store).rollback(NAME.step)


def anew() -> Scene:
    return set_scene(MemoryStore(f"gc-death-{next(_names)}"))


def operations() -> int:
    scene = anew()
    plan = only(scene.plan(), NAME)
    store = Visited(scene.store, 0, lambda: None)
    run_gc(store, plan)
    return store.count


ACTS = [pin, lease, go_back]


@sampled(4)
@pytest.mark.parametrize("act", ACTS)
def test_who_was_told_yes_has_the_checkpoint(
    act: Callable[[Scene], None], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "WAIT_S", 0.0)
    total = operations()
    told = refused = 0
    for at in range(1, total + 1):
        for dies in range(at + (at + ACTS.index(act)) % every, total + 2, every):
            scene = anew()
            plan = only(scene.plan(), NAME)
            yes: list[bool] = []

            def visit(scene: Scene = scene, yes: list[bool] = yes) -> None:
                try:
                    act(scene)
                except NotFoundError:
                    return  # an honest answer
                yes.append(True)

            with contextlib.suppress(DiedError, CkptdError):
                run_gc(Dying(scene.store, at, visit, dies), plan)
            told, refused = told + bool(yes), refused + (not yes)
            if yes:
                catalogue = Catalogue(scene.store)
                assert missing_files(catalogue, catalogue.commit(NAME)) is None, (at, dies)
    assert told
    assert refused


def test_what_a_dead_clean_up_marked_is_deleted_by_the_next() -> None:
    total = operations()
    for dies in range(1, total + 1):
        scene = anew()
        plan = scene.plan()
        with pytest.raises(DiedError):
            run_gc(Dying(scene.store, 0, lambda: None, dies), plan)
        # The newest one, which refers to folders that lose their commits, can be held all the time.
        hold(Catalogue(scene.store), CommitName(50, 2)).release()
        run_gc(scene.store, scene.plan())
        run_gc(scene.store, scene.plan())
        assert not scene.plan().items
        assert [n.step for n in Catalogue(scene.store).commits()] == [50]
