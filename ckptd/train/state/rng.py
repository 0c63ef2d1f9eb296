"""`Rng`: the process's random number generators as one value."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from ckptd.errors import CorruptError
from ckptd.train.device import DeviceKind, accelerator

__all__ = ["OwnStreams", "Rng", "RngStreams"]

_log = logging.getLogger("ckptd")
_ON_HOST = ("torch", "numpy", "python")


@dataclass(frozen=True, slots=True, eq=False)
class RngStreams:
    """Where the global random streams of a process stand.

    `cpu` is that of torch on the host; `devices` are those of the current devices, by the kind of
    device: one of each kind that was in use.
    """

    cpu: torch.Tensor
    numpy: Any
    python: Any
    devices: Mapping[str, torch.Tensor]

    @staticmethod
    def now() -> RngStreams:
        """Return where the global streams stand; draws nothing."""
        return RngStreams(
            torch.get_rng_state(),
            np.random.get_state(legacy=True),
            random.getstate(),
            {kind.type: kind.rng_state() for kind in _kinds_in_use()},
        )

    def same_as(self, other: RngStreams) -> bool:
        """Tell whether nothing was drawn between two looks, on the host or on a device of both."""
        return (
            torch.equal(self.cpu, other.cpu)
            and self._numpy_key() == other._numpy_key()
            and self.python == other.python
            and all(
                torch.equal(at, other.devices[kind])
                for kind, at in self.devices.items()
                if kind in other.devices
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
            {kind.type: kind.seeded_state(seed) for kind in _kinds_in_use()},
        )

    def forked(self, *, devices: int) -> RngStreams:
        """Return other streams that follow from these, each from its own alone.

        A program that seeds torch and nothing else is to get the same from torch each time.

        Parameters
        ----------
        devices
            The seed of the devices'.
        """
        seeds = [_seed_of(self.cpu.numpy().tobytes())]
        seeds += [_seed_of(repr(x).encode()) for x in (self._numpy_key(), self.python)]
        others = [RngStreams.of_seed(seed) for seed in seeds]
        return RngStreams(
            others[0].cpu, others[1].numpy, others[2].python, RngStreams.of_seed(devices).devices
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
            streams = RngStreams(
                _bytes_tensor(state["torch"]),
                (name, keys, position, has_gauss, gauss),
                (version, tuple(int(w) for w in words), python_gauss),
                {kind: _bytes_tensor(raw) for kind, raw in state.items() if kind not in _ON_HOST},
            )
            # Streams of their own try the states first, so that an error changes nothing.
            torch.Generator().set_state(streams.cpu)
            np.random.RandomState().set_state(streams.numpy)
            random.Random().setstate(streams.python)
            for kind, at in streams._available():
                torch.Generator(kind.type).set_state(at)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptError(
                "not the state of random streams", kind="bad-object", found=repr(error)[:200]
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
        return state | {kind: at.numpy().tobytes() for kind, at in self.devices.items()}

    def set(self) -> None:
        """Set the global streams. Those of devices that this machine lacks are left out."""
        torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        for kind, at in self._available():
            kind.set_rng_state(at)

    def _available(self) -> Iterator[tuple[DeviceKind, torch.Tensor]]:
        """Yield the kinds of device that this machine has, and where their streams stand."""
        own = accelerator()
        for name, at in self.devices.items():
            if own is not None and own.type == name and own.is_available and _has_stream(own):
                yield own, at


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
            self.at = replace(self.at, devices={**begun, **self.at.devices})
        self.at.set()
        try:
            yield
        finally:
            self.at = RngStreams.now()
            outside.set()


class Rng:
    """The global random streams of this process: torch, its current device, numpy, Python.

    Put one into the state: ``{"model": model, "rng": Rng()}``. It is per rank; a load into the
    same number of ranks restores all streams bit for bit, a load into another number reseeds
    them from what was saved and from the rank (see `PerRank`). numpy's is the legacy global
    stream; `numpy.random.Generator` objects are savable through their ``bit_generator.state``.

    With `ckptd.Batches` in the same state, the streams are set once more when the first batch
    after a load is taken: what a program draws while it sets itself up shifts nothing.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the streams as plain values; draws nothing."""
        return RngStreams.now().values()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the streams. Those of a kind of device that this machine lacks are left out.

        Raises
        ------
        CorruptError
            `state` was not made by `state_dict`.
        """
        RngStreams.of_values(state).set()

    def reseed(self, seed: int) -> None:
        """Start all streams anew from `seed`, an int in ``[0, 2**63)``."""
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)


def _seed_of(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1


def _kinds_in_use() -> list[DeviceKind]:
    """Return the kinds of device that this process uses, and that draw from a stream of torch's."""
    kind = accelerator()
    return [kind] if kind is not None and kind.is_in_use and _has_stream(kind) else []


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
