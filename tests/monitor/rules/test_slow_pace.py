from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ckptd.monitor.report import AgentState, RankNote
from ckptd_simulated.job import Mesh, own_times
from tests.monitor.watched import Fed, told

SMALL = Mesh(2, 2, 4)


def run_steps(fed: Fed, mesh: Mesh, own: Any, first: int = 0) -> int | None:
    """Tell own times five steps at a time; return the step at which an incident opened."""
    for k in range(0, len(own), 5):
        fed.tell(mesh, own[k : k + 5], first + k)
        if fed.opened:
            return first + k + 5
    return None


@pytest.mark.parametrize("mesh", [Mesh(8), Mesh(16), SMALL, Mesh(8, 4, 4)])
def test_a_slow_rank_among_enough_is_named_soon(mesh: Mesh) -> None:
    rng = np.random.default_rng(11)
    own = own_times(mesh, rng, 130)
    own[70:, 5] *= 1.5
    fed = Fed()
    found = run_steps(fed, mesh, own)
    assert told(fed.opened) == [("slow rank", ("5",))]
    assert found is not None
    assert found - 70 <= 35
    assert fed.watch.scores[5] > 1.25
    assert fed.watch.self_s[5] > fed.watch.self_s[6]
    verdict = fed.opened[0].verdict
    numbers = verdict.numbers
    share = (numbers["own s"] - numbers["usual s"]) / numbers["step s"]
    assert numbers["share of a step"] == pytest.approx(share)
    assert numbers["own s"] / numbers["usual s"] == pytest.approx(numbers["ratio"])
    # It says who, where, by how much, who waits, and what that costs.
    wanted = (
        rf"rank 5 on n\d takes {1e3 * numbers['own s']:.0f} ms a step by itself where others take"
        rf" {1e3 * numbers['usual s']:.0f} ms; all {mesh.ranks} ranks wait for it:"
        rf" {100 * share:.0f} % of the job"
    )
    assert re.fullmatch(wanted, verdict.evidence[0])
    newest, walls = fed.watch.walls(found - 6)
    assert newest == found - 1
    assert walls.shape == (mesh.ranks,)
    assert np.median(walls) == pytest.approx(1.1 * own[found - 5 : found].max(1).mean())
    assert not len(fed.watch.walls(newest)[1])


@pytest.mark.parametrize("start", [0, 120])
def test_a_slow_rank_of_four_is_named(start: int) -> None:
    """Compared with the others, and, where it was well before, with its own past."""
    mesh = Mesh(4, per_node=4)
    rng = np.random.default_rng(5)
    own = 0.02 * np.exp(0.1 * rng.standard_normal((240, 4)))
    own[start:, 2] += 0.02
    fed = Fed()
    found = run_steps(fed, mesh, own)
    assert told(fed.opened) == [("slow rank", ("2",))]
    # It is as old as the sixty steps by which it was judged: `Fed` tells steps of that length.
    walls = 1.1 * own.max(1)
    assert fed.opened[0].latency_s == pytest.approx(walls[:found][-60:].sum())


def test_a_machine_that_is_loaded_makes_nobody_of_four_slow() -> None:
    """Pauses of half a step, more of them from the middle on, now of this rank, now of that."""
    mesh = Mesh(4, per_node=4)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        own = 0.02 * np.exp(0.2 * rng.standard_normal((200, 4)))
        share = np.where(np.arange(200) < 100, 0.1, 0.5)[:, None]
        own += np.where(rng.random((200, 4)) < share, 0.03 * rng.random((200, 4)), 0.0)
        own[150:] *= 1.7
        fed = Fed()
        run_steps(fed, mesh, own)
        assert fed.opened == []


def test_what_is_slow_by_a_little_of_a_long_step_is_not_told() -> None:
    mesh = Mesh(4, per_node=4)
    rng = np.random.default_rng(5)
    own = 0.0005 * np.exp(0.1 * rng.standard_normal((120, 4)))
    own[:, 0] *= 3  # rank 0 writes the log
    fed = Fed()
    run_steps(fed, mesh, own)
    assert fed.opened == []


def test_a_restart_begins_anew_with_what_is_usual() -> None:
    mesh = Mesh(4, per_node=4)
    rng = np.random.default_rng(5)
    fed = Fed()
    run_steps(fed, mesh, 0.02 * np.exp(0.05 * rng.standard_normal((120, 4))))
    fed.notes = {r: RankNote(generation=1) for r in range(4)}
    own = 0.04 * np.exp(0.05 * rng.standard_normal((120, 4)))
    run_steps(fed, mesh, own, first=60)
    assert fed.opened == []


def test_steps_that_take_longer_while_nobody_is_slow_have_links_probed() -> None:
    mesh = Mesh(32)
    rng = np.random.default_rng(5)
    own = 0.02 * np.exp(0.02 * rng.standard_normal((100, 32)))
    for longer in (False, True):
        fed = Fed()
        fed.agents = {f"n{k}": AgentState(address=f"h{k}:1") for k in range(mesh.nodes)}
        wall = np.full((100, 1), 0.03)
        wall[70:] *= 2 if longer else 1
        asked = []
        for k in range(0, 100, 5):
            fed.tell(mesh, own[k : k + 5], k, wall[k : k + 5])
            for node in fed.agents:
                asked += fed.watch.orders(f"{node}-a", fed.now).probes
        assert bool(asked) == longer
        assert fed.opened == []
