"""Nodes that a new life leaves out: asked for what nobody else has, and for nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.format.names import CommitName, file_key
from ckptd.checkpoint.load.union import UnionSource
from ckptd.checkpoint.save.peers import Distant
from ckptd.errors import NotFoundError, TransientStoreError
from ckptd.store.base import Store
from ckptd.store.local import LocalStore
from tests.checkpoint.load.test_hostgroup_sharing import threads
from tests.checkpoint.load.test_union import Node
from tests.checkpoint.save.snapshotting import put_share, same
from tests.checkpoint.torch.test_loader_union import PLAN, WORLD, Place, blank, flip, load, truth

pytestmark = pytest.mark.usefixtures("writing_thread")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(LocalStore(tmp_path / "root"), [LocalStore(tmp_path / n) for n in "ab"])


def former(node: Store, name: str = "was") -> UnionSource:
    return UnionSource(Distant(node.url, lambda: node), "peer", name, former=True)


def there(node: Store, name: str = "is") -> UnionSource:
    return UnionSource(node, "memory", name)


def apart(place: Place, step: int) -> str:
    """Put each rank's share of a snapshot on one node only: the second has the last one's."""
    name = CommitName(step, place.generation)
    for rank in range(WORLD):
        save = put_share(place.nodes[rank // (WORLD - 1)], PLAN, rank, truth(step), name)
    return save.folder


def test_a_node_that_was_left_out_has_the_share_that_lacks(place: Place) -> None:
    place.commit(10)
    apart(place, 12)
    here, away = place.nodes
    assert place.load([there(here)]).step == 10
    report = place.load([there(here), former(away)])
    assert (report.step, report.skipped) == (12, ())
    assert set(report.sources) == {"memory", "peer"}
    assert place.load([there(here), former(away)], step=12).step == 12
    assert place.load([former(away), former(here, "too")]).step == 12


def test_what_a_node_that_was_left_out_says_is_not_believed(place: Place) -> None:
    place.commit(10)
    folder = apart(place, 12)
    flip(place.nodes[1], file_key(folder, WORLD - 1))
    report = place.load([there(place.nodes[0]), former(place.nodes[1])])
    assert (report.step, [step for step, _ in report.skipped]) == (10, [12])


def test_nodes_that_were_left_out_are_asked_only_when_it_matters(place: Place) -> None:
    place.commit(10)
    here, away = (Node(node) for node in place.nodes)
    near = [there(here), former(away)]
    place.snapshot(12, [here])
    assert place.load(near).step == 12
    assert place.load(near, step=10).step == 10
    assert away.calls == 0, "all is here"
    put_share(here, PLAN, 0, truth(14), CommitName(14, place.generation))
    assert place.load(near).step == 12
    assert away.calls == 1, "it may have had the rest of step 14, and has nothing"
    place.commit(14)
    place.load(near)
    assert away.calls == 1, "the root has step 14"
    with pytest.raises(NotFoundError):
        place.load(near, step=13)
    assert away.calls == 2
    place.catalogue.claim(CommitName(14, place.generation), WORLD)
    place.load(near)
    assert away.calls == 3, "a later life may have saved there alone"


def test_a_later_life_that_was_on_other_nodes_only(place: Place) -> None:
    place.commit(10)
    here, away = place.nodes
    place.snapshot(12, [here])
    place.generation = place.catalogue.claim(CommitName(12, 1), WORLD, committed=False).generation
    place.snapshot(15, [away])
    assert place.load([there(here)]).step == 12
    assert place.load([there(here), former(away)]).step == 15


def test_a_node_that_was_left_out_and_is_gone(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.commit(10)
    apart(place, 12)
    gone = Node(place.nodes[1], TransientStoreError)
    with caplog.at_level(logging.INFO):
        assert place.load([there(place.nodes[0]), former(gone)]).step == 10
    assert gone.calls == 1, "once to see what it has, and never again"
    (said,) = (record for record in caplog.records if "of was cannot be read" in record.message)
    assert said.levelno == logging.INFO
    down = Node(place.root, TransientStoreError)
    with pytest.raises(TransientStoreError):
        load(down, [there(place.nodes[0]), former(gone)], blank())


def test_every_rank_reads_from_a_node_that_was_left_out(place: Place) -> None:
    place.commit(10)
    apart(place, 12)
    states = [blank(), blank()]

    def work(rank: int, board: LocalBoard) -> int:
        near = [there(place.nodes[0]), former(place.nodes[1])]
        return load(place.root, near, states[rank], board=board).step

    assert threads(2, work) == [12, 12]
    assert all(same(state, truth(12)) for state in states)
