"""Walk through a state: what is a module, optimizer, wrapper, stateful object or plain value.

In it: how far a wrapper is searched for an optimizer; refused ``Optimizer.state_dict()``.

Dicts are walked key by key. A list or tuple that holds modules, optimizers and the like is walked
item by item; a list or tuple of mere values (tensors among them) is one site, so that its length
may differ between what was saved and what is live.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from operator import itemgetter, setitem
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ckptd.base.torch.tensors import PLAIN
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.names import canonical_fqn, escape_fqn, escape_key, unescape_key
from ckptd.checkpoint.torch.state.hosted import HOSTED, HostedOptimizer
from ckptd.checkpoint.torch.state.leaves import PerRank, SavedNames, StatePlace, put_nothing
from ckptd.checkpoint.torch.state.objects import DICTS, replace_in_place
from ckptd.errors import UsageError

_PLAIN = (torch.Tensor, nn.Module, type, str, bytes, int, float, dict, list, tuple, set)
_OF_TORCH = ("_optimizer_", "_profile_hook")
"""Hooks of an optimizer's steps: they lead to everything that was ever registered."""
_WORDS = ("state_dict", "load_state_dict")
_SAYING = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_TAKING = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
_MOST = 4096
"""Objects that are looked through in one wrapper."""


def is_optimizer(value: Any) -> bool:
    """Return whether `value` is an optimizer, or has ``step`` and ``param_groups`` as one has."""
    if isinstance(value, Optimizer):
        return True
    if value is None or isinstance(value, _PLAIN):
        return False
    try:
        groups = getattr(value, "param_groups", None)
        return isinstance(groups, list | tuple) and callable(getattr(value, "step", None))
    except Exception:  # noqa: BLE001 - a property of the user's class raises: not an optimizer
        return False


def unwrapped(value: Any, where: str, others: Iterable[Any]) -> tuple[Any, Any]:
    """Return the optimizer with the state of `value`, perhaps `value` itself, and its speaker.

    That is the outermost wrapper with a ``state_dict`` and ``load_state_dict`` of its own, or None.

    Parameters
    ----------
    where
        Its name, for errors.
    others
        Everything else in the state: what is saved there is not lost.

    Raises
    ------
    UsageError
        It holds others whose state would be lost.
    """
    known = {id(o) for o in others}
    seen, speaker = [value], None
    while True:
        hosts = HOSTED in getattr(value, "__dict__", ())
        if hosts and (hosted := HostedOptimizer.of(value)) is not None:
            return hosted, None
        inner = [i for i in _inside(value) if not any(i.value is s for s in seen)]
        own = _params(value)
        same = [i for i in inner if own & _params(i.value)]
        # A distant value may belong to another object; one in the wrapper itself may not.
        lost = [i for i in inner if i.near and i not in same and id(i.value) not in known]
        lost = [i for i in lost if _params(i.value)]
        if lost:
            raise _container(value, where, [*same, *lost])
        if len(same) > 1:
            # A wrapper of a wrapper may hold both.
            deep = [{id(j.value) for j in _inside(i.value)} for i in same]
            same = [i for i in same if not any(id(i.value) in d for d in deep)] or same
        if not same:
            return value, speaker
        only = same[0]
        if len(same) > 1 or _params(only.value) != own:
            raise _container(value, where, same)
        if _speaks(value, only, where) and speaker is None:
            speaker = value
        seen.append(only.value)
        value = only.value


def holds_state(entry: Any) -> bool:
    """Tell whether an optimizer's state of a parameter is any; a tensor is, whatever is in it."""
    return isinstance(entry, torch.Tensor) or bool(entry)


def has_own_words(optimizer: Any) -> bool:
    """Return whether an optimizer says or takes more than torch's own: an override, or a hook."""
    own = getattr(optimizer, "__dict__", {})
    words = (*_WORDS, "__setstate__")
    if not own.keys().isdisjoint(words) or any(own.get(hooks) for hooks in _SAYING + _TAKING):
        return True
    return not all(_is_torchs(getattr(type(optimizer), word, None)) for word in words)


def _is_torchs(word: Any) -> bool:
    """Tell whether a method is that of one of torch's own optimizers.

    These only fill in what older checkpoints lack. `functools.wraps` gives a function the module of
    another, and not its globals.
    """
    return str(getattr(word, "__module__", "")).startswith("torch.optim.") and getattr(
        word, "__globals__", {}
    ).get("__name__", "torch.").startswith("torch.")


# --- looking --------------------------------------------------------------------------------------


def _params(value: Any) -> set[int]:
    found: set[int] = set()
    for group in getattr(value, "param_groups", None) or ():
        params = group.get("params", ()) if isinstance(group, Mapping) else ()
        found.update(id(p) for p in params)
    return found


class _Inner(msgspec.Struct, frozen=True, eq=False):
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
            with suppress(Exception):  # a mapping of the user's own class
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


def _speaks(wrapper: Any, inner: _Inner, where: str) -> bool:
    """Tell whether a wrapper says and takes the state by code of its own.

    Raises `UsageError` where something is lost if it is taken off.
    """
    words = [word for word in _WORDS if _is_own(wrapper, word)]
    own = _own_state(wrapper, inner.value) + (words if len(words) == 1 else [])
    mine, theirs = (getattr(o, "__dict__", {}) for o in (wrapper, inner.value))
    own += [h for h in _SAYING + _TAKING if mine.get(h) and mine[h] is not theirs.get(h)]
    if own:
        raise UsageError(
            "a wrapper of an optimizer has its own state or state_dict()",
            where=where,
            found=f"{type(wrapper).__name__} with {', '.join(own[:6])}, around "
            f"{type(inner.value).__name__} in {inner.at.removeprefix('.')}",
            hint=f"put the optimizer into the state, and the wrapper's values beside it: "
            f'{{"optim": wrapper{inner.at}, "wrapper": ...}}',
        )
    return bool(words)


def _is_own(wrapper: Any, word: str) -> bool:
    """Tell whether a method is a wrapper's own: neither torch's nor that of what is inside."""
    found = getattr(wrapper, word, None)
    mine = getattr(found, "__self__", wrapper) is wrapper
    return mine and callable(found) and not _is_torchs(found)


def _own_state(wrapper: Any, inner: Any) -> list[str]:
    """Return names of state that the wrapper has and the optimizer has not."""
    state, theirs = getattr(wrapper, "state", None), getattr(inner, "state", None)
    if state is theirs or not isinstance(state, Mapping):
        return []
    names: set[str] = set()
    for key, entries in state.items():
        held = theirs.get(key) if isinstance(theirs, Mapping) else None
        if not holds_state(entries) or entries is held:
            continue
        # A copy of the optimizer's __dict__ keeps the state that it had at that time.
        more = set(entries) - set(held or ()) if isinstance(entries, Mapping) else {key}
        names.update(str(k)[:80] for k in more)
    return sorted(names)


def _container(value: Any, where: str, inner: Sequence[_Inner]) -> UsageError:
    ways = [f"optimizer{i.at}" for i in inner]
    return UsageError(
        "an optimizer holds others whose state would be lost",
        where=where,
        found=f"{type(value).__name__} with {', '.join(type(i.value).__name__ for i in inner[:6])}",
        hint="put each of the optimizers that it holds into the state: "
        f'{{"optim": [{", ".join(ways[:4])}{", ..." if len(ways) > 4 else ""}], ...}}',
    )


class Site(msgspec.Struct, frozen=True):
    """A value that is no container: `put` puts another value in its place.

    `speaker` says and takes the state of an optimizer that it is around.
    """

    place: StatePlace
    value: Any
    put: Callable[[Any], None]
    speaker: Any = None


class TensorRun(NamedTuple):
    """Value of the one site of plain tensors that stand one behind the other in a dict.

    Attributes
    ----------
    held
        The dict.
    items
        Their keys, and they.
    named
        Gives the segment of a name for a key.
    """

    held: Any
    items: list[tuple[Any, torch.Tensor]]
    named: Callable[[Any], str]

    @property
    def segments(self) -> list[str]:
        """The segments of their names."""
        return [self.named(key) for key, _ in self.items]


def one_by_one(sites: Iterable[Site]) -> Iterator[Site]:
    """Yield a site for each tensor of a run, and others as they are."""
    for site in sites:
        if type(site.value) is not TensorRun:
            yield site
            continue
        held, items, named = site.value
        for key, tensor in items:
            yield Site(_child(site.place, named(key), key), tensor, partial(setitem, held, key))


def _child(place: StatePlace, segment: str, key: Any) -> StatePlace:
    """Return the place of an item of a dict; at the top each is a section."""
    child = place.child(segment, f"[{key!r}]")
    return child if place.name else StatePlace(segment, child.path, key)


_TOP = StatePlace("", "state", "")


def walk(state: Mapping[str, Any], saved: SavedNames | None = None) -> list[Site]:
    """Return the sites of `state` in order.

    Parameters
    ----------
    state
        Any nesting; keys at the top are strings.
    saved
        What a load is going to read. Where the live container holds only plain values, the
        checkpoint decides whether it is one value (it was empty when saved) or many.

    Raises
    ------
    UsageError
        Kind ``unsavable``; or names that are none, an `Optimizer.state_dict()` whose ids mean
        nothing later, or an optimizer around others, of which something would be lost.
    """
    given: object = state
    if not isinstance(given, Mapping) or {*map(type, given)} - {str}:
        raise UsageError(
            "the state must be a dict with string keys",
            wanted='{"model": model, "optim": optimizer, ...}',
            found=type(state).__name__,
        )
    if saved is not None and not isinstance(state, MutableMapping):
        raise UsageError(
            "values of this state cannot be replaced", wanted="a dict", found=type(state).__name__
        )
    walker = _Walker(saved)
    walker.enter(state, "state")
    return _without_wrappers([*walker.items(_TOP, state, escape_key)])


def _without_wrappers(sites: list[Site]) -> list[Site]:
    """Put optimizers in the place of what is only around them."""
    found = [i for i, site in enumerate(sites) if is_optimizer(site.value)]
    for i in found:
        others = [sites[j].value for j in found if j != i]
        bare, speaker = unwrapped(sites[i].value, sites[i].place.name, others)
        if bare is not sites[i].value:
            sites[i] = msgspec.structs.replace(sites[i], value=bare, speaker=speaker)
    return sites


def is_stateful(value: Any) -> bool:
    """Return whether `value` is an object with ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def is_live(value: Any) -> bool:
    """Return whether `value` has an identity that a load must keep, other than a tensor's."""
    special = nn.Module | torch.optim.Optimizer | torch.Generator | PerRank
    return isinstance(value, special) or is_stateful(value)


def is_state_dict(value: dict[Any, Any]) -> bool:
    """Return whether the keys of `value` are FQNs: all tensors, or what a module gave."""
    if {*map(type, value)} != {str}:
        return False
    one_of_each = {type(v): v for v in value.values()}.values()
    return hasattr(value, "_metadata") or all(isinstance(v, torch.Tensor) for v in one_of_each)


def refuse_optimizer_ids(value: dict[Any, Any], place: StatePlace) -> None:
    """Raise `UsageError` for what `Optimizer.state_dict()` returns."""
    groups = value.get("param_groups")
    if "state" not in value or not isinstance(groups, list):
        return
    ids = [g.get("params") for g in groups if isinstance(g, dict)]
    if any(isinstance(i, list) and any(isinstance(x, int) for x in i) for i in ids):
        raise UsageError(
            "an optimizer's state_dict() refers to parameters by number, which is not stable",
            where=place.name,
            found=place.path,
            hint="put the optimizer itself into the state",
        )


class Nesting:
    """The containers that lie around what is looked at."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}

    def enter(self, container: Any, path: str) -> None:
        """Note that `container` is being walked, or raise when it is inside itself."""
        if id(container) in self._open:
            raise UsageError(
                "a container of the state contains itself",
                where=path,
                found=f"also at {self._open[id(container)]}",
            )
        if len(self._open) > codec.MAX_DEPTH:
            raise UsageError("nested too deeply", kind="unsavable", where=path[:200])
        self._open[id(container)] = path

    def leave(self, container: Any) -> None:
        """Note that it has been walked."""
        del self._open[id(container)]


class _Walker(Nesting):
    def __init__(self, saved: SavedNames | None) -> None:
        super().__init__()
        self._saved = saved

    def visit(self, place: StatePlace, value: Any, put: Callable[[Any], None]) -> Iterator[Site]:
        # Tensors are most of a state, and asking whether an object is live costs most of a walk.
        if not isinstance(value, (dict, list, tuple)) or is_live(value):
            yield Site(place, value, put)
            return
        self.enter(value, place.path)
        if isinstance(value, dict):
            yield from self._visit_dict(place, value, put)
        elif self._holds(is_live, value, place.path):
            yield from self._visit_sequence(place, value, put)
        else:
            yield Site(place, value, partial(_put_container, value, put))
        self.leave(value)

    def _visit_dict(
        self, place: StatePlace, value: dict[Any, Any], put: Callable[[Any], None]
    ) -> Iterator[Site]:
        refuse_optimizer_ids(value, place)
        # What has a place of its own in the live state stays of its class.
        plain = value if type(value) in DICTS else dict(value)
        one = Site(place, plain, partial(_put_container, value, put))
        if isinstance(value, Counter) or {*map(type, value)} - {str, int}:
            if self._holds(is_live, value, place.path):
                raise UsageError(
                    "a key cannot be used as a name in a checkpoint",
                    where=place.path,
                    wanted="str or int",
                    found=", ".join(repr(k)[:40] for k in value if type(k) not in (str, int)),
                )
            yield one
        elif adopted := self._saved_below(place, value):
            yield from _adopt(place, value, adopted)
        elif not value or (
            self._saved is not None
            and place.name in self._saved.objects
            and not self._holds(_has_place, value, place.path)
        ):
            # Where it is empty there is no leaf below that could tell that it exists.
            yield one
        else:
            yield from self.items(place, value, fqn_segment if is_state_dict(value) else escape_key)

    def items(
        self, place: StatePlace, value: Mapping[Any, Any], named: Callable[[Any], str]
    ) -> Iterator[Site]:
        """Yield the sites of all items of a dict."""
        pairs = [*value.items()]
        plain, left = map(PLAIN.__contains__, map(type, map(itemgetter(1), pairs))), iter(pairs)
        for run, some in groupby(plain):
            items = [*islice(left, len([*some]))]
            if run:
                yield Site(place, TensorRun(value, items, named), put_nothing)
                continue
            for key, item in items:
                put = partial(setitem, value, key)
                yield from self.visit(_child(place, named(key), key), item, put)

    def _visit_sequence(
        self, place: StatePlace, value: list[Any] | tuple[Any, ...], put: Callable[[Any], None]
    ) -> Iterator[Site]:
        items = value if isinstance(value, list) else list(value)

        def put_at(i: int, new: Any) -> None:
            items[i] = new
            if isinstance(value, tuple):
                # A named tuple stays one.
                put(tuple.__new__(type(value), items))

        for i, item in enumerate(value):
            yield from self.visit(place.child(str(i), f"[{i}]"), item, partial(put_at, i))

    def _holds(self, wanted: Callable[[Any], bool], value: Any, path: str) -> bool:
        """Tell whether there is anything in `value` that is `wanted`; it is entered already."""
        clear: set[int] = set()

        def inside(value: Any, path: str) -> bool:
            if id(value) in clear:
                return False
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if wanted(item):
                    return True
                if isinstance(item, dict | list | tuple):
                    self.enter(item, f"{path}[{key!r}]")
                    found = inside(item, f"{path}[{key!r}]")
                    self.leave(item)
                    if found:
                        return True
            clear.add(id(value))
            return False

        return inside(value, path)

    def _saved_below(self, place: StatePlace, value: dict[Any, Any]) -> list[str]:
        if self._saved is None or value:
            return []
        return [n for n in self._saved.objects if n.startswith(place.name + ".")]


def fqn_segment(key: str) -> str:
    """Return the name of a state dict's key: its dots stay."""
    return escape_fqn(canonical_fqn(key)) or escape_key(key)


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_live(value)


def _adopt(place: StatePlace, value: dict[Any, Any], names: list[str]) -> Iterator[Site]:
    """Give an empty dict a site for each value that was saved below it."""
    for name in names:
        keys = [unescape_key(s) for s in name[len(place.name) + 1 :].split(".")]
        path = place.path + "".join(f"[{k!r}]" for k in keys)
        yield Site(StatePlace(name, path, place.section), None, partial(_put_deep, value, keys))


def _put_deep(container: dict[Any, Any], keys: list[str | int], new: Any) -> None:
    for key in keys[:-1]:
        container = container.setdefault(key, {})
    container[keys[-1]] = new


def _put_container(live: Any, put: Callable[[Any], None], new: Any) -> None:
    if not replace_in_place(live, new):
        put(new)
