"""Trainers are dead, workers die too: whoever is left commits what is complete."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.checkpoint.format.names import PARTS, CommitName, commit_key, data_folder, part_key
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.store import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec
from tests.checkpoint.crash.judge import assert_exact, assert_only_legal, clean
from tests.checkpoint.crash.life import End, Life
from tests.checkpoint.crash.places import LocalPlace
from tests.checkpoint.crash.trainers import Trainers, run_trainers
from tests.checkpoint.crash.zygote import Zygote
from tests.processes import wait_for_end

FIRST, SECOND = CommitName(1, 1), CommitName(2, 1)


@pytest.fixture
def place(ram: Path, zygote: Zygote) -> Iterator[LocalPlace]:
    """A root with step 1, saved by two ranks."""
    place = LocalPlace(ram)
    catalogue = Catalogue(place.store)
    catalogue.create_or_open()
    catalogue.claim(None, 2, "start")
    board = ram / "board"
    board.mkdir()
    lives = [
        Life(place.spec, 1, 1, "0001", rank=rank, world=2, board=str(board)) for rank in (0, 1)
    ]
    assert zygote.run(*lives) == [End(), End()]
    yield place
    place.close()


def trainers(
    spec: StoreSpec, worker_0: str, rule: FaultRule | None = None, timeout_s: float = 60.0
) -> Trainers:
    """Two lives that save step 2; rank 0's worker has a fault."""
    life = Life(spec, 2, 1, "0002", world=2, elsewhere=True, timeout_s=timeout_s)
    faults = FaultSpec((rule,)) if rule else None
    return Trainers(
        (
            msgspec.structs.replace(life, faults=faults),
            msgspec.structs.replace(life, rank=1),
        ),
        worker_0,
    )


FOLDER = data_folder(SECOND, "0002")
DEATHS = {
    "before the last part is read": FaultRule("kill", op="get", key=part_key(FOLDER, 1)),
    "before the witness": FaultRule("kill", op="put", key=FOLDER + "witness"),
    "before the manifest": FaultRule("kill", op="put", key=FOLDER + "manifest*"),
    "after the manifest": FaultRule("kill-after", op="put", key=FOLDER + "manifest*"),
    "before the commit": FaultRule("kill", op="put-new", key=commit_key(SECOND)),
    "after the commit": FaultRule("kill-after", op="put-new", key=commit_key(SECOND)),
    "before the parts go": FaultRule("kill", op="delete", key=FOLDER + PARTS + "*"),
    "after the parts went": FaultRule("kill-after", op="delete", key=FOLDER + PARTS + "*"),
}


@pytest.mark.parametrize("when", list(DEATHS))
def test_rank_1_commits_what_rank_0_cannot(when: str, place: LocalPlace) -> None:
    """Rank 0's worker dies at each step of its commit, after all the trainers."""
    workers = run_trainers(trainers(place.spec, "stop", DEATHS[when]))
    os.kill(workers[0], signal.SIGCONT)
    for worker in workers:
        wait_for_end(worker)
    assert Catalogue(place.store).latest() == SECOND
    for name in (FIRST, SECOND):
        assert_exact(place.store, name, world=2, large=False)
    clean(place.store)
    assert_only_legal(place.store, place.raw())


def test_rank_0s_worker_is_dead_already(place: LocalPlace) -> None:
    for worker in run_trainers(trainers(place.spec, "kill")):
        wait_for_end(worker)
    # The trainers' last act was to kill it: they may have called the save off, or not.
    if place.store.exists(commit_key(SECOND)):
        assert_exact(place.store, SECOND, world=2, large=False)
    assert_exact(place.store, FIRST, world=2, large=False)


def test_both_survive_and_one_commits(place: LocalPlace) -> None:
    """Rank 0 is slower than rank 1's patience: both commit, and neither harms the other."""
    late = FaultRule("delay", op="put", key=FOLDER + "witness", delay_s=4.0)
    workers = run_trainers(trainers(place.spec, "stop", late))
    os.kill(workers[0], signal.SIGCONT)
    for worker in workers:
        wait_for_end(worker)
    assert Catalogue(place.store).commits() == [FIRST, SECOND]
    assert_exact(place.store, SECOND, world=2, large=False)
    assert not place.store.children(FOLDER + PARTS)
    clean(place.store)
    assert_only_legal(place.store, place.raw())


def test_a_rank_that_never_reported_cannot_be_committed(place: LocalPlace) -> None:
    """Rank 0's part is not there: the survivor gives up, and gc clears away."""
    for worker in run_trainers(trainers(place.spec, "idle", timeout_s=2.0)):
        wait_for_end(worker)
    assert Catalogue(place.store).latest() == FIRST
    assert_exact(place.store, FIRST, world=2, large=False)
    assert clean(place.store)
    assert_only_legal(place.store, place.raw())


def test_survivors_of_an_older_life_change_nothing(place: LocalPlace) -> None:
    """A new life has claimed a generation when the orphans come to their commit."""
    workers = run_trainers(trainers(place.spec, "stop"))
    newer = Catalogue(place.store).claim(FIRST, 2, "resume")
    os.kill(workers[0], signal.SIGCONT)
    for worker in workers:
        wait_for_end(worker)
    assert newer.generation == 2
    assert Catalogue(place.store).latest() == FIRST
    assert clean(place.store)
    assert_only_legal(place.store, place.raw())
