"""Live moves between layouts, judged element by element."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.lay.copies import Composition, compose
from ckptd.reshard.live.plan import Roles
from tests.lay.test_copies import composed
from tests.lay.test_live import PAIRS
from tests.lay.world import bound
from tests.reshard.live.world import move


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_element_arrives(source: str, target: str) -> None:
    for found, wanted, report in move(composed(source, target), 1 << 18):
        for name, values in wanted.items():
            assert np.array_equal(found[name], values), name
        assert report.samples or not wanted


SPACE = "space s { a[n m] X{e}.b[n m] c[n] follow s }"


def pair(source: str, target: str, **sizes: int) -> Composition:
    return compose(
        bound(
            f"{SPACE}\nmesh A = {source.partition(';')[0]}\nlayout a of s on A {{ "
            f"{source.partition(';')[2]} }}",
            "a",
            **sizes,
        ),
        bound(
            f"{SPACE}\nmesh B = {target.partition(';')[0]}\nlayout b of s on B {{ "
            f"{target.partition(';')[2]} }}",
            "b",
            **sizes,
        ),
    )


CASES = {
    "transposed": ("t:3;a = a[n@t:ceil m]", "t:2;a = a[m@t:ceil n]"),
    "interleaved": ("t:2;a = a[n@t m]", "t:2;a = a[(m@t n)]"),
    "experts": ("ep:2;x.{#e@ep}.b = X{e}.b[n m]", "t:4;w = X.b[e n m@t]"),
    "grouped": ("ep:4;w = X.b[(e@ep n) m]", "t:3;x.{e}.b = X{e}.b[m@t:bal n]"),
    "fewer": ("t:4;a = a[n@t:ceil m]\nc = c[n@t:bal]", "t:3;a = a[n@t:ceil m]\nc = c[n@t:bal]"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("budget", [1 << 16, 1 << 20])
def test_shapes_of_moves(case: str, budget: int) -> None:
    composition = pair(*CASES[case], n=40, m=36, e=4)
    for found, wanted, report in move(composition, budget):
        assert report.staged_bytes <= budget // 2
        for name, values in wanted.items():
            assert np.array_equal(found[name], values), (case, name)


@pytest.mark.slow
def test_many_messages_of_a_small_budget() -> None:
    composition = pair("t:3;a = a[n@t:ceil m]", "t:2;a = a[m@t:ceil n]", n=700, m=130)
    done = move(composition, 6 * 2 * 4096)
    assert all(np.array_equal(f[n], v) for f, wanted, _ in done for n, v in wanted.items())
    assert min(r.messages for _, _, r in done) > 20


def test_ranks_of_one_side_only() -> None:
    composition = pair("t:2;a = a[n@t m]", "t:3;a = a[n m@t]", n=6, m=9)
    roles = Roles((3, 1), (0, 4, 1))
    done = move(composition, 1 << 18, roles=roles)
    assert [bool(wanted) for _, wanted, _ in done] == [True, True, False, False, True]
    assert all(np.array_equal(f[n], v) for f, wanted, _ in done for n, v in wanted.items())


def test_values_change_on_the_way() -> None:
    composition = pair(
        "t:2;a = a[n@t m]\nc = c[n] affine(2, 1)",
        "t:2;a = a[n m@t] cast(float64)\nc = c[n@t] affine(4, -1) cast(float64)",
        n=4,
        m=6,
    )
    kinds, parameters = ("float32", "float64"), frozenset({""})
    for found, wanted, _ in move(composition, 1 << 18, kinds=kinds, states=parameters):
        assert np.array_equal(found["a"], wanted["a"])
        # Values are those of the tensors as they are: source = 2 x + 1, target = 4 x - 1.
        assert np.array_equal(found["c"], (wanted["c"] - 1) / 2 * 4 - 1)


def test_replicas_are_combined() -> None:
    for how, factor in (("avg", 1), ("sum", 3)):
        composition = pair(f"d:3 t:2;a = a[n@t m] {how}(d)", "t:4;a = a[n@t m]", n=8, m=3)
        for found, wanted, _ in move(composition, 1 << 18):
            for name, values in wanted.items():
                assert np.array_equal(found[name], values * factor), how
