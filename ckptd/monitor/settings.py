"""`WatchSettings`: settings of the watch and their defaults: period, confirmation, silence, budget.

In it: how one is changed by name (``--set``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from ckptd.errors import UsageError
from ckptd.monitor.job import Phase
from ckptd.monitor.links import LinkLimits
from ckptd.monitor.report import ReportLimits
from ckptd.monitor.rules.limits import HangLimits
from ckptd.monitor.rules.slow import SlowLimits
from ckptd.monitor.verdict import VerdictKind

ACTIONS = ("log", "ask", "act")
"""Actions that a policy may ask for."""


@dataclass(frozen=True)
class IsolationBudget:
    """How much may be acted on without a person.

    Attributes
    ----------
    per_hour
        Isolations in any 3600 s.
    share
        Share of the job's nodes isolated in all; one node is always allowed.
    """

    per_hour: int = 2
    share: float = 0.02


@dataclass(frozen=True)
class WatchSettings:
    """Settings of a watch; times in seconds.

    Attributes
    ----------
    period_s
        Between rounds, and between the reports of an agent.
    per_source_s, per_rank_s
        Time of the daemon that a report, and a rank in it, may cost: with many of them, each agent
        sends less often and rounds are rarer.
    limits, slow, links, sheets
        Of the parts.
    confirm
        Rounds in a row that a verdict must hold before it becomes an incident; a crash, and a
        mismatch with a majority, need one.
    close_s
        An incident that no round shows for so long is closed.
    settle_s
        After its start the watch opens no incident of what needs time to be known.
    silent_s
        Without a report for so long, an agent is silent: its ranks do not report.
    forget_s
        An agent that has sent nothing for this long is forgotten.
    wait_s
        A process that ended successfully is missed when others wait for it for so long.
    consequences_s
        Ends of processes so soon after a crash are its consequences.
    probe_s
        Between two rounds of probes for the same reason.
    probe_peers
        Nodes that each node probes at first.
    policy
        ``log``, ``ask`` or ``act``, by class of incident; ``log`` for those not named.
    budget
        Of what is acted on.
    kept
        Closed incidents that are remembered.
    """

    period_s: float = 0.25
    per_source_s: float = 0.004
    per_rank_s: float = 4e-5
    limits: HangLimits = field(default_factory=HangLimits)
    slow: SlowLimits = field(default_factory=SlowLimits)
    links: LinkLimits = field(default_factory=lambda: LinkLimits(noise_s=5e-4))
    sheets: ReportLimits = field(default_factory=ReportLimits)
    confirm: int = 2
    close_s: float = 15.0
    settle_s: float = 5.0
    silent_s: float = 5.0
    forget_s: float = 600.0
    wait_s: float = 2.0
    consequences_s: float = 60.0
    probe_s: float = 60.0
    probe_peers: int = 8
    policy: dict[VerdictKind, str] = field(default_factory=dict)
    budget: IsolationBudget = field(default_factory=IsolationBudget)
    kept: int = 1000


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings that `changed` knows."""
    plain = [name for name, value in _numbers(WatchSettings())]
    floors = [f"floor.{phase.name.lower()}" for phase in Phase]
    return tuple(sorted([*plain, *floors, *(f"policy.{_word(kind)}" for kind in VerdictKind)]))


def changed(settings: WatchSettings, assignment: str) -> WatchSettings:
    """Return `settings` with one of them changed.

    Parameters
    ----------
    settings
        What it was.
    assignment
        ``NAME=VALUE``: ``floor.train=5``, ``confirm=1``, ``slow.ratio=1.2``,
        ``policy.crash=ask``; see `setting_names`.

    Raises
    ------
    UsageError
        There is no such setting, or that is no value of it.
    """
    name, _, text = assignment.partition("=")
    group, _, rest = name.partition(".")
    if name not in setting_names():
        raise _bad(assignment, "NAME=VALUE with the name of a setting")
    if group == "policy":
        if text not in ACTIONS:
            raise _bad(assignment, " or ".join(ACTIONS))
        kind = next(kind for kind in VerdictKind if _word(kind) == rest)
        return replace(settings, policy={**settings.policy, kind: text})
    if group == "floor":
        floors = {**settings.limits.floors, Phase[rest.upper()]: _number(assignment, text, 0.0)}
        return replace(settings, limits=replace(settings.limits, floors=floors))
    if not rest:
        return replace(settings, **{name: _number(assignment, text, getattr(settings, name))})
    part = getattr(settings, group)
    value = _number(assignment, text, getattr(part, rest))
    return replace(settings, **{group: replace(part, **{rest: value})})


def _numbers(settings: Any) -> list[tuple[str, Any]]:
    out = []
    for one in fields(settings):
        value = getattr(settings, one.name)
        if isinstance(value, int | float):
            out.append((one.name, value))
        elif is_dataclass(value):
            out += [(f"{one.name}.{name}", deep) for name, deep in _numbers(value)]
    return out


def _word(kind: VerdictKind) -> str:
    return kind.value.replace(" ", "-")


def _number(assignment: str, text: str, before: float) -> Any:
    try:
        value = int(text) if isinstance(before, int) else float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e9:
        raise _bad(assignment, "a number from 0")
    return value


def _bad(assignment: str, wanted: str) -> UsageError:
    return UsageError(
        "invalid setting",
        wanted=wanted,
        found=assignment,
        hint=f"settings are {', '.join(setting_names())}",
    )
