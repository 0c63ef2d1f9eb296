from __future__ import annotations

from typing import Any

import pytest

from ckptd.monitor import sources
from ckptd.monitor.report import AgentState, GroupInfo, NodeReport, from_views
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.sources import ReportSources
from tests.monitor.jobs import view


def sheet(
    source: str,
    number: int = 0,
    node: str = "n0",
    ranks: int = 1,
    address: str = "",
    **other: Any,
) -> NodeReport:
    views = [view(r, node=node) for r in range(ranks)]
    state = AgentState(address=address or f"{node}:1")
    return from_views(views, job="j", source=source, number=number, agents={node: state}, **other)


def test_a_source_is_silent_after_a_while_and_heard_again_at_once() -> None:
    s = ReportSources(WatchSettings(silent_s=5.0))
    s.take(sheet("a"), 0.0)
    assert len(s.recent(5.0)) == 1
    assert s.recent(5.1) == []
    (agent,) = s.agents(6.0)
    assert (agent.node, agent.silent, agent.age_s) == ("n0", True, 6.0)
    assert agent.missed >= 20
    s.take(sheet("a", 1), 7.0)
    assert len(s.recent(7.0)) == 1
    assert not s.agents(7.0)[0].silent


def test_another_life_of_an_agent_takes_the_place_of_one_that_is_quiet() -> None:
    s = ReportSources(WatchSettings())
    s.take(sheet("a"), 0.0)
    s.take(sheet("b"), 0.1)
    assert set(s.by_name) == {"a", "b"}  # two agents of one node: both are heard
    s.take(sheet("c"), 10.0)
    assert set(s.by_name) == {"c"}


@pytest.mark.parametrize("loopback", ["127.0.0.1:5", "127.0.1.1:5", "localhost:5", "[::1]:5"])
def test_where_others_find_only_themselves_nobody_is_probed(loopback: str) -> None:
    s = ReportSources(WatchSettings())
    s.take(sheet("a", address=loopback), 0.0)
    assert s.addresses() == {"n0": loopback}  # all nodes are on one machine, perhaps
    s.take(sheet("b", node="n1", address="[fe80::1]:5"), 0.0)
    assert s.addresses() == {"n1": "[fe80::1]:5"}


def test_of_a_node_that_two_tell_the_newer_word_counts() -> None:
    s = ReportSources(WatchSettings())
    s.take(sheet("a"), 0.0)
    s.take(sheet("b"), 0.2)
    (agent,) = s.agents(0.3)
    assert agent.source == "b"


def test_who_was_silent_for_long_is_forgotten() -> None:
    s = ReportSources(WatchSettings(forget_s=100.0))
    s.take(sheet("a"), 0.0)
    s.take(sheet("b", node="n1"), 50.0)
    assert set(s.by_name) == {"a", "b"}
    s.take(sheet("c", node="n2"), 120.0)
    assert set(s.by_name) == {"b", "c"}
    assert set(s.addresses()) == {"n1", "n2"}


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_SOURCES", 3)
    s = ReportSources(WatchSettings())
    for k in range(6):
        s.take(sheet(f"s{k}", node=f"n{k}"), float(k) / 100)
    assert set(s.by_name) == {"s3", "s4", "s5"}


def test_the_period_follows_what_is_sent() -> None:
    s = ReportSources(WatchSettings(period_s=0.25, per_source_s=0.1, per_rank_s=0.1))
    s.take(sheet("a", ranks=2), 0.0)
    assert s.period_s == 0.25
    s.take(sheet("a", 1, ranks=4), 1.0)
    assert s.period_s == pytest.approx(0.4)
    s.take(sheet("b", node="n1", ranks=1), 1.0)
    assert s.period_s == pytest.approx(0.5)
    s.take(sheet("a", 2, ranks=0), 2.0)
    assert s.period_s == 0.25


def test_what_groups_are_is_kept_when_sheets_do_not_say() -> None:
    s = ReportSources(WatchSettings())
    s.take(sheet("a", members={5: GroupInfo.of((0, 2), "x", "dp")}, texts={1: "op"}), 0.0)
    s.take(sheet("a", 1), 1.0)
    assert tuple(s.members[5]) == (0, 2)
    assert (s.names[5].kind, s.texts[1]) == ("dp", "op")
    assert s.by_name["a"].named


def test_on_which_silent_nodes_ranks_ran() -> None:
    s = ReportSources(WatchSettings())
    s.take(sheet("a"), 0.0)
    s.take(sheet("b", node="n1", ranks=0), 0.0)
    assert s.running(["n0", "n1", "n7"]) == {"n0"}
    assert s.running([]) == set()
