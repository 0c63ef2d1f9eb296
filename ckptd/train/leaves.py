"""Leaves: a training state as named tensors, objects and per-rank values.

`Leaves` is what `ckptd.train.flatten` and `ckptd.train.restore.prepare` give, and what saving and
loading work on; nothing beyond this module needs to know what a module or an optimizer is.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from ckptd.errors import UsageError
from ckptd.format import codec
from ckptd.format.names import MAX_NAME_CHARS
from ckptd.train.dtypes import dtype_name
from ckptd.train.perrank import OnChange, choose

__all__ = [
    "Follower",
    "Leaves",
    "ObjectKind",
    "ObjectLeaf",
    "OwnKind",
    "Pending",
    "PerRankLeaf",
    "Place",
    "SavedNames",
    "TensorKind",
    "TensorLeaf",
]

TensorKind = Literal["param", "buffer", "optim", "tensor", "ndarray"]
ObjectKind = Literal["value", "groups"]
OwnKind = Literal["", "broadcast", "statistics"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: its `name` in checkpoints, its `path` in the program, its `section`.

    The section is the key at the top of the state.
    """

    name: str
    path: str
    section: str

    def child(self, segment: str, path: str) -> Place:
        """Return the place one level down; `segment` is escaped already and may be empty."""
        name = f"{self.name}.{segment}" if segment else self.name
        return Place(name, self.path + path, self.section)


@dataclass(slots=True)
class TensorLeaf:
    """One logical tensor.

    Attributes
    ----------
    name
        Canonical name.
    tensor
        A detached `torch.Tensor` or `DTensor` on the live memory: filling it changes the state.
        After `prepare` it may be memory of its own, which `apply_objects` puts into the state.
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
        expanded tensor): puts a tensor in the live one's place. `apply_objects` calls it.
    own
        Why each rank may have values of its own, of which the lowest rank's are saved:
        ``broadcast``, DistributedDataParallel overwrites those of the others; ``statistics``, a
        norm layer has them of its rank's batches. Empty: all ranks must have the same.
    """

    name: str
    tensor: torch.Tensor
    section: str
    kind: TensorKind
    path: str
    origin: torch.Tensor
    aliases: tuple[str, ...] = ()
    assign: Callable[[torch.Tensor], None] | None = None
    own: OwnKind = ""

    @property
    def dtype(self) -> str:
        """The format's name of the element type."""
        return dtype_name(self.tensor.dtype, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.tensor.shape)


@dataclass(slots=True)
class ObjectLeaf:
    """One replicated value.

    Attributes
    ----------
    name
        Canonical name.
    raw
        The value as JSON data, encoded by `ckptd.format.codec`: a copy, later changes of the
        state do not reach it. None after `prepare`.
    section, path
        As for tensors.
    kind
        ``value``, or ``groups`` for an optimizer's groups.
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
    check: Callable[[Any], None] | None = None


class Follower(Protocol):
    """A value that needs to know which step it was saved and loaded with."""

    def saved(self, step: int) -> None:
        """Note that its value was taken for a save of `step`."""

    def loaded(self, step: int, *, streams: bool) -> None:
        """Note that all of `step` was loaded, and whether global random streams were."""


@dataclass(slots=True)
class PerRankLeaf:
    """One value of which each rank has its own; attributes as in `ObjectLeaf`.

    `on_change` and `reduce` are the declaration, `reseed` starts the value anew from a seed, and
    `random` tells random streams, which are restored after everything else. `follower` is told
    of saves and loads.
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
        """Return what `rank` of `world` gets: a value, `perrank.DROP` or `perrank.Reseed`.

        `read(r)` gives the decoded value that rank ``r`` of `saved_world` saved; it is called
        for other ranks only when the world changed. Raises `MismatchError` when the declaration
        is ``"error"`` and the world changed.
        """
        return choose(self.name, self.on_change, self.reduce, read, saved_world, rank, world)


@dataclass(frozen=True, slots=True)
class Pending:
    """A change that waits for its leaf: made when the leaf called `name` was loaded.

    `unit` is the object without which the change makes no sense: the groups of the optimizer.
    """

    name: str
    change: Callable[[], None]
    unit: str = ""


@dataclass(slots=True)
class Leaves:
    """A state, flattened: three dicts by name, in order of traversal.

    `aliases` gives the leaf's name by alias. `pending` are the changes that put prepared memory
    into the state, or take out what the checkpoint knows to be absent; `apply_objects` makes them.
    `optimizers` are those of the state. Two that have one `known` object have the same tensor
    leaves, in the same memory, in the same groups of the same optimizers; None tells nothing.
    `misfits` says of optimizers, by name, why a load has no leaves for them.
    """

    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    objects: dict[str, ObjectLeaf] = field(default_factory=dict)
    per_rank: dict[str, PerRankLeaf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    known: object | None = None
    misfits: dict[str, str] = field(default_factory=dict)

    def tensor(self, name: str) -> TensorLeaf | None:
        """Return the leaf that has `name` as its name or as an alias."""
        return self.tensors.get(self.aliases.get(name, name))


@dataclass(frozen=True, slots=True)
class SavedNames:
    """What a load is going to read: after filters and renames, in the live state's names.

    Attributes
    ----------
    tensors
        Dtype name and global shape by tensor name.
    objects
        Kind by object name (``value`` or ``groups``), per-rank values not among them.
    aliases
        Tensor name by alias.
    groups
        The encoded value of each object of the kind ``groups``.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    objects: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)
    _sorted: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sorted", sorted({*self.tensors, *self.aliases}))

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype name and shape of a tensor, by its name or an alias."""
        return self.tensors.get(self.aliases.get(name, name))

    def tensors_below(self, name: str) -> list[str]:
        """Return the names and aliases that begin with ``name.``."""
        # "/" follows "." and so ends what begins with the prefix.
        first = bisect.bisect_left(self._sorted, name + ".")
        last = bisect.bisect_left(self._sorted, name + "/")
        return self._sorted[first:last]


def encode(value: Any, name: str) -> Any:
    """Return `value` as JSON data; errors carry the leaf's name."""
    try:
        return codec.encode(value, name)
    except UsageError as error:
        if error.where is not None:
            raise
        # The function that encodes a registered type knows no names.
        raise UsageError(
            error.message,
            kind=error.kind,
            where=name,
            wanted=error.wanted,
            found=error.found,
            hint=error.hint,
        ) from error


def check_name(place: Place) -> None:
    """Raise `UsageError` (kind ``bad-name``) for names that no reader would accept."""
    name = place.name
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(
            "this cannot be a name in a checkpoint",
            kind="bad-name",
            where=place.path[:200],
            wanted=f"1 to {MAX_NAME_CHARS} printable characters",
            found=f"{name[:80]!r}, {len(name)} characters",
        )
