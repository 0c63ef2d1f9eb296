"""Loading from the union of what is left of the tiers: the newest whole step, bit by bit."""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.base.runtime.ranks import LocalBoard
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.names import CommitName, digests_key, file_key, part_key
from ckptd.checkpoint.load.union import UnionSource
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.commit import plan_key
from ckptd.checkpoint.save.peers import Distant
from ckptd.checkpoint.torch import loader as sources
from ckptd.checkpoint.torch.loader import Loader, LoadReport
from ckptd.errors import CorruptError, StoreError, TransientStoreError
from ckptd.store.base import FaultRule, FaultSpec, OpenFile, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from ckptd.store.memory import MemoryStore, forget_memory
from tests.checkpoint.load.test_hostgroup_sharing import threads
from tests.checkpoint.load.test_union import Node
from tests.checkpoint.save.saving import SHAPES, plan_of, values
from tests.checkpoint.save.snapshotting import commit, put_share, put_snapshot, same, save_of

WORLD = 3
PLAN = plan_of({"big": (300, 1024), **SHAPES}, WORLD)
"""Above one block for each rank."""
SMALL = plan_of(world=WORLD)
_numbers = itertools.count()


def truth(step: int, small: bool = False) -> dict[str, Any]:
    return values(step, SHAPES if small else {"big": (300, 1024), **SHAPES})


def blank(small: bool = False) -> dict[str, torch.Tensor]:
    return {n: torch.full(v.shape, -1.0) for n, v in truth(0, small).items()}


def load(
    root: Store,
    near: Sequence[Store | UnionSource],
    state: dict[str, Any],
    step: int | None = None,
    *,
    board: LocalBoard | None = None,
) -> LoadReport:
    board = board or LocalBoard()
    agreement = Agreement(board, 60.0)
    loader = Loader(Catalogue(root), agreement, range(board.world), 60.0, near=lambda: near)
    return loader.load(
        state,
        step,
        strict=True,
        only=None,
        rename=None,
        weights_only=False,
        device=None,
        progress=None,
    )


@dataclass
class Place:
    """A root and the near stores of two nodes, as folders or in memory."""

    root: Store
    nodes: list[Store]
    catalogue: Catalogue = field(init=False)

    def __post_init__(self) -> None:
        self.catalogue = Catalogue(self.root)
        self.catalogue.create_or_open()
        self.generation = self.catalogue.claim(None, WORLD).generation

    def commit(self, step: int) -> None:
        commit(self.catalogue, PLAN, truth(step), CommitName(step, self.generation))

    def snapshot(self, step: int, nodes: Sequence[Store] | None = None) -> str:
        name = CommitName(step, self.generation)
        return put_snapshot(nodes or self.nodes, PLAN, truth(step), name).folder

    def load(self, near: Sequence[Store | UnionSource] | None = None, **options: Any) -> LoadReport:
        state = blank()
        report = load(self.root, self.nodes if near is None else near, state, **options)
        assert same(state, truth(report.step))
        return report


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(LocalStore(tmp_path / "root"), [LocalStore(tmp_path / n) for n in "ab"])
        return
    names = [f"union-load{next(_numbers)}" for _ in range(3)]
    root, *nodes = (MemoryStore(n) for n in names)
    yield Place(root, list(nodes))
    for name in names:
        forget_memory(name)


def test_the_newest_of_both(place: Place) -> None:
    place.commit(10)
    assert place.load([]).step == 10
    assert not place.load([]).snapshot
    place.snapshot(12)
    near = [UnionSource(place.nodes[0], "memory"), UnionSource(place.nodes[1], "peer")]
    report = place.load(near)
    assert (report.step, report.snapshot, report.skipped) == (12, True, ())
    assert set(report.sources) == {"memory", "peer"}
    assert report.tier in ("memory", "peer")
    assert sum(report.sources.values()) >= 300 * 1024 * 4
    place.commit(14)
    report = place.load(near)
    assert (report.step, report.snapshot) == (14, False)
    assert list(report.sources) == ["local" if isinstance(place.root, LocalStore) else "memory"]
    assert place.load(near, step=12).snapshot
    assert place.load(near, step=10).step == 10


def test_a_commit_takes_its_files_from_near_tiers(place: Place) -> None:
    """Its snapshot is not whole any more, and its files are not all at the root."""
    place.commit(10)
    folder = place.snapshot(10)
    place.nodes[1].delete([part_key(folder, 1)])
    place.root.delete([file_key(folder, 0), digests_key(file_key(folder, 0))])
    report = place.load([UnionSource(node, "peer") for node in place.nodes])
    assert (report.step, report.snapshot) == (10, False)
    assert report.sources["peer"] > 0


def flip(store: Store, key: str) -> None:
    raw = bytearray(store.get(key))
    raw[-1] ^= 4
    store.put(key, bytes(raw))


def cut(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-5])


def lose(store: Store, key: str) -> None:
    store.delete([key])


DAMAGE = {"flipped": flip, "truncated": cut, "missing": lose}
OBJECTS: dict[str, Callable[[str], str]] = {
    "file": lambda folder: file_key(folder, 1),
    "index": lambda folder: digests_key(file_key(folder, 1)),
    "part": lambda folder: part_key(folder, 1),
    "plan": plan_key,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", OBJECTS)
def test_damage_is_mended_by_another_copy_or_an_older_step(
    place: Place, damage: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.commit(10)
    for node in place.nodes:
        folder = place.snapshot(12, [node])
    key = OBJECTS[what](folder)
    DAMAGE[damage](place.nodes[0], key)
    report = place.load()
    assert (report.step, report.skipped) == (12, ())
    DAMAGE[damage](place.nodes[1], key)
    with caplog.at_level(logging.WARNING):
        report = place.load()
    assert report.step == 10
    if what in ("file", "index"):
        assert [step for step, _ in report.skipped] == [12]
        assert "step 12 is corrupt" in caplog.text
        with pytest.raises(CorruptError) as caught:
            place.load(step=12)
        assert not caught.value.state_corrupted


def test_all_copies_in_the_nearer_tier_are_wrong(place: Place) -> None:
    for node in place.nodes:
        folder = place.snapshot(12, [node])
    for rank in range(WORLD):
        flip(place.nodes[0], file_key(folder, rank))
    assert place.load().step == 12


def test_a_source_that_goes_at_any_moment(tmp_path: Path) -> None:
    """From some call on a node does not answer: another has the step, or an older one is taken."""
    place = Place(LocalStore(tmp_path / "root"), [LocalStore(tmp_path / n) for n in "ab"])
    place.commit(10)
    for node in place.nodes:
        place.snapshot(12, [node])
    place.snapshot(13)
    first, second = place.nodes
    steps: list[int] = []
    number = 0
    while True:
        number += 1
        gone = FaultSpec((FaultRule("error", skip=number - 1, times=0),))
        fault = Fault(_NoFiles(second), gone)
        steps.append(place.load([_NoFiles(first), fault]).step)
        if len(fault.operations) < number:
            break
    assert set(steps) == {12, 13}
    assert steps[0] == 12
    assert steps[-1] == 13


class _NoFiles(Node):
    """Everything goes through calls, as to another node."""

    def open_file(self, key: str) -> OpenFile | None:
        return None

    def local_path(self, key: str) -> Path | None:
        return None


def test_a_root_that_is_down(place: Place) -> None:
    place.commit(10)
    place.snapshot(12)
    down = Node(place.root, TransientStoreError)
    with pytest.raises(TransientStoreError):
        load(down, place.nodes, blank())


def test_near_tiers_that_are_all_gone(place: Place) -> None:
    place.commit(10)
    place.snapshot(12)
    gone = [Node(node, StoreError) for node in place.nodes]
    assert place.load(gone).step == 10
    assert [node.calls for node in gone] == [2, 2]  # once to list, once to read


def test_ranks_that_reach_different_tiers(place: Place) -> None:
    """One rank's node lost everything, another's has a damaged copy: all load the same step."""
    place.commit(10)
    for node in place.nodes:
        folder = place.snapshot(12, [node])
    flip(place.nodes[0], file_key(folder, 2))
    near: list[list[Store]] = [
        [place.nodes[0], place.nodes[1]],
        [Node(place.nodes[0], TransientStoreError), place.nodes[1]],
    ]
    states = [blank(), blank()]

    def work(rank: int, board: LocalBoard) -> int:
        return load(place.root, near[rank], states[rank], board=board).step

    assert threads(2, work) == [12, 12]
    assert all(same(state, truth(12)) for state in states)
    near[1] = [near[1][0]]
    assert threads(2, work) in ([10, 10], [12, 12])  # one may fetch what both need
    assert same(states[0], states[1])


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_snapshot_that_is_spread_over_nodes(
    place: Place, cut_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a node of its own and the other from afar; one may reach nobody."""
    monkeypatch.setattr(sources, "_PIECE_CHARS", 1000)
    place.commit(10)
    place.snapshot(12)
    states = [blank(), blank()]

    def near(rank: int) -> list[UnionSource]:
        if rank and cut_off:
            return []
        own, other = place.nodes[rank], place.nodes[1 - rank]
        afar = Distant(other.url, lambda: other)
        return [UnionSource(own, "memory", f"n{rank}"), UnionSource(afar, "peer", f"n{1 - rank}")]

    def work(rank: int, board: LocalBoard) -> int:
        return load(place.root, near(rank), states[rank], board=board).step

    wanted = 10 if cut_off else 12
    assert threads(2, work) == [wanted, wanted]
    assert all(same(state, truth(wanted)) for state in states)


def test_a_snapshot_of_ranks_that_drifted_apart(place: Place) -> None:
    place.commit(10)
    for rank in range(WORLD):
        replicas = (("all", f"{rank % 2}" * 32),)
        name = CommitName(12, place.generation)
        put_share(place.nodes[0], PLAN, rank, truth(12), name, replicas=replicas)
    report = place.load()
    assert report.step == 10
    assert report.skipped == ((12, "replicas differ between ranks"),)


def test_ranks_never_mix_two_snapshots_of_one_name(place: Place) -> None:
    """It cannot be, and if it were: parts of each are good, and together they are nothing."""
    place.commit(10)
    name = CommitName(12, place.generation)
    for node, step in zip(place.nodes, (12, 13), strict=True):
        put_snapshot([node], PLAN, truth(step), name)
    states = [blank(), blank()]

    def work(rank: int, board: LocalBoard) -> int:
        return load(place.root, [place.nodes[rank]], states[rank], board=board).step

    assert threads(2, work) == [10, 10]
    assert all(same(state, truth(10)) for state in states)


# -- anything --------------------------------------------------------------------------------------

STEPS = (3, 5, 8)
NODES = 3
copies = st.sets(st.integers(0, NODES - 1), min_size=1)
kinds = st.sampled_from(sorted(DAMAGE))
OF_A_STEP = 1 + 3 * WORLD
Hit = tuple[str, int, str]


def keys_of(step: int) -> list[str]:
    folder = save_of(CommitName(step, 1), "0001", SMALL).folder
    files = [file_key(folder, rank) for rank in range(WORLD)]
    return [
        plan_key(folder),
        *files,
        *map(digests_key, files),
        *(part_key(folder, rank) for rank in range(WORLD)),
    ]


@dataclass
class Originals:
    """Every object of some steps, made once."""

    objects: dict[str, bytes] = field(default_factory=dict)
    root: dict[str, bytes] = field(default_factory=dict)

    def make(self) -> None:
        names = [f"union-load{next(_numbers)}" for _ in range(2)]
        root, near = (MemoryStore(n) for n in names)
        catalogue = Catalogue(root)
        catalogue.create_or_open()
        generation = catalogue.claim(None, WORLD).generation
        commit(catalogue, SMALL, truth(0, True), CommitName(0, generation))
        for step in STEPS:
            for rank in range(WORLD):
                put_share(near, SMALL, rank, truth(step, True), CommitName(step, generation))
        self.objects = {info.key: near.get(info.key) for info in near.list()}
        self.root = {info.key: root.get(info.key) for info in root.list()}
        for name in names:
            forget_memory(name)


ORIGINALS = Originals()


def placement(draw: st.DrawFn) -> tuple[dict[tuple[int, str], set[int]], list[Hit]]:
    """Draw which nodes have each object of each step, and what happened to some copies."""
    spread = {(step, key): draw(copies) for step in STEPS for key in keys_of(step)}
    number = st.integers(0, OF_A_STEP - 1)
    node = st.integers(0, NODES - 1)
    hits = draw(st.lists(st.tuples(st.sampled_from(STEPS), number, node, kinds), max_size=8))
    return spread, [(keys_of(step)[n], node, kind) for step, n, node, kind in hits]


@settings(max_examples=30)
@given(
    placed=st.composite(placement)(),
    folders=st.lists(st.booleans(), min_size=NODES, max_size=NODES),
    gone=st.sampled_from([NODES, NODES, *range(NODES)]),
)
def test_any_damage_gives_the_truth_or_an_older_step(
    placed: tuple[dict[tuple[int, str], set[int]], list[Hit]], folders: list[bool], gone: int
) -> None:
    """Objects lie anywhere, some copies damaged: the newest step with a good copy of each."""
    if not ORIGINALS.objects:
        ORIGINALS.make()
    shm = Path("/dev/shm")
    top = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    names = [f"union-load{next(_numbers)}" for _ in range(NODES + 1)]
    try:
        root = MemoryStore(names[-1])
        for key, raw in ORIGINALS.root.items():
            root.put(key, raw)
        nodes: list[Store] = [
            LocalStore(top / n) if folder else MemoryStore(n)
            for n, folder in zip(names, folders, strict=False)
        ]
        spread, hits = placed
        good = {key: set(where) - {gone} for (_, key), where in spread.items()}
        for (_, key), where in spread.items():
            for node in where:
                nodes[node].put(key, ORIGINALS.objects[key])
        once = {(key, node): kind for key, node, kind in hits}  # two flips are none
        for (key, node), kind in once.items():
            if nodes[node].exists(key):
                DAMAGE[kind](nodes[node], key)
                good[key].discard(node)
        if gone < NODES:
            nodes[gone] = Node(nodes[gone], TransientStoreError)
        whole = [step for step in STEPS if all(good[key] for key in keys_of(step))]
        state = blank(True)
        report = load(root, nodes, state)
        assert report.step == max(whole, default=0)
        assert same(state, truth(report.step, True))
        assert all(step > report.step for step, _ in report.skipped)
    finally:
        shutil.rmtree(top)
        for name in names:
            forget_memory(name)


def test_the_keys_that_are_damaged_are_all_there_are() -> None:
    ORIGINALS.make()
    assert set(ORIGINALS.objects) == {key for step in STEPS for key in keys_of(step)}
