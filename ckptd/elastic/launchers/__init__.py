"""What starts workers on a node, and what a plugin that starts nodes may use.

The names are imported on first use: a command line that only prints its help pays for none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.elastic.launchers.base import Command, Hint, Launcher, Machine, MachineState
    from ckptd.elastic.launchers.node import NO_ORDER
    from ckptd.elastic.launchers.nodename import claim_name
    from ckptd.elastic.launchers.sidecars import CKPTD, ControllerSupervisor
    from ckptd.elastic.lease import LeaseFile
    from ckptd.elastic.link import NodeLink, OperatorLink
    from ckptd.elastic.messages import Ended, Fenced, Left, Loaded, NodeUp, Progress, Saved
    from ckptd.elastic.places import open_places
    from ckptd.elastic.supervisor import Outcome, Supervisor
    from ckptd.elastic.wire import (
        EXIT_CODES,
        Begin,
        Bye,
        FenceNow,
        Hosting,
        SaidEvent,
        SaveNow,
        StoreAt,
        Timed,
        ToNode,
        exit_code,
    )
    from ckptd.elastic.workerend import LauncherEnd, WorkerEnd
    from ckptd.elastic.workerwire import (
        LAUNCHER_VARIABLE,
        LEASE_VARIABLE,
        Attach,
        Committed,
        FromWorker,
        Mark,
        SavedNow,
        SaveSoon,
        StateLoaded,
        Welcome,
    )
    from ckptd.net.address import Address, is_here, parse_address
    from ckptd.net.signing import SECRET_VARIABLE, check_folder, job_secret, secret_of
    from ckptd.runtime.agentlink import run_folder
    from ckptd.runtime.host import address_towards

__all__ = [
    "CKPTD",
    "EXIT_CODES",
    "LAUNCHER_VARIABLE",
    "LEASE_VARIABLE",
    "NO_ORDER",
    "SECRET_VARIABLE",
    "Address",
    "Attach",
    "Begin",
    "Bye",
    "Command",
    "Committed",
    "ControllerSupervisor",
    "Ended",
    "FenceNow",
    "Fenced",
    "FromWorker",
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
    "NodeUp",
    "OperatorLink",
    "Outcome",
    "Progress",
    "SaidEvent",
    "SaveNow",
    "SaveSoon",
    "Saved",
    "SavedNow",
    "StateLoaded",
    "StoreAt",
    "Supervisor",
    "Timed",
    "ToNode",
    "Welcome",
    "WorkerEnd",
    "address_towards",
    "check_folder",
    "claim_name",
    "exit_code",
    "is_here",
    "job_secret",
    "open_places",
    "parse_address",
    "run_folder",
    "secret_of",
]

_MODULES = {
    "runtime.host": ("address_towards",),
    "elastic.launchers.node": ("NO_ORDER",),
    "elastic.launchers.nodename": ("claim_name",),
    "elastic.launchers.sidecars": (
        "CKPTD",
        "ControllerSupervisor",
    ),
    "elastic.launchers.base": (
        "Command",
        "Hint",
        "Launcher",
        "Machine",
        "MachineState",
    ),
    "elastic.lease": ("LeaseFile",),
    "elastic.link": (
        "NodeLink",
        "OperatorLink",
    ),
    "elastic.messages": (
        "Ended",
        "Fenced",
        "Left",
        "Loaded",
        "NodeUp",
        "Progress",
        "Saved",
    ),
    "elastic.places": ("open_places",),
    "elastic.supervisor": (
        "Outcome",
        "Supervisor",
    ),
    "elastic.wire": (
        "Begin",
        "Bye",
        "EXIT_CODES",
        "FenceNow",
        "Hosting",
        "SaidEvent",
        "SaveNow",
        "StoreAt",
        "Timed",
        "ToNode",
        "exit_code",
    ),
    "elastic.workerend": (
        "LauncherEnd",
        "WorkerEnd",
    ),
    "elastic.workerwire": (
        "Attach",
        "Committed",
        "FromWorker",
        "LAUNCHER_VARIABLE",
        "LEASE_VARIABLE",
        "Mark",
        "SaveSoon",
        "SavedNow",
        "StateLoaded",
        "Welcome",
    ),
    "net.signing": (
        "SECRET_VARIABLE",
        "check_folder",
        "job_secret",
        "secret_of",
    ),
    "net.address": (
        "Address",
        "is_here",
        "parse_address",
    ),
    "runtime.agentlink": ("run_folder",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"ckptd.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
