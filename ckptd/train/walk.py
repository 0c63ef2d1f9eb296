"""The walk through the containers of a state: from a nesting to a list of sites.

Dicts are walked key by key. A list or tuple that holds modules, optimizers and the like is walked
item by item; a list or tuple of mere values (tensors among them) is one site, so that its length
may differ between what was saved and what is live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ckptd.errors import UsageError
from ckptd.format import codec
from ckptd.format.names import canonical_fqn, escape_fqn, escape_key, unescape_key
from ckptd.train.leaves import Place, SavedNames
from ckptd.train.objects import replace_in_place
from ckptd.train.perrank import PerRank
from ckptd.train.unwrapping import is_optimizer, unwrapped

__all__ = ["Site", "is_state_dict", "is_stateful", "refuse_optimizer_ids", "walk"]


@dataclass(frozen=True, slots=True)
class Site:
    """A value that is no container: `put` puts another value in its place."""

    place: Place
    value: Any
    put: Callable[[Any], None]


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
        Kinds ``bad-state`` (not a mapping with string keys, or keys that cannot be names),
        ``cycle``, ``optimizer-ids`` (an `Optimizer.state_dict()` whose ids mean nothing later),
        ``optimizer-container`` (an optimizer around others, of which something would be lost).
    """
    given: object = state
    if not isinstance(given, Mapping) or not all(type(k) is str for k in given):
        raise UsageError(
            "a state is a mapping with string keys",
            kind="bad-state",
            wanted='{"model": model, "optim": optimizer, ...}',
            found=type(state).__name__,
        )
    if saved is not None and not isinstance(state, MutableMapping):
        raise UsageError(
            "values of this state cannot be replaced",
            kind="bad-state",
            wanted="a dict",
            found=type(state).__name__,
        )
    walker = _Walker(saved)
    walker.enter(state, "state")
    sites = [
        site
        for key, value in state.items()
        for site in walker.visit(
            Place(escape_key(key), f"state[{key!r}]", key), value, _put_item(state, key)
        )
    ]
    return _without_wrappers(sites)


def _without_wrappers(sites: list[Site]) -> list[Site]:
    """Put optimizers in the place of what is only around them."""
    found = [i for i, site in enumerate(sites) if is_optimizer(site.value)]
    for i in found:
        others = [sites[j].value for j in found if j != i]
        bare = unwrapped(sites[i].value, sites[i].place.name, others)
        if bare is not sites[i].value:
            sites[i] = replace(sites[i], value=bare)
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
    if not value or not all(type(k) is str for k in value):
        return False
    return hasattr(value, "_metadata") or all(isinstance(v, torch.Tensor) for v in value.values())


def refuse_optimizer_ids(value: dict[Any, Any], place: Place) -> None:
    """Raise `UsageError` (kind ``optimizer-ids``) for what `Optimizer.state_dict()` returns."""
    groups = value.get("param_groups")
    if "state" not in value or not isinstance(groups, list):
        return
    ids = [g.get("params") for g in groups if isinstance(g, dict)]
    if any(isinstance(i, list) and any(isinstance(x, int) for x in i) for i in ids):
        raise UsageError(
            "an optimizer's state_dict() numbers the parameters, and numbers mean nothing later",
            kind="optimizer-ids",
            where=place.name,
            found=place.path,
            hint="put the optimizer itself into the state",
        )


class _Walker:
    def __init__(self, saved: SavedNames | None) -> None:
        self._saved = saved
        self._open: dict[int, str] = {}

    def enter(self, container: Any, path: str) -> None:
        """Note that `container` is being walked, or raise when it is inside itself."""
        if id(container) in self._open:
            raise UsageError(
                "a container of the state contains itself",
                kind="cycle",
                where=path,
                found=f"also at {self._open[id(container)]}",
            )
        if len(self._open) > codec.MAX_DEPTH:
            raise UsageError("nested too deeply", kind="unsavable", where=path[:200])
        self._open[id(container)] = path

    def leave(self, container: Any) -> None:
        del self._open[id(container)]

    def visit(self, place: Place, value: Any, put: Callable[[Any], None]) -> Iterator[Site]:
        if is_live(value) or not isinstance(value, dict | list | tuple):
            yield Site(place, value, put)
            return
        self.enter(value, place.path)
        if isinstance(value, dict):
            yield from self._visit_dict(place, value, put)
        elif self._holds_live(value, place.path):
            yield from self._visit_sequence(place, value, put)
        else:
            yield Site(place, value, partial(_put_container, value, put))
        self.leave(value)

    def _visit_dict(
        self, place: Place, value: dict[Any, Any], put: Callable[[Any], None]
    ) -> Iterator[Site]:
        refuse_optimizer_ids(value, place)
        replace = partial(_put_container, value, put)
        if isinstance(value, Counter):
            yield Site(place, value, replace)
        elif not all(type(k) in (str, int) for k in value):
            if self._holds_live(value, place.path):
                raise UsageError(
                    "a key cannot be a name in a checkpoint",
                    kind="bad-state",
                    where=place.path,
                    wanted="str or int",
                    found=", ".join(repr(k)[:40] for k in value if type(k) not in (str, int)),
                )
            yield Site(place, value, replace)
        elif adopted := self._saved_below(place, value):
            yield from _adopt(place, value, adopted)
        elif not value or (self._saved_as_one(place) and _is_plain(value)):
            # Where it is empty there is no leaf below that could tell that it exists.
            yield Site(place, value, replace)
        else:
            names = fqn_segment if is_state_dict(value) else escape_key
            for key, item in value.items():
                child = place.child(names(key), f"[{key!r}]")
                yield from self.visit(child, item, _put_item(value, key))

    def _visit_sequence(
        self, place: Place, value: list[Any] | tuple[Any, ...], put: Callable[[Any], None]
    ) -> Iterator[Site]:
        items = value if isinstance(value, list) else list(value)

        def put_at(i: int, new: Any) -> None:
            items[i] = new
            if isinstance(value, tuple):
                # A named tuple stays one.
                put(tuple.__new__(type(value), items))

        for i, item in enumerate(value):
            yield from self.visit(place.child(str(i), f"[{i}]"), item, partial(put_at, i))

    def _holds_live(self, value: Any, path: str) -> bool:
        if is_live(value):
            return True
        if not isinstance(value, dict | list | tuple):
            return False
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            inner = isinstance(item, dict | list | tuple)
            if inner:
                self.enter(item, f"{path}[{key!r}]")
            found = self._holds_live(item, f"{path}[{key!r}]")
            if inner:
                self.leave(item)
            if found:
                return True
        return False

    def _saved_as_one(self, place: Place) -> bool:
        return self._saved is not None and place.name in self._saved.objects

    def _saved_below(self, place: Place, value: dict[Any, Any]) -> list[str]:
        if self._saved is None or value:
            return []
        return [n for n in self._saved.objects if n.startswith(place.name + ".")]


def fqn_segment(key: str) -> str:
    """Return the name of a state dict's key: its dots stay."""
    return escape_fqn(canonical_fqn(key)) or escape_key(key)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return not isinstance(value, torch.Tensor) and not is_live(value)


def _adopt(place: Place, value: dict[Any, Any], names: list[str]) -> Iterator[Site]:
    """Give an empty dict a site for each value that was saved below it."""
    for name in names:
        keys = [unescape_key(s) for s in name[len(place.name) + 1 :].split(".")]
        path = place.path + "".join(f"[{k!r}]" for k in keys)
        yield Site(Place(name, path, place.section), None, partial(_put_deep, value, keys))


def _put_deep(container: dict[Any, Any], keys: list[str | int], new: Any) -> None:
    for key in keys[:-1]:
        container = container.setdefault(key, {})
    container[keys[-1]] = new


def _put_item(container: Any, key: Any) -> Callable[[Any], None]:
    def put(new: Any) -> None:
        container[key] = new

    return put


def _put_container(live: Any, put: Callable[[Any], None], new: Any) -> None:
    if not replace_in_place(live, new):
        put(new)
