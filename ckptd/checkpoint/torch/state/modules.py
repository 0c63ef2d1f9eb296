"""Modules: parameters, buffers, extra state, meta tensors, FSDP, statistics of ranks.

In it: sharded parameters of FSDP2; buffers that DDP broadcasts; meta buffers that no checkpoint
holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ckptd.base.torch.tensors import (
    fsdp2_is_loaded,
    is_fsdp1,
    is_fsdp2,
    local_tensor,
    target_device,
)
from ckptd.checkpoint.format.names import WRAPPERS, escape_fqn
from ckptd.checkpoint.torch.state.leaves import (
    Leaves,
    OwnKind,
    PendingState,
    SavedNames,
    Sink,
    StatePlace,
    TensorKind,
    TensorLeaf,
)
from ckptd.checkpoint.torch.state.objects import call_with
from ckptd.checkpoint.torch.state.values import whole
from ckptd.checkpoint.torch.state.words import (
    NOTE,
    LoadPath,
    ModulePlace,
    ModuleWords,
    Saying,
    add_note,
    has_code,
    is_same_memory,
    said_versions,
    says,
    speaking_kinds,
)
from ckptd.errors import UsageError, first_few


def materialise(
    leaves: Leaves, saved: SavedNames, modules: Iterable[nn.Module], device: torch.device | None
) -> None:
    """Give memory to the meta leaves that the checkpoint has; the state follows on apply.

    Parameters keep their identity (and so their ties and the optimizers that hold them): on
    apply the contents of the Python objects are swapped. Leaves that the checkpoint lacks stay
    on the meta device.

    Raises
    ------
    UsageError
        There is a weak reference to the tensor, which forbids the swap.
    """
    metas = [
        leaf
        for leaf in leaves.made()
        if leaf.origin.is_meta
        and any(saved.tensor(n) is not None for n in (leaf.name, *leaf.aliases))
    ]
    held = {
        id(parameter.sharded_param): parameter
        for module in (modules if metas else ())
        for inner in all_modules(module)
        for parameter in _fsdp_parameters(inner)
    }
    leaves.pending[:0] = [
        PendingState(
            (leaf.name,), partial(_swap, leaf, _make(leaf, device), held.get(id(leaf.origin)))
        )
        for leaf in metas
    ]


def check_buffers(module: nn.Module, place: StatePlace) -> None:
    """Raise `UsageError` for meta buffers that no checkpoint holds."""
    names = [
        prefix + key
        for (_, prefix, inner), _ in _named_modules(module, "", place)
        for key in sorted(inner._non_persistent_buffers_set)
        if (buffer := inner._buffers.get(key)) is not None and buffer.is_meta
    ]
    if names:
        raise UsageError(
            "non-persistent buffers are on the meta device, and no checkpoint holds them",
            where=place.name,
            found=first_few(names, 16),
            hint="compute them on a real device before the load",
        )


def _make(leaf: TensorLeaf, device: torch.device | None) -> torch.Tensor:
    if weakref.getweakrefs(leaf.origin):
        raise UsageError(
            "a meta tensor cannot be replaced while a weak reference to it exists",
            where=leaf.name,
            hint="call module.to_empty(device=...) before the load",
        )
    live = leaf.origin.detach()
    new = torch.empty_like(live, device=target_device(live, device))
    if isinstance(leaf.origin, nn.Parameter):
        new = nn.Parameter(new, requires_grad=leaf.origin.requires_grad)
    leaf.tensor = new.detach()
    leaf.local = local_tensor(leaf.tensor)
    return new


def _swap(leaf: TensorLeaf, new: torch.Tensor, held: Any) -> None:
    try:
        torch.utils.swap_tensors(leaf.origin, new)
    except RuntimeError as error:
        raise UsageError(
            "a meta tensor cannot be replaced",
            where=leaf.name,
            found=str(error)[:300],
            hint="drop graphs and views of it, or call module.to_empty(device=...) before the load",
        ) from error

    if held is not None:
        # FSDP2 keeps the local memory by itself, and padded.
        with torch.no_grad():
            held.reset_sharded_param()


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    if is_fsdp2(module):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        groups = several if several is not None else [state._fsdp_param_group]
        for group in groups:
            yield from group.fsdp_params if group is not None else ()


EXTRA = "_extra_state"


class ModuleTensor(msgspec.Struct, frozen=True, eq=False):
    """A parameter or persistent buffer: its canonical FQN and where the module keeps it.

    `own` is that of `ckptd.checkpoint.torch.state.leaves.TensorLeaf`.
    """

    fqn: str
    kind: TensorKind
    tensor: torch.Tensor
    slots: dict[str, Any]
    key: str
    own: OwnKind = ""


def has_statistics(module: nn.Module) -> bool:
    """Tell whether the buffers of a module are statistics of what its own rank has seen."""
    return isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)


def all_modules(top: nn.Module) -> Iterator[nn.Module]:
    """Yield each module once, also those that are equal and not the same."""
    seen: set[int] = set()
    stack = [top]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack += [m for m in reversed(module._modules.values()) if m is not None]


def reshard(module: nn.Module) -> None:
    """Register the sharded parameters of FSDP2 modules, as ``module.state_dict()`` does.

    After a forward without a backward the unsharded ones are registered: other objects than
    those the optimizer holds, and whole on every rank.
    """
    if not fsdp2_is_loaded():
        return
    for inner in all_modules(module):
        if is_fsdp2(inner):
            inner.reshard()


def module_tensors(module: nn.Module, place: StatePlace) -> Iterator[ModuleTensor]:
    """Yield parameters and persistent buffers in order; tied ones under each of their names.

    Raises
    ------
    UsageError
        A module is wrapped in ``FullyShardedDataParallel``, which flattens parameters for modules
        whose state is not in their parameters.
    """
    return _tensors(_named_modules(module, "", place), place)


def _tensors(
    named: Iterable[tuple[ModulePlace, _Wrapper | None]], place: StatePlace
) -> Iterator[ModuleTensor]:
    for (_, prefix, inner), wrapper in named:
        _check_module(inner, prefix, place)
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                fqn = escape_fqn(prefix + key)
                yield ModuleTensor(fqn, "param", parameter, inner._parameters, key)
        for key, buffer in inner._buffers.items():
            if buffer is not None and key not in inner._non_persistent_buffers_set:
                fqn = escape_fqn(prefix + key)
                own: OwnKind = "statistics" if has_statistics(inner) else ""
                if wrapper is not None and wrapper.broadcasts(buffer):
                    own = "broadcast"
                yield ModuleTensor(fqn, "buffer", buffer, inner._buffers, key, own)


def add_module(sink: Sink, place: StatePlace, module: nn.Module) -> None:
    """Add the leaves of `module`. Changes nothing, but see `reshard`, and what its hooks do.

    Raises
    ------
    UsageError
        What the module itself says of its state cannot be saved.
    """
    reshard(module)
    named = list(_named_modules(module, "", place))
    if sink.saved is None:
        _add_saved(sink, place, module, named)
    else:
        _add_loaded(sink, sink.saved, place, module, named)


def loads_by_code(module: nn.Module, place: StatePlace) -> bool:
    """Tell whether a load runs code of a module's own."""
    return has_code(module, [placed for placed, _ in _named_modules(module, "", place)])


_WORDS: TensorKind = "buffer"
"""Tensors that a module says besides its parameters and buffers are as good as buffers."""

# By module: its tensors when it was last compared with what it says.
_compared = WeakIdKeyDictionary()


def _add_saved(
    sink: Sink,
    place: StatePlace,
    module: nn.Module,
    named: list[tuple[ModulePlace, _Wrapper | None]],
) -> None:
    placed = [p for p, _ in named]
    for p in placed:
        _check_module(p.module, p.prefix, place)
    kinds = speaking_kinds({type(p.module) for p in placed})
    asks = bool(kinds) or any(says(p.module) for p in placed)
    answer = sink.said.get(place.name)
    said = ModuleWords(place, module, placed, answer) if asks else None
    entries = list(_tensors(named, place))  # its hooks may have put others there
    form = [(entry.fqn, id(entry.tensor)) for entry in entries]
    if said is None and _compared.get(module) != form:
        # One in which nothing has code of its own: once, as long as it has the same tensors.
        said = ModuleWords(place, module, placed, answer)
    words = {} if said is None else dict(said.values)
    same, other, unsaid = {}, {}, []
    for entry in entries:
        at = place.child(entry.fqn, f".{entry.fqn}")
        word = words.pop(entry.fqn, _UNSAID)
        if word is _UNSAID or is_same_memory(word, entry.tensor):
            sink.add(at, entry.tensor, entry.kind, entry.own)
            if word is _UNSAID:
                unsaid.append(entry.fqn)
            else:
                same[entry.fqn] = entry.tensor
        else:
            other[entry.fqn] = at, entry.kind
    own: dict[str, tuple[StatePlace, TensorKind | None]] = {}
    for fqn, inner in _extra_states(placed):
        at = place.child(fqn, f".{fqn}")
        if words.pop(fqn, _UNSAID) is not _UNSAID:
            own[fqn] = at, None
        else:
            unsaid.append(fqn)
            extra = whole(call_with(inner.get_extra_state, at.name), at)
            sink.add_object(at, extra, inner.set_extra_state)
            sink.recallable = False
    if said is not None:
        said.check_taken(words)
    own |= other | {fqn: (place.child(fqn, f".{fqn}"), _WORDS) for fqn in words}
    if said is not None and (asks or own):
        saying = said.saying([*same], own, [*words, *other], unsaid)
    else:
        saying = Saying(notes=said_versions(placed))
        _compared[module] = form
    saying.add(sink, place, {} if said is None else said.said)
    sink.sayings[place.name] = saying, [*same.values()]


_UNSAID: Final = object()


def extra_states(module: nn.Module, place: StatePlace) -> Iterator[tuple[str, Any]]:
    """Yield the extra state of a module and of all below it, by its full name."""
    for fqn, inner in _extra_states(p for p, _ in _named_modules(module, "", place)):
        yield place.child(fqn, "").name, inner.get_extra_state()


def _extra_states(placed: Iterable[ModulePlace]) -> Iterator[tuple[str, nn.Module]]:
    for _, prefix, inner in placed:
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield escape_fqn(prefix) + EXTRA, inner


def _add_loaded(
    sink: Sink,
    saved: SavedNames,
    place: StatePlace,
    module: nn.Module,
    named: list[tuple[ModulePlace, _Wrapper | None]],
) -> None:
    placed = [p for p, _ in named]
    path = LoadPath(place, module, placed, saved) if has_code(module, placed) else None
    known = set()
    for entry in _tensors(named, place):
        at = place.child(entry.fqn, f".{entry.fqn}")
        add = partial(sink.add, at, entry.tensor, entry.kind, entry.own)
        known.add(entry.fqn)
        if path is None:
            add()
        else:
            path.add_slot(sink, at, entry.fqn, entry.tensor, entry.kind, add)
    for fqn, inner in _extra_states(placed):
        at = place.child(fqn, f".{fqn}")
        known.add(fqn)
        if path is None:
            sink.add_object(at, None, partial(call_with, inner.set_extra_state, at.name))
        else:
            path.add_object(sink, at, fqn)
    # What wraps another has no note: the innermost comes last.
    for prefix, raw in {p.prefix: p.raw for p in placed}.items():
        name = place.child(escape_fqn(prefix) + NOTE, "").name
        if name not in saved.objects or sink.has(name):
            continue
        if path is None:
            add_note(sink, place, prefix, None)
        else:
            path.add_note(sink, prefix, raw)
    if path is not None:
        for fqn in path.said.values:
            if fqn not in known:
                path.add_word(sink, place.child(fqn, f".{fqn}"), fqn, _WORDS)
        path.adopt(sink, _WORDS)
        sink.leaves.paths.append(path)


class _Wrapper:
    """A DistributedDataParallel, and what it makes the same on all ranks as a forward begins."""

    def __init__(self, module: DistributedDataParallel) -> None:
        ignored = getattr(module, "parameters_to_ignore", ())  # buffers are among them
        named = module.module.named_buffers(remove_duplicate=False)
        sent = [b for name, b in named if name not in ignored] if module.broadcast_buffers else []
        self._sent = {id(b) for b in sent}

    def broadcasts(self, buffer: torch.Tensor) -> bool:
        """Tell whether a buffer is overwritten by rank 0's."""
        return id(buffer) in self._sent


def _named_modules(
    module: nn.Module,
    prefix: str,
    place: StatePlace,
    around: tuple[int, ...] = (),
    wrapper: _Wrapper | None = None,
    raw: str = "",
) -> Iterator[tuple[ModulePlace, _Wrapper | None]]:
    """Yield modules with their prefixes, and what wraps them; shared modules come each time.

    A prefix is empty or ends in a dot.
    """
    if id(module) in around:
        raise UsageError("a module contains itself", where=place.child(prefix, "").name)
    if isinstance(module, DistributedDataParallel):
        wrapper = _Wrapper(module)
    yield ModulePlace(raw, prefix, module), wrapper
    for key, child in module._modules.items():
        if child is None:
            continue
        # DDP's `module` is an ordinary attribute name elsewhere, so only the wrapper's own goes.
        wrapped = key == "module" and isinstance(module, DistributedDataParallel | DataParallel)
        inner = prefix if wrapped or key in WRAPPERS else f"{prefix}{key}."
        above = (*around, id(module))
        yield from _named_modules(child, inner, place, above, wrapper, f"{raw}{key}.")


def _check_module(module: nn.Module, prefix: str, place: StatePlace) -> None:
    if is_fsdp1(module):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) flattens parameters and loses their names and shapes",
            where=place.child(prefix.removesuffix("."), "").name,
            hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
        )
