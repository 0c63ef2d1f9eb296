"""Crashes: ranks whose process ended, exit codes and signals, silent nodes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np

from ckptd.monitor.job import NO_EXIT, CallFlag, JobView, Phase
from ckptd.monitor.rules.giveup import given_up
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.rules.naming import rank_suspects
from ckptd.monitor.stats import Array
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind


def ended(job: JobView) -> Array:
    """Return which ranks ended otherwise than a job that is done does."""
    ranks = job.ranks
    well = (ranks["exit_code"] == 0) & (ranks["phase"] == Phase.EXIT)
    gone: Array = ~ranks["alive"] & ~well
    return gone


def singled_out(ranks: Array) -> Array:
    """Return which of these rows of `RANK` ended by a signal that no other rank was sent."""
    out: Array = ~ranks["alive"] & (ranks["exit_code"] < 0) & (ranks["answers"] == 1)
    return out


def crashes(job: JobView, limits: HangLimits) -> Iterator[Verdict]:
    """Yield a verdict for all crashed ranks, and one for each silent node.

    A rank that a signal ended is a cause, and so is one that left with exit code 0 while its groups
    still called; one that ended with an error beside it most likely lost its peer, and is reported
    as a consequence. So is one whose call failed or did not return, beside one that was in none,
    and one that its launcher ended since another rank had ended: one that SIGTERM ended is that,
    unless its agent saw that it alone was sent it. Where all have followed, and a backend gave up a
    call after its time-out, the cause is the rank waited for. A rank whose call failed may end
    in any way: some programs leave with 0 then, and C++ aborts.
    """
    gone = np.flatnonzero(ended(job))
    if len(gone):
        yield _ranks(job, gone)
    for agent in job.agents:
        if agent.missed >= limits.missed_beats and agent.reachable is False:
            yield _node(agent.node, agent.missed)


def _ranks(job: JobView, gone: Array) -> Verdict:
    codes = job.ranks["exit_code"][gone]
    killed = (codes < 0) & (codes != NO_EXIT)
    first, sure = _causes(job, gone, codes)
    # Of several, the one that stood still first is the likelier cause.
    first = first[np.argsort(-job.ranks["idle"][first], kind="stable")]
    unknown = codes == NO_EXIT
    before = None if sure else given_up(job)
    return Verdict(
        kind=VerdictKind.CRASH,
        suspects=before.suspects
        if before is not None
        else rank_suspects(job, first, 1.0, [_how(job, i) for i in first]),
        evidence=(
            *(before.evidence if before is not None else ()),
            f"{len(gone)} of {job.world} processes ended, {int(killed.sum())} by a signal",
            *(f"rank {job.ranks['rank'][i]}: {_how(job, i)}" for i in gone[:8]),
        ),
        rules_out=("a hang: the process is gone, by its pidfd",),
        refuted_by="the process id still runs on its node",
        action="restart; isolate the node if its hardware reports a fault or it happens again",
        numbers={
            "ended": len(gone),
            "by signal": int(killed.sum()),
            "exit code unknown": int(unknown.sum()),
            **({"age s": before.waited_s, "engine s": before.timeout_s} if before else {}),
        },
        place=before.place if before is not None else "",
    )


def _causes(job: JobView, gone: Array, codes: Array) -> tuple[Array, bool]:
    """Return those of `gone` that did not only follow another, and whether that is sure."""
    swept = (codes == -signal.SIGTERM) & ~singled_out(job.ranks[gone])
    killed = (codes < 0) & (codes != NO_EXIT) & ~swept
    # What C++ does with an error, of another's call perhaps.
    hit = killed & (codes != -signal.SIGABRT)
    calls = job.calls
    lost = ((calls["flags"] & CallFlag.FAILED) != 0) | np.isnan(calls["end"])
    failed = np.isin(gone, calls["row"][lost])
    well = codes == 0
    sure = (hit, well & ~failed, killed & ~failed, ~swept & ~failed)
    for number, cause in enumerate((*sure, well, killed, ~swept)):
        if cause.any():
            return gone[cause], number < len(sure)
    return gone, False


def _how(job: JobView, row: int) -> str:
    code = int(job.ranks["exit_code"][row])
    if code == NO_EXIT:
        return "ended, cause unknown"
    if code == 0:
        return "exited with code 0 while its groups still ran collectives"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _node(node: str, missed: int) -> Verdict:
    return Verdict(
        kind=VerdictKind.CRASH,
        suspects=(Suspect(SuspectKind.NODE, node, 0.9, "silent and not reachable"),),
        evidence=(f"its agent missed {missed} beats", "a peer could not reach the node"),
        rules_out=("a crash of the agent alone: the node does not answer a peer either",),
        refuted_by="the node answers a peer, or its agent beats again",
        action="restart without the node; isolate it if it stays silent",
        numbers={"missed beats": missed},
    )
