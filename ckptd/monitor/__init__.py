"""Communicator health: which rank, node or link is at fault; public names of the slice.

What a training program uses of it needs torch. The rest is for other packages that show ranks to
the diagnosis. All of it is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.monitor.agent.health import HealthSource
    from ckptd.monitor.job import CALL, GROUP, CallFlag, Phase, RankView, join
    from ckptd.monitor.report import Sign
    from ckptd.monitor.ring import text_hash
    from ckptd.monitor.rules.diagnose import diagnose
    from ckptd.monitor.rules.limits import HangLimits
    from ckptd.monitor.torch.recorder.recorder import attach, detach, phase, step
    from ckptd.monitor.torch.recorder.replicas import check_replicas, watch_gradients
    from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind

__all__ = [
    "CALL",
    "GROUP",
    "CallFlag",
    "HangLimits",
    "HealthSource",
    "Phase",
    "RankView",
    "Sign",
    "Suspect",
    "SuspectKind",
    "Verdict",
    "VerdictKind",
    "attach",
    "check_replicas",
    "detach",
    "diagnose",
    "join",
    "phase",
    "step",
    "text_hash",
    "watch_gradients",
]

_MODULES = {
    "monitor.agent.health": ("HealthSource",),
    "monitor.job": ("CALL", "GROUP", "CallFlag", "Phase", "RankView", "join"),
    "monitor.report": ("Sign",),
    "monitor.ring": ("text_hash",),
    "monitor.rules.diagnose": ("diagnose",),
    "monitor.rules.limits": ("HangLimits",),
    "monitor.verdict": ("Suspect", "SuspectKind", "Verdict", "VerdictKind"),
    "monitor.torch.recorder.recorder": ("attach", "detach", "phase", "step"),
    "monitor.torch.recorder.replicas": ("check_replicas", "watch_gradients"),
}


__getattr__ = front(__name__, {n: f"ckptd.{m}" for m, names in _MODULES.items() for n in names})
