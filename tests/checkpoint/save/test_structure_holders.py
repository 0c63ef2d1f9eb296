"""Holders found from structures are those that a look at every rank finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format.manifest import MeshEntry
from ckptd.checkpoint.save.structure import RankGroup, ReplicaHolders, Structure, build_plan
from ckptd.errors import UsageError
from tests.checkpoint.save.saving import tensor

PP, DP, TP = 2, 2, 2
WORLD = PP * DP * TP
MESH = MeshEntry(("pp", "dp", "tp"), (PP, DP, TP), ((0, 1, WORLD),))
SHARDS = ("replicate", ("shard", 0))

# A tensor: on which ranks it is, and its placements on the three dimensions; None: plain.
tensors = st.tuples(
    st.sets(st.integers(0, WORLD - 1), min_size=1),
    st.none() | st.tuples(*[st.sampled_from(SHARDS)] * 3),
)


def structures(held: list[tuple[set[int], tuple | None]]) -> list[RankGroup]:
    by_structure: dict[Structure, list[int]] = {}
    for rank in range(WORLD):
        own = [
            tensor(f"t{i}", (8,), None if cut is None else MESH, *(cut or ()))
            for i, (ranks, cut) in enumerate(held)
            if rank in ranks
        ]
        names = tuple(f"o{i}" for i, (ranks, _) in enumerate(held) if rank in ranks)
        by_structure.setdefault(Structure.of(own, names), []).append(rank)
    return [RankGroup(s, tuple(r)) for s, r in by_structure.items()]


def part(cut: tuple | None, rank: int) -> tuple[int, ...]:
    at = np.unravel_index(rank, (PP, DP, TP))
    return tuple(int(c) for c, p in zip(at, cut or (), strict=False) if p != "replicate")


@given(st.lists(tensors, min_size=1, max_size=7))
def test_two_ranks_compare_exactly_what_both_hold(
    held: list[tuple[set[int], tuple | None]],
) -> None:
    groups = structures(held)
    views = [ReplicaHolders(groups, rank) for rank in range(WORLD)]
    tables: list[dict[str, set[str]]] = [{} for _ in range(WORLD)]
    for i, (ranks, cut) in enumerate(held):
        for rank in ranks:
            shared = views[rank].tensor(f"t{i}")
            same = {r for r in ranks if part(cut, r) == part(cut, rank)}
            assert shared.alone == (same == {rank})
            assert shared.first == (rank == min(same))
            tables[rank].setdefault(shared.key, set()).add(f"t{i}")
            value = views[rank].object(f"o{i}")
            assert (value.alone, value.first) == (len(ranks) == 1, rank == min(ranks))
            tables[rank].setdefault(value.key, set()).add(f"o{i}")
            for other in same:
                assert views[other].tensor(f"t{i}").key == shared.key
            for other in ranks - same:
                assert views[other].tensor(f"t{i}").key != shared.key
    # One digest represents a table: ranks that name it must have the same names in it.
    for one, other in itertools.combinations(range(WORLD), 2):
        for key in tables[one].keys() & tables[other].keys():
            assert tables[one][key] == tables[other][key]


def test_a_name_more_on_one_rank_adds_one_digest() -> None:
    common = [(set(range(WORLD)), None)] * 50
    groups = structures([*common, ({0}, None)])
    keys = {ReplicaHolders(groups, 3).tensor(f"t{i}").key for i in range(50)}
    assert len(keys) == 1


def test_stages_with_meshes_of_their_own_compare_by_place() -> None:
    groups = []
    for stage in range(2):
        mesh = MeshEntry(("dp",), (2,), ((2 * stage, 1, 2),))
        held = [tensor(name, (4,), mesh, ("shard", 0)) for name in ("tied", f"own{stage}")]
        groups.append(RankGroup(Structure.of(held), (2 * stage, 2 * stage + 1)))
    keys = [ReplicaHolders(groups, rank).tensor("tied").key for rank in range(4)]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert [ReplicaHolders(groups, r).tensor("tied").first for r in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert ReplicaHolders(groups, 3).tensor("own1").alone


def test_a_tensor_that_is_cut_in_two_ways_is_an_error() -> None:
    mesh = MeshEntry(("dp",), (2,), ((0, 1, 2),))
    groups = [
        RankGroup(Structure.of([tensor("t", (4,), mesh, ("shard", 0))]), (0, 1)),
        RankGroup(Structure.of([tensor("t", (4,))]), (2,)),
    ]
    with pytest.raises(UsageError) as caught:
        ReplicaHolders(groups, 0)
    assert (caught.value.kind, caught.value.where) == ("structure", "t")
    assert "rank 0" in str(caught.value.wanted)
    assert "rank 2" in str(caught.value.found)


def plain(*names: str, aliases: tuple[str, ...] = (), objects: tuple[str, ...] = ()) -> Structure:
    rest = [tensor(name, (4,)) for name in names[1:]]
    return Structure.of([tensor(n, (4,), aliases=aliases) for n in names[:1]] + rest, objects)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plain("a"), plain(objects=("a",))),
        (plain("a", aliases=("b",)), plain("a", "b")),
        (plain("a", aliases=("b",)), plain("a", objects=("b",))),
        (plain("a", "c", aliases=("b",)), plain("c", "a", aliases=("b",))),
    ],
    ids=["tensor and value", "alias and tensor", "alias and value", "alias of two"],
)
def test_a_name_with_two_meanings_is_an_error(one: Structure, other: Structure) -> None:
    with pytest.raises(UsageError, match="means different things") as caught:
        build_plan([RankGroup(one, (0,)), RankGroup(other, (1,))], 2)
    assert caught.value.kind == "structure"


def test_aliases_of_all_ranks_are_kept() -> None:
    groups = [
        RankGroup(plain("a", aliases=("b",)), (0,)),
        RankGroup(plain("a", aliases=("c",)), (1,)),
    ]
    (entry,) = build_plan(groups, 2).tensors
    assert entry.aliases == ("b", "c")
