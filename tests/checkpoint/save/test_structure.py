from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.block import piece_regions
from ckptd.base.grids.grid import Axis, Grid
from ckptd.base.grids.owners import Owners
from ckptd.base.grids.sharding import nested, owner_array, sharded_grid
from ckptd.checkpoint.format.manifest import GridEntry, MeshEntry, TensorEntry
from ckptd.checkpoint.format.witness import WitnessPlan, gather
from ckptd.checkpoint.save.structure import (
    SPLIT_BYTES,
    RankGroup,
    RankPlan,
    Structure,
    TensorCut,
    build_plan,
    mesh_array,
)
from ckptd.errors import UsageError
from tests.checkpoint.save.saving import plan_of, tensor


def line(names: tuple[str, ...], *shape: int, start: int = 0) -> MeshEntry:
    count = int(np.prod(shape))
    return MeshEntry(names, shape, ((start, 1, count),) if count > 1 else ((start, 0, 1),))


def plan(tensors: list, world: int):
    return build_plan([RankGroup(Structure.of(tensors), tuple(range(world)))], world)


def owners(p, name: str) -> list[int]:
    t = next(t for t in p.tensors if t.name == name)
    return p.filemap.owners[t.owners].array(t.base).tolist()


def test_sharded_tensors_are_owned_by_their_shards() -> None:
    p = plan([tensor("w", (10, 4), line(("dp",), 4), ("shard", 0))], 4)
    assert owners(p, "w") == [0, 1, 2, 3]
    assert [p.filemap.data_bytes(r) for r in range(4)] == [48, 48, 48, 16]


def test_layers_share_grids_and_owner_maps() -> None:
    mesh = line(("dp",), 4)
    p = plan([tensor(f"w{i}", (8, 4), mesh, ("shard", 0)) for i in range(50)], 4)
    assert (len(p.grids), len(p.owners)) == (1, 1)


def test_replicas_of_shards_take_turns() -> None:
    mesh = line(("rep", "dp"), 2, 2)
    p = plan([tensor(f"w{i}", (8, 4), mesh, "replicate", ("shard", 0)) for i in range(4)], 4)
    assert [p.filemap.data_bytes(r) for r in range(4)] == [2 * 64] * 4
    assert {tuple(owners(p, t.name)) for t in p.tensors} == {(0, 1), (2, 3)}


def test_a_large_replicated_tensor_is_cut_over_its_holders() -> None:
    rows = 4 * SPLIT_BYTES // 400
    p = plan([tensor("w", (rows, 100))], 4)
    assert sorted(owners(p, "w")) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60), st.integers(1, 9))
def test_replicated_bytes_are_balanced(sizes: list[int], world: int) -> None:
    p = plan([tensor(f"t{i}", (n,)) for i, n in enumerate(sizes)], world)
    loads = [p.filemap.data_bytes(r) for r in range(world)]
    assert sum(loads) == 4 * sum(sizes)
    # The guarantee of longest-processing-time scheduling, loosely.
    assert max(loads) <= sum(loads) / world + 4 * max(sizes)


def test_stages_share_what_both_hold_and_keep_what_is_theirs() -> None:
    a = Structure.of([tensor("tied", (4,)), tensor("a", (4,))])
    b = Structure.of([tensor("tied", (4,)), tensor("b", (4,))])
    p = build_plan([RankGroup(a, (0, 1)), RankGroup(b, (2, 3))], 4)
    assert {t.name for t in p.tensors} == {"tied", "a", "b"}
    assert owners(p, "a")[0] in (0, 1)
    assert owners(p, "b")[0] in (2, 3)
    assert p.leaders == (0, 2)


def test_a_stage_of_a_larger_mesh_is_written_by_its_own_ranks() -> None:
    mesh = line(("pp", "dp"), 2, 2)
    late = Structure.of([tensor("late", (8,), mesh, "replicate", ("shard", 0))])
    p = build_plan([RankGroup(Structure(), (0, 1)), RankGroup(late, (2, 3))], 4)
    assert owners(p, "late") == [2, 3]


def test_a_shard_that_nobody_holds_is_an_error() -> None:
    mesh = line(("pp", "dp"), 2, 2)
    late = Structure.of([tensor("late", (8,), mesh, "replicate", ("shard", 0))])
    with pytest.raises(UsageError, match="do not hold this tensor completely"):
        build_plan([RankGroup(late, (1, 2))], 4)


def test_ranks_that_disagree_on_a_shape_are_named() -> None:
    a = Structure.of([tensor("w", (4,))])
    b = Structure.of([tensor("w", (5,))])
    with pytest.raises(UsageError) as caught:
        build_plan([RankGroup(a, (0,)), RankGroup(b, (1,))], 2)
    assert caught.value.kind == "structure"
    assert caught.value.where == "w"


def test_zero_sized_and_scalar_tensors_have_one_piece() -> None:
    p = plan([tensor("e", (0, 3)), tensor("s", ())], 3)
    assert all(len(owners(p, n)) == 1 for n in ("e", "s"))


def test_a_strided_shard_has_a_piece_for_each_part() -> None:
    p = plan([tensor("gate_up", (8, 2), line(("tp",), 2), ("strided", 0, 2))], 2)
    assert owners(p, "gate_up") == [0, 1, 0, 1]


def test_the_plan_is_the_same_whoever_computes_it() -> None:
    tensors = [tensor(f"t{i}", (i, 3), dtype="bfloat16") for i in range(20)]
    assert plan(tensors, 5).digest == plan(list(tensors), 5).digest
    assert plan(tensors, 5).digest != plan(tensors, 6).digest


Tensors = list[tuple[TensorEntry, TensorCut]]
_SHAPES = st.sampled_from([(), (0, 3), (1,), (5,), (7, 2), (8, 4), (8, 1, 3), (6, 1 << 19)])
_PLACED = st.sampled_from(["replicate", ("shard", 0), ("shard", 1), ("strided", 0, 2)])


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[Tensors, int]:
    """Draw tensors of few shapes and cuts, so that many are alike, and a world."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (4,), (2, 1, 3)]))
    world = int(np.prod(sizes))
    mesh = line(tuple(f"d{i}" for i in range(len(sizes))), *sizes)
    tensors = []
    for number in range(draw(st.integers(1, 12))):
        shape = draw(_SHAPES)
        cuts = draw(st.lists(_PLACED, min_size=len(sizes), max_size=len(sizes)))
        fits = all(c == "replicate" or c[1] < len(shape) for c in cuts)
        whole = (None,) if not fits else (mesh, *cuts)
        cut = whole if draw(st.booleans()) else (None,)
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
        tensors.append(tensor(f"t{number}", shape, *cut, dtype=dtype))
    return tensors, world


def _placed_alone(tensors: Tensors, world: int) -> dict[str, tuple[Grid, list[int]]]:
    """Return grid and owners of each tensor; nothing is known of one when the next is placed."""
    load, written, out = [0] * world, {}, {}
    plain = [t for t, cut in tensors if cut.mesh is None]
    for t, cut in tensors:
        if (mesh := cut.mesh) is None:
            continue
        placements = nested(mesh.shape, cut.placements) or cut.placements
        free = [i for i, p in enumerate(placements) if p == "replicate" and mesh.shape[i] > 1]
        sizes = [mesh.shape[i] for i in free]
        counts = written.setdefault(tuple(free), [0] * int(np.prod(sizes, dtype=int)))
        pick, at = counts.index(min(counts)), [0] * len(mesh.shape)
        for axis, where in zip(free, np.unravel_index(pick, sizes) if free else (), strict=True):
            at[axis] = int(where)
        files = owner_array(t.shape, mesh.shape, placements, mesh_array(mesh), at).tolist()
        counts[pick] += max(1, _size(t))
        for rank in files:
            load[rank] += _size(t) // len(files)
        out[t.name] = sharded_grid(t.shape, mesh.shape, placements).grid, files
    share = max(SPLIT_BYTES, sum(map(_size, plain)) // world)
    pieces = []
    for order, t in enumerate(plain):
        parts = min(world, *t.shape[:1], -(-_size(t) // share)) if t.shape else 1
        rows = [len(r) for r in np.array_split(range(t.shape[0]), max(1, parts))] if t.shape else []
        out[t.name] = (
            Grid(tuple(map(Axis.from_sizes, (rows, *([n] for n in t.shape[1:]))))[: len(t.shape)]),
            [0] * max(1, len(rows)),
        )
        each = _size(t) // max(1, sum(rows) or 1)
        pieces += [(-each * n, order, i) for i, n in enumerate(rows or [1])]
    for size, order, i in sorted(pieces):
        rank = load.index(min(load))
        load[rank] -= size
        out[plain[order].name][1][i] = rank
    return out


def _size(t: TensorEntry) -> int:
    return int(np.prod(t.shape, dtype=int)) * {"float32": 4, "bfloat16": 2, "int64": 8}[t.dtype]


@given(_jobs())
def test_alike_tensors_are_placed_as_if_each_were_the_only_one_of_its_kind(
    job: tuple[Tensors, int],
) -> None:
    """The same names come with other shapes, cuts and worlds: nothing is kept between plans."""
    tensors, world = job
    p, alone = plan(tensors, world), _placed_alone(tensors, world)
    for number, (t, _) in enumerate(tensors):
        grid, files = alone[t.name]
        assert p.grids[p.tensors[number].grid] == GridEntry.of(grid)
        assert owners(p, t.name) == files
    assert [Owners(runs).runs for runs in p.owners] == list(dict.fromkeys(p.owners))


def test_the_ranks_see_every_slot_of_the_witness() -> None:
    """A slot that no rank reports would leave its part of a tensor without a witness."""
    plan = plan_of({"a": (512, 64), "b": (64, 64, 16), "c": (3, 1), "s": ()}, world=4)
    seen: list[int] = []
    for rank in range(4):
        own = RankPlan(plan, rank)
        slots, values = own.witness(memoryview(bytes(own.data_bytes)))
        assert len(values) == 2 * len(slots)
        seen += np.frombuffer(slots, "<u4").tolist()
    assert sorted(seen) == list(range(WitnessPlan.over(plan.tensors).total))


def test_a_rank_reports_the_values_that_each_chunk_by_itself_has() -> None:
    mesh = line(("dp",), 3)
    # Cuts that are alike lie apart in the file, and are looked at together.
    shapes = [(40, 50), (44, 50)] * 3
    tensors = [tensor(f"w{i}", s, mesh, ("shard", 0)) for i, s in enumerate(shapes)]
    for i, dtype in enumerate(["float32", "int64", "bool", "complex128", "bfloat16"] * 5):
        tensors.append(tensor(f"t{i}", (i % 4, 600), dtype=dtype))
    p = plan([*tensors, tensor("scalar", ())], 3)
    for rank in range(3):
        own = RankPlan(p, rank)
        data = np.random.default_rng(rank).integers(0, 256, own.data_bytes + 64, np.uint8)
        wanted: list[tuple[bytes, bytes]] = []
        for c in own.chunks:
            slots, elements = p.witness.select(c.tensor, piece_regions(c.piece))
            size = p.filemap.dtypes[c.tensor].itemsize
            taken = gather(data[c.start : c.end], size, elements)
            wanted.append((slots.astype("<u4").tobytes(), taken.tobytes()))
        for _ in range(2):
            found = own.witness(data.data)
            assert found == tuple(b"".join(column) for column in zip(*wanted, strict=True))


def test_one_group_is_planned_as_two_of_the_same_are() -> None:
    mesh = line(("dp",), 4)
    tensors = [tensor("cut", (8, 4), mesh, ("shard", 0)), tensor("tied", (3,), aliases=("other",))]
    tensors += [tensor(f"t{i}", (1 + i % 7, 3)) for i in range(40)]
    tensors += [tensor("large", (4 * SPLIT_BYTES // 400, 100))]
    structure = Structure.of(tensors, ("value",))
    one = build_plan([RankGroup(structure, (2, 0, 1, 3))], 4)
    two = build_plan([RankGroup(structure, (0, 3)), RankGroup(structure, (1, 2))], 4)
    assert (one.tensors, one.grids, one.owners) == (two.tensors, two.grids, two.owners)


def test_of_one_rank_all_is_its_own() -> None:
    p = plan([tensor(f"t{i}", (5, 1 + i % 3)) for i in range(30)], 1)
    assert all(owners(p, t.name) == [0] for t in p.tensors)
    assert p.filemap.data_bytes(0) == sum(4 * 5 * (1 + i % 3) for i in range(30))


@pytest.mark.parametrize(
    ("tensors", "objects"),
    [
        ([tensor("a", (4,), aliases=("b",)), tensor("b", (4,))], ()),
        ([tensor("a", (4,), aliases=("c",)), tensor("b", (4,), aliases=("c",))], ()),
        ([tensor("a", (4,))], ("a",)),
        ([tensor("a", (4,), aliases=("v",))], ("v",)),
    ],
)
def test_one_group_cannot_give_two_things_one_name(tensors: list, objects: tuple) -> None:
    with pytest.raises(UsageError, match="a name means different things"):
        build_plan([RankGroup(Structure.of(tensors, objects), (0,))], 1)


@pytest.mark.parametrize("cut", [{"dtype": "float64"}, {"shape": (5,)}])
def test_one_group_that_has_a_name_twice_is_refused_as_two_are(cut: dict) -> None:
    entry, whole = tensor("a", (4,))
    other = msgspec.structs.replace(entry, **cut), whole
    with pytest.raises(UsageError, match="ranks disagree on a tensor"):
        build_plan([RankGroup(Structure.of([(entry, whole), other]), (0,))], 1)


def test_values_of_each_ranks_own_are_not_cut_over_ranks() -> None:
    """However large they are: half of one and half of another would be nobody's."""
    tensors = [tensor("own", (4096, 1024))]
    assert set(owners(plan(tensors, 2), "own")) == {0, 1}
    structure = Structure.of(tensors, own=("own",))
    assert owners(build_plan([RankGroup(structure, (0, 1))], 2), "own") == [0]


def test_a_tensor_is_written_by_a_rank_that_has_it() -> None:
    names = ("first", "second", "third")
    groups = [
        RankGroup(Structure.of([tensor("both", (8,)), tensor(name, (8,))]), (rank,))
        for rank, name in enumerate(names)
    ]
    assert [owners(build_plan(groups, 3), name) for name in names] == [[0], [1], [2]]
