"""What torch's own save and load bring back, and everything that can be seen of a module."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_TORCHS = frozenset(vars(nn.Module())) - {"training"} | {"_torchdynamo_wrapper_id"}


def reloaded(saved: nn.Module, fresh: nn.Module) -> nn.Module:
    """Load into `fresh` what torch saves of `saved`."""
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=False))
    return fresh


def seen(module: nn.Module) -> dict[str, Any]:
    """Return the words of a module, its hidden buffers and the attributes of all its modules."""
    found: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        found[f"state_dict: {key}"] = _seen(value, 0)
    for prefix, inner in module.named_modules():
        for key in inner._non_persistent_buffers_set:
            found[f"buffer: {prefix}.{key}"] = _seen(inner._buffers.get(key), 0)
        for key, value in vars(inner).items():
            if key not in _TORCHS:
                found[f"attribute: {prefix}.{key}"] = _seen(value, 0)
    return found


def _seen(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_quantized or value.layout is not torch.strided:
            return repr(value)
        plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return str(value.dtype), tuple(value.shape), raw
    if depth > 4:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {repr(k): _seen(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_seen(v, depth + 1) for v in value]
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return repr(value)  # nan is nan
    return type(value).__name__


def differences(wanted: nn.Module, found: nn.Module) -> list[str]:
    """Return in what two modules differ."""
    one, other = seen(wanted), seen(found)
    return sorted(n for n in {*one, *other} if one.get(n) != other.get(n))
