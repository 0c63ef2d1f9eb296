from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from ckptd.monitor.links import ROUND_S, LinkLimits, LinkProber
from ckptd.monitor.report import LinkProbe, ProbeResult
from ckptd.monitor.verdict import SuspectKind

Delay = Callable[[str, str], float]


def names(count: int) -> dict[str, str]:
    return {f"n{k:03}": f"h{k}:1" for k in range(count)}


class Net:
    """Agents that answer, over links that have delays; those in `held` do not greet."""

    held: frozenset[str] = frozenset()

    def __init__(self, count: int, slow: Delay = lambda a, b: 1.0) -> None:
        self.linking = LinkProber(LinkLimits(), every_s=60.0, peers=8)
        self.addresses = names(count)
        self.slow = slow
        self.now = 100.0
        self.most = 0
        self.probes: list[LinkProbe] = []
        self._rng = np.random.default_rng(0)

    def ask(self, first: Iterable[str] = (), why: str = "why") -> bool:
        return self.linking.ask(why, self.addresses, self.now, tuple(first))

    def answer(self, probe: LinkProbe) -> ProbeResult:
        times = self.slow(probe.from_node, probe.to_node)
        seconds = 1e-3 * times * float(np.exp(0.03 * self._rng.standard_normal()))
        held = probe.to_node in self.held
        seconds = np.inf if held else seconds
        error = "" if np.isfinite(seconds) else "timed out"
        return ProbeResult(
            shows="node" if held else "link",
            nonce=probe.nonce,
            src=probe.from_node,
            dst=probe.to_node,
            seconds=seconds,
            error=error,
        )

    def run(self, steps: int = 400) -> bool:
        """Let agents take probes and answer them until the round has ended."""
        for _ in range(steps):
            self.now += 0.25
            given = {n: self.linking.probes([n], self.addresses, self.now) for n in self.addresses}
            self.most = max(self.most, sum(bool(p) for p in given.values()))
            for probes in given.values():
                self.probes += probes
                for probe in probes:
                    self.linking.take(self.answer(probe))
            if self.linking.advance(set(self.addresses), self.now):
                return True
        return False


def slow_by(a: str, b: str, times: float) -> Delay:
    """One link, or, with an empty name, all of a node."""
    return lambda x, y: times if (x == a or not a) and (y == b or not b) else 1.0


@pytest.mark.parametrize(
    ("slow", "target", "name"),
    [
        (slow_by("n001", "n002", 5.0), SuspectKind.LINK, "n001>n002"),
        (slow_by("n001", "", 5.0), SuspectKind.SENDER, "n001"),
        (slow_by("", "n002", 5.0), SuspectKind.RECEIVER, "n002"),
        (lambda a, b: 5.0 if "n003" in (a, b) else 1.0, SuspectKind.NODE, "n003"),
        (slow_by("n001", "n002", np.inf), SuspectKind.LINK, "n001>n002"),
    ],
)
@pytest.mark.parametrize("count", [6, 24])
def test_what_is_slow_is_found(count: int, slow: Delay, target: SuspectKind, name: str) -> None:
    net = Net(count, slow)
    assert net.ask(["n001", "n002"])
    assert net.run()
    assert [s for v in net.linking.verdicts for s in v.names(target)] == [name]
    matrix = net.linking.matrix
    assert matrix is not None
    assert len(matrix.source) == len(matrix.seconds) == len(matrix.ratio)
    assert matrix.effects


def test_links_that_are_well_are_not_told() -> None:
    net = Net(24)
    assert net.ask()
    assert net.run()
    assert net.linking.verdicts == ()
    assert net.linking.matrix is not None


def test_one_node_probes_at_a_time() -> None:
    net = Net(12)
    net.ask()
    net.run()
    assert net.most == 1
    assert {(p.from_node, p.to_node) for p in net.probes} >= {
        (a, b) for a in net.addresses for b in net.addresses if a != b
    }


def test_of_many_nodes_each_probes_some_and_few_at_once() -> None:
    net = Net(128)
    net.ask()
    assert net.run()
    assert net.most <= 4
    assert {p.from_node for p in net.probes} == set(net.addresses)


def test_of_many_nodes_those_concerned_are_probed_with_some_others() -> None:
    net = Net(64)
    net.ask(["n001", "n002"])
    net.run()
    probed = {p.from_node for p in net.probes}
    assert {"n001", "n002"} <= probed
    assert len(probed) == 12


def test_rounds_do_not_follow_each_other_at_once() -> None:
    net = Net(6)
    assert net.ask()
    assert not net.ask()
    net.run()
    assert not net.ask()
    net.now += 61
    assert net.ask()


def test_two_nodes_cannot_be_compared() -> None:
    assert not Net(2).ask()


def test_nodes_that_go_away_do_not_hold_up_the_round() -> None:
    net = Net(6)
    net.ask()
    net.linking.probes(["n000"], net.addresses, net.now)  # and never answers
    net.now += 30
    del net.addresses["n000"]
    assert net.run()
    assert not net.linking.busy


def test_a_round_ends_though_nobody_takes_its_probes() -> None:
    net = Net(6)
    net.ask()
    net.now += ROUND_S + 1
    assert net.linking.advance(set(net.addresses), net.now)
    assert net.linking.verdicts == ()


def test_results_that_nobody_asked_for_count_for_nothing() -> None:
    net = Net(6)
    net.ask()
    for nonce, src, dst in ((1, "n000", "n001"), (99, "n000", "n001"), (1, "x", "y")):
        net.linking.take(ProbeResult(nonce=nonce, src=src, dst=dst, seconds=9.0))
    (probe, *_) = net.linking.probes(["n000"], net.addresses, net.now)
    net.linking.take(ProbeResult(nonce=probe.nonce, src="n004", dst=probe.to_node, seconds=9.0))
    assert net.linking.results == ()


def test_links_unequal_by_nature_are_compared_with_what_they_were() -> None:
    """Two halves with a slow bridge between them, and then one node that becomes slow."""

    def bridge(a: str, b: str) -> float:
        return 3.0 if (a < "n003") != (b < "n003") else 1.0

    net = Net(6, bridge)
    net.ask()
    net.run()
    assert net.linking.verdicts == ()
    net.now += 61
    net.slow = lambda a, b: bridge(a, b) * (4.0 if a == "n005" else 1.0)
    net.ask()
    net.run()
    assert [s for v in net.linking.verdicts for s in v.names(SuspectKind.SENDER)] == ["n005"]


def test_a_node_that_did_not_greet_is_not_accused() -> None:
    net = Net(5)
    net.held = frozenset({"n002"})
    assert net.ask()
    assert net.run()
    assert net.linking.verdicts == ()
    assert net.linking.matrix is not None
    assert {to for _, to, _, _ in net.linking.matrix.edges} == {0, 1, 3, 4}
    net = Net(5)
    net.held = frozenset(net.addresses)
    assert net.ask()
    assert net.run()
    assert net.linking.verdicts == ()


@pytest.mark.parametrize(
    ("shows", "seconds", "reached"),
    [
        ("link", np.inf, {"n002": False}),
        ("node", np.inf, {"n002": True}),
        ("link", 0.001, {"n002": True}),
        ("nothing", np.inf, {}),
    ],
)
def test_whether_a_silent_node_is_there(
    shows: Any, seconds: float, reached: dict[str, bool]
) -> None:
    linking, addresses = LinkProber(LinkLimits(), every_s=60.0, peers=8), names(4)
    linking.ask_reach({"n002"}, addresses, 0.0)
    linking.ask_reach({"n002"}, addresses, 0.1)
    probes = linking.probes(addresses.keys() - {"n002"}, addresses, 0.1)
    assert len(probes) == 2
    assert "n002" not in linking.reachable
    for p in probes:
        linking.take(
            ProbeResult(nonce=p.nonce, src=p.from_node, dst=p.to_node, seconds=seconds, shows=shows)
        )
    assert linking.reachable == reached
    linking.ask_reach((), addresses, 1.0)
    assert linking.reachable == {}
