"""Digests of a whole training state, by a way that ckptd has no part in.

Tensors are gathered by torch's own collectives and hashed on rank 0. What was in memory at a save
can so be compared with what is in memory after a load on other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptd.train.demo.spec import StateRow

__all__ = ["digest_state"]


def digest_state(
    event: str, step: int, model: nn.Module, optimizer: Optimizer, plain: dict[str, Any]
) -> StateRow:
    """Return digests of the parameters, of the optimizer's moments and of everything else.

    A collective: every rank calls it, and each gets the same row.

    Parameters
    ----------
    plain
        What is not a tensor, as JSON values.
    """
    tensors: dict[str, str] = {}
    nbytes = 0
    for name, tensor in _tensors(model, optimizer):
        raw = _whole(tensor).numpy().tobytes()
        header = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        tensors[name] = hashlib.sha256(header + raw).hexdigest()
        nbytes += len(raw)
    everything = {**plain, "groups": _hyperparameters(optimizer)}
    text = msgspec.json.encode(everything, order="sorted")
    return StateRow(event, step, nbytes, tensors, hashlib.sha256(text).hexdigest())


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"{name}/{key}", value


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().contiguous()


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
