"""Parts: what a slice uses of one above it, by a table of names; late imports.

The slice that uses a part owns its protocol; the slice that is the part has the name. Both
have one version. An entry point would cost a scan of what is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PARTS", "front", "part"]

PARTS = {
    "cluster": "ckptd.monitor.cli.cluster:doctor_cluster",
    "foreign": "ckptd.readers.find:FORMATS",
    "layouts": "ckptd.reshard.torch.layout.job:LAYOUTS",
    "job": "ckptd.elastic.torch.session.elastichooks:JOB",
    "recorder": "ckptd.monitor.torch.recorder.recorder:attach_now",
    "recovery": "ckptd.elastic.nccl:recovery_rows",
    "run-words": "ckptd.elastic.cli.run:separated",
    "watch": "ckptd.monitor.cli.beside:WATCH",
    "watching": "ckptd.monitor.agent.watched:beside_agent",
}
"""Implementation of each part: ``module:attribute``."""


def part(name: str) -> Any:
    """Import a part of another slice, when it is used and not before."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def front(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that imports each of its names on first use.

    Parameters
    ----------
    homes
        The module of each name.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        vars(sys.modules[package])[name] = value
        return value

    return find
