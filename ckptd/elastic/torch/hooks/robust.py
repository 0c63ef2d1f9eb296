"""Robust aggregation of gradients against wrong workers: median, trimmed mean, flag; DDP hooks.

In it: the rules by name; rounds and tolerance of ``flag``.

The mean of gradients takes every worker at its word: one that computes wrong moves it as far as it
likes. These take the gradients of all workers instead, and make of them one that the majority
supports. They cost memory and traffic of all gradients on every worker, so they are for jobs whose
hardware or data is in doubt, not for every day.

    robust.register(model, "flag")

All rules see a matrix with one row for each worker and return one row. None of them looks at who a
worker is. All ranks compute the same from the same rows if they are machines of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptd.base.torch.commhook import Reduced, comm_hook
from ckptd.errors import UsageError

Rule = Callable[[torch.Tensor], torch.Tensor]

_ROUNDS = 10
_CLOSE = 1e-4


def mean(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean; one wrong worker can make anything of it."""
    return _usable(rows).mean(0)


def median(rows: torch.Tensor) -> torch.Tensor:
    """Return the median of each coordinate, of an even number the mean of the two in the middle."""
    ordered = _usable(rows).sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed(rows: torch.Tensor, share: float = 0.25) -> torch.Tensor:
    """Return the mean of each coordinate without its smallest and largest values.

    Parameters
    ----------
    share
        Of the workers, left out at each end; below one half.
    """
    ordered = _usable(rows).sort(0).values
    n = len(ordered)
    cut = min(int(n * share), (n - 1) // 2)
    return ordered[cut : n - cut].mean(0)


def flag(rows: torch.Tensor, dimensions: int | None = None) -> torch.Tensor:
    """Return the mean of the gradients within the subspace that most of them lie close to.

    After the Flag Aggregator: the subspace is the one whose sum of distances (not of squares) from
    the directions of the gradients is least, found by weighting the far ones down again and again.
    Gradients count by their direction there, so that a long one does not pull harder. What is left
    over of a gradient outside of it is dropped, and a length beyond the median is cut to that.

    Parameters
    ----------
    dimensions
        Of the subspace; half of the workers, rounded up, when None.

    Notes
    -----
    Everything happens among the products of the gradients with each other, a matrix as large as
    there are workers: two passes over the gradients, whatever their size.
    """
    rows = _usable(rows)
    n = len(rows)
    if n < 3:
        return rows.mean(0)
    lengths = _lengths(rows).double()
    some = lengths > 0
    if not some.any():
        return rows.mean(0)
    usual = lengths[some].median()
    divisors = lengths.where(some, usual)
    wide = rows if rows.dtype.itemsize >= 4 else rows.float()
    units = (wide @ wide.T).double() / torch.outer(divisors, divisors)
    coefficients = _projection(units, dimensions or math.ceil(n / 2))
    # The projected mean of gradients g_i = length_i * unit_i, with lengths of the median at most.
    scale = lengths.clamp(max=float(usual))
    weights = coefficients @ scale / n
    return (weights / divisors).to(rows.dtype) @ rows


def _projection(units: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return C such that row sums of ``C[j, i] * unit_j`` are unit i within the subspace.

    `units` are the products of the unit vectors with each other.
    """
    n = len(units)
    weights = torch.ones(n, dtype=units.dtype, device=units.device)
    before = torch.full_like(weights, math.inf)
    found = torch.eye(n, dtype=units.dtype, device=units.device)
    for _ in range(_ROUNDS):
        values, vectors = torch.linalg.eigh(weights[:, None] * units * weights)
        kept = values > max(float(values[-1]), 0.0) * 1e-9
        kept[: n - dimensions] = False
        # Columns: an orthonormal basis of the subspace, in terms of the unit vectors.
        basis = weights[:, None] * vectors[:, kept] / values[kept].sqrt()
        inside = basis.T @ units
        found = basis @ inside
        far = (1 - inside.square().sum(0)).clamp(min=0.0)
        if float((far - before).abs().max()) < _CLOSE:
            break
        before = far
        # Square roots of the weights that make least squares a sum of distances.
        weights = (far + 1e-6) ** -0.25
    return found


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    kind = torch.promote_types(rows.dtype, torch.float32)
    out: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=kind)
    return out


def _usable(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows without those that have no finite length; all if none is left."""
    good = torch.isfinite(_lengths(rows))
    return rows if bool(good.all()) or not bool(good.any()) else rows[good]


RULES: dict[str, Rule] = {"mean": mean, "median": median, "trimmed": trimmed, "flag": flag}


@dataclass(frozen=True, slots=True)
class RobustState:
    """The state of `robust_hook`.

    Attributes
    ----------
    rule
        Takes a matrix with one row a worker, returns one row.
    group
        The workers; the default group when None.
    """

    rule: Rule
    group: Any = None


@comm_hook
def robust_hook(state: RobustState, bucket: dist.GradBucket) -> Reduced:
    """Gather the bucket of all workers, and make one of them by a rule."""
    group = state.group or dist.group.WORLD
    tensor = bucket.buffer()
    rows = tensor.new_empty(dist.get_world_size(group), tensor.numel())
    work: Any = dist.all_gather_into_tensor(rows.view(-1), tensor, group=group, async_op=True)

    def combined(_: Any) -> torch.Tensor:
        return tensor.copy_(state.rule(rows))

    if tensor.device.type != "cpu":
        reduced: Reduced = work.get_future().then(combined)
        return reduced
    # Not in gloo's thread: if that lets go of the group last, it waits for itself and aborts.
    work.wait()
    done: Reduced = torch.futures.Future()
    done.set_result(combined(None))
    return done


def register(model: nn.parallel.DistributedDataParallel, rule: str | Rule = "flag") -> None:
    """Make `model` aggregate its gradients by a rule.

    Each bucket of DDP is aggregated by itself. Memory of all workers' gradients of a bucket is
    needed on each, and as much traffic.

    Parameters
    ----------
    rule
        ``mean``, ``median``, ``trimmed``, ``flag``, or a function as these.

    Raises
    ------
    UsageError
        There is no such rule.
    RuntimeError
        The model has a communication hook already.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise UsageError("unknown rule of reduction", wanted=", ".join(RULES), found=rule)
        rule = RULES[rule]
    model.register_comm_hook(RobustState(rule, model.process_group), robust_hook)
