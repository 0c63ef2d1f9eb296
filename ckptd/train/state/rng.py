"""`Rng`: the process's random number generators as one value."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.errors import CorruptError

__all__ = ["OwnStreams", "Rng", "RngStreams"]


@dataclass(frozen=True, slots=True, eq=False)
class RngStreams:
    """Where the global random streams of a process stand.

    `cpu` is that of torch; `cuda` is that of the current device; None where CUDA was not in use.
    """

    cpu: torch.Tensor
    numpy: Any
    python: Any
    cuda: torch.Tensor | None

    @staticmethod
    def now() -> RngStreams:
        """Return where the global streams stand; draws nothing."""
        cuda = torch.cuda.get_rng_state() if _cuda_in_use() else None
        return RngStreams(
            torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate(), cuda
        )

    @staticmethod
    def of_seed(seed: int) -> RngStreams:
        """Return streams that begin at a seed; the global ones stay where they are."""
        # Generators of their own: `torch.manual_seed` before the first use of CUDA would leave
        # the seed behind for the global stream of CUDA.
        cuda = None
        if _cuda_in_use():
            cuda = torch.Generator("cuda").manual_seed(seed).get_state()
        return RngStreams(
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=True),
            random.Random(seed).getstate(),
            cuda,
        )

    def forked(self, *, cuda: int) -> RngStreams:
        """Return other streams that follow from these, each from its own alone.

        A program that seeds torch and nothing else is to get the same from torch each time.

        Parameters
        ----------
        cuda
            The seed of CUDA's.
        """
        seeds = [_seed_of(self.cpu.numpy().tobytes())]
        seeds += [_seed_of(repr(x).encode()) for x in (self._numpy_key(), self.python)]
        others = [RngStreams.of_seed(seed) for seed in seeds]
        return RngStreams(
            others[0].cpu, others[1].numpy, others[2].python, RngStreams.of_seed(cuda).cuda
        )

    def _numpy_key(self) -> tuple[Any, ...]:
        name, keys, *rest = self.numpy
        return (name, keys.tolist(), *rest)

    @staticmethod
    def of_values(state: dict[str, Any]) -> RngStreams:
        """Return what `values` told.

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
                _bytes_tensor(state["cuda"]) if "cuda" in state else None,
            )
            # Streams of their own try the states first, so that an error changes nothing.
            torch.Generator().set_state(streams.cpu)
            np.random.RandomState().set_state(streams.numpy)
            random.Random().setstate(streams.python)
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
        if self.cuda is not None:
            state["cuda"] = self.cuda.numpy().tobytes()
        return state

    def set(self) -> None:
        """Set the global streams. A CUDA stream is left out on a machine without CUDA."""
        torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


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
        return OwnStreams(seed, before.forked(cuda=seed))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make them the global streams within the block; the others come back, also on errors."""
        outside = RngStreams.now()
        if self.at.cuda is None and outside.cuda is not None:
            self.at = RngStreams(
                self.at.cpu, self.at.numpy, self.at.python, RngStreams.of_seed(self.seed).cuda
            )
        self.at.set()
        try:
            yield
        finally:
            self.at = RngStreams.now()
            outside.set()


class Rng:
    """The global random streams of this process: torch, CUDA (current device), numpy, Python.

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
        """Set the streams. A CUDA stream is left out on a machine without CUDA.

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


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
