"""Values that are not tensors: what of torch the codec may carry, and tensors inside values.

A `TensorRef` stands for a tensor inside an encoded value: the tensor is a leaf of its own, under
the name that the reference holds.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.torch.state.tensors import as_bytes, dtype_name, torch_dtype
from ckptd.errors import CkptdError, CorruptError, UsageError

MAX_INLINE_BYTES = 16 << 20
"""Largest tensor inside a value of a type of its own or inside a per-rank value."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The place of the tensor called `name` inside a value."""

    name: str


def map_refs(value: Any, function: Callable[[str], torch.Tensor]) -> Any:
    """Return `value` with each reference replaced by ``function(name)``."""
    if isinstance(value, TensorRef):
        return function(value.name)
    if type(value) in (list, tuple):
        return type(value)(map_refs(v, function) for v in value)
    if type(value) in (dict, collections.OrderedDict):
        return dict_like(value, ((k, map_refs(v, function)) for k, v in value.items()))
    return value


def refs(value: Any) -> list[str]:
    """Return the names of all references in `value`."""
    found: list[str] = []

    def note(name: str) -> torch.Tensor:
        found.append(name)
        return torch.empty(0)

    map_refs(value, note)
    return found


def dict_like(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a dict of the same kind, with the versions that a module's state dict has."""
    new = type(value)(items)
    if (said := getattr(value, "_metadata", None)) is not None:
        vars(new)["_metadata"] = said
    return new


def _encode_ordered(value: Any) -> Any:
    said = getattr(value, "_metadata", None)
    if said is None or all(entry == {"version": 1} for entry in said.values()):
        return dict(value)
    # Readers that do not know this fail at the first item, which is no pair.
    return ["state_dict", dict(value), dict(said)]


def _decode_ordered(raw: Any) -> Any:
    if isinstance(raw, dict):
        return collections.OrderedDict(raw)
    _, items, said = raw
    new: Any = collections.OrderedDict(items)
    new._metadata = collections.OrderedDict(said)
    return new


def replace_in_place(live: Any, new: Any) -> bool:
    """Give the dict or list `live` the content of `new`; False when that is not possible."""
    if isinstance(live, dict) and isinstance(new, dict):
        live.clear()
        live.update(new)
        return True
    if isinstance(live, list) and isinstance(new, list):
        live[:] = new
        return True
    return False


def call_with(function: Callable[[Any], object], name: str, value: Any) -> None:
    """Give a loaded value to an object's own function.

    Raises
    ------
    UsageError
        kind ``load-state-dict``: the function raised; what it raised is the cause.
    """
    try:
        function(value)
    except CkptdError:
        raise
    except Exception as error:
        raise UsageError(
            "an object did not take its saved state",
            kind="load-state-dict",
            where=name,
            found=f"{getattr(function, '__qualname__', function)} raised {error!r}"[:500],
        ) from error


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.nbytes > MAX_INLINE_BYTES:
        raise UsageError(
            "a tensor inside a value is too large",
            kind="unsavable",
            wanted=f"at most {MAX_INLINE_BYTES} bytes",
            found=f"{tensor.nbytes} bytes, shape {tuple(tensor.shape)}",
            hint="put it into a dict or a list of the state, where it becomes a tensor of its own",
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "data": as_bytes(plain).tobytes(),
    }


def _decode_tensor(raw: dict[str, Any]) -> torch.Tensor:
    dtype = torch_dtype(raw["dtype"])
    shape, data = [int(n) for n in raw["shape"]], raw["data"]
    wanted = dtype.itemsize
    for n in shape:
        wanted *= n
    if any(n < 0 for n in shape) or wanted != len(data):
        raise CorruptError("length and shape of a tensor disagree", kind="bad-object")
    if not data:  # torch has no view of no bytes as a wider type
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return flat.view(dtype).reshape(shape)


def _torch_named(kind: type) -> Callable[[str], Any]:
    def decode(name: str) -> Any:
        value = getattr(torch, str(name), None)
        if not isinstance(value, kind):
            raise CorruptError(f"not a torch {kind.__name__}", kind="bad-object", found=repr(name))
        return value

    return decode


def _register() -> None:
    def short(value: Any) -> str:
        return str(value).removeprefix("torch.")

    add = codec.register
    add(TensorRef, name="ckptd.TensorRef", encode=lambda r: r.name, decode=TensorRef)
    add(torch.Tensor, name="torch.Tensor", encode=_encode_tensor, decode=_decode_tensor)
    add(torch.Size, name="torch.Size", encode=list, decode=torch.Size)
    add(torch.device, name="torch.device", encode=str, decode=torch.device)
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        name = f"torch.{kind.__name__}"
        add(kind, name=name, encode=short, decode=_torch_named(kind))
    counter: Any = collections.Counter
    add(counter, name="collections.Counter", encode=dict, decode=counter)
    ordered: Any = collections.OrderedDict
    add(ordered, name="collections.OrderedDict", encode=_encode_ordered, decode=_decode_ordered)
    deque: Any = collections.deque
    add(
        deque,
        name="collections.deque",
        encode=lambda d: [list(d), d.maxlen],
        decode=lambda v: collections.deque(v[0], v[1]),
    )
    add(io.BytesIO, name="io.BytesIO", encode=lambda b: b.getvalue(), decode=io.BytesIO)


_register()
