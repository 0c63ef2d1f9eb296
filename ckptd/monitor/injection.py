"""Recorder in ranks without an edit of the program: ``torch.backends`` entry on ``PYTHONPATH``.

``import torch`` loads whatever is registered as a device backend under the entry points
``torch.backends``. A folder on ``PYTHONPATH`` with the metadata of such a package makes every rank
attach its recorder there and then, without a ``sitecustomize``, which may exist already.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

SWITCH = "CKPTD_MONITOR"
"""Set to ``1`` in the ranks that are to be watched."""

_log = logging.getLogger("ckptd.monitor")
_MODULE = "_ckptd_monitor_injection"
_METADATA = "Metadata-Version: 2.1\nName: ckptd-monitor-injection\nVersion: 0\n"
_ENTRY = f"[torch.backends]\nckptd_monitor = {_MODULE}:autoload\n"
# torch raises whatever an entry point raises. A program whose Python has no ckptd, or whose folder
# shadows it, is to run all the same.
_SOURCE = """\
def autoload():
    try:
        from ckptd.monitor.injection import autoload
    except Exception as error:
        import logging
        logging.getLogger("ckptd.monitor").warning("collectives are not recorded: %r", error)
    else:
        autoload()
"""


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks started with them record themselves.

    Parameters
    ----------
    folder
        Where the metadata is written; it must stay while ranks start.
    base
        The environment that the ranks would have; its ``PYTHONPATH`` is kept behind ours.

    Returns
    -------
    dict
        Only what is to be set or changed. A rank that turns off ``TORCH_DEVICE_BACKEND_AUTOLOAD``
        is not watched.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    place = folder / "ckptd_monitor_injection-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(_METADATA)
    (place / "entry_points.txt").write_text(_ENTRY)
    (folder / f"{_MODULE}.py").write_text(_SOURCE)
    before = base.get("PYTHONPATH")
    return {SWITCH: "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), before)))}


def autoload() -> None:
    """Attach the recorder, now or when the process joins a group. Called by ``import torch``.

    Never raises: what is wrong is logged, and the program runs unwatched.
    """
    _guard()
    attach_now()


def attach_now() -> None:
    """Attach the recorder if this process is to be watched; never raises, and harmless again."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        if _importing():
            importlib.import_module("ckptd.monitor.torch.recorder.joining").attach_when_joined()
        else:
            importlib.import_module("ckptd.monitor.torch.recorder.recorder").attach_when_known()
    except Exception as error:  # noqa: BLE001 - the watched program must not notice
        _log.warning("collectives are not recorded: %r", error, exc_info=error)


def _guard() -> None:
    """Where a launcher leases the node to its ranks, let no optimizer step without the lease."""
    if os.environ.get("CKPTD_LEASE") and not _importing():
        try:
            importlib.import_module("ckptd.elastic.torch.session.leaseguard").guard_steps()
            # A child of the zygote sees to that itself.
            if "ckptd.elastic.torch.session.zygote_child" not in sys.modules:
                importlib.import_module("ckptd.elastic.exitreport").note_uncaught()
        except Exception as error:  # noqa: BLE001 - the launcher kills late ranks too
            _log.warning("steps are not guarded by the lease: %r", error, exc_info=error)


def _importing() -> bool:
    """Whether it is ckptd itself that imports torch, for a program that uses it.

    Its modules are only half there then, and the recorder has to wait.
    """
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in tuple(sys.modules.items())
        if name.startswith("ckptd.")
    )
