"""Accelerators without a driver: table of device files (``/dev/nvidia0`` ...) by vendor."""

from __future__ import annotations

import glob
from typing import NamedTuple


class DeviceFiles(NamedTuple):
    """The device files of one kind of accelerator.

    Attributes
    ----------
    kind
        Name for people.
    prefixes
        With which their paths begin. A process that has one of them open has the device.
    cards
        Pattern of the files of single accelerators; empty where other devices have such files too.
    """

    kind: str
    prefixes: tuple[str, ...]
    cards: str


DEVICE_FILES = (
    DeviceFiles("NVIDIA", ("/dev/nvidia",), "/dev/nvidia[0-9]*"),
    DeviceFiles("AMD", ("/dev/kfd",), "/dev/kfd"),
    # Intel's and AMD's, and those of displays.
    DeviceFiles("DRM", ("/dev/dri/",), ""),
    # The kernel's class of accelerators without a display: Gaudi and others.
    DeviceFiles("accel", ("/dev/accel",), "/dev/accel/accel[0-9]*"),
    DeviceFiles(
        "Ascend", ("/dev/davinci", "/dev/devmm_svm", "/dev/hisi_hdc"), "/dev/davinci[0-9]*"
    ),
    DeviceFiles("Neuron", ("/dev/neuron",), "/dev/neuron[0-9]*"),
    DeviceFiles("Cambricon", ("/dev/cambricon",), "/dev/cambricon_dev[0-9]*"),
)


_RENDER = "/dev/dri/renderD[0-9]*"


def device_file(path: str) -> bool:
    """Return whether a path is that of an accelerator's device file."""
    return any(path.startswith(files.prefixes) for files in DEVICE_FILES)


def accelerators_here() -> tuple[str, ...]:
    """Return the kinds of accelerators that this machine, or container, surely has."""
    return tuple(f.kind for f in DEVICE_FILES if f.cards and glob.glob(f.cards))


def gpus_here() -> int:
    """Return the number of GPUs of NVIDIA or AMD that this machine, or container, has files of."""
    files = {f.kind: glob.glob(f.cards) for f in DEVICE_FILES if f.cards}
    # AMD's have one file in common, and one each among those of displays.
    return len(files["NVIDIA"]) or (len(glob.glob(_RENDER)) if files["AMD"] else 0)
