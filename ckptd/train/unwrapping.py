"""Optimizers behind wrappers: the state is saved of what has it.

A wrapper has ``step`` and ``param_groups`` like an optimizer, and often no state of its own: saved
as it is, it would give a checkpoint without moments, and nobody would say so. A wrapper of one
optimizer is taken off; where anything would be lost by that, or by saving the wrapper, it is an
error.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckptd.errors import UsageError

__all__ = ["is_optimizer", "unseen_state", "unwrapped"]

_PLAIN = (torch.Tensor, nn.Module, type, str, bytes, int, float, dict, list, tuple, set)
_OF_TORCH = ("_optimizer_", "_profile_hook")
"""Hooks of an optimizer's steps: they lead to everything that was ever registered."""
_MOST = 4096
"""Objects that are looked through in one wrapper."""

# By object: what its class says may have changed for the next one.
_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def is_optimizer(value: Any) -> bool:
    """Return whether `value` is an optimizer, or has ``step`` and ``param_groups`` as one has."""
    if isinstance(value, Optimizer):
        return True
    if value is None or isinstance(value, _PLAIN):
        return False
    try:
        groups = getattr(value, "param_groups", None)
        return isinstance(groups, list | tuple) and callable(getattr(value, "step", None))
    except Exception:  # noqa: BLE001 - somebody's property; then it is none that can be used
        return False


def unwrapped(value: Any, where: str, others: Iterable[Any]) -> Any:
    """Return the optimizer that has the state of `value`, which may be `value`.

    Parameters
    ----------
    where
        Its name, for errors.
    others
        Everything else in the state: what is saved there is not lost.

    Raises
    ------
    UsageError
        kind ``optimizer-container``: it holds others whose state would be lost.
    """
    known = {id(o) for o in others}
    seen = [value]
    while True:
        inner = [i for i in _inside(value) if not any(i.value is s for s in seen)]
        own = _params(value)
        same = [i for i in inner if own & _params(i.value)]
        # What is far away may be anybody's; what the wrapper itself holds, nobody else may have.
        lost = [i for i in inner if i.near and i not in same and id(i.value) not in known]
        lost = [i for i in lost if _params(i.value)]
        if lost:
            raise _container(value, where, [*same, *lost])
        if len(same) > 1:
            # A wrapper of a wrapper may hold both.
            deep = [{id(j.value) for j in _inside(i.value)} for i in same]
            same = [i for i in same if not any(id(i.value) in d for d in deep)] or same
        if not same:
            return value
        only = same[0]
        if len(same) > 1 or _params(only.value) != own:
            raise _container(value, where, same)
        _check_wrapper(value, only, where)
        seen.append(only.value)
        value = only.value


def unseen_state(optimizer: Optimizer) -> int:
    """Return how many parameters have state that only ``state_dict()`` shows."""
    if any(optimizer.state.values()) or type(optimizer).state_dict is Optimizer.state_dict:
        return 0
    try:
        state = optimizer.state_dict().get("state")
    except Exception:  # noqa: BLE001 - it gives no state, and has none that is seen
        return 0
    return sum(bool(s) for s in state.values()) if isinstance(state, Mapping) else 0


# --- looking --------------------------------------------------------------------------------------


def _params(value: Any) -> set[int]:
    found: set[int] = set()
    for group in value.param_groups:
        params = group.get("params", ()) if isinstance(group, Mapping) else ()
        found.update(id(p) for p in params)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Inner:
    """An optimizer that a wrapper holds, the way to it, and whether the wrapper itself holds it."""

    at: str
    value: Any
    near: bool


def _inside(wrapper: Any) -> list[_Inner]:
    """Return the optimizers that a wrapper holds, but for those inside of these."""
    found: list[_Inner] = []
    seen = {id(wrapper)}
    left: deque[tuple[str, Any, int]] = deque(_attributes(wrapper, 0))
    for _ in range(_MOST):
        if not left:
            break
        at, value, depth = left.popleft()
        if id(value) in seen or value is None or isinstance(value, torch.Tensor | nn.Module):
            continue
        seen.add(id(value))
        if is_optimizer(value):
            found.append(_Inner(at, value, depth == 0))
        elif isinstance(value, Mapping):
            with suppress(Exception):  # a mapping of somebody's own
                items = [(f"{at}[{k!r}]", v, depth) for k, v in islice(value.items(), _MOST)]
                left.extend(items)
        elif isinstance(value, list | tuple | set | frozenset):
            left.extend((f"{at}[{i}]", v, depth) for i, v in enumerate(islice(value, _MOST)))
        elif isinstance(value, types.MethodType):
            left.append((f"{at}.__self__", value.__self__, 1))
        elif isinstance(value, functools.partial):
            left.extend((at, v, 1) for v in (value.func, *value.args, *value.keywords.values()))
        elif depth == 0:
            left.extend(_attributes(value, 1, at))
    return found


def _attributes(value: Any, depth: int, at: str = "") -> Iterator[tuple[str, Any, int]]:
    """Yield what an object holds, without its groups and state, and without asking properties."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | str | bytes | int | float):
        return
    own: dict[str, Any] = {}
    with suppress(Exception):  # what has no attributes, or a __dict__ of its own making
        own.update(vars(value))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                own.setdefault(name, object.__getattribute__(value, name))
    for name, item in own.items():
        if name in ("param_groups", "state", "defaults") and is_optimizer(value):
            continue
        if not name.startswith(_OF_TORCH):
            yield f"{at}.{name}", item, depth


# --- what a wrapper has of its own ----------------------------------------------------------------


def _check_wrapper(wrapper: Any, inner: _Inner, where: str) -> None:
    """Raise where something is lost if the wrapper is taken off."""
    own = _own_state(wrapper, inner.value) or _own_keys(wrapper, inner.value)
    if own:
        raise UsageError(
            "a wrapper of an optimizer has state of its own beside the optimizer's",
            kind="optimizer-container",
            where=where,
            found=f"{type(wrapper).__name__} with {', '.join(own[:6])}, around "
            f"{type(inner.value).__name__} in {inner.at.removeprefix('.')}",
            hint=f"put the optimizer into the state, and what the wrapper keeps as values: "
            f'{{"optim": wrapper{inner.at}, "wrapper": ...}}',
        )


def _own_state(wrapper: Any, inner: Any) -> list[str]:
    """Return names of state that the wrapper has and the optimizer has not."""
    state, theirs = getattr(wrapper, "state", None), getattr(inner, "state", None)
    if state is theirs or not isinstance(state, Mapping):
        return []
    names: set[str] = set()
    for key, entries in state.items():
        held = theirs.get(key) if isinstance(theirs, Mapping) else None
        if not entries or entries is held:
            continue
        # A copy of the optimizer's __dict__ keeps the state that it had at that time.
        more = set(entries) - set(held or ()) if isinstance(entries, Mapping) else {key}
        names.update(str(k)[:80] for k in more)
    return sorted(names)


def _own_keys(wrapper: Any, inner: Any) -> list[str]:
    """Return what the wrapper's ``state_dict()`` has more than the optimizer's; looks once."""
    if getattr(type(wrapper), "state_dict", None) in (None, Optimizer.state_dict):
        return []
    with suppress(TypeError):
        if wrapper in _checked:
            return []
    try:
        more = {*wrapper.state_dict()} - {"state", "param_groups"}
        more = more and more - {*inner.state_dict()}
    except Exception:  # noqa: BLE001 - it gives no state now, and what there is of the inner is saved
        return []
    if not more:
        with suppress(TypeError):
            _checked.add(wrapper)
    return sorted(str(k)[:80] for k in more)


def _container(value: Any, where: str, inner: Sequence[_Inner]) -> UsageError:
    ways = [f"optimizer{i.at}" for i in inner]
    return UsageError(
        "an optimizer holds others whose state would be lost",
        kind="optimizer-container",
        where=where,
        found=f"{type(value).__name__} with {', '.join(type(i.value).__name__ for i in inner[:6])}",
        hint="put the optimizers that it holds into the state, each by itself: "
        f'{{"optim": [{", ".join(ways[:4])}{", ..." if len(ways) > 4 else ""}], ...}}',
    )
