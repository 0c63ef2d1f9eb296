"""Modules with a ``state_dict`` or hooks of their own: when these are run, notes of versions."""

from __future__ import annotations

import functools
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ckptd.base.torch.tensors import dtype_name, is_wrapped, torch_dtype
from ckptd.checkpoint.format.names import escape_fqn, unescape_fqn
from ckptd.checkpoint.torch.state.leaves import (
    Leaves,
    SavedNames,
    Sink,
    StatePlace,
    TensorKind,
    memory_key,
    put_nothing,
)
from ckptd.checkpoint.torch.state.objects import call_with
from ckptd.checkpoint.torch.state.values import add_value, fresh_tensor, whole
from ckptd.errors import CkptdError, UsageError

NOTE = "_own_state"
"""The last segment of the name of what `ModuleWords.notes` gives."""


def is_note(name: str) -> bool:
    """Tell whether a name is that of a note."""
    return name.rpartition(".")[2] == NOTE


# What is defined here says and takes parameters and buffers as they are, or under other keys.
_PLAIN = frozenset(
    {
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.nn.modules.batchnorm",
        "torch.nn.modules.instancenorm",
        "torch.nn.modules.lazy",
        "torch.nn.modules.module",
        "torch.nn.utils.parametrizations",
        "torch.nn.utils.spectral_norm",
    }
)
_UNSAID = "_checkpoint_wrapped_module."  # the wrapper's hooks take it out of keys


class ModulePlace(NamedTuple):
    """A module, the prefix that torch gives its keys, and the canonical one of its names."""

    raw: str
    prefix: str
    module: nn.Module


# --- code of user modules -------------------------------------------------------------------------


def _is_own(function: Any) -> bool:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "with_module"):  # torch's wrapper around a hook
            function = function.hook
        else:
            # `functools.wraps` gives a function the module of another, and not its globals.
            where = getattr(function, "__globals__", {}).get("__name__")
            named = getattr(function, "__module__", None)
            return named not in _PLAIN or (where is not None and where not in _PLAIN)


_SAYING = ("state_dict", "_save_to_state_dict")
_SAYING_NAMES = (*_SAYING, "_version")
_SAYING_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_TAKING = ("_load_from_state_dict",)
_TAKING_HOOKS = ("_load_state_dict_pre_hooks",)
_FOLLOWING_HOOKS = ("_load_state_dict_post_hooks",)


def _of_kinds(kinds: Iterable[type], names: Iterable[str]) -> bool:
    return any(_is_own(getattr(kind, n, None)) for kind in kinds for n in names)


def _of_itself(module: nn.Module, names: Iterable[str], hooks: Iterable[str]) -> bool:
    own = module.__dict__
    if not own.keys().isdisjoint(names):
        return True
    held = [hook for name in hooks for hook in (own.get(name) or {}).values()]
    return any(map(_is_own, held))


def speaking_kinds(kinds: Iterable[type[nn.Module]]) -> set[type]:
    """Return those of some classes that are asked at each save: code of their own, extra state."""
    torchs = nn.Module.get_extra_state
    return {k for k in kinds if _of_kinds((k,), _SAYING) or k.get_extra_state is not torchs}


def says(module: nn.Module) -> bool:
    """Tell whether a module itself, without its class, has such code; its children aside."""
    own = module.__dict__
    # Each save asks this of all modules.
    if own.get("_state_dict_hooks") or own.get("_state_dict_pre_hooks"):
        return _of_itself(module, _SAYING_NAMES, _SAYING_HOOKS)
    return not own.keys().isdisjoint(_SAYING_NAMES)


def _takes(module: nn.Module) -> bool:
    """Tell whether a module has code of its own that sees the values before they are copied."""
    return _of_itself(module, _TAKING, _TAKING_HOOKS) or _of_kinds((type(module),), _TAKING)


def _takes_all(top: nn.Module) -> bool:
    names = ("load_state_dict",)
    return _of_itself(top, names, ()) or _of_kinds((type(top),), names)


def has_code(top: nn.Module, placed: Iterable[ModulePlace]) -> bool:
    """Tell whether anything in a module has code of its own that a load is to run."""
    modules = [p.module for p in placed]
    names, hooks = (*_SAYING, *_TAKING), (*_SAYING_HOOKS, *_TAKING_HOOKS, *_FOLLOWING_HOOKS)
    return (
        _takes_all(top)
        or _of_kinds({*map(type, modules)}, names)
        or any(_of_itself(m, (*names, "_version"), hooks) for m in modules)
    )


def _usual_version(module: nn.Module) -> Any:
    """Return the version that a checkpoint need not have: torch's own, or the first."""
    owner = next(k for k in type(module).__mro__ if "_version" in vars(k))
    torchs = owner.__module__.partition(".")[0] == "torch"
    return vars(owner)["_version"] if torchs else nn.Module._version


def said_versions(placed: Iterable[ModulePlace]) -> dict[str, dict[str, Any]]:
    """Return notes, by prefix, of modules whose version is not the usual one."""
    return {
        p.prefix: {"metadata": {"version": p.module._version}}
        for p in placed
        if p.module._version != 1 and p.module._version != _usual_version(p.module)
    }


# --- what is said ---------------------------------------------------------------------------------


def ask(place: StatePlace, top: nn.Module) -> Mapping[str, Any]:
    """Return what a module says of itself.

    Raises
    ------
    UsageError
        It raised, or is no mapping of names.
    """
    try:
        said: object = top.state_dict()
    except CkptdError:
        raise
    except Exception as error:
        message = "a module's own state_dict() failed"
        raise _refused(place, ModulePlace("", "", top), message, repr(error)[:500]) from error
    if not isinstance(said, Mapping) or {*map(type, said)} - {str}:
        message = "a module's own state_dict() must be a dict with strings as keys"
        raise _refused(place, ModulePlace("", "", top), message, "")
    return said


def _refused(place: StatePlace, by: ModulePlace, message: str, found: str) -> UsageError:
    kind = type(by.module).__name__
    return UsageError(
        message,
        where=place.child(escape_fqn(by.prefix.removesuffix(".")), "").name,
        found=f"{kind}: {found}" if found else kind,
        hint="module.load_state_dict(module.state_dict()) must take it; or give the module "
        "get_extra_state() and set_extra_state()",
    )


class ModuleWords:
    """Present answer of a module's ``state_dict()``.

    Parameters
    ----------
    said
        Its answer, where it was asked already.

    Attributes
    ----------
    values
        By name, below the module's place. Tensors are the memory that the module named.
    keys
        The module's own key of each name.

    Raises
    ------
    UsageError
        As of `ask`.
    """

    def __init__(
        self,
        place: StatePlace,
        top: nn.Module,
        placed: list[ModulePlace],
        said: Mapping[str, Any] | None = None,
    ) -> None:
        self._place, self._top = place, top
        self.said = ask(place, top) if said is None else said
        self._placed = placed
        self._prefixes: dict[str, str] = {}
        self._raws: dict[str, str] = {}
        for p in placed:
            raw = p.raw.replace(_UNSAID, "")
            self._prefixes.setdefault(p.raw, p.prefix)
            self._prefixes.setdefault(raw, p.prefix)
            self._raws[escape_fqn(p.prefix)] = raw  # the innermost of wrappers comes last
        self.values: dict[str, Any] = {}
        self.keys: dict[str, str] = {}
        for key, value in self.said.items():
            name = escape_fqn("".join(_headed(self._prefixes, key) or ("", key)))
            if name in self.keys:
                message = "a module's own state_dict() has two values for one name"
                found = f"{self.keys[name]} and {key}"
                raise _refused(place, ModulePlace("", "", top), message, found)
            self.values[name], self.keys[name] = value, key

    @functools.cached_property
    def speaking(self) -> dict[str, ModulePlace]:
        """The modules that have code of their own in it, by prefix."""
        return {
            p.prefix: p
            for p in self._placed
            if says(p.module) or _of_kinds((type(p.module),), _SAYING)
        }

    @functools.cached_property
    def _takers(self) -> list[tuple[nn.Module, Callable[[nn.Module], bool]]]:
        found = [(p.module, _takes) for p in self._placed if _takes(p.module)]
        return found + [(self._top, _takes_all)] * _takes_all(self._top)

    @functools.cached_property
    def _taking(self) -> tuple[str, ...]:
        taking = {escape_fqn(p.prefix) for p in self._placed if _takes(p.module)}
        return (*taking, "") if _takes_all(self._top) else tuple(taking)

    def takes(self, name: str) -> bool:
        """Tell whether code of a module's own sees a name before torch does, as it is loaded."""
        return name.startswith(self._taking)

    def key(self, name: str) -> str:
        """Return the module's own key of a name, said or not."""
        if name in self.keys:
            return self.keys[name]
        raw, rest = _headed(self._raws, name) or ("", name)
        return raw + unescape_fqn(rest)

    def saying(
        self,
        same: Sequence[str],
        own: Mapping[str, tuple[StatePlace, TensorKind | None]],
        words: Collection[str],
        unsaid: Collection[str],
    ) -> Saying:
        """Return the form of what is said.

        Each module with code of its own has a note there of what a load must know besides the
        values, so that ranks whose modules say different things disagree on it.

        Parameters
        ----------
        same
            Names of parameters and buffers whose memory it says.
        own
            What it says besides, by name.
        words
            Those names that are no extra state and that it says instead of a tensor's memory.
        unsaid
            Names of the parameters and buffers that it does not say.
        """
        notes: dict[str, dict[str, Any]] = {p: {"words": [], "unsaid": []} for p in self.speaking}
        for what, names in (("words", words), ("unsaid", unsaid)):
            for name in sorted(names):
                if (speaker := self._speaker(name)) is not None:
                    notes[speaker.prefix][what].append(name)
        inner = {p.prefix: p.raw for p in self._placed}
        return Saying(
            [*self.said],
            [self.keys[n] for n in same],
            {self.keys[n]: where for n, where in own.items()},
            notes,
            [(weakref.ref(m), takes) for m, takes in self._takers if own],
            {
                p.raw[:-1]: (
                    p.prefix if inner[p.prefix] == p.raw else None,
                    {"version": _usual_version(p.module)},
                )
                for p in self._placed
            },
        )

    def _speaker(self, name: str) -> ModulePlace | None:
        """Return the module that says a name: the nearest with code of its own, or the first."""
        nearest = sorted(self.speaking.values(), key=lambda p: -len(p.prefix))
        of = (p for p in nearest if name.startswith(escape_fqn(p.prefix)))
        return next(of, nearest[-1] if nearest else None)

    def check_taken(self, words: Collection[str]) -> None:
        """Raise where nothing takes one of `words` when the module is loaded.

        A name of a note is taken for one.
        """
        lost = sorted(name for name in words if is_note(name) or not self.takes(name))
        if lost:
            by = self._speaker(lost[0]) or ModulePlace("", "", self._top)
            names = ", ".join(n.removeprefix(escape_fqn(by.prefix)) for n in lost[:8])
            message = "a module's load_state_dict() does not accept what its state_dict() returns"
            raise _refused(self._place, by, message, names)


def _headed(heads: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """Return the value of the longest known head of a name, and the rest of the name."""
    at = len(name)
    while at > 0:
        at = name.rfind(".", 0, at)
        if (found := heads.get(name[: at + 1])) is not None:
            return found, name[at + 1 :]
    return None


class Saying(msgspec.Struct, frozen=True):
    """The form of what a module says, and no value of it.

    Attributes
    ----------
    keys
        All of its keys, in order; None where it is not asked.
    same
        Those that say the memory of a parameter or buffer.
    own
        Of the others where they are in the state, and the kind of their tensors: None for an extra
        state.
    notes
        By prefix of the module that says them; of what is asked, without metadata.
    usual
        By torch's key of a module: the prefix of its note, which has what is written beside the
        version, and the metadata that needs no note. What wraps another has no prefix.
    """

    keys: list[str] | None = None
    same: list[str] = []
    own: dict[str, tuple[StatePlace, TensorKind | None]] = {}
    notes: dict[str, dict[str, Any]] = {}
    takers: list[tuple[weakref.ref[nn.Module], Callable[[nn.Module], bool]]] = []
    usual: dict[str, tuple[str | None, dict[str, Any]]] = {}

    @property
    def asks(self) -> bool:
        """Whether the module is asked at each save."""
        return self.keys is not None

    def fits(self, said: Mapping[str, Any], slots: Sequence[torch.Tensor]) -> bool:
        """Tell whether a module says the same now.

        Parameters
        ----------
        said
            Its answer.
        slots
            What it holds now in the places of `same`.
        """
        return (
            list(said) == self.keys
            and _are_same_memory([said[k] for k in self.same], slots)
            and all((m := taker()) is not None and takes(m) for taker, takes in self.takers)
        )

    def add(self, sink: Sink, place: StatePlace, said: Mapping[str, Any]) -> None:
        """Add what is said besides the memory of parameters and buffers, and the notes."""
        with sink.afresh():
            for key, (at, kind) in self.own.items():
                value = said[key]
                if kind is None:
                    sink.add_object(at, whole(value, at), put_nothing)
                elif isinstance(value, torch.Tensor):
                    sink.add_tensor(at, value, kind)
                else:
                    add_value(sink, at, value, put_nothing, kind=kind)
        for prefix, note in self._noted(said).items():
            add_note(sink, place, prefix, note)

    def _noted(self, said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the notes with all metadata that is not the usual one, of whatever module."""
        if not self.asks:
            return self.notes
        notes: dict[str, dict[str, Any]]
        notes = {prefix: {**note, "metadata": None} for prefix, note in self.notes.items()}
        if (metadata := getattr(said, "_metadata", None)) is None:
            return notes
        besides = {}
        for raw, found in {**{key: {} for key in self.usual}, **metadata}.items():
            prefix, usual = self.usual.get(raw, (None, None))
            if prefix in notes or found != usual:
                if prefix is None:
                    besides[raw] = dict(found)
                else:
                    notes.setdefault(prefix, {})["metadata"] = dict(found)
        if besides:
            notes.setdefault("", {})["besides"] = besides
        return notes


def is_same_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Tell whether a value is a tensor on the very memory of `tensor`, seen in the same way.

    Memory that cannot be compared is taken to be the same: it cannot be saved in either case.
    """
    if not isinstance(value, torch.Tensor):
        return False
    try:
        return memory_key(value) == memory_key(tensor)
    except (RuntimeError, NotImplementedError, ValueError):
        return type(value) is type(tensor)


def _are_same_memory(values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether `is_same_memory` is true of all pairs."""
    try:
        # Thousands, at each save.
        same = all(map(torch.Tensor.is_set_to, values, tensors))
        of = torch.Tensor.is_neg, torch.Tensor.is_conj
        bits = all([*map(f, values)] == [*map(f, tensors)] for f in of)
        if same and bits and [v.dtype for v in values] == [t.dtype for t in tensors]:
            return True
    except (RuntimeError, NotImplementedError, TypeError):
        pass  # others than plain tensors are among them
    return all(map(is_same_memory, values, tensors))


def add_note(
    sink: Sink, place: StatePlace, prefix: str, note: Any, put: Callable[[Any], None] | None = None
) -> None:
    """Add a note of `ModuleWords.notes`, or the place of one in a load."""
    fqn = escape_fqn(prefix) + NOTE
    sink.add_object(place.child(fqn, f".{fqn}"), note, put or put_nothing)


# --- loading --------------------------------------------------------------------------------------


class LoadPath:
    """The way by which a module takes a state: its own ``load_state_dict``, run over what was read.

    Parameters and buffers are filled where they lie, and the module is given these very tensors:
    copying one over itself costs nothing. Below a module with code of its own that sees the values
    they are read beside what is live: that code may compare the two, change what it is given, or
    leave it out.

    Attributes
    ----------
    said
        What the module says before the load.
    owned
        Names of the objects that are kept for the module.
    notes
        Those of them that say what a load must know besides the values.
    adopted
        Names of leaves that are of the checkpoint alone.
    """

    def __init__(
        self, place: StatePlace, module: nn.Module, placed: list[ModulePlace], saved: SavedNames
    ) -> None:
        self._place, self._module, self._placed, self._saved = place, module, placed, saved
        self.said = ModuleWords(place, module, placed)
        self.owned: set[str] = set()
        self.notes: list[str] = []
        self.adopted: set[str] = set()
        self._start = f"{place.name}."
        self._names: dict[str, str] = {}
        self._raw: dict[str, torch.Tensor] = {}
        self._apart: set[str] = set()
        self._beside: dict[Hashable, torch.Tensor] = {}
        self._stored: dict[str, Any] = {}
        self._notes: dict[str, dict[str, Any]] = {}

    def holds(self, name: str) -> bool:
        """Tell whether a name is below the module."""
        return name.startswith(self._start)

    def converts(self, name: str) -> bool:
        """Tell whether code of a module's own sees this name before torch does, present or not."""
        return self.holds(name) and self.said.takes(name[len(self._start) :])

    def refuse_moved(self, names: Collection[str]) -> None:
        """See `ckptd.checkpoint.torch.state.leaves.OwnPath`."""
        start = len(self._start)
        for name, tensor in self._raw.items():
            word = self.said.values.get(name[start:], tensor)
            if name in names and not is_same_memory(word, tensor):
                raise UsageError(
                    "a module's state_dict() returns another value than a tensor's memory holds",
                    where=name,
                    found=type(self._module).__name__,
                    hint="a live move copies the memory: save and load, or publish; or move "
                    "dict(module.named_parameters())",
                )

    # -- leaves ----------------------------------------------------------------------------------

    def add_slot(
        self,
        sink: Sink,
        at: StatePlace,
        fqn: str,
        tensor: torch.Tensor,
        kind: TensorKind,
        add: Callable[[], object],
    ) -> None:
        """Add a parameter or buffer: by `add`, where nothing has to be read beside it."""
        word = self.said.values.get(fqn)
        self._name(fqn, at)
        self._raw[at.name] = tensor
        form = self._saved.tensor(at.name)
        other = self.converts(at.name) or (
            isinstance(word, torch.Tensor)
            and _form(word) == form
            and not is_same_memory(word, tensor)
        )
        fits = form == _form(tensor) or (form is None and at.name not in self._saved.objects)
        if not fits and other and not tensor.is_meta:
            self._add(sink, at, word, kind)
        elif (
            form is not None
            and self.converts(at.name)
            and not (tensor.is_meta or is_wrapped(tensor))
        ):
            # What is one tensor here is given as one, as torch would have it.
            key = memory_key(tensor)
            if key not in self._beside:
                self._beside[key] = fresh_tensor(
                    tensor, torch_dtype(form[0], at.name), form[1], sink.device
                )
            sink.add_tensor(at, self._beside[key], kind)
            self._apart.add(at.name)
        else:
            add()

    def add_word(self, sink: Sink, at: StatePlace, fqn: str, kind: TensorKind) -> None:
        """Add what the module says besides."""
        self._name(fqn, at)
        self._add(sink, at, self.said.values[fqn], kind)

    def add_object(self, sink: Sink, at: StatePlace, fqn: str) -> None:
        """Add a value that is saved as one object."""
        self._name(fqn, at)
        self.owned.add(at.name)
        sink.add_object(at, None, partial(self._stored.__setitem__, at.name))

    def add_note(self, sink: Sink, prefix: str, raw: str) -> None:
        """Add the note of a module."""
        name = self._place.child(escape_fqn(prefix) + NOTE, "").name
        self.owned.add(name)
        self.notes.append(name)
        add_note(sink, self._place, prefix, None, partial(self._notes.__setitem__, raw))

    def adopt(self, sink: Sink, kind: TensorKind) -> None:
        """Add what was saved under names that are not known here, and that the module may know."""
        start, known = len(self._start), {*sink.leaves.tensors, *sink.leaves.objects}
        for name in self._saved.objects:
            if self.converts(name) and self._saved.objects[name] == "value" and not sink.has(name):
                fqn = name[start:]
                last = fqn.rpartition(".")[2]
                if last == NOTE:
                    prefix = unescape_fqn(fqn.removesuffix(NOTE))
                    self.add_note(sink, prefix, self.said.key(fqn).removesuffix(NOTE))
                    continue
                at = self._place.child(fqn, f" -> {name}")
                self._name(fqn, at)
                self._add(sink, at, None, kind)
        for name in self._saved.tensors_below(self._place.name):
            if self.converts(name) and not sink.has(name):
                at = self._place.child(name[start:], f" -> {name}")
                self._name(name[start:], at)
                self._add(sink, at, None, kind)
        self.adopted = {*sink.leaves.tensors, *sink.leaves.objects} - known

    def _name(self, fqn: str, at: StatePlace) -> None:
        self._names[self.said.key(fqn)] = at.name

    def _add(self, sink: Sink, at: StatePlace, live: Any, kind: TensorKind) -> None:
        name, form = at.name, self._saved.tensor(at.name)
        tensor = live if isinstance(live, torch.Tensor) else None
        if name in self._saved.objects or (form is None and tensor is None):
            self.owned.add(name)
            value = live if name in self._saved.objects else None
            add_value(
                sink, at, value, partial(self._stored.__setitem__, name), kind=kind, fresh=True
            )
            return
        mine = form is None or tensor is None or _form(tensor) == form
        if tensor is not None and mine and (form is None or sink.holder(memory_key(tensor))):
            sink.add_tensor(at, tensor, kind)
            return
        dtype, shape = form or _form(live)
        new = fresh_tensor(tensor, torch_dtype(dtype, name), shape, sink.device)
        sink.add_tensor(at, new, kind)
        self._apart.add(name)

    # -- the load itself ---------------------------------------------------------------------------

    def load(
        self, leaves: Leaves, filled: Collection[str], required: Callable[[str], bool], strict: bool
    ) -> None:
        """Give the module what was read; nothing where nothing was.

        Parameters
        ----------
        filled
            Names of the tensor leaves that were filled.
        required
            Names that must have been read. Of the others the module gets what it has.
        strict
            As for ``load_state_dict``.

        Raises
        ------
        UsageError
            It raised.
        """
        start = len(self._start)
        unsaid = {n for note in self._notes.values() for n in note.get("unsaid", ())}
        given: dict[str, Any] = {} if type(self.said.said) is dict else OrderedDict()
        silent: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What was not read stays, whatever code makes of it.
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        read: dict[str, str] = {}
        value: Any
        order = {key: at for at, key in enumerate(self.said.said)}
        for key, name in sorted(self._names.items(), key=lambda n: order.get(n[0], len(order))):
            leaf = leaves.tensor(name)
            if leaf is not None and leaf.name in filled and self._has(name):
                read[key] = name
                apart = name in self._apart
                value = leaf.tensor if apart else self._copied(name, leaf.origin)
            elif name in self._stored:
                read[key] = name
                value = self._stored[name]
            elif required(name):
                continue
            else:
                value = self._raw.get(name)
                if self.converts(name):
                    if value is not None:
                        kept.append((value, value.detach().clone()))
                    value = self.said.values.get(name[start:], value)
                elif value is None:
                    value = self.said.values.get(name[start:])
                if value is None:
                    continue
                value = self._copied(name, value) if isinstance(value, torch.Tensor) else value
            if name[start:] not in unsaid:
                given[key] = value
            elif name in self._apart and name in self._raw:
                silent.append((self._raw[name], value))
        if not read:
            return
        new = {memory_key(self._raw[n]) for n in read.values() if n in self._raw} if kept else {}
        metadata = self._metadata(read)
        if metadata is not None and isinstance(given, OrderedDict):
            vars(given)["_metadata"] = metadata

        def take(given: Any) -> None:
            with torch.no_grad():
                for live, value in silent:
                    live.copy_(value)
            self._module.load_state_dict(given, **({} if strict else {"strict": False}))
            with torch.no_grad():
                for live, value in kept:
                    if live.shape == value.shape and memory_key(live) not in new:
                        live.copy_(value)

        call_with(take, self._place.name, given)

    def _has(self, name: str) -> bool:
        """Tell whether a name that is filled, maybe as another one's alias, is the source's too.

        Of names of one parameter, files of others may have one alone.
        """
        saved = self._saved
        tied = name in self._raw and (saved.foreign or not self.converts(name))
        return saved.live or tied or name in saved.aliases or name in saved.tensors

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if self.converts(name) else tensor

    def _metadata(self, read: Collection[str]) -> Mapping[str, Any] | None:
        """Return what torch would have in the file: versions, and what hooks wrote beside them.

        A module of which no key was read is given what it has, and that is of its own version.
        """
        if self._saved.live:
            return getattr(self.said.said, "_metadata", None)
        notes = {raw: note["metadata"] for raw, note in self._notes.items() if "metadata" in note}
        besides = [note["besides"] for note in self._notes.values() if "besides" in note]
        if self._saved.foreign or any(m is None for m in notes.values()):
            return None
        heads = {key[: at + 1] for key in read for at, c in enumerate(key) if c == "."} | {""}
        usual = {
            p.raw: {"version": _usual_version(p.module) if p.raw in heads else p.module._version}
            for p in self._placed
        }
        known = {raw[:-1]: found for raw, found in {**usual, **notes}.items()}
        return OrderedDict(ChainMap(*besides, known))


def _form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return dtype_name(tensor.dtype), tuple(tensor.shape)
