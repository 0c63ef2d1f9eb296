from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.format.manifest import MeshEntry
from ckptd.save.structure import SPLIT_BYTES, RankGroup, RankTensor, Structure, build_plan


def line(names: tuple[str, ...], *shape: int, start: int = 0) -> MeshEntry:
    count = int(np.prod(shape))
    return MeshEntry(names, shape, ((start, 1, count),) if count > 1 else ((start, 0, 1),))


def plan(tensors: list[RankTensor], world: int, *meshes: MeshEntry):
    return build_plan([RankGroup(Structure(meshes, tuple(tensors)), tuple(range(world)))], world)


def owners(p, name: str) -> list[int]:
    t = next(t for t in p.tensors if t.name == name)
    return p.filemap.owners[t.owners].array(t.base).tolist()


def test_sharded_tensors_are_owned_by_their_shards() -> None:
    p = plan([RankTensor("w", "float32", (10, 4), 0, (("shard", 0),))], 4, line(("dp",), 4))
    assert owners(p, "w") == [0, 1, 2, 3]
    assert [p.filemap.data_bytes(r) for r in range(4)] == [48, 48, 48, 16]


def test_layers_share_grids_and_owner_maps() -> None:
    tensors = [RankTensor(f"w{i}", "float32", (8, 4), 0, (("shard", 0),)) for i in range(50)]
    p = plan(tensors, 4, line(("dp",), 4))
    assert (len(p.grids), len(p.owners)) == (1, 1)


def test_replicas_of_shards_take_turns() -> None:
    tensors = [
        RankTensor(f"w{i}", "float32", (8, 4), 0, ("replicate", ("shard", 0))) for i in range(4)
    ]
    p = plan(tensors, 4, line(("rep", "dp"), 2, 2))
    assert [p.filemap.data_bytes(r) for r in range(4)] == [2 * 64] * 4
    assert {tuple(owners(p, t.name)) for t in tensors} == {(0, 1), (2, 3)}


def test_a_large_replicated_tensor_is_cut_over_its_holders() -> None:
    rows = 4 * SPLIT_BYTES // 400
    p = plan([RankTensor("w", "float32", (rows, 100))], 4)
    assert sorted(owners(p, "w")) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60), st.integers(1, 9))
def test_replicated_bytes_are_balanced(sizes: list[int], world: int) -> None:
    p = plan([RankTensor(f"t{i}", "float32", (n,)) for i, n in enumerate(sizes)], world)
    loads = [p.filemap.data_bytes(r) for r in range(world)]
    assert sum(loads) == 4 * sum(sizes)
    # The guarantee of longest-processing-time scheduling, loosely.
    assert max(loads) <= sum(loads) / world + 4 * max(sizes)


def test_stages_share_what_both_hold_and_keep_what_is_theirs() -> None:
    a = Structure((), (RankTensor("tied", "float32", (4,)), RankTensor("a", "float32", (4,))))
    b = Structure((), (RankTensor("tied", "float32", (4,)), RankTensor("b", "float32", (4,))))
    p = build_plan([RankGroup(a, (0, 1)), RankGroup(b, (2, 3))], 4)
    assert {t.name for t in p.tensors} == {"tied", "a", "b"}
    assert owners(p, "a")[0] in (0, 1)
    assert owners(p, "b")[0] in (2, 3)
    assert p.leaders == (0, 2)


def test_a_stage_of_a_larger_mesh_is_written_by_its_own_ranks() -> None:
    mesh = line(("pp", "dp"), 2, 2)
    held = RankTensor("late", "float32", (8,), 0, ("replicate", ("shard", 0)))
    p = build_plan(
        [RankGroup(Structure((mesh,), ()), (0, 1)), RankGroup(Structure((mesh,), (held,)), (2, 3))],
        4,
    )
    assert owners(p, "late") == [2, 3]


def test_a_shard_that_nobody_holds_is_an_error() -> None:
    mesh = line(("pp", "dp"), 2, 2)
    held = RankTensor("late", "float32", (8,), 0, ("replicate", ("shard", 0)))
    with pytest.raises(UsageError, match="no set of ranks"):
        build_plan([RankGroup(Structure((mesh,), (held,)), (1, 2))], 4)


def test_ranks_that_disagree_on_a_shape_are_named() -> None:
    a = Structure((), (RankTensor("w", "float32", (4,)),))
    b = Structure((), (RankTensor("w", "float32", (5,)),))
    with pytest.raises(UsageError) as caught:
        build_plan([RankGroup(a, (0,)), RankGroup(b, (1,))], 2)
    assert caught.value.kind == "structure"
    assert caught.value.where == "w"


def test_zero_sized_and_scalar_tensors_have_one_piece() -> None:
    p = plan([RankTensor("e", "float32", (0, 3)), RankTensor("s", "float32", ())], 3)
    assert all(len(owners(p, n)) == 1 for n in ("e", "s"))


def test_a_strided_shard_has_a_piece_for_each_part() -> None:
    placements = (("strided", 0, 2),)
    p = plan([RankTensor("gate_up", "float32", (8, 2), 0, placements)], 2, line(("tp",), 2))
    assert owners(p, "gate_up") == [0, 1, 0, 1]


def test_the_plan_is_the_same_whoever_computes_it() -> None:
    tensors = [RankTensor(f"t{i}", "bfloat16", (i, 3)) for i in range(20)]
    assert plan(tensors, 5).digest == plan(list(tensors), 5).digest
    assert plan(tensors, 5).digest != plan(tensors, 6).digest
