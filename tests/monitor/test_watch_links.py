"""Links that are probed because communication stands still."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.monitor.job import Phase, RankView
from ckptd.monitor.report import AgentState, EvidenceReport, ProbeResult
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.verdict import VerdictKind
from tests.monitor.jobs import inside
from tests.monitor.watched import JOB, Fed


def answer_probes(fed: Fed, nodes: list[str], seconds: float) -> None:
    for node in nodes:
        for probe in fed.watch.orders(f"{node}-a", fed.now).probes:
            error = "" if np.isfinite(seconds) else "timed out"
            answer = ProbeResult(
                nonce=probe.nonce, src=node, dst=probe.to_node, seconds=seconds, error=error
            )
            found = EvidenceReport(
                job=JOB, source=f"{node}-a", number=probe.nonce, probes=(answer,)
            )
            fed.watch.take_found(found, fed.now)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1e-3, "probes show no link slower than others"), (np.inf, "no probe came back")],
)
def test_probes_are_evidence_of_the_hang_for_which_they_were_made(
    seconds: float, words: str
) -> None:
    fed = Fed(WatchSettings(limits=HangLimits(floors=dict.fromkeys(Phase, 1.0))))
    nodes = [f"n{r}" for r in range(4)]
    fed.agents = {node: AgentState(address=f"{node}:1") for node in nodes}

    def at(seq: int, age: float) -> list[RankView]:
        return [inside(r, 5, seq, age=age, size=4, node=nodes[r]) for r in range(4)]

    fed.settle(at(9, 0.1))
    for k in range(40):
        fed.show(at(9, 2.0 + 0.25 * k))
        answer_probes(fed, nodes, seconds)
    (first,) = fed.watch.incidents
    assert first.kind == VerdictKind.COMM_HANG
    assert any(line.startswith(words) for line in first.verdict.evidence)
    for k in range(300):  # 75 s in which no problems found
        fed.show(at(10 + k, 0.1))
    fed.show(at(400, 2.0), rounds=2)
    assert len(fed.opened) == 2
    assert not any("probe" in line for line in fed.opened[1].verdict.evidence)
