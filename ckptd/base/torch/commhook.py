"""Common parts of ckptd's communication hooks for DDP; the mean as DDP makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Reduced = torch.futures.Future[torch.Tensor]

Hook = Callable[[Any, dist.GradBucket], Reduced]


def comm_hook(function: Hook) -> Hook:
    """Return `function` with annotations that are types, which DDP insists on, and not texts."""
    function.__annotations__ |= {"bucket": dist.GradBucket, "return": Reduced}
    return function


@comm_hook
def mean(state: Any, bucket: dist.GradBucket) -> Reduced:
    """Reduce as DDP does without a hook, to the bit: a product with the inverse, then the sum.

    `state` is the process group; None is the default one.
    """
    group = state or dist.group.WORLD
    tensor = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    reduced: Reduced = work.get_future().then(lambda done: done.value()[0])
    return reduced
