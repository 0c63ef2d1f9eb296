"""Flattens a state into leaves; what is recalled from save to save.

In it: values that may not be ``PerRank``; seeds that are drawn again; loaders whose iterator is not
reached.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from array import array
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptd.base.torch.tensors import PLAIN, WeakStorages, is_dtensor, is_of, is_wrapped, memory_of
from ckptd.checkpoint.torch.state.leaves import (
    Leaves,
    PerRank,
    RecalledLeaves,
    Sink,
    StatePlace,
    TensorLeaf,
    can_reseed,
)
from ckptd.checkpoint.torch.state.modules import add_module, all_modules, loads_by_code, reshard
from ckptd.checkpoint.torch.state.objects import call_with, replace_in_place
from ckptd.checkpoint.torch.state.optimizers import (
    ParameterOwners,
    add_again,
    add_loaded_again,
    add_optimizer,
    ask_optimizer,
)
from ckptd.checkpoint.torch.state.rng import Rng
from ckptd.checkpoint.torch.state.values import add_array, add_value, whole
from ckptd.checkpoint.torch.state.walk import (
    Site,
    TensorRun,
    has_own_words,
    is_stateful,
    one_by_one,
    walk,
)
from ckptd.checkpoint.torch.state.words import ask, says, speaking_kinds
from ckptd.checkpoint.torch.state.wrapped import form_of
from ckptd.errors import CkptdError, UsageError

if TYPE_CHECKING:
    from ckptd.checkpoint.torch.data.batches import Batches


def _is_batches(value: object) -> TypeGuard[Batches]:
    return is_of(value, "ckptd.checkpoint.torch.data.batches", "Batches")


_HEAVY = (torch.Tensor, TensorRun, nn.Module, torch.optim.Optimizer)


def is_heavy(site: Site) -> bool:
    """Whether a site gives tensors: these are recalled, all others are read again."""
    return isinstance(site.value, _HEAVY)


class _Look(msgspec.Struct):
    """Contents of heavy sites.

    Attributes
    ----------
    owners
        Modules and optimizers, in order.
    things
        The objects that these and the sites hold, in order: tensors, modules, None.
    facts
        Plain values, in order.
    """

    owners: list[Any] = msgspec.field(default_factory=list)
    things: list[Any] = msgspec.field(default_factory=list)
    facts: list[Any] = msgspec.field(default_factory=list)

    @staticmethod
    def at(sites: Sequence[Site]) -> _Look:
        """Look at what the heavy ones of `sites` hold now."""
        look = _Look()
        for site in sites:
            look.facts.append(site.place.name)
            if not is_heavy(site):
                continue
            if isinstance(site.value, nn.Module):
                look._module(site.value)
            elif isinstance(site.value, torch.optim.Optimizer):
                look._optimizer(site.value, site.speaker)
            elif isinstance(site.value, TensorRun):
                items = site.value.items
                look.facts += [site.value.named, len(items), *map(itemgetter(0), items)]
                look.things += map(itemgetter(1), items)
            else:
                look.things.append(site.value)
        return look

    def unwrap(self, at: int) -> Any:
        """Add what is inside of a wrapped thing to the things; return what it is made of."""
        form, parts = form_of(self.things[at])
        self.things += parts
        return form, _ids(parts)

    def _module(self, top: nn.Module) -> None:
        owners, things, facts = self.owners, self.things, self.facts
        for module in all_modules(top):
            owners.append(module)
            facts += (type(module), says(module), type(module)._version)
            for slots in (module._modules, module._parameters, module._buffers):
                facts.append(len(slots))
                if slots:
                    facts += slots.keys()  # a scripted module's slots are no dicts
                    things += slots.values()
            if module._buffers:
                facts.append(frozenset(module._non_persistent_buffers_set))
        facts.append(
            speaking_kinds({k for k in set(map(type, owners)) if issubclass(k, nn.Module)})
        )

    def _optimizer(self, optimizer: torch.optim.Optimizer, speaker: Any) -> None:
        self.owners.append(optimizer)
        things, facts = self.things, self.facts
        facts.append(speaker is not None or has_own_words(optimizer))
        for group in optimizer.param_groups:
            facts.append(len(group["params"]))
            things += group["params"]
        for parameter, held in optimizer.state.items():
            things.append(parameter)
            if isinstance(held, Mapping):
                facts.append(len(held))
                facts += held
                # What is no tensor is read each time.
                things += [v if isinstance(v, torch.Tensor) else None for v in held.values()]


class KnownState:
    """Result of a look, without the objects: it keeps nothing alive that the program frees.

    Modules and optimizers are known again by weak references. Tensors are not: one that has a weak
    reference cannot be swapped (`torch.utils.swap_tensors`, which ``module.to()`` calls). They are
    known again by their ids, which others have once they are gone; one that is the same view of
    the same memory, in the same places, is as good. Memory is known by weak references to storages,
    whose identity nothing else gets as long as there is one. Tensors may be many: of each, numbers
    in arrays are kept, and references to what many have in common.

    Parameters
    ----------
    look, ids, inside
        The contents, the ids of its things, and which of them wrap others, which are among them.
    sink
        The leaves that were found.
    """

    def __init__(
        self, look: _Look, ids: array[int], inside: list[tuple[int, Any]], sink: Sink
    ) -> None:
        leaves = sink.leaves
        positions = {id(thing): at for at, thing in enumerate(look.things)}
        tensors = {positions[id(tensor)]: tensor for tensor in sink.live}
        self._owners = [weakref.ref(owner) for owner in look.owners]
        self._ids, self._inside, self._records = ids, inside, sink.records
        self._facts = look.facts
        self._positions = array("Q", tensors)
        self._memory, _, storages = memory_of([*tensors.values()])
        self._storages = WeakStorages(storages)
        shared: dict[Any, Any] = {}
        for column in (c for columns in self._memory for c in columns):
            if isinstance(column, list):
                column[:] = map(shared.setdefault, column, column)
        # Kept, so that their ids are not given to others.
        self._meshes = {id(t.device_mesh): t.device_mesh for t in tensors.values() if is_dtensor(t)}
        at = {id(tensor): number for number, tensor in enumerate(tensors.values())}
        self._order: dict[str, int | None] = dict.fromkeys(leaves.tensors)
        self._sections = [""] * len(tensors)
        self._forms: list[Any] = [(False, "tensor", "", False)] * len(tensors)
        for name, section, tensor in zip(*sink.runs, strict=True):
            number = self._order[name] = at[id(tensor)]
            self._sections[number] = section
        self._origins: dict[int, int] = {}
        self._inner: set[int] = set()
        self._tied: dict[int, tuple[str, ...]] = {}
        for leaf in leaves.made():
            if not leaf.fresh:
                number = at[id(sink.parts.get(leaf.name, leaf.origin))]
                self._order[leaf.name], self._sections[number] = number, leaf.section
                form = leaf.tensor is not leaf.local, leaf.kind, leaf.own, leaf.wrapped
                self._forms[number] = shared.setdefault(form, form)
                if leaf.wrapped:
                    self._origins[number] = positions[id(leaf.origin)]
                if leaf.wrapped or leaf.tensor is not leaf.local or leaf.aliases or leaf.own:
                    self._inner.add(number)
                if leaf.aliases:
                    self._tied[number] = leaf.aliases
        self._aliases = {a: n for a, n in leaves.aliases.items() if not leaves.tensors[n].fresh}
        names = [n for leaf in leaves.made() if not leaf.fresh for n in (leaf.name, *leaf.aliases)]
        self._paths = sink.paths([*sink.runs[0], *names, *(r.name for r in self._records)])
        self._sayings = {
            name: (saying, [positions[id(tensor)] for tensor in same])
            for name, (saying, same) in sink.sayings.items()
        }
        self._states = sink.forms
        self._fresh = self._forms_of(sink.fresh)
        leaves.known = self._token = None if self._fresh is None else object()

    @staticmethod
    def of(sites: Sequence[Site], sink: Sink) -> KnownState | None:
        """Return what is to be known of a state; None where each save has to look through it."""
        look = _Look.at(sites)
        ids = _ids(look.things)
        first: dict[int, tuple[int, Any]] = {}
        for at, thing in enumerate(look.things):  # what is inside comes to its end
            plain = thing is None or type(thing) in PLAIN
            wraps = not plain and isinstance(thing, torch.Tensor) and is_wrapped(thing)
            # What is inside of a DTensor is made for each look, and so is not seen below.
            if wraps and id(thing) not in first and not is_dtensor(thing):
                first[id(thing)] = at, look.unwrap(at)
        # A copy that was made because the live memory cannot be filled would grow old.
        old = not all(leaf.fresh for leaf in sink.leaves.assigned())
        seen = {*_ids(look.things)}.issuperset(_ids(sink.live))
        if old or not seen or not sink.recallable:
            return None
        known = KnownState(look, ids, [*first.values()], sink)
        return None if known._fresh is None else known

    def ask(self, sites: Sequence[Site]) -> dict[str, Any]:
        """Return what modules and optimizers say that have to be asked each time, by name.

        This comes before a look: a hook may put other tensors into the module.
        """
        modules = [site for site in sites if isinstance(site.value, nn.Module)]
        for site in modules:
            reshard(site.value)
        said: dict[str, Any] = {
            site.place.name: ask(site.place, site.value)
            for site in modules
            if site.place.name in self._sayings and self._sayings[site.place.name][0].asks
        }
        for site in sites:
            if isinstance(site.value, torch.optim.Optimizer):
                said[site.place.name] = ask_optimizer(site.value, site.place, site.speaker)
        return said

    def again(self, sites: Sequence[Site], asked: Sink, owners: ParameterOwners) -> Leaves | None:
        """Return the leaves of a state, if all but values is as it is known.

        Parameters
        ----------
        asked
            Takes what objects answer: a look at all the rest must not ask them once more.

        Raises
        ------
        CkptdError
            Something cannot be added.
        """
        look, said, loads = _Look.at(sites), asked.said, asked.saved is not None
        if (
            look.facts != self._facts
            or _ids(look.things) != self._ids
            or any(look.unwrap(at) != form for at, form in self._inside)
            or [id(known()) for known in self._owners] != [*map(id, look.owners)]
        ):
            return None
        tensors = [look.things[at] for at in self._positions]
        memory, locals, storages = memory_of(tensors)
        if memory != self._memory:
            return None

        def leaf(name: str, number: int) -> TensorLeaf:
            meshed, kind, own, wrapped = self._forms[number]
            local, section = locals[number].detach(), self._sections[number]
            locals[number] = local
            whole = (tensors[number].detach() if loads else tensors[number]) if meshed else local
            origin = look.things[self._origins[number]] if wrapped else tensors[number]
            aliases, path = self._tied.get(number, ()), self._paths[name]
            return TensorLeaf(
                name, whole, local, section, kind, path, origin, aliases, None, own, wrapped
            )

        for name, (saying, positions) in self._sayings.items():
            slots = [look.things[at] for at in positions]
            if saying.asks and not saying.fits(said[name], slots):
                return None
        of = (dict(self._order), leaf, locals, self._inner, storages, self._order)
        leaves = Leaves(
            tensors=RecalledLeaves(*of),
            objects={record.name: record for record in self._records},
            aliases=dict(self._aliases),
            optimizers=[o for o in look.owners if isinstance(o, torch.optim.Optimizer)],
            known=self._token,
        )
        sink = asked.again(leaves, ChainMap({}, self._paths))
        for site in sites:
            name = site.place.name
            if not is_heavy(site):
                _add(sink, site, owners)
            elif loads:
                if not _loads_again(sink, site, owners, self._states.get(name, ())):
                    return None
            elif isinstance(site.value, torch.optim.Optimizer):
                form = self._states[name]
                if said[name] is not None and said[name].apart != form.apart:
                    return None
                add_again(sink, site.place, site.value, owners, form)
            elif isinstance(site.value, nn.Module):
                self._sayings[name][0].add(sink, site.place, said.get(name, {}))
        same = self._forms_of(sink.fresh) == self._fresh and len(leaves.tensors) == len(self._order)
        return leaves if same else None

    def _forms_of(self, fresh: list[TensorLeaf]) -> list[tuple[Any, ...]] | None:
        """Return the forms of what each save asks for; None where it shares memory with others."""
        held = {at for columns in self._memory for at in columns[0]} if fresh else ()
        if any(is_dtensor(x.tensor) or x.local.untyped_storage()._cdata in held for x in fresh):
            return None
        return [
            (
                *(x.name, x.path, x.kind, x.own, x.aliases, x.wrapped, x.dtype, x.shape),
                *(x.local.device, x.local.stride(), x.local.is_conj(), x.local.is_neg()),
            )
            for x in fresh
        ]


def _loads_again(sink: Sink, site: Site, owners: ParameterOwners, keys: Collection[str]) -> bool:
    """Add what a load adds of a site besides known tensors; False where it is another thing now."""
    if isinstance(site.value, torch.optim.Optimizer):
        return add_loaded_again(sink, site.place, site.value, owners, site.speaker, keys)
    return not isinstance(site.value, nn.Module) or not loads_by_code(site.value, site.place)


def _ids(things: Iterable[Any]) -> array[int]:
    return array("Q", map(id, things))


_log = logging.getLogger("ckptd")


class Flattener:
    """Flattens one state again and again; see `flatten`.

    A state of which nothing has another place, memory or form is not looked through again.
    """

    def __init__(self) -> None:
        self._known: KnownState | None = None
        self._owners = ParameterOwners(())

    def flatten(self, state: Mapping[str, Any]) -> Leaves:
        """Return the leaves of `state`."""
        sites, sink = walk(state), Sink()
        if (known := self._known) is not None:
            # Once a save: ranks may have to ask together, and some may remember less.
            sink.said = known.ask(sites)
            # What cannot be added, or has another form, is looked at with all the rest.
            with contextlib.suppress(CkptdError):
                if (leaves := known.again(sites, sink, self._owners)) is not None:
                    return leaves
        self._known = None
        self._owners = collect(sink, sites)
        self._known = KnownState.of(sites, sink)
        return sink.leaves


def flatten(state: Mapping[str, Any]) -> Leaves:
    """Return the leaves of `state` for a save.

    Tensors are the live memory, detached; values are encoded, and so copied, before this
    returns. Modules, optimizers and random streams stay as they are.

    Parameters
    ----------
    state
        Any nesting of dicts and lists that holds tensors, DTensors, numpy arrays, modules,
        optimizers, objects with ``state_dict`` and ``load_state_dict``, ``torch.Generator``,
        `Rng`, `PerRank` and plain values.

    Raises
    ------
    UsageError
        The state cannot be saved as it is; kind ``unsavable`` among others.
    """
    return Flattener().flatten(state)


def collect(sink: Sink, sites: list[Site]) -> ParameterOwners:
    """Add the leaves of all sites to `sink`; return the owner of each parameter."""
    owning = any(isinstance(site.value, torch.optim.Optimizer) for site in sites)
    named = one_by_one(sites) if owning else (s for s in sites if isinstance(s.value, nn.Module))
    owners = ParameterOwners(named)
    for site in sites:
        run = site.value
        if type(run) is not TensorRun or not sink.add_run(site.place, run.segments, run.items):
            for one in one_by_one((site,)):
                _add(sink, one, owners)
    return owners


def _add(sink: Sink, site: Site, owners: ParameterOwners) -> None:
    if not is_heavy(site):
        with sink.afresh():
            _add_one(sink, site, owners)
    elif sink.saved is None or isinstance(site.value, torch.Tensor):
        _add_one(sink, site, owners)
    else:
        before = sink.leaves.besides
        _add_one(sink, site, owners)
        # Of an optimizer, its groups, and what ends its load.
        usual = 2 if isinstance(site.value, torch.optim.Optimizer) else 0
        sink.recallable &= sink.leaves.besides - before == usual


def _add_one(sink: Sink, site: Site, owners: ParameterOwners) -> None:
    place, value = site.place, site.value
    if isinstance(value, torch.Tensor):
        for leaf in sink.add(place, value, "tensor"):
            lazy = not value.is_cpu and (value.is_conj() or value.is_neg())
            if lazy and leaf.assign is not None and leaf.name == place.name:
                leaf.assign = site.put  # a device of others may keep these bits elsewhere
    elif isinstance(value, PerRank):
        _add_per_rank(sink, site, value)
    elif isinstance(value, Rng | torch.Generator):
        _add_per_rank(sink, site, PerRank(value, on_change="reseed"))
    elif _is_batches(value):
        _add_per_rank(sink, site, PerRank(value, on_change="reduce", reduce=value.shared_out))
    elif isinstance(value, nn.Module):
        add_module(sink, place, value)
    elif isinstance(value, torch.optim.Optimizer):
        add_optimizer(sink, place, value, owners, site.speaker)
        sink.leaves.optimizers.append(value)
    elif isinstance(value, np.ndarray):
        add_array(sink, place, value, site.put)
    elif is_stateful(value):
        put = partial(_give_state, value, place.name)
        add_value(sink, place, sink.told_by(place, value), put, fresh=True)
    elif isinstance(value, DataLoader):
        raise _no_position(place)
    else:
        add_value(sink, place, value, site.put)


def _add_per_rank(sink: Sink, site: Site, declared: PerRank) -> None:
    place, value = site.place, declared.value
    if isinstance(value, nn.Module | torch.optim.Optimizer | PerRank):
        raise UsageError(
            "modules and optimizers cannot be PerRank values",
            where=place.name,
            found=f"PerRank of {type(value).__name__} at {place.path}",
            hint="put it into the state directly; ckptd finds the shards from its DTensors",
        )
    if isinstance(value, DataLoader) and not is_stateful(value):
        raise _no_position(place)
    if isinstance(value, torch.Generator):
        read, put = value.get_state, partial(call_with, value.set_state, place.name)
    elif is_stateful(value):
        read = partial(sink.told_by, place, value)
        put = partial(_give_state, value, place.name)
    else:
        read, put = lambda: value, partial(_set_value, declared)
    sink.add_per_rank(
        place,
        lambda: whole(read(), place),
        put,
        on_change=declared.on_change,
        reduce=declared.reduce,
        reseed=partial(_reseed, declared) if can_reseed(value) else None,
        random=isinstance(value, Rng | torch.Generator),
        follower=value if _is_batches(value) else None,
    )


def _no_position(place: StatePlace) -> UsageError:
    return UsageError(
        "a DataLoader does not expose its position in the data",
        kind="unsavable",
        where=place.name,
        found=place.path,
        hint="put ckptd.Batches(loader) into the state and take the batches from it",
    )


def _give_state(value: Any, name: str, saved: Any) -> None:
    """Give an object its saved state; warn of a loader's iterator, which it does not reach."""
    if isinstance(value, DataLoader) and getattr(value, "_iterator", None) is not None:
        _log.warning(
            "an iterator of the loader %s was created before the load and is not rewound: create a "
            "new one, or put ckptd.Batches(loader) into the state (docs/guide/exact-resume.md)",
            name,
        )
    call_with(value.load_state_dict, name, saved)


def _set_value(declared: PerRank, saved: Any) -> None:
    live = declared.value
    if replace_in_place(live, saved):
        return
    same = isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)
    if same and live.shape == saved.shape and live.dtype == saved.dtype:
        live.detach().copy_(saved)
    else:
        declared.value = saved


def _reseed(declared: PerRank, seed: int) -> None:
    value = declared.value
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif isinstance(value, int):
        declared.value = seed
    else:
        value.reseed(seed)
