"""Snapshots: found when every rank's part is there, finished as a commit would have been."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.base.digest import digest_hex
from ckptd.checkpoint.format.names import WITNESS, CommitName, part_key
from ckptd.checkpoint.load.union import UnionStore
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.commit import commit_attempt, plan_key
from ckptd.checkpoint.save.messages import Blob, RankPart
from ckptd.checkpoint.save.recover import (
    complete_snapshots,
    finish_snapshot,
    finished_files,
    unpacked,
)
from ckptd.errors import CkptdError, ConflictError, CorruptError, SaveError, TransientStoreError
from ckptd.store.base import MeterSpec, Store
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from ckptd.store.wrap import Meter
from tests.checkpoint.load.test_union import Node
from tests.checkpoint.save.saving import plan_of, values
from tests.checkpoint.save.snapshotting import (
    TIMEOUT_S,
    put_share,
    put_snapshot,
    read_all,
    same,
    save_of,
)

WORLD = 3
NAME = CommitName(7, 2)
PLAN = plan_of(world=WORLD)
_numbers = itertools.count()

Make = Callable[[], MemoryStore]


@pytest.fixture
def make() -> Iterator[Make]:
    names: list[str] = []

    def store() -> MemoryStore:
        names.append(f"snapshots{next(_numbers)}")
        return MemoryStore(names[-1])

    yield store
    for name in names:
        forget_memory(name)


def flip(store: Store, key: str) -> None:
    raw = bytearray(store.get(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))


def test_spread_over_nodes_and_finished_as_a_commit(make: Make, tmp_path: Path) -> None:
    truth = values(1)
    nodes = [make(), LocalStore(tmp_path / "node")]
    save = put_snapshot(nodes, PLAN, truth, NAME)
    assert complete_snapshots(nodes[:1]) == []
    (snapshot,) = complete_snapshots(nodes)
    assert (snapshot.name, snapshot.attempt, snapshot.world) == (NAME, "0001", WORLD)
    assert snapshot.folder == save.folder

    root = Catalogue(make())
    root.create_or_open()
    root.claim(None, WORLD)
    root.claim(None, WORLD)
    put_snapshot([root.store], PLAN, truth, NAME)
    commit = commit_attempt(root, PLAN, save_of(NAME, "0001", PLAN), lambda: None, TIMEOUT_S)
    union = UnionStore(nodes)
    with unpacked(finished_files(union, snapshot)) as (store, manifest, filemap):
        assert digest_hex(store.get(commit.folder + commit.manifest)) == commit.manifest_digest
        assert manifest == root.manifest_of(commit)
        assert manifest.metadata == {"loss": 0.5}
        witness = save.folder + WITNESS
        assert store.get(witness) == root.store.get(witness)
        assert same(read_all(union, manifest, filemap), truth)
        scratch = store.url
    assert [*MemoryStore(scratch.partition("://")[2]).list()] == []


def test_a_wait_for_parts_ends_when_a_newer_life_begins(make: Make) -> None:
    """A rank died with its part: the others' writers waited a minute for what is refused anyway."""
    root = Catalogue(make())
    root.create_or_open()
    root.claim(None, WORLD)
    root.claim(None, WORLD)
    save = put_share(root.store, PLAN, 0, values(1), NAME)
    root.claim(None, WORLD, "resume")
    with pytest.raises(ConflictError) as caught:
        commit_attempt(root, PLAN, save, lambda: None, TIMEOUT_S)
    assert caught.value.kind == "superseded"


def test_found_with_few_calls(make: Make) -> None:
    plain = [make() for _ in range(2)]
    for step in range(4):
        put_snapshot(plain, PLAN, values(step), CommitName(step, 1))
    nodes = [Meter(store, MeterSpec()) for store in plain]
    assert [s.step for s in complete_snapshots(nodes)] == [0, 1, 2, 3]
    calls = [{op: m.calls for op, m in node.snapshot().items() if m.calls} for node in nodes]
    assert [c.pop("list") for c in calls] == [1, 1]
    assert sum(c.pop("get") for c in calls) <= 4 * (WORLD + 1) + 4 * WORLD
    assert calls == [{}, {}]


def test_newest_attempts_and_steps_in_order(make: Make) -> None:
    node = make()
    for name, attempt in ((NAME, "0002"), (CommitName(3, 1), "0001"), (NAME, "0001")):
        put_snapshot([node], PLAN, values(1), name, attempt)
    found = [(s.step, s.generation, s.attempt) for s in complete_snapshots([node])]
    assert found == [(3, 1, "0001"), (7, 2, "0001"), (7, 2, "0002")]
    assert complete_snapshots([]) == []


def broken_part(store: Store, folder: str) -> None:
    error = SaveError("disk full").to_dict()
    store.put(part_key(folder, 1), RankPart(1, PLAN.digest, error=error).encode())


DAMAGE: dict[str, Callable[[Store, str], None]] = {
    "a part is missing": lambda s, f: s.delete([part_key(f, 2)]),
    "the plan is missing": lambda s, f: s.delete([plan_key(f)]),
    "a part is damaged": lambda s, f: flip(s, part_key(f, 1)),
    "the plan is damaged": lambda s, f: flip(s, plan_key(f)),
    "a part is cut off": lambda s, f: s.put(part_key(f, 1), s.get(part_key(f, 1))[:-20]),
    "a part is empty": lambda s, f: s.put(part_key(f, 1), b""),
    "a rank failed": broken_part,
    "a part is another rank's": lambda s, f: s.put(part_key(f, 0), s.get(part_key(f, 1))),
    "another plan": lambda s, f: s.put(part_key(f, 0), RankPart(0, "other").encode()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_complete_and_what_another_source_mends(make: Make, damage: str) -> None:
    near, far = make(), make()
    for node in (near, far):
        put_snapshot([node], PLAN, values(1), NAME)
    folder = save_of(NAME, "0001", PLAN).folder
    DAMAGE[damage](near, folder)
    assert complete_snapshots([near]) == []
    (snapshot,) = complete_snapshots([near, far])
    with unpacked(finished_files(UnionStore([near, far]), snapshot)) as (_, manifest, _):
        assert len(manifest.files) == WORLD
    with pytest.raises(CkptdError) as caught:
        finish_snapshot(UnionStore([near]), make(), snapshot)
    assert isinstance(caught.value, CorruptError)


def test_a_snapshot_that_cannot_be_used_is_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    node = make()
    save = put_snapshot([node], PLAN, values(1), NAME)
    flip(node, part_key(save.folder, 1))
    with caplog.at_level(logging.WARNING):
        assert complete_snapshots([node]) == []
    assert save.folder in caplog.text


def test_nodes_that_are_gone(make: Make) -> None:
    nodes = [make() for _ in range(3)]
    put_snapshot(nodes, PLAN, values(1), NAME)
    put_snapshot(nodes[:2], PLAN, values(2), CommitName(6, 2))
    gone = Node(nodes[2], TransientStoreError)
    assert [s.step for s in complete_snapshots([*nodes[:2], gone])] == [6]
    with pytest.raises(TransientStoreError):
        complete_snapshots([gone, Node(make(), TransientStoreError)])


def test_ranks_that_drifted_apart(make: Make) -> None:
    node = make()
    for rank in range(WORLD):
        blob = Blob(f"{rank % 2}" * 32, b'{"w": 1}', leader=True)
        put_share(node, PLAN, rank, values(1), NAME, replicas=(("all", blob.digest),))
    (snapshot,) = complete_snapshots([node])
    with pytest.raises(SaveError) as caught:
        finish_snapshot(UnionStore([node]), make(), snapshot)
    assert caught.value.kind == "replicas-differ"
