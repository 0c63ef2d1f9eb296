"""`Leaves`: tensors, objects, `PerRank` values by name; on-change rules; refused tensors.

`Leaves` is what `flatten.flatten` and `restore.prepare` return, and what saving and loading work
on; nothing beyond this package needs to know what a module or an optimizer is.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.base.torch.tensors import (
    DTYPE_NAMES,
    PLAIN,
    dtype_name,
    has_own_places,
    is_dtensor,
    is_hollow,
    is_wrapped,
    local_tensor,
)
from ckptd.checkpoint.format import codec, reseed
from ckptd.checkpoint.format.invariants import MAX_DIMS
from ckptd.checkpoint.format.names import MAX_NAME_CHARS, are_names, escape_key
from ckptd.checkpoint.torch.state.objects import call_with
from ckptd.checkpoint.torch.state.wrapped import difference, parts_of, record_of, spread
from ckptd.errors import CkptdError, MismatchError, UsageError

OnChange = Literal["error", "drop", "reseed", "reduce"]


class PerRank:
    """Declare that a value differs between ranks, and what to do when the world changes.

    Everything else in a state is either sharded (DTensors) or the same on every rank, and ckptd
    checks that. What is not, for instance a data loader's position, is wrapped::

        state = {"model": model, "data": PerRank(loader, on_change="error")}

    A load into as many ranks as saved gives each rank its own value back. A load into another
    number does what `on_change` says.

    Parameters
    ----------
    value
        A value of any savable type, a tensor, or an object with ``state_dict`` and
        ``load_state_dict``. After a load, a replaced value is at ``.value``; dicts and lists are
        changed in place.
    on_change
        ``"error"``: the load fails. ``"drop"``: the live value stays. ``"reseed"``: a new random
        seed is derived from what was saved and from the rank; for ints, ``torch.Generator``,
        `Rng` and objects with ``reseed(seed)``; values that were equal on all of several ranks
        stay equal. ``"reduce"``: every rank gets ``reduce([value of rank 0, of rank 1, ...])``.
    reduce
        The function for ``"reduce"``; for objects with ``state_dict`` it is given state dicts.

    Raises
    ------
    UsageError
        Unknown `on_change`, `reduce` missing or superfluous, or a value that cannot be reseeded.
    """

    def __init__(
        self,
        value: Any,
        on_change: OnChange = "error",
        *,
        reduce: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if on_change not in get_args(OnChange):
            raise UsageError(
                "unknown on_change", wanted=" | ".join(get_args(OnChange)), found=repr(on_change)
            )
        if (on_change == "reduce") != (reduce is not None):
            raise UsageError(
                'reduce= and on_change="reduce" belong together',
                found=f"on_change={on_change!r}, reduce={reduce!r}",
            )
        if on_change == "reseed" and not can_reseed(value):
            raise UsageError(
                "a value of this type cannot be reseeded",
                wanted="an int, a torch.Generator, ckptd.Rng, or an object with reseed(seed)",
                found=type(value).__name__,
            )
        self.value = value
        self.on_change: OnChange = on_change
        self.reduce = reduce

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, on_change={self.on_change!r})"


def can_reseed(value: Any) -> bool:
    """Return whether a new seed can be given to `value`."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | torch.Generator) or callable(getattr(value, "reseed", None))


class Dropped:
    """The type of `DROP`."""

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = Dropped()
"""Stands for "keep the live value" among the values of a load."""


class Reseed(msgspec.Struct, frozen=True):
    """Stands for "draw a new seed" among the values of a load."""

    seed: int


class Gathered(msgspec.Struct, frozen=True):
    """The values of all ranks of another world, which the live declaration has to reduce."""

    values: list[Any]


def derive_seed(material: Any, rank: int, world: int) -> int:
    """Return `ckptd.checkpoint.format.reseed.derive_seed` of a saved value."""
    return reseed.derive_seed(codec.encode(material, "seed", shared=True), rank, world)


def _settled(name: str, reduce: Callable[[list[Any]], Any] | None, value: Any) -> Any:
    """Return the value of a rank; one that a reshard left to be reduced is reduced now."""
    if not isinstance(value, Gathered):
        return value
    if reduce is None:
        raise MismatchError(
            "values of several ranks need a reduction",
            where=name,
            wanted='PerRank(value, on_change="reduce", reduce=...)',
        )
    return reduce(value.values)


def _reseed(raw: Any) -> Reseed:
    if type(raw) is not int or not 0 <= raw < 1 << 63:
        raise ValueError("invalid seed")
    return Reseed(raw)


def _gathered(raw: Any) -> Gathered:
    if not isinstance(raw, list):
        raise TypeError("invalid list of values")
    return Gathered(raw)


codec.register(Reseed, name=reseed.RESEED, encode=lambda r: r.seed, decode=_reseed)
codec.register(Gathered, name=reseed.REDUCE, encode=lambda g: g.values, decode=_gathered)
codec.register(Dropped, name=reseed.DROP, encode=lambda d: None, decode=lambda raw: DROP)


TensorKind = Literal["param", "buffer", "optim", "tensor", "ndarray"]
ObjectKind = Literal["value", "groups", "subclass"]
OwnKind = Literal["", "broadcast", "statistics"]


class StatePlace(msgspec.Struct, frozen=True):
    """Where a value stands: its `name` in checkpoints, its `path` in the program, its `section`.

    The section is the key at the top of the state.
    """

    name: str
    path: str
    section: str

    def child(self, segment: str, path: str) -> StatePlace:
        """Return the place one level down; `segment` is escaped already and may be empty."""
        name = f"{self.name}.{segment}" if segment else self.name
        return StatePlace(name, self.path + path, self.section)


class TensorLeaf(msgspec.Struct, eq=False):
    """One logical tensor.

    Attributes
    ----------
    name
        Canonical name.
    tensor
        A detached `torch.Tensor` or `DTensor` on the live memory: filling it changes the state.
        After `prepare` it may be memory of its own, which `apply_objects` puts into the state. Of a
        save, a DTensor is the live one, and may have other memory soon.
    local
        What this rank has of it, detached: it keeps its memory, whatever the program does with the
        live one, and shares its count of changes.
    section
        Key at the top of the state.
    kind
        ``param``, ``buffer``, ``optim``, ``tensor`` or ``ndarray``.
    path
        Where it stands in the program, for errors.
    aliases
        Further names of the same memory, in order of traversal. `tensor` is stored once.
    origin
        The live object that `tensor` was made from: a parameter, say.
    assign
        Where `tensor` is a copy because the live memory cannot be filled (a read-only array, an
        expanded tensor): brings it there, as memory of the live tensor. `apply_objects` calls it.
    own
        Why each rank may have values of its own, of which the lowest rank's are saved:
        ``broadcast``, DistributedDataParallel overwrites those of the others; ``statistics``, a
        norm layer has them of its rank's batches. Empty: all ranks must have the same.
    wrapped
        `tensor` is inside of `origin`, a subclass that wraps it.
    fresh
        The next save may find it in other memory: something is asked for it each time.
    """

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    section: str
    kind: TensorKind
    path: str
    origin: torch.Tensor
    aliases: tuple[str, ...] = ()
    assign: Callable[[torch.Tensor], None] | None = None
    own: OwnKind = ""
    wrapped: bool = False
    fresh: bool = False

    @property
    def dtype(self) -> str:
        """The format's name of the element type."""
        return dtype_name(self.tensor.dtype, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.tensor.shape)


Form = tuple[torch.Tensor, tuple[str, ...]]


class RecalledLeaves(MutableMapping[str, TensorLeaf]):
    """Leaves by name, each of which is made when it is first asked for.

    Parameters
    ----------
    found
        A number by name, and None for what is put there later.
    make
        Makes the leaf of a number; where there is an order, it puts the leaf's local tensor there.
    locals
        What this rank has of the tensor, by number.
    inner
        Numbers of those whose leaf says more than its local tensor: inside of another one, say.
    kept
        What keeps their memory meanwhile.
    order
        The number by name, which does not change: `places` is asked by it. None as soon as a name
        gets another leaf.
    """

    def __init__(
        self,
        found: dict[str, Any],
        make: Callable[[str, int], TensorLeaf],
        locals: list[torch.Tensor],
        inner: Collection[int],
        kept: object,
        order: Mapping[str, int | None] | None = None,
    ) -> None:
        self._found, self._make, self._locals, self._kept = found, make, locals, kept
        self._inner, self.order = inner, order

    def places(self, numbers: Iterable[int]) -> NDArray[np.uint64]:
        """Return where local tensors lie, by their numbers, those of leaves that were made too."""
        return np.array([self._locals[number].data_ptr() for number in numbers], np.uint64)

    def locals(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return the local tensor of each leaf, and make none for that."""
        found = map(self._found.__getitem__, names)
        return [self._locals[f] if type(f) is int else f.local for f in found]

    def forms(self, names: Iterable[str]) -> list[Form]:
        """See `Leaves.forms`."""
        locals, inner, found = self._locals, self._inner, [(n, self._found[n]) for n in names]
        return [
            (locals[f], ())
            if type(f) is int and f not in inner
            else ((leaf := self[n]).tensor, leaf.aliases)
            for n, f in found
        ]

    def hold(self, names: Iterable[str]) -> Sequence[str]:
        """Detach local tensors, so that they stay what they are; return which are inside others."""
        here, inner = self._locals, []
        for name in names:
            number = self._found[name]
            if type(number) is not int or number in self._inner:
                inner.append(name)
            else:
                here[number] = here[number].detach()
        return inner

    def made(self) -> list[TensorLeaf]:
        """Return the leaves that were asked for or put there."""
        return [leaf for leaf in self._found.values() if type(leaf) is TensorLeaf]

    def __getitem__(self, name: str) -> TensorLeaf:
        found: Any = self._found[name]
        if type(found) is int:
            found = self._found[name] = self._make(name, found)
        leaf: TensorLeaf = found
        return leaf

    def __setitem__(self, name: str, leaf: TensorLeaf) -> None:
        if self._found.get(name) is not None:
            self.order = None
        self._found[name] = leaf

    def __delitem__(self, name: str) -> None:
        del self._found[name]
        self.order = None

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class ObjectLeaf(msgspec.Struct):
    """One replicated value.

    Attributes
    ----------
    name
        Canonical name.
    raw
        The value as JSON data, encoded by `ckptd.checkpoint.format.codec`: a copy, later changes of
        the state do not reach it. None after `prepare`.
    section, path
        As for tensors.
    kind
        ``value``, ``groups`` for an optimizer's groups, or ``subclass`` for what wraps tensors.
    put
        Puts a decoded value into the state. Called by `apply_objects`.
    check
        Raises `MismatchError` when a decoded value does not fit; changes nothing.
    """

    name: str
    raw: Any
    section: str
    kind: ObjectKind
    path: str
    put: Callable[[Any], None]
    check: Callable[[Any], object] | None = None


class Follower(Protocol):
    """A value that needs to know which step it was saved and loaded with."""

    def saved(self, step: int) -> None:
        """Note that its value was taken for a save of `step`."""

    def loaded(self, step: int, streams: list[Any]) -> None:
        """Note that all of `step` was loaded, and the global random streams, if these were."""


class PerRankLeaf(msgspec.Struct):
    """One value of which each rank has its own; attributes as in `ObjectLeaf`.

    `on_change` and `reduce` are the declaration, `reseed` starts the value again from a seed, and
    `random` marks random streams, which are restored after everything else. `follower` is
    notified of saves and loads.
    """

    name: str
    raw: Any
    section: str
    path: str
    on_change: OnChange
    reduce: Callable[[list[Any]], Any] | None
    put: Callable[[Any], None]
    reseed: Callable[[int], None] | None
    random: bool = False
    follower: Follower | None = None

    def choose(self, read: Callable[[int], Any], *, saved_world: int, rank: int, world: int) -> Any:
        """Return what `rank` of `world` gets: a value, `DROP` or a `Reseed`.

        Parameters
        ----------
        read
            Gives the decoded value of one of the `saved_world` ranks that saved it. It is called
            for other ranks only when the world changed.

        Raises
        ------
        MismatchError
            The world changed and the declaration says that this is an error.
        """
        if saved_world == world:
            return _settled(self.name, self.reduce, read(rank))
        if self.on_change == "drop":
            return DROP
        if self.on_change == "error":
            raise MismatchError(
                "a per-rank value does not fit another number of ranks",
                where=self.name,
                wanted=f"{saved_world} ranks, as saved",
                found=f"{world} ranks",
                hint='declare PerRank(value, on_change="drop" | "reseed" | "reduce")',
            )
        values = [read(r) for r in range(saved_world)]
        if values and isinstance(values[0], Gathered):
            # Resharded since it was saved: every rank has the values of all that saved it.
            values = values[0].values
        if self.on_change == "reduce" and self.reduce is not None:
            return self.reduce(values)
        texts = {json.dumps(encode(v, self.name), sort_keys=True) for v in values}
        if len(texts) == 1 and saved_world > 1:
            # Streams that all ranks shared (a common shuffle, tensor-parallel dropout) must not
            # drift apart because a rank more takes part.
            return values[0]
        return Reseed(derive_seed(values[0], rank, world))


class PendingState(msgspec.Struct, frozen=True):
    """A change that waits for its leaf: made once when one of those called `names` was loaded.

    `unit` is the object without which the change makes no sense: the groups of the optimizer.
    """

    names: tuple[str, ...]
    change: Callable[[], None]
    unit: str = ""


class OwnPath(Protocol):
    """A way by which an object itself takes its state; see `words.LoadPath`."""

    owned: set[str]
    adopted: set[str]
    notes: list[str]

    def holds(self, name: str) -> bool:
        """Tell whether a name is below the object."""

    def converts(self, name: str) -> bool:
        """Tell whether the object may do without a name, or with another one in its place."""

    def refuse_moved(self, names: Collection[str]) -> None:
        """Raise `UsageError` where the memory of one of these names is not what is said of it."""

    def load(
        self,
        leaves: Leaves,
        filled: Collection[str],
        required: Callable[[str], bool],
        *,
        strict: bool,
    ) -> None:
        """Give the object what was read."""


class Leaves(msgspec.Struct):
    """A state, flattened: three dicts by name, in order of traversal.

    `aliases` gives the leaf's name by alias. `pending` are the changes that put prepared memory
    into the state, or take out what the checkpoint knows to be absent; `apply_objects` makes them.
    `handing` are those that give an object all that was loaded of it, by its own load.
    `optimizers` are those of the state. Two that have one `known` object have the same tensor
    leaves, in the same memory, in the same groups of the same optimizers; None tells nothing.
    `misfits` says of optimizers, by name, why a load has no leaves for them. `paths` are what
    `apply_objects` loads by, once tensors are filled.
    """

    tensors: MutableMapping[str, TensorLeaf] = msgspec.field(default_factory=dict)
    objects: dict[str, ObjectLeaf] = msgspec.field(default_factory=dict)
    per_rank: dict[str, PerRankLeaf] = msgspec.field(default_factory=dict)
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    pending: list[PendingState] = msgspec.field(default_factory=list)
    handing: list[PendingState] = msgspec.field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = msgspec.field(default_factory=list)
    known: object | None = None
    misfits: dict[str, str] = msgspec.field(default_factory=dict)
    paths: list[OwnPath] = msgspec.field(default_factory=list)

    def refuse_wrapped(self, what: str) -> None:
        """Refuse tensors that wrap others: nothing here would compare class and context.

        Parameters
        ----------
        what
            What is not done with them.

        Raises
        ------
        UsageError
            kind ``unsavable``.
        """
        found = [o for o in self.objects.values() if o.kind == "subclass"]
        if found:
            raise UsageError(
                f"tensors of wrapper subclasses are not {what}",
                kind="unsavable",
                where=found[0].name,
                found=f"{len(found)}, the first at {found[0].path}",
                hint="dequantize or leave them out; saves and loads without layout= take them",
            )

    @property
    def besides(self) -> int:
        """Number of things that a load adds besides tensors and each rank's own."""
        return sum(map(len, (self.objects, self.pending, self.handing, self.misfits, self.paths)))

    def made(self) -> Collection[TensorLeaf]:
        """Return the leaves but for those that nobody asked for, which are plain ones."""
        held = self.tensors
        return held.made() if isinstance(held, RecalledLeaves) else held.values()

    def assigned(self) -> list[TensorLeaf]:
        """Return the leaves that are copies."""
        return [leaf for leaf in self.made() if leaf.assign is not None]

    def tensor(self, name: str) -> TensorLeaf | None:
        """Return the leaf that has `name` as its name or as an alias."""
        return self.tensors.get(self.aliases.get(name, name))

    def forms(self, names: Collection[str]) -> list[Form]:
        """Return tensors that have the form of leaves, and may learn, and the leaves' aliases.

        Plain leaves of `RecalledLeaves` are not made for that.
        """
        if isinstance(held := self.tensors, RecalledLeaves):
            return held.forms(names)
        return [(leaf.tensor, leaf.aliases) for leaf in map(held.__getitem__, names)]

    def converts(self, name: str) -> bool:
        """Tell whether an object itself says whether a name is missing."""
        return any(path.converts(name) for path in self.paths)


@dataclass(frozen=True, slots=True)
class SavedNames:
    """Names that a load is going to read: after filters and renames, as in the live state.

    Attributes
    ----------
    tensors
        Dtype name and global shape by tensor name.
    objects
        Kind by object name, per-rank values not among them.
    aliases
        Tensor name by alias.
    groups
        The encoded value of each object of the kind ``groups``.
    foreign
        Whether another program wrote it: then nothing says which versions modules had.
    wrapped
        The encoded value of each object of the kind ``subclass``.
    live
        Whether it comes from a live state: then modules there have the versions of those here.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    objects: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)
    foreign: bool = False
    wrapped: Mapping[str, Any] = field(default_factory=dict)
    live: bool = False
    _sorted: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sorted", sorted({*self.tensors, *self.aliases}))

    def fits(self, other: SavedNames) -> bool:
        """Tell whether leaves for one are leaves for the other, whatever values objects have."""
        ours, theirs = (
            (s.tensors, s.objects, s.aliases, s.groups.keys(), s.wrapped, s.foreign, s.live)
            for s in (self, other)
        )
        return ours == theirs

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype name and shape of a tensor, by its name or an alias."""
        return self.tensors.get(self.aliases.get(name, name))

    def tensors_below(self, name: str) -> list[str]:
        """Return the names and aliases that begin with ``name.``."""
        # "/" follows "." and so ends what begins with the prefix.
        first = bisect.bisect_left(self._sorted, name + ".")
        return self._sorted[first : bisect.bisect_left(self._sorted, name + "/")]


def encode(value: Any, name: str, *, shared: bool = True) -> Any:
    """Return `value` as JSON data; errors carry the leaf's name."""
    try:
        return codec.encode(value, name, shared=shared)
    except UsageError as error:
        if error.where:
            raise
        # The function that encodes a registered type knows no names.
        raise CkptdError.from_dict({**error.to_dict(), "where": name}) from error


class Sink:
    """Collects the leaves of one state.

    Parameters
    ----------
    saved
        What a load is going to read; None when the leaves are for a save.
    device
        Where a load puts tensors that are on the meta device.

    Attributes
    ----------
    live
        The live tensors of all leaves and of all their aliases, but for those that are fresh.
    fresh
        The leaves that are.
    recallable
        Whether all that is not fresh may be remembered.
    said
        What modules and optimizers said that were asked before, by name.
    told
        What other objects answered, by name.
    parts, records
        Of wrapped tensors that are not fresh, what is inside by name, and what says so.
    forms
        Those of the state of optimizers, by name.
    runs
        Names, sections and tensors of `add_run`.
    sayings
        The forms of what modules say, by name, with the tensors of its `same`.
    hyper
        How many hyperparameters lie in one memory, by `memory_key`.
    """

    def __init__(self, saved: SavedNames | None = None, device: torch.device | None = None) -> None:
        self.leaves = Leaves()
        self.saved = saved
        self.device = device
        self._paths: MutableMapping[str, str] = {}
        self._by_memory: dict[tuple[Hashable, ...], TensorLeaf] = {}
        self._by_storage: dict[Hashable, str] = {}
        self._kept: list[torch.UntypedStorage] = []
        self._found: dict[str, Any] = {}
        self.runs: tuple[list[str], list[str], list[torch.Tensor]] = [], [], []
        self.live: list[torch.Tensor] = []
        self.fresh: list[TensorLeaf] = []
        self.recallable = True
        self.said: dict[str, Any] = {}
        self.told: dict[str, Any] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self.records: list[ObjectLeaf] = []
        self.forms: dict[str, Any] = {}
        self.sayings: dict[str, tuple[Any, list[torch.Tensor]]] = {}
        self._fresh = False
        self.hyper: Counter[Hashable] = Counter()

    def holder(self, key: tuple[Hashable, ...]) -> TensorLeaf | None:
        """Return the leaf that has the memory for which `memory_key` gives `key`."""
        if (name := self._by_storage.get(key[0])) is not None:
            leaf = self.leaves.tensors[name]
            self._by_memory.setdefault(memory_key(leaf.origin), leaf)
        return self._by_memory.get(key)

    def again(self, leaves: Leaves, paths: MutableMapping[str, str]) -> Sink:
        """Return one for the same that has leaves already, under names that stand at `paths`."""
        sink = Sink(self.saved, self.device)
        sink.leaves, sink._paths = leaves, paths
        sink.said, sink.told = self.said, self.told
        return sink

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Add what each save has to ask for."""
        before, self._fresh = self._fresh, True
        yield
        self._fresh = before

    def told_by(self, place: StatePlace, value: Any) -> Any:
        """Return the ``state_dict()`` of an object, which is asked once a save."""
        if place.name not in self.told:
            self.told[place.name] = call_with(value.state_dict, place.name)
        return self.told[place.name]

    def paths(self, names: Iterable[str]) -> dict[str, str]:
        """Return where names stand in the program."""
        return {name: self._paths[name] for name in names}

    def has(self, name: str) -> bool:
        """Tell whether something was added under `name`."""
        return name in self._paths

    def add(
        self,
        place: StatePlace,
        tensor: torch.Tensor,
        kind: TensorKind,
        own: OwnKind = "",
        around: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[TensorLeaf]:
        """Add a tensor as `add_tensor` does; one that wraps others as its parts and an object.

        `around` is what is done with the parts of a DTensor that it is inside of.

        Raises
        ------
        UsageError
            As `add_tensor`; kind ``unsavable``: the context of a wrapper is not plain.
        MismatchError
            The checkpoint has a tensor of another class or context there.
        """
        wraps = type(tensor) not in PLAIN and is_wrapped(tensor)
        record = record_of(tensor, place.name) if wraps else None
        saved = None if self.saved is None else self.saved.wrapped.get(place.name)
        other = saved is not None or (
            record is not None and self.saved and self.saved.tensor(place.name) is not None
        )
        if other and (found := difference(record, saved)) is not None:
            raise MismatchError(
                "a tensor has another class than in the checkpoint",
                where=place.name,
                wanted=f"{found[0]}, as the live one is",
                found=found[1],
                hint="build the live state as it was saved, for example quantize it first",
            )
        if record is None:
            whole = tensor if around is None else around(tensor)
            return [self.add_tensor(place, whole, kind, own)]
        if tensor.is_meta and self.saved is not None:
            raise bad(
                place,
                "a wrapper tensor on the meta device cannot be allocated",
                record["class"],
                "create it on a real device before the load",
            )
        said = self.add_object(place, record, put_nothing, kind="subclass")
        self.records += [] if self._fresh else [said]
        self.recallable &= self.saved is None
        leaves = []
        around = spread(tensor) if around is None else around
        for name, part in parts_of(tensor):
            at = place.child(escape_key(name), f".{name}")
            for leaf in self.add(at, part, kind, own, around):
                self.parts.setdefault(leaf.name, leaf.origin)
                leaf.origin, leaf.wrapped = tensor, True
                leaves.append(leaf)
        return leaves

    def add_tensor(
        self, place: StatePlace, tensor: torch.Tensor, kind: TensorKind, own: OwnKind = ""
    ) -> TensorLeaf:
        """Add a tensor, or an alias when its memory is a leaf already.

        Raises
        ------
        UsageError
            The name is taken or illegal, or the tensor has no plain dense memory.
        """
        self._claim(place)
        plain = type(tensor) in PLAIN
        check_tensor(place, tensor, loading=self.saved is not None)
        if not self._fresh:
            self.live.append(tensor)
        key = memory_key(tensor)
        first = self.holder(key)
        if first is not None:
            self.recallable &= first.fresh == self._fresh
            first.aliases += (place.name,)
            self.leaves.aliases[place.name] = first.name
            if (before := first.assign) is not None and tensor is not first.origin:
                # Another view of the same memory, which is to share the new one.
                first.assign = partial(_give_both, before, tensor)
            return first
        local = live = (tensor if plain else local_tensor(tensor)).detach()
        if not plain and is_dtensor(tensor):
            live = tensor if self.saved is None else tensor.detach()
        filled = live
        if (
            local.is_neg()
            or local.is_conj()
            or not (local.is_contiguous() or has_own_places(local))
        ):
            whole = live.detach().resolve_conj().resolve_neg()
            filled = whole.clone(memory_format=torch.contiguous_format)
            local = local_tensor(filled)
        leaf = TensorLeaf(
            name=place.name,
            tensor=filled,
            local=local,
            section=place.section,
            kind=kind,
            path=place.path,
            origin=tensor,
            assign=None if filled is live else partial(_give_memory, tensor),
            own=own,
            fresh=self._fresh,
        )
        self._by_memory[key] = leaf
        self.leaves.tensors[place.name] = leaf
        if self._fresh:
            self.fresh.append(leaf)
        return leaf

    def add_run(
        self, place: StatePlace, segments: Sequence[str], items: Sequence[tuple[Any, torch.Tensor]]
    ) -> bool:
        """Add plain tensors of a dict at once, as leaves that are made when they are asked for.

        Returns
        -------
        bool
            False, and none is added: not each has memory in the order of its rows, and a name and
            a storage that nothing else has.
        """
        names = [f"{place.name}.{s}" for s in segments] if place.name else [*segments]
        tensors = [tensor for _, tensor in items]
        if (self.saved and self.saved.wrapped) or not are_names(names) or not _are_usual(tensors):
            return False
        storages = [tensor.untyped_storage() for tensor in tensors]
        held = dict(zip([s._cdata for s in storages], names, strict=True))
        paths = {n: f"{place.path}[{key!r}]" for n, (key, _) in zip(names, items, strict=True)}
        known = self._by_storage.keys() | {s for s, *_ in self._by_memory}
        alone = known.isdisjoint(held) and self._paths.keys().isdisjoint(paths)
        if not alone or min(len(held), len(paths)) < len(names):
            return False
        (every, sections, live), at = self.runs, self._paths  # leaves do not hold what holds them

        def make(name: str, number: int) -> TensorLeaf:
            local = live[number].detach()
            section, path = sections[number], at[name]
            return TensorLeaf(name, local, local, section, "tensor", path, live[number])

        if not isinstance(self.leaves.tensors, RecalledLeaves):
            self._found.update(self.leaves.tensors)
            self.leaves.tensors = RecalledLeaves(self._found, make, live, (), self._kept)
        self._found.update(zip(names, range(len(live), len(live) + len(names)), strict=True))
        self._kept += storages
        every += names
        sections += [place.section] * len(names) if place.name else [key for key, _ in items]
        live += tensors
        self.live += tensors
        self._by_storage |= held
        self._paths.update(paths)
        return True

    def add_object(
        self,
        place: StatePlace,
        value: Any,
        put: Callable[[Any], None],
        *,
        kind: ObjectKind = "value",
        check: Callable[[Any], object] | None = None,
    ) -> ObjectLeaf:
        """Add a replicated value. Raises `UsageError` when it cannot be encoded or named."""
        self._claim(place)
        raw = encode(value, place.name, shared=kind == "value") if self.saved is None else None
        leaf = ObjectLeaf(place.name, raw, place.section, kind, place.path, put, check)
        self.leaves.objects[place.name] = leaf
        return leaf

    def add_per_rank(
        self,
        place: StatePlace,
        read: Callable[[], Any],
        put: Callable[[Any], None],
        *,
        on_change: OnChange,
        reduce: Callable[[list[Any]], Any] | None = None,
        reseed: Callable[[int], None] | None = None,
        random: bool = False,
        follower: Follower | None = None,
    ) -> PerRankLeaf:
        """Add a per-rank value; `read` gives it.

        Raises `UsageError` when it cannot be encoded or named.
        """
        self._claim(place)
        raw = encode(read(), place.name) if self.saved is None else None
        at = place.section, place.path
        leaf = PerRankLeaf(place.name, raw, *at, on_change, reduce, put, reseed, random, follower)
        self.leaves.per_rank[place.name] = leaf
        return leaf

    def _claim(self, place: StatePlace) -> None:
        name = place.name
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise UsageError(  # no reader would accept it
                "invalid name in a checkpoint",
                where=place.path[:200],
                wanted=f"1 to {MAX_NAME_CHARS} printable characters",
                found=f"{name[:80]!r}, {len(name)} characters",
            )
        if place.name in self._paths:
            raise twice(place.name, self._paths[place.name], place.path)
        self._paths[place.name] = place.path


def twice(name: str, one: str, other: str) -> UsageError:
    """Return the error of two values that have one name."""
    return UsageError(
        "two values of the state have one name",
        where=name,
        found=f"{one} and {other}",
        hint="rename one of the keys",
    )


def put_nothing(value: Any) -> None:
    """Put what needs no place: of a save, or equal to what is there."""


def _are_usual(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell of tensors of no subclass whether all can be saved and filled where they lie."""
    return all(
        t.layout is torch.strided
        and not (t.is_nested or t.is_meta or t.is_conj() or t.is_neg())
        and (t.dtype in DTYPE_NAMES and t.dim() <= MAX_DIMS and t.is_contiguous())
        for t in tensors
    )


def memory_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what is equal for two tensors exactly when they are one view of one memory."""
    if type(tensor) in PLAIN:
        pass
    elif is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        return (memory_key(tensor._local_tensor), tuple(tensor.shape), mesh, placements)
    elif is_wrapped(tensor):
        return (type(tensor), *((name, memory_key(part)) for name, part in parts_of(tensor)))
    # The storage object, and not its address: memory that is empty here (an uneven shard) or on
    # the meta device has no address, and ranks must agree on what is an alias.
    storage = tensor.untyped_storage()._cdata
    form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return (storage, form, tensor.is_conj(), tensor.is_neg())


def _give_both(
    first: Callable[[torch.Tensor], None], live: torch.Tensor, new: torch.Tensor
) -> None:
    first(new)
    _give_memory(live, new)


def _give_memory(live: torch.Tensor, new: torch.Tensor) -> None:
    """Give a tensor memory of its own: others may hold it, an optimizer its parameter."""
    live.data = new
    if is_dtensor(live) and is_dtensor(new):
        live._local_tensor = new._local_tensor


def check_tensor(place: StatePlace, tensor: torch.Tensor, *, loading: bool) -> None:
    """Raise `UsageError` unless `tensor` has dense memory and a dtype of the format."""
    subclass = type(tensor) not in PLAIN
    if subclass and is_lazy(tensor):
        raise bad(
            place,
            "a lazy parameter has no shape yet",
            "UninitializedParameter",
            "run one forward pass before the first save or load",
        )
    meshed = subclass and is_dtensor(tensor)
    wrapper: bool = subclass and not meshed and is_traceable_wrapper_subclass(tensor)
    if wrapper or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise bad(
            place,
            "only dense tensors and DTensors can be saved",
            f"{type(tensor).__name__}, layout {tensor.layout}",
            "save its dense tensors instead",
        )
    if subclass and not meshed and is_hollow(tensor):
        raise bad(
            place,
            "a tensor subclass without memory lacks __tensor_flatten__",
            f"{type(tensor).__module__}.{type(tensor).__qualname__}",
            "give it __tensor_flatten__ and __tensor_unflatten__, or save what it wraps",
        )
    if tensor.dim() > MAX_DIMS:
        raise bad(
            place,
            f"a tensor of more than {MAX_DIMS} dimensions",
            f"{tensor.dim()} dimensions",
            "reshape it",
        )
    dtype_name(tensor.dtype, place.name)
    if tensor.is_meta and not loading:
        raise bad(
            place,
            "a tensor on the meta device has no data to save",
            "device meta",
            "load a checkpoint or initialise the module first",
        )


def bad(place: StatePlace, message: str, found: str, hint: str) -> UsageError:
    """Return the error of a tensor that cannot be saved."""
    return UsageError(
        f"{message}: {place.path}", kind="unsavable", where=place.name, found=found, hint=hint
    )
