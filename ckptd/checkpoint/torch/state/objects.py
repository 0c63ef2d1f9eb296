"""Values that are no tensors: containers, torch's dtypes and the like in the codec.

In it: errors of an object's own ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from ckptd.checkpoint.format import codec
from ckptd.errors import CkptdError, CorruptError, UsageError

DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, by key or number; None of what is taken as one."""
    kind = type(value)
    if kind in DICTS:
        return None if codec.attributes(value) else [*value.items()]
    named = isinstance(value, tuple) and codec.is_named_tuple(kind) and not codec.attributes(value)
    return [*enumerate(value)] if named or kind in (list, tuple, collections.deque) else None


def remade(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a container of the same kind that holds `items`."""
    kind: Any = type(value)
    if kind in DICTS:
        new = kind(value.default_factory) if kind is collections.defaultdict else kind()
        new.update(dict(items))
        if (said := getattr(value, "_metadata", None)) is not None:
            vars(new)["_metadata"] = said
        return new
    held = [item for _, item in items]
    if kind is collections.deque:
        return collections.deque(held, value.maxlen)
    return held if kind is list else tuple.__new__(kind, held)


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


def call_with(function: Callable[..., Any], name: str, *value: Any) -> Any:
    """Give a loaded value to an object's own function, or return what it says without one.

    Raises
    ------
    UsageError
        kind ``unsavable`` of what is to be saved: the function raised; what it raised is the
        cause.
    """
    try:
        return function(*value)
    except CkptdError:
        raise
    except Exception as error:
        raise UsageError(
            f"an object did not {'take its saved' if value else 'say its'} state",
            kind=None if value else "unsavable",
            where=name,
            found=f"{getattr(function, '__qualname__', function)} raised {error!r}"[:500],
        ) from error


def _torch_named(kind: type) -> Callable[[str], Any]:
    def decode(name: str) -> Any:
        value = getattr(torch, str(name), None)
        if not isinstance(value, kind):
            raise CorruptError(f"not a torch {kind.__name__}", found=repr(name))
        return value

    return decode


def _register() -> None:
    def short(value: Any) -> str:
        return str(value).removeprefix("torch.")

    add = codec.register
    add(torch.Size, name="torch.Size", encode=list, decode=torch.Size)
    add(torch.device, name="torch.device", encode=str, decode=torch.device)
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        add(kind, name=f"torch.{kind.__name__}", encode=short, decode=_torch_named(kind))


_register()
