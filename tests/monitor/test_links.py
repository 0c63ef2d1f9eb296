"""Delay matrices: point, row, column and node, the largest first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ckptd.monitor.links import LinkLimits, again, effects, slow_links
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import SuspectKind
from ckptd_simulated.job import delays

SHAPES = {
    SuspectKind.SENDER: ([(3, -1)], (3, -1)),
    SuspectKind.RECEIVER: ([(-1, 3)], (-1, 3)),
    SuspectKind.NODE: ([(3, -1), (-1, 3)], (3, 3)),
    SuspectKind.LINK: ([(3, 1)], (3, 1)),
}


@pytest.mark.parametrize(
    ("nodes", "probes", "ratio"), [(4, 3, 100.0), (12, 11, 4.0), (300, 8, 3.0)]
)
@pytest.mark.parametrize("target", SHAPES)
def test_each_shape_is_read(target: SuspectKind, nodes: int, probes: int, ratio: float) -> None:
    planted, wanted = SHAPES[target]
    slow = [(*p, ratio) for p in planted]
    found = effects(*delays(nodes, np.random.default_rng(5), slow, probes=probes), nodes)
    assert [(e.target, (e.source, e.to)) for e in found] == [(target, wanted)]
    assert found[0].ratio == pytest.approx(ratio, rel=0.5)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_named_where_all_is_well(seed: int) -> None:
    assert not effects(*delays(200, np.random.default_rng(seed)), 200)


Probes = tuple[Array, Array, Array]


def _probed_again(nodes: int, first: Probes, slow: tuple[int, int, float], seed: int) -> Probes:
    """The probes, and another of each link that is in doubt."""
    source, to = again(*first, nodes)
    seconds = 1e-4 * np.exp(0.1 * np.random.default_rng(seed).standard_normal(len(source)))
    seconds[(source == slow[0]) & (to == slow[1])] *= slow[2]
    found = [np.concatenate(two) for two in zip(first, (source, to, seconds), strict=True)]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("seed", range(10))
def test_a_link_of_twice_the_delay_is_sure_when_it_is_probed_again(seed: int) -> None:
    slow = (3, 9, 2.0)
    rng = np.random.default_rng(seed)
    probes = _probed_again(200, delays(200, rng, [slow]), slow, seed + 1000)
    assert [(e.target, e.source, e.to) for e in effects(*probes, 200)] == [(SuspectKind.LINK, 3, 9)]


@pytest.mark.parametrize("seed", range(10))
def test_chance_does_not_last(seed: int) -> None:
    """However often the most doubtful links are probed again."""
    probes = delays(200, np.random.default_rng(seed))
    for more in range(4):
        probes = _probed_again(200, probes, (0, 0, 1.0), 100 * seed + more)
        assert not effects(*probes, 200)


def test_a_probe_that_was_held_up_once_does_not_make_a_slow_link() -> None:
    source, to, seconds = delays(40, np.random.default_rng(2), [(3, 9, 1.0)])
    more = np.array([[3, 9], [3, 9]])
    probes = np.append(source, more[:, 0]), np.append(to, more[:, 1])
    late = np.append(seconds, [1e-4, 1e-4])
    late[np.flatnonzero((source == 3) & (to == 9))[0]] = 1.0
    assert not effects(*probes, late, 40)
    assert effects(source, to, late[:-2], 40)


def test_what_is_probed_again_are_links_in_doubt_and_whole_lines() -> None:
    source, to, seconds = delays(200, np.random.default_rng(3), [(7, -1, 1.4)])
    pairs = set(zip(*(ends.tolist() for ends in again(source, to, seconds, 200)), strict=True))
    assert {(7, int(t)) for t in to[source == 7]} <= pairs
    few = again(source, to, seconds, 200, LinkLimits(again=3))
    assert len(few[0]) == 3
    none = np.zeros(0, np.int64)
    assert not len(again(none, none, np.zeros(0), 4)[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_node_whose_one_direction_misses_the_bar_by_chance_is_still_a_node(seed: int) -> None:
    slow = [(7, -1, 1.5), (-1, 7, 1.3)]
    found = effects(*delays(200, np.random.default_rng(seed), slow), 200)
    assert [(e.target, e.source, e.to) for e in found] == [(SuspectKind.NODE, 7, 7)]


def test_the_largest_is_peeled_first() -> None:
    slow = [(7, -1, 3.0), (-1, 40, 9.0), (11, 12, 30.0)]
    found = effects(*delays(200, np.random.default_rng(2), slow), 200)
    assert {(e.target, e.source, e.to) for e in found} == {
        (SuspectKind.RECEIVER, -1, 40),
        (SuspectKind.SENDER, 7, -1),
        (SuspectKind.LINK, 11, 12),
    }


def test_an_echo_of_a_larger_effect_is_to_be_probed_again() -> None:
    """Answers to a slow sender share its queue, and come later too."""
    slow = [(3, -1, 200.0), (5, 3, 2.5)]
    found = effects(*delays(40, np.random.default_rng(2), slow), 40)
    assert [(e.target, e.echo) for e in found] == [
        (SuspectKind.SENDER, False),
        (SuspectKind.LINK, True),
    ]
    names = [f"n{k}" for k in range(40)]
    (verdict,) = slow_links(names, *delays(40, np.random.default_rng(2), slow))
    assert [s.name for s in verdict.suspects] == ["n3"]
    assert any("n5>n3" in text for text in verdict.evidence)


def test_a_probe_that_never_comes() -> None:
    source, to, seconds = delays(40, np.random.default_rng(2), [(3, 9, 1.0)])
    seconds[(source == 3) & (to == 9)] = np.inf
    (verdict,) = slow_links([f"n{k}" for k in range(40)], source, to, seconds)
    assert verdict.names(SuspectKind.LINK) == ("n3>n9",)


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
    assert [(e.target, e.source, e.to) for e in found] == [(SuspectKind.LINK, 1, 2)]


def test_no_probe() -> None:
    none = np.zeros(0, np.int64)
    assert not effects(none, none, np.zeros(0), 0)
    assert not effects(none, none, np.zeros(0), 4)


MEASURED_US = {
    (0, 1): 184, (0, 2): 96, (0, 3): 92, (1, 0): 177, (1, 2): 166, (1, 3): 184,
    (2, 0): 178, (2, 1): 186, (2, 3): 92, (3, 0): 86, (3, 1): 90, (3, 2): 179,
}  # fmt: skip
"""Four nodes on one machine of two cores: a probe is quick if both ends happen to share a core."""


@pytest.mark.parametrize(("point", "wanted"), [(166, []), (24301, [(1, 2)])])
def test_what_a_scheduler_makes_of_quick_probes_is_no_slow_link(
    point: float, wanted: list[tuple[int, int]]
) -> None:
    measured = {**MEASURED_US, (1, 2): point}
    source, to = np.array(list(measured)).T
    seconds = np.array(list(measured.values())) * 1e-6
    found = effects(source, to, seconds, 4, WatchSettings().links)
    assert [(e.source, e.to) for e in found] == wanted
