"""Objects with tensors inside; numpy arrays; how large one may be to stay in the manifest.

A `TensorRef` represents a tensor inside an encoded value: the tensor is a leaf of its own, under
the name that the reference holds, or lies beside the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptd.base.grids.grid import reach_of
from ckptd.base.torch.tensors import (
    as_bytes,
    dtype_name,
    has_own_places,
    is_async,
    is_dtensor,
    target_device,
    torch_dtype,
)
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.names import escape_key
from ckptd.checkpoint.torch.state.leaves import (
    PendingState,
    SavedNames,
    Sink,
    StatePlace,
    TensorKind,
    bad,
    check_tensor,
    memory_key,
    twice,
)
from ckptd.checkpoint.torch.state.objects import children, remade
from ckptd.checkpoint.torch.state.walk import (
    Nesting,
    fqn_segment,
    is_state_dict,
    refuse_optimizer_ids,
)
from ckptd.errors import CorruptError, MismatchError, UsageError
from ckptd.types import DTYPES

MAX_INLINE_BYTES = 16 << 20
"""Largest tensor inside a value of a type of its own or inside a per-rank value."""

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
            wanted="numbers or bools only",
            found=f"{type(array).__name__} of {array.dtype}",
            hint="save its parts: of a masked array data and mask",
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
    bare = mapped(value, partial(_take, inner), place)
    said = {name: tensor for name, (_, tensor) in inner.items()}
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
    forms = _forms(said.values(), place) if sink.saved is None else {}
    if any(forms.values()):
        bare = _with_tensors(bare, lambda r: TensorRef(r.name, forms[id(said[r.name])]))

    def tensors(saved: Any) -> dict[str, torch.Tensor]:
        found = {}
        for ref in _refs(saved):
            if (leaf := sink.leaves.tensor(ref.name)) is None:
                message = "a value refers to a tensor that was not loaded"
                raise MismatchError(message, where=place.name, wanted=ref.name)
            # The live object where there is one: a Parameter stays the one its optimizer knows.
            found[ref.name] = inner[ref.name][1] if ref.name in live else leaf.tensor
        return found

    def give(saved: Any) -> None:
        put(_filled(saved, tensors(saved), live))

    live = {name for name, (_, tensor) in inner.items() if said.get(name) is tensor}
    sink.add_object(place, bare, give, check=tensors)


def _take(inner: dict[str, tuple[StatePlace, torch.Tensor]], value: Any, at: Any) -> Any:
    """Return a reference for a tensor, and note it in `inner`; return all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if at.name in inner:
        raise twice(at.name, inner[at.name][0].path, at.path)
    inner[at.name] = (at, value)
    return TensorRef(at.name)


def _segment(key: Any) -> str:
    return escape_key(key if type(key) in (str, int) else repr(key))


def _adopt(
    sink: Sink, place: StatePlace, inner: dict[str, tuple[StatePlace, torch.Tensor]], *, fresh: bool
) -> dict[str, tuple[StatePlace, torch.Tensor]]:
    """Return the tensors that the checkpoint has below `place`, live ones where they fit."""
    adopted: dict[str, tuple[StatePlace, torch.Tensor]] = {}
    made: dict[str, torch.Tensor] = {}
    saved = sink.saved or SavedNames({})
    for name in saved.tensors_below(place.name):
        if (entry := saved.tensor(name)) is None:
            continue
        dtype, shape = entry
        at, live = inner.get(name, (None, None))
        if fresh and live is not None and not (is_dtensor(live) or _is_usual(live)):
            live = None
        if at is not None and live is not None and _keeps(sink, name, live, shape, fresh=fresh):
            adopted[name] = (at, live)
            continue
        path = at.path if at is not None else f"{place.path} -> {name}"
        one = saved.aliases.get(name, name)
        if one not in made:
            made[one] = fresh_tensor(live, torch_dtype(dtype, name), shape, sink.device)
        adopted[name] = (at or StatePlace(name, path, place.section), made[one])
    return adopted


def _is_usual(tensor: torch.Tensor) -> bool:
    odd = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return type(tensor) in _PLAIN and not odd


def _keeps(
    sink: Sink, name: str, live: torch.Tensor, shape: tuple[int, ...], *, fresh: bool
) -> bool:
    """Return whether a load must fill this very tensor: it fits, or others know it."""
    fits = tuple(live.shape) == shape
    if not fresh or (not fits and is_dtensor(live)):
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
    change = lambda: put(_with_tensors(said, lambda ref: loaded[ref.name]))  # noqa: E731
    sink.leaves.handing.append(PendingState(tuple(names), change))


# --- tensors inside of values ---------------------------------------------------------------------

_Form = dict[str, Any]
_Span = tuple[int, int, int, torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The place of the tensor called `name` inside a value, and its form, as of `_forms`."""

    name: str
    form: _Form = field(default_factory=dict, hash=False)


class _Whole(list[Any]):
    """Tensors by number, and the value in which references name them."""


def mapped(
    value: Any, function: Callable[[Any, StatePlace | None], Any], place: StatePlace | None = None
) -> Any:
    """Return a copy of `value` in which ``function(it, place)`` replaces what is not a container.

    What is one container there is one in the copy.

    Raises
    ------
    UsageError
        A container contains itself; kind ``unsavable``: it is nested too deeply, where there are
        places.
    """
    made: dict[int, Any] = {}
    around = Nesting()

    def of(value: Any, at: StatePlace | None) -> Any:
        if (items := children(value)) is None:
            return function(value, at)
        around.enter(value, "" if at is None else at.path[:200])
        if id(value) not in made:
            segment = _segment
            if isinstance(value, dict) and at is not None:
                refuse_optimizer_ids(value, at)
                segment = fqn_segment if is_state_dict(value) else _segment
            held = [(k, of(v, at and at.child(segment(k), f"[{k!r}]"))) for k, v in items]
            made[id(value)] = remade(value, held)
        around.leave(value)
        return made[id(value)]

    return of(value, place)


def _with_tensors(value: Any, function: Callable[[TensorRef], Any]) -> Any:
    return mapped(value, lambda v, _: function(v) if isinstance(v, TensorRef) else v)


def _refs(value: Any) -> list[TensorRef]:
    found: list[TensorRef] = []
    _with_tensors(value, found.append)
    return found


def _forms(tensors: Iterable[torch.Tensor], place: StatePlace) -> dict[int, _Form]:
    """Return by id what torch's own file says of tensors besides type, shape and elements.

    ``learns`` and ``parameter`` are flags, ``attributes`` what was set on it. ``memory`` is there
    of what shares memory, or has no rows in order: the number of the first tensor that shares
    it, the first element in it, the strides, and the number of the tensor. Of one that shares
    none, gaps and repetitions are left out.

    Raises
    ------
    UsageError
        kind ``unsavable``: a tensor that cannot be saved, or of a class that may add to tensors.
    """
    forms: dict[int, _Form] = {}
    lying: dict[tuple[int, int], list[_Span]] = {}
    for number, tensor in enumerate({id(t): t for t in tensors}.values()):
        form = forms[id(tensor)] = {"learns": True} if tensor.requires_grad else {}
        if more := vars(tensor):
            form["attributes"] = more
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            form["parameter"] = True
        if type(tensor) not in _PLAIN:
            if is_dtensor(tensor) or is_async(tensor):
                continue
            hint = "tensor.as_subclass(torch.Tensor), and its other attributes as values"
            found = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            raise bad(place, "a tensor of a class that may hold more than the tensor", found, hint)
        if not tensor.is_conj() and not tensor.is_neg():
            first, reach = int(tensor.storage_offset()), max(1, tensor.numel())
            if not tensor.is_contiguous():
                reach = reach_of(tuple(tensor.shape), tensor.stride())
            # torch saves no memory that is seen as two types.
            memory = tensor.untyped_storage()._cdata, id(tensor.dtype)
            lying.setdefault(memory, []).append((first, first + reach, number, tensor))
    for spans in lying.values():
        group: list[_Span] = []
        for span in [*sorted(spans), None]:
            if span is not None and (not group or max(s[1] for s in group) > span[0]):
                group.append(span)
                continue
            start, of = group[0][0], min(s[2] for s in group)
            for first, last, number, tensor in group:
                dense = last - first == tensor.numel() and not tensor.is_contiguous()
                if len(group) > 1 or (dense and has_own_places(tensor)):
                    at = [of, first - start, list(tensor.stride()), number]
                    forms[id(tensor)]["memory"] = at
            group = [] if span is None else [span]
    return forms


def _filled(
    value: Any, tensors: Mapping[str, torch.Tensor], live: Collection[str] = frozenset()
) -> Any:
    """Return `value` with tensors, by name, in the places of references: in their form, or `live`.

    Raises
    ------
    CorruptError
        A form is none.
    """

    def key(ref: TensorRef) -> tuple[int, str]:
        return id(tensors[ref.name]), repr(ref.form)

    refs = {key(r): r for r in _refs(value) if r.name not in live}
    memory: dict[int, torch.Tensor] = {}
    try:
        for ref in refs.values():
            tensor = tensors[ref.name]
            of, first, strides, _ = ref.form.get("memory", (None, 0, (), 0))
            if of is not None:
                reach = reach_of(tuple(tensor.shape), tuple(strides)) if tensor.numel() else 0
                if of not in memory or memory[of].numel() < first + reach:
                    memory[of] = tensor.detach().new_empty(first + reach)
        made = {k: _in_form(tensors[r.name], r.form, memory) for k, r in refs.items()}
    except (LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        message, found = "a tensor inside a value cannot have this form", repr(error)[:200]
        raise CorruptError(message, found=found) from None
    return _with_tensors(value, lambda r: tensors[r.name] if r.name in live else made[key(r)])


def _in_form(tensor: torch.Tensor, form: _Form, memory: Mapping[int, torch.Tensor]) -> torch.Tensor:
    new = tensor.detach()
    if said := form.get("memory"):
        of, first, strides, _ = said
        new = new.new_empty(0).set_(memory[of].untyped_storage(), first, tensor.shape, strides)
        once = tuple(slice(None if s else 1) for s in strides)  # what repeats is written once
        new[once].copy_(tensor[once])
    elif not is_dtensor(new) and not new.is_contiguous():
        new = new.contiguous()
    if form.get("parameter"):
        new = nn.Parameter(new, requires_grad=False)
    vars(new).update(form.get("attributes", {}))
    return new.requires_grad_(bool(form.get("learns")))


def whole(value: Any, place: StatePlace) -> Any:
    """Return `value` so that it can be encoded as one, with the tensors that are in it.

    Raises
    ------
    UsageError
        As of `mapped`; kind ``unsavable``: a tensor of a kind that cannot be saved.
    """
    found: dict[int, torch.Tensor] = {}
    mapped(value, lambda v, _: found.setdefault(id(v), v) if isinstance(v, torch.Tensor) else v)
    for tensor in found.values():
        check_tensor(place, tensor, loading=False)
    forms = _forms(found.values(), place)
    if not any(forms.values()):
        return value
    refs = {i: TensorRef(str(n), forms[i]) for n, i in enumerate(found)}
    plain = {refs[i].name: tensor.detach().contiguous() for i, tensor in found.items()}
    return _Whole([plain, mapped(value, lambda v, _: refs.get(id(v), v))])


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    place = StatePlace("", "inside of a value", "")
    check_tensor(place, tensor, loading=False)
    [form] = _forms([tensor], place).values()
    if tensor.nbytes > MAX_INLINE_BYTES:
        found = f"{tensor.nbytes} bytes, shape {tuple(tensor.shape)}"
        hint = "put it into a dict or a list of the state, where it is saved as a tensor"
        raise bad(place, f"a tensor is larger than {MAX_INLINE_BYTES} bytes", found, hint)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = as_bytes(plain).tobytes()
    raw = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": data}
    return {**raw, "form": form} if form else raw


def _decode_tensor(raw: dict[str, Any]) -> Any:
    dtype = torch_dtype(raw["dtype"])
    shape, data = [int(n) for n in raw["shape"]], raw["data"]
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise CorruptError("length and shape of a tensor disagree")
    tensor = torch.empty(shape, dtype=dtype)
    if data:  # torch has no view of no bytes as a wider type
        flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        tensor = flat.view(dtype).reshape(shape)
    return _filled(TensorRef("", raw.get("form", {})), {"": tensor})


def _register() -> None:
    add = codec.register
    add(
        TensorRef,
        name="ckptd.TensorRef",
        encode=lambda r: [r.name, r.form] if r.form else r.name,
        decode=lambda raw: TensorRef(raw) if isinstance(raw, str) else TensorRef(*raw),
    )
    add(_Whole, name="ckptd.Value", encode=list, decode=lambda raw: _filled(raw[1], raw[0]))
    for kind in _PLAIN:
        add(kind, name=f"torch.{kind.__name__}", encode=_encode_tensor, decode=_decode_tensor)
        codec.identified.add(kind)


_register()
