"""Values as one object, with the tensors inside them as leaves of their own."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.names import escape_key
from ckptd.checkpoint.torch.state.leaves import (
    PendingState,
    SavedNames,
    Sink,
    StatePlace,
    TensorKind,
    memory_key,
)
from ckptd.checkpoint.torch.state.objects import TensorRef, dict_like, map_refs, refs
from ckptd.checkpoint.torch.state.tensors import is_dtensor, target_device, torch_dtype
from ckptd.checkpoint.torch.state.walk import fqn_segment, is_state_dict, refuse_optimizer_ids
from ckptd.errors import MismatchError, UsageError
from ckptd.types import DTYPES

Array = np.ndarray[Any, Any]


def add_array(sink: Sink, place: StatePlace, array: Array, put: Callable[[Any], None]) -> None:
    """Add `array`, in its own memory where torch can write to it; else `put` replaces it.

    Raises
    ------
    UsageError
        kind ``unsavable``: an array of objects, strings, dates or records, or of a class that adds
        to arrays (a masked one).
    """
    shared, tensor = _as_tensor(array, place)
    leaf = sink.add_tensor(place, tensor, "ndarray")
    if not shared or leaf.assign is not None:
        before = leaf.assign if leaf.name != place.name else None

        def assign(new: torch.Tensor) -> None:
            if before is not None:
                before(new)
            put(_as_array(new, array.dtype))

        leaf.assign = assign


def _as_tensor(array: Array, place: StatePlace) -> tuple[bool, torch.Tensor]:
    name = array.dtype.name
    if name not in DTYPES or not codec.is_plain_array(array):
        raise UsageError(
            f"a numpy array of this kind cannot be saved: {place.path}",
            kind="unsavable",
            where=place.name,
            wanted="numbers or bools, and no more than these",
            found=f"{type(array).__name__} of {array.dtype}",
            hint="save what it is made of: of a masked array data and mask",
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
    fresh: bool = False,
) -> None:
    """Add `value` as one object; tensors in its dicts, lists and tuples become leaves.

    In a load the checkpoint decides the structure: tensors that only the live value has are left
    out, those that only the checkpoint has are made, and `put` is given the saved structure with
    live tensors where there are some.

    Parameters
    ----------
    fresh
        The value is what an object said of itself, and `put` is its own load: no memory that it
        said is written to. Names of one tensor in the checkpoint are names of one tensor again.

    Raises
    ------
    UsageError
        The value contains itself, or something that cannot be saved.
    """
    inner: dict[str, tuple[StatePlace, torch.Tensor]] = {}
    bare = _take_tensors(place, value, inner, {})
    if sink.saved is not None and place.name in sink.saved.objects:
        inner = _adopt(sink, place, inner, fresh=fresh)
    elif sink.saved is not None and fresh and sink.saved.tensors:
        _add_parts(sink, bare, inner, put, kind)
        inner = {}
    for at, tensor in [*inner.values()]:
        known = sink.leaves.tensor(at.name)
        if known is None or (sink.saved is None and memory_key(known.origin) != memory_key(tensor)):
            sink.add_tensor(at, tensor, kind)
        else:
            # What a wrapper of a module says of it is the module's own, under the same name.
            inner.pop(at.name)

    def tensor_of(name: str) -> torch.Tensor:
        leaf = sink.leaves.tensor(name)
        if leaf is None:
            raise MismatchError(
                "a value refers to a tensor that was not loaded", where=place.name, wanted=name
            )
        # The live object where there is one: a Parameter stays the one that its optimizer knows.
        return inner[name][1] if name in inner else leaf.tensor

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
    taken = (
        (k, _take_tensors(place.child(segment(k), f"[{k!r}]"), v, inner, around))
        for k, v in value.items()
    )
    return dict_like(value, taken)


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
    sink: Sink,
    place: StatePlace,
    inner: dict[str, tuple[StatePlace, torch.Tensor]],
    *,
    fresh: bool,
) -> dict[str, tuple[StatePlace, torch.Tensor]]:
    """Return the tensors that the checkpoint has below `place`, live ones where they fit."""
    adopted: dict[str, tuple[StatePlace, torch.Tensor]] = {}
    made: dict[str, torch.Tensor] = {}
    saved = sink.saved or SavedNames({})
    for name in saved.tensors_below(place.name):
        entry = saved.tensor(name)
        if entry is None:
            continue
        dtype, shape = entry
        at, live = inner.get(name, (None, None))
        if at is not None and live is not None and _keeps(sink, name, live, shape, fresh=fresh):
            adopted[name] = (at, live)
            continue
        path = at.path if at is not None else f"{place.path} -> {name}"
        one = saved.aliases.get(name, name) if fresh else name
        if one not in made:
            made[one] = fresh_tensor(live, torch_dtype(dtype, name), shape, sink.device)
        adopted[name] = (at or StatePlace(name, path, place.section), made[one])
    return adopted


def _keeps(
    sink: Sink, name: str, live: torch.Tensor, shape: tuple[int, ...], *, fresh: bool
) -> bool:
    """Return whether a load must fill this very tensor: it fits, or others know it."""
    fits = tuple(live.shape) == shape
    if not fits or not fresh:
        return fits or live.requires_grad or is_dtensor(live)
    # Of what an object says only what is one tensor with others of the state, there and here.
    saved, leaf = sink.saved, sink.holder(memory_key(live))
    if saved is None or leaf is None:
        return False
    one = saved.aliases.get(name, name)
    return any(saved.aliases.get(n, n) == one for n in (leaf.name, *leaf.aliases))


def fresh_tensor(
    live: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device | None,
) -> torch.Tensor:
    """Return memory for what the checkpoint has, in the form of `live`, if it is of that shape.

    What the checkpoint leaves out of it is what `live` has.
    """
    if live is None or live.is_meta or tuple(live.shape) != shape:
        on = None if live is None else target_device(live, device)
        size = math.prod(shape) * dtype.itemsize
        # torch makes no zeros of some types.
        return torch.zeros(size, dtype=torch.uint8, device=on).view(dtype).reshape(shape)
    new = live.detach().clone()
    new = new if new.dtype == dtype else torch.empty_like(new, dtype=dtype)
    learns = live.requires_grad and (dtype.is_floating_point or dtype.is_complex)
    if isinstance(live, nn.Parameter):
        return nn.Parameter(new, requires_grad=learns)
    return new.requires_grad_(learns)


def _add_parts(
    sink: Sink,
    said: Any,
    inner: dict[str, tuple[StatePlace, torch.Tensor]],
    put: Callable[[Any], None],
    kind: TensorKind,
) -> None:
    """Add what an object said where the checkpoint has tensors of it, and not what is around them.

    It is given what it said, with what was loaded in it.
    """
    loaded = {name: live for name, (_, live) in inner.items()}
    names = []
    for name, (at, live) in inner.items():
        entry = sink.saved.tensor(name) if sink.saved else None
        dtype = live.dtype if entry is None else torch_dtype(entry[0], name)
        new = fresh_tensor(live, dtype, tuple(live.shape), sink.device)
        leaf = sink.add_tensor(at, new, kind)
        take = partial(loaded.__setitem__, name, new)
        sink.leaves.pending.append(PendingState((leaf.name,), take))
        names.append(leaf.name)
    change = lambda: put(map_refs(said, loaded.__getitem__))  # noqa: E731
    sink.leaves.handing.append(PendingState(tuple(names), change))
