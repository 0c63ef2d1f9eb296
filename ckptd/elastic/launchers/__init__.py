"""Launchers: starting workers on a node; public names for plugins of schedulers.

The names are imported on first use: a command line that only prints its help pays for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.parts import front

if TYPE_CHECKING:
    from ckptd.base.net.address import Address, is_here, is_loopback, parse_address
    from ckptd.base.net.handed import KEPT_FROM_RANKS, AskProof, HandedProof
    from ckptd.base.net.signing import SECRET_VARIABLE, check_folder, job_secret, secret_of
    from ckptd.base.net.tls import hand
    from ckptd.base.runtime.agentlink import run_folder
    from ckptd.base.runtime.host import address_towards
    from ckptd.base.runtime.launched import LAUNCHER_VARIABLE
    from ckptd.elastic.launchers.base import Command, Hint, Launcher, Machine, MachineState
    from ckptd.elastic.launchers.nodename import claim_name
    from ckptd.elastic.launchers.nodestate import NodeState
    from ckptd.elastic.launchers.progress import NodeProgress
    from ckptd.elastic.launchers.sidecars import CKPTD, ControllerSupervisor
    from ckptd.elastic.lease import LeaseFile
    from ckptd.elastic.link import NodeLink
    from ckptd.elastic.messages import (
        EXIT_CODES,
        LEASE_VARIABLE,
        Attach,
        Begin,
        Ended,
        FenceNow,
        FromWorker,
        Hosting,
        Left,
        Loaded,
        Mark,
        NodeUp,
        Progress,
        SaidEvent,
        Saved,
        SaveNow,
        Shutdown,
        StoreAt,
        Tell,
        Timed,
        ToNode,
        Welcome,
        exit_code,
    )
    from ckptd.elastic.operator import OperatorLink
    from ckptd.elastic.places import open_places
    from ckptd.elastic.supervisor import Outcome, Supervisor
    from ckptd.elastic.workerend import LauncherEnd, WorkerEnd

__all__ = [
    "CKPTD",
    "EXIT_CODES",
    "KEPT_FROM_RANKS",
    "LAUNCHER_VARIABLE",
    "LEASE_VARIABLE",
    "SECRET_VARIABLE",
    "Address",
    "AskProof",
    "Attach",
    "Begin",
    "Command",
    "ControllerSupervisor",
    "Ended",
    "FenceNow",
    "FromWorker",
    "HandedProof",
    "Hint",
    "Hosting",
    "Launcher",
    "LauncherEnd",
    "LeaseFile",
    "Left",
    "Loaded",
    "Machine",
    "MachineState",
    "Mark",
    "NodeLink",
    "NodeProgress",
    "NodeState",
    "NodeUp",
    "OperatorLink",
    "Outcome",
    "Progress",
    "SaidEvent",
    "SaveNow",
    "Saved",
    "Shutdown",
    "StoreAt",
    "Supervisor",
    "Tell",
    "Timed",
    "ToNode",
    "Welcome",
    "WorkerEnd",
    "address_towards",
    "check_folder",
    "claim_name",
    "exit_code",
    "hand",
    "is_here",
    "is_loopback",
    "job_secret",
    "open_places",
    "parse_address",
    "run_folder",
    "secret_of",
]

_MODULES = {
    "elastic.launchers.base": ("Command", "Hint", "Launcher", "Machine", "MachineState"),
    "elastic.launchers.nodename": ("claim_name",),
    "elastic.launchers.nodestate": ("NodeState",),
    "elastic.launchers.progress": ("NodeProgress",),
    "elastic.launchers.sidecars": ("CKPTD", "ControllerSupervisor"),
    "elastic.lease": ("LeaseFile",),
    "elastic.link": ("NodeLink",),
    "elastic.operator": ("OperatorLink",),
    "elastic.places": ("open_places",),
    "elastic.supervisor": ("Outcome", "Supervisor"),
    "elastic.workerend": ("LauncherEnd", "WorkerEnd"),
    "base.net.address": ("Address", "is_here", "is_loopback", "parse_address"),
    "base.net.handed": ("KEPT_FROM_RANKS", "AskProof", "HandedProof"),
    "base.net.tls": ("hand",),
    "base.net.signing": ("SECRET_VARIABLE", "check_folder", "job_secret", "secret_of"),
    "base.runtime.agentlink": ("run_folder",),
    "base.runtime.host": ("address_towards",),
    "base.runtime.launched": ("LAUNCHER_VARIABLE",),
}
_HOMES = dict.fromkeys(__all__, "elastic.messages")
_HOMES |= {name: module for module, names in _MODULES.items() for name in names}

__getattr__ = front(__name__, {name: f"ckptd.{home}" for name, home in _HOMES.items()})
