"""Gradients as means over all tokens of a step: global count of tokens, scaling.

Averages of averages weigh a token by its rank: with other ranks, or with padding that falls
otherwise, the gradient changes. A sum divided by the global count does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ckptd.base.torch.device import kind_of
from ckptd.errors import UsageError


def global_tokens(mine: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the sum over all ranks of the tokens (or samples) of this step.

    Parameters
    ----------
    mine
        Of this rank, all its micro-batches together.
    group
        Ranks that share the batch; without a process group, this rank is all of them.

    Raises
    ------
    UsageError
        No rank has any.
    """
    total = torch.tensor([mine], dtype=torch.int64)
    if dist.is_available() and dist.is_initialized():
        total = total.to(_device(group))
        dist.all_reduce(total, group=group)
    count = int(total.item())
    if count < 1 or mine < 0:
        raise UsageError(
            "no rank has a token in this step",
            wanted="at least one on all ranks together",
            found=str(count),
        )
    return count


def scale_gradients(
    parameters: Iterable[torch.nn.Parameter],
    tokens: int,
    *,
    averaged: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Turn summed gradients into those of the mean over `tokens`, in place.

    The loss of each micro-batch must be a sum over its tokens (``reduction="sum"``).

    Parameters
    ----------
    tokens
        Of the whole step: `global_tokens`.
    averaged
        Whether the reduction divided by the number of ranks, as `DistributedDataParallel` and
        FSDP do; that is taken back.
    group
        The ranks that it divided by.
    """
    ranks = dist.get_world_size(group) if averaged and dist.is_initialized() else 1
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, ranks / tokens)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where the group reduces: the host if it can there, else the current device."""
    kinds = [device.type for device in (group or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return kind_of(kinds[0]).current_device()
