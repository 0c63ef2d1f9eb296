"""`Rng`: random generators of torch, devices, numpy and Python as one value.

In it: which devices' streams are saved; a seed for another world.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch

from ckptd.base.torch.device import DeviceKind, accelerator
from ckptd.checkpoint.format.reseed import seed_of
from ckptd.errors import CorruptError

_log = logging.getLogger("ckptd")
_ON_HOST = ("torch", "numpy", "python")


class RngStreams(msgspec.Struct, frozen=True, eq=False):
    """Where the global random streams of a process stand.

    Attributes
    ----------
    cpu, numpy, python
        On the host; `cpu` is torch's.
    devices
        Those of devices by kind and index, of all that a process sees once it uses one: what was
        drawn on another device than the current one counts as well.
    current
        Index of the device that was the current one. Saved streams are counted from it, since a
        process that is restarted may be given other devices.
    """

    cpu: torch.Tensor
    numpy: Any
    python: Any
    devices: Mapping[tuple[str, int], torch.Tensor]
    current: int = 0

    @staticmethod
    def now() -> RngStreams:
        """Return where the global streams stand; draws nothing."""
        return RngStreams(
            torch.get_rng_state(),
            np.random.get_state(legacy=True),
            random.getstate(),
            {(kind.type, index): kind.rng_state(index) for kind, index in _devices_in_use()},
            _current(),
        )

    def same_as(self, other: RngStreams) -> bool:
        """Tell whether nothing was drawn between two looks, on the host or on a device of both."""
        return (
            torch.equal(self.cpu, other.cpu)
            and self._numpy_key() == other._numpy_key()
            and self.python == other.python
            and all(
                torch.equal(at, other.devices[device])
                for device, at in self.devices.items()
                if device in other.devices
            )
        )

    @staticmethod
    def of_seed(seed: int) -> RngStreams:
        """Return streams that begin at a seed; the global ones stay where they are."""
        # Generators of their own: `torch.manual_seed` before the first use of a device would leave
        # the seed behind for the global stream of the device.
        return RngStreams(
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=True),
            random.Random(seed).getstate(),
            {(kind.type, index): kind.seeded_state(seed) for kind, index in _devices_in_use()},
            _current(),
        )

    def forked(self, *, devices: int) -> RngStreams:
        """Return other streams that follow from these, each from its own alone.

        A program that seeds torch and nothing else is to get the same from torch each time.

        Parameters
        ----------
        devices
            The seed of the devices'.
        """
        seeds = [seed_of(self.cpu.numpy().tobytes())]
        seeds += [seed_of(repr(x).encode()) for x in (self._numpy_key(), self.python)]
        others = [RngStreams.of_seed(seed) for seed in seeds]
        begun = RngStreams.of_seed(devices)
        return msgspec.structs.replace(
            begun, cpu=others[0].cpu, numpy=others[1].numpy, python=others[2].python
        )

    def _numpy_key(self) -> tuple[Any, ...]:
        name, keys, *rest = self.numpy
        return (name, keys.tolist(), *rest)

    @staticmethod
    def of_values(state: dict[str, Any]) -> RngStreams:
        """Return what `values` returned.

        Raises
        ------
        CorruptError
            `state` was not made by `values`.
        """
        try:
            name, keys, position, has_gauss, gauss = state["numpy"]
            version, words, python_gauss = state["python"]
            current = _current()
            streams = RngStreams(
                _bytes_tensor(state["torch"]),
                (name, keys, position, has_gauss, gauss),
                (version, tuple(int(w) for w in words), python_gauss),
                {
                    _device_named(name, current): _bytes_tensor(raw)
                    for name, raw in state.items()
                    if name not in _ON_HOST
                },
                current,
            )
            # Streams of their own try the states first, so that an error changes nothing.
            torch.Generator().set_state(streams.cpu)
            np.random.RandomState().set_state(streams.numpy)
            random.Random().setstate(streams.python)
            for kind, _, at in streams._available():
                torch.Generator(kind.type).set_state(at)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptError(
                "not the state of random streams", found=repr(error)[:200]
            ) from error
        return streams

    def values(self) -> dict[str, Any]:
        """Return plain values that can be saved."""
        name, keys, position, has_gauss, gauss = self.numpy
        version, words, python_gauss = self.python
        state: dict[str, Any] = {
            "torch": self.cpu.numpy().tobytes(),
            "numpy": [name, np.array(keys), int(position), int(has_gauss), float(gauss)],
            "python": [version, np.array(words, np.uint32), python_gauss],
        }
        for (kind, index), at in self.devices.items():
            place = index - self.current
            state[f"{kind}:{place:+d}" if place else kind] = at.numpy().tobytes()
        return state

    def set(self) -> None:
        """Set the global streams. Those of devices that this process does not see are left out."""
        torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        for kind, index, at in self._available():
            kind.set_rng_state(at, index)

    def _available(self) -> Iterator[tuple[DeviceKind, int, torch.Tensor]]:
        """Yield kind and index of the devices that this process sees, and where they stand."""
        own = accelerator()
        if own is None or not self.devices or not own.is_available or not _has_stream(own):
            return
        count = own.device_count
        for (kind, index), at in self.devices.items():
            if own.type == kind and 0 <= index < count:
                yield own, index, at


class OwnStreams:
    """Random streams that belong to one thing, and are the global ones while it is at work.

    Parameters
    ----------
    seed
        Where they begin, in ``[0, 2**63)``.
    at
        Where they stand, if not at the begin.
    """

    def __init__(self, seed: int, at: RngStreams | None = None) -> None:
        self.seed = seed
        self.at = at if at is not None else RngStreams.of_seed(seed)

    @staticmethod
    def fork() -> OwnStreams:
        """Return streams that follow from the global ones, which move on.

        Others that are forked at the same place are different.
        """
        before = RngStreams.now()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        return OwnStreams(seed, before.forked(devices=seed))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make them the global streams within the block; the others come back, also on errors."""
        outside = RngStreams.now()
        if outside.devices.keys() - self.at.devices.keys():
            begun = RngStreams.of_seed(self.seed).devices
            self.at = msgspec.structs.replace(self.at, devices={**begun, **self.at.devices})
        self.at.set()
        try:
            yield
        finally:
            self.at = RngStreams.now()
            outside.set()


class Rng:
    """The global random streams of this process: torch, its devices, numpy, Python.

    Put one into the state: ``{"model": model, "rng": Rng()}``. It is per rank; a load into the
    same number of ranks restores all streams bit for bit, a load into another number reseeds
    them from what was saved and from the rank (see `PerRank`). Devices are counted from the current
    one: a process that used its current device and the next one may be given two others. numpy's
    is the legacy global stream; `numpy.random.Generator` objects are savable through their
    ``bit_generator.state``.

    With `ckptd.Batches` in the same state, the streams are set once more when the first batch
    after a load is taken: what a program draws while it sets itself up shifts nothing.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the streams as plain values; draws nothing."""
        return RngStreams.now().values()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the streams. Those of devices that this process does not see are left out.

        Raises
        ------
        CorruptError
            `state` was not made by `state_dict`.
        """
        RngStreams.of_values(state).set()

    def reseed(self, seed: int) -> None:
        """Start all streams again from `seed`, an int in ``[0, 2**63)``."""
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)


def _devices_in_use() -> list[tuple[DeviceKind, int]]:
    """Return kind and index of all devices that draw from a stream of torch's, once one is used.

    To ask where one stands makes no context on a device.
    """
    kind = accelerator()
    if kind is None or not kind.is_in_use or not _has_stream(kind):
        return []
    return [(kind, index) for index in range(kind.device_count)]


def _current() -> int:
    """Return the index of the current device; 0 where none is in use."""
    kind = accelerator()
    return kind.current_device().index if kind is not None and kind.is_in_use else 0


def _device_named(name: str, current: int) -> tuple[str, int]:
    """Return kind and index of a device whose place is counted from the current one."""
    kind, _, place = name.partition(":")
    return kind, current + int(place or 0)


@cache
def _has_stream(kind: DeviceKind) -> bool:
    """Tell whether the random stream of a kind of device can be read; log once that it cannot."""
    found = all(hasattr(kind.module, name) for name in ("get_rng_state", "set_rng_state"))
    if not found:
        _log.warning(
            "random streams of %s are not saved: torch.%s has no get_rng_state",
            kind.type,
            kind.type,
        )
    return found


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
