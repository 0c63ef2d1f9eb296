"""The check before a job, its pure half: who probes whom, and what the probes say."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.monitor.links import Effect
from ckptd.monitor.preflight import (
    ALL_PAIRS_UP_TO,
    Confirmation,
    PairProbe,
    absent_findings,
    better,
    confirm,
    confirmations,
    islands,
    link_effects,
    link_findings,
    rounds,
    stray_links,
    unreached,
)
from ckptd.monitor.verdict import SuspectKind

INF = float("inf")


def probe(a: int, b: int, out: float = 1e-3, back: float = 1e-3, small: float = 1e-4) -> PairProbe:
    error = "" if np.isfinite(small) else "nothing"
    return PairProbe(source=a, to=b, latency_s=small, out_s=out, in_s=back, error=error)


def cut(a: int, b: int) -> PairProbe:
    return probe(a, b, INF, INF, INF)


def played(nodes: int, slow: Callable[[int, int], float], seed: int = 0) -> list[PairProbe]:
    """Return probes of all pairs; `slow` says how many times the usual time a direction takes."""
    draw = np.random.default_rng(seed)
    found = []
    for pairs in rounds(nodes, seed):
        for a, b in pairs:
            noise = np.exp(0.1 * np.abs(draw.standard_normal(3)))
            out, back, small = noise * (2e-3 * slow(a, b), 2e-3 * slow(b, a), 1e-4)
            found.append(probe(a, b, out, back, small))
    return found


# -- who probes whom -------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 5))
def test_every_pair_comes_once_and_a_node_once_a_round(nodes: int, seed: int) -> None:
    played = list(rounds(nodes, seed))
    for pairs in played:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    pairs = [frozenset(pair) for round_ in played for pair in round_]
    wanted = {frozenset(pair) for pair in itertools.combinations(range(nodes), 2)}
    assert (len(pairs), set(pairs)) == (len(wanted), wanted)
    assert len(played) <= nodes


@pytest.mark.parametrize("nodes", [ALL_PAIRS_UP_TO + 1, 1000, 10_241])
def test_of_many_nodes_a_ring_and_some_random_rounds(nodes: int) -> None:
    played = list(rounds(nodes, 3))
    assert len(played) <= 11
    peers: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for pairs in played:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for a, b in pairs:
            peers[a].add(b)
            peers[b].add(a)
    assert all((node + 1) % nodes in mine for node, mine in peers.items()), "the ring"
    assert min(map(len, peers.values())) >= 7


def test_the_seed_draws_who_meets_when() -> None:
    assert list(rounds(12, 1)) == list(rounds(12, 1)) != list(rounds(12, 2))


# -- who is reached --------------------------------------------------------------------------------


def test_islands() -> None:
    probes = [probe(0, 1), probe(1, 2), cut(2, 3), cut(0, 3), probe(4, 5), cut(5, 0)]
    assert islands(range(6), probes) == [[0, 1, 2], [4, 5], [3]]
    assert islands([], []) == []
    assert islands([0, 1], [cut(0, 1)]) == [[0], [1]]
    assert islands([0, 1], [probe(0, 1), probe(2, 1), probe(0, 3)]) == [[0, 1]]  # 2 and 3 are lost


def test_a_node_that_reaches_few_is_named_and_not_its_links() -> None:
    reached = [(a, b) for a, b in itertools.combinations(range(6), 2) if 4 not in (a, b)]
    probes = [probe(*pair) for pair in [*reached, (0, 4)]] + [cut(k, 4) for k in (1, 2, 3, 5)]
    assert unreached(range(6), probes) == ({4: (4, 5)}, [])
    one = cut(1, 2)
    rest = [p for p in probes if {p.source, p.to} != {1, 2}]
    assert unreached(range(6), [one, *rest]) == ({4: (4, 5)}, [one])


@pytest.mark.parametrize(
    ("names", "came", "wanted"),
    [
        ((), [("a", 0), ("b", 1), ("c", 2)], []),
        ((), [("a", 0), ("b", 2)], [("node", "rank 1", "absent")]),
        ((), [("a", -1), ("b", -1)], [("cluster", "1 of 3 nodes", "absent")]),
        ((), [], [("node", f"rank {k}", "absent") for k in range(3)]),
        (("a", "b", "c"), [("a", -1), ("b", -1)], [("node", "c", "absent")]),
        (
            ("a", "b", "c"),
            [("a", 0), ("x", 1), ("b", 2)],
            [("node", "c", "absent"), ("node", "x", "extra")],
        ),
    ],
)
def test_who_is_missing(
    names: tuple[str, ...], came: list[tuple[str, int]], wanted: list[tuple[str, str, str]]
) -> None:
    found = absent_findings(came, 3, names, "did not connect")
    assert [(f.target, f.name, f.what) for f in found] == wanted


# -- what is slow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [6, 16, 64])
def test_nothing_stands_out_where_all_is_well(nodes: int, seed: int) -> None:
    probes = played(nodes, lambda a, b: 1.0, seed)
    asked, controls = confirmations(link_effects(nodes, probes), range(nodes), seed)
    again = {(p.source, p.to): p for p in played(nodes, lambda a, b: 1.0, seed + 100)}
    again |= {(b, a): probe(b, a, p.in_s, p.out_s, p.latency_s) for (a, b), p in again.items()}
    assert not any(confirm("bandwidth", c, again, controls)[0] for c in asked)


@pytest.mark.parametrize(
    ("slow", "wanted"),
    [
        (lambda a, b: 4.0 if 3 in (a, b) else 1.0, (SuspectKind.NODE, 3, 3)),
        (lambda a, b: 4.0 if a == 3 else 1.0, (SuspectKind.SENDER, 3, -1)),
        (lambda a, b: 4.0 if b == 3 else 1.0, (SuspectKind.RECEIVER, -1, 3)),
        (lambda a, b: 9.0 if (a, b) == (3, 5) else 1.0, (SuspectKind.LINK, 3, 5)),
    ],
    ids=["node", "sender", "receiver", "link"],
)
@pytest.mark.parametrize("nodes", [6, 16, 64])
def test_what_is_slow_is_found_and_confirmed(
    nodes: int, slow: Callable[[int, int], float], wanted: tuple[SuspectKind, int, int]
) -> None:
    probes = played(nodes, slow)
    found = link_effects(nodes, probes)
    first = found["bandwidth"][0]
    assert (first.target, first.source, first.to) == wanted
    asked, controls = confirmations(found, range(nodes), 0)
    pairs = {p for c in asked for p in c.pairs} | set(controls)
    again = {(a, b): probe(a, b, 2e-3 * slow(a, b), 2e-3 * slow(b, a)) for a, b in pairs}
    there, value, usual = confirm("bandwidth", asked[0], again, controls)
    assert there
    assert value > 2 * usual
    # Quick again: it was a busy moment.
    calm = {pair: probe(*pair) for pair in pairs}
    assert not confirm("bandwidth", asked[0], calm, controls)[0]


def test_a_slow_link_is_asked_about_when_its_row_is_found_well() -> None:
    probes = played(6, lambda a, b: 50.0 if (a, b) == (0, 2) else 1.0)
    assert [(e.source, e.to) for e in stray_links(probes, {})["bandwidth"]] == [(0, 2)]
    row = Effect(SuspectKind.SENDER, 0, -1, 1.3, 5)
    assert not stray_links(probes, {"bandwidth": [row]})["bandwidth"], "explained"


def test_a_single_pair_is_no_matrix() -> None:
    assert link_effects(2, [probe(0, 1)]) == {"bandwidth": [], "latency": []}
    assert link_effects(0, []) == {"bandwidth": [], "latency": []}
    assert stray_links([cut(0, 1)], {}) == {}


def test_what_cannot_be_compared_stands() -> None:
    effect = Effect(SuspectKind.LINK, 0, 1, 7.0, 1)
    asked = Confirmation(effect=effect, pairs=((0, 1),))
    there, value, _ = confirm("bandwidth", asked, {}, [])
    assert there
    assert np.isnan(value)
    finding = link_findings(["a", "b"], "bandwidth", effect, (value, value), 1 << 20)
    assert (finding.name, finding.value) == ("a>b", None)
    assert "7.0 times" in finding.message


def test_figures_of_a_finding() -> None:
    node = Effect(SuspectKind.NODE, 1, 1, 4.0, 10)
    names = ["a", "b"]
    rate = link_findings(names, "bandwidth", node, (0.1, 0.001), 1 << 20)
    assert (rate.name, rate.value, rate.usual) == ("b", 10.0, 1000.0)
    delay = link_findings(names, "latency", node, (1e-3, 1e-4), 1)
    assert delay.message == "1000 us, usual here: 100"


def test_the_better_of_two_probes() -> None:
    first, second = probe(0, 1, 3.0, 1.0, 0.5), probe(0, 1, 2.0, 4.0, 0.25)
    assert better(first, second) == probe(0, 1, 2.0, 1.0, 0.25)
    assert better(None, second) is second
    assert not better(cut(0, 1), second).cut
