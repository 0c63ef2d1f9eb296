from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import join
from ckptd.monitor.report import GroupInfo
from ckptd.monitor.rules.slow import roles_of
from ckptd_simulated.job import Mesh
from tests.monitor.jobs import groups, job, view
from tests.monitor.watched import clean, infos


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tables of numbers put the same places together."""
    pairs = {(a, b) for a, b in zip(one.tolist(), other.tolist(), strict=True)}
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


@pytest.mark.parametrize("mesh", [Mesh(4, 2, 4), Mesh(16, 8, 8), Mesh(8, 4, 1)])
def test_a_mesh_is_read_from_its_groups(mesh: Mesh) -> None:
    roles = roles_of(clean(mesh), infos(mesh))
    assert same(roles.stage, mesh.roles.stage)
    assert same(roles.replica, mesh.roles.replica)


def test_all_ranks_of_a_job_with_one_group_are_alike() -> None:
    seen = job(*(view(r, 4, groups=groups({5: (4, 9, 9)})) for r in range(4)))
    roles = roles_of(seen, {5: GroupInfo.of(range(4), "0", "default_pg")})
    assert len(set(roles.stage.tolist())) == 1
    assert len(set(roles.replica.tolist())) == 4


def test_stages_of_a_pipeline_that_nobody_names_are_not_alike() -> None:
    p2p = {7: (2, 1, 1)}
    seen = job(*(view(r, 4, groups=groups({5: (4, 9, 9), **p2p})) for r in range(4)))
    names = {5: GroupInfo.of(range(4), "0", "default_pg"), 7: GroupInfo.of((0, 1), "0 0>1", "p2p")}
    assert len(set(roles_of(seen, names).stage.tolist())) == 4


def test_ranks_in_other_groups_do_other_work() -> None:
    some = [view(r, 4, groups=groups({5: (4, 9, 9)})) for r in range(2)]
    more = [view(r, 4, groups=groups({5: (4, 9, 9), 6: (2, 9, 9)})) for r in range(2, 4)]
    roles = roles_of(job(*some, *more), {})
    assert roles.stage.tolist() == [roles.stage[0]] * 2 + [roles.stage[2]] * 2
    assert roles.stage[0] != roles.stage[2]


def test_the_larger_of_two_groups_of_data_counts() -> None:
    """Hybrid sharding: replicas of shards."""
    table = {r: {10 + r // 4: (4, 1, 1), 20 + r % 4: (2, 1, 1)} for r in range(8)}
    seen = job(*(view(r, 8, groups=groups(table[r])) for r in range(8)))
    names = {
        **{10 + k: GroupInfo.of(range(4 * k, 4 * k + 4), "", "mesh_shard") for k in range(2)},
        **{20 + k: GroupInfo.of((k, 4 + k), "", "mesh_replicate") for k in range(4)},
    }
    assert same(roles_of(seen, names).stage, np.arange(8) // 4)


def test_ranks_without_groups_are_each_alone() -> None:
    assert roles_of(job(view(0), view(1)), {}).stage.tolist() == [0, 1]
    assert len(roles_of(join([]), {}).stage) == 0
