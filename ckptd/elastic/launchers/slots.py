"""`NodeSlots`: devices of a node by slot, CUDA_VISIBLE_DEVICES and its like, failed devices.

In it: which errors are of a device; after how many failures it is out of use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptd.base.runtime.accelerators import accelerators_here, gpus_here

_MOST = 2
_MOST_TEXT = 400
_CHOICES = {
    "NVIDIA": "CUDA_VISIBLE_DEVICES",
    "AMD": "HIP_VISIBLE_DEVICES",
    "Ascend": "ASCEND_RT_VISIBLE_DEVICES",
}
"""By which a process of each kind of device is given some of them."""
_ERROR = re.compile(r"\b(CUDA|HIP|XPU|NPU|ACL) (driver )?error\b|No (CUDA|HIP) GPUs are available")


def is_device_error(text: str) -> bool:
    """Tell whether the words of an exception name a device's failure; a full one has not failed."""
    return _ERROR.search(text) is not None and "out of memory" not in text


class NodeSlots:
    """The slots of one node: slot *n* is the device *n* of those that the launcher was given.

    An error of a device ends the process that meets it, and another process is mostly rid of it:
    the program may be what was wrong. A device that fails a new process as well, before that has
    loaded its state, is taken out of use; the last one is not, since a node without slots is the
    controller's to leave out. Nor is one where more than half of the slots fail new processes: that
    is the program, or the node. It stays out for as long as the launcher lives.

    Parameters
    ----------
    count
        How many there are.
    environ
        Of the launcher: which devices it was given.

    Attributes
    ----------
    in_use
        Numbers of the slots that ranks get; the local rank is the place here.
    out
        Why each of the others is out of use, by number.
    """

    def __init__(self, count: int, environ: Mapping[str, str]) -> None:
        self.in_use = list(range(count))
        self.out: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._failed_new: set[int] = set()
        self._variable, self._devices = _given(count, environ)

    @property
    def sick(self) -> tuple[str, ...]:
        """Sentences for people on the slots that are out of use."""
        return tuple(f"slot {number}: {why}" for number, why in sorted(self.out.items()))

    def of(self, local_rank: int) -> int | None:
        """Return the slot of a process that is made now; None where there are not so many."""
        return self.in_use[local_rank] if local_rank < len(self.in_use) else None

    def failed(self, slot: int, why: str, *, fresh: bool, worked: bool) -> bool:
        """Count a failure of the device of a slot.

        Parameters
        ----------
        slot
            That the process was made for: local ranks may name other slots since.
        fresh
            The process that met it was made for this generation.
        worked
            It had loaded its state, or made a step.

        Returns
        -------
        bool
            Whether the slot is out of use from now on because of it.
        """
        self._failures[slot] = 1 if worked else self._failures.get(slot, 0) + 1
        if worked:
            self._failed_new.discard(slot)
        elif fresh:
            self._failed_new.add(slot)
        sure = fresh and not worked and self._failures[slot] >= _MOST
        most = 2 * len(self._failed_new.intersection(self.in_use)) > len(self.in_use)
        if not sure or most or slot not in self.in_use or not self._devices:
            return False
        self.in_use.remove(slot)
        self.out[slot] = why[:_MOST_TEXT]
        return True

    def environ(self) -> dict[str, str]:
        """Return what lets a process see the devices in use alone; nothing while all are."""
        if not self.out:
            return {}
        return {self._variable: ",".join(self._devices[slot] for slot in self.in_use)}


def _given(count: int, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the variable that names devices, and those of the slots; none if unknown."""
    here = [name for kind, name in _CHOICES.items() if kind in accelerators_here()]
    for variable in (*here, *_CHOICES.values()):
        if named := environ.get(variable, ""):
            devices = [name.strip() for name in named.split(",")]
            return variable, devices if len(devices) == count else []
    variable = next(iter(here), "CUDA_VISIBLE_DEVICES")
    # A rank with several devices, or a device with several ranks, has no slot of this kind.
    known = gpus_here() in (0, count)
    return variable, [str(number) for number in range(count)] if known else []
