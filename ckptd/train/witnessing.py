"""Checking the witness of a checkpoint against what a load has just filled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ckptd.engine.wants import Want
from ckptd.errors import CorruptError
from ckptd.format.manifest import Manifest
from ckptd.format.witness import Witness, WitnessPlan, gather
from ckptd.types import dtype_of

__all__ = ["Place", "check_witness", "witness_places"]


Place = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Slots of the witness, and the elements of a buffer that they stand for."""


def witness_places(plan: WitnessPlan, wants: Sequence[Want]) -> list[Place]:
    """Return, for each buffer, which values of the witness lie where in it."""
    return [plan.select(want.tensor, want.regions) for want in wants]


def check_witness(
    witness: Witness, places: Sequence[Place], manifest: Manifest, wants: Sequence[Want]
) -> None:
    """Compare the filled buffers with the witness, at no extra read of data.

    Digests prove that the bytes are those that were written; the witness proves that they came
    to the right place: a wrong layout of the right shape passes every digest.

    Parameters
    ----------
    places
        See `witness_places`.

    Raises
    ------
    CorruptError
        kind ``witness``: names the tensors; the live state is wrong (`poisoned`).
    """
    words = witness.values.view(np.uint64).reshape(-1)
    wrong: list[str] = []
    for want, (slots, elements) in zip(wants, places, strict=True):
        entry = manifest.tensors[want.tensor]
        itemsize = dtype_of(entry.dtype).itemsize
        found = gather(want.target.view(np.uint8), itemsize, elements)
        wanted = words[slots]
        good = (found.view(np.uint64).reshape(-1) == wanted) | (witness.present[slots] == 0)
        if not good.all():
            wrong.append(f"{entry.name} ({int((~good).sum())} of {len(slots)} values)")
    if wrong:
        error = CorruptError(
            "values arrived at the wrong places",
            kind="witness",
            where=", ".join(wrong[:8]) + (" ..." if len(wrong) > 8 else ""),
            hint="the layout that wrote the checkpoint, or the plan, is wrong; please report this",
        )
        error.poisoned = True
        raise error
