"""Settings of the watch, all in one place, and how a person changes one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.monitor.limits import Limits
from ckptd.monitor.links import LinkLimits
from ckptd.monitor.sheet import SheetLimits
from ckptd.monitor.slow import SlowLimits
from ckptd.monitor.verdict import Kind

__all__ = ["Budget", "WatchSettings"]


@dataclass(frozen=True)
class Budget:
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
        Between rounds, and between the sheets of an agent.
    per_source_s, per_rank_s
        Time of the daemon that a sheet, and a rank in it, may cost: with many of them, each agent
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
        Without a sheet for so long, an agent is silent: its ranks do not report.
    forget_s
        A silent agent of which nothing was heard for so long is forgotten.
    wait_s
        A process that ended in good order is missed when others wait for it for so long.
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
    limits: Limits = field(default_factory=Limits)
    slow: SlowLimits = field(default_factory=SlowLimits)
    links: LinkLimits = field(default_factory=LinkLimits)
    sheets: SheetLimits = field(default_factory=SheetLimits)
    confirm: int = 2
    close_s: float = 15.0
    settle_s: float = 5.0
    silent_s: float = 5.0
    forget_s: float = 600.0
    wait_s: float = 2.0
    consequences_s: float = 60.0
    probe_s: float = 60.0
    probe_peers: int = 8
    policy: dict[Kind, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    kept: int = 1000
