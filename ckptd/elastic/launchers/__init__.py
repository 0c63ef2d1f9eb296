"""What starts workers on a node, and what a plugin that starts nodes may use.

The names are imported on first use: a command line that only prints its help pays for none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.elastic.launchers.base import Command, Hint, Launcher, Machine, MachineState
    from ckptd.elastic.operator import OperatorLink
    from ckptd.elastic.places import open_places
    from ckptd.elastic.supervisor import Outcome, Supervisor
    from ckptd.elastic.wire import EXIT_CODES, exit_code
    from ckptd.monitor.signing import SECRET_VARIABLE, check_folder, secret_of
    from ckptd.net.address import Address, parse_address

__all__ = [
    "EXIT_CODES",
    "SECRET_VARIABLE",
    "Address",
    "Command",
    "Hint",
    "Launcher",
    "Machine",
    "MachineState",
    "OperatorLink",
    "Outcome",
    "Supervisor",
    "check_folder",
    "exit_code",
    "open_places",
    "parse_address",
    "secret_of",
]

_MODULES = {
    "elastic.launchers.base": ("Command", "Hint", "Launcher", "Machine", "MachineState"),
    "elastic.operator": ("OperatorLink",),
    "elastic.places": ("open_places",),
    "elastic.supervisor": ("Outcome", "Supervisor"),
    "elastic.wire": ("EXIT_CODES", "exit_code"),
    "monitor.signing": ("SECRET_VARIABLE", "check_folder", "secret_of"),
    "net.address": ("Address", "parse_address"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"ckptd.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
