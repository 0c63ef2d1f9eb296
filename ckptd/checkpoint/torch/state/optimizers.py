"""Optimizers: state by parameter name, groups, hyperparameters, which optimizer it is, misfits.

In it: the state names of torch's own optimizers; masters on the host; hyperparameters that are
tensors.

The integers by which `Optimizer.state_dict()` knows parameters never reach the format: they
depend on the order of groups, and on which parameters a rank happens to hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ckptd.base.grouping import by_key
from ckptd.base.torch.tensors import is_dtensor, target_device, torch_dtype
from ckptd.checkpoint.format.manifest import OPTIMIZER_CLASS
from ckptd.checkpoint.format.names import escape_key, unescape_key
from ckptd.checkpoint.torch.state.hosted import HostedOptimizer
from ckptd.checkpoint.torch.state.leaves import (
    PendingState,
    SavedNames,
    Sink,
    StatePlace,
    memory_key,
    put_nothing,
)
from ckptd.checkpoint.torch.state.modules import module_tensors, reshard
from ckptd.checkpoint.torch.state.objects import call_with
from ckptd.checkpoint.torch.state.values import add_value, fresh_tensor
from ckptd.checkpoint.torch.state.walk import Site, has_own_words, holds_state
from ckptd.checkpoint.torch.state.words import is_same_memory
from ckptd.checkpoint.torch.state.wrapped import make_wrapped, part_shape
from ckptd.errors import CorruptError, MismatchError, UsageError

_CLASSES, _DEFAULTS, _SHARED, _ORDERS = "classes", "defaults", "shared", "orders"
# Of a group: that it is said by code of its own, and names of parameters that are not their FQN.
_SAID, _NAMED = "said", "named"
_BASE = "torch.optim."
_SET = {"differentiable"}
"""Names that torch adds to the hyperparameters as an optimizer is loaded."""
# What torch's own optimizers keep of a parameter, whatever their options; "step" tells nothing.
_STATE = {
    "ASGD": {"eta", "mu", "ax"},
    "Adadelta": {"square_avg", "acc_delta"},
    "Adafactor": {"row_var", "col_var", "variance"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "Rprop": {"prev", "step_size"},
    "SGD": {"momentum_buffer"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}


def record(optimizer: Optimizer) -> dict[str, list[str]]:
    """Return what says in a checkpoint which optimizer this is.

    Its classes, nearest first, without torch's base; and the names of its hyperparameters.
    """
    names = {*map(str, optimizer.defaults), *_SET}
    return {_CLASSES: _classes(_kind(optimizer)), _DEFAULTS: sorted(names)}


def misfit(
    optimizer: Optimizer, groups: object, params: Collection[str], keys: Iterable[str]
) -> str | None:
    """Say why saved state is not of such an optimizer; None where it is, as far as one can tell.

    Parameters
    ----------
    groups
        The saved groups as they stand in the checkpoint.
    params
        The live parameters' names: groups of others are another stage's, and another's concern.
    keys
        What was saved of these parameters.
    """
    own = record(optimizer)
    whole = _listed(groups)
    mine = [g for g in whole if not set(params).isdisjoint(_names(g.get("params")))]
    for group in mine or whole:
        saved = _parsed(group.get(OPTIMIZER_CLASS))
        if saved is not None and not _fits(own, saved):
            return _text(own[_CLASSES], saved[_CLASSES])
        flag = "decoupled_weight_decay"
        if flag in group and group[flag] != optimizer.defaults.get(flag, group[flag]):
            # Adam and AdamW differ in nothing else, and a load would turn the one into the other.
            named = _BASE + ("AdamW" if group[flag] else "Adam")
            return _text(own[_CLASSES], [named] if saved is None else saved[_CLASSES])
    known = _STATE.get(_kind(optimizer).__name__) if own[_CLASSES][0].startswith(_BASE) else None
    kept = {*keys} - {"step"}
    if known is not None and kept and kept.isdisjoint(known):
        return _text(own[_CLASSES], []) + f" ({', '.join(sorted(kept))[:200]})"
    return None


def _kind(optimizer: Optimizer) -> type[Optimizer]:
    return optimizer.kind if isinstance(optimizer, HostedOptimizer) else type(optimizer)


def _fits(own: Mapping[str, list[str]], saved: Mapping[str, list[str]]) -> bool:
    live, then = own[_CLASSES], saved[_CLASSES]
    if _torchs(live) != _torchs(then):
        return False
    # A class may have moved to another module; what it is called does not change with that.
    names, others = ([c.rpartition(".")[2] for c in classes] for classes in (live, then))
    if names[0] in others or others[0] in names:
        return True
    # Renamed, or a sibling: then it must have the same hyperparameters.
    return {*own[_DEFAULTS]} ^ {*saved[_DEFAULTS]} <= _SET


def _torchs(classes: Iterable[str]) -> str | None:
    """Return the nearest of torch's own optimizers."""
    return next((c for c in classes if c.startswith(_BASE)), None)


def _classes(kind: type) -> list[str]:
    out = []
    for base in kind.__mro__:
        if base is Optimizer or not issubclass(base, Optimizer):
            continue
        ours = base.__module__.startswith(_BASE) and base.__name__ in _STATE.keys() | {"LBFGS"}
        out.append(
            f"{_BASE}{base.__name__}" if ours else f"{base.__module__}.{base.__qualname__}"[:300]
        )
    return out or [f"{kind.__module__}.{kind.__qualname__}"[:300]]


def _names(params: object) -> list[str]:
    return params if isinstance(params, list) else []


def _parsed(raw: object) -> dict[str, list[str]] | None:
    """Return a record that a checkpoint holds; None if its form is another."""
    found: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else {}
    parts = {key: found.get(key) for key in (_CLASSES, _DEFAULTS)}
    whole = {k: v for k, v in parts.items() if isinstance(v, list) and {*map(type, v)} <= {str}}
    return whole if len(whole) == len(parts) and whole[_CLASSES] else None


def _listed(groups: object) -> list[Mapping[str, Any]]:
    """Return what are groups in what a checkpoint has as such."""
    return [g for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else []


def _noted(group: object, key: str) -> Any:
    """Return what a record in a saved group has under a key; None if there is none."""
    said = group.get(OPTIMIZER_CLASS) if isinstance(group, Mapping) else None
    return said.get(key) if isinstance(said, Mapping) else None


def _text(live: list[str], saved: list[str]) -> str:
    there = f"of {saved[0]}" if saved else "of another optimizer"
    return f"the live optimizer is {live[0]}, and the saved state is {there}"


_PARAM_NAMES = "param_names"
_NOT_HYPER = ("params", _PARAM_NAMES, OPTIMIZER_CLASS)


class StateForm(NamedTuple):
    """Facts of an optimizer's saved state that later saves may use again.

    Attributes
    ----------
    apart
        That of `_Said`.
    loose
        Values that each save adds again: number of the parameter, key, place.
    """

    apart: Mapping[int, list[tuple[Any, bool]]]
    loose: list[tuple[int, Any, StatePlace]]


class ParameterOwners:
    """Owners of parameters: which module of the state owns one, and under which name.

    A parameter's name in an optimizer is its FQN in the one module of the state that owns all
    parameters of that optimizer; where there is no such module, the FQN with the module's name
    before it. Tensors that stand in the state by themselves own themselves.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._by_owner: dict[str, dict[int, str]] = {}
        self._full: dict[int, str] = {}
        self._names: dict[str, dict[int, str]] = {}
        self._orders: dict[str, dict[str, list[int]]] = {}
        for site in sites:
            self._note(site)

    def _note(self, site: Site) -> None:
        name = site.place.name
        if isinstance(site.value, nn.Module):
            reshard(site.value)
            own = self._by_owner.setdefault(name, {})
            for entry in module_tensors(site.value, site.place):
                own.setdefault(id(entry.tensor), entry.fqn)
                self._full.setdefault(id(entry.tensor), f"{name}.{entry.fqn}")
        elif isinstance(site.value, torch.Tensor):
            self._full.setdefault(id(site.value), name)
        else:
            for at, tensor in _tensors_in(name, site.value, set()):
                self._full.setdefault(id(tensor), at)

    def names(self, optimizer: Optimizer, place: StatePlace) -> dict[int, str]:
        """Return the parameters' names by ``id(parameter)``; looked up once for each place.

        Raises
        ------
        UsageError
            The state has no module that owns it.
        """
        if place.name not in self._names:
            self._names[place.name] = self._find(optimizer, place)
        return self._names[place.name]

    def _find(self, optimizer: Optimizer, place: StatePlace) -> dict[int, str]:
        # What the user's module owns by what the groups hold.
        owned = optimizer.owned if isinstance(optimizer, HostedOptimizer) else lambda p: p
        ids = {id(p): id(owned(p)) for p in _parameters(optimizer)}
        for own in self._by_owner.values():
            if own.keys() >= {*ids.values()}:
                return {held: own[i] for held, i in ids.items()}
        if missing := sum(i not in self._full for i in ids.values()):
            raise UsageError(
                "an optimizer holds parameters that no module of the state owns",
                where=place.name,
                found=f"{missing} of {len(ids)} parameters, in {place.path}",
                hint="put the module into the same state; build the optimizer after fully_shard, "
                "parallelize_module and .to(), which replace parameters",
            )
        return {held: self._full[i] for held, i in ids.items()}

    def orders(
        self, optimizer: Optimizer, place: StatePlace, said: _Said | None
    ) -> dict[str, list[int]]:
        """Return `_orders_of` an optimizer; looked up once, while its state has one form."""
        if place.name not in self._orders:
            numbered = enumerate(_parameters(optimizer))
            found = ((p, _entries(optimizer, said, n, p)) for n, p in numbered)
            self._orders[place.name] = _orders_of(found, self.names(optimizer, place))
        return self._orders[place.name]

    def full_name(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter in the state, with its module's."""
        return self._full.get(id(parameter))


def add_optimizer(
    sink: Sink, place: StatePlace, optimizer: Optimizer, owners: ParameterOwners, speaker: Any
) -> None:
    """Add the leaves of `optimizer`: ``<place>.<fqn>.<state>`` and ``<place>.groups``.

    In a load, state that the checkpoint has and the optimizer has not (it has not stepped) is
    made and becomes pending; state that the checkpoint knows to be absent is removed likewise.
    Of an optimizer that cannot take the saved state nothing is added but why not, in
    `Leaves.misfits`.

    What says its state itself (an optimizer by an override or a hook, a wrapper) is asked: what it
    says is saved, what is more than torch's own as ``<place>.state_dict``. Its own load gets all of
    it; that of a wrapper that says what the optimizer holds gets this, once it is loaded.

    Parameters
    ----------
    speaker
        The wrapper that says and takes the state; None: the optimizer itself does.

    Raises
    ------
    UsageError
        An unowned parameter, a state that belongs to no parameter, a container of optimizers.
    """
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(
            "an optimizer has no groups of parameters",
            where=place.name,
            found=f"{type(optimizer).__name__} without param_groups",
            hint="put the wrapped optimizer into the state",
        )
    if sink.saved is None:
        if place.name not in sink.said:
            sink.said[place.name] = ask_optimizer(optimizer, place, speaker)
        _check_optimizer(optimizer, place, sink.said[place.name])
        _add_saved(sink, place, optimizer, owners)
        return
    at = _groups_at(place)
    groups = sink.saved.groups.get(at.name)
    own = has_own_words(optimizer)
    if not own:
        _check_optimizer(optimizer, place, None)
        own = any(_noted(group, _SAID) for group in _listed(groups))
    names = owners.names(optimizer, place)
    saved = _saved_state(sink.saved, place.name, set(names.values()))
    known = at.name in sink.saved.objects
    if known:
        # What it says itself may have names that torch's own of its class has not.
        keys = {key for entries in saved.values() for key in entries} if not own else set()
        sink.forms[place.name] = keys
        if (why := misfit(optimizer, groups, set(names.values()), keys)) is not None:
            # Nothing of it has a place here: what is taken is all of a state, or nothing.
            sink.leaves.misfits[place.name] = why
            return
    if own:
        _Handing(sink, place, optimizer, speaker, names).add(saved)
        return
    hyper = _add_groups(sink, place, optimizer, names)
    if isinstance(optimizer, HostedOptimizer):
        _take_masters(sink, optimizer, owners, at.name)
    found = [at.name]
    for param in _each(sink, place, optimizer, names):
        entries = saved.get(param.fqn, {})
        if known and not entries:
            forget = partial(optimizer.state.pop, param.parameter, None)
            sink.leaves.pending.append(PendingState((at.name,), forget, at.name))
            continue
        live = param.held
        # Sorted: a restored optimizer holds its state in another order than a stepped one.
        found += [param.add(k, entries.get(k)) for k in sorted({*live, *entries}, key=str)]

    settle = partial(hyper.settle, place.name, speaker)
    sink.leaves.handing.append(PendingState(tuple(found), settle))


def _add_groups(
    sink: Sink, place: StatePlace, optimizer: Optimizer, names: Mapping[int, str]
) -> _Hyperparameters:
    at, hyper = _groups_at(place), _Hyperparameters(sink, optimizer, names)
    check = partial(_match_groups, optimizer, names, at.name)
    sink.add_object(at, None, hyper.put, kind="groups", check=check)
    return hyper


def add_loaded_again(
    sink: Sink,
    place: StatePlace,
    optimizer: Optimizer,
    owners: ParameterOwners,
    speaker: Any,
    keys: Collection[str],
) -> bool:
    """Add what a load adds of an optimizer besides tensors that are known.

    False where it is more than groups of plain values, or the saved state is of another optimizer.
    """
    at, names = _groups_at(place), owners.names(optimizer, place)
    groups = None if sink.saved is None else sink.saved.groups.get(at.name)
    own = has_own_words(optimizer) or any(_noted(group, _SAID) for group in _listed(groups))
    tensors = any(True for group in optimizer.param_groups for _ in _tensors_of(group))
    if own or tensors or groups is None or isinstance(optimizer, HostedOptimizer):
        return False
    if misfit(optimizer, groups, set(names.values()), keys) is not None:
        return False
    settle = partial(_add_groups(sink, place, optimizer, names).settle, place.name, speaker)
    sink.leaves.handing.append(PendingState((at.name,), settle))
    return True


def _add_saved(
    sink: Sink, place: StatePlace, optimizer: Optimizer, owners: ParameterOwners
) -> None:
    """Add what an optimizer holds, or says itself, to the leaves of a save."""
    said, names = sink.said[place.name], owners.names(optimizer, place)
    form = sink.forms[place.name] = StateForm({} if said is None else said.apart, [])
    for number, parameter in enumerate(_parameters(optimizer)):
        fqn = names[id(parameter)]
        of = place.child(fqn, f".state[{fqn}]")
        held = _held(optimizer, parameter)
        apart = {key for key, same in form.apart.get(number, ()) if not same}
        for key in sorted(_entries(optimizer, said, number, parameter), key=str):
            where = of.child(escape_key(key), f"[{key!r}]")
            if key not in apart and isinstance(held[key], torch.Tensor):
                sink.add(where, held[key], "optim")
            else:
                form.loose.append((number, key, where))
    add_again(sink, place, optimizer, owners, form)


def add_again(
    sink: Sink, place: StatePlace, optimizer: Optimizer, owners: ParameterOwners, form: StateForm
) -> None:
    """Add what each save asks for: hyperparameters, and what is no tensor that is held."""
    said = sink.said[place.name]
    parameters = _parameters(optimizer) if form.loose else []
    with sink.afresh():
        for number, key, where in form.loose:
            value = _entries(optimizer, said, number, parameters[number])[key]
            if isinstance(value, torch.Tensor):
                sink.add(where, value, "optim")
            else:
                add_value(sink, where, value, put_nothing, kind="optim")
        if said is not None and said.more:
            add_value(sink, _more_at(place), said.more, put_nothing)
    orders = owners.orders(optimizer, place, said)
    groups = _groups(optimizer, owners.names(optimizer, place), said, orders)
    # Nothing is kept that the program may let go.
    sink.add_object(_groups_at(place), groups, put_nothing, kind="groups")


def _entries(
    optimizer: Optimizer, said: _Said | None, number: int, parameter: torch.Tensor
) -> Mapping[Any, Any]:
    return _held(optimizer, parameter) if said is None else said.state.get(number, {})


def _held(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[Any, Any]:
    held = optimizer.state.get(parameter)
    return held if type(held) is dict or isinstance(held, Mapping) else {}


def _take_masters(
    sink: Sink, optimizer: HostedOptimizer, owners: ParameterOwners, groups: str
) -> None:
    """Schedule the copies of parameters that a load changes to their masters on the host."""
    for master in _parameters(optimizer):
        full = owners.full_name(optimizer.owned(master))
        names = (groups,) if full is None else (full, groups)
        # After the modules, which may take their parameters by code of their own.
        sink.leaves.handing.append(PendingState(names, partial(optimizer.take, master)))


# --- what an optimizer says itself ----------------------------------------------------------------


class _Said(msgspec.Struct, frozen=True):
    """Answer of an optimizer's own ``state_dict()``, or of a wrapper's.

    Attributes
    ----------
    groups
        As many as the live ones, with as many parameters each.
    state
        By the number of a parameter, in the order of the live groups.
    more
        Everything that torch's own would not say, as the whole dictionary without the rest.
    apart
        By number, where state is not what the optimizer holds: its keys, and which of them are.
    own
        Whether its own load has to be given what is saved: code of the optimizer's says it, or it
        is not what the optimizer holds.
    """

    groups: list[Mapping[str, Any]]
    state: dict[int, Mapping[Any, Any]]
    more: dict[Any, Any]
    apart: dict[int, list[tuple[Any, bool]]]
    own: bool

    @staticmethod
    def of(optimizer: Optimizer, place: StatePlace, speaker: Any) -> _Said:
        """Ask an optimizer, or the wrapper that speaks for it.

        Raises
        ------
        UsageError
            It raised, or what it says does not tell what is whose.
        """
        asked = optimizer if speaker is None else speaker

        def wrong(found: str) -> UsageError:
            return UsageError(
                "an optimizer's own state_dict() does not map its state to parameters",
                where=place.name,
                wanted="state and param_groups, with the numbers of parameters, as torch has them",
                found=f"{type(asked).__name__}: {found}"[:500],
                hint="let state_dict() begin with that of torch.optim.Optimizer",
            )

        try:
            said: object = asked.state_dict()
        except Exception as error:
            raise wrong(f"raised {error!r}") from error
        whole: Mapping[Any, Any] = said if isinstance(said, Mapping) else {}
        groups, state = (whole.get(k) for k in _TORCHS)
        if not isinstance(groups, list) or not isinstance(state, Mapping):
            raise wrong("another form")
        numbers = [g.get("params") if isinstance(g, Mapping) else None for g in groups]
        live = [len(g["params"]) for g in optimizer.param_groups]
        if [len(n) if isinstance(n, list) else None for n in numbers] != live:
            raise wrong("other groups than it has")
        known = {n: at for at, n in enumerate(n for own in numbers for n in own or ())}
        if len(known) != sum(live) or not all(type(n) is int for n in known):
            raise wrong("parameters that are not numbered one by one")
        mine = {known[n]: entry for n, entry in state.items() if n in known}
        if bad := [n for n, entry in mine.items() if not isinstance(entry, Mapping)]:
            raise wrong(f"state of parameter {bad[0]} that is not a dict")
        more = {k: v for k, v in whole.items() if k not in _TORCHS}
        if loose := {n: entry for n, entry in state.items() if n not in known}:
            more["state"] = loose
        apart = _apart(optimizer, mine)
        own = bool(apart or more) or has_own_words(optimizer)
        own = own or not all(map(_is_group, groups, optimizer.param_groups))
        return _Said(groups, mine, more, apart, own)


def ask_optimizer(optimizer: Optimizer, place: StatePlace, speaker: Any) -> _Said | None:
    """Return what an optimizer or its wrapper says; None where it is saved by what it holds."""
    if speaker is None and not has_own_words(optimizer):
        return None
    return _Said.of(optimizer, place, speaker)


def _apart(
    optimizer: Optimizer, said: Mapping[int, Mapping[Any, Any]]
) -> dict[int, list[tuple[Any, bool]]]:
    def is_same(value: Any, held: Any) -> bool:
        return value is held or (isinstance(held, torch.Tensor) and is_same_memory(value, held))

    found = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        entries, held = said.get(number, {}), _held(optimizer, parameter)
        if entries is not held:
            same = [(k, k in held and is_same(v, held[k])) for k, v in entries.items()]
            if len(held) != len(same) or not all(held_too for _, held_too in same):
                found[number] = same
    return found


def _is_group(said: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """Tell whether a group is said as it is, but for the numbers of its parameters."""
    return said.keys() == held.keys() and all(said[k] is held[k] for k in held if k != "params")


_TORCHS = ("param_groups", "state")


def _more_at(place: StatePlace) -> StatePlace:
    return place.child("state_dict", ".state_dict()")


class _Handing(msgspec.Struct, dict=True):
    """Collects what a load brings of an optimizer, and gives all of it to the optimizer's own load.

    No memory that the optimizer has is written to before.
    """

    _sink: Sink
    _place: StatePlace
    _optimizer: Optimizer
    _speaker: Any
    _names: Mapping[int, str]
    _groups: Any = None
    _more: dict[Any, Any] = msgspec.field(default_factory=dict)
    _state: dict[int, dict[Any, Any]] = msgspec.field(default_factory=dict)

    def add(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        """Add the leaves of all that the checkpoint has."""
        sink, at, more = self._sink, _groups_at(self._place), _more_at(self._place)
        found = [at.name]
        check = partial(_match_groups, self._optimizer, self._names, at.name)
        sink.add_object(at, None, partial(setattr, self, "_groups"), kind="groups", check=check)
        if sink.saved is not None and more.name in sink.saved.objects:
            add_value(sink, more, None, partial(setattr, self, "_more"), fresh=True)
            found.append(more.name)
        for number, param in enumerate(_each(sink, self._place, self._optimizer, self._names)):
            for key, what in sorted(saved.get(param.fqn, {}).items(), key=str):
                found.append(param.add(key, what, partial(self._put, number, key)))
        sink.leaves.handing.append(PendingState(tuple(found), self._hand))

    def _put(self, number: int, key: str, value: Any) -> None:
        self._state.setdefault(number, {})[key] = value

    def _hand(self) -> None:
        if self._groups is None:
            # Without groups a part is loaded: what is not is as it was.
            said = _Said.of(self._optimizer, self._place, self._speaker)
            pairs: Any = zip(self._optimizer.param_groups, said.groups, strict=True)
            new = self._state
            state = {n: {**said.state.get(n, {}), **new.get(n, {})} for n in {**said.state, **new}}
            more = {**said.more, **self._more}
        else:
            pairs = _match_groups(self._optimizer, self._names, "groups", self._groups)
            state, more = self._state, self._more
        groups, number = [], 0
        for own, group in pairs:
            ids = list(range(number, number := number + len(own["params"])))
            # What another program wrote need not say all.
            rest = {} if OPTIMIZER_CLASS in group else own
            groups.append({**rest, **_options(own, group, self._names), "params": ids})
        entries = {n: state[n] for n in sorted(state) if state[n]}
        whole = {**more, "state": {**more.get("state", {}), **entries}, "param_groups": groups}
        taker = self._optimizer if self._speaker is None else self._speaker
        call_with(taker.load_state_dict, self._place.name, whole)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _groups_at(place: StatePlace) -> StatePlace:
    return place.child("groups", ".param_groups")


def _each(
    sink: Sink, place: StatePlace, optimizer: Optimizer, names: Mapping[int, str]
) -> Iterable[_Parameter]:
    unit, made = _groups_at(place).name, dict[str, torch.Tensor]()
    groups = _listed(sink.saved.groups.get(unit) if sink.saved else None)
    saved = {name: group for group in groups for name in _names(group.get("params"))}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = names[id(parameter)]
            of = place.child(fqn, f".state[{fqn}]")
            mine = saved.get(fqn, group)
            held = _held(optimizer, parameter)
            yield _Parameter(sink, of, optimizer, mine, parameter, held, unit, fqn, made)


class _Parameter(msgspec.Struct, frozen=True, eq=False):
    """Adds the optimizer state of one parameter to the leaves of a load.

    Parameters
    ----------
    group
        The saved one, or the live one where none is saved.
    made
        By name in the checkpoint what a load puts there: what was one tensor is one again.
    """

    sink: Sink
    place: StatePlace
    optimizer: Optimizer
    group: Mapping[str, Any]
    parameter: torch.Tensor
    held: Mapping[Any, Any]
    unit: str
    fqn: str
    made: dict[str, torch.Tensor]

    def add(self, key: str, saved: str | None, give: Callable[[Any], None] | None = None) -> str:
        """Add the state called `key`; return the name of its leaf.

        Parameters
        ----------
        saved
            What the checkpoint has: tensor, object, subclass.
        give
            Gets what is loaded, and no memory that the optimizer has is written to. None: it is
            loaded into what the optimizer has, or put there.
        """
        sink, place = self.sink, self.place.child(escape_key(key), f"[{key!r}]")
        live = self.held.get(key)
        put = give or partial(self._put, key)
        if saved == "object" or (saved is None and not isinstance(live, torch.Tensor)):
            value = live if give is None else None
            add_value(sink, place, value, put, kind="optim", fresh=give is not None)
            return place.name
        one = place.name if sink.saved is None else sink.saved.aliases.get(place.name, place.name)
        held = live if isinstance(live, torch.Tensor) and give is None else None
        if held is not None and self.made.setdefault(one, held) is held:
            sink.add(place, held, "optim")
            return place.name
        if one not in self.made and saved == "subclass":
            self.made[one] = self._make_wrapped(place.name, live)
        elif one not in self.made:
            self.made[one] = self._make(key, place.name, None if give is None else live)
        new = self.made[one]
        names = tuple(leaf.name for leaf in sink.add(place, new, "optim"))
        unit = self.unit if give is None else ""
        sink.leaves.pending.append(PendingState(names, partial(put, new), unit))
        return place.name if saved == "subclass" else names[0]

    def _put(self, key: str, value: Any) -> None:
        self.optimizer.state[self.parameter][key] = value

    def _order(self, key: str) -> list[int] | None:
        """Return the order of dimensions that the checkpoint says of a state."""
        orders = _noted(self.group, _ORDERS)
        order = orders.get(f"{self.fqn}.{escape_key(key)}") if isinstance(orders, Mapping) else None
        return order if isinstance(order, list) and {*map(type, order)} <= {int} else None

    def _make_wrapped(self, name: str, live: Any = None) -> torch.Tensor:
        """Return a tensor of a wrapper subclass as the checkpoint says, its parts to be filled."""
        saved = self.sink.saved
        record = saved.wrapped.get(name) if saved is not None else None
        like = self.parameter.detach()
        device = target_device(like, self.sink.device)

        def part(at: str) -> torch.Tensor:
            if saved is not None and at in saved.wrapped:
                return make_wrapped(saved.wrapped[at], lambda n: part(_below(at, n)), at)
            entry = saved.tensor(at) if saved is not None else None
            if entry is None:
                raise MismatchError("the checkpoint lacks this part of a tensor", where=at)
            shape = part_shape(record, entry[1])
            return torch.empty(shape, dtype=torch_dtype(entry[0], at), device=device)

        return make_wrapped(record, lambda n: part(_below(name, n)), name, like, live)

    def _make(self, key: str, name: str, live: Any) -> torch.Tensor:
        """Return a tensor like the `live` one, or as the optimizer's first step would make it."""
        entry = self.sink.saved.tensor(name) if self.sink.saved else None
        if entry is None:
            raise MismatchError("the checkpoint lacks this optimizer state", where=name)
        dtype, shape = torch_dtype(entry[0], name), entry[1]
        if isinstance(live, torch.Tensor) and tuple(live.shape) == shape:
            return fresh_tensor(live, dtype, shape, self.sink.device)
        like = self.parameter.detach()
        device = target_device(like, self.sink.device)
        if (order := self._order(key)) is not None and sorted(order) == [*range(len(shape))]:
            rows = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
            return rows.permute([order.index(d) for d in range(len(shape))])
        if key == "step":
            # torch keeps step counters on the host, unless the kernels read them.
            on_device = self.group.get("capturable") or self.group.get("fused")
            return torch.zeros(shape, dtype=dtype, device=device if on_device else "cpu")
        if shape == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, device=device)
        if shape == ():
            return torch.zeros((), dtype=dtype, device=device)
        return torch.empty_like(like.new_zeros(shape, dtype=dtype), device=device)


def _below(name: str, part: str) -> str:
    return f"{name}.{escape_key(part)}"


def _tensors_in(
    name: str, value: Any, once: set[int] | None = None
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors of a value, and their paths; what comes again, if `once` is no set."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) in (list, tuple) and (once is None or id(value) not in once):
        if once is not None:
            once.add(id(value))
        for i, item in enumerate(value):
            yield from _tensors_in(f"{name}.{i}", item, once)


def _check_optimizer(optimizer: Optimizer, place: StatePlace, said: _Said | None) -> None:
    inside = optimizer.optimizers if isinstance(optimizer, HostedOptimizer) else ()
    if speaking := [o for o in inside if has_own_words(o)]:
        raise UsageError(
            "the state_dict or hooks of an optimizer inside another one are not called",
            where=place.name,
            found=f"{type(speaking[0]).__name__} has a state_dict or hooks of its own",
        )
    if said is not None:
        return  # what is of no parameter is said as well
    held = {id(p) for p in _parameters(optimizer)}
    loose = [k for k in optimizer.state if id(k) not in held and holds_state(optimizer.state[k])]
    if loose:
        raise UsageError(
            "an optimizer has state that belongs to none of its parameters",
            where=place.name,
            found=f"{len(loose)} entries, the first for {loose[0]!r}"[:200],
            hint="state must be keyed by parameters of the optimizer's groups",
        )
    for entry in optimizer.state.values():
        if type(entry) is not dict and not isinstance(entry, Mapping | None):
            raise UsageError(
                "an optimizer's state of a parameter is not a dict",
                where=place.name,
                found=type(entry).__name__,
                hint='keep it under a key: optimizer.state[parameter]["name"]',
            )


def _saved_state(saved: SavedNames, name: str, fqns: set[str]) -> dict[str, dict[Any, str]]:
    """Return what the checkpoint has, by FQN and state name: tensor, object or subclass."""
    out: dict[str, dict[Any, str]] = {}
    prefix = name + "."
    below = [n for n in saved.objects if n.startswith(prefix)]
    found = dict.fromkeys(saved.tensors_below(name), "tensor")
    found |= {n: "subclass" if n in saved.wrapped else "object" for n in below}
    for full, what in found.items():
        fqn, _, key = full[len(prefix) :].rpartition(".")
        if fqn in fqns:
            out.setdefault(fqn, {})[_state_key(key)] = what
    return out


@lru_cache(4096)
def _state_key(segment: str) -> str | int:
    try:
        return unescape_key(segment)
    except CorruptError:  # a name that ckptd did not write
        return segment


# --- groups ---------------------------------------------------------------------------------------


def _groups(
    optimizer: Optimizer,
    names: Mapping[int, str],
    said: _Said | None,
    orders: Mapping[str, list[int]],
) -> list[dict[str, Any]]:
    """Return the groups for a checkpoint, with the hyperparameters that are held or said."""
    hypers: Sequence[Mapping[str, Any]] = optimizer.param_groups if said is None else said.groups
    own: dict[str, Any] = record(optimizer)
    if said is not None and said.own:
        own[_SAID] = True
    times = Counter(memory_key(t) for hyper in hypers for _, t in _tensors_of(hyper))
    numbers = {key: n for n, (key, count) in enumerate(times.items()) if count > 1}
    groups = []
    for group, hyper in zip(optimizer.param_groups, hypers, strict=True):
        fqns = [names[id(p)] for p in group["params"]]
        keys = {path: memory_key(t) for path, t in _tensors_of(hyper)} if numbers else {}
        shared = {path: numbers[key] for path, key in keys.items() if key in numbers}
        notes = dict(own)
        if shared:
            notes[_SHARED] = shared
        if ordered := {n: o for n, o in orders.items() if n.rpartition(".")[0] in fqns}:
            notes[_ORDERS] = ordered
        if (named := hyper.get(_PARAM_NAMES)) is not None:
            notes[_NAMED] = {f: n for f, n in zip(fqns, named, strict=True) if f != n}
        of = {k: v for k, v in hyper.items() if k not in _NOT_HYPER}
        groups.append({"params": sorted(fqns), **of, OPTIMIZER_CLASS: notes})
    return groups


def _options(
    live: Mapping[str, Any], group: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return what a saved group has beside its parameters, for those of the live one."""
    found = {k: v for k, v in group.items() if k not in _NOT_HYPER}
    if isinstance(named := _noted(group, _NAMED), Mapping):
        found[_PARAM_NAMES] = [named.get(f, f) for f in (names[id(p)] for p in live["params"])]
    return found


def _orders_of(
    states: Iterable[tuple[torch.Tensor, Mapping[Any, Any]]], names: Mapping[int, str]
) -> dict[str, list[int]]:
    """Return the order of dimensions in memory, outermost first, of state that has one of its own.

    It is by ``<fqn>.<state>``. What lies as its parameter does, or row by row, is not there: so it
    is made. A product of the next step may depend on the order in its last bits.
    """
    found = {}
    for parameter, entries in states:
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor) or value.dim() < 2 or is_dtensor(value):
                continue
            if value.is_contiguous() or value.stride() == parameter.stride():
                continue
            order = [d for _, d in sorted((-s, d) for d, s in enumerate(value.stride()))]
            if value.permute(order).is_contiguous():
                found[f"{names[id(parameter)]}.{escape_key(key)}"] = order
    return found


def _match_groups(
    optimizer: Optimizer, names: Mapping[int, str], where: str, saved: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair live groups with saved ones by their sets of parameters.

    A pipeline stage's groups are parts of the job's: when every live group lies inside one saved
    group, each takes that group's hyperparameters.
    """
    live = [
        (tuple(sorted([names[id(p)] for p in group["params"]])), group)
        for group in optimizer.param_groups
    ]
    try:
        left = [(tuple(sorted(group["params"])), group) for group in saved]
    except (KeyError, TypeError) as error:
        raise MismatchError("invalid optimizer groups", where=where, found=repr(error)) from error
    wanted, found = Counter(k for k, _ in live), Counter(k for k, _ in left)
    if wanted != found:
        around = [[g for k, g in left if key and {*key} <= {*k}] for key, _ in live]
        if all(len(groups) == 1 for groups in around):
            return [(own, groups[0]) for (_, own), groups in zip(live, around, strict=True)]
        raise MismatchError(
            "the optimizer's groups and the checkpoint's hold different parameters",
            where=where,
            wanted=_listing((wanted - found).elements(), "only in the live optimizer"),
            found=_listing((found - wanted).elements(), "only in the checkpoint"),
            hint="build the groups as they were when the checkpoint was saved",
        )
    of = by_key(left)
    return [(group, of[key].pop(0)) for key, group in live]


def _listing(groups: Iterable[tuple[str, ...]], where: str) -> str:
    shown = [
        f"{{{', '.join(g[:6])}{f', ... {len(g)} in all' if len(g) > 6 else ''}}}" for g in groups
    ]
    return f"{len(shown)} groups {where}: {'; '.join(shown[:8])}"


class _Hyperparameters:
    """Puts saved groups into an optimizer's.

    A tensor keeps its identity, which a captured graph or a scheduler may hold, where nothing else
    of the state lies in its memory. What was one tensor in several places is one again, and what
    was not is not, however the program came to its defaults.
    """

    def __init__(self, sink: Sink, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._sink, self._optimizer, self._names = sink, optimizer, names
        self._made: dict[int, Any] = {}
        self._gone: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            for _, tensor in _tensors_of(group):
                sink.hyper[memory_key(tensor)] += 1

    @torch.no_grad()
    def put(self, saved: Any) -> None:
        """Replace the hyperparameters."""
        pairs = _match_groups(self._optimizer, self._names, "groups", saved)
        labels = [_labels(group) for _, group in pairs]
        # What the slots of one live tensor are to hold: several things, or one.
        self._wanted: dict[Hashable, list[int | None]] = {}
        for (live, _), label in zip(pairs, labels, strict=True):
            for path, tensor in _tensors_of(live):
                self._wanted.setdefault(memory_key(tensor), []).append(label.get(path))
        for (live, group), label in zip(pairs, labels, strict=True):
            options = _options(live, group, self._names)
            # What another program wrote need not say all.
            kept = {*options, *_NOT_HYPER} if OPTIMIZER_CLASS in group else live.keys()
            self._gone.append({key: live.pop(key) for key in live.keys() - kept})
            for key, value in options.items():
                live[key] = self._fit(live.get(key), value, key, label)

    def settle(self, name: str, speaker: Any) -> None:
        """Run the load code of torch, which fills in values that were not saved, or a wrapper's."""
        whole = self._optimizer
        if speaker is not None:
            call_with(speaker.load_state_dict, name, whole.state_dict())
        elif self._gone:  # groups were put
            for one in whole.optimizers if isinstance(whole, HostedOptimizer) else (whole,):
                state = {"state": one.state, "param_groups": one.param_groups}
                call_with(one.__setstate__, name, state)
        for live, gone in zip(whole.param_groups, self._gone, strict=False):
            for key in gone.keys() & whole.defaults.keys():
                live.setdefault(key, gone[key])

    def _fit(self, live: Any, new: Any, path: str, labels: Mapping[str, int]) -> Any:
        """Return `new` in the form of `live`."""
        if isinstance(live, torch.Tensor) and _can_hold(live, new):
            label = labels.get(path)
            made = self._made.get(label) if label is not None else None
            if made is not None and _same(made[0], new):
                return made[1]
            put = self._put(live, new)
            if label is not None and made is None:
                self._made[label] = new, put
            return put
        if isinstance(live, list | tuple) and isinstance(new, list | tuple):
            if len(live) == len(new):
                pairs = enumerate(zip(live, new, strict=True))
                return type(new)(self._fit(a, b, f"{path}.{i}", labels) for i, (a, b) in pairs)
        elif isinstance(new, torch.Tensor) and live is not None and new.ndim == 0:
            return new.item()
        return new

    def _put(self, live: torch.Tensor, new: Any) -> torch.Tensor:
        is_tensor = isinstance(new, torch.Tensor)
        value = new if is_tensor else torch.as_tensor(new, dtype=live.dtype)
        key = memory_key(live)
        wanted = self._wanted.get(key, [])
        alone = len(wanted) == 1 or (None not in wanted and len({*wanted}) == 1)
        alone = alone and self._sink.hyper[key] == len(wanted) and self._sink.holder(key) is None
        if alone and (value.dtype, value.shape) == (live.dtype, live.shape):
            return live.copy_(value)
        return value.to(live.device).clone()


def _can_hold(live: torch.Tensor, new: Any) -> bool:
    """Tell whether a tensor of the live one's type holds a saved value: 1.7 is no integer."""
    if isinstance(new, torch.Tensor):
        return True
    try:
        made = torch.as_tensor(new, dtype=live.dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return made.is_floating_point() or made.is_complex() or bool(made.tolist() == new)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _tensors_of(group: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors among the hyperparameters of a group, and their paths."""
    for key, value in group.items():
        if key not in _NOT_HYPER:
            yield from _tensors_in(key, value)


def _labels(group: Mapping[str, Any]) -> dict[str, int]:
    """Return which hyperparameters of a saved group are one tensor with others; same number."""
    found = _noted(group, _SHARED)
    return {k: n for k, n in found.items() if type(n) is int} if isinstance(found, Mapping) else {}
