"""Attaches the recorder as the process joins its first process group.

A module of its own, which imports nothing of the recorder: a program that imports ckptd before
PyTorch has the recorder's modules half loaded when PyTorch calls `ckptd.monitor.injection`.
"""

from __future__ import annotations

import importlib
import logging
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_log = logging.getLogger("ckptd.monitor")


def attach_when_joined() -> None:
    """Attach the recorder right after `init_process_group`; it is imported only then.

    Never raises then: what is wrong is logged, and the program runs unwatched.
    """
    join = distributed_c10d.init_process_group

    @wraps(join)
    def joined(*args: Any, **more: Any) -> None:
        join(*args, **more)
        try:
            recorder = importlib.import_module("ckptd.monitor.torch.recorder.recorder")
            if recorder.wanted():
                recorder.attach()
        except Exception as error:  # noqa: BLE001 - the watched program must not notice
            _log.warning("collectives are not recorded: %r", error, exc_info=error)

    distributed_c10d.init_process_group = joined
    dist.init_process_group = joined
