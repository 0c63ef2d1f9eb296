"""Wrapper tensors (torchao's subclasses): parts saved and remade; what must be equal.

A traceable wrapper subclass (``__tensor_flatten__`` and ``__tensor_unflatten__``: torchao's weights
and moments, for instance) is saved as its inner tensors, ``NAME.PART`` each, and one object NAME
that says class and context. A load fills the inner tensors of a live one that says the same.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ckptd.base.torch.tensors import is_dtensor, is_wrapped
from ckptd.checkpoint.format.codec import class_name, loaded_class
from ckptd.errors import MismatchError, UsageError

_SCALARS = (bool, int, float, str, type(None))
_FIXED = {bool, int, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.Size}
_UNCOMPARED = "requires_grad"
"""Field of a context that says how a tensor is used, and not what its values are."""
_MOST_SHOWN = 300


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def record_of(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    """Return what says of a wrapped tensor how its parts are to be read, as JSON data.

    Parameters
    ----------
    where
        Its name, for errors.

    Raises
    ------
    UsageError
        kind ``unsavable``: its context holds what is not plain, or a DTensor cuts it into parts of
        different sizes.
    """
    local = _local(tensor)
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    return {
        "class": class_name(type(local)),
        "context": _encoded(context, type(local).__name__, where),
        "dtype": str(local.dtype).removeprefix("torch."),
        "shape": list(local.shape),
        "stride": list(local.stride()),
        "parts": list(names),
        "cut": _cut(tensor, where) if is_dtensor(tensor) else [],
    }


def difference(live: dict[str, Any] | None, saved: Any) -> tuple[str, str] | None:
    """Return live and saved in words where they do not fit; None where they do.

    None for either is a plain tensor.
    """
    mine, then = _compared(live), _compared(saved)
    return None if mine == then else (_words(mine, then), _words(then, mine))


def _compared(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    if not isinstance(record, dict):
        return {"class": "unknown"}
    return {k: v for k, v in record.items() if k != "stride"}


def _words(record: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if record is None:
        return "a plain tensor"
    text = str(record.get("class")).replace(":", ".")
    if other is not None and other.get("class") == record.get("class"):
        keys = sorted(k for k in record.keys() | other.keys() if record.get(k) != other.get(k))
        text += "".join(f", {k} {record.get(k)}" for k in keys)
    return text[:_MOST_SHOWN]


def parts_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of the parts that this rank has of a wrapped tensor."""
    local = _local(tensor)
    names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield name, getattr(local, name)


def form_of(tensor: Any) -> tuple[Any, list[Any]]:
    """Return what is equal for a tensor that is no DTensor as long as its record is, and its parts.

    The form of one that wraps nothing is None.
    """
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is None:
        return None, []
    names, context = flatten()
    form = (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), *names, _exact(context))
    return form, [getattr(tensor, name) for name in names]


def _exact(value: Any) -> Any:
    """Return what is equal for two values only if `_encoded` is, and has nothing that changes."""
    kind = type(value)
    if kind in _FIXED:
        return kind, value  # True is 1
    if kind is dict:
        return kind, [*value], [*map(_exact, value.values())]
    if kind in (list, tuple):
        return kind, [*map(_exact, value)]
    return repr(_encoded(value, kind.__name__, ""))


def spread(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes of an inner tensor one that says which ranks have what.

    Those of a DTensor that is cut have one dimension more, which counts the pieces.
    """
    if not is_dtensor(tensor):
        return lambda inner: inner
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = tensor.device_mesh
    cuts = [
        mesh.size(axis) > 1 and not p.is_replicate() for axis, p in enumerate(tensor.placements)
    ]
    placements = [
        Shard(0) if cut else p if p.is_partial() else Replicate()
        for cut, p in zip(cuts, tensor.placements, strict=True)
    ]

    def wrap(inner: torch.Tensor) -> torch.Tensor:
        inner = inner.detach().unsqueeze(0) if any(cuts) else inner.detach()
        return DTensor.from_local(inner, mesh, placements, run_check=False)

    return wrap


def _cut(tensor: Any, where: str) -> list[list[Any]]:
    """Return how a DTensor is cut: size of the axis, and placement, of each axis that cuts it."""
    found, pieces = [], [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        size = tensor.device_mesh.size(axis)
        if size > 1 and not placement.is_replicate():
            found.append([size, str(placement)])
            if (dim := getattr(placement, "dim", None)) is not None:
                pieces[dim] *= size
    if any(n % p for n, p in zip(tensor.shape, pieces, strict=True)):
        raise UsageError(
            "a DTensor of wrapped tensors is cut into parts of different sizes",
            kind="unsavable",
            where=where,
            wanted="sizes that the mesh divides",
            found=f"{type(_local(tensor)).__name__} of {tuple(tensor.shape)} by {found}",
            hint="pad the parameter, or save the plain tensor that it represents",
        )
    return found


def make_wrapped(
    record: Any,
    part: Callable[[str], torch.Tensor],
    where: str,
    like: torch.Tensor | None = None,
    live: Any = None,
) -> torch.Tensor:
    """Return a wrapped tensor as a record says, of parts that are still to be filled.

    Parameters
    ----------
    record
        As `record_of` gave it; a checkpoint's.
    part
        Makes a part that one rank has, by its name.
    like
        A DTensor that it belongs to is cut alike.
    live
        What stands in its place now: one that says the same gives its context.

    Raises
    ------
    MismatchError
        Its class is not loaded here, or takes no such context.
    """
    try:
        cls = loaded_class(str(record["class"]), torch.Tensor)
        unflatten = getattr(cls, "__tensor_unflatten__", None)
        if unflatten is None:
            raise TypeError("the class is not imported, or cannot be built from its parts")
        parts = {str(name): part(str(name)) for name in record["parts"]}
        known = isinstance(live, torch.Tensor) and is_wrapped(live)
        if known and difference(record_of(live, where), record) is None:
            _, context = _local(live).__tensor_flatten__()  # type: ignore[attr-defined]
        else:
            context = _decoded(record["context"])
        shape, stride = torch.Size(record["shape"]), tuple(record["stride"])
        made = unflatten(parts, context, shape, stride)
        if not isinstance(made, torch.Tensor) or tuple(made.shape) != tuple(shape):
            raise TypeError("rebuilding it from its parts gives another tensor")
        return made if like is None else _cut_alike(made, like)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        raise MismatchError(
            "a tensor of a wrapper subclass cannot be rebuilt",
            where=where,
            wanted=_words(_compared(record), None),
            found=f"{type(error).__name__}: {error}"[:_MOST_SHOWN],
            hint="import its module, and take one step of the optimizer before the load",
        ) from error


def _cut_alike(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what one rank has as a DTensor where `like` is one."""
    if not is_dtensor(like):
        return made
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        made, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_shape(record: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what one rank has of a saved part."""
    cut = record.get("cut") if isinstance(record, dict) else None
    return tuple(shape[1:]) if cut and math.prod(n for n, _ in cut) > 1 else tuple(shape)


# -- contexts --------------------------------------------------------------------------------------


def _encoded(value: Any, owner: str, where: str) -> Any:
    """Return a context as JSON data: scalars, and lists that begin with a tag."""
    kind = type(value)
    if kind in _SCALARS and (kind is not float or math.isfinite(value)):
        return value
    inner = partial(_encoded, owner=owner, where=where)
    if kind in (list, tuple):
        return [kind.__name__, *map(inner, value)]
    if kind is dict and {*map(type, value)} <= {str}:
        return ["dict", {k: inner(v) for k, v in value.items()}]
    if isinstance(value, torch.Size):
        return ["size", [*map(int, value)]]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        # The number is this rank's own matter.
        return ["device", value.type]
    if isinstance(value, enum.Enum):
        return ["enum", class_name(kind), value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.name != _UNCOMPARED]
        return ["dataclass", class_name(kind), {f: inner(getattr(value, f)) for f in fields}]
    raise UsageError(
        f"the context of a {owner} holds unsupported values",
        kind="unsavable",
        where=where,
        wanted="numbers, texts, torch's types and sizes, enums, dataclasses, lists and dicts",
        found=f"{kind.__module__}.{kind.__qualname__}",
        hint="save the tensors that it is made of",
    )


def _decoded(raw: Any) -> Any:
    """Return a context of plain values; `TypeError` for one with classes of its own."""
    if not isinstance(raw, list):
        return raw
    tag, *items = raw
    match tag:
        case "size":
            return torch.Size(items[0])
        case "dtype" | "layout" | "memory_format":
            found = getattr(torch, str(items[0]), None)
            if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                raise TypeError(f"no {tag} {items[0]!r}"[:80])
            return found
        case "list":
            return [_decoded(i) for i in items]
        case "tuple":
            return tuple(_decoded(i) for i in items)
        case "dict":
            return {str(k): _decoded(v) for k, v in items[0].items()}
    raise TypeError(f"a context with a {tag} cannot be rebuilt")
