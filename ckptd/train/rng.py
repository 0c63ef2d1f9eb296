"""`Rng`: the process's random number generators as one value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckptd.errors import CorruptError

__all__ = ["Rng"]


class Rng:
    """The global random streams of this process: torch, CUDA (current device), numpy, Python.

    Put one into the state: ``{"model": model, "rng": Rng()}``. It is per rank; a load into the
    same number of ranks restores all streams bit for bit, a load into another number reseeds
    them from what was saved and from the rank (see `PerRank`). numpy's is the legacy global
    stream; `numpy.random.Generator` objects are savable through their ``bit_generator.state``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the streams as plain values; draws nothing."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        version, words, python_gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": [name, np.array(keys), int(position), int(has_gauss), float(gauss)],
            "python": [version, np.array(words, np.uint32), python_gauss],
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the streams. A CUDA stream is left out on a machine without CUDA.

        Raises
        ------
        CorruptError
            `state` was not made by `state_dict`.
        """
        try:
            torch_state = _bytes_tensor(state["torch"])
            name, keys, position, has_gauss, gauss = state["numpy"]
            numpy_state = (name, keys, position, has_gauss, gauss)
            version, words, python_gauss = state["python"]
            python_state = (version, tuple(int(w) for w in words), python_gauss)
            # Streams of their own try the states first, so that an error changes nothing.
            torch.Generator().set_state(torch_state)
            np.random.RandomState().set_state(numpy_state)
            random.Random().setstate(python_state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptError(
                "not the state of random streams", kind="bad-object", found=repr(error)[:200]
            ) from error
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))

    def reseed(self, seed: int) -> None:
        """Start all streams anew from `seed`, an int in ``[0, 2**63)``."""
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
