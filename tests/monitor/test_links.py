"""Delay matrices: point, row, column and node, the largest first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ckptd.monitor.links import effects, slow_links
from ckptd.monitor.simulator import delays
from ckptd.monitor.verdict import Target

SHAPES = {
    Target.SENDER: ([(3, -1)], (3, -1)),
    Target.RECEIVER: ([(-1, 3)], (-1, 3)),
    Target.NODE: ([(3, -1), (-1, 3)], (3, 3)),
    Target.LINK: ([(3, 1)], (3, 1)),
}


@pytest.mark.parametrize(
    ("nodes", "probes", "ratio"), [(4, 3, 100.0), (12, 11, 4.0), (300, 8, 3.0)]
)
@pytest.mark.parametrize("target", SHAPES)
def test_each_shape_is_read(target: Target, nodes: int, probes: int, ratio: float) -> None:
    planted, wanted = SHAPES[target]
    slow = [(*p, ratio) for p in planted]
    found = effects(*delays(nodes, np.random.default_rng(5), slow, probes=probes), nodes)
    assert [(e.target, (e.source, e.to)) for e in found] == [(target, wanted)]
    assert found[0].ratio == pytest.approx(ratio, rel=0.5)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_named_where_all_is_well(seed: int) -> None:
    assert not effects(*delays(200, np.random.default_rng(seed)), 200)


def test_the_largest_is_peeled_first() -> None:
    slow = [(7, -1, 3.0), (-1, 40, 9.0), (11, 12, 30.0)]
    found = effects(*delays(200, np.random.default_rng(2), slow), 200)
    assert {(e.target, e.source, e.to) for e in found} == {
        (Target.RECEIVER, -1, 40),
        (Target.SENDER, 7, -1),
        (Target.LINK, 11, 12),
    }


def test_an_echo_of_a_larger_effect_is_to_be_probed_again() -> None:
    """Answers to a slow sender share its queue, and come later too."""
    slow = [(3, -1, 200.0), (5, 3, 2.5)]
    found = effects(*delays(40, np.random.default_rng(2), slow), 40)
    assert [(e.target, e.echo) for e in found] == [(Target.SENDER, False), (Target.LINK, True)]
    names = [f"n{k}" for k in range(40)]
    (verdict,) = slow_links(names, *delays(40, np.random.default_rng(2), slow))
    assert [s.name for s in verdict.suspects] == ["n3"]
    assert any("n5>n3" in text for text in verdict.evidence)


def test_a_probe_that_never_comes() -> None:
    source, to, seconds = delays(40, np.random.default_rng(2), [(3, 9, 1.0)])
    seconds[(source == 3) & (to == 9)] = np.inf
    (verdict,) = slow_links([f"n{k}" for k in range(40)], source, to, seconds)
    assert verdict.names(Target.LINK) == ("n3>n9",)


def test_links_that_are_unequal_by_nature_need_their_past() -> None:
    """Two racks: probes between them take four times as long."""
    pairs = np.array(list(itertools.permutations(range(8), 2)))
    source, to = pairs.T
    usual = np.where((source < 4) == (to < 4), 1e-4, 4e-4)
    rng = np.random.default_rng(1)
    now = usual * np.exp(0.05 * rng.standard_normal(len(usual)))
    assert not effects(source, to, now, 8)
    now[(source == 1) & (to == 2)] *= 3
    found = effects(source, to, now, 8, usual=usual)
    assert [(e.target, e.source, e.to) for e in found] == [(Target.LINK, 1, 2)]


def test_no_probe() -> None:
    none = np.zeros(0, np.int64)
    assert not effects(none, none, np.zeros(0), 0)
    assert not effects(none, none, np.zeros(0), 4)
