"""Random streams by sample or micro-batch instead of rank: seeds, generators.

Streams of ranks give other numbers when the number of ranks changes, and training then takes
another way: dropout alone moved a model's parameters by a tenth in 60 steps. A stream that is named
by what it is for gives the same numbers to every caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ckptd.checkpoint.format.reseed import seed_of
from ckptd.checkpoint.torch.state.rng import Rng


def keyed_seed(*key: int | str) -> int:
    """Return a seed in ``[0, 2**63)`` for a key, the same in every process and version.

    Parameters
    ----------
    key
        What the stream is for, such as ``(seed, "dropout", step, micro-batch)``.
    """
    return seed_of(repr(tuple(p if isinstance(p, str) else int(p) for p in key)).encode())


def keyed_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator of torch for a key; see `keyed_seed`. For augmentations of one sample."""
    generator = torch.Generator(device)
    generator.manual_seed(keyed_seed(*key))
    return generator


@contextmanager
def keyed_rng(*key: int | str) -> Iterator[None]:
    """Draw from streams named by a key within the block; see `keyed_seed`.

    The global streams of torch, its current device, numpy and Python are set at the begin and
    come back at the end, also after an error. For forward and backward of one micro-batch::

        for index, ids in zip(sampler.indices, loader):
            with keyed_rng(seed, step, index):
                loss(model(ids)).backward()
    """
    rng = Rng()
    before = rng.state_dict()
    rng.reseed(keyed_seed(*key))
    try:
        yield
    finally:
        rng.load_state_dict(before)
