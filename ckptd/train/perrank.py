"""`PerRank`: a value that each rank has for itself, and what becomes of it in another world."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch

from ckptd.engine import reseed
from ckptd.errors import MismatchError, UsageError
from ckptd.format import codec

__all__ = ["DROP", "Dropped", "Gathered", "OnChange", "PerRank", "Reseed", "derive_seed"]

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
        kind ``per-rank``: unknown `on_change`, `reduce` missing or superfluous, or a value that
        cannot be reseeded.
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
                "unknown on_change",
                kind="per-rank",
                wanted=" | ".join(get_args(OnChange)),
                found=repr(on_change),
            )
        if (on_change == "reduce") != (reduce is not None):
            raise UsageError(
                'reduce= and on_change="reduce" belong together',
                kind="per-rank",
                found=f"on_change={on_change!r}, reduce={reduce!r}",
            )
        if on_change == "reseed" and not can_reseed(value):
            raise UsageError(
                "a value of this type cannot be reseeded",
                kind="per-rank",
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


@dataclass(frozen=True, slots=True)
class Reseed:
    """Stands for "draw a new seed" among the values of a load."""

    seed: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """The values of all ranks of another world, which the live declaration has to reduce."""

    values: list[Any]


def derive_seed(material: Any, rank: int, world: int) -> int:
    """Return `ckptd.engine.reseed.derive_seed` of a saved value."""
    return reseed.derive_seed(codec.encode(material, "seed"), rank, world)


def choose(
    name: str,
    on_change: OnChange,
    reduce: Callable[[list[Any]], Any] | None,
    read: Callable[[int], Any],
    saved_world: int,
    rank: int,
    world: int,
) -> Any:
    """Return what `rank` gets of a per-rank value: a value, `DROP` or a `Reseed`.

    Parameters
    ----------
    name
        The leaf's name, for errors.
    on_change, reduce
        The live declaration.
    read
        Gives the decoded value of one saved rank. Called for this rank only, unless the world
        changed.
    saved_world, rank, world
        How many ranks saved, and who is asking.

    Raises
    ------
    MismatchError
        kind ``per-rank``: the world changed and the declaration says that this is an error.
    """
    if saved_world == world:
        return _settled(name, reduce, read(rank))
    if on_change == "drop":
        return DROP
    if on_change == "error":
        raise MismatchError(
            "a per-rank value does not fit another number of ranks",
            kind="per-rank",
            where=name,
            wanted=f"{saved_world} ranks, as saved",
            found=f"{world} ranks",
            hint='declare PerRank(value, on_change="drop" | "reseed" | "reduce")',
        )
    values = [read(r) for r in range(saved_world)]
    if values and isinstance(values[0], Gathered):
        # Resharded since it was saved: every rank has the values of all that saved it.
        values = values[0].values
    if on_change == "reduce" and reduce is not None:
        return reduce(values)
    texts = {json.dumps(codec.encode(v, name), sort_keys=True) for v in values}
    if len(texts) == 1 and saved_world > 1:
        # Streams that all ranks shared (a common shuffle, tensor-parallel dropout) must not
        # drift apart because a rank more takes part.
        return values[0]
    return Reseed(derive_seed(values[0], rank, world))


def _settled(name: str, reduce: Callable[[list[Any]], Any] | None, value: Any) -> Any:
    """Return the value of a rank; one that a reshard left to be reduced is reduced now."""
    if not isinstance(value, Gathered):
        return value
    if reduce is None:
        raise MismatchError(
            "the values of several ranks are to be reduced, and nothing says how",
            kind="per-rank",
            where=name,
            wanted='PerRank(value, on_change="reduce", reduce=...)',
        )
    return reduce(value.values)


def _reseed(raw: Any) -> Reseed:
    if type(raw) is not int or not 0 <= raw < 1 << 63:
        raise ValueError("not a seed")
    return Reseed(raw)


def _gathered(raw: Any) -> Gathered:
    if not isinstance(raw, list):
        raise TypeError("not a list of values")
    return Gathered(raw)


codec.register(Reseed, name=reseed.RESEED, encode=lambda r: r.seed, decode=_reseed)
codec.register(Gathered, name=reseed.REDUCE, encode=lambda g: g.values, decode=_gathered)
codec.register(Dropped, name=reseed.DROP, encode=lambda d: None, decode=lambda raw: DROP)
