"""Replicas that ought to be equal and are not, and gradients that are out of line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from ckptd.monitor.mismatch import MOST, minority
from ckptd.monitor.stats import MAD_TO_SIGMA, Array
from ckptd.monitor.verdict import Kind, Suspect, Target, Verdict

__all__ = ["CHUNK", "checksum", "norm_outliers", "replica_differences"]

CHUNK = 1 << 20
"""Bytes that are hashed at once."""

_ALL = (1 << 64) - 1


def checksum(tensors: Iterable[tuple[str, Any]], salt: int = 0) -> int:
    """Return one 64-bit checksum of named tensors.

    Each chunk of each tensor is hashed with a salt of its own, so that two values that change
    places, within a tensor or between two, change the sum; the order in which the tensors are
    given does not.

    Parameters
    ----------
    tensors
        Name, and the bytes (anything with the buffer interface, contiguous).
    salt
        The same on all replicas; a new one for each check, so that no collision lasts.
    """
    total = 0
    for name, data in tensors:
        view = memoryview(data).cast("B")
        seed = xxhash.xxh3_64_intdigest(name.encode(), salt & _ALL)
        total += xxhash.xxh3_64_intdigest(len(view).to_bytes(8, "little"), seed)
        for k in range(0, len(view), CHUNK):
            total += xxhash.xxh3_64_intdigest(view[k : k + CHUNK], (seed + k + 1) & _ALL)
    return total & _ALL


def replica_differences(
    replica_set: Sequence[int] | Array,
    ranks: Sequence[int] | Array,
    sums: Sequence[int] | Array,
    step: int,
) -> Iterator[Verdict]:
    """Yield a verdict for each set of replicas whose checksums after the same step differ.

    Parameters
    ----------
    replica_set
        Which ranks hold the same values: one number a rank, equal for replicas.
    ranks
        Global ranks.
    sums
        Their checksums.
    step
        The step after which all were taken.
    """
    sets, who = np.asarray(replica_set), np.asarray(ranks)
    values = np.asarray(sums, np.uint64)
    if not len(sets):
        return
    order = np.argsort(sets, kind="stable")
    sets, who, values = sets[order], who[order], values[order]
    starts = np.flatnonzero(np.append(True, sets[1:] != sets[:-1]))
    ends = np.append(starts[1:], len(sets))
    apart = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
    for k in np.flatnonzero(apart)[:MOST]:
        here = slice(starts[k], ends[k])
        yield _differing(who[here], values[here], int(sets[starts[k]]), step)


def _differing(ranks: Array, values: Array, replica_set: int, step: int) -> Verdict:
    odd = minority(values, len(values)) if len(values) >= 3 else None
    named = ranks if odd is None else ranks[odd]
    share = 0.95 if odd is not None else 1 / len(ranks)
    return Verdict(
        kind=Kind.CORRUPTION,
        suspects=tuple(Suspect(Target.RANK, str(r), share, "checksum differs") for r in named),
        evidence=(
            f"{len(np.unique(values))} checksums among {len(ranks)} replicas after step {step}",
            "a strict majority agrees" if odd is not None else "no majority: compute it again",
        ),
        rules_out=("a fault before the gradients' reduction: that reaches all replicas alike",),
        refuted_by="the named ranks show the majority's checksum when it is taken again",
        action="quarantine, and go back to the last checkpoint on which all agreed",
        numbers={"replicas": len(ranks), "step": step, "replica set": replica_set},
    )


def norm_outliers(
    ranks: Sequence[int] | Array, norms: Array, z: float = 8.0, ratio: float = 3.0
) -> Iterator[Verdict]:
    """Yield a verdict on ranks whose gradients, before the reduction, are out of line.

    Parameters
    ----------
    ranks
        Global ranks that see data of one kind, in data parallel.
    norms
        Gradient norms, shape (steps, ranks), oldest first. Out of line in each of the steps is
        what counts: one hard batch is not a fault.
    z
        Robust standard deviations of the logarithms.
    ratio
        Times the median, or below it.
    """
    table = np.atleast_2d(np.asarray(norms, float))
    who = np.asarray(ranks)
    if len(who) < 4 or not len(table):
        return
    bad = ~np.isfinite(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(bad, np.nan, np.log(np.maximum(table, 1e-300)))
    usual = np.array([np.nanmedian(r) if np.isfinite(r).any() else np.nan for r in logs])
    away = np.abs(logs - usual[:, None])
    spread = np.array([np.nanmedian(r) if np.isfinite(r).any() else np.nan for r in away])
    limit = np.maximum(z * MAD_TO_SIGMA * spread, np.log(ratio))
    out = bad | (away > limit[:, None])
    # Not finite on every rank, or far on most, is the model and not a rank.
    rows = np.flatnonzero(out.all(0))
    if not len(rows) or 2 * len(rows) >= len(who):
        return
    worst = float(np.exp(np.nan_to_num(away[:, rows], nan=0.0).max()))
    yield Verdict(
        kind=Kind.CORRUPTION,
        suspects=tuple(
            Suspect(Target.RANK, str(who[r]), 0.6, "gradient norm out of line") for r in rows
        ),
        evidence=(f"norms of {len(rows)} of {len(who)} ranks out of line in {len(table)} steps",),
        rules_out=("a fault of the model: the other ranks' gradients are in line",),
        refuted_by="the named rank repeats the step on another device with the same norm",
        action="compute the step again elsewhere; quarantine the device if it differs",
        numbers={"out of line": len(rows), "ranks": len(who), "worst ratio": worst},
    )
