"""Checking the witness of a checkpoint against what a load has just filled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptd.engine.wants import Want
from ckptd.errors import CorruptError
from ckptd.format.manifest import Manifest
from ckptd.format.witness import Witness, WitnessPlan, gather
from ckptd.types import dtype_of

__all__ = ["check_witness"]


def check_witness(
    witness: Witness, plan: WitnessPlan, manifest: Manifest, wants: Sequence[Want]
) -> None:
    """Compare the filled buffers with the witness, at no extra read of data.

    Digests prove that the bytes are those that were written; the witness proves that they came
    to the right place: a wrong layout of the right shape passes every digest.

    Raises
    ------
    CorruptError
        kind ``witness``: names the tensors; the live state is wrong (`poisoned`).
    """
    words = witness.values.view(np.uint64).reshape(-1)
    wrong: list[str] = []
    for want in wants:
        entry = manifest.tensors[want.tensor]
        slots, elements = plan.select(want.tensor, want.regions)
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
