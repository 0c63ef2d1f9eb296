"""Values as one object, with the tensors inside them as leaves of their own."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.names import escape_key
from ckptd.checkpoint.torch.state.leaves import SavedNames, Sink, StatePlace, TensorKind
from ckptd.checkpoint.torch.state.objects import TensorRef, map_refs, refs
from ckptd.checkpoint.torch.state.tensors import is_dtensor, torch_dtype
from ckptd.checkpoint.torch.state.walk import fqn_segment, is_state_dict, refuse_optimizer_ids
from ckptd.errors import MismatchError, UsageError
from ckptd.types import DTYPES

__all__ = ["add_array", "add_value"]


Array = np.ndarray[Any, Any]


def add_array(sink: Sink, place: StatePlace, array: Array, put: Callable[[Any], None]) -> None:
    """Add `array`, in its own memory where torch can write to it; else `put` replaces it.

    Raises
    ------
    UsageError
        kind ``unsavable``: an array of objects, strings, dates or records.
    """
    shared, tensor = _as_tensor(array, place)
    leaf = sink.add_tensor(place, tensor, "ndarray")
    if not shared:
        leaf.assign = lambda new: put(_as_array(new, array.dtype))


def _as_tensor(array: Array, place: StatePlace) -> tuple[bool, torch.Tensor]:
    name = array.dtype.name
    if name not in DTYPES:
        raise UsageError(
            f"a numpy array of this dtype cannot be saved: {place.path}",
            kind="unsavable",
            where=place.name,
            wanted="numbers or bools",
            found=str(array.dtype),
        )
    strides_fit = all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
    shared = array.flags.writeable and array.dtype.isnative and strides_fit
    if not shared:
        array = array.astype(array.dtype.newbyteorder("="), copy=True, order="C")
    # torch knows neither ml_dtypes nor their codes: it sees integers of the same width.
    plain = array if array.dtype.kind != "V" else array.view(f"u{array.itemsize}")
    tensor = torch.from_numpy(plain)
    return shared, tensor.view(torch_dtype(name)) if plain is not array else tensor


def _as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return a new array with the content of `tensor`."""
    plain = tensor.view(torch.uint8) if dtype.kind == "V" and dtype.itemsize == 1 else tensor
    if dtype.kind == "V" and dtype.itemsize == 2:
        plain = tensor.view(torch.uint16)
    return plain.numpy().copy().view(dtype.newbyteorder("=")).astype(dtype, copy=False)


def add_value(
    sink: Sink,
    place: StatePlace,
    value: Any,
    put: Callable[[Any], None],
    *,
    kind: TensorKind = "tensor",
) -> None:
    """Add `value` as one object; tensors in its dicts, lists and tuples become leaves.

    In a load the checkpoint decides the structure: tensors that only the live value has are left
    out, those that only the checkpoint has are made, and `put` is given the saved structure with
    live tensors where there are some.

    Raises
    ------
    UsageError
        The value contains itself, or something that cannot be saved.
    """
    inner: dict[str, tuple[StatePlace, torch.Tensor]] = {}
    bare = _take_tensors(place, value, inner, {})
    if sink.saved is not None and place.name in sink.saved.objects:
        inner = _adopt(sink.saved, place, inner)
    for at, tensor in inner.values():
        sink.add_tensor(at, tensor, kind)

    def tensor_of(name: str) -> torch.Tensor:
        leaf = sink.leaves.tensor(name)
        if leaf is None:
            raise MismatchError(
                "a value refers to a tensor that was not loaded", where=place.name, wanted=name
            )
        # The live object where there is one: a Parameter stays the one that its optimizer knows.
        return inner[name][1] if name in inner and leaf.assign is None else leaf.tensor

    def check(saved: Any) -> None:
        for name in refs(saved):
            tensor_of(name)

    sink.add_object(place, bare, lambda saved: put(map_refs(saved, tensor_of)), check=check)


def _take_tensors(
    place: StatePlace,
    value: Any,
    inner: dict[str, tuple[StatePlace, torch.Tensor]],
    around: dict[int, str],
) -> Any:
    """Return `value` with references for tensors; note the tensors in `inner`."""
    if isinstance(value, torch.Tensor):
        if place.name in inner:
            raise UsageError(
                "two values of the state have one name",
                kind="duplicate-name",
                where=place.name,
                found=f"{inner[place.name][0].path} and {place.path}",
                hint="give one of them another key",
            )
        inner[place.name] = (place, value)
        return TensorRef(place.name)
    is_dict = type(value) in (dict, collections.OrderedDict)
    if not is_dict and type(value) not in (list, tuple):
        return value
    _check_nesting(place, value, around)
    around = {**around, id(value): place.path}
    if not is_dict:
        return type(value)(
            _take_tensors(place.child(str(i), f"[{i}]"), v, inner, around)
            for i, v in enumerate(value)
        )
    refuse_optimizer_ids(value, place)
    segment = fqn_segment if is_state_dict(value) else _segment
    return type(value)(
        (k, _take_tensors(place.child(segment(k), f"[{k!r}]"), v, inner, around))
        for k, v in value.items()
    )


def _check_nesting(place: StatePlace, value: Any, around: dict[int, str]) -> None:
    if id(value) in around:
        raise UsageError(
            "a container of the state contains itself",
            kind="cycle",
            where=place.path[:200],
            found=f"also at {around[id(value)]}",
        )
    if len(around) > codec.MAX_DEPTH:
        raise UsageError("nested too deeply", kind="unsavable", where=place.name[:200])


def _segment(key: Any) -> str:
    return escape_key(key if type(key) in (str, int) else repr(key))


def _adopt(
    saved: SavedNames, place: StatePlace, inner: dict[str, tuple[StatePlace, torch.Tensor]]
) -> dict[str, tuple[StatePlace, torch.Tensor]]:
    """Return the tensors that the checkpoint has below `place`, live ones where they fit."""
    adopted: dict[str, tuple[StatePlace, torch.Tensor]] = {}
    for name in saved.tensors_below(place.name):
        entry = saved.tensor(name)
        if entry is None:
            continue
        dtype, shape = entry
        at, live = inner.get(name, (None, None))
        if at is not None and live is not None and _keeps(live, shape):
            adopted[name] = (at, live)
            continue
        device = None if live is None or live.is_meta else live.device
        new = torch.zeros(shape, dtype=torch_dtype(dtype, name), device=device)
        path = at.path if at is not None else f"{place.path} -> {name}"
        adopted[name] = (at or StatePlace(name, path, place.section), new)
    return adopted


def _keeps(live: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a load must fill this very tensor: it fits, or others know it."""
    return tuple(live.shape) == shape or live.requires_grad or is_dtensor(live)
